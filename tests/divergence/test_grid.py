"""The benchmark of the lab: what is counted is what was named, and a score is kept and not made twice."""

import numpy as np
import pandas as pd
import pytest

from tests.benchmarks.divergence_score import score as benchmark
from tests.benchmarks.divergence_score.grid import Subject
from tests.benchmarks.divergence_score.rows import alarms, near, right, shares, table
from tests.benchmarks.divergence_score.score import Score, score
from tests.benchmarks.divergence_score.tools import LAB, RULES
from tests.divergence.lab import short_texts


@pytest.fixture(scope="module", autouse=True)
def short():
    """What a run costs is its number of feeds."""
    with short_texts():
        yield


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


# --- on the pair ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_score_names_what_is_wrong_is_kept_and_is_not_made_twice(divergence_score, tmp_path, monkeypatch):
    scored, keep, options = divergence_score
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
    loaded = Score.load(tmp_path / "score.parquet")
    pd.testing.assert_frame_equal(loaded.rows, scored.rows)
    assert loaded.facts == scored.facts and (tmp_path / "score.json").exists()
    monkeypatch.setattr(benchmark, "measured", lambda *_: pytest.fail("run again"))
    pd.testing.assert_frame_equal(score(**options, controls=False, keep=keep).rows, scored.rows)
