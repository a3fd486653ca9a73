"""Interleaved timing: every method equally often, in rotating order; intervals over prompts."""

from math import nan

import numpy as np
import pandas as pd
import pytest

from specnb.measure import bench
from specnb.measure.baseline import Baseline
from specnb.measure.bench import compare, interleaved
from specnb.measure.cost import CostCurve
from specnb.measure.intervals import FEWEST, TERMS, ends, interval, rate_ratio, student_t, widen


class Clock:
    """Methods that take a given time on a fake clock."""

    def __init__(self, monkeypatch):
        self.now, self.log = 0.0, []
        monkeypatch.setattr(bench, "perf_counter", lambda: self.now)

    def method(self, name, seconds, run=lambda prompt: range(10)):
        """Return a method that takes `seconds(prompt)`."""

        def timed(prompt):
            self.now += seconds(prompt)
            self.log.append((name, prompt))
            return run(prompt)

        return timed


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


def by_method(methods, prompts, **options):
    return compare(methods, prompts, baseline="plain", **options).set_index("method")


def test_methods_have_one_warm_up_run_and_their_order_rotates_over_prompts_and_repeats(clock):
    slow = iter([500.0] + [1.0] * 6)
    methods = {n: clock.method(n, lambda _, n=n: next(slow) if n == "a" else 2.0) for n in "abc"}
    runs = list(interleaved(methods, [7, 8, 9], repeats=2))
    assert clock.log[:3] == [("a", 7), ("b", 7), ("c", 7)] and len(clock.log) == 3 + 18
    assert "".join(r.method for r in runs) == "abc" + "bca" + "cab" + "bca" + "cab" + "abc"
    assert {r.method: r.wall_s for r in runs} == {"a": 1.0, "b": 2.0, "c": 2.0}


def test_the_baselines_speedup_is_exactly_one_and_true_ratios_are_measured(clock):
    ratios = {"plain": 1.0, "double": 2.0, "half": 0.5}
    methods = {
        name: clock.method(name, lambda p, r=r: (1.0 + p / 3) / r) for name, r in ratios.items()
    }
    frame = by_method(methods, [1, 2, 3, 4, 5], repeats=2)
    assert frame.loc["plain", ["speedup", "low", "high"]].tolist() == [1.0, 1.0, 1.0]
    for name, ratio in ratios.items():
        assert frame.loc[name, ["speedup", "low", "high"]].tolist() == pytest.approx([ratio] * 3)
        assert frame.loc[name, "tokens_per_s"] == pytest.approx(50 / (5 + 15 / 3) * ratio)
    assert frame["n_prompts"].tolist() == [5] * 3 and frame["identical"].tolist() == [5] * 3
    few = by_method(methods, range(FEWEST - 1))
    assert few["speedup"].tolist() == pytest.approx([1.0, 2.0, 0.5]) and few[
        ["low", "high"]
    ].isna().all(axis=None)


def test_the_speedup_is_the_ratio_of_totals_paired_by_prompt(clock):
    """Long prompts have more weight: the mean of the ratios would be 1.6."""
    plain = [1.0, 1.0, 1.0, 1.0, 16.0]
    fast = [0.25, 1.0, 1.0, 1.0, 16.0]
    methods = {
        "plain": clock.method("plain", plain.__getitem__),
        "fast": clock.method("fast", fast.__getitem__),
    }
    row = by_method(methods, range(5)).loc["fast"]
    assert row["speedup"] == pytest.approx(20 / 19.25) and row["low"] < 1.0 < row["high"] < 4.0


