"""Turn records into tidy tables: each function takes records or frames and returns a DataFrame."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd

from specnb.measure.baseline import Baseline
from specnb.measure.bench import SPEED, speed_table
from specnb.measure.cost import CostCurve
from specnb.measure.intervals import TERMS, interval, pays, rate, rate_ratio, widen
from specnb.records import RunRecord

ALL = "all"
BUSY = "the machine was busy"
"""The verdict on times measured while other processes used some of the cores."""
NOTHING = "–"
LIVE = [
    "prompt_id",
    "category",
    "drafter",
    "temperature",
    "k",
    "tau",
    "n_decoded",
    "wall_s",
    "lossless",
    "loops",
]
"""Fields of a generation that are columns of `live_rows`."""


def compact(frame: pd.DataFrame) -> pd.DataFrame:
    """Return a table for display: two decimals, dashes for missing values, intervals with values.

    The bounds of an interval are columns such as low and high, or live_low and live_high; they are
    merged into the column before them.
    """
    shown = frame.convert_dtypes().round(2).astype(object).where(frame.notna(), NOTHING)
    for name, below in pairwise(frame.columns):
        if below == "low" or below.endswith("_low"):
            above = below.removesuffix("low") + "high"
            shown[name] = [
                NOTHING
                if pd.isna(value)
                else f"{value:.2f}" + ("" if pd.isna(low) else f" [{low:.2f}, {high:.2f}]")
                for value, low, high in frame[[name, below, above]].itertuples(index=False)
            ]
            shown = shown.drop(columns=[below, above])
    return shown


def k_sweep(record: RunRecord) -> pd.DataFrame:
    """Return the live runs of a sweep: one row per category, temperature and K.

    K = 0 is plain decoding; the category `all` pools the others. Columns: those of
    `measure.bench.speed_table`, and

    - speedup, low, high: decoding speed over plain decoding in the same engine, without prefill and
      the first token; the interval is over prompts, NaN for fewer than `intervals.FEWEST`
    - over_fastest, over_fastest_low, over_fastest_high: the same over the record's `baseline`
    - wall_speedup: including the prefill of target and drafter, over the same engine
    - busy: whether other processes disturbed the run
    """
    return _over_baseline(live_rows(record), record)


def live_rows(record: RunRecord) -> pd.DataFrame:
    """Return one row per generation, with the last plain one of the same prompt and temperature."""
    plain_of = {(g.prompt_id, g.temperature): g for g in record.generations if not g.k}
    rows = []
    for g in [*plain_of.values(), *(g for g in record.generations if g.k)]:
        plain = plain_of[g.prompt_id, g.temperature]
        rows.append(
            {name: getattr(g, name) for name in LIVE}
            | {
                "rounds": len(g.rounds),
                "drafted": g.total_draft_tokens,
                "accepted": g.accepted_tokens,
                "seconds": g.decode_s,
                "n_tokens": len(g.token_ids),
                "plain_decoded": plain.n_decoded,
                "plain_s": plain.decode_s,
                "plain_tokens": len(plain.token_ids),
                "plain_wall_s": plain.wall_s,
                "identical": g.token_ids == plain.token_ids,
            }
        )
    return pd.DataFrame(rows)


def _pooled(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the rows, followed by a copy of each with the category `all`."""
    order = pd.CategoricalDtype([*rows["category"].unique(), ALL])
    return pd.concat([rows, rows.assign(category=ALL)]).astype({"category": order})


def _over_baseline(rows: pd.DataFrame, record: RunRecord, by: Sequence[str] = ()) -> pd.DataFrame:
    """Return `speed_table` of `rows` by `by`, category, temperature and K, over the baseline."""
    by = [*by, "category", "temperature", "k"]
    frame = speed_table(_pooled(rows).sort_values(by), by)
    return baseline(record).over(frame.assign(busy=busy(record)))


def baseline(record: RunRecord) -> Baseline:
    """Return the fastest measured plain decoding; in older records, that of the same engine."""
    plain = [g for g in record.generations if not g.k]
    seconds = sum(g.decode_s for g in plain)
    rate = sum(g.n_decoded for g in plain) / seconds if seconds else None
    return Baseline.model_validate(
        record.measurements.get("baseline", {}) | {"live_tokens_per_s": rate}
    )


def busy(record: RunRecord) -> bool | None:
    """Return whether other processes disturbed the run or its cost curve; None if not recorded."""
    parts = (
        record.provenance.get("extra", {}).get("contention"),
        record.measurements.get("verify_curve"),
    )
    return max((part["busy"] for part in parts if part and part["busy"] is not None), default=None)


