"""Rollback strategies: how a model's state returns to an earlier token, exactly, one strategy a class.

A KV cache forgets its last n entries by being cropped. A recurrent state is one tensor that every token overwrites,
so going back must be paid for, in bytes, in forwards, or in both (figures: notebook 04):

    crop         attention only: drop entries
    snapshots    the state after every position since the border; going back is a choice among them
    replay       the state at the border, and what entered the recurrence since (Snakes and Ladders, ENLSP 2024):
                 going back runs the accepted tokens through the recurrence alone, no forward
    fused        one state; after going back, the accepted tokens ride along in the next forward, without logits
    checkpoint   one state; going back feeds the accepted tokens in a forward of their own (llama.cpp, PR 20080)
    recompute    nothing kept: everything is fed again. The oracle of the others, and what they do beyond their reach

The *border* is where the caller last called `rewind` (of 0 tokens too): speculative decoding rewinds once a round,
so that what lies before the border is true, and what is fed behind it may be taken back. Every strategy goes back
any number of tokens; beyond what it kept it feeds the tokens again from the start, which `Cost` counts.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Annotated, Literal, Protocol

import numpy as np
from pydantic import Field

from specnb.errors import EngineError, InputError, LoadError, MemoryShortError, RewindError, SpecnbError
from specnb.lm.base import LanguageModel, check_forward, check_rewind
from specnb.lm.probe import probe_rewind
from specnb.machine import ThreadPace

AUTO = "auto"
"""Let a probe choose."""

DEPTH = 32
"""Tokens that recorders reach back over, unless another depth is asked for."""

SETTLE_AT = 3
"""Tokens that a fused replay carries along at most: in every round's forward they soon cost more than one of their own,
with a row at r = T(n + 1)/T(1) - T(n)/T(1) after about sqrt(2 / r) of them (3 at r = 0.2)."""


class Saved(Protocol):
    """The recurrent part of a state after `n_tokens` tokens, `nbytes` large; attention entries stay where they are."""

    n_tokens: int
    nbytes: int


class Engine(Protocol):
    """A state of `n_held` tokens that knows no rollback.

    `feed` appends ids and returns the logits `(rows, vocab)` of the last of them. `keep` drops the attention entries
    behind the first n tokens, however far a layer got, and leaves recurrent states as they are; it returns False
    where that cannot be done. `restore` drops the tokens since `saved`.
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
    """An engine's own rollback over the tokens fed last: at most `depth`, and `reach` of them at this moment.

    Where it `spans_forwards` it reaches back over several, and `base` is the state that it began with; else it reaches
    into the last forward only. `nbytes` are kept at this moment.
    """

    spans_forwards = False
    depth: int
    reach: int
    base: Saved | None = None
    nbytes: int

    def begin(self) -> None:
        """Record from here on."""

    def take_back(self, n: int) -> None:
        """Undo the last `n` tokens."""
        raise NotImplementedError

    def stop(self) -> None:
        """Forget what was recorded."""

    def uninstall(self) -> None:
        """Leave the engine as it was."""


@dataclass
class RewindCost:
    """The cost of going back since the last reset: calls of `save` and `restore`, then tokens."""

    n_saved: int = 0
    n_restored: int = 0
    refed: int = 0  # in forwards of their own
    fused: int = 0  # as rows of a forward that was due anyway
    recomputed: int = 0  # from the start
    taken_back: int = 0  # without any forward


