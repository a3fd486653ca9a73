"""Which guesses a drafter of trees makes, whatever the tokens turn out to be: a static tree over ranks of its heads.

"The two best tokens of the first head; after the better of them the best one of the second head": Cai et al.
2401.10774, section 2.3.3. No model and no measurement is known here.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush
from operator import index

import numpy as np

from specnb.errors import InputError
from specnb.lm.tree import COMMITTED, Tree

MAX_NODES = 1024


@dataclass(frozen=True)
class TreePlan:
    """Node i is the token of rank `ranks[i]` (0 is the best) of the head of its depth, after node `parents[i]`.

    -1 as a parent is the newest token, which the first head follows. Parents come before their children. Raises
    InputError for what is no tree, a rank that is no whole number from 0, or two equal ranks after one parent.
    """

    parents: tuple[int, ...]
    ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "parents", Tree(self.parents).parents)
        object.__setattr__(self, "ranks", _checked(self.ranks))
        if len(self.parents) != len(self.ranks):
            raise InputError(f"a plan needs a rank for each node, got {len(self.ranks)} for {len(self.parents)} nodes")
        if len(self) > MAX_NODES:
            raise InputError(f"a plan has at most {MAX_NODES} nodes, got {len(self)}")
        seen = set()
        for node, place in enumerate(zip(self.parents, self.ranks, strict=True)):
            if place in seen:
                raise InputError(
                    f"node {node} is a second node of rank {place[1]} after node {place[0]}: give each once"
                )
            seen.add(place)

    @classmethod
    def chain(cls, length: int) -> "TreePlan":
        """The best token of each of the first `length` heads, one after the other."""
        return cls(Tree.chain(length).parents, (0,) * length)

    def __len__(self) -> int:
        return len(self.parents)

    @cached_property
    def tree(self) -> Tree:
        return Tree(self.parents)

    @property
    def depth(self) -> int:
        """Heads that are needed: tokens on the longest path."""
        return max(self.tree.depths, default=-1) + 1

    @cached_property
    def levels(self) -> tuple[tuple[int, ...], ...]:
        """The nodes of each depth, in order."""
        at = self.tree.depths
        return tuple(tuple(node for node in range(len(self)) if at[node] == depth) for depth in range(self.depth))

    def first(self, n: int) -> "TreePlan":
        """The plan of the first `n` nodes; of a plan that `grow` made, the best one of that size."""
        return self if n >= len(self) else TreePlan(self.parents[:n], self.ranks[:n])


def _checked(ranks: Sequence[int]) -> tuple[int, ...]:
    try:
        whole = tuple(index(rank) for rank in ranks)
    except TypeError as error:
        raise InputError(f"ranks must be whole numbers, one a node, got {ranks!r:.200}") from error
    for node, rank in enumerate(whole):
        if rank < 0:
            raise InputError(f"ranks[{node}] is {rank}: 0 is the best token of a head")
    return whole


def grow(accuracy: np.ndarray, n_nodes: int) -> tuple[TreePlan, float]:
    """The plan of `n_nodes` with the most tokens a round, and that number, the extra token included.

    `accuracy (heads, ranks)` are marginal: how often the token of that rank was the right one. A node is worth the
    product along its path, as if heads were right independently of each other (Medusa, 2401.10774, section 2.3.3); on
    the average a round commits 1 + the sum over the nodes. Each step adds the node of most worth whose parent is there.
    No node is worth more than its parent, and children are taken best first, so the result is the n best nodes of all:
    no other tree has a larger sum, and every beginning of it is the best of its size. Nodes of no worth are left out,
    and so there may be fewer than `n_nodes`. Raises InputError for a table that holds no such accuracies.
    """
    table = checked_accuracy(accuracy)
    if not 0 <= n_nodes <= MAX_NODES:
        raise InputError(f"a tree has 0 to {MAX_NODES} nodes, got {n_nodes}")
    orders = np.argsort(-table, axis=1, kind="stable")  # a table is measured: a rank may beat the one before it
    parents, ranks, expected = [], [], 1.0
    waiting: list[tuple[float, int, int, int, int, float]] = []

    def offer(parent: int, depth: int, place: int, above: float) -> None:
        if depth < table.shape[0] and place < table.shape[1]:
            worth = above * float(table[depth, orders[depth, place]])
            if worth > 0:
                heappush(waiting, (-worth, depth, parent, place, int(orders[depth, place]), above))

    offer(COMMITTED, 0, 0, 1.0)
    while waiting and len(parents) < n_nodes:
        worth, depth, parent, place, rank, above = heappop(waiting)
        offer(parent, depth, place + 1, above)
        offer(len(parents), depth + 1, 0, -worth)
        parents.append(parent)
        ranks.append(rank)
        expected -= worth
    return TreePlan(tuple(parents), tuple(ranks)), expected


def checked_accuracy(accuracy: np.ndarray) -> np.ndarray:
    """The table `(heads, ranks)` in float64. Raises InputError where it cannot be one of marginal accuracies."""
    try:
        table = np.asarray(accuracy, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise InputError(f"accuracies are a table of numbers, a row a head, got {accuracy!r:.200}") from error
    if table.ndim != 2 or not table.size:
        raise InputError(f"accuracies are a table, a row a head and a column a rank, got the shape {table.shape}")
    if not ((table >= 0) & (table <= 1)).all():
        raise InputError("accuracies are shares from 0 to 1, but the table has others (or NaN)")
    most = float(table.sum(axis=1).max())
    if most > 1 + 1e-6:
        raise InputError(
            f"the accuracies of a head sum to {most:.4g}: give how often each rank alone was right, numpy.diff of "
            "top-1, top-2, …"
        )
    return table
