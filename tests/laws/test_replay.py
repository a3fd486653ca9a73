"""The law of replay: one recording gives the rounds of live speculative decoding for every K."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from specnb.decode.generate import generate
from specnb.decode.router import Arm, Router
from specnb.draft.lookup import LookupDrafter
from specnb.draft.model import ModelDrafter
from specnb.lm import toy
from specnb.measure.cost import Cost, CostCurve
from specnb.measure.replay import fixed_k, route
from tests.laws.test_controllers import PROMPT, drafter_named, recorded
from tests.measure.recorded import record


def check_replay(recording, live, k):
    replayed = fixed_k(recording, k)
    case = (live.drafter, len(live.token_ids), k)
    counts = len(live.rounds), live.total_draft_tokens, live.accepted_tokens
    assert (replayed.rounds, replayed.drafted, replayed.accepted) == counts, case
    assert replayed.by_width == Counter(r.width for r in live.rounds), case


@pytest.mark.parametrize("name", ["lookup", "other", "same", "short"])
@pytest.mark.parametrize("seed", range(8))
def test_greedy_replay_equals_live_decoding_and_has_the_drafted_texts(name, seed):
    """Also with narrow forward passes. Recordings have the texts of all tested draft tokens."""
    target = toy.markov(4, order=2, seed=seed, eog=frozenset({3}) if seed > 3 else frozenset())
    target.caps = replace(target.caps, max_width=(4096, 1, 2, 4)[seed % 4])
    for n, k_max in ((1, 2), (2, 3), (30, 24)):
        _, recording = recorded(target, drafter_named(name, seed), n)
        for k in range(1, k_max + 1):
            live = generate(
                target, PROMPT, drafter=drafter_named(name, seed), k=k, max_new_tokens=n
            )
            check_replay(recording, live, k)
            at = 0
            for r in live.rounds:
                texts = [target.vocab.piece(i) for i in r.draft_ids]
                known = list(recording.drafts[at][:k])
                assert known == texts[: len(known)] and len(known) >= (
                    r.k if name == "lookup" else r.n_tested
                )
                at += len(r.committed_ids)


@pytest.mark.parametrize("name", ["lookup", "other"])
@pytest.mark.parametrize(
    ("k", "cut"), [(1, {}), (3, {}), (3, {"top_k": 2}), (3, {"top_p": 0.6})], ids=str
)
def test_sampled_replay_equals_the_mean_of_live_runs(name, k, cut):
    """300 live and 300 replayed runs, of 20 tokens each, take equally many rounds on average."""
    target = toy.markov(4, order=2, seed=3)
    live, replayed = [], []
    for seed in range(300):
        _, recording = recorded(
            target, drafter_named(name, 3), 20, temperature=1.0, seed=10_000 + seed, **cut
        )
        replayed.append(fixed_k(recording, k).rounds)
        settings = {"max_new_tokens": 20, "temperature": 1.0, "seed": seed, **cut}
        live.append(
            len(generate(target, PROMPT, drafter=drafter_named(name, 3), k=k, **settings).rounds)
        )
    spread = np.hypot(np.std(live) / np.sqrt(len(live)), np.std(replayed) / np.sqrt(len(replayed)))
    assert abs(np.mean(live) - np.mean(replayed)) < 2.576 * spread


def rounds_by_hand(recording, k, bonus=1, correction=1):
    """Count greedy rounds as `fixed_k` does; planted faults omit the bonus or the correction."""
    i = rounds = 0
    while i < recording.n_tokens:
        chances = recording.keep[i][: min(k, recording.offered[i])]
        kept = next((j for j, chance in enumerate(chances) if not chance), len(chances))
        i += kept + (bonus if kept == len(chances) else correction) or 1
        rounds += 1
    return rounds


def test_planted_off_by_one_errors_are_detected():
    target = toy.markov(4, order=2, seed=1)
    for name, fault in (("same", {"bonus": 0}), ("other", {"correction": 0})):
        _, recording = recorded(target, drafter_named(name, 1), 30)
        live = generate(target, PROMPT, drafter=drafter_named(name, 1), k=4, max_new_tokens=30)
        assert (
            rounds_by_hand(recording, 4)
            == len(live.rounds)
            != rounds_by_hand(recording, 4, **fault)
        )


@pytest.mark.model
def test_greedy_replay_equals_live_decoding_on_the_real_model(opened):
    """Also for a 4-bit draft model, if its passes over 1 and 2 tokens are bit-identical."""
    target = opened("smollm2-135m?backend=hf&dtype=float32")
    prompt = "def f(x):\n    return x\n\ndef g(x):\n"
    drafters = [LookupDrafter(), ModelDrafter(opened("smollm2-135m:q4_0?exact=true"))]
    ((_, recordings),) = record(target, drafters, [prompt], max_new_tokens=10)
    for recording, drafter in zip(recordings, drafters, strict=True):
        check_replay(
            recording, generate(target, prompt, drafter=drafter, k=4, max_new_tokens=10), 4
        )


@pytest.mark.parametrize("seed", range(12))
def test_a_replayed_router_has_the_rounds_of_a_live_one_on_the_same_clock(seed):
    """Arms: lookup, and a draft model of constant confidence. Estimates carry over to text 2."""
    now = [0.0]
    k_max = 6
    draft_s = (0.05, 0.3, 0.8)[seed % 3]
    curve = CostCurve(
        model="toy", context=0, widths=(1, k_max + 1), samples_s=((1.0,), (1.0 + seed % 4 / 2,))
    )
    target = toy.markov(4, order=2, seed=seed, eog=frozenset({3}) if seed > 7 else frozenset())
    drafters = [
        drafter_named("lookup", seed),
        drafter_named(("even", "even, same")[seed % 2], seed),
    ]

    def slow_down(model, seconds):
        forward = model.forward

        def timed(ids, n_logits=None):
            now[0] += seconds(len(ids), n_logits)
            return forward(ids, n_logits=n_logits)

        model.forward = timed

    recordings = []
    for name, (_, followed) in enumerate(
        record(target, drafters, [[0], [1]], k_max=k_max, max_new_tokens=40)
    ):
        recordings += [recording._replace(prompt_id=str(name)) for recording in followed]
    costs = {drafter.name: Cost(curve, draft_s if drafter.model else 0.0) for drafter in drafters}
    replayed = list(route(recordings, costs, k_max=k_max))
    slow_down(target, lambda n, _: curve.seconds(n) if target.n_past else 0.0)
    arms = [Arm(drafter, k_max, costs[drafter.name].c) for drafter in drafters]
    router = Router(arms, [curve.seconds(n) for n in range(k_max + 2)], clock=lambda: now[0])
    slow_down(
        drafters[1].model,
        lambda n, n_logits: draft_s * ((n - 1) * router.read_cost + (n_logits or router.read_cost)),
    )
    for prompt, text in zip(([0], [1]), replayed, strict=True):
        live = generate(target, prompt, drafter=router, max_new_tokens=40)
        assert [(r.k, r.n_accepted) for r in live.rounds] == [
            (s.drafted, s.n_accepted) for s in text.steps
        ]
        assert [name for name, _, _ in router.choices] == text.arms[: len(router.choices)]
    assert any(any(text.arms) for text in replayed)
