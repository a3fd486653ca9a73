"""The benchmark of the lab: what is counted is what was named."""

import json

import numpy as np
import pandas as pd
import pytest

from tests.benchmarks.divergence_score import grid
from tests.benchmarks.divergence_score.score import score
from tests.benchmarks.divergence_score.tools import LAB, RULES


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
