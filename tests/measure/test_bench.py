"""Interleaved timing: every method equally often, in rotating order; intervals over prompts."""

import re
from unittest.mock import Mock

import numpy as np
import pandas as pd
import pytest

from specnb.decode.generate import generate
from specnb.lm import toy
from specnb.measure import bench
from specnb.measure.baseline import Baseline
from specnb.measure.bench import Timed, compare, interleaved, tabulate_speeds
from specnb.measure.cost import Cost
from specnb.measure.intervals import FEWEST, TERMS, interval, rate_ratio, student_t, widen


class Clock:
    """Methods that take a given time on a fake clock."""

    def __init__(self, monkeypatch):
        self.now, self.log = 0.0, []
        monkeypatch.setattr(bench, "perf_counter", lambda: self.now)

    def method(self, name, seconds):
        """Return a method that takes `seconds(prompt)`."""

        def timed(prompt):
            self.now += seconds(prompt)
            self.log.append((name, prompt))
            return range(10)

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


def test_the_baseline_is_timed_before_the_runs_of_each_prompt():
    order = []
    timer = Mock(time=lambda prompt: order.append(f"time {prompt}"))
    methods = {name: lambda prompt, name=name: order.append(name) or [prompt] for name in "ab"}
    list(interleaved(methods, [7, 8], timer=timer))
    assert order == ["a", "b", "time 7", "a", "b", "time 8", "b", "a"]


def test_a_run_without_its_prefill_has_the_time_and_the_tokens_of_decoding():
    generation = generate(toy.cyclic(5), [0], max_new_tokens=4)
    slow = generation.model_copy(update={"prefill_s": 50.0, "wall_s": 50.0 + generation.decode_s})
    run = Timed("m", 0, 0, 4, slow.wall_s, slow.token_ids, slow).without_prefill()
    assert (run.n_tokens, run.wall_s) == (3, pytest.approx(generation.decode_s))


def test_tau_is_pooled_over_rounds_not_over_answers():
    model = toy.cyclic(3)
    methods = {
        "plain": lambda n: generate(model, [0], max_new_tokens=n),
        "drafted": lambda n: generate(model, [0, 1, 2, 0], max_new_tokens=n, drafter="lookup", k=4),
    }
    runs = [run.without_prefill() for run in interleaved(methods, [2, 30])]
    drafted = [run.generation for run in runs if run.method == "drafted"]
    table = tabulate_speeds(runs, baseline="plain").set_index("method")
    rounds = [each for generation in drafted for each in generation.rounds]
    tau = sum(len(each.committed_ids) for each in rounds) / len(rounds)
    assert table.at["drafted", "tau"] == pytest.approx(tau)


def test_the_baselines_speedup_is_exactly_one_and_true_ratios_are_measured(clock):
    """Long prompts have more weight: the mean ratio of `uneven` would be 1.6."""
    seconds = {
        "plain": lambda prompt: 1 + prompt / 3,
        "double": lambda prompt: (1 + prompt / 3) / 2,
        "uneven": lambda prompt: (1 + prompt / 3) / (4 if prompt == 1 else 1),
    }
    methods = {name: clock.method(name, of_prompt) for name, of_prompt in seconds.items()}
    frame = by_method(methods, [1, 2, 3, 4, 5], repeats=2)
    speedups = frame[["speedup", "low", "high"]]
    assert speedups.loc["plain"].tolist() == [1.0, 1.0, 1.0]
    assert speedups.loc["double"].tolist() == pytest.approx([2.0] * 3)
    value, low, high = speedups.loc["uneven"]
    assert value == pytest.approx(10 / 9) and low < 1 < high < 4
    assert frame["tokens_per_s"].tolist() == pytest.approx([5, 10, 50 / 9])
    assert frame["n_prompts"].tolist() == frame["identical"].tolist() == [5] * 3
    few = by_method(methods, range(FEWEST - 1))
    assert few["speedup"].notna().all() and few[["low", "high"]].isna().all(axis=None)


@pytest.mark.parametrize(
    ("speedup", "needed", "busy", "stated", "absent"),
    [
        (0.61, 1.07, False, "Leave drafting off.*100 %.*1.20", "107"),
        (0.61, 0.9, False, "Leave drafting off.*90 %", "busy"),
        (1.8, 0.3, False, "Verdict: pays.*30 %", "off"),
        (0.61, 1.07, True, "Leave drafting off.*busy", "100 %"),
        (1.8, -0.2, False, "Verdict: pays.*60 %", "20 %"),
    ],
)
def test_a_conclusion_begins_with_advice_and_has_no_break_even_if_the_machine_was_busy(
    speedup, needed, busy, stated, absent
):
    columns = ["speedup", "low", "high", "acceptance_rate", "rate_needed", "n_prompts"]
    row = (speedup, 0.9 * speedup, 1.1 * speedup, 0.6, needed, 6)
    table = pd.DataFrame([row] * 3, columns=columns).assign(method=["plain", "K = 1", "auto"])
    curve = Cost.straight("m", 1.1).curve.model_copy(update={"busy": busy})
    timed = bench.PairBench("t", "d", curve, 1.2, False, Baseline(), Baseline().over(table))
    assert re.match(stated, timed.conclusion) and absent not in timed.conclusion
    assert f"K = 1 is {speedup:.2f} times as fast" in timed.conclusion


@pytest.mark.parametrize("n", [5, 12])
@pytest.mark.parametrize("spread", [0.05, 0.4])
def test_the_interval_of_few_prompts_has_its_nominal_coverage(n, spread):
    """A percentile bootstrap covers 82 to 85 % of these with 5 prompts, 87 to 92 % with 12."""
    rng = np.random.default_rng(2)

    def rows_of(*size):
        """Return (tokens, seconds, tokens, plain seconds); log speedups are `spread` around 0."""
        tokens, change, *noise = rng.standard_normal((4, *size))
        tokens = np.exp(0.5 * tokens)
        seconds, plain = (tokens * np.exp(0.05 * each) for each in noise)
        return np.stack([tokens, seconds / np.exp(spread * change), tokens, plain], axis=-1)

    truth = rate_ratio(rows_of(1_000_000))
    intervals = [interval(rows, rate_ratio) for rows in rows_of(1000, n)]
    assert 0.93 <= np.mean([i.low <= truth <= i.high for i in intervals]) <= 0.97
    assert all(i.low < i.value < i.high for i in intervals)


def test_the_interval_of_the_best_of_several_is_widened_by_the_ratio_of_the_quantiles():
    best = pd.DataFrame({"speedup": [3.0], "low": [1.0], "high": [27.0], "n_prompts": [12]})
    found = np.log(widen(best, 3)[["low", "speedup", "high"]] / 3).to_numpy()[0]
    power = 2.8200 / 2.2010
    assert found == pytest.approx(np.log(3) * np.array([-power, 0, 2 * power]), rel=3e-3)


def test_a_difference_may_be_negative_and_its_interval_is_symmetric():
    change = interval(np.array([[-3], [-1], [0], [1], [3]]), np.mean, log=False)
    half = 2.776 * 20**0.5 / 4
    assert change == pytest.approx((0, -half, half), rel=1e-3)


def test_students_quantiles_equal_those_of_the_tables():
    found = [student_t(df, tried) for tried in TERMS for df in (4, 11)]
    assert found == pytest.approx([2.7764, 2.2010, 3.9608, 2.8200, 4.8510, 3.2081], rel=3e-3)
