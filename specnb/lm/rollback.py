"""Rollback strategies: restore a model's exact state after an earlier token.

A KV cache is rolled back by cropping its last n entries. A recurrent state is one tensor that every
token overwrites, so rollback costs memory, forward passes, or both (measured in notebook 04):

    crop         attention only: drop entries
    snapshots    save the state after every token since the boundary; rollback selects one
    replay       save the state at the boundary and the inputs of the recurrence since (Snakes and
                 Ladders, ENLSP 2024); rollback runs only the recurrence over the accepted tokens
    fused        save one state; the next forward pass repeats the accepted tokens, without logits
    checkpoint   save one state; rollback processes the accepted tokens in a separate forward pass
                 (llama.cpp, PR 20080)
    recompute    save nothing; process everything again. The reference and fallback for the others

The *boundary* is the position of the last call of `rewind` (also of 0 tokens). Speculative decoding
calls it once per round, so tokens before the boundary are final and tokens after it may be rolled
back. Every strategy can roll back any number of tokens; before its earliest saved state, it
processes the tokens again from the start, which `RewindCost` counts.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Protocol

import numpy as np
from pydantic import Field

from specnb.errors import (
    EngineError,
    InputError,
    LoadError,
    MemoryShortError,
    RewindError,
    SpecnbError,
)
from specnb.lm.base import LanguageModel, check_forward, check_rewind
from specnb.lm.probe import probe_rewind
from specnb.machine import ThreadPace

AUTO = "auto"
"""Let a probe select the strategy."""

DEPTH = 32
"""Default number of tokens that recorders can roll back."""

SETTLE_AT = 3
"""Maximum number of pending tokens that a fused replay adds to a forward pass. If a row costs
r = T(n + 1)/T(1) - T(n)/T(1), more than about sqrt(2 / r) of them (3 at r = 0.2) cost more than one
separate pass."""


class Saved(Protocol):
    """A copy of the recurrent part of a state of `n_tokens` tokens, without attention entries."""

    n_tokens: int
    nbytes: int


class Engine(Protocol):
    """An engine with a state of `n_held` tokens and no rollback strategy.

    `feed` appends ids and returns the logits `(rows, vocab)` of the last of them. `keep` drops the
    attention entries after the first n tokens, in every layer, and does not touch recurrent states;
    it returns False if the engine cannot do that. `restore` drops the tokens since `saved`.
    """

    n_held: int

    def feed(self, ids: Sequence[int], rows: int) -> np.ndarray: ...

    def keep(self, n: int) -> bool: ...

    def crop(self, n: int) -> None:
        """Drop the last `n` tokens, as `keep` does."""
        if not self.keep(self.n_held - n):
            raise RewindError(f"the engine refused to remove the last {n} of {self.n_held} tokens")

    def save(self) -> Saved: ...

    def restore(self, saved: Saved) -> None: ...

    def clear(self) -> None: ...


class Recorder:
    """An engine's own rollback of up to `depth` tokens, at present `reach`, using `nbytes` bytes.

    If `spans_forwards`, it covers several forward passes, and `base` is the state before the first
    of them. If not, it covers only the last forward pass.
    """

    spans_forwards = False
    depth: int
    reach: int
    base: Saved | None = None
    nbytes: int

    def begin(self) -> None:
        """Start recording."""

    def take_back(self, n: int) -> None:
        """Roll back the last `n` tokens."""
        raise NotImplementedError

    def stop(self) -> None:
        """Stop recording and discard the recorded data."""

    def uninstall(self) -> None:
        """Restore the engine's original functions."""


@dataclass
class RewindCost:
    """Rollback cost since the last reset: checkpoints saved and restored, then tokens."""

    n_saved: int = 0
    n_restored: int = 0
    refed: int = 0  # processed again in separate forward passes
    fused: int = 0  # processed again as extra rows of the next forward pass
    recomputed: int = 0  # processed again from the start
    taken_back: int = 0  # rolled back without a forward pass


class Rollback:
    """Base class, and the strategy `crop`: drop the last entries, exact for attention layers.

    `n_past` counts the tokens that the caller sees.
    """

    kind = "crop"

    def __init__(self, engine: Engine) -> None:
        self.cost = RewindCost()
        self._engine = engine

    @property
    def n_past(self) -> int:
        return self._engine.n_held

    @property
    def nbytes(self) -> int:
        """Bytes currently used for rollback."""
        return 0

    def forward(self, ids: Sequence[int], rows: int) -> np.ndarray:
        return self._engine.feed(ids, rows)

    def rewind(self, n: int) -> None:
        if n:
            self._engine.crop(n)

    def reset(self) -> None:
        self.cost = RewindCost()
        self._engine.clear()

    def close(self) -> None:
        """Restore the engine's original functions."""


