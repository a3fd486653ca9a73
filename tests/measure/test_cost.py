"""The verify cost curve: measurement and interpolation."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from specnb.decode.router import Router
from specnb.draft.lookup import LookupDrafter
from specnb.draft.model import ModelDrafter
from specnb.errors import InputError
from specnb.lm import toy
from specnb.measure.cost import Cost, CostCurve, plain_rates, verify_costs, verify_curve


class Timed(toy.ToyLM):
    """A pass over n tokens takes `base + slope * n` seconds on a fake clock.

    The first two passes of each width take `cold` seconds more.
    """

    def forward(self, ids, n_logits=None):
        self.calls.append((self.n_past, len(ids), n_logits))
        warm = Counter(n for _, n, _ in self.calls)[len(ids)] > 2
        self.now[0] += self.base + self.slope * len(ids) + (0 if warm else self.cold)
        return super().forward(ids, n_logits)


def timed_model(now, name="m", base=4.0, slope=1.0, cold=0.0, *, size=5):
    model = toy.cyclic(size)
    model.__class__ = Timed
    vars(model).update(now=now, calls=[], name=name, base=base, slope=slope, cold=cold)
    return model


def fake_clock(monkeypatch):
    """Replace the clocks of generation and of measurements; only timed models advance them."""
    now = [0.0]
    for module in ("decode.generate", "decode.loop", "measure.cost"):
        monkeypatch.setattr(f"specnb.{module}.perf_counter", lambda: now[0])
    monkeypatch.setitem(Router.__init__.__kwdefaults__, "clock", lambda: now[0])
    return now


@pytest.fixture
def timed(monkeypatch):
    return timed_model(fake_clock(monkeypatch), cold=400.0)


def curve(*medians, widths=(1, 2, 4)):
    return CostCurve(model="m", context=8, widths=widths, samples_s=tuple((m,) for m in medians))


def test_the_curve_has_every_repeat_of_every_width_after_the_same_context(timed):
    measured = verify_curve(timed, widths=(4, 1, 2, 2), context=6, repeats=3)
    assert (measured.model, measured.context, measured.widths) == (timed.name, 6, (1, 2, 4))
    assert measured.samples_s == ((5.0,) * 3, (6.0,) * 3, (8.0,) * 3)
    prefill, *forwards = timed.calls
    assert prefill == (0, 6, 0) and {call[::2] for call in forwards} == {(6, None)}
    assert timed.n_past == 0


def test_widths_that_cannot_be_measured_are_refused_before_a_forward_pass(timed):
    timed.caps = replace(timed.caps, n_ctx=20, max_width=16)
    for widths, context, named in (
        ((1, 9), 12, "12 .*9"),
        ((1, 17), 3, "17"),
        ((1,), 0, "0 tokens"),
    ):
        with pytest.raises(InputError, match=named):
            verify_curve(timed, widths=widths, context=context)
    assert timed.calls == []


def test_c_is_measured_interleaved_with_the_curve(timed):
    """A draft step takes 2 s, a plain step 5 s; the draft model has a smaller vocabulary."""
    draft = timed_model(timed.now, "draft", 1.0, cold=400.0, size=3)
    draft.calls = timed.calls
    curve, c = verify_costs(timed, [LookupDrafter(), ModelDrafter(draft)], 3, repeats=5)
    assert (curve.widths, curve.median_s, curve.model) == ((1, 2, 3, 4), (5, 6, 7, 8), timed.name)
    assert c == {LookupDrafter().name: 0.0, "draft": 0.4}
    widths = [n for _, n, _ in timed.calls[2:]]
    passes = np.array(widths).reshape(7, 5)
    assert (np.sort(passes) == [1, 1, 2, 3, 4]).all() and len(np.unique(passes, axis=0)) > 2


@pytest.mark.parametrize(
    ("n", "seconds"),
    [(0, 0), (0.5, 10), (1, 10), (1.5, 12), (3, 14.5), (4, 15), (10, 18)],
)
def test_seconds_are_interpolated_between_widths_and_extrapolated_with_the_last_slope(n, seconds):
    assert curve(10, 14, 15).seconds(n) == pytest.approx(seconds)
    assert curve(10, 14, 13).seconds(100) == 13  # a negative last slope is noise
    assert curve(3.0, widths=(1,)).seconds(7) == 3.0  # a single width


def test_plain_rates_measure_prefill_in_the_widest_passes_and_single_steps(timed):
    timed.caps = replace(timed.caps, n_ctx=20, max_width=8)
    prefill, steps = plain_rates(timed, n_prompt=10**12, n_gen=3, repeats=2)
    assert (prefill["test"], prefill["n_tokens"], steps["n_tokens"]) == ("prefill", 20, 3)
    assert prefill["samples"][1] == 20 / (12 + 12 + 8) and steps["samples"] == [3 / 15, 3 / 15]
    assert (steps["tokens_per_s"], steps["std"]) == pytest.approx((0.2, 0)) and timed.n_past == 0


def test_the_needed_rate_is_the_extra_cost_of_a_round_per_draft_token():
    cost = Cost.straight("x", 1.7, 0.2)
    assert [cost.rate_needed(1), cost.rate_needed(4)] == pytest.approx([0.3, 0.3])
    assert cost.rate_needed(4, share=0.5) == pytest.approx((2 * (1 + 4 * 0.3) - 1) / 4)


def test_the_break_even_rises_with_the_costs_of_drafting_and_of_wide_passes():
    """If wide passes are free, the break-even rate equals the cost of a draft step."""
    for c in (0.1, 0.9):
        assert Cost.straight("flat", 1.0, c).break_even() == pytest.approx(c, abs=0.02)
    assert np.isnan(Cost.straight("steep", 8.0, 0.1).break_even())
