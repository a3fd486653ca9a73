"""Trees for the laws of tree verification."""

import numpy as np

from specnb.draft.base import DrafterBase, Proposal
from specnb.lm.tree import COMMITTED, Tree


def random_tree(n_nodes: int, seed: int) -> Tree:
    """Return a random tree: each node follows an earlier one, or the committed text."""
    rng = np.random.default_rng(seed)
    return Tree(tuple(int(rng.integers(-1, node)) for node in range(n_nodes)))


TREES = {
    "chain": Tree.chain(16),
    "star": Tree((-1,) * 16),
    "root and star": Tree((-1,) + (0,) * 15),
    "4-ary": Tree(tuple((node - 1) // 4 for node in range(64))),
    **{f"random {seed}": random_tree(40, seed) for seed in range(3)},
}


class Trees(DrafterBase):
    """Proposes trees of up to `size` nodes, which depend only on the text; siblings differ.

    Tokens are below `vocab`. Shapes are random, or `parents`.
    """

    name = "trees"

    def __init__(self, size, vocab, seed=0, parents=None):
        self.tree_nodes, self._vocab, self._seed, self._parents = size, vocab, seed, parents

    def propose(self, tokens, k, picker):
        draws = np.random.default_rng([self._seed, *tokens])
        parents = []
        used = {COMMITTED: draws.permutation(self._vocab).tolist()}
        ids = []
        for node in range(min(k, self.tree_nodes)):
            free = [parent for parent in range(-1, node) if used[parent]]
            parent = (
                free[int(draws.integers(len(free)))]
                if self._parents is None
                else self._parents[node]
            )
            parents.append(parent)
            ids.append(used[parent].pop())
            used[node] = draws.permutation(self._vocab).tolist()
        return Proposal(tuple(ids), tree=Tree(tuple(parents)))
