"""Trees that the laws of tree verification are tried on."""

import numpy as np

from specnb.lm.tree import Tree


def random_tree(n_nodes: int, seed: int) -> Tree:
    """Every node follows any earlier one, or the committed text."""
    rng = np.random.default_rng(seed)
    return Tree(tuple(int(rng.integers(-1, node)) for node in range(n_nodes)))


TREES = {
    "chain": Tree.chain(16),
    "star": Tree((-1,) * 16),
    "root and star": Tree((-1,) + (0,) * 15),
    "4-ary": Tree(tuple((node - 1) // 4 for node in range(64))),
    **{f"random {seed}": random_tree(40, seed) for seed in range(3)},
}
