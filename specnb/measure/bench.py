"""Side-by-side timing: the same prompts through several methods, interleaved, with intervals over prompts."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from math import nan, sqrt
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from specnb.decode.generate import checked_settings, generate
from specnb.draft.base import Drafter
from specnb.draft.load import open_pair
from specnb.lm.base import LanguageModel
from specnb.machine import steady_threads
from specnb.measure.baseline import Baseline, time_baseline
from specnb.measure.cost import Cost, CostCurve, crosses_engines, verify_costs
from specnb.measure.experiment import Progress, check_prompts, silent
from specnb.measure.pair import pop_options, route_between
from specnb.prompts import Prompt
from specnb.records import Generation, pool_rounds

FEWEST = 5
"""Prompts below which no interval is given: how much fewer of them spread is hardly known."""
NORMAL = 1.959964
"""Standard errors of a 95 % interval; all intervals are of 95 %."""
TERMS = {
    1: (NORMAL, 2.372271, 2.822499, 2.555850, 1.589534),
    3: (2.393980, 4.028553, 6.456963, 7.925300, 6.962609),
    6: (2.638257, 5.250397, 9.800091, 13.984543, 14.444844),
}
"""Of Student's quantile, by how many things were tried of which one is shown. K's in a row gain and lose alike:
24 of them count as six."""


class Interval(NamedTuple):
    """A statistic with its 95 % interval over prompts."""

    value: float
    low: float
    high: float


Statistic = Callable[[np.ndarray], float]
"""Rows of observations `(n, columns)`, one row a prompt -> one number."""


def interval(rows: Sequence[Sequence[float]], statistic: Statistic, *, log: bool = True) -> Interval:
    """Student's interval over rows, of a ratio on a logarithmic scale; NaN ends for fewer than FEWEST rows.

    `log=False` is for a statistic that may be 0 or negative. See `ends`.
    """
    data = np.asarray(rows, dtype=np.float64)
    value, n = float(statistic(data)), len(data)
    if n < FEWEST:
        return Interval(value, nan, nan)
    without = np.array([statistic(np.delete(data, i, axis=0)) for i in range(n)])
    return Interval(value, *map(float, ends(np.asarray(value), without, log=log)))


def ends(value: np.ndarray, without: np.ndarray, *, log: bool = True) -> tuple[np.ndarray, np.ndarray]:
    """Both ends around `value (…)`, from the values `without (n, …)` each row: the jackknife with Student's t.

    Its spread is not shrunk by (n - 1) / n (MacKinnon & White 1985, HC3): so 5 or 12 prompts are covered 93 to 97 % of
    the time, with log speed-ups that spread by up to 0.4 and lengths by 0.5. Where one prompt in five alone brings the
    gain, 5 prompts cover it in about 75 %.
    """
    scale, back = (np.log, np.exp) if log else (np.asarray, np.asarray)
    middle = scale(value)
    half = student_t(len(without) - 1) * np.sqrt(((scale(without) - middle) ** 2).sum(0))
    return back(middle - half), back(middle + half)


def student_t(df: float, tried: int = 1) -> float:
    """Student's two-sided quantile at 1 - 0.05 / tried (Abramowitz & Stegun 26.7.5), of numbers or of arrays.

    Within 0.3 % from 4 degrees of freedom on. `tried` is one of TERMS.
    """
    return sum(term / df**power for power, term in enumerate(TERMS[tried]))


def widen(best: pd.DataFrame, tried: int) -> pd.DataFrame:
    """Widen the intervals of speed-ups that are each the best of `tried` on the same `n_prompts` (Bonferroni).

    Where none of three gains, the best one's own interval lies above 1 in 4 to 5 % of cases, this one in 1.7 to 2.9 %,
    and in 3.5 % where the three gain and lose independently.
    """
    df = best["n_prompts"] - 1
    power = student_t(df, tried) / student_t(df)
    return best.assign(**{end: best["speedup"] * (best[end] / best["speedup"]) ** power for end in ("low", "high")})


def wilson(rate: float, n: float, z: float) -> tuple[float, float]:
    """Both ends of Wilson's interval (1927) of a rate over `n` trials, `z` standard errors wide on each side."""
    middle, width = rate + z * z / (2 * n), 1 + z * z / n
    spread = z * sqrt(rate * (1 - rate) / n + z * z / (4 * n * n))
    return max(0.0, min(rate, (middle - spread) / width)), min(1.0, max(rate, (middle + spread) / width))


