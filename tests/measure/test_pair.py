"""Forks of greedy runs (near-tie or fault), and runs of target and drafter."""

import re
from dataclasses import replace
from unittest.mock import Mock

import numpy as np
import pytest

from specnb.decode.content import ContentK
from specnb.decode.control import FixedK, RollingAcceptance
from specnb.decode.generate import generate
from specnb.draft.load import open_pair
from specnb.draft.lookup import LookupDrafter
from specnb.draft.model import ModelDrafter
from specnb.errors import NonFiniteLogits
from specnb.lm import toy
from specnb.measure import bench, pair
from specnb.measure.baseline import Baseline
from specnb.measure.fork import explain_draft, explain_fork
from specnb.measure.policies import CONTROLLERS
from specnb.measure.replay import walk_recording
from specnb.prompts import Prompt
from tests.measure.recorded import record
from tests.measure.test_cost import fake_clock, timed_model


class Noisy(toy.ToyLM):
    """In passes over several tokens, the logit of token 2 is off by `noise`, as by rounding."""

    noise = 0.0

    def forward(self, ids, n_logits=None):

        logits = super().forward(ids, n_logits)
        if len(ids) > 1 and len(logits):
            logits[:, 2] += self.noise
        return logits


def noisy(logits_of, noise, *, float32=False):
    model = Noisy(logits_of, toy.letters(5))
    model.noise = noise
    model.caps = replace(model.caps, lossless_dtype=float32)
    return model


def near(gap, noise, at=4, *, float32=False):
    """Return a model that prefers token 1, after `at` tokens 2 and 3 with logits `gap` apart."""

    def logits_of(prefix):
        return np.array([0, 0, 5.0 + gap, 5, 0] if len(prefix) == at else [0, 9.0, 0, 0, 0])

    return noisy(logits_of, noise, float32=float32)


PROMPT = (0, 0)
# diverge at position 2, after 4 tokens
PLAIN = (1, 1, 2, 1)
OTHER = (1, 1, 3, 1)


@pytest.mark.parametrize(
    ("gap", "noise", "float32", "tie"),
    [
        (0.0, 0.125, False, True),
        (0.25, 0.125, False, True),
        (0.375, 0.125, False, False),
        # noise beyond rounding is a fault
        (0.0, 0.0045, True, True),
        (0.0, 0.0055, True, False),
        (0.0, 0.45, False, True),
        (0.0, 0.55, False, False),
    ],
)
def test_a_near_tie_has_a_margin_of_at_most_twice_the_noise_and_noise_within_rounding(
    gap, noise, float32, tie
):
    """The noise may change both candidates in opposite directions.

    Rounding is at most a share of the row's range (here 5): 0.001 in float32, 0.1 in other types.
    """
    fork = explain_fork(near(gap, noise, float32=float32), PROMPT, PLAIN, OTHER, width=3)
    assert (fork.position, fork.token_ids, fork.near_tie) == (2, (2, 3), tie)
    assert (fork.margin, fork.noise) == pytest.approx((gap, noise), rel=1e-3)
    assert fork.noise_share == pytest.approx(noise / (5 + gap), rel=1e-3)
    assert "token 2" in str(fork) and ("no error" in str(fork)) == tie
    assert explain_fork(near(gap, noise), PROMPT, PLAIN, PLAIN[:2], width=3) is None


def drafted(model, n=24):
    """Return a live run that drafts with `model`, and its replay."""
    target = toy.cyclic(5)
    drafter = ModelDrafter(model)
    ((_, (recording,)),) = record(target, [drafter], [(0, 1)], max_new_tokens=n)
    live = generate(target, (0, 1), drafter=drafter, k=2, max_new_tokens=n)
    return live, walk_recording(recording, FixedK(2))


@pytest.mark.parametrize(("gap", "noise", "near_tie"), [(0.1, 0.2, True), (3.0, 7.0, False)])
def test_a_draft_token_that_differs_live_is_found_and_explained(gap, noise, near_tie):
    """After token 0, token 2 is second by `gap`, but first in passes over two tokens."""

    def logits_of(prefix):
        row = np.zeros(5)
        row[(prefix[-1] + 1) % 5] = 8.0
        if prefix[-1] == 0:
            row[2] = 8.0 - gap
        return row

    model = noisy(logits_of, noise)
    live, replayed = drafted(model)
    fork = explain_draft(model, live, replayed)
    assert fork.token_ids == (1, 2) and live.token_ids[fork.position - 1] == 0
    measured = pytest.approx((gap, noise), abs=1e-5)
    assert (fork.margin, fork.noise) == measured and fork.near_tie == near_tie
    model.noise = 0.0
    assert explain_draft(model, *drafted(model)) is None


SECONDS = {
    "target": (1.0, 0.01),
    "cheap": (0.0, 0.1),
    "expensive": (0.0, 1.5),
    "flat": (1.0, 0.0),
    "slow": (2.0, 0.0),
}


@pytest.fixture
def opened(monkeypatch, open_with):
    """Open timed toy models by name; they always agree."""
    now = fake_clock(monkeypatch)
    monkeypatch.setattr(pair, "perf_counter", lambda: now[0])
    open_with(lambda name: timed_model(now, name, *SECONDS[name]))


