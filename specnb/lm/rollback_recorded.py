"""The ways back that need an engine's own record of what it did last: snapshots, and activation replay."""

from typing import Protocol

from specnb.lm.rollback import Checkpoint, Engine, Saved


class Recorder(Protocol):
    """An engine's own way back over the tokens fed last."""

    spans_forwards: bool
    """Whether it reaches back over several forwards, or into the last one only."""

    depth: int
    """Tokens it can take back at most."""

    base: Saved | None
    """The state it began with, where it spans forwards and is recording."""

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
        self._kept_border = False

    @property
    def nbytes(self) -> int:
        return super().nbytes + self._recorder.nbytes

    def _prepare(self, n: int) -> None:
        if self._engine.held:
            (self._record if self._recorder.spans_forwards else self._cover)(n)
        self._forwards += 1

    def _record(self, n: int) -> None:
        """Record the next `n` tokens too, from the border on; no more than `depth` of them are ever kept."""
        if self._at_border:
            self._recorder.begin()
            self._at_border, self._kept_border = False, False
        if self._recorder.base and self._recorder.reach + n > self._recorder.depth:
            if not self._kept_border:  # the way back to the border is now to feed again from there
                self._saved, self._kept_border = self._recorder.base, True
                self.cost.n_saved += 1
            if n <= self._recorder.depth:
                self._recorder.begin()
            else:
                self._recorder.stop()

    def _cover(self, n: int) -> None:
        """Save a state that the next `n` tokens would take out of reach.

        That is the border, for a block wider than the recorder is deep. After a first forward it is that forward's
        end, from where single steps go on: the border itself is gone, and behind it everything is fed again.
        """
        if self._at_border and (self._forwards or n > self._recorder.depth + 1):
            self._save()

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