def rate_ratio(rows: np.ndarray) -> float:
    """Speed-up from rows (tokens, seconds, baseline tokens, baseline seconds): ratio of the two total rates."""
    tokens, seconds, base_tokens, base_seconds = rows.sum(axis=0)
    return float((tokens / seconds) / (base_tokens / base_seconds))


def rate(rows: np.ndarray) -> float:
    """Tokens a second from rows (tokens, seconds): total over total."""
    return float(np.divide(*rows.sum(axis=0)))


Method = Callable[[Any], Generation | Sequence[int]]
"""A prompt -> a Generation, or the generated ids of a foreign method, whose wall time is then taken here."""


class Timed(NamedTuple):
    """One run of one method on one prompt; `wall_s` is the whole call, prefill included."""

    method: str
    prompt: int
    repeat: int
    n_tokens: int
    wall_s: float
    token_ids: tuple[int, ...]
    generation: Generation | None


def interleaved(
    methods: Mapping[str, Method], prompts: Sequence[Any], *, repeats: int = 1, progress: Progress = silent
) -> Iterator[Timed]:
    """Run every method on every prompt in rotating order, and beforehand, uncounted, on the first prompt."""
    names = list(methods)
    order = [
        (repeat, at, names[(at + repeat + turn) % len(names)])
        for repeat in range(repeats)
        for at in range(len(prompts))
        for turn in range(len(names))
    ]
    for run in methods.values():
        run(prompts[0])
    for done, (repeat, at, name) in enumerate(order):
        progress(done, len(order), f"timing {name}, prompt {at + 1} of {len(prompts)}")
        began = perf_counter()
        result = methods[name](prompts[at])
        wall_s = perf_counter() - began
        generation = result if isinstance(result, Generation) else None
        ids = tuple(generation.token_ids if generation else result)
        yield Timed(name, at, repeat, len(ids), wall_s, ids, generation)


def compare(
    methods: Mapping[str, Method],
    prompts: Sequence[Any],
    *,
    baseline: str,
    repeats: int = 1,
    progress: Progress = silent,
) -> pd.DataFrame:
    """Time `methods` on `prompts` against `baseline`, one of them; one row a method.

    Columns: method, tokens_per_s, speedup with low and high (an interval over prompts, paired with the baseline on
    the same prompt), tau and acceptance_rate where the method returns a Generation, identical (prompts whose tokens
    equal the baseline's), n_prompts.

    >>> from functools import partial
    >>> from specnb.decode.generate import generate
    >>> from specnb.lm import toy
    >>> plain = partial(generate, toy.markov(8, seed=1), max_new_tokens=16)
    >>> table = compare({"plain": plain, "lookup": partial(plain, drafter="lookup")}, [[0], [1]], baseline="plain")
    >>> table.set_index("method")["identical"].to_dict()
    {'plain': 2, 'lookup': 2}
    """
    runs = interleaved(methods, prompts, repeats=repeats, progress=progress)
    return tabulate_speeds(list(runs), baseline=baseline)


def tabulate_speeds(runs: Sequence[Timed], *, baseline: str) -> pd.DataFrame:
    """The table of `compare` from runs that are there already: of all prompts, or of some of them."""
    repeats = {"n_tokens": "first", "wall_s": "median", "token_ids": "first"}  # of one method on one prompt
    by_prompt = pd.DataFrame(runs, columns=Timed._fields).groupby(["method", "prompt"], sort=False).agg(repeats)
    rows = []
    for name in by_prompt.index.unique("method"):
        pairs = by_prompt.loc[name].merge(by_prompt.loc[baseline], on="prompt", suffixes=("", "_plain"))
        times = pairs[["n_tokens", "wall_s", "n_tokens_plain", "wall_s_plain"]].to_numpy(float)
        value, low, high = interval(times, rate_ratio)
        counts = pool_rounds([run.generation for run in runs if run.method == name and run.generation])
        rows.append({
            "method": name, "tokens_per_s": rate(times[:, :2]), "speedup": value, "low": low, "high": high,
            "tau": counts["tau"], "acceptance_rate": counts["acceptance_rate"],
            "identical": int((pairs["token_ids"] == pairs["token_ids_plain"]).sum()), "n_prompts": len(pairs),
        })  # fmt: skip
    return pd.DataFrame(rows)


def pays(low: float, high: float) -> str:
    """Return `pays` where the whole interval lies above 1, `does not pay` where it lies below, else `undecided`.

    >>> pays(1.1, 1.4), pays(0.7, 1.2), pays(float("nan"), float("nan"))
    ('pays', 'undecided', 'undecided')
    """
    return "pays" if low > 1 else "does not pay" if high < 1 else "undecided"


