"""The ways back that need an engine's own record of what it did last: snapshots, and activation replay."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from specnb.lm.rollback import Checkpoint, Engine, Recompute


class Recorder(Protocol):
    """An engine's own way back over the tokens fed last."""

    spans_forwards: bool
    """Whether it reaches back over several forwards, or into the last one only."""

    depth: int
    """Tokens it can take back at most."""

    reach: int
    """Tokens that can be taken back now."""

    nbytes: int

    def begin(self) -> None:
        """Record from here on; what was fed before is out of reach."""
        ...

    def take_back(self, n: int) -> None:
        """Undo the last `n` tokens, at most `reach`; the engine's `held` sinks."""
        ...

    def stop(self) -> None:
        """Forget what was recorded; nothing is recorded until `begin`."""
        ...

    def uninstall(self) -> None: ...


class _Recorded(Checkpoint):
    """Goes back by the engine's recorder within its reach, and by the saved state or from the start beyond."""

    def __init__(self, engine: Engine, recorder: Recorder) -> None:
        super().__init__(engine)
        self._recorder = recorder
        self._forwards = 0  # since the border

    @property
    def nbytes(self) -> int:
        return super().nbytes + self._recorder.nbytes

    def forward(self, ids: Sequence[int], rows: int) -> np.ndarray:
        if self._engine.held:
            if self._recorder.spans_forwards:
                if self._at_border or self._recorder.reach >= self._recorder.depth:
                    self._recorder.begin()
                    self._at_border = False
            elif self._at_border and (self._forwards or len(ids) > self._recorder.depth + 1):
                self._save()  # the border is about to get out of the recorder's reach
        self._forwards += 1
        return Recompute.forward(self, ids, rows)

    def rewind(self, n: int) -> None:
        super().rewind(n)
        self._forwards = 0

    def _return_to(self, keep: int) -> None:
        n = self._engine.held - keep
        if n <= self._recorder.reach:
            self._recorder.take_back(n)
            self.cost.taken_back += n
            if self._saved and self._saved.n_tokens > keep:
                self._saved = None
        else:
            self._recorder.stop()
            super()._return_to(keep)

    def reset(self) -> None:
        super().reset()
        self._recorder.stop()
        self._forwards = 0

    def close(self) -> None:
        self._recorder.uninstall()


class Snapshots(_Recorded):
    """The state after every position: llama.cpp's `n_rs_seq` planes, or what the torch layers passed through."""

    kind = "snapshots"


class ActivationReplay(_Recorded):
    """The state at the border and the inputs of the recurrence since; accepted ones are run through it again."""

    kind = "replay"
