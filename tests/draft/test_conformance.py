"""What every drafter keeps to, whatever it proposes. One that is registered and needs no model is tried unasked."""

import textwrap

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specnb.decode.generate import generate
from specnb.decode.sampling import Chooser, Draws, Sampling
from specnb.draft import base
from specnb.draft.base import TokenView
from specnb.draft.model import ModelDrafter
from specnb.draft.translate import StringMatch, TokenIntersection
from specnb.registry import DRAFTERS, resolve
from tests.laws.vocabularies import model

NEEDS_A_MODEL = {"self", "medusa", "hydra"}
"""Registered drafters that no toy target can have; their own tests hold them to the same laws."""
PIECES = (b"a", b"b", b"ab", b"c", b"ba")
LETTERS = (b"b", b"a", b"x")


def target_model(seed=0):
    return model(PIECES, order=2, seed=seed)


def documented(target):
    """The drafter of "How to add a drafter"."""
    lines = base.__doc__.splitlines()
    start, end = (next(i for i, line in enumerate(lines) if name in line) for name in ("/bigram.py", "/registry.py"))
    names = {}
    exec(textwrap.dedent("\n".join(lines[start:end])), names)
    return names["bigram_drafter"](target)


MAKERS = {
    **{name: resolve(entry) for name, entry in DRAFTERS.items() if name not in NEEDS_A_MODEL},
    "documented": documented,
    # these look back over everything: one wrong token left in their state shows
    "model": lambda target: ModelDrafter(model(PIECES, order=1000, seed=7)),
    "model of a short context": lambda target: ModelDrafter(model(PIECES, order=1000, seed=7, n_ctx=9)),
    "shared tokens": lambda target: ModelDrafter(TokenIntersection(model(LETTERS, order=1000, seed=8), target)),
    "strings": lambda target: StringMatch(model((b"b", b"a", b"c"), order=1000, seed=9), target),
}
every_drafter = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


def chooser(temperature):
    return Chooser(Sampling(temperature), Draws(np.random.default_rng(0)))


ROUND = st.tuples(st.integers(1, 5), st.integers(0, 6), st.integers(0, 4), st.booleans())
"""K, how many drafts are kept, the token that follows them, and whether the end cut it off."""


@every_drafter
@given(
    prompt=st.lists(st.integers(0, 4), min_size=1, max_size=6),
    rounds=st.lists(ROUND, max_size=6),
    temperature=st.sampled_from([0.0, 0.8]),
)
@settings(max_examples=60, deadline=None)
def test_a_proposal_is_sound_and_what_a_fresh_drafter_would_propose(make, prompt, rounds, temperature):
    """At most k ids of the target; rows that sum to one, or none; after `commit` nothing is left of rejected drafts."""
    target, tokens = target_model(), list(prompt)
    view, drafter = TokenView(tokens), make(target)
    drafter.start(view)
    for k, kept, following, cut in rounds:
        proposal = drafter.propose(view, k, chooser(temperature))
        rows, ids = proposal.q_draft, proposal.ids
        assert len(ids) <= k and all(0 <= token < target.vocab.size for token in ids) and proposal.forward_s >= 0
        if rows is not None:
            assert rows.shape == (len(ids), target.vocab.size) and rows.dtype == np.float64 and (rows >= 0).all()
            np.testing.assert_allclose(rows.sum(axis=1), 1, atol=1e-9)
            assert (rows[range(len(ids)), ids] > 0).all()
        fresh = make(target)
        fresh.start(TokenView(list(tokens)))
        again = fresh.propose(view, k, chooser(temperature))
        assert proposal.ids == again.ids
        if rows is not None:
            np.testing.assert_array_equal(rows, again.q_draft)
        committed = [*proposal.ids[:kept], following]
        tokens += committed[: max(1, len(committed) - cut)]
        drafter.commit(view)
    drafter.close()


@every_drafter
@pytest.mark.parametrize("seed", range(3))
def test_greedy_output_is_that_of_plain_decoding_and_a_drafter_serves_again(make, seed):
    target = target_model(seed)
    drafter = make(target)
    for prompt in ([0], [0, 1, 0, 1, 0], [3, 2, 4]):
        plain = generate(target, prompt, max_new_tokens=30)
        drafted = generate(target, prompt, drafter=drafter, k=4, max_new_tokens=30)
        assert drafted.token_ids == plain.token_ids
        assert generate(target, prompt, drafter=drafter, k=1, max_new_tokens=30).token_ids == plain.token_ids
    drafter.close()
