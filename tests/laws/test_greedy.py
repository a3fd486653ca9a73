"""The law of greedy decoding: speculative output equals plain output, token for token.

The models are closed-form.
"""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specnb.decode.generate import generate
from specnb.decode.router import Arm, Router
from specnb.draft.base import Proposal
from specnb.draft.lookup import LookupDrafter
from specnb.draft.model import ModelDrafter
from specnb.errors import NonFiniteLogits, StateError
from specnb.lm import toy
from tests.laws.trees import Trees

DRAFTERS = {
    "lookup": lambda seed: LookupDrafter(),
    "same model": lambda seed: ModelDrafter(toy.markov(5, order=2, seed=seed)),
    "other model": lambda seed: ModelDrafter(toy.markov(5, order=1, seed=seed + 1)),
    "trees": lambda seed: Trees(1 + seed % 12, 5, seed),
}
SMALL = st.none() | st.integers(1, 24)


def bounded(model, n_ctx=None, max_width=None):
    """Limit a model's context and the width of its forward passes; None means no limit."""
    n_ctx = n_ctx or model.caps.n_ctx
    model.caps = replace(model.caps, n_ctx=n_ctx, max_width=max_width or n_ctx)
    return model


@pytest.mark.parametrize("name", DRAFTERS)
@given(
    seed=st.integers(0, 10_000),
    k=st.integers(0, 14),
    n=st.integers(0, 60),
    eog=st.sets(st.integers(0, 4), max_size=2),
    prompt=st.lists(st.integers(0, 4), min_size=1, max_size=12),
    room=st.none() | st.integers(0, 14),
    draft_ctx=SMALL,
    width=SMALL,
)
@settings(max_examples=200, deadline=None)
def test_speculative_equals_plain_and_rounds_account_for_every_token(
    name, seed, k, n, prompt, eog, room, draft_ctx, width
):
    """Also if the context ends `room` tokens after the prompt, in a draft or tree; if the draft
    model's context is smaller; and if the target's maximum width is below K + 1.
    """
    target = toy.markov(5, order=2, seed=seed, eog=frozenset(eog))
    bounded(target, None if room is None else len(prompt) + room, width)
    drafter = DRAFTERS[name](seed)
    if isinstance(drafter, ModelDrafter):
        bounded(drafter.model, draft_ctx)
    plain = generate(target, prompt, max_new_tokens=n)
    made = generate(target, prompt, drafter=drafter, k=k, max_new_tokens=n)
    assert (made.token_ids, made.stop_reason) == (plain.token_ids, plain.stop_reason)
    assert target.n_past == len(prompt) + max(len(plain.token_ids) - 1, 0)
    if plain.stop_reason != "eog":
        most = n if room is None else room + 1
        assert len(plain.token_ids) == min(n, most) and plain.stop_reason == (
            "length" if n <= most else "context"
        )
    for r in made.rounds:
        assert (
            r.k == len(r.draft_ids) <= k and r.width == r.k + (r.index > 0) <= target.caps.max_width
        )
        assert (
            tuple(r.draft_ids[node] for node in r.accepted_nodes) == r.committed_ids[: r.n_accepted]
        )
        parents = r.parents or range(-1, r.k - 1)
        assert [parents[node] for node in r.accepted_nodes] == [-1, *r.accepted_nodes][
            : r.n_accepted
        ]
        assert len(r.accept_prob) == r.n_tested and sum(r.accept_prob) == r.n_accepted
        assert len(r.committed_ids) == r.n_accepted + 1 or r is made.rounds[-1]


def test_a_perfect_drafter_commits_k_plus_1_and_processes_no_token_twice():
    """After full acceptance, the draft model lacks the last draft token and the bonus, else one."""
    draft = toy.cyclic(7)
    fed = []
    forward = draft.forward
    draft.forward = lambda ids, n_logits=None: fed.append(len(ids)) or forward(ids, n_logits)
    made = generate(toy.cyclic(7), [0], drafter=ModelDrafter(draft), k=3, max_new_tokens=12)
    assert fed == [1, 1, 1, 2, 1, 1, 2, 1, 1] and made.acceptance_rate == 1.0 and made.tau == 4.0


# --- published faults, planted in variants ------------------------------------------------------


class Appending(LookupDrafter):
    def propose(self, tokens, k, picker):
        tokens.append(tokens[-1])
        return Proposal(())


class Assigning(LookupDrafter):
    def propose(self, tokens, k, picker):
        tokens[-1] = 0
        return Proposal(())


