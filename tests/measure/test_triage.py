"""Triage: each planted fault is the first suspicion, and correct drafters are never suspicious."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specnb.chapters.rollback import OracleDrafter
from specnb.decode.generate import generate
from specnb.draft.base import Proposal
from specnb.draft.lookup import LookupDrafter
from specnb.lm.toy import cyclic, markov
from specnb.measure.fork import TextFork
from specnb.measure.triage import triage

SIZE = 300


class Planted(OracleDrafter):
    """Drafts `fault(ids, tokens)`, where `ids` are the correct draft tokens."""

    def __init__(self, truth, fault):
        super().__init__(truth, 1.0, vocab_size=SIZE)
        self.name, self._fault = "planted", fault

    def propose(self, tokens, k, picker):
        return Proposal(tuple(self._fault(list(super().propose(tokens, k, picker).ids), tokens)))


@pytest.fixture(scope="module")
def target():
    return markov(SIZE, order=3, seed=1)


@pytest.fixture(scope="module")
def truth(target):
    return run(target, None, 260).token_ids


def run(target, drafter, n=120, k=4, prompt=(5, 6, 7)):
    return generate(target, prompt, drafter=drafter, k=k, max_new_tokens=n)


def planted(target, truth, fault, n=250):
    return run(target, Planted(truth, fault), n)


def names(*generations, **options):
    return [finding.check for finding in triage(generations, vocab_size=SIZE, **options).suspicions]


def named(generation, drafter):
    return generation.model_copy(update={"drafter": drafter})


def wrong(ids):
    return [(t + 1) % SIZE for t in ids]


def unrelated(ids, tokens):
    return [(97 * len(tokens) + 31 * j) % SIZE for j in range(len(ids))]


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("near zero", unrelated),
        ("near zero", lambda ids, tokens: ids if len(tokens) % 60 == 0 else wrong(ids)),
        ("same input", lambda ids, tokens: [0] * len(ids)),
        ("same input", lambda ids, tokens: ids[:1] * len(ids)),
        ("first draft only", lambda ids, tokens: ids[:1] + wrong(ids[1:])),
    ],
)
def test_a_planted_fault_is_named_first(target, truth, name, fault):
    judged = triage([planted(target, truth, fault)], vocab_size=SIZE)
    assert judged.verdict == "suspicious" and judged.suspicions[0].check == name
    assert "\n" not in judged.line and judged.suspicions[0].remedy in judged.line


@given(
    st.sampled_from((0.15, 0.2, 0.3)) | st.floats(0.15, 1.0),
    st.integers(1, 6),
    st.integers(2, 250),
    st.integers(0),
)
def test_a_correct_drafter_is_never_suspicious_however_poor(target, truth, rate, k, n, seed):
    drafter = OracleDrafter(truth, rate, vocab_size=SIZE, seed=seed)
    judged = triage([run(target, drafter, n, k)], vocab_size=SIZE)
    assert judged.verdict != "suspicious" and judged.line == "", judged.line


def test_few_rounds_are_inconclusive_and_rare_lookup_matches_are_harmless(target, truth):
    for few in (planted(target, truth, unrelated, n=20), run(target, None)):
        assert triage([few], vocab_size=SIZE).verdict == "inconclusive"
    wrong = planted(target, truth, unrelated)
    for name in (LookupDrafter().name, "suffix(x4)", "auto(suffix(x4))"):
        assert not names(named(wrong, name))
    assert "near zero" in names(named(wrong, "auto(suffix(x4), hydra)"))


def test_drafts_that_repeat_a_repetitive_text_are_not_suspicious(target, truth):
    still = cyclic(SIZE)
    still._logits_of = lambda prefix: np.eye(SIZE)[prefix[-1]] * 8
    repeated = run(still, Planted([7] * 200, lambda ids, tokens: ids), 100)
    assert repeated.token_ids == (7,) * 100 and not names(repeated)
    # Draft tokens that repeat a repetitive prompt are wrong, but not due to a single input.
    zeros = Planted(truth, lambda ids, tokens: [0] * len(ids))
    assert names(run(target, zeros, 250, prompt=(*[0] * 600, 5, 6, 7)))[0] == "near zero"
    # Later draft tokens are accepted in one round of three, so the input is not the same.
    stutter = planted(
        target, truth, lambda ids, tokens: ids[:1] * len(ids) if len(tokens) % 3 else ids
    )
    assert "same input" not in names(stutter)[:1]


def test_a_text_that_diverges_from_plain_decoding_is_suspicious_except_at_a_near_tie(target, truth):
    fork = {"position": 3, "token_ids": (1, 2), "margin": 2.0, "noise": 0.1, "noise_share": 0.0}
    hard = TextFork(**fork, near_tie=False)
    tie = fork | {"near_tie": True}
    poor = run(target, OracleDrafter(truth, 0.5, vocab_size=SIZE))
    for drafted in (poor, named(poor, LookupDrafter().name)):
        assert names(drafted, forks=[hard, tie]) == ["text differs"]
        assert not names(drafted, forks=[tie])
