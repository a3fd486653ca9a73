"""Static trees of draft tokens, and the fastest number of nodes.

A plan is a static tree over the heads' ranks, such as "the two best tokens of the first head, and
after the better one, the best token of the second head" (Cai et al. 2401.10774, section 2.3.3). A
larger tree has more expected tokens but costs more. The size is therefore chosen by tokens per
second, from measured accuracies and costs, as in Sequoia (Chen et al. 2402.12374).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from specnb.lm.base import TreeModel
from specnb.lm.tree import COMMITTED, Tree
from specnb.measure.cost import CONTEXT, CostCurve, time_passes, widths_of

RANKS = 10
"""Number of a head's best tokens with a measured accuracy: the maximum children of a node."""
WIDTHS = (1, 2, 3, 5, 9, 17, 33, 64)
SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 63)


@dataclass(frozen=True)
class TreePlan(Tree):
    """A tree whose node i is the token of rank `ranks[i]` (0: the best) of the head at its depth.

    Parent -1 is the newest token. Children of one node have different ranks.
    """

    ranks: tuple[int, ...]

    @property
    def depth(self) -> int:
        """Number of heads that the plan needs: the length of its longest path."""
        return max(self.depths, default=-1) + 1

    def tokens(self, accuracy: np.ndarray) -> float:
        """Return the expected tokens per round for heads of marginal `accuracy (heads, ranks)`.

        The probability that a node is accepted is the product of the accuracies along its path, as
        if heads were independent (Medusa, 2401.10774, section 2.3.3). A round commits one token
        more than it accepts.
        """
        reached = []
        for parent, depth, rank in zip(self.parents, self.depths, self.ranks, strict=True):
            reached.append(
                (1.0 if parent == COMMITTED else reached[parent]) * accuracy[depth, rank]
            )
        return 1 + sum(reached)

    def first(self, n: int) -> "TreePlan":
        """Return the plan of the first `n` nodes; for a plan from `grow`, the best of that size."""
        return self if n >= len(self) else TreePlan(self.parents[:n], self.ranks[:n])


def grow(accuracy: np.ndarray, n_nodes: int) -> TreePlan:
    """Return the plan of `n_nodes` with the most expected tokens for `accuracy (heads, ranks)`.

    It consists of the nodes that are most likely to be accepted. A parent is at least as likely as
    its child, so each prefix of the plan is a tree, and the best one of its size. Nodes of
    probability 0 are left out, so the plan may be smaller.
    """
    level = [(1.0, ())]  # (probability of being accepted, ranks on the path)
    nodes = []
    for shares in accuracy:
        children = [
            (p * share, (*path, rank))
            for p, path in level
            for rank, share in enumerate(shares)
            if share > 0
        ]
        # A node that is not among the best of its depth has no child in the plan.
        level = sorted(children, key=itemgetter(0), reverse=True)[:n_nodes]
        nodes += level
    # The sort is stable: a parent stays before an equally likely child.
    paths = [path for _, path in sorted(nodes, key=itemgetter(0), reverse=True)[:n_nodes]]
    index = {path: node for node, path in enumerate(paths)} | {(): COMMITTED}
    return TreePlan(tuple(index[path[:-1]] for path in paths), tuple(path[-1] for path in paths))


class TimedTree(NamedTuple):
    """A plan, with expected tokens and seconds per round. Without nodes, it is plain decoding."""

    plan: TreePlan
    tokens: float
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


def fastest_tree(trees: Iterable[TimedTree]) -> TimedTree:
    """Return the tree with the most tokens per second."""
    return max(trees, key=lambda candidate: candidate.tokens_per_s)


def tree_curve(target: TreeModel) -> CostCurve:
    """Measure T(n) of forward passes over trees of n nodes, with the root; T(1) is a plain step.

    The root is the newest token. The time depends on the number of nodes, not on the shape of the
    tree. Widths that exceed the target's limits are left out.
    """
    room = target.caps.n_ctx // 2
    widest = min(target.caps.max_width, room)
    widths = [n for n in (*WIDTHS, *widths_of(target)) if n <= widest]
    curve, _ = time_passes(target, (), widths, min(CONTEXT, room), repeats=5, trees=True)
    return curve
