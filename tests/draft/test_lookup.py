"""Lookup against a brute-force search, its index grown in any portions."""

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from specnb.decode.sampling import Chooser, Sampling
from specnb.draft.base import Proposal, TokenView
from specnb.draft.lookup import LookupDrafter


def brute_force(tokens, n_min, n_max, k, factor):
    """The longest of the last n tokens that occurred before, at its most recent place, copied on token by token."""
    for n in range(n_max, n_min - 1, -1):
        for end in range(len(tokens) - 1, n - 1, -1):
            if n <= len(tokens) and tokens[end - n : end] == tokens[len(tokens) - n :]:
                grown = list(tokens)
                for j in range(max(1, int(min(k, factor * n)))):
                    grown.append(grown[end + j])
                return tuple(grown[len(tokens) :])
    return ()


@given(
    tokens=st.lists(st.integers(0, 3), max_size=40),
    parts=st.lists(st.integers(0, 6), max_size=30),
    sizes=st.tuples(st.integers(1, 5), st.integers(1, 5)).map(sorted),
    k=st.integers(1, 12),
    factor=st.sampled_from([0.5, 1, 2.5, 4, math.inf]),
)
@settings(max_examples=300)
def test_lookup_is_the_longest_then_most_recent_match(tokens, parts, sizes, k, factor):
    grown = []
    view = TokenView(grown)
    drafter = LookupDrafter(sizes[1], sizes[0], factor)
    drafter.start(view)
    for size in [*parts, len(tokens)]:
        grown.extend(tokens[len(grown) : len(grown) + size])
        drafter.commit(view)
        drafter.commit(view)  # told the same tokens again, it stays as it is
        chooser = Chooser(Sampling())
        assert drafter.propose(view, k, chooser) == Proposal(brute_force(grown, *sizes, k, factor))
