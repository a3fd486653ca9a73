"""The law of sampling: speculative output has the target's distribution.

It is checked by exact enumeration of the shipped loop.
"""

from dataclasses import replace

import numpy as np
import pytest

from specnb.decode import accept, loop
from specnb.decode.control import FixedK
from specnb.decode.generate import generate
from specnb.decode.loop import Stopping, StopRules
from specnb.decode.sampling import Chooser, Sampling
from specnb.draft.base import Proposal
from specnb.draft.lookup import LookupDrafter
from specnb.draft.model import ModelDrafter
from specnb.lm import toy
from tests.laws.enumerate import distribution, total_variation
from tests.laws.trees import Trees

PROMPT = (0, 1, 0)
ONE = Sampling(temperature=1.0)
SETTINGS = [
    ONE,
    Sampling(temperature=0.6),
    Sampling(temperature=1.3, top_k=2),
    Sampling(temperature=1.0, top_p=0.8),
]


def rounds_of(target, drafter, sampling, n, control, draws, prompt=PROMPT, **options):
    """Return the rounds of the shipped loop with draws from `draws`; plain without a drafter."""
    after_prompt = loop.prefill(target, prompt, drafter)
    common = {
        "chooser": Chooser(sampling, draws),
        "stopping": Stopping(StopRules(n), target.vocab),
    } | options
    if drafter is None:
        return loop.autoregressive(target, prompt, after_prompt, **common)
    return loop.speculative(target, drafter, prompt, after_prompt, control=control, **common)


def loop_law(target, drafter, sampling, n, control=lambda: None, prompt=PROMPT):
    """Return the distribution of the tokens; `control` creates a controller for each run."""

    def program(draws):
        rounds = rounds_of(target, drafter, sampling, n, control(), draws, prompt)
        return tuple(t for r in rounds for t in r.committed_ids)

    return distribution(program)


def closed_form_law(target, sampling, n, prompt=PROMPT):
    """Return the distribution in closed form: products of the model's rows, without decoding."""
    law = {(): 1.0}
    for _ in range(n):
        longer = {}
        for tokens, weight in law.items():
            if tokens and tokens[-1] in target.vocab.eog:
                longer[tokens] = weight
                continue
            target.reset()
            row = sampling.probabilities(target.forward([*prompt, *tokens], n_logits=1)[0])
            longer |= {(*tokens, i): weight * p for i, p in enumerate(row) if p > 0}
        law = longer
    return law


def off_by(target, drafter, sampling, n, k, rule="token", prompt=PROMPT):
    """Return the total variation distance between the loop and the closed form.

    `k` is a number, or a function that creates a controller.
    """
    control = k if callable(k) else lambda: FixedK(k)
    law = loop_law(target, drafter, replace(sampling, rule=rule), n, control, prompt)
    return total_variation(law, closed_form_law(target, sampling, n, prompt))


def draft_model(seed):
    return ModelDrafter(toy.markov(3, order=1, seed=seed))


@pytest.mark.parametrize("sampling", SETTINGS, ids=str)
def test_plain_decoding_follows_the_closed_form(sampling):
    target = toy.markov(3, order=2, seed=1, eog=frozenset({2}))
    assert (
        total_variation(loop_law(target, None, sampling, 3), closed_form_law(target, sampling, 3))
        < 1e-9
    )


class Flatter(ModelDrafter):
    """Samples with its own settings: q may be any distribution that draft tokens are drawn from."""

    def propose(self, tokens, k, picker):
        return super().propose(tokens, k, Chooser(Sampling(temperature=3.0), picker.draws))


END = frozenset({2})
SHAPES = {
    "chain": (-1, 0, 1),
    "star": (-1, -1),
    "bush": (-1, -1, 0, 0, 1),
    "everything": (-1, -1, -1, 0, 0, 0),
}
DRAFTED = {  # target, drafter, tokens, K
    **{
        f"model {seed}": (toy.markov(3, order=2, seed=seed), draft_model(100 + seed), 3, 2)
        for seed in range(3)
    },
    "lookup": (toy.markov(3, order=2, seed=3), LookupDrafter(), 4, 3),
    "longer blocks": (toy.markov(3, order=2, seed=7), draft_model(8), 4, 3),
    "an end inside a block": (toy.markov(3, order=2, seed=5, eog=END), draft_model(6), 3, 2),
    "settings of its own": (toy.markov(3, order=2, seed=11), Flatter(toy.markov(3, seed=12)), 3, 2),
    **{
        f"tree, {n}": (toy.markov(3, order=2, seed=3), Trees(len(s), 3, 1, s), 4, 9)
        for n, s in SHAPES.items()
    },
    **{
        f"tree {seed}": (toy.markov(3, order=2, seed=seed, eog=END), Trees(6, 3, seed), 4, 6)
        for seed in range(4)
    },
}


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("sampling", SETTINGS, ids=str)
@pytest.mark.parametrize("name", DRAFTED)
def test_speculative_output_has_the_targets_distribution(name, sampling, rule):
    target, drafter, n, k = DRAFTED[name]
    assert off_by(target, drafter, sampling, n, k, rule) < 1e-9


def expected_tokens(rule, target, drafter, k):
    """Return the exact mean number of committed tokens in the first round."""
    sampling = replace(ONE, rule=rule)

    def program(draws):
        return len(
            next(rounds_of(target, drafter, sampling, k + 1, FixedK(k), draws)).committed_ids
        )

    return sum(n * p for n, p in distribution(program).items())


