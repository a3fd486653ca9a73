"""Interleaved timing of several methods on the same prompts, with intervals over prompts."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple, Self

import pandas as pd

from specnb.decode.generate import generate
from specnb.draft.base import Drafter
from specnb.errors import InputError
from specnb.lm.base import LanguageModel
from specnb.machine import steady_threads
from specnb.measure.auto import route_between
from specnb.measure.baseline import Baseline, BaselineTimer
from specnb.measure.cost import Cost, CostCurve, crosses_engines, verify_costs
from specnb.measure.experiment import Progress, silent
from specnb.measure.intervals import FEWEST, TERMS, interval, pays, rate_ratio, widen
from specnb.prompts import Prompt
from specnb.records import Generation, pool_rounds

Method = Callable[[Any], Generation | Sequence[int]]
"""Maps a prompt to a Generation or, for methods of other libraries, to the generated token ids."""


class Timed(NamedTuple):
    """A run of a method on a prompt; `wall_s` is the time of the whole call, with its prefill."""

    method: str
    prompt: int
    repeat: int
    n_tokens: int
    wall_s: float
    token_ids: tuple[int, ...]
    generation: Generation | None

    def without_prefill(self) -> Self:
        """Return the run with the tokens and the time of decoding alone; it needs a Generation."""
        generation = self.generation
        return self._replace(n_tokens=generation.n_decoded, wall_s=generation.decode_s)


def rotate(names: Sequence[str], n_prompts: int, repeats: int = 1) -> list[tuple[int, int, str]]:
    """Return (repeat, prompt, name) of interleaved runs, in rotating order."""
    return [
        (repeat, index, names[(index + repeat + turn) % len(names)])
        for repeat in range(repeats)
        for index in range(n_prompts)
        for turn in range(len(names))
    ]


def interleaved(
    methods: Mapping[str, Method],
    prompts: Sequence[Any],
    *,
    repeats: int = 1,
    timer: BaselineTimer | None = None,
    progress: Progress = silent,
) -> Iterator[Timed]:
    """Run every method on every prompt in rotating order, after a warm-up on the first prompt.

    Before the runs of each prompt, `timer` times the baseline.
    """
    order = rotate(list(methods), len(prompts), repeats)
    for run in methods.values():
        run(prompts[0])
    for done, (repeat, index, name) in enumerate(order):
        progress(done, len(order), f"timing {name}, prompt {index + 1} of {len(prompts)}")
        if timer and not done % len(methods):
            timer.time(prompts[index])
        start_s = perf_counter()
        result = methods[name](prompts[index])
        wall_s = perf_counter() - start_s
        generation = result if isinstance(result, Generation) else None
        ids = tuple(generation.token_ids if generation else result)
        yield Timed(name, index, repeat, len(ids), wall_s, ids, generation)


def compare(
    methods: Mapping[str, Method],
    prompts: Sequence[Any],
    *,
    baseline: str,
    repeats: int = 1,
    progress: Progress = silent,
) -> pd.DataFrame:
    """Time whole calls of `methods` on `prompts` and compare them with `baseline`, one of them.

    Returns a row for each method: method, tokens_per_s, speedup with low and high (interval over
    prompts, paired with the baseline on the same prompt), tau and acceptance_rate if the method
    returns a Generation, identical (number of prompts with the baseline's tokens), n_prompts.

    >>> from functools import partial
    >>> from specnb.decode.generate import generate
    >>> from specnb.lm import toy
    >>> plain = partial(generate, toy.markov(8, seed=1), max_new_tokens=16)
    >>> methods = {"plain": plain, "lookup": partial(plain, drafter="lookup")}
    >>> table = compare(methods, [[0], [1]], baseline="plain")
    >>> table.set_index("method")["identical"].to_dict()
    {'plain': 2, 'lookup': 2}
    """
    runs = interleaved(methods, prompts, repeats=repeats, progress=progress)
    return tabulate_speeds(list(runs), baseline=baseline)


def tabulate_speeds(runs: Sequence[Timed], *, baseline: str) -> pd.DataFrame:
    """Return the table of `compare` for completed runs, which need not cover all prompts."""
    frame = pd.DataFrame(runs, columns=Timed._fields).rename(columns={"n_tokens": "n_decoded"})
    frame["seconds"] = frame.groupby(["method", "prompt"])["wall_s"].transform("median")
    counts = [pool_rounds([run.generation] if run.generation else []) for run in runs]
    frame = frame.join(pd.DataFrame(counts))
    frame["rounds"] = [len(run.generation.rounds) if run.generation else 0 for run in runs]
    frame = frame.drop_duplicates(["method", "prompt"])  # repeats
    plain = frame[frame["method"] == baseline].set_index("prompt")[
        ["n_decoded", "seconds", "token_ids"]
    ]
    rows = frame.join(
        plain.set_axis(["plain_decoded", "plain_s", "plain_ids"], axis=1), on="prompt"
    )
    rows["identical"] = rows["token_ids"] == rows["plain_ids"]
    columns = [
        "method",
        "tokens_per_s",
        "speedup",
        "low",
        "high",
        "tau",
        "acceptance_rate",
        "identical",
        "n_prompts",
    ]
    return speed_table(rows, ["method"])[columns]


SPEED = ["n_decoded", "seconds", "plain_decoded", "plain_s"]
"""Columns from which a speedup is computed: tokens and seconds of a run, and of plain decoding."""


def speed_table(rows: pd.DataFrame, by: Sequence[str]) -> pd.DataFrame:
    """Return one row per group: totals, and the speedup over plain decoding in the same engine.

    `rows` has a row for each text and method, live or replayed, with the columns SPEED, `drafted`,
    `accepted`, `rounds` and `tau`. Optional columns are `live_plain_s`, the measured seconds of
    plain decoding if `plain_s` is predicted; `wall_s`, `n_tokens`, `plain_wall_s` and
    `plain_tokens`, all with prefill; `identical` and `temperature`; and `lossless`.

    Columns: those of `by`, tokens_per_s, drafted, accepted, acceptance_rate, tau, speedup with low
    and high (interval over texts), wall_speedup, identical (number of greedy texts that equal plain
    decoding), lossless, n_prompts. Without the optional columns of `rows`, wall_speedup, identical
    and lossless are absent.
    """
    return pd.DataFrame(
        dict(zip(by, key, strict=True)) | _speed(group)
        for key, group in rows.groupby(list(by), sort=False, observed=True)
    )


def _speed(rows: pd.DataFrame) -> dict[str, Any]:
    """Return the columns of `speed_table` for the rows of one group."""
    decoding = rows[rows["n_decoded"] > 0]  # an answer of one token is all prefill
    value, low, high = interval(decoding[SPEED], rate_ratio)
    plain_s = decoding["live_plain_s" if "live_plain_s" in rows else "plain_s"]
    drafted, accepted, rounds = rows[["drafted", "accepted", "rounds"]].sum()
    columns = {
        "tokens_per_s": value * decoding["plain_decoded"].sum() / plain_s.sum(),
        "drafted": drafted,
        "accepted": accepted,
        "acceptance_rate": accepted / drafted if drafted else None,
        "tau": (rows["tau"] * rows["rounds"]).sum() / rounds if rounds else None,
        "speedup": value,
        "low": low,
        "high": high,
    }
    if "plain_wall_s" in rows:
        columns["wall_speedup"] = rate_ratio(
            rows[["n_tokens", "wall_s", "plain_tokens", "plain_wall_s"]]
        )
    if "identical" in rows:
        sampled = "temperature" in rows and rows["temperature"].any()
        columns["identical"] = None if sampled else rows["identical"].sum()
    if "lossless" in rows:
        columns["lossless"] = rows["lossless"].all()
    return columns | {"n_prompts": len(rows)}


class PairBench(NamedTuple):
    """Costs of a target and a drafter (T(n) and c), and their speeds.

    `table` has the columns of `compare` for plain decoding, each K, and `auto`, without prefills,
    and those that `Baseline.over` adds.
    """

    target: str
    drafter: str
    verify_curve: CostCurve
    c: float
    c_across_engines: bool
    baseline: Baseline
    table: pd.DataFrame

    def best(self) -> pd.Series:
        """Return the row of the fastest K, with an interval widened for the selection."""
        drafted = self.table.iloc[1:-1]  # without plain decoding and `auto`
        tried = min(n for n in TERMS if n >= min(len(drafted), max(TERMS)))
        return widen(drafted, tried).loc[drafted["speedup"].idxmax()]

    @property
    def verdict(self) -> str:
        """The verdict of `pays` on the fastest K; undecided if the machine was busy."""
        ends = self.best()[["over_fastest_low", "over_fastest_high"]]
        return "undecided" if self.verify_curve.busy else pays(*ends)

    @property
    def conclusion(self) -> str:
        """The verdict and its numbers in sentences, after the advice not to draft, if any."""
        row = self.best()
        busy = self.verify_curve.busy
        advice = "Leave drafting off. " if row["over_fastest"] <= 1 else ""
        reason = " (the machine was busy)" if busy else ""
        ends = f"95 % CI {row['over_fastest_low']:.2f} to {row['over_fastest_high']:.2f}"
        if row["n_prompts"] < FEWEST:
            ends = f"no interval for fewer than {FEWEST} prompts"
        speed = f"{row['over_fastest']:.2f} times as fast as the fastest plain decoding ({ends})"
        rate = row["acceptance_rate"]
        needed = row["rate_needed"]
        accepted = (
            "No tokens were drafted."
            if pd.isna(rate)
            else f"{100 * rate:.0f} % of the draft tokens were accepted."
        )
        if not busy and needed > 1:
            accepted += " Even 100 % would not pay here"
            accepted += (
                f": one draft step takes {self.c:.2f} plain decoding steps." if self.c >= 1 else "."
            )
        elif not busy and needed > 0:  # at 0 or less, passes over more tokens took less time: noise
            accepted += f" Drafting pays from {100 * needed:.0f} %."
        measured = f"{row['method']} is {speed}, measured live on {row['n_prompts']} prompts."
        return f"{advice}Verdict: {self.verdict}{reason}. {measured} {accepted}"


def time_pairs(
    target: LanguageModel,
    drafters: Sequence[Drafter],
    chosen: Sequence[Prompt],
    *,
    ks: Sequence[int],
    max_new_tokens: int,
    progress: Progress = silent,
) -> list[PairBench]:
    """Time plain decoding, and each drafter with every K and a router (`auto`), interleaved.

    Speeds are those of decoding, without the prefill.
    """
    progress(0, 1, "measuring the costs of forward passes")
    models = [target, *(drafter.model for drafter in drafters)]
    with steady_threads(*models), BaselineTimer(target) as timer:
        # 1. Time forward passes.
        curve, c = verify_costs(target, drafters, max(ks))
        # 2. Run all methods live, interleaved.
        plain = partial(generate, target, max_new_tokens=max_new_tokens, strict=True)
        methods = {"plain": plain}
        for drafter in drafters:
            methods |= {
                f"{drafter.name}: K = {k}": partial(plain, drafter=drafter, k=k) for k in ks
            }
            methods[f"{drafter.name}: auto"] = partial(
                plain, drafter=route_between(target, [drafter])
            )
        timed = interleaved(methods, chosen, timer=timer, progress=progress)
        runs = [run.without_prefill() for run in timed]
        if not any(run.n_tokens for run in runs):
            raise InputError("got answers of one token, expected longer ones: raise max_new_tokens")
        baseline = timer.baseline()
    # 3. Tabulate the runs by drafter.
    pairs = []
    for drafter in drafters:
        prefix = f"{drafter.name}: "
        paired = [
            run._replace(method=run.method.removeprefix(prefix))
            for run in runs
            if run.method == "plain" or run.method.startswith(prefix)
        ]
        table = tabulate_speeds(paired, baseline="plain")
        cost = Cost(curve, c[drafter.name])
        needed = [None, *(cost.rate_needed(k, baseline.share) for k in ks), None]
        table.insert(table.columns.get_loc("acceptance_rate") + 1, "rate_needed", needed)
        pair = PairBench(
            target=target.name,
            drafter=drafter.name,
            verify_curve=curve,
            c=cost.c,
            c_across_engines=crosses_engines(target, drafter),
            baseline=baseline,
            table=baseline.over(table),
        )
        pairs.append(pair)
    return pairs
