"""Suffix drafts against a brute-force search; the automaton grown in any portions."""

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from specnb.decode.sampling import Chooser, Sampling
from specnb.draft.base import TokenView
from specnb.draft.suffix import SuffixDrafter
from specnb.lm.vocab import Vocabulary


def copies(text, k, factor):
    """Every draft that copies on after a place where the longest end of the text that came before came before."""
    for n in range(len(text) - 1, 0, -1):
        places = [end for end in range(n, len(text)) if text[end - n : end] == text[-n:]]
        if places:
            grown = {end: list(text) for end in places}
            for end in places:
                for j in range(max(1, int(min(k, factor * n)))):
                    grown[end].append(grown[end][end + j])
            return {tuple(g[len(text) :]) for g in grown.values()}
    return {()}


@given(
    tokens=st.lists(st.integers(0, 3), max_size=60),
    parts=st.lists(st.integers(0, 6), max_size=30),
    k=st.integers(1, 12),
    factor=st.sampled_from([0.5, 1, 2.5, 4, math.inf]),
)
@settings(max_examples=300)
def test_a_draft_follows_the_longest_match(tokens, parts, k, factor):
    grown = []
    view = TokenView(grown)
    drafter = SuffixDrafter(factor)
    drafter.start(view)
    for size in [*parts, len(tokens)]:
        grown.extend(tokens[len(grown) : len(grown) + size])
        drafter.commit(view)
        assert drafter.propose(view, k, Chooser(Sampling())).ids in copies(grown, k, factor)


def test_of_equal_matches_the_last_is_copied():
    drafter = SuffixDrafter()
    drafter.start([1, 2, 5, 1, 2, 6, 0, 1, 2])
    assert drafter.propose([], 1, Chooser(Sampling())).ids == (6,)


def test_a_loose_match_looks_past_case_white_space_and_underscores():
    vocab = Vocabulary(pieces=(b"my", b"Name", b"_name", b" =", b"=", b"x", b"y"))
    for loose, ids in ((None, ()), (vocab, (4, 5))):
        drafter = SuffixDrafter(loose=loose)
        drafter.start([6, 1, 4, 5, 0, 2])
        assert drafter.propose([], 2, Chooser(Sampling())).ids == ids
