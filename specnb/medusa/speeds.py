"""From timed runs, plain and with heads, to what heads do in each category: tau, alpha_1, speed-up, time split."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from specnb.measure.bench import Timed, table
from specnb.medusa.serving import served_counts

PLAIN = "plain"
ALL = "all"
PARTS = ("draft", "verify", "rewind", "other")


def speed_table(runs: Sequence[Timed], categories: Sequence[str], name: str) -> pd.DataFrame:
    """One row for each category, and one of all: `category` (of each prompt), then what heads did there.

    Columns: those of `bench.table` for the method `name`, plain_tokens_per_s, alpha_1 with accepted_1 and tested_1 (of
    one run of each prompt), share_identical, and the share of the decoding time of each of PARTS.
    """
    return pd.DataFrame([
        _speeds(category, [r for r in runs if category in (ALL, categories[r.prompt])], name)
        for category in (*dict.fromkeys(categories), ALL)
    ])  # fmt: skip


def _speeds(category: str, runs: Sequence[Timed], name: str) -> dict[str, Any]:
    rows = {row["method"]: row for row in table(runs, baseline=PLAIN).to_dict(orient="records")}
    made = [r.generation for r in runs if r.method == name]
    # a greedy generation repeats itself: only its times are new evidence
    once = [r.generation for r in runs if r.method == name and not r.repeat]
    first = [counts[0] for one in once if len(counts := served_counts(one))]
    accepted, tested = np.sum(first, axis=0) if first else (0, 0)
    parts = {part: sum(getattr(r, f"{part}_s") for one in made for r in one.rounds) for part in PARTS}
    return {
        "category": category,
        **rows[name],
        "plain_tokens_per_s": rows[PLAIN]["tokens_per_s"],
        "alpha_1": accepted / tested if tested else None,
        "accepted_1": int(accepted),
        "tested_1": int(tested),
        "share_identical": rows[name]["identical"] / rows[name]["n_prompts"],
        **{f"{part}_share": seconds / sum(parts.values()) for part, seconds in parts.items()},
    }


def _interval(row: Mapping[str, Any]) -> str:
    """The speed-up; its interval where there are prompts enough for one."""
    known = np.isfinite(row["low"])
    return f"{row['speedup']:.2f}" + (f" [{row['low']:.2f}, {row['high']:.2f}]" if known else "")


SHOWN: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "category": lambda row: row["category"],
    "tau": lambda row: f"{row['tau']:.2f}",
    "alpha_1": lambda row: f"{row['accepted_1']}/{row['tested_1']}",
    "speed-up": _interval,
    "tokens/s": lambda row: f"{row['tokens_per_s']:.1f}",
    "plain": lambda row: f"{row['plain_tokens_per_s']:.1f}",
    "draft/verify/rewind/other": lambda row: " ".join(f"{row[f'{part}_share']:.0%}" for part in PARTS),
    "identical": lambda row: f"{row['identical']}/{row['n_prompts']}",
}
"""Columns for a reader, and what stands in them."""


def shown_rows(speeds: pd.DataFrame) -> list[list[str]]:
    """The rows of a `speed_table` as text, in the columns SHOWN."""
    return [[cell(row) for cell in SHOWN.values()] for row in speeds.to_dict(orient="records")]
