"""The benchmark of the lab: its score counts what each tool named."""

import pandas as pd
import pytest

from tests.benchmarks.divergence_score import grid
from tests.benchmarks.divergence_score.rows import changed
from tests.benchmarks.divergence_score.score import score
from tests.benchmarks.divergence_score.tools import LAB, RULES


@pytest.mark.slow
def test_a_score_counts_right_answers_and_can_be_saved(tmp_path, monkeypatch):
    # few feeds per run
    for name, between in (
        ("TEXTS", (13, 16)),
        ("PROMPTS", (8, 10)),
        ("ROUNDS", (2, 4)),
    ):
        monkeypatch.setattr(grid, name, between)
    faults = ("kv_slot_swap", "uniform_offset")
    scored = score(seeds=1, layers=(0,), dtypes=("float32",), faults=faults, controls=False)
    rows = scored.rows[scored.rows["kind"] == "fault"].set_index(["tool", "against"])
    own = rows.loc[(LAB, "")]
    assert own["module"] == own["expected"] == "layers.0.self_attn" and own["exact"]
    assert own["rank"] == 1 and own["cause"] == "KV_SLOT" and len(rows) == 1 + 2 * len(RULES)
    assert rows.loc[("allclose", "same shapes"), "module"] == "layers.0.self_attn.o_proj"
    by_tool = scored.by_tool().set_index(["tool", "against"])
    assert by_tool.loc[(LAB, ""), ["n", "module", "controls", "alarms"]].tolist() == [1, 1, 1, 0]
    assert scored.misses().empty and scored.false_alarms().empty
    scored.save(tmp_path / "score.parquet")
    stored = pd.read_parquet(tmp_path / "score.parquet")
    assert changed(scored.rows, stored).empty
    other = scored.rows.replace("layers.0.self_attn", "lm_head")
    assert changed(other, stored)["module before"].tolist() == ["layers.0.self_attn"]
