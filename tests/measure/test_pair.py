"""Where two greedy runs part: a tie within the rounding noise, or a clear winner and so a fault."""

import sys
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from specnb.decode import loop
from specnb.decode.control import FixedK
from specnb.decode.generate import generate
from specnb.draft import translate
from specnb.draft.model import ModelDrafter
from specnb.lm import toy
from specnb.measure import pair
from specnb.measure.pair import TextFork, explain_draft, explain_fork
from specnb.measure.recording import record
from specnb.measure.replay import walk


class Noisy(toy.ToyLM):
    """In a forward of more than one token the logit of token 2 is off by `noise`, as sums in another order are."""

    noise = 0.0

    def forward(self, ids, n_logits=None):
        self.widths = [*getattr(self, "widths", []), len(ids)]
        logits = super().forward(ids, n_logits)
        if len(ids) > 1 and len(logits):
            logits[:, 2] += self.noise
        return logits


def near(gap, noise, at=4, *, float32=False):
    """Token 1 always wins by far, but after `at` tokens tokens 2 and 3 lead, `gap` apart, by 5 over the rest."""

    def logits_of(prefix):
        return np.array([0, 0, 5 + gap, 5, 0] if len(prefix) == at else [0, 9, 0, 0, 0], dtype=float)

    model = Noisy(logits_of, toy.letters(5))
    model.noise = noise
    model.caps = replace(model.caps, lossless_dtype=float32)
    return model


@pytest.mark.parametrize(("drafter", "with_baseline"), [("draft", False), ("draft", True), ("lookup", False)])
def test_without_a_baseline_the_speedup_is_reckoned_with_single_steps_of_the_run_and_is_no_tau(
    monkeypatch, drafter, with_baseline
):
    """A forward of the target takes 1 s, of the draft model 2 s: all of its drafts are kept, and none of them pays."""
    now = [0.0]

    class Timed(toy.ToyLM):
        def forward(self, ids, n_logits=None):
            now[0] += self.seconds
            return super().forward(ids, n_logits)

    def load_timed(name, **_options):
        model = Timed(toy.cyclic(5)._logits_of, toy.letters(5))
        model.seconds = {"five": 1.0, "draft": 2.0}[name]
        return model

    for module in (pair, loop, sys.modules["specnb.decode.generate"]):
        monkeypatch.setattr(module, "perf_counter", lambda: now[0])
    monkeypatch.setattr(pair, "load", load_timed)
    monkeypatch.setattr(translate, "load", load_timed)
    run = pair.run_pair("five", drafter, "ab", k=3, max_new_tokens=30, with_baseline=with_baseline)
    summary, plain_s = run.summary, 29.0
    assert summary.tau > 2 and summary.estimated_speedup == pytest.approx(plain_s / run.generation.decode_s)
    assert (summary.estimated_speedup < 0.7) == (drafter == "draft")
    assert summary.speedup == (pytest.approx(summary.estimated_speedup) if with_baseline else None)
    assert pair.run_pair("five", None, "ab", max_new_tokens=3).summary.estimated_speedup is None


@pytest.mark.parametrize(
    ("margin", "noise", "share", "near_tie"), [(0.227, 0.647, 0.02, True), (3.5, 0.647, 0.02, False)]
)
def test_a_fork_is_a_sentence(margin, noise, share, near_tie):
    fork = TextFork(position=24, token_ids=(1, 2), margin=margin, noise=noise, noise_share=share, near_tie=near_tie)
    assert all(number in str(fork) for number in ("24", f"{margin:.2g}", f"{2 * noise:.2g}"))
    assert ("no error" in str(fork)) == ("float32" in str(fork)) == near_tie


PROMPT = (0, 0)
PLAIN, OTHER = (1, 1, 2, 1), (1, 1, 3, 1)  # part at position 2, chosen after 4 tokens


