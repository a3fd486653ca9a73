"""Prompt lookup against a brute-force search, for texts that grow by any number of tokens."""

from itertools import cycle, islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specnb.decode.sampling import Chooser, Sampling
from specnb.draft.base import TokenView
from specnb.draft.lookup import LookupDrafter
from specnb.draft.suffix import SuffixDrafter
from specnb.lm.vocab import Vocabulary

CHOOSER = Chooser(Sampling())


def copies(text, sizes, k):
    """Return what followed each earlier occurrence of the longest suffix, most recent first."""
    for n in sizes:
        ends = range(len(text) - 1, n - 1, -1)
        places = [end for end in ends if text[end - n : end] == text[len(text) - n :]]
        if places:
            length = min(k, 4 * n)
            return [tuple(islice(cycle(text[end:]), length)) for end in places]
    return [()]


@pytest.mark.parametrize("bounded", [True, False], ids=["lookup", "suffix"])
@given(
    tokens=st.lists(st.integers(0, 3), max_size=60),
    parts=st.lists(st.integers(0, 6), max_size=30),
    bounds=st.tuples(st.integers(1, 5), st.integers(1, 5)).map(sorted),
    k=st.integers(1, 12),
)
@settings(max_examples=300)
def test_drafts_copy_after_the_longest_match_and_lookup_after_the_latest(
    bounded, tokens, parts, bounds, k
):
    grown = []
    view = TokenView(grown)
    n_min, n_max = bounds
    drafter = LookupDrafter(n_max, n_min) if bounded else SuffixDrafter()
    drafter.start(view)
    for size in [*parts, len(tokens)]:
        grown.extend(tokens[len(grown) : len(grown) + size])
        drafter.commit(view)
        drafter.commit(view)  # the same tokens again change nothing
        sizes = range(n_max, n_min - 1, -1) if bounded else range(len(grown) - 1, 0, -1)
        expected = copies(grown, sizes, k)
        ids = drafter.propose(view, k, CHOOSER).ids
        assert ids == expected[0] if bounded else ids in expected


LOOSE = Vocabulary(pieces=(b"my", b"Name", b"_name", b" =", b"=", b"x", b"y"))


@pytest.mark.parametrize(
    ("text", "loose", "ids"),
    [
        ([1, 2, 5, 1, 2, 6, 0, 1, 2], None, (6, 0)),  # after the last of equal matches
        ([6, 1, 4, 5, 0, 2], None, ()),
        ([6, 1, 4, 5, 0, 2], LOOSE, (4, 5)),
    ],
)
def test_the_latest_match_is_copied_and_a_loose_one_ignores_case_whitespace_and_underscores(
    text, loose, ids
):
    drafter = SuffixDrafter(loose=loose)
    drafter.start(text)
    assert drafter.propose([], 2, CHOOSER).ids == ids