def replay_rows(record: RunRecord, *, live: bool = False) -> pd.DataFrame:
    """Return one row per drafter, prompt, temperature and K of the replay.

    With `live`, only rows of the drafter that also ran live.
    """
    rows = pd.DataFrame(record.measurements["replay"]["rows"])
    rows["plain_decoded"] = rows["n_decoded"]
    return rows[rows["drafter"] == rows["drafter"][0]] if live else rows


def replayed(record: RunRecord) -> pd.DataFrame:
    """Return the replay of every drafter: the columns of `k_sweep`, and `drafter`.

    Counts are expected values; intervals are over prompts. Speedups are predicted from the measured
    costs; tokens_per_s is the live rate of plain decoding times the speedup, because a step in a
    run takes longer than one timed in a loop. A run with a rule other than `token` has no replay;
    its live sweep is returned.
    """
    if "replay" not in record.measurements:
        return k_sweep(record).assign(drafter=record.params["drafter"])
    return _over_baseline(replay_rows(record), record, ["drafter"])


def replay_of_live(record: RunRecord) -> pd.DataFrame:
    """Return the replay of the prompts and K that also ran live, in the columns of `k_sweep`."""
    ran = live_rows(record).query("k > 0")[["prompt_id", "temperature", "k"]]
    return _over_baseline(replay_rows(record, live=True).merge(ran), record)


def replay_check(record: RunRecord) -> pd.DataFrame:
    """Compare live runs with their replay: tau and speed by temperature and K, over all prompts."""
    columns = ["temperature", "k", "tau", "tokens_per_s"]
    tables = k_sweep(record), replay_of_live(record)
    pooled = [table.query("category == @ALL and k > 0")[columns] for table in tables]
    both = pd.merge(*pooled, on=["temperature", "k"], suffixes=("", "_replayed"))
    both["tau_ratio"] = both["tau_replayed"] / both["tau"]
    both["speed_ratio"] = both["tokens_per_s_replayed"] / both["tokens_per_s"]
    return both


def turns(record: RunRecord) -> pd.DataFrame:
    """Return the acceptance rate by turn of a conversation (greedy, the largest live K).

    The interval is over conversations.
    """
    rows = []
    for turn, group in pd.DataFrame(record.measurements["turns"]).groupby("turn"):
        counts = group[["accepted", "drafted"]]
        share = (
            interval(counts, rate, log=False)
            if counts["drafted"].all()
            else (rate(counts), np.nan, np.nan)
        )
        rows.append((turn, len(group), *counts.sum(), *np.clip(share, 0, 1)))
    columns = ["turn", "conversations", *counts, "acceptance_rate", "low", "high"]
    return pd.DataFrame(rows, columns=columns)


def best_range(record: RunRecord) -> pd.DataFrame:
    """Return the best K > 0 per drafter, content and temperature, and the range of equally fast K.

    A K is slower if the interval (over prompts) of its time relative to the best K lies above 1.
    Columns: those of `fastest_k`, over_fastest with its interval, and

    - verdict: that of `intervals.pays` on over_fastest, whose interval is widened for the choice
      among many K; BUSY if other processes disturbed the run
    """
    if "replay" not in record.measurements:  # a rule other than token: only the live K
        return best_k(replayed(record)).assign(range=NOTHING)
    rows = _pooled(replay_rows(record)).query("n_decoded > 0")
    frame = baseline(record).over(fastest_k(rows, ["drafter", "category", "temperature"], record))
    verdict = [*map(pays, frame["over_fastest_low"], frame["over_fastest_high"])]
    return frame.assign(verdict=BUSY if busy(record) else verdict)


def fastest_k(rows: pd.DataFrame, by: list[str], record: RunRecord) -> pd.DataFrame:
    """Return the fastest K of each group of replayed `rows`, by total seconds over its texts.

    Columns: those of `by` and

    - k, and `range`, the range of K around it that is not slower with 95 % confidence
    - longest: the longest draft that the drafter proposed; a larger K changes nothing
    - speedup, low, high: over plain decoding in the same engine; the interval over prompts is
      widened for the choice of K
    - tau, n_prompts
    - without_loops: the speedup on prompts whose plain output does not loop
    """
    loops = {(g.prompt_id, g.temperature) for g in record.generations if not g.k and g.loops}
    groups = [group for _, group in rows.groupby(by, sort=False, observed=True)]
    choices = pd.DataFrame(map(_choose_k, groups))
    fastest = [group[group["k"] == k] for group, k in zip(groups, choices["k"], strict=True)]
    choices["without_loops"] = [_speedup_without(loops, of_group) for of_group in fastest]
    speeds = widen(speed_table(pd.concat(fastest), by), max(TERMS)).join(choices)
    columns = [
        "k",
        "range",
        "longest",
        "speedup",
        "low",
        "high",
        "tau",
        "n_prompts",
        "without_loops",
    ]
    return speeds[[*by, *columns]]


