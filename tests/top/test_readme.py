"""The numbers of the README are those of records that are kept."""

import json
from types import SimpleNamespace

import pandas as pd
import pytest

from specnb.book.league import rank_drafters
from specnb.book.tables import baseline
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


def against_transformers(file: str) -> str:
    rows = read(f"tests/benchmarks/{file}.json")["tables"]["all"]
    return interval(next(row for row in rows if row["method"] == "specnb plain"))


def engines() -> str:
    rows = read("tests/benchmarks/engines.json")["rows"]
    row = next(row for row in rows if (row["type"], row["engine"]) == ("bf16", "torch"))
    return ", ".join(f"{row[f'over fastest, {n}']:.2f}" for n in (1, 5, 9))


def sweep() -> str:
    replay = measurements("01_speedup_over_k")["replay"]
    return f"{replay['live_s'] / replay['replay_s']:,.0f} times less time"


def league() -> tuple[pd.DataFrame, float]:
    """The greedy ranks of the kept league, and what plain decoding has there of the fastest's speed."""
    kept = SimpleNamespace(measurements=measurements("07_drafters"), generations=())
    return rank_drafters(kept, 0.0).rename(columns={"predicted": "speedup"}), baseline(kept).share


def trained() -> str:
    return ", ".join(interval(league()[0].loc[name]) for name in ("lookup", "hydra", "jump"))


def copies() -> str:
    table, share = league()
    return f"{interval(table.loc['self'])}; over the fastest {share * table.loc['self', 'speedup']:.2f}"


def faults() -> str:
    lab = read("data/divergence/score.json")["by_tool"][0]
    return f"{lab['module'] * lab['n']:.0f} of {lab['n']}; {lab['alarms']} of {lab['controls']} false alarms"


@pytest.mark.parametrize(("says", "computed"), [
    ("plain decoding against transformers, float32", lambda: against_transformers("against_transformers")),
    ("plain decoding against transformers, bfloat16", lambda: against_transformers("against_transformers_bfloat16")),
    ("T(1), T(5), T(9) of torch over llama.cpp", engines),
    ("a K sweep by replay", sweep), ("lookup, Hydra heads, jump drafter", trained),
    ("its own 4-bit copy", copies), ("planted faults named", faults),
])  # fmt: skip
def test_a_result_is_that_of_its_record(says, computed):
    (line,) = (line for line in README.splitlines() if line.startswith(f"| {says}"))
    assert line.endswith(f"| {computed()} |")
