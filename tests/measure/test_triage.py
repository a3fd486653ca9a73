"""Triage: each planted fault is the first suspicion, and correct drafters are never suspicious."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specnb.chapters.rollback import OracleDrafter
from specnb.decode.generate import generate
from specnb.draft.base import Proposal
from specnb.draft.load import load_drafter
from specnb.draft.lookup import LookupDrafter
from specnb.draft.suffix import SuffixDrafter
from specnb.lm.toy import cyclic, markov
from specnb.measure.fork import TextFork
from specnb.measure.triage import triage

SIZE = 300
FORK = {"position": 3, "token_ids": (1, 2), "margin": 2.0, "noise": 0.1, "noise_share": 0.0}


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


def as_lookup(generation, drafter=None):
    return generation.model_copy(update={"drafter": (drafter or LookupDrafter()).name})


def wrong(ids):
    return [(t + 1) % SIZE for t in ids]


def unrelated(ids, tokens):
    return [(97 * len(tokens) + 31 * j) % SIZE for j in range(len(ids))]


FAULTS = {
    "unrelated": ("near zero", unrelated),
    "ids below 100": ("near zero", lambda ids, tokens: [t % 100 for t in unrelated(ids, tokens)]),
    "seldom right": ("near zero", lambda ids, tokens: ids if len(tokens) % 60 == 0 else wrong(ids)),
    "one token": ("same input", lambda ids, tokens: [0] * len(ids)),
    "newest token": ("same input", lambda ids, tokens: [tokens[-1]] * len(ids)),
    "same input": ("same input", lambda ids, tokens: ids[:1] * len(ids)),
    "first draft only": ("first draft only", lambda ids, tokens: ids[:1] + wrong(ids[1:])),
    "short": ("falls with position", lambda ids, tokens: ids if len(tokens) < 140 else wrong(ids)),
}


@pytest.mark.parametrize(("name", "fault"), FAULTS.values(), ids=FAULTS)
def test_a_planted_fault_is_named_first(target, truth, name, fault):
    judged = triage([planted(target, truth, fault)], vocab_size=SIZE)
    assert judged.verdict == "suspicious" and judged.suspicions[0].check == name
    assert "\n" not in judged.line and judged.suspicions[0].remedy in judged.line


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from((0.15, 0.2, 0.3)) | st.floats(0.15, 1.0),
    st.integers(1, 6),
    st.integers(2, 250),
    st.integers(0),
)
def test_a_correct_drafter_is_never_suspicious_however_poor(target, truth, rate, k, n, seed):
    judged = triage(
        [run(target, OracleDrafter(truth, rate, vocab_size=SIZE, seed=seed), n, k)], vocab_size=SIZE
    )
    assert judged.verdict != "suspicious" and judged.line == "", judged.line


def test_few_rounds_are_inconclusive_and_rare_lookup_matches_are_harmless(target, truth):
    assert (
        triage([planted(target, truth, unrelated, n=20)], vocab_size=SIZE).verdict == "inconclusive"
    )
    assert triage([run(target, None)], vocab_size=SIZE).verdict == "inconclusive"
    for drafter in (LookupDrafter(), SuffixDrafter(), load_drafter("auto", target).drafter):
        assert not names(as_lookup(planted(target, truth, unrelated), drafter))
    routed = planted(target, truth, unrelated).model_copy(
        update={"drafter": "auto(suffix(x4), hydra)"}
    )
    assert "near zero" in names(routed)


def test_drafts_that_repeat_a_repetitive_text_are_not_suspicious(target, truth):
    still = cyclic(SIZE)
    still._logits_of = lambda prefix: np.eye(SIZE)[prefix[-1]] * 8
    repeated = run(still, Planted([7] * 200, lambda ids, tokens: ids), 100)
    assert repeated.token_ids == (7,) * 100 and not names(repeated)
    # Draft tokens that repeat a repetitive prompt are wrong, but not due to a single input.
    zeros = run(
        target,
        Planted(truth, lambda ids, tokens: [0] * len(ids)),
        250,
        prompt=(*(0,) * 600, 5, 6, 7),
    )
    assert names(zeros)[0] == "near zero"
    # Later draft tokens are accepted in one round of three, so the input is not the same.
    stutter = planted(
        target, truth, lambda ids, tokens: ids[:1] * len(ids) if len(tokens) % 3 else ids
    )
    assert "same input" not in names(stutter)[:1]


def test_texts_of_different_content_are_not_compared_by_position(target, truth):
    short = planted(target, truth, lambda ids, tokens: ids, n=120)
    long = run(target, Planted(truth, unrelated), prompt=truth[:100])
    assert names(short, long)[0] == "falls with position"
    assert not names(short, long.model_copy(update={"category": "code"}))


def test_a_text_that_diverges_from_plain_decoding_points_to_the_faulty_side(target, truth):
    perfect = planted(target, truth, lambda ids, tokens: ids, n=120)
    hard = TextFork(**FORK, near_tie=False)
    tie = FORK | {"near_tie": True}
    assert names(perfect, forks=[hard, tie]) == ["verify side"] and not names(perfect, forks=[tie])
    poor = run(target, OracleDrafter(truth, 0.5, vocab_size=SIZE))
    for drafted in (poor, as_lookup(poor)):
        assert names(drafted, forks=[hard]) == ["text differs"]
