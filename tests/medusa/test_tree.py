"""Trees of heads: the best of each size, against brute force."""

from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specnb.medusa.tree import grow


def expected_tokens(paths, table):
    """Return the expected tokens per round from the definition; a node is the ranks on its path."""
    return 1.0 + sum(
        float(np.prod([table[depth, rank] for depth, rank in enumerate(path)])) for path in paths
    )


def paths_of(plan):
    return [[plan.ranks[n] for n in plan.path(node)] for node in range(len(plan))]


@given(
    table=st.lists(
        st.lists(st.just(0.0) | st.floats(0.01, 1.0), min_size=2, max_size=2),
        min_size=1,
        max_size=3,
    ),
    n=st.integers(1, 4),
)
def test_no_other_tree_of_the_size_has_more_expected_tokens(table, n):
    """Whether or not accuracies fall with the rank. Every prefix of a plan is also optimal.

    Nodes of probability 0 are left out.
    """
    table = np.array(table)
    paths = [path for depth in range(1, len(table) + 1) for path in product(range(2), repeat=depth)]
    paths = [path for path in paths if expected_tokens([path], table) > 1]
    plan = grow(table, n)
    tokens = plan.tokens(table)
    assert len(plan) == min(n, len(paths))
    assert tokens == pytest.approx(expected_tokens(paths_of(plan), table))
    trees = (t for t in combinations(paths, len(plan)) if all(path[:-1] in ((), *t) for path in t))
    assert tokens == pytest.approx(max(expected_tokens(tree, table) for tree in trees))
    for m in range(n):
        assert plan.first(m).ranks == grow(table, m).ranks
