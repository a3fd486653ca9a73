"""The ways back: how a model's state returns to an earlier token, exactly, one strategy a class.

A KV cache forgets its last n entries by being cropped. A recurrent state is one tensor that every token overwrites,
so the way back must be paid for, in bytes, in forwards, or in both (figures: notebook 04):

    crop         attention only: drop entries
    snapshots    the state after every position since the border; going back is a choice among them
    replay       the state at the border, and what entered the recurrence since (Snakes and Ladders, ENLSP 2024):
                 going back runs the accepted tokens through the recurrence alone, no forward
    fused        one state; after going back, the accepted tokens ride along in the next forward, without logits
    checkpoint   one state; going back feeds the accepted tokens in a forward of their own (llama.cpp, PR 20080)
    recompute    nothing kept: everything is fed again. The oracle of the others, and the way back beyond their reach

The *border* is where the caller last called `rewind` (of 0 tokens too): speculative decoding rewinds once a round,
so that what lies before the border is true, and what is fed behind it may be taken back. Every strategy goes back
any number of tokens; beyond what it kept it feeds the tokens again from the start, which `Cost` counts.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np

from specnb.errors import InputError, did_you_mean

AUTO = "auto"
"""Let a probe choose."""

DEPTH = 32
"""Tokens that recorders reach back over, unless another depth is asked for."""

MAX_DEPTH = 256

SETTLE_AT = 3
"""Tokens that a fused replay carries along at most. As rows of every round's forward they soon cost more than a forward
of their own: with a row at r = T(n + 1)/T(1) - T(n)/T(1), after about sqrt(2 / r) of them (3 at r = 0.2)."""


class Saved(Protocol):
    """The recurrent part of a state after `n_tokens` tokens, `nbytes` large; attention entries stay where they are."""

    n_tokens: int
    nbytes: int


class Engine(Protocol):
    """What the strategies ask of an engine: a state of `held` tokens, without any way back of its own."""

    held: int

    def feed(self, ids: Sequence[int], rows: int) -> np.ndarray:
        """Append `ids`; logits `(rows, vocab)` of the last of them."""
        ...

    def crop(self, n: int) -> None:
        """Drop the attention entries of the last `n` tokens; `held` sinks. Recurrent states are left as they are."""
        ...

    def save(self) -> Saved: ...

    def restore(self, saved: Saved) -> None:
        """The state of `saved` again; the tokens since are dropped."""
        ...

    def clear(self) -> None: ...


@dataclass
class Cost:
    """What going back has cost since the last reset. Tokens, but for the first two, which count calls."""

    n_saved: int = 0
    n_restored: int = 0
    refed: int = 0
    """Fed again in a forward of their own."""
    fused: int = 0
    """Fed again as rows of a forward that was due anyway."""
    recomputed: int = 0
    """Fed again from the start."""
    taken_back: int = 0
    """Undone without any forward."""


class Rollback:
    """Base of all: forwards pass through, `rewind` goes back. `n_past` counts tokens as the caller knows them."""

    kind: ClassVar[str]

    def __init__(self, engine: Engine) -> None:
        self.cost = Cost()
        self._engine = engine

    @property
    def n_past(self) -> int:
        return self._engine.held

    @property
    def nbytes(self) -> int:
        """Bytes kept for the way back, at this moment."""
        return 0

    def forward(self, ids: Sequence[int], rows: int) -> np.ndarray:
        return self._engine.feed(ids, rows)

    def rewind(self, n: int) -> None:
        raise NotImplementedError

    def reset(self) -> None:
        self.cost = Cost()
        self._engine.clear()

    def close(self) -> None:
        """Leave the engine as it was."""


class Crop(Rollback):
    """Drop the entries of the last tokens: exact where every layer is attention."""

    kind = "crop"

    def rewind(self, n: int) -> None:
        if n:
            self._engine.crop(n)


class Recompute(Rollback):
    """Feed everything again. Needs nothing, costs a prefill a round."""

    kind = "recompute"

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self._tokens: list[int] = []

    @property
    def n_past(self) -> int:
        return len(self._tokens)

    def forward(self, ids: Sequence[int], rows: int) -> np.ndarray:
        self._prepare(len(ids))
        pending = self._tokens[self._engine.held :]  # only a fused replay leaves any
        logits = self._engine.feed([*pending, *ids], rows)
        self._tokens.extend(ids)
        return logits

    def _prepare(self, n: int) -> None:
        """Whatever must be kept before the next `n` tokens are fed."""

    def rewind(self, n: int) -> None:
        if n:
            keep = len(self._tokens) - n
            self._return_to(keep)
            del self._tokens[keep:]

    def _return_to(self, keep: int) -> None:
        self._engine.clear()
        self._feed_again(keep)

    def _feed_again(self, keep: int) -> None:
        """Bring the engine from what it holds to the first `keep` tokens."""
        held = self._engine.held
        if held == keep:
            return
        self._engine.feed(self._tokens[held:keep], 0)
        if held:
            self.cost.refed += keep - held
        else:
            self.cost.recomputed += keep

    def reset(self) -> None:
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
    def nbytes(self) -> int:
        return self._saved.nbytes if self._saved else 0

    def _prepare(self, n: int) -> None:
        if self._at_border and self._engine.held:  # the first forward ever can go back by clearing
            self._save()

    def _save(self) -> None:
        self._at_border = False
        if self._saved is None or self._saved.n_tokens != self._engine.held:
            self._saved = self._engine.save()
            self.cost.n_saved += 1

    def rewind(self, n: int) -> None:
        super().rewind(n)
        self._at_border = True

    def _return_to(self, keep: int) -> None:
        self._restore(keep)
        self._feed_again(keep)

    def _restore(self, keep: int) -> None:
        """The latest state at or before the first `keep` tokens: the saved one, or none at all."""
        if self._saved is None or self._saved.n_tokens > keep:
            self._saved = None
            self._engine.clear()
            return
        self._engine.restore(self._saved)
        self.cost.n_restored += 1

    def reset(self) -> None:
        super().reset()
        self._saved, self._at_border = None, True


class FusedReplay(Checkpoint):
    """Restore, and let the accepted tokens ride along: [accepted, correction, new drafts] are ONE forward.

    While drafts keep being rejected the saved state stays and the tokens behind it grow; from `settle_at` of them on
    they are fed by themselves once, and a new state is saved.
    """

    kind = "fused"

    def __init__(self, engine: Engine, settle_at: int = SETTLE_AT) -> None:
        super().__init__(engine)
        self._settle_at = settle_at

    def _prepare(self, n: int) -> None:
        pending = len(self._tokens) - self._engine.held
        if 0 < pending <= self._settle_at:  # the saved state is where the engine stands: it stays the way back
            self._at_border = False
            self.cost.fused += pending
            return
        self._feed_again(len(self._tokens))
        super()._prepare(n)

    def _return_to(self, keep: int) -> None:
        if keep < self._engine.held:  # else only tokens that were not fed yet are given up
            self._restore(keep)


def check_options(kind: str, depth: int, known: Iterable[str]) -> None:
    """Refuse an unknown way back, or a depth that records nothing."""
    known = (AUTO, *known)
    if kind not in known:
        raise InputError(f"unknown rollback {kind!r}; {did_you_mean(str(kind), known)}known: {', '.join(known)}")
    if not isinstance(depth, int) or not 1 <= depth <= MAX_DEPTH:
        raise InputError(f"rollback_depth is {depth}: it must be 1 to {MAX_DEPTH}")