class Rollback:
    """Base of all, and `crop`: drop the entries of the last tokens, which is exact where every layer is attention.

    Forwards pass through; `n_past` counts tokens as the caller knows them.
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
        """Bytes kept for going back, at this moment."""
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
        """Leave the engine as it was."""


class Recompute(Rollback):
    """Feed everything again. Needs nothing, costs a prefill a round."""

    kind = "recompute"

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self._tokens: list[int] = []

    @property
    def n_past(self):
        return len(self._tokens)

    def forward(self, ids, rows):
        self._prepare(len(ids))
        pending = self._tokens[self._engine.n_held :]  # only a fused replay leaves any
        logits = self._engine.feed([*pending, *ids], rows)
        self._tokens.extend(ids)
        return logits

    def _prepare(self, n: int) -> None:
        """Whatever must be kept before the next `n` tokens are fed."""

    def rewind(self, n):
        if n:
            keep = len(self._tokens) - n
            self._return_to(keep)
            del self._tokens[keep:]

    def _return_to(self, keep: int) -> None:
        self._restore(keep)
        self._feed_again(keep)

    def _restore(self, keep: int) -> None:
        """Return to the latest state at or before the first `keep` tokens: none at all."""
        self._engine.clear()

    def _feed_again(self, keep: int) -> None:
        """Bring the engine from what it holds to the first `keep` tokens."""
        if (n_held := self._engine.n_held) == keep:
            return
        self._engine.feed(self._tokens[n_held:keep], 0)
        if n_held:
            self.cost.refed += keep - n_held
        else:
            self.cost.recomputed += keep

    def reset(self):
        super().reset()
        self._tokens.clear()


class Checkpoint(Recompute):
    """One state, saved at the border; going back restores it and feeds the accepted tokens again, separately."""

    kind = "checkpoint"

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self._saved: Saved | None = None
        self._at_border = True

    @property
    def nbytes(self):
        return self._saved.nbytes if self._saved else 0

    def _prepare(self, n):
        if self._at_border and self._engine.n_held:  # the first forward ever can go back by clearing
            self._save()

    def _save(self) -> None:
        self._at_border = False
        if self._saved is None or self._saved.n_tokens != self._engine.n_held:
            self._saved = self._engine.save()
            self.cost.n_saved += 1

    def rewind(self, n):
        super().rewind(n)
        self._at_border = True

    def _restore(self, keep):
        if self._saved and self._saved.n_tokens <= keep:
            self._engine.restore(self._saved)
            self.cost.n_restored += 1
        else:
            self._saved = None
            super()._restore(keep)

    def reset(self):
        super().reset()
        self._saved, self._at_border = None, True


class FusedReplay(Checkpoint):
    """Restore, and let the accepted tokens ride along: [accepted, correction, new drafts] are ONE forward.

    More than SETTLE_AT tokens behind the saved state are fed by themselves once, and a new state is saved.
    """

    kind = "fused"

    def _prepare(self, n):
        pending = len(self._tokens) - self._engine.n_held
        if 0 < pending <= SETTLE_AT:  # the saved state is where the engine stands: it stays
            self._at_border = False
            self.cost.fused += pending
        else:
            self._feed_again(len(self._tokens))
            super()._prepare(n)

    def _return_to(self, keep):
        if keep < self._engine.n_held:  # else only tokens that were not fed yet are given up
            self._restore(keep)


class Recorded(Checkpoint):
    """`snapshots` and `replay`: the engine's recorder within its reach, beyond it the saved state or the start."""

    def __init__(self, engine: Engine, recorder: Recorder, kind: str) -> None:
        super().__init__(engine)
        self.kind = kind
        self._recorder = recorder
        self._forwards = 0  # since the border

    @property
    def nbytes(self):
        return super().nbytes + self._recorder.nbytes

    def _prepare(self, n):
        if self._engine.n_held:
            (self._record if self._recorder.spans_forwards else self._cover)(n)
        self._forwards += 1

    def _record(self, n: int) -> None:
        """Record the next `n` tokens too, from the border on; more than `depth` go back as from a checkpoint there."""
        recorder = self._recorder
        if self._at_border:
            recorder.begin()
            self._at_border = False
        if recorder.base and recorder.reach + n > recorder.depth:
            self._saved = recorder.base
            self.cost.n_saved += 1
            recorder.stop()

    def _cover(self, n: int) -> None:
        """Save a state that the next `n` tokens would take out of reach: the border, for a block wider than `depth`.

        After a first forward it is that forward's end: the border itself is gone, behind it everything is fed again.
        """
        if self._at_border and (self._forwards or n > self._recorder.depth + 1):
            self._save()

    def rewind(self, n):
        super().rewind(n)
        self._forwards = 0

    def _return_to(self, keep):
        n = self._engine.n_held - keep
        if n <= self._recorder.reach:
            self._recorder.take_back(n)
            self.cost.taken_back += n
            if self._saved and self._saved.n_tokens > keep:
                self._saved = None
        else:
            self._recorder.stop()
            super()._return_to(keep)

    def reset(self):
        super().reset()
        self._recorder.stop()
        self._forwards = 0

    def close(self):
        self._recorder.uninstall()