def test_a_drafter_cannot_change_the_tokens(monkeypatch):
    """In the published fault ("HelloHello"), drafting appended to the caller's tokens.

    Here, drafters get a read-only view. If they get the list itself, the state no longer matches
    the tokens, and an error is raised.
    """
    prompt = [0, 1, 2]
    for drafter, error in ((Appending(), AttributeError), (Assigning(), TypeError)):
        with pytest.raises(error):
            generate(toy.cyclic(5), prompt, drafter=drafter, k=2, max_new_tokens=8)
    assert prompt == [0, 1, 2]
    monkeypatch.setattr("specnb.decode.loop.TokenView", lambda tokens: tokens)
    with pytest.raises(StateError):
        generate(toy.cyclic(5), prompt, drafter=Appending(), k=2, max_new_tokens=6)


def test_each_draft_token_depends_on_the_earlier_ones():
    """The planted fault drafts all K tokens from the same input, so it drafts one token K times."""

    class SameInput(ModelDrafter):
        def propose(self, tokens, k, picker):
            return Proposal(super().propose(tokens, 1, picker).ids * k)

    def first_round(drafter):
        return generate(toy.cyclic(7), [0, 1], drafter=drafter, k=4, max_new_tokens=20).rounds[0]

    right = first_round(ModelDrafter(toy.cyclic(7)))
    wrong = first_round(SameInput(toy.cyclic(7)))
    assert right.draft_ids == (2, 3, 4, 5) and right.n_accepted == 4
    assert wrong.draft_ids == (2, 2, 2, 2) and wrong.n_accepted == 1


# --- logits that are not finite -----------------------------------------------------------------


def bad_after(n, bad=np.nan, name="draft"):
    """Return a model that counts, with a non-finite logit from `n` tokens on."""
    rows = toy.cyclic(5)._logits_of

    def logits_of(prefix):
        row = rows(prefix)
        if len(prefix) >= n:
            row[2] = bad
        return row

    return toy.ToyLM(logits_of, toy.letters(5), name=name)


BAD = pytest.mark.parametrize("bad", [np.nan, np.inf])
HOT = pytest.mark.parametrize("temperature", [0.0, 0.8])


@BAD
@HOT
@pytest.mark.parametrize(
    "drafter", [None, LookupDrafter(), ModelDrafter(bad_after(0))], ids=["plain", "lookup", "bad"]
)
def test_nonfinite_logits_stop_the_run_and_report_their_position(bad, temperature, drafter):
    """A softmax that turns NaN into a uniform row would continue with random text.

    The run also stops if drafting has already ended.
    """
    with pytest.raises(NonFiniteLogits, match=r"target, after 6 tokens.*logits_of"):
        generate(
            bad_after(6, bad, "target"), [0, 1, 2], drafter=drafter, k=2, temperature=temperature
        )


@BAD
@HOT
def test_nonfinite_draft_logits_end_drafting_and_do_not_change_the_text(bad, temperature):
    """Draft tokens before the first bad row are verified; dropping them would bias the output."""
    draft = bad_after(9, bad)
    fed = []
    draft.locate_nonfinite = lambda ids: fed.append(list(ids)) or "layer 7"
    run = partial(generate, toy.cyclic(5), max_new_tokens=20, temperature=temperature, seed=3)
    drafted = partial(run, drafter=ModelDrafter(draft), k=3)
    made = drafted([0, 1, 2])
    assert "while drafting, draft, after" in made.fallback and "layer 7" in made.fallback
    ends = np.cumsum([3, *(len(r.committed_ids) for r in made.rounds)])
    last = max(i for i, r in enumerate(made.rounds) if r.k)
    before = [0, 1, 2, *made.token_ids][: ends[last]]
    assert fed == [[*before, *made.rounds[last].draft_ids]]
    assert len(fed[0]) == 9 and {r.k for r in made.rounds[last + 1 :]} == {0}, (
        "no drafts after the bad row"
    )
    assert len(made.token_ids) == 20 and made.lossless
    if not temperature:
        assert made.token_ids == run([0, 1, 2]).token_ids
        assert [r.k for r in made.rounds[:3]] == [3, 2, 0] and made.rounds[1].n_accepted == 2
    assert drafted([0], max_new_tokens=4).fallback is None, "a new text"
    with pytest.raises(NonFiniteLogits, match="while drafting"):
        drafted([0, 1, 2], strict=True)


def test_a_router_reports_the_model_and_module_of_a_failed_arm():
    router = Router([Arm(ModelDrafter(bad_after(0)), 3)], [1.0] * 5)
    made, plain = (
        generate(toy.cyclic(5), [0], drafter=drafter, max_new_tokens=30)
        for drafter in (router, None)
    )
    assert "while drafting, auto(draft), after" in made.fallback and "logits_of" in made.fallback
    assert made.token_ids == plain.token_ids
