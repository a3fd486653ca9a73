"""A tree of draft tokens and its attention mask: a node attends to itself and its ancestors only.

Node i follows `parents[i]`; -1 stands for the committed text, which several nodes may follow.
Parents come before their children (topological order), so the mask is lower triangular.

    tokens    a  b  c  d        a -+- b              mask   a b c d
    parents  -1  0  0  2           +- c --- d        a      1
    depths    0  1  1  2                             b      1 1
                                                     c      1 . 1
    path of node 3: 0, 2, 3 (a c d)                  d      1 . 1 1
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from specnb.errors import InputError

COMMITTED = -1
"""The parent of nodes that directly follow the committed text."""


@dataclass(frozen=True)
class Tree:
    """Parents of the nodes 0..T-1, in topological order; all rows of a batch share one tree.

    Raises InputError for a parent that is below -1, or does not come before its child (which also
    rules out cycles).
    """

    parents: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "parents", tuple(map(int, self.parents)))
        for node, parent in enumerate(self.parents):
            if not COMMITTED <= parent < node:
                raise InputError(
                    f"parents[{node}] is {parent}, expected -1 (the committed text) to {node - 1}"
                )

    @classmethod
    def chain(cls, length: int) -> "Tree":
        """Return the tree of ordinary speculative decoding, a chain of tokens."""
        return cls(tuple(range(COMMITTED, length - 1)))

    def __len__(self) -> int:
        return len(self.parents)

    def rooted(self) -> "Tree":
        """Return the tree with a new root, node 0, for the newest committed token."""
        return Tree((COMMITTED, *(parent + 1 for parent in self.parents)))

    def path(self, node: int) -> list[int]:
        """Return the nodes from a root down to `node`, inclusive; empty for -1, the committed text.

        Raises InputError for a node outside the tree.
        """
        if not COMMITTED <= node < len(self):
            raise InputError(
                f"got node {node} of a tree, expected 0 to {len(self) - 1}, or -1 for the "
                "committed text"
            )
        path = []
        while node != COMMITTED:
            path.append(node)
            node = self.parents[node]
        return path[::-1]

    def children(self, node: int) -> tuple[int, ...]:
        """Return the children of `node`, in order; those of -1 follow the committed text."""
        return tuple(child for child, parent in enumerate(self.parents) if parent == node)

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """The number of ancestors of each node: 0 for nodes that follow the committed text."""
        depths = []
        for parent in self.parents:
            depths.append(0 if parent == COMMITTED else depths[parent] + 1)
        return tuple(depths)

    @cached_property
    def seen(self) -> np.ndarray:
        """Attention mask `(T, T)`, bool, read-only: `seen[i, j]` if j is i or an ancestor of i."""
        seen = np.eye(len(self), dtype=bool)
        for node, parent in enumerate(self.parents):
            if parent != COMMITTED:
                seen[node] |= seen[parent]
        seen.flags.writeable = False
        return seen
