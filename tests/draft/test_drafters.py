"""Drafters by themselves: lookup against a brute-force search, and the state of a model drafter after every round."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specnb.decode.sampling import Chooser, Draws, Sampling
from specnb.draft.base import Proposal, TokenView
from specnb.draft.lookup import LookupDrafter
from specnb.draft.model import ModelDrafter
from specnb.lm import toy

TOKENS = st.lists(st.integers(0, 3), max_size=40)
SIZES = st.tuples(st.integers(1, 5), st.integers(1, 5)).map(sorted)


def chooser(temperature=0.0, seed=0):
    return Chooser(Sampling(temperature), Draws(np.random.default_rng(seed)))


def lookup(tokens, n_min=1, n_max=3, k=4, factor=math.inf):
    drafter = LookupDrafter(n_max, n_min, factor)
    drafter.start(TokenView(list(tokens)))
    return drafter.propose(TokenView(list(tokens)), k, chooser()).ids


def brute_force(tokens, n_min, n_max, k, factor=math.inf):
    """The longest of the last n tokens that occurred before, at its most recent place, copied on token by token."""
    for n in range(n_max, n_min - 1, -1):
        for end in range(len(tokens) - 1, n - 1, -1):
            if n <= len(tokens) and tokens[end - n : end] == tokens[len(tokens) - n :]:
                grown = list(tokens)
                for j in range(max(1, int(min(k, factor * n)))):
                    grown.append(grown[end + j])
                return tuple(grown[len(tokens) :])
    return ()


# --- lookup ---------------------------------------------------------------------------------------------------------


@given(tokens=TOKENS, sizes=SIZES, k=st.integers(1, 12), factor=st.sampled_from([0.5, 1, 2.5, 4, math.inf]))
@settings(max_examples=300)
def test_lookup_is_the_longest_then_most_recent_match(tokens, sizes, k, factor):
    assert lookup(tokens, *sizes, k, factor) == brute_force(tokens, *sizes, k, factor)


@given(tokens=TOKENS, parts=st.lists(st.integers(0, 6), max_size=30), sizes=SIZES, k=st.integers(1, 6))
def test_lookup_indexed_in_any_portions_finds_the_same(tokens, parts, sizes, k):
    grown = []
    view, drafter = TokenView(grown), LookupDrafter(sizes[1], sizes[0], math.inf)
    drafter.start(view)
    for size in [*parts, len(tokens)]:
        grown.extend(tokens[len(grown) : len(grown) + size])
        drafter.commit(view)
        drafter.commit(view)  # told the same tokens again, it stays as it is
        assert drafter.propose(view, k, chooser()) == Proposal(brute_force(grown, *sizes, k))


@pytest.mark.parametrize(
    ("tokens", "k", "drafts"),
    [
        ([1, 2, 3, 9, 1, 2], 3, (3, 9, 1)),
        ([1, 2, 7, 1, 2, 8, 1, 2], 1, (8,)),  # most recent, not first
        ([1, 2, 7, 5, 2, 8, 1, 2], 1, (7,)),  # longest before most recent
        ([1, 1], 5, (1, 1, 1, 1, 1)),  # copies that run into themselves, as in LZ77
        ([4, 1, 2, 1, 2], 5, (1, 2, 1, 2, 1)),
        ([1, 2, 3], 4, ()),
        ([1], 4, ()),
        ([], 4, ()),
    ],
)
def test_lookup_by_hand(tokens, k, drafts):
    assert lookup(tokens, k=k) == drafts


def test_by_default_a_longer_match_proposes_more():
    """Four drafts for each token that matched."""
    drafter = LookupDrafter()
    for matching in range(1, 8):
        text = TokenView([*range(50), 99, *range(50 - matching, 50)] if matching < 7 else [*range(50), *range(50)])
        drafter.start(text)
        proposed = len(drafter.propose(text, 100, chooser()).ids)
        assert proposed == 4 * min(matching, 6)


class Counted(TokenView):
    """Counts the tokens that are read."""

    __slots__ = ("read",)

    def __init__(self, tokens):
        super().__init__(tokens)
        self.read = 0

    def __getitem__(self, index):
        part = super().__getitem__(index)
        self.read += len(part) if isinstance(index, slice) else 1
        return part


@pytest.mark.parametrize("length", [100, 1000, 10_000])
def test_work_per_token_is_the_same_at_any_length(length):
    tokens = np.random.default_rng(0).integers(0, 30, length).tolist()
    grown = []
    view, drafter = Counted(grown), LookupDrafter(3, 1)
    drafter.start(view)
    for token in tokens:
        grown.append(token)
        drafter.commit(view)
        drafter.propose(view, 2, chooser())
    assert view.read <= (2 * (1 + 2 + 3) + 2) * length


# --- a model as drafter ---------------------------------------------------------------------------------------------


class Fed(toy.ToyLM):
    """Remembers how many tokens each forward fed."""

    widths: list[int]

    def forward(self, ids, n_logits=None):
        self.widths.append(len(ids))
        return super().forward(ids, n_logits)


def draft_model(seed=0, n_ctx=4096):
    model = toy.markov(4, order=2, seed=seed)
    model.__class__, model.widths = Fed, []
    model.caps = replace(model.caps, n_ctx=n_ctx)
    return model


ROUND = st.tuples(st.integers(0, 5), st.integers(0, 6), st.integers(0, 3))


@given(rounds=st.lists(ROUND, min_size=1, max_size=8), seed=st.integers(0, 99))
def test_what_was_fed_and_became_true_is_not_fed_again(rounds, seed):
    tokens = [0, 1, 2]
    view, model = TokenView(tokens), draft_model(seed)
    drafter = ModelDrafter(model)
    drafter.start(view)
    for k, kept, following in rounds:
        missing = len(tokens) - model.n_past
        model.widths.clear()
        ids = drafter.propose(view, k, chooser()).ids if k else ()
        assert model.widths == [missing, *[1] * (k - 1)][:k]
        kept = min(kept, len(ids))
        fed = len(tokens) + len(ids) - 1 if ids else model.n_past
        tokens += [*ids[:kept], following]
        drafter.commit(view)
        assert model.n_past == min(fed, len(tokens) - 1) and model._ids == tokens[: model.n_past]


def test_rows_are_those_the_drafts_were_drawn_from():
    tokens, model = [0, 1], draft_model(3)
    drafter = ModelDrafter(model)
    drafter.start(TokenView(tokens))
    proposal = drafter.propose(TokenView(tokens), 3, chooser(0.8, seed=4))
    draws, grown = chooser(0.8, seed=4), list(tokens)
    for j in range(3):
        model.reset()
        token, row = draws.pick(model.forward(grown, n_logits=1)[0])
        assert proposal.ids[j] == token
        np.testing.assert_array_equal(proposal.q_draft[j], row)
        grown.append(token)
    assert proposal.q_draft.shape == (3, 4) and proposal.q_draft.dtype == np.float64


def test_a_prompt_beyond_its_context_is_no_draft_and_no_error():
    model = draft_model(n_ctx=4)
    drafter, view = ModelDrafter(model), TokenView([0, 1, 2, 3, 0])
    drafter.start(view)
    assert drafter.propose(view, 3, chooser()) == Proposal(()) and model.widths == []
    drafter.commit(view)
    drafter.start(TokenView([0, 1]))  # the next prompt fits
    assert len(drafter.propose(TokenView([0, 1]), 9, chooser()).ids) == 3