@pytest.mark.parametrize("k", [3, None])
def test_nan_from_a_draft_model_is_reported_and_raises_if_strict(k, opened, monkeypatch):
    monkeypatch.setattr(
        ModelDrafter, "propose", Mock(side_effect=NonFiniteLogits("nan at token 0"))
    )
    notes = str(pair.run_pair("target", "cheap", "ab", k=k, max_new_tokens=20).summary.notes)
    assert "nan at token 0" in notes and "costs more" not in notes
    with pytest.raises(NonFiniteLogits):
        pair.run_pair("target", "cheap", "ab", k=k, max_new_tokens=20, strict=True)


@pytest.mark.parametrize("with_baseline", [False, True])
def test_the_speedup_estimated_from_single_steps_differs_from_tau(opened, with_baseline):
    """A target pass takes 1 s, a pass of the slow model 2 s: its accepted drafts do not pay."""
    run = pair.run_pair("flat", "slow", "ab", k=3, max_new_tokens=30, with_baseline=with_baseline)
    summary = run.summary
    assert summary.tau > 2 and summary.estimated_speedup < 0.7
    assert summary.estimated_speedup == pytest.approx(29 / run.generation.decode_s)
    assert summary.speedup == (pytest.approx(summary.estimated_speedup) if with_baseline else None)
    plain = pair.run_pair("flat", None, "ab", max_new_tokens=3)
    assert plain.summary.estimated_speedup is None and plain.conclusion == ""


def test_without_k_drafters_draft_only_if_they_pay(opened):
    runs = [
        pair.run_pair("target", name, "ab", max_new_tokens=40, with_baseline=True)
        for name in ("cheap", "expensive")
    ]
    paying, losing = (run.summary for run in runs)
    assert runs[0].generation.drafter == "auto(cheap)" and paying.tau > 3
    assert paying.identical and losing.identical and losing.total_draft_tokens == 0
    assert any("costs more" in note for note in losing.notes)


@pytest.mark.parametrize(
    ("drafter", "text", "settings", "note"),
    [
        ("lookup", "a", {"max_new_tokens": 3}, "nothing to copy"),
        ("lookup", "a", {"k": 0, "max_new_tokens": 9}, ""),  # no room for drafts
        ("lookup", "a", {"max_new_tokens": 1}, ""),
        ("cheap", "ab", {"k": 4, "max_new_tokens": 14}, ""),
    ],
)
def test_a_text_without_draft_tokens_is_noted(opened, drafter, text, settings, note):
    notes = pair.run_pair("flat", drafter, text, **settings).summary.notes
    assert note in notes[0] if note else notes == ()


def test_speedups_are_over_the_faster_engine_which_the_conclusion_names(opened, monkeypatch):
    found = Baseline(
        baseline_engine="other int4", baseline_tokens_per_s=4.0, plain_tokens_per_s=1.0
    )
    monkeypatch.setattr(pair, "time_baseline", lambda *_: found)
    monkeypatch.setattr(pair, "crosses_engines", lambda *_: True)
    run = pair.run_pair("flat", "cheap", "ab", k=3, max_new_tokens=30, with_baseline=True)
    summary = run.summary
    assert summary.speedup > 1 and "another engine" in summary.notes[0]
    assert summary.over_fastest == pytest.approx(summary.speedup / 4)
    busy = run.model_copy(update={"summary": summary.model_copy(update={"busy": True})})
    stated = f"{summary.over_fastest:.2f} times.*other int4.*busy"
    assert re.search(stated, busy.conclusion)
    only = pair.run_pair("flat", "cheap", "ab", k=3, max_new_tokens=30)
    assert f"{only.summary.estimated_speedup:.2f}" in only.conclusion
    assert "estimated" in only.conclusion and "busy" not in only.conclusion


@pytest.mark.parametrize("name", CONTROLLERS)
def test_controllers_are_chosen_by_name_and_k_is_their_maximum(opened, name):
    drafted, routed = (
        pair.run_pair("target", chosen, "ab", max_new_tokens=20, controller=name, k=3).generation
        for chosen in ("cheap", "auto")
    )
    free = {"rolling": RollingAcceptance.k_max, "content": ContentK().k_max}
    assert drafted.controller and drafted.k == free.get(name, 3) and drafted.tau > 1
    assert routed.token_ids == drafted.token_ids


def test_drafters_are_timed_in_turn_with_every_k_and_with_the_routers_choice(opened):
    steps = Mock()
    prompts = [Prompt(id=f"p-{i}", category="code", text="abc"[i:]) for i in range(3)]
    with open_pair("target", "cheap") as (target, cheap, _):
        timed, copied = bench.time_pairs(
            target, [cheap, LookupDrafter()], prompts, ks=(2, 4), max_new_tokens=12, progress=steps
        )
    # plain decoding is timed once
    done = [call.args[:2] for call in steps.call_args_list[1:]]
    assert done == [(i, 3 * (1 + 2 * 3)) for i in range(21)]
    for table in (timed.table, copied.table):
        assert list(table["method"]) == ["plain", "K = 2", "K = 4", "auto"]
        assert set(table["identical"]) == {3} and table["speedup"].equals(table["over_fastest"])
    assert (timed.c, copied.c) == pytest.approx((0.1 / 1.01, 0))
    assert timed.verify_curve.widths == (1, 2, 3, 5)
    assert timed.table["acceptance_rate"][1] == 1.0 and not timed.c_across_engines
