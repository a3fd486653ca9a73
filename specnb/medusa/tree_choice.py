"""How large a tree pays: the most expected tokens a second, from accuracies and costs that somebody else measured.

More nodes always promise more tokens, so a tree chosen by tokens is as large as it may be, also where verifying it
takes longer than it saves. Sequoia (Chen et al. 2402.12374) chooses the size by hardware as well.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from specnb.errors import InputError
from specnb.medusa.tree import TreePlan, checked_accuracy, grow

SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 63)


class Candidate(NamedTuple):
    """A plan, the tokens a round is expected to commit with it, and what the round takes; no nodes: plain decoding."""

    plan: TreePlan
    tokens: float
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


class Choice(NamedTuple):
    """The candidate with the most tokens a second, and all of them, by size; the first of these has no nodes."""

    best: Candidate
    table: tuple[Candidate, ...]

    @property
    def plan(self) -> TreePlan:
        """Empty where plain decoding is expected to be the fastest."""
        return self.best.plan

    @property
    def tokens(self) -> float:
        """Expected tokens a round, the extra token included."""
        return self.best.tokens

    @property
    def tokens_per_s(self) -> float:
        return self.best.tokens_per_s

    @property
    def speedup(self) -> float:
        """Expected tokens a second over those of plain decoding."""
        return self.best.tokens_per_s / self.table[0].tokens_per_s


def choose(
    accuracy: np.ndarray,
    seconds: Callable[[int], float],
    draft_s: float | Callable[[int], float] = 0.0,
    sizes: Iterable[int] = SIZES,
) -> Choice:
    """The tree for heads of marginal `accuracy (heads, ranks)` (see `draft.tree_plan.grow`).

    `seconds(n)` is T(n), of a target forward of n tokens: a tree of n nodes takes T(n + 1). `draft_s` are seconds of
    drafting a round, or a function of the tree's depth: Hydra drafts level by level, so that a shallower tree may
    win. Plain decoding, 1 token in T(1), is always among the candidates. Raises InputError for costs that are none.
    """
    table = checked_accuracy(accuracy)
    cost = draft_s if callable(draft_s) else lambda _depth: draft_s
    plain = Candidate(TreePlan((), ()), 1.0, _positive(seconds(1), 1))
    found = [plain]
    for size in sorted(set(sizes) - {0}):
        grown = (grow(table[:depth], size) for depth in range(1, len(table) + 1))
        timed = [Candidate(plan, tokens, _round_s(plan, seconds, cost)) for plan, tokens in grown if len(plan)]
        if timed:
            found.append(max(timed, key=lambda c: c.tokens_per_s))
    return Choice(max(found, key=lambda c: c.tokens_per_s), tuple(found))


def _round_s(plan: TreePlan, seconds: Callable[[int], float], draft_s: Callable[[int], float]) -> float:
    drafting = draft_s(plan.depth)
    if not 0 <= drafting < float("inf"):
        raise InputError(f"drafting to depth {plan.depth} cannot take {drafting} seconds")
    return _positive(seconds(len(plan) + 1), len(plan) + 1) + drafting


def _positive(took: float, n: int) -> float:
    if not 0 < took < float("inf"):
        raise InputError(f"T({n}), a forward of {n} tokens, cannot take {took} seconds")
    return took
