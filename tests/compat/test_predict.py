"""Predicted acceptance: the formula against enumeration, and the bound against runs."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specnb.chapters.compatibility import bound, chance_of
from specnb.compat.check import predict
from specnb.decode.generate import generate
from specnb.draft.model import ModelDrafter
from specnb.draft.translate import TokenIntersection
from specnb.lm import toy
from tests.laws.vocabularies import model

SHARE = st.floats(0, 1)


@given(reach=SHARE, quality=SHARE, k=st.integers(1, 24))
def test_a_prediction_is_the_mean_over_all_outcomes_and_within_the_bound(reach, quality, k):
    """A perfect draft reaches the bound: only tokens out of its reach end a round early."""
    made = predict(reach, k, quality)
    a = reach * quality
    # P(n draft tokens are accepted)
    outcomes = [a**n * (1 - a if n < k else 1) for n in range(k + 1)]
    kept = sum(n * p for n, p in enumerate(outcomes))
    assert made.tau == pytest.approx(1 + kept) and made.acceptance_rate == pytest.approx(kept / k)
    assert made.tau <= bound(reach, k) + 1e-9 and 0 <= made.acceptance_rate <= 1
    n = 10_000
    out = round(n * (1 - reach))
    assert n / max(out, -(-n // (k + 1))) == pytest.approx(bound(1 - out / n, k), rel=0.01)


PIECES = st.lists(st.sampled_from([b"a", b"b", b"c", b"d", b"ab", b""]), min_size=1, max_size=7)


@given(PIECES, PIECES, st.integers(0, 99), st.integers(1, 6), st.sampled_from([0.0, 0.8]))
@settings(deadline=None)
def test_drafts_of_shared_tokens_never_exceed_the_bound(ours, theirs, seed, k, temperature):
    """However well it predicts, the draft model cannot draft tokens that it does not share."""
    target = model([b"a", *ours], order=2, seed=seed)
    shared = TokenIntersection(model([*theirs, b"a"], seed=seed), target)
    chance = {"temperature": temperature, "seed": seed}
    made = generate(target, [0], drafter=ModelDrafter(shared), k=k, max_new_tokens=40, **chance)
    in_reach = sum(map(shared.can_draft, made.token_ids))
    assert made.accepted_tokens <= in_reach
    assert made.tau <= bound(in_reach / len(made.token_ids), k) + 1e-9


def test_the_chance_counts_only_tested_draft_tokens():
    """Draft tokens after the first wrong one of a round are not tested."""
    target = toy.markov(4, order=2, seed=3)
    draft = toy.markov(4, order=1, seed=4)
    made = [generate(target, [0, 1], drafter=draft, k=k, max_new_tokens=200) for k in (1, 4)]
    alone, blocks = (chance_of([m]) for m in made)
    assert alone == made[0].acceptance_rate, (
        "one at a time all are judged, and the last round of one token drafts none"
    )
    kept = made[1].accepted_tokens
    wrong = sum(r.n_accepted < r.k for r in made[1].rounds)
    assert blocks == kept / (kept + wrong) > made[1].acceptance_rate
    assert chance_of([generate(target, [0], max_new_tokens=5)]) is None
