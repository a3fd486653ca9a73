"""A tree of drafted tokens, and what each node may see: itself and its ancestors, never a sibling.

Node i follows `parents[i]`; -1 stands for the committed text, so several nodes may start there. Parents come before
their children (topological order), which is what makes every triangular solve over the nodes triangular.

    tokens    a  b  c  d        a -+- b              seen   a b c d
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
"""The parent of a node that directly follows the committed text."""


@dataclass(frozen=True)
class Tree:
    """Parents of the nodes 0..T-1, in topological order; one tree serves all rows of a batch.

    Raises InputError for a parent that is below -1, or does not come before its child (which also rules out cycles).
    """

    parents: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "parents", tuple(map(int, self.parents)))
        for node, parent in enumerate(self.parents):
            if not COMMITTED <= parent < node:
                raise InputError(f"parents[{node}] is {parent}, expected -1 (the committed text) to {node - 1}")

    @classmethod
    def chain(cls, length: int) -> "Tree":
        """Return the tree of ordinary speculation: every token follows the last."""
        return cls(tuple(range(COMMITTED, length - 1)))

    def __len__(self) -> int:
        return len(self.parents)

    def rooted(self) -> "Tree":
        """Return the tree under a new node 0: the newest committed token, fed with its drafts."""
        return Tree((COMMITTED, *(parent + 1 for parent in self.parents)))

    def path(self, node: int) -> list[int]:
        """Return the nodes from the committed text down to `node`, itself included; empty for -1, the committed text.

        Raises InputError for a node outside the tree.
        """
        if not COMMITTED <= node < len(self):
            raise InputError(f"the tree has nodes 0 to {len(self) - 1}, and -1 for the committed text; got {node}")
        up = []
        while node != COMMITTED:
            up.append(node)
            node = self.parents[node]
        return up[::-1]

    def children(self, node: int) -> tuple[int, ...]:
        """Return the nodes that follow `node`, in order; those of -1 follow the committed text."""
        return tuple(child for child, parent in enumerate(self.parents) if parent == node)

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """The number of ancestors of each node: 0 for one that directly follows the committed text."""
        depths = []
        for parent in self.parents:
            depths.append(0 if parent == COMMITTED else depths[parent] + 1)
        return tuple(depths)

    @cached_property
    def seen(self) -> np.ndarray:
        """`seen[i, j]`: j is i or an ancestor of i. (T, T) bool, lower triangular, read-only."""
        seen = np.eye(len(self), dtype=bool)
        for node, parent in enumerate(self.parents):
            if parent != COMMITTED:
                seen[node] |= seen[parent]
        seen.flags.writeable = False
        return seen
