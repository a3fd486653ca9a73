"""Laws of every drafter. Registered drafters that need no model are tested automatically."""

import re
import textwrap

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from specnb.decode.sampling import Chooser, Sampling
from specnb.draft import base
from specnb.draft.base import TokenView
from specnb.draft.model import ModelDrafter
from specnb.draft.translate import TokenIntersection
from specnb.registry import DRAFTERS, resolve
from tests.laws.vocabularies import model

NEEDS_A_MODEL = {"auto", "self", "exit", "skip", "jump", "eagle", "medusa", "hydra"}
"""Registered drafters that do not run on a toy target; their own tests check the same laws."""
PIECES = (b"a", b"b", b"ab", b"c", b"ba")
LETTERS = (b"b", b"a", b"x")


def documented(target):
    """Return the drafter from the example in the docstring of `draft.base`."""
    (code,) = re.findall(r"^ *#.*/bigram\.py.*?(?=^ *#.*/registry\.py)", base.__doc__, re.M | re.S)
    names = {}
    exec(textwrap.dedent(code), names)
    return names["bigram_drafter"](target)


MAKERS = {
    **{name: resolve(entry) for name, entry in DRAFTERS.items() if name not in NEEDS_A_MODEL},
    "documented": documented,
    # these depend on the whole text, so one wrong token in their state is detected
    "model": lambda target: ModelDrafter(model(PIECES, order=1000, seed=7)),
    "model of a short context": lambda target: ModelDrafter(
        model(PIECES, order=1000, seed=7, n_ctx=9)
    ),
    "shared tokens": lambda target: ModelDrafter(
        TokenIntersection(model(LETTERS, order=1000, seed=8), target)
    ),
}


def chooser(temperature):
    return Chooser(Sampling(temperature))


TEXTS = st.lists(st.integers(0, 4), min_size=1, max_size=6)
ROUND = st.tuples(st.integers(1, 5), st.integers(0, 6), st.integers(0, 4), st.booleans())
"""K, the number of accepted draft tokens, the token after them, and whether the end cuts it off."""


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@given(
    before=TEXTS,
    prompt=TEXTS,
    rounds=st.lists(ROUND, max_size=6),
    temperature=st.sampled_from([0.0, 0.8]),
)
# beyond the short context
@example(before=[0], prompt=[0] * 12, rounds=[(1, 0, 0, False)], temperature=0.0)
@settings(max_examples=60)
def test_a_proposal_is_valid_and_equals_that_of_a_fresh_drafter(
    make, before, prompt, rounds, temperature
):
    """It has at most k ids of the target, and rows that sum to 1, or None.

    The state contains no rejected draft tokens after `commit`, and no other text after `start`.
    """
    target = model(PIECES, order=2)
    tokens = list(prompt)
    view = TokenView(tokens)
    drafter = make(target)
    for text in (TokenView(before), view):
        drafter.start(text)
        drafter.propose(text, 4, chooser(temperature))
    drafter.start(view)
    for k, kept, following, cut in rounds:
        proposal = drafter.propose(view, k, chooser(temperature))
        rows = proposal.q_draft
        ids = proposal.ids
        assert len(ids) <= k and {*ids} <= {*range(target.vocab.size)} and proposal.forward_s >= 0
        fresh = make(target)
        fresh.start(TokenView(list(tokens)))
        again = fresh.propose(view, k, chooser(temperature))
        assert ids == again.ids
        if rows is not None:
            assert rows.shape == (len(ids), target.vocab.size) and rows.dtype == np.float64
            np.testing.assert_allclose(rows.sum(axis=1), 1, atol=1e-9)
            assert (rows >= 0).all() and (rows[range(len(ids)), ids] > 0).all()
            np.testing.assert_array_equal(rows, again.q_draft)
        committed = [*ids[:kept], following]
        tokens += committed[: max(1, len(committed) - cut)]
        drafter.commit(view)
    drafter.close()