class PairBench(NamedTuple):
    """The costs of a pair, T(n) and c, and the table of `bench.compare`: plain decoding, each K, and `auto`.

    Its speed-ups are over the baseline.
    """

    target: str
    drafter: str
    verify_curve: CostCurve
    c: float
    c_across_engines: bool
    baseline: Baseline
    table: pd.DataFrame

    def best(self) -> pd.Series:
        """The row of the fastest K, its interval widened because it is the best of several."""
        drafted = self.table.iloc[1:-1]  # between plain decoding and `auto`
        tried = min(n for n in TERMS if n >= min(len(drafted), max(TERMS)))
        return widen(drafted, tried).loc[drafted["speedup"].idxmax()]

    @property
    def verdict(self) -> str:
        """The verdict of `pays` on the fastest K; undecided if the machine was busy."""
        return "undecided" if self.verify_curve.busy else pays(*self.best()[["low", "high"]])

    @property
    def leave_off(self) -> bool:
        """Whether no K was faster than the baseline, whatever the verdict."""
        return self.best()["speedup"] <= 1

    @property
    def conclusion(self) -> str:
        """The verdict with its numbers, in sentences; the advice to draft nothing comes first."""
        row, busy = self.best(), self.verify_curve.busy
        advice = "Leave drafting off. " if self.leave_off else ""
        reason = " (the machine was busy)" if busy else ""
        ends = f"95 % CI {row['low']:.2f} to {row['high']:.2f}"
        if row["n_prompts"] < FEWEST:
            ends = f"no interval for fewer than {FEWEST} prompts"
        speed = f"{row['speedup']:.2f} times as fast as the fastest plain decoding ({ends})"
        rate, needed = row["acceptance_rate"], row["rate_needed"]
        accepted = (
            "No tokens were drafted." if pd.isna(rate) else f"{100 * rate:.0f} % of the draft tokens were accepted."
        )
        if not busy and needed > 1:
            accepted += " Even 100 % would not pay here"
            accepted += f": one draft step takes {self.c:.2f} plain decoding steps." if self.c >= 1 else "."
        elif not busy and needed > 0:  # at 0 and below, passes over more tokens took less time: noise
            accepted += f" Drafting pays from {100 * needed:.0f} %."
        measured = f"{row['method']} is {speed}, measured live on {row['n_prompts']} prompts."
        return f"{advice}Verdict: {self.verdict}{reason}. {measured} {accepted}"


def bench_pair(
    target_name: str,
    drafter_name: str,
    chosen: Sequence[Prompt],
    *,
    ks: Sequence[int],
    max_new_tokens: int,
    heads_checkpoint: str | None = None,
) -> PairBench:
    """Open a target and a drafter, and time them with `time_pair`."""
    checked_settings(min(ks), max_new_tokens)
    options = pop_options(drafter_name, {"heads_checkpoint": heads_checkpoint})
    with open_pair(target_name, drafter_name, strict=True, **options) as (target, drafter, _):
        check_prompts(target, chosen, max_new_tokens)
        return time_pair(target, drafter, chosen, ks=ks, max_new_tokens=max_new_tokens)


def time_pair(
    target: LanguageModel,
    drafter: Drafter,
    chosen: Sequence[Prompt],
    *,
    ks: Sequence[int],
    max_new_tokens: int,
    progress: Progress = silent,
) -> PairBench:
    """Time a drafter against plain decoding, interleaved: with every K, and with a router that chooses K (`auto`)."""
    progress(0, 1, "measuring the costs of forward passes")
    with steady_threads(target, drafter.model):
        curve, c = verify_costs(target, [drafter], max(ks))
        plain = partial(generate, target, max_new_tokens=max_new_tokens, strict=True)
        methods = {"plain": plain} | {f"K = {k}": partial(plain, drafter=drafter, k=k) for k in ks}
        methods["auto"] = partial(plain, drafter=route_between(target, [drafter]))
        timed = compare(methods, chosen, baseline="plain", progress=progress)
    baseline = time_baseline(target, chosen)
    cost, across = Cost(curve, c[drafter.name]), crosses_engines(target, drafter)
    needed = [cost.rate_needed(k, baseline.share) if k else None for k in (0, *ks, 0)]
    timed.insert(timed.columns.get_loc("acceptance_rate") + 1, "rate_needed", needed)
    return PairBench(target.name, drafter.name, curve, c[drafter.name], across, baseline, baseline.over(timed))
