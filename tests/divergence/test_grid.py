"""The benchmark of the lab: what is counted is what was named."""

import json

import numpy as np
import pandas as pd
import pytest

from tests.benchmarks.divergence_score import grid
from tests.benchmarks.divergence_score.grid import Subject
from tests.benchmarks.divergence_score.rows import alarms, near, right, shares, table
from tests.benchmarks.divergence_score.score import score
from tests.benchmarks.divergence_score.tools import LAB, RULES


def rows_of(*values, **shared):
    empty = Subject("float32", 0).row("fault", "f") | {"expected": "layers.0.mlp", "structural": True}
    return table([empty | shared | one for one in values])


def test_shares_count_what_was_named_and_alarms_controls_only():
    rows = rows_of(
        {"module": "layers.0.mlp", "rank": 1, "token": True, "exact": True},
        {"module": "layers.0.mlp.router", "rank": 2, "token": True},
        {"module": "layers.0.mlp.router.deeper", "rank": 1},
        {"module": "-", "structural": False},
        {"kind": "control"},
        {"kind": "control", "structural": False},
        tool=LAB,
    )
    assert [*right(rows)][:4] == [True, False, False, False] and [*near(rows)][:4] == [True, True, False, False]
    found = shares(rows, ["tool"]).iloc[0]
    assert (found["n"], found["module"], found["near"], found["token"], found["exact"]) == (4, 0.25, 0.5, 0.5, 0.25)
    assert found["cause"] == 0.5 and 0.04 < found["module_low"] < 0.05 and 0.69 < found["module_high"] < 0.71
    found = alarms(rows, ["tool"]).iloc[0]
    assert (found["controls"], found["alarms"], found["alarm"]) == (2, 1, 0.5)


@pytest.mark.slow
def test_a_score_names_what_is_wrong_and_is_written_down(tmp_path, monkeypatch):
    for name, between in (("TEXTS", (13, 16)), ("PROMPTS", (8, 10)), ("ROUNDS", (2, 4))):  # a run costs its feeds
        monkeypatch.setattr(grid, name, between)
    faults = ("kv_slot_swap", "uniform_offset")
    scored = score(seeds=1, layers=(0,), dtypes=("float32",), faults=faults, controls=False)
    rows = scored.rows[scored.rows["kind"] == "fault"].set_index(["tool", "against"])
    own = rows.loc[(LAB, "")]
    assert own["module"] == own["expected"] == "layers.0.self_attn" and own["exact"]
    assert own["rank"] == 1 and own["cause"] == "KV_SLOT" and own["seconds"] > 0
    assert rows.loc[("allclose", "same shapes"), "module"] == "layers.0.self_attn.o_proj"
    assert set(rows["expected_cause"]) == {"KV_SLOT"} and len(rows) == 1 + 2 * len(RULES)
    by_tool = scored.by_tool().set_index(["tool", "against"])
    assert by_tool.loc[(LAB, ""), ["n", "module", "controls", "alarms"]].tolist() == [1, 1, 1, 0]
    assert np.isnan(by_tool.loc[("cosine 0.99", "same shapes"), "token"]) and scored.misses().empty
    scored.save(tmp_path / "score.parquet")
    assert len(pd.read_parquet(tmp_path / "score.parquet")) == len(scored.rows)
    assert json.loads((tmp_path / "score.json").read_text())["facts"] == scored.facts
