"""The numbers of the README are those of records that are kept."""

import json

import pandas as pd
import pytest

from specnb.io import project_dir

ROOT = project_dir()
README = (ROOT / "README.md").read_text(encoding="utf-8")


def read(path: str) -> dict:
    return json.loads((ROOT / path).read_text(encoding="utf-8"))


def measurements(figure: str) -> dict:
    """Those of the run that a published figure comes from."""
    return read(f"figures/{read(f'figures/{figure}.json')['record']}")["measurements"]


def interval(row: dict | pd.Series) -> str:
    return f"{row['speedup']:.2f} ({row['low']:.2f}-{row['high']:.2f})"


def against_transformers(method: str) -> str:
    rows = read("tests/benchmarks/against_transformers.json")["tables"]["all"]
    return interval(next(row for row in rows if row["method"].startswith(method)))


def sweep() -> str:
    replay = measurements("01_speedup_over_k")["replay"]
    return f"{replay['live_s'] / replay['replay_s']:,.0f} times less time"


def heads() -> str:
    return interval(
        next(s for s in measurements("05_speed")["speeds"] if (s["kind"], s["category"]) == ("hydra", "all"))
    )


def faults() -> str:
    lab = read("data/divergence/score.json")["by_tool"][0]
    return f"{lab['module'] * lab['n']:.0f} of {lab['n']}; {lab['alarms']} of {lab['controls']} false alarms"


@pytest.mark.parametrize(("says", "computed"), [
    ("plain decoding against transformers", lambda: against_transformers("specnb plain")),
    ("lookup against transformers", lambda: against_transformers("specnb lookup")),
    ("a K sweep by replay", sweep), ("Hydra heads against plain", heads), ("planted faults named", faults),
])  # fmt: skip
def test_a_result_is_that_of_its_record(says, computed):
    (line,) = (line for line in README.splitlines() if line.startswith(f"| {says}"))
    assert line.endswith(f"| {computed()} |")
