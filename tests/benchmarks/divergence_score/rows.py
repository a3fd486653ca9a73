"""The raw table of a score: its columns and sums.

One row is one tool on one run, so that every share can be checked against its runs.
"""

import pandas as pd

from specnb.measure.triage import Share

NOTHING = "-"
"""Stands for no module; the model itself is the empty path."""
COLUMNS = [
    "kind",
    "name",
    "layer",
    "dtype",
    "seed",
    "tool",
    "against",
    "verdict",
    "structural",
    "module",
    "expected",
    "position",
    "token",
    "exact",
    "cause",
    "expected_cause",
    "rank",
    "seconds",
]
"""`kind`: fault or control. `layer` -1: none. `against`: what the tool compared with. `structural`:
the tool named a `module` (right is `expected`) at a `position` (-1: none). `token`: the fault makes
that position wrong; `exact`: it is the first such position. `rank`: rank of the right cause (0: not
ranked)."""


def changed(rows: pd.DataFrame, stored: pd.DataFrame, tool: str = "lab") -> pd.DataFrame:
    """Return runs of `rows` in which a tool named something else than in `stored`, with both."""
    run = ["kind", "name", "layer", "dtype", "seed"]
    named = ["verdict", "module", "position", "cause", "rank"]
    now, before = (table[table["tool"] == tool].set_index(run)[named] for table in (rows, stored))
    both = now.join(before, rsuffix=" before", how="left")
    return both[(now != before.reindex(now.index)).any(axis=1)]


def right(rows: pd.DataFrame) -> pd.Series:
    """Tell whether exactly the wrong module was named."""
    return rows["structural"] & (rows["module"] == rows["expected"])


def shares(rows: pd.DataFrame, by: list[str]) -> pd.DataFrame:
    """Count how often module, token and cause of faults were right, with 95 % Wilson intervals.

    Columns: n, then for each of module, token, exact, cause: its share, and `_low` and
    `_high`. Tools that name no tokens or causes have 0 there.
    """
    faults = rows[rows["kind"] == "fault"]
    hits = {
        "module": right(faults),
        "token": faults["token"],
        "exact": faults["exact"],
        "cause": faults["structural"] & (faults["rank"] == 1),
    }
    found = []
    for values, part in faults.assign(**{f"hit_{name}": hit for name, hit in hits.items()}).groupby(
        by, sort=False
    ):
        row = dict(zip(by, values, strict=True)) | {"n": len(part)}
        for name in hits:
            share = Share.of(int(part[f"hit_{name}"].sum()), len(part))
            row |= {name: share.rate, f"{name}_low": share.low, f"{name}_high": share.high}
        found.append(row)
    columns = [f"{name}{end}" for name in hits for end in ("", "_low", "_high")]
    return pd.DataFrame(found, columns=[*by, "n", *columns])


def alarms(rows: pd.DataFrame, by: list[str]) -> pd.DataFrame:
    """Count, for controls grouped by `by`, how often a module was named although none is wrong.

    Columns: controls, alarms, alarm (share), alarm_low, alarm_high, and same_bits: how many more
    controls changed no bit, so that no tool could be wrong about them.
    """
    controls = rows[rows["kind"] == "control"]
    run = ["name", "layer", "dtype", "seed"]
    same = controls.loc[controls["verdict"] == "SOUND", run].drop_duplicates().assign(same=True)
    controls = controls.merge(same, on=run, how="left")
    found = []
    for values, part in controls.groupby(by, sort=False):
        changed = part[part["same"].isna()]
        share = Share.of(int(changed["structural"].sum()), len(changed))
        counted = {
            "controls": share.n,
            "alarms": share.hits,
            "alarm": share.rate,
            "same_bits": len(part) - share.n,
        }
        found.append(
            dict(zip(by, values, strict=True))
            | counted
            | {"alarm_low": share.low, "alarm_high": share.high}
        )
    return pd.DataFrame(
        found, columns=[*by, "controls", "alarms", "alarm", "alarm_low", "alarm_high", "same_bits"]
    )