def test_block_verification_never_commits_fewer_tokens():
    gains = []
    for seed in range(10):
        pair = toy.markov(3, order=2, seed=seed), draft_model(50 + seed)
        token, block = (expected_tokens(rule, *pair, 3) for rule in ("token", "block"))
        gains.append(block - token)
    assert min(gains) > -1e-12 and max(gains) > 0.01


def test_the_acceptance_probability_is_the_overlap_of_p_and_q():
    """E[min(1, p/q)] under q is sum min(p, q) = 1 - TV(p, q) (Leviathan et al., theorem 3.5)."""
    rng = np.random.default_rng(0)
    p, q = rng.dirichlet(np.ones(5), size=2)
    seen = {
        x: accept.token_verification(np.stack([p, p]), q[None], (x,), Always()).accept_prob[0]
        for x in range(5)
    }
    assert sum(q[x] * seen[x] for x in range(5)) == pytest.approx(np.minimum(p, q).sum(), abs=1e-12)


class Always:
    """Draws that are always the most probable outcome, and True."""

    def bernoulli(self, probability):
        return True

    def categorical(self, weights):
        return int(np.argmax(weights))


# --- the same check fails on rules with a planted fault -------------------------------------------


def _residual_forgotten(p_target, q_draft, draft_ids, draws):
    """After a rejection, draws from p instead of norm(max(p - q, 0))."""
    for i, x in enumerate(draft_ids):
        if not draws.bernoulli(min(1.0, p_target[i][x] / q_draft[i][x])):
            return accept.Acceptance.leading(i, draws.categorical(p_target[i]))
    return accept.Acceptance.leading(len(draft_ids), draws.categorical(p_target[len(draft_ids)]))


def _bonus_from_the_row_before(p_target, q_draft, draft_ids, draws):
    kept = accept.token_verification(p_target, q_draft, draft_ids, draws)
    if kept.n_accepted < len(draft_ids):
        return kept
    return kept._replace(next_id=draws.categorical(p_target[len(draft_ids) - 1]))


def _shortest_prefix_first(p_target, q_draft, draft_ids, draws):
    """Block verification that stops at the first failing test, as token verification does."""
    weight, kept = 1.0, 0
    for i, x in enumerate(draft_ids):
        weight = min(1.0, weight * p_target[i][x] / q_draft[i][x])
        if not draws.bernoulli(weight):
            break
        kept = i + 1
    rest = (
        p_target[kept]
        if kept == len(draft_ids)
        else np.maximum(p_target[kept] - q_draft[kept], 0.0)
    )
    return accept.Acceptance.leading(kept, draws.categorical(rest))


@pytest.mark.parametrize(
    "faulty", [_residual_forgotten, _bonus_from_the_row_before, _shortest_prefix_first]
)
def test_planted_faults_in_a_rule_are_detected(faulty):
    def rule(logits, proposal, chooser):
        rows = np.stack([chooser.sampling.probabilities(row) for row in logits])
        q = proposal.q_draft if proposal.q_draft is not None else np.empty((0, 3))
        return faulty(rows, q, proposal.ids, chooser.draws)

    assert off_by(toy.markov(3, order=2, seed=0), draft_model(100), ONE, 3, 2, rule) > 0.005


def test_verifying_an_argmax_token_with_p_over_q_is_detected():
    class ArgmaxWithSoftmax(ModelDrafter):
        def propose(self, tokens, k, picker):
            logits = self.model.forward(tokens[self.model.n_past :], n_logits=1)[0]
            return Proposal((int(np.argmax(logits)),), picker.sampling.probabilities(logits)[None])

    assert (
        off_by(
            toy.markov(3, order=2, seed=0), ArgmaxWithSoftmax(toy.markov(3, seed=100)), ONE, 2, 1
        )
        > 0.005
    )


@pytest.mark.parametrize(
    "drafter", [ModelDrafter(toy.markov(3, seed=100)), Trees(5, 3)], ids=["chain", "tree"]
)
def test_typical_acceptance_is_lossy_and_reported_as_lossy(drafter):
    target = toy.markov(3, order=2, seed=0)
    assert off_by(target, drafter, ONE, 3, 5, "typical") > 0.005 and "typical" in accept.LOSSY
    assert not generate(
        target, [0], drafter=drafter, temperature=1.0, rule="typical", max_new_tokens=5
    ).lossless


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_drafting_that_ends_at_a_nan_does_not_change_the_distribution(temperature):
    """The draft model returns NaN after one of three tokens: the draws decide if drafting ends."""
    rows = toy.markov(3, order=1, seed=6)._logits_of

    def logits_of(prefix):
        return rows(prefix) * (np.nan if len(prefix) > 3 and prefix[-1] == 1 else 1)

    target = toy.markov(3, order=2, seed=5)
    sampling = Sampling(temperature)
    drafter = ModelDrafter(toy.ToyLM(logits_of, toy.letters(3)))
    reasons = set()

    def program(draws):
        stopping = Stopping(StopRules(4), target.vocab)
        rounds = rounds_of(
            target, drafter, sampling, 4, FixedK(2), draws, stopping=stopping, strict=False
        )
        tokens = tuple(t for r in rounds for t in r.committed_ids)
        reasons.add(stopping.drafting_failed)
        return tokens

    assert total_variation(distribution(program), closed_form_law(target, sampling, 4)) < 1e-9
    assert None in reasons and len(reasons) > 1, "some runs draft to the end, and others do not"