class Recompute(Rollback):
    """Process all tokens again. Uses no memory and costs one prefill per round."""

    kind = "recompute"

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self._tokens: list[int] = []

    @property
    def n_past(self):
        return len(self._tokens)

    def forward(self, ids, rows):
        self._prepare(len(ids))
        pending = self._tokens[self._engine.n_held :]  # only FusedReplay leaves any
        logits = self._engine.feed([*pending, *ids], rows)
        self._tokens.extend(ids)
        return logits

    def _prepare(self, n: int) -> None:
        """Prepare for a rollback of the next `n` tokens."""

    def rewind(self, n):
        if n:
            n_kept = len(self._tokens) - n
            self._return_to(n_kept)
            del self._tokens[n_kept:]

    def _return_to(self, n_kept: int) -> None:
        self._restore(n_kept)
        self._feed_again(n_kept)

    def _restore(self, n_kept: int) -> None:
        """Return to the latest saved state of at most `n_kept` tokens: here, the empty state."""
        self._engine.clear()

    def _feed_again(self, n_kept: int) -> None:
        """Process tokens until the engine holds the first `n_kept`."""
        if (n_held := self._engine.n_held) == n_kept:
            return
        self._engine.feed(self._tokens[n_held:n_kept], 0)
        if n_held:
            self.cost.refed += n_kept - n_held
        else:
            self.cost.recomputed += n_kept

    def reset(self):
        super().reset()
        self._tokens.clear()


class Checkpoint(Recompute):
    """Save one state at the boundary; restore it and process the accepted tokens again."""

    kind = "checkpoint"

    _saved: Saved | None = None
    _at_boundary = True

    @property
    def nbytes(self):
        return self._saved.nbytes if self._saved else 0

    def _prepare(self, n):
        if self._at_boundary and self._engine.n_held:  # an empty state needs no copy
            self._save()

    def _save(self) -> None:
        self._at_boundary = False
        if self._saved is None or self._saved.n_tokens != self._engine.n_held:
            self._saved = self._engine.save()
            self.cost.n_saved += 1

    def rewind(self, n):
        super().rewind(n)
        self._at_boundary = True

    def _restore(self, n_kept):
        if self._saved and self._saved.n_tokens <= n_kept:
            self._engine.restore(self._saved)
            self.cost.n_restored += 1
        else:
            self._saved = None
            super()._restore(n_kept)

    def reset(self):
        super().reset()
        self._saved = None
        self._at_boundary = True


class FusedReplay(Checkpoint):
    """Restore, then process [accepted tokens, correction, new draft] in ONE forward pass.

    If more than SETTLE_AT tokens follow the saved state, process them alone and save a new state.
    """

    kind = "fused"

    def _prepare(self, n):
        pending = len(self._tokens) - self._engine.n_held
        if 0 < pending <= SETTLE_AT:  # the saved state is still the engine's current state
            self._at_boundary = False
            self.cost.fused += pending
        else:
            self._feed_again(len(self._tokens))
            super()._prepare(n)

    def _return_to(self, n_kept):
        if n_kept < self._engine.n_held:  # pending tokens need no rollback
            self._restore(n_kept)


class Recorded(Checkpoint):
    """`snapshots` and `replay`: use the engine's recorder within its reach, else a checkpoint."""

    def __init__(self, engine: Engine, recorder: Recorder, kind: str) -> None:
        super().__init__(engine)
        self.kind = kind
        self._recorder = recorder
        self._n_passes = 0  # forward passes since the boundary

    @property
    def nbytes(self):
        return super().nbytes + self._recorder.nbytes

    def _prepare(self, n):
        if self._engine.n_held:
            if self._recorder.spans_forwards:
                self._record(n)
            # Save the state before `n` tokens move it out of the recorder's reach. After the first
            # pass, that is no longer the state at the boundary.
            elif self._at_boundary and (self._n_passes or n > self._recorder.depth + 1):
                self._save()
        self._n_passes += 1

    def _record(self, n: int) -> None:
        """Record the next `n` tokens, or use a checkpoint if they exceed the recorder's depth."""
        recorder = self._recorder
        if self._at_boundary:
            recorder.begin()
            self._at_boundary = False
        if recorder.base and recorder.reach + n > recorder.depth:
            self._saved = recorder.base
            self.cost.n_saved += 1
            recorder.stop()

    def rewind(self, n):
        super().rewind(n)
        self._n_passes = 0

    def _return_to(self, n_kept):
        n = self._engine.n_held - n_kept
        if n <= self._recorder.reach:
            self._recorder.take_back(n)
            self.cost.taken_back += n
            if self._saved and self._saved.n_tokens > n_kept:
                self._saved = None
        else:
            self._recorder.stop()
            super()._return_to(n_kept)

    def reset(self):
        super().reset()
        self._recorder.stop()
        self._n_passes = 0

    def close(self):
        self._recorder.uninstall()


