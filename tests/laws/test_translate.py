"""The laws of drafting across vocabularies: the target's tokens and distribution are unchanged."""

from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specnb.chapters.compatibility import with_vocabulary
from specnb.compat.read import read_shelf
from specnb.decode.control import ConfidenceStop, FixedK
from specnb.decode.generate import generate
from specnb.draft.base import Proposal
from specnb.draft.model import ModelDrafter
from specnb.draft.translate import TokenIntersection
from tests.laws.test_distribution import ONE, SETTINGS, off_by
from tests.laws.vocabularies import model, rewritten

ABC = (b"a", b"b", b"c")
PAIRS = {
    "shuffled": (ABC, (b"c", b"a", b"b")),
    "draft padded": (ABC, (*ABC, b"", b"")),
    "target padded": ((*ABC, b""), ABC),
    "a shuffled draft, padded": (ABC, (b"", b"b", b"c", b"a")),
    "repeated in the draft": (ABC, (b"a", b"b", b"a", b"c")),
    "repeated in the target": ((b"b", b"a", b"b"), (b"a", b"b")),
    "missing in the draft": (ABC, (b"b", b"x", b"a")),
    "one piece shared": (ABC, (b"x", b"b")),
    "the draft spells": ((b"a", b"b", b"ab"), (b"b", b"a")),
    "the target spells": ((b"b", b"a"), (b"ab", b"a", b"ba", b"b")),
    "each spells": ((b"a", b"b", b"ab"), (b"ba", b"b", b"a")),
}
PROMPT = (0, 1, 0)


def tokens(target, draft):
    return ModelDrafter(TokenIntersection(draft, target))


GRID = [
    pytest.param(name, sampling, rule, marks=[] if (i + j + r) % 2 else pytest.mark.slow)
    for i, name in enumerate(PAIRS)
    for j, sampling in enumerate(SETTINGS)
    for r, rule in enumerate(["token", "block"])
]
"""Pairwise combinations of models, settings and rule by default; all triples in slow runs."""


def pair(name, seed):
    target_pieces, draft_pieces = PAIRS[name]
    return model(target_pieces, order=2, seed=seed), model(draft_pieces, seed=100 + seed)


# --- the distribution -----------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "sampling", "rule"), GRID)
def test_drafting_in_another_vocabulary_preserves_the_distribution(name, sampling, rule):
    target, draft = pair(name, seed=1)
    assert off_by(target, tokens(target, draft), sampling, n=3, k=2, rule=rule) < 1e-9


def test_blocks_that_end_early_preserve_the_distribution():
    """The end-of-generation ids of the two vocabularies differ, and blocks can end with one."""
    target = model(
        (b"a", b"<e>", b"b"), order=2, seed=5, eog=frozenset({1}), special=frozenset({1})
    )
    draft = model((b"<e>", b"b", b"a"), seed=6, eog=frozenset({0}), special=frozenset({0}))
    assert off_by(target, tokens(target, draft), ONE, n=4, k=3, prompt=(0, 2, 0)) < 1e-9


@pytest.mark.parametrize("sampling", SETTINGS, ids=str)
@pytest.mark.parametrize(
    "pieces", [(b"c", b"a", b"b"), (*ABC, b"", b""), (b"", b"b", b"a", b"", b"c")], ids=str
)
def test_the_same_model_with_other_ids_is_never_rejected(pieces, sampling):
    """q equals the target's row, so a wrong map of ids lowers acceptance even if lossless."""
    target = model(ABC, order=2, seed=4, sharpness=1.0)
    for seed in range(8):
        made = generate(
            target,
            PROMPT,
            drafter=tokens(target, rewritten(target, pieces)),
            k=3,
            max_new_tokens=20,
            seed=seed,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
        )
        assert (
            all(p == 1.0 for r in made.rounds for p in r.accept_prob) and made.accepted_tokens > 0
        )


# --- the fault of transformers 5.23, planted ------------------------------------------------------


class Scattered(ModelDrafter):
    """Draws from a row with the shared pieces in one order, and reports q in another.

    transformers gathers them in the order of a hash map (`order`), and scatters them in the order
    of the target's ids.
    """

    def __init__(self, draft, target, order):
        super().__init__(TokenIntersection(draft, target))
        self.shared = self.model._map
        self.order = np.array(order)

    def propose(self, tokens, k, picker):
        row = self.model.forward(tokens[self.model.n_past :], n_logits=1)[0]
        pruned = row[self.shared.target_ids][self.order]
        drawn = picker.draws.categorical(picker.sampling.probabilities(pruned))
        ids = self.shared.target_ids
        q = np.zeros(self.vocab.size)
        q[ids] = picker.sampling.probabilities(pruned)
        return Proposal((int(ids[self.order[drawn]]),), q[None])


@pytest.mark.parametrize("name", ["shuffled", "a shuffled draft, padded", "repeated in the draft"])
def test_a_token_map_in_another_order_is_detected(name):
    target, draft = pair(name, seed=1)
    orders = ([1, 0, 2], [2, 0, 1], [0, 1, 2])
    off = [off_by(target, Scattered(draft, target, order), ONE, n=2, k=1) for order in orders]
    assert off[0] > 0.001 and off[1] > 0.001 and off[2] < 1e-9


# --- greedy ---------------------------------------------------------------------------------------

PIECES = st.lists(
    st.sampled_from([b"a", b"b", b"c", b"ab", b"bc", b"abc", b""]), min_size=1, max_size=7
)


@given(
    pieces=st.tuples(PIECES, PIECES),
    seed=st.integers(0, 1000),
    k=st.integers(1, 6),
    prompt=st.lists(st.integers(0, 6), min_size=1, max_size=8),
    temperature=st.sampled_from([0.0, 0.0, 0.8]),
    controller=st.booleans(),
    n_ctx=st.sampled_from([4, 15, 4096]),
)
@settings(max_examples=300, deadline=None)
def test_greedy_output_equals_plain_decoding_for_any_pieces(
    pieces, seed, k, prompt, temperature, controller, n_ctx
):
    target = model([b"a", *pieces[0]], order=2, seed=seed)
    draft = model([*pieces[1], b"a"], seed=seed + 1, n_ctx=n_ctx)
    prompt = [token % target.vocab.size for token in prompt]
    control = ConfidenceStop(k, p_min=0.5) if controller else FixedK(k)
    drafter = tokens(target, draft)
    made = generate(
        target, prompt, drafter=drafter, k=control, max_new_tokens=24, temperature=temperature
    )
    assert len(made.token_ids) == 24
    if temperature == 0:
        assert made.token_ids == generate(target, prompt, max_new_tokens=24).token_ids


# --- the real model -------------------------------------------------------------------------------

CODE = "def mean(values):\n    return sum(values) / len(values)\n\n\ndef median(values):\n"


@pytest.mark.model
def test_a_real_draft_model_with_another_vocabulary_is_lossless(opened):
    target = opened("smollm2-135m?backend=hf&dtype=float32")
    draft = with_vocabulary(opened("smollm2-135m:q4_0?threads=1"), read_shelf("gpt-2"))
    run = partial(generate, target, CODE, max_new_tokens=16, ignore_eog=True)
    plain = run()
    drafted = run(drafter=tokens(target, draft), k=4)
    assert drafted.token_ids == plain.token_ids
    assert drafted.acceptance_rate > 0.15