@pytest.mark.parametrize(
    ("speedup", "needed", "busy", "first", "present", "absent"),
    [
        (0.61, 1.07, False, "Leave drafting off", "100 %", "107"),
        (0.61, 0.9, False, "Leave drafting off", "90 %", "busy"),
        (1.8, 0.3, False, "Verdict: pays", "30 %", "off"),
        (0.61, 1.07, True, "Leave drafting off", "busy", "100 %"),
        (1.8, -0.2, False, "Verdict: pays", "60 %", "20 %"),
    ],
)
def test_a_conclusion_begins_with_advice_and_has_no_break_even_if_the_machine_was_busy(
    speedup, needed, busy, first, present, absent
):
    rows = [("plain", 1.0, nan, nan), ("K = 1", speedup, 0.6, needed), ("auto", 1.0, 0.5, nan)]
    table = pd.DataFrame(rows, columns=["method", "speedup", "acceptance_rate", "rate_needed"])
    table = Baseline().over(
        table.assign(low=table["speedup"] * 0.9, high=table["speedup"] * 1.1, n_prompts=6)
    )
    curve = CostCurve(model="m", context=8, widths=(1, 2), samples_s=((1.0,), (1.1,)), busy=busy)
    timed = bench.PairBench("t", "d", curve, 1.2, False, Baseline(), table)
    assert timed.conclusion.startswith(first)
    assert (
        present in timed.conclusion
        and absent not in timed.conclusion
        and f"{speedup:.2f}" in timed.conclusion
    )
    assert "0.00" not in timed._replace(c=0.0).conclusion  # the cost of drafts is not the reason
    few = Baseline().over(table.assign(n_prompts=3, low=nan, high=nan))
    assert "undecided" in bench.PairBench(*timed[:-1], few).conclusion


@pytest.mark.parametrize("n", [5, 12])
@pytest.mark.parametrize(
    ("spread", "length", "tail"), [(0.05, 0.5, "normal"), (0.4, 0.5, "normal"), (0.2, 0, "long")]
)
def test_the_interval_of_few_prompts_has_its_nominal_coverage(n, spread, length, tail):
    """A percentile bootstrap covers 82 to 85 % of these with 5 prompts, 87 to 92 % with 12."""
    rng = np.random.default_rng(2)

    def rows_of(*size):
        """Return (tokens, seconds, tokens, plain seconds); log speedups are `spread` around 0."""
        log = spread * (
            rng.standard_normal(size) if tail == "normal" else rng.exponential(size=size) - 1
        )
        tokens = np.exp(length * rng.standard_normal(size))
        noise = np.exp(0.05 * rng.standard_normal((2, *size)))
        return np.stack(
            [tokens, tokens / np.exp(log) * noise[0], tokens, tokens * noise[1]], axis=-1
        )

    truth = rate_ratio(rows_of(1_000_000))
    intervals = [interval(rows, rate_ratio) for rows in rows_of(1000, n)]
    assert 0.93 <= np.mean([i.low <= truth <= i.high for i in intervals]) <= 0.97
    assert all(i.low < i.value < i.high for i in intervals)


@pytest.mark.parametrize("tried", set(TERMS) - {1})
def test_the_best_of_several_without_gain_rarely_pays(tried):
    """Its interval without widening is above 1 about twice as often as the nominal 2.5 %."""
    rng = np.random.default_rng(3)
    shared = 0.2 * rng.standard_normal((1000, 1, 12))  # the K are correlated
    # 1 on average
    seconds = np.exp(-shared - 0.2 * rng.standard_normal((1000, tried, 12)) - 0.2**2)
    of_best = seconds[np.arange(1000), seconds.sum(-1).argmin(-1)].T
    value = 12 / of_best.sum(0)
    without = 11 / (of_best.sum(0) - of_best)
    low, high = ends(value, without)
    best = pd.DataFrame({"speedup": value, "low": low, "high": high, "n_prompts": 12})
    assert (widen(best, tried)["low"] > 1).sum() <= 30 < 40 < (best["low"] > 1).sum()


def test_a_difference_may_be_negative_and_its_interval_is_symmetric():
    change = interval(
        [(x,) for x in (-3.0, -1.0, 0.0, 1.0, 3.0)], lambda rows: float(rows.mean()), log=False
    )
    assert change.value == 0.0 and change.low == -change.high == pytest.approx(
        -2.776 * 20**0.5 / 4, rel=1e-3
    )
    assert [student_t(df) for df in (4, 11, 29)] == pytest.approx(
        [2.7764, 2.2010, 2.0452], rel=1e-3
    ), "of the tables"
    of_best = [student_t(df, tried) for tried in (3, 6) for df in (4, 11)]
    assert of_best == pytest.approx([3.9608, 2.8200, 4.8510, 3.2081], rel=3e-3)
