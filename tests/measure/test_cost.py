"""The verify cost curve: how it is measured, read between its points, and what speed-up it predicts."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specnb.draft.lookup import LookupDrafter
from specnb.draft.model import ModelDrafter
from specnb.errors import InputError
from specnb.lm import toy
from specnb.measure import cost
from specnb.measure.cost import CostCurve, expected_tokens, predicted_speedup, verify_costs, verify_curve


class Timed(toy.ToyLM):
    """A forward of n tokens takes `base + slope * n` seconds of a clock that nothing else moves."""

    base, slope = 4.0, 1.0

    def forward(self, ids, n_logits=None):
        self.calls.append((self.n_past, len(ids), n_logits))
        self.now[0] += self.base + self.slope * len(ids)
        return super().forward(ids, n_logits)


@pytest.fixture
def timed(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(cost, "perf_counter", lambda: now[0])
    return timed_model(now)


def timed_model(now, size=5):
    model = toy.cyclic(size)
    model.__class__, model.calls, model.now = Timed, [], now
    return model


def curve(*medians, widths=(1, 2, 4)):
    return CostCurve(model="m", context=8, widths=widths, samples_s=tuple((m,) for m in medians))


# --- measuring ------------------------------------------------------------------------------------------------------


def test_the_curve_holds_every_repeat_of_every_width(timed):
    made = verify_curve(timed, widths=(4, 1, 2, 2), context=6, repeats=3)
    assert (made.model, made.context, made.widths) == (timed.name, 6, (1, 2, 4))
    assert made.samples_s == ((5.0,) * 3, (6.0,) * 3, (8.0,) * 3) and made.median_s == (5, 6, 8)


def test_every_forward_starts_from_the_same_context_and_asks_for_all_rows(timed):
    verify_curve(timed, widths=(1, 2, 4), context=6, repeats=3)
    prefill, *measured = timed.calls
    assert prefill == (0, 6, 0)
    assert {(past, rows) for past, _, rows in measured} == {(6, None)}
    assert timed.n_past == 0


def test_what_was_in_the_model_before_does_not_matter(timed):
    timed.forward([1, 2, 3])
    timed.calls.clear()
    verify_curve(timed, widths=(1, 2), context=6, repeats=1)
    assert timed.calls[0] == (0, 6, 0) and timed.n_past == 0


def test_widths_are_interleaved_in_changing_order_after_two_warm_ups(timed):
    widths = (1, 2, 3, 5)
    verify_curve(timed, widths=widths, context=6, repeats=8)
    order = [n for _, n, _ in timed.calls[1:]]
    passes = [tuple(order[i : i + 4]) for i in range(0, len(order), 4)]
    assert len(passes) == 2 + 8 and all(sorted(p) == list(widths) for p in passes)
    assert len(set(passes)) > 3


def test_warm_ups_are_not_counted(timed):
    """The first forwards of a width are slow (caches, graphs); here a hundred times."""
    seen = {}
    forward = timed.forward

    def slow_at_first(ids, n_logits=None):
        seen[len(ids)] = seen.get(len(ids), 0) + 1
        timed.now[0] += 400 if seen[len(ids)] <= 2 else 0
        return forward(ids, n_logits)

    timed.forward = slow_at_first
    assert verify_curve(timed, widths=(1, 2), context=6, repeats=3).samples_s == ((5.0,) * 3, (6.0,) * 3)


def test_a_seed_gives_one_order(timed):
    def order(seed):
        timed.calls.clear()
        verify_curve(timed, widths=(1, 2, 3, 4), context=6, repeats=5, seed=seed)
        return [n for _, n, _ in timed.calls]

    assert order(1) == order(1) != order(2)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"widths": ()}, r"must contain 1, the plain step, got \(\)"),
        ({"widths": (2, 4)}, r"must contain 1, the plain step, got \(2, 4\)"),
        ({"widths": (0, 1)}, r"got \(0, 1\)"),
        ({"widths": (1, 9), "context": 12}, "12 tokens and a forward of 9 do not fit cyclic"),
        ({"widths": (1,), "context": 0}, "0 tokens and"),
        ({"widths": (1, 17), "context": 3}, "forward of 17 do not fit"),
        ({"widths": (1,), "repeats": 0}, "repeats must be 1 or more, got 0"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_a_forward(timed, given, message):
    timed.caps = replace(timed.caps, n_ctx=20, max_width=16)
    with pytest.raises(InputError, match=message):
        verify_curve(timed, **{"context": 3, **given})
    assert timed.calls == []


def test_the_widest_forward_that_fits_is_measured(timed):
    timed.caps = replace(timed.caps, n_ctx=20, max_width=16)
    assert verify_curve(timed, widths=(1, 16), context=4, repeats=1).median_s == (5, 20)


def test_c_is_measured_in_turn_with_the_curve(timed):
    """A draft step of 2 s against a plain step of 5 s; the draft model's own vocabulary may be smaller."""
    draft = timed_model(timed.now, size=3)
    draft.base = 1.0
    order, spied = [], {"target": timed, "draft": draft}
    for name, model in spied.items():
        forward = model.forward
        model.forward = lambda ids, n_logits=None, f=forward, n=name: (order.append((n, len(ids))), f(ids, n_logits))[1]
    drafter = ModelDrafter(draft)
    drafter.name = "draft"
    curve, c = verify_costs(timed, [LookupDrafter(), drafter], 3, repeats=5)
    assert (curve.widths, curve.median_s, curve.model) == ((1, 2, 3, 4), (5, 6, 7, 8), timed.name)
    assert c == {LookupDrafter().name: 0.0, "draft": 0.4}
    passes = [tuple(order[i : i + 5]) for i in range(2, len(order), 5)]
    once = [("draft", 1), *(("target", n) for n in (1, 2, 3, 4))]
    assert len(passes) == 7 and all(sorted(p) == once for p in passes)
    assert len(set(passes)) > 2 and timed.n_past == draft.n_past == 0
    assert {call[:1] for call in draft.calls} == {(0,), (cost.CONTEXT,)}