STRATEGIES = {strategy.kind: strategy for strategy in (Rollback, Checkpoint, FusedReplay, Recompute)}
RollbackKind = Literal["auto", "replay", "snapshots", "crop", "checkpoint", "fused", "recompute"]
RollbackDepth = Annotated[int, Field(ge=1, le=256)]


class RewindableModel(LanguageModel):
    """Shared part of both engines' models: the state lies in an `_engine` (None once closed), behind a `Rollback`."""

    rollback: Rollback
    """How the state goes back, and what that has cost."""
    preferred: Sequence[str]
    """Strategies for recurrent models, the first to be tried first."""
    pace: ThreadPace | None = None
    """Lets the number of threads follow the free cores; None for a number that the user chose, and on a GPU."""

    def _follow_cores(self, counts: Sequence[int], apply: Callable[[int], None], *, any_time: bool) -> None:
        """Let the threads follow the free cores among `counts`; `caps.details` say how, and the fewest of this text."""
        if len(counts) == 1:
            return
        when = "within a text" if any_time else "between texts"
        followed = {"thread_counts": counts, "threads_change": when, "fewest_threads": counts[-1]}
        details = {**self.caps.details, **followed}
        self.caps = replace(self.caps, details=details)

        def follow(n: int) -> None:
            apply(n)
            details["fewest_threads"] = min(n, details["fewest_threads"])

        self.pace = ThreadPace(counts, follow, any_time=any_time)

    def _choose_rollback(
        self,
        recorders: Mapping[str, Callable[[], Recorder]],
        kind: str,
        afford: Callable[[str], None] = lambda _name: None,
    ) -> None:
        """Go back by the strategy `kind`, or with "auto" by the first of `preferred` that a probe finds exact.

        A model that can crop need not be probed. `recorders` open what a strategy records with, or raise InputError
        where the family or the engine has none; `afford(name)` raises MemoryShortError where there is no room for what
        it keeps. Raises InputError (not for this model), MemoryShortError, LoadError (a probe found it inexact).
        """
        engine, reason = self._engine, self.caps.rewind_reason
        if kind == AUTO and not reason:
            self.rollback = Rollback(engine)
            return
        if kind == "crop" and reason:
            raise InputError(f"rollback=crop is not for {self.name}: {reason}")
        refused = []
        for name in self.preferred if kind == AUTO else (kind,):
            with ExitStack() as undo:
                try:
                    recorded = name in recorders
                    self.rollback = Recorded(engine, recorders[name](), name) if recorded else STRATEGIES[name](engine)
                    undo.callback(self.rollback.close)
                    if probe_rewind(self):
                        afford(name)
                        undo.pop_all()
                        return
                    refused.append(f"{name} does not bring back the state that was")
                except (InputError, MemoryShortError) as error:
                    if kind != AUTO:
                        raise
                    refused.append(str(error))
                except Exception as error:  # of a family, or a release of an engine, that does things otherwise
                    refused.append(f"{name} fails: {error}")
            self.reset()
        raise LoadError(f"{self.name} has no exact way back: {'; '.join(refused)}. Try rollback=recompute")

    def _require_open(self) -> None:
        if self._engine is None:
            raise InputError(f"{self.name} was closed: load it again")

    @contextmanager
    def _restore_on_error(self, n: int) -> Iterator[None]:
        """Return to the first `n` tokens when the block fails or is interrupted, or to none if it cannot be cropped.

        Some layers may have come further than others by then. An engine's own failure becomes an EngineError.
        """
        try:
            yield
        except BaseException as error:
            if self.rollback.kind != "crop" or not self._engine.keep(n):
                self.rollback.reset()
            if isinstance(error, SpecnbError) or not isinstance(error, Exception):
                raise
            raise EngineError(f"{self.caps.engine} failed with {self.name} at position {n}: {error}") from error

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
            self.caps.details["fewest_threads"] = self.pace.threads