def _choose_k(rows: pd.DataFrame) -> dict[str, Any]:
    """Return k, range and longest of `fastest_k` for the rows of one group."""
    seconds = rows.pivot(index="prompt_id", columns="k", values="seconds")
    best = seconds.sum().idxmin()
    slower = [k for k in seconds if k != best and interval(seconds[[k, best]], rate).low > 1]
    changes = [k for before, k in pairwise(seconds) if (seconds[k] != seconds[before]).any()]
    longest = max(changes, default=min(seconds))
    first = max((k + 1 for k in slower if k < best), default=min(seconds))
    last = min([longest, *(k - 1 for k in slower if k > best)])
    near = str(first) if first == last else f"{first}-{last}"
    return {"k": best, "range": near, "longest": longest}


def _speedup_without(texts: set[tuple[str, float]], rows: pd.DataFrame) -> float:
    """Return the speedup of `rows` without `texts`; NaN if none is left."""
    pairs = zip(rows["prompt_id"], rows["temperature"], strict=True)
    left = rows.loc[[text not in texts for text in pairs], SPEED]
    return rate_ratio(left) if len(left) else np.nan


def best_k(sweep: pd.DataFrame) -> pd.DataFrame:
    """Return the fastest K > 0 per category and temperature (machine, drafter), and a verdict.

    verdict: that of `intervals.pays` on the speedup over plain decoding in the same engine; BUSY if
    the sweep is marked as busy. K is selected on these prompts. The interval accounts for that; the
    point estimate is optimistic: confirm it on held-out prompts.
    """
    drafting = sweep.query("k > 0")
    by = [name for name in ("machine", "drafter", "category", "temperature") if name in sweep]
    at = drafting.groupby(by, sort=False)["speedup"].idxmax()
    best = widen(drafting.loc[at].reset_index(drop=True), max(TERMS))
    verdict = np.where(best["busy"].eq(True), BUSY, [*map(pays, best["low"], best["high"])])
    return best[[*by, "k", "speedup", "low", "high", "tau"]].assign(verdict=verdict)


def verify_cost(record: RunRecord) -> pd.DataFrame:
    """Return the measured verify cost curve: width, median_s, ratio T(n)/T(1), busy."""
    curve = CostCurve.model_validate(record.measurements["verify_curve"])
    return pd.DataFrame(
        {
            "width": curve.widths,
            "median_s": curve.median_s,
            "ratio": [*map(curve.ratio, curve.widths)],
            "busy": curve.busy,
        }
    )


def side_by_side(record: RunRecord) -> pd.DataFrame:
    """Return the cost of verifying four draft tokens, by context length and sequences per pass.

    Columns: context, sequences, plain_ms (one token per sequence), ratio (five tokens per sequence
    over one). Several sequences are simulated by more tokens of one sequence: the weights and
    matrix products are the same, but there is only one KV cache.
    """
    rows = []
    for curve in map(CostCurve.model_validate, record.measurements["contexts"]):
        for n in curve.widths:
            if 5 * n in curve.widths:
                ratio = curve.seconds(5 * n) / curve.seconds(n)
                rows.append((curve.context, n, 1e3 * curve.seconds(n), ratio))
    return pd.DataFrame(rows, columns=["context", "sequences", "plain_ms", "ratio"])


def checks(record: RunRecord) -> pd.DataFrame:
    """Check facts that hold on every machine: greedy runs match plain decoding, counts add up."""
    live = live_rows(record)
    greedy = live.query("k > 0 and temperature == 0")
    plain = live.query("k == 0")
    same = greedy.query("identical")
    forks = sum(fork["near_tie"] for fork in record.measurements["forks"])
    sound = all(
        len(r.committed_ids) - 1 <= r.n_accepted <= r.k
        for g in record.generations
        for r in g.rounds
    )
    rows = [
        (
            "greedy texts equal plain decoding, or diverge at a near-tie",
            len(greedy),
            len(same) + forks,
        ),
        (
            "no round commits more than its accepted tokens and one more",
            len(live),
            len(live) * sound,
        ),
        ("plain decoding commits one token per pass", len(plain), (plain["tau"] == 1).sum()),
    ]
    if "replay" in record.measurements:
        replay = replay_rows(record, live=True).query("temperature == 0")
        equal = same.merge(replay, on=["prompt_id", "k", "rounds", "drafted", "accepted"])
        rows.append(("greedy replays have the rounds of their live runs", len(same), len(equal)))
    return check_table(rows)


def check_table(rows: list[tuple[str, int, int]]) -> pd.DataFrame:
    """Return the table of checks: check, of (number of cases), hold (number that pass), ok."""
    frame = pd.DataFrame(rows, columns=["check", "of", "hold"])
    return frame.assign(ok=frame["of"] == frame["hold"])