def test_every_drafter_has_its_own_c_and_the_target_is_measured_once(timed):
    drafters = [ModelDrafter(timed_model(timed.now, size=size)) for size in (3, 4)]
    for drafter, base in zip(drafters, (1.0, 9.0), strict=True):
        drafter.model.base, drafter.name = base, f"base {base:g}"
    assert verify_costs(timed, drafters, 1, repeats=3)[1] == {"base 1": 0.4, "base 9": 2.0}
    assert len(timed.calls) == 1 + (2 + 3) * 2 and all(len(d.model.calls) == 1 + 2 + 3 for d in drafters)


@pytest.mark.parametrize(("k_max", "widths"), [(1, (1, 2)), (4, (1, 2, 3, 5)), (24, (1, 2, 3, 5, 9, 17, 25))])
def test_the_curve_goes_up_to_the_widest_verification(timed, k_max, widths):
    curve, c = verify_costs(timed, [LookupDrafter()], k_max, repeats=1)
    assert curve.widths == widths and c == {LookupDrafter().name: 0.0}


def test_the_context_is_what_the_smallest_of_the_models_holds_half_full(timed):
    draft = toy.markov(5)
    draft.caps = replace(draft.caps, n_ctx=12)
    assert verify_costs(timed, [ModelDrafter(draft)], 2, repeats=1)[0].context == 6
    assert verify_costs(timed, [], 2, repeats=1)[0].context == cost.CONTEXT
    timed.calls.clear()
    draft.caps = replace(draft.caps, n_ctx=1)
    with pytest.raises(InputError, match="0 tokens and a forward of 1 do not fit"):
        verify_costs(timed, [ModelDrafter(draft)], 2)
    assert timed.calls == []


def test_a_curve_survives_json(timed):
    made = verify_curve(timed, widths=(1, 2), context=6, repeats=2)
    assert CostCurve.model_validate_json(made.model_dump_json()) == made


# --- reading --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n", "seconds"), [(1, 10), (2, 14), (4, 15), (1.5, 12), (3, 14.5), (5, 15.5), (10, 18), (0.5, 10)]
)
def test_seconds_are_linear_between_widths_and_go_on_with_the_last_slope(n, seconds):
    assert curve(10, 14, 15).seconds(n) == pytest.approx(seconds)


def test_a_last_slope_below_zero_is_noise_and_taken_as_flat():
    assert curve(10, 14, 13).seconds(100) == 13


def test_a_single_width_is_all_that_is_known():
    assert curve(3.0, widths=(1,)).seconds(7) == 3.0


def test_the_median_ignores_an_outlier():
    made = CostCurve(model="m", context=1, widths=(1,), samples_s=((2.0, 900.0, 1.0),))
    assert made.median_s == (2.0,)


def test_ratios_are_to_the_plain_step():
    made = curve(10, 14, 15)
    assert [made.ratio(n) for n in (1, 2, 4)] == [1, 1.4, 1.5]


# --- predicting -----------------------------------------------------------------------------------------------------


@given(a=st.floats(0, 0.999), k=st.integers(0, 20), c=st.floats(0, 2))
def test_with_free_width_the_prediction_is_leviathans_closed_form(a, k, c):
    """Theorem 3.8 of 2211.17192: (1 - a^(K+1)) / ((1 - a)(K c + 1))."""
    flat = curve(10, 10, 10)
    closed = (1 - a ** (k + 1)) / (1 - a)
    assert expected_tokens([a] * k) == pytest.approx(closed, rel=1e-9)
    assert predicted_speedup([a] * k, flat, c) == pytest.approx(closed / (k * c + 1), rel=1e-9)


def test_acceptance_by_position_multiplies():
    assert expected_tokens([0.5, 0.5, 1.0]) == 1 + 0.5 + 0.25 + 0.25
    assert expected_tokens([0.0, 1.0]) == 1 and expected_tokens([]) == 1


def test_verification_that_costs_as_much_as_single_steps_never_pays():
    linear = curve(1, 2, 4)
    assert predicted_speedup([1.0] * 7, linear, 0.0) == 1.0
    assert predicted_speedup([0.9] * 3, linear, 0.0) < 1.0
    assert predicted_speedup([], linear, 0.5) == 1.0
