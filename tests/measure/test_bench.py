"""Side-by-side timing: every method the same number of times, in turning order; intervals over prompts."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specnb.decode.generate import generate
from specnb.draft.lookup import LookupDrafter
from specnb.lm import toy
from specnb.measure import bench
from specnb.measure.bench import FEWEST, bootstrap, compare, interleaved, rate_ratio


class Clock:
    """Methods that take a known number of seconds on a clock that nothing else moves."""

    def __init__(self, monkeypatch):
        self.now, self.log = 0.0, []
        monkeypatch.setattr(bench, "perf_counter", lambda: self.now)

    def method(self, name, seconds, tokens=10):
        """`seconds` and `tokens` may depend on the prompt."""

        def run(prompt):
            self.log.append((name, prompt))
            return list(range(tokens(prompt) if callable(tokens) else tokens))

        return self.taking(seconds, run)

    def taking(self, seconds, run):
        def timed(prompt):
            self.now += seconds(prompt) if callable(seconds) else seconds
            return run(prompt)

        return timed


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


# --- interleaving ---------------------------------------------------------------------------------------------------


def test_the_order_turns_from_prompt_to_prompt_and_repeat_to_repeat(clock):
    methods = {n: clock.method(n, 1) for n in "abc"}
    order = "".join(r.method for r in interleaved(methods, [7, 8, 9], repeats=2))
    assert order == "abc" + "bca" + "cab" + "bca" + "cab" + "abc"


def test_each_method_warms_up_once_on_the_first_prompt_uncounted(clock):
    slow = iter([500.0, 1.0, 1.0])
    runs = list(interleaved({"a": clock.method("a", lambda _: next(slow)), "b": clock.method("b", 2)}, [7, 8]))
    assert clock.log[:2] == [("a", 7), ("b", 7)] and len(clock.log) == 2 + 4
    assert {r.method: r.wall_s for r in runs} == {"a": 1.0, "b": 2.0}


# --- comparing ------------------------------------------------------------------------------------------------------


def test_the_baseline_is_exactly_one_and_a_known_ratio_is_found(clock):
    methods = {
        "plain": clock.method("plain", lambda p: 1.0 + p / 3),
        "double": clock.method("double", lambda p: (1.0 + p / 3) / 2),
        "half": clock.method("half", lambda p: (1.0 + p / 3) * 2),
    }
    frame = compare(methods, [1, 2, 3, 4, 5], baseline="plain", repeats=2).set_index("method")
    assert frame.index.tolist() == ["plain", "double", "half"]
    assert frame.loc["plain", ["speedup", "low", "high"]].tolist() == [1.0, 1.0, 1.0]
    for name, ratio in {"double": 2.0, "half": 0.5}.items():
        assert frame.loc[name, ["speedup", "low", "high"]].tolist() == pytest.approx([ratio] * 3)
    total = 5 + 15 / 3
    assert frame["tokens_per_s"].tolist() == pytest.approx([50 / total, 100 / total, 25 / total])
    assert frame["n_prompts"].tolist() == [5] * 3 and frame["identical"].tolist() == [5] * 3


def test_the_speedup_is_total_over_total_paired_by_prompt(clock):
    """A long prompt weighs more than a short one: the mean of the ratios would be 1.6."""
    plain, fast = [1.0, 1.0, 1.0, 1.0, 16.0], [0.25, 1.0, 1.0, 1.0, 16.0]
    methods = {"plain": clock.method("plain", plain.__getitem__), "fast": clock.method("fast", fast.__getitem__)}
    row = compare(methods, range(5), baseline="plain").set_index("method").loc["fast"]
    assert row["speedup"] == pytest.approx(20 / 19.25) and row["low"] == 1.0 < row["high"] < 4.0


def test_too_few_prompts_give_no_interval(clock):
    methods = {"plain": clock.method("plain", 2.0), "fast": clock.method("fast", 1.0)}
    frame = compare(methods, range(FEWEST - 1), baseline="plain")
    assert frame["speedup"].tolist() == [1.0, 2.0] and frame[["low", "high"]].isna().all(axis=None)


def test_on_the_same_text_only_prompts_that_part_are_left_out(clock):
    """The third prompt is ten times as fast, but for another text."""
    methods = {
        "plain": clock.method("plain", 1.0, tokens=3),
        "other": lambda p: clock.method("other", 0.05 if p == 2 else 0.5, tokens=3)(p)[: 2 if p == 2 else 3],
    }
    whole, same = (
        compare(methods, [0, 1, 2], baseline="plain", same_text=s).set_index("method") for s in (False, True)
    )
    assert whole.loc["other", "n_prompts"] == 3 and whole.loc["other", "speedup"] > 2
    assert same.loc["other", ["n_prompts", "identical", "speedup"]].tolist() == [2, 2, pytest.approx(2.0)]
    none = compare(methods, [2], baseline="plain", same_text=True).set_index("method").loc["other"]
    assert none["n_prompts"] == 0 and np.isnan(none["speedup"])


def test_tau_and_acceptance_come_with_our_methods_only(clock):
    target = toy.cyclic(5)
    methods = {
        "plain": clock.taking(1, lambda p: generate(target, p, max_new_tokens=20)),
        "lookup": clock.taking(1, lambda p: generate(target, p, drafter=LookupDrafter(), k=4, max_new_tokens=20)),
        "foreign": clock.method("foreign", 1.0),
    }
    frame = compare(methods, [[0, 1, 2, 3, 4, 0], [0]], baseline="plain").set_index("method")
    made = [methods["lookup"](p) for p in ([0, 1, 2, 3, 4, 0], [0])]
    assert frame.loc["plain", "tau"] == 1.0 and np.isnan(frame.loc["plain", "acceptance_rate"])
    assert frame.loc["lookup", "tau"] == 40 / sum(len(g.rounds) for g in made) > 1
    accepted, drafted = (sum(getattr(g, n) for g in made) for n in ("accepted_tokens", "total_draft_tokens"))
    assert frame.loc["lookup", "acceptance_rate"] == accepted / drafted
    assert frame.loc["foreign", ["tau", "acceptance_rate"]].isna().all()
    assert frame.loc["lookup", "identical"] == 2 and frame.loc["foreign", "identical"] == 0


# --- the bootstrap --------------------------------------------------------------------------------------------------

ROWS = st.lists(st.tuples(*[st.floats(0.1, 100)] * 4), min_size=FEWEST, max_size=9)


@given(ROWS)
@settings(max_examples=25, deadline=None, derandomize=True)  # holds for all but contrived samples
def test_the_interval_contains_the_value(rows):
    made = bootstrap(rows, rate_ratio)
    assert made.low * (1 - 1e-12) <= made.value <= made.high * (1 + 1e-12)
    assert made.value == pytest.approx(rate_ratio(np.array(rows))) and made.level == 0.95


@pytest.mark.parametrize("n", range(1, FEWEST))
def test_a_few_rows_have_a_value_but_no_interval(n):
    made = bootstrap([(10, 2, 10, 5)] * n, rate_ratio)
    assert made.value == 2.5 and np.isnan([made.low, made.high]).all()


def test_the_interval_covers_what_it_says():
    """200 samples of 20 from a known distribution: about 90 % of the 90 % intervals hold its mean."""
    rng, held = np.random.default_rng(1), 0
    for _ in range(200):
        made = bootstrap(rng.exponential(1.0, (20, 1)) + 1, lambda r: float(r.mean()), level=0.9, draws=300)
        held += made.low <= 2.0 <= made.high
    assert 160 <= held <= 190