STRATEGIES = {
    strategy.kind: strategy for strategy in (Rollback, Checkpoint, FusedReplay, Recompute)
}
RollbackKind = Literal["auto", "replay", "snapshots", "crop", "checkpoint", "fused", "recompute"]
RollbackDepth = Annotated[int, Field(ge=1, le=256)]


class RewindableModel(LanguageModel):
    """Base class of both engines' models. `_engine` holds the state (None after `close`)."""

    rollback: Rollback
    """The rollback strategy and its cost so far."""
    preferred: Sequence[str]
    """Strategies for recurrent models, in the order in which they are tried."""
    pace: ThreadPace | None = None
    """Adapts the number of threads to the free cores; None if there is only one candidate."""

    def _follow_cores(self, counts: Sequence[int], *, any_time: bool) -> None:
        """Let the thread count follow the free cores, within `counts`; report in `caps.details`."""
        if len(counts) == 1:
            return
        when = "within a text" if any_time else "between texts"
        self.caps.details.update(thread_counts=counts, threads_change=when)
        self.pace = ThreadPace(counts, self._engine.set_threads, any_time=any_time)

    def _choose_rollback(
        self,
        recorders: Mapping[str, Callable[[], Recorder]],
        kind: str,
        afford: Callable[[str], None] = lambda _name: None,
    ) -> None:
        """Select the strategy `kind`; with "auto", the first of `preferred` that a probe accepts.

        With "auto", a model that can crop is not probed. `recorders` create a strategy's recorder,
        or raise InputError if the family or the engine has none; `afford(name)` raises
        MemoryShortError if memory is short. Raises InputError (strategy not supported),
        MemoryShortError, LoadError (the probe failed).
        """
        engine = self._engine
        reason = self.caps.rewind_reason
        if kind == AUTO and not reason:
            self.rollback = Rollback(engine)
            return
        if kind == "crop" and reason:
            raise InputError(f"rollback=crop is not for {self.name}: {reason}; use rollback=auto")
        refused = []
        for name in self.preferred if kind == AUTO else (kind,):
            with ExitStack() as undo:
                try:
                    if name in recorders:
                        self.rollback = Recorded(engine, recorders[name](), name)
                    else:
                        self.rollback = STRATEGIES[name](engine)
                    undo.callback(self.rollback.close)
                    if probe_rewind(self):
                        afford(name)
                        undo.pop_all()
                        return
                    refused.append(f"{name} does not restore the earlier state")
                except Exception as error:  # any class: unknown families, new engine releases
                    if kind != AUTO and isinstance(error, InputError | MemoryShortError):
                        raise
                    refused.append(f"{name} fails: {error}")
            self.reset()
        raise LoadError(
            f"{self.name} has no exact rollback: {'; '.join(refused)}. Try rollback=recompute"
        )

    def _require_open(self) -> Any:
        """Return the engine. Raises InputError if the model was closed."""
        if self._engine is None:
            raise InputError(f"{self.name} was closed: load it again")
        return self._engine

    @contextmanager
    def _restore_on_error(self, n: int) -> Iterator[None]:
        """If the block fails, crop the state to the first `n` tokens; without `crop`, reset it.

        Layers may have processed different numbers of tokens. Exceptions other than SpecnbError
        become EngineError.
        """
        try:
            yield
        except BaseException as error:
            engine = self._engine
            rollback = self.rollback
            closed = engine is None or rollback is None  # by another thread
            if not closed and (rollback.kind != "crop" or not engine.keep(n)):
                rollback.reset()
            if isinstance(error, SpecnbError) or not isinstance(error, Exception):
                raise
            raise EngineError(
                f"{self.caps.engine} failed with {self.name} at position {n}: {error}"
            ) from error

    @property
    def n_past(self):
        self._require_open()
        return self.rollback.n_past

    def forward(self, ids, n_logits=None):
        rows = check_forward(self, ids, n_logits)
        if self.pace:
            self.pace.step()
        with self._restore_on_error(self.n_past):
            return self.rollback.forward(ids, rows)

    def rewind(self, n):
        check_rewind(self, n)
        with self._restore_on_error(self.n_past):
            self.rollback.rewind(n)

    def reset(self):
        self._require_open()
        self.rollback.reset()
        self.unsettled = None
        if self.pace:
            self.pace.begin()