@pytest.mark.parametrize(("gap", "tie"), [(0.0, True), (0.125, True), (0.25, True), (0.375, False)])
def test_a_near_tie_is_a_margin_of_at_most_twice_the_noise(gap, tie):
    """Both candidates may move, in opposite directions, by the noise."""
    fork = explain_fork(near(gap, noise=0.125), PROMPT, PLAIN, OTHER, width=3)
    assert (fork.position, fork.token_ids, fork.near_tie) == (2, (2, 3), tie)
    assert fork.margin == pytest.approx(gap) and fork.noise == pytest.approx(0.125)
    assert explain_fork(near(gap, noise=0.125), PROMPT, PLAIN, PLAIN[:2], width=3) is None


@pytest.mark.parametrize(("float32", "limit"), [(True, 0.005), (False, 0.5)])
@pytest.mark.parametrize(("times", "tie"), [(0.9, True), (1.1, False)])
def test_a_block_forward_that_is_plainly_wrong_does_not_excuse_itself(float32, limit, times, tie):
    """Rounding moves a logit by a share of its row's range (here 5): a thousandth in float32, a tenth in less."""
    fork = explain_fork(near(0.0, limit * times, float32=float32), PROMPT, PLAIN, OTHER, width=3)
    assert fork.noise == pytest.approx(limit * times, rel=1e-3)
    assert fork.noise_share == pytest.approx(limit * times / 5, rel=1e-3)
    assert fork.margin == 0 and fork.near_tie is tie


def test_noise_counts_on_the_whole_way_to_the_fork_and_not_beyond():
    """A difference in an earlier row may have moved the state; what comes after the fork has no part in it."""
    model = near(0.5, 0.0)
    forward = model.forward

    def off_after(length, ids, n_logits=None):
        start, logits = model.n_past, forward(ids, n_logits)
        if len(ids) > 1 and start < length <= start + len(logits):
            logits[length - start - 1] += 0.3
        return logits

    for length, noise in ((3, 0.3), (4, 0.3), (5, 0.0)):  # the fork is chosen after 4 tokens
        model.forward = partial(off_after, length)
        assert explain_fork(model, PROMPT, PLAIN, OTHER, width=3).noise == pytest.approx(noise)


def test_a_fork_at_the_first_token_is_a_fault():
    """Both runs take it from the same logits, those of the prefill: no noise excuses it."""
    model = near(0.15, 0.1, at=2)
    fork = explain_fork(model, PROMPT, (2, 1), (3, 1), width=4)
    assert (fork.position, fork.token_ids, fork.noise, fork.near_tie) == (0, (2, 3), 0.0, False)
    assert model.widths == [2, 2]


def drafted(model, n=24):
    """A live run that drafts with `model`, and the (drafted, kept) of its replay."""
    target = toy.cyclic(5)
    drafter = ModelDrafter(model)
    ((_, (recording,)),) = record(target, [drafter], [(0, 1)], max_new_tokens=n)
    live = generate(target, (0, 1), drafter=drafter, k=2, max_new_tokens=n)
    return live, [(s.drafted, s.n_accepted) for s in walk(recording, FixedK(2))]


@pytest.mark.parametrize(("gap", "noise", "near_tie"), [(0.1, 0.2, True), (3.0, 7.0, False)])
def test_a_draft_that_differs_live_is_found_and_judged(gap, noise, near_tie):
    """Behind token 0 token 2 is second by `gap`: forwards of two tokens prefer it, as after a fully kept round."""

    def logits_of(prefix):
        row = np.zeros(5)
        row[(prefix[-1] + 1) % 5] = 8.0
        if prefix[-1] == 0:
            row[2] = 8.0 - gap
        return row

    model = Noisy(logits_of, toy.letters(5))
    model.noise = noise
    model.caps = replace(model.caps, lossless_dtype=False)
    live, replayed = drafted(model)
    fork = explain_draft(model, live, replayed)
    assert fork.token_ids == (1, 2) and live.token_ids[fork.position - 1] == 0
    measured = pytest.approx((gap, noise), abs=1e-5)
    assert (fork.margin, fork.noise) == measured and fork.near_tie == near_tie
    model.noise = 0.0
    assert explain_draft(model, *drafted(model)) is None
