"""A row of `data/machines`: what is measured on toys, and that every shipped row can be read."""

import pytest

from specnb.io import project_dir
from specnb.measure.probe import HEAD, KS, MachineRow, probe

SHIPPED = sorted((project_dir() / "data" / "machines").glob("*.json"))


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: file.stem)
def test_a_shipped_row_is_one(file):
    row = MachineRow.model_validate_json(file.read_text())
    assert row.low <= row.speedup <= row.high and row.best_k in KS and row.at8 > 0 and row.tokens_per_s > 0
    assert len(row.cells()) == len(HEAD) and row.machine and row.instructions


def test_a_probe_measures_and_only_an_interval_beside_1_is_a_verdict():
    row = probe("tiny-hybrid-draft", "lookup")
    assert row.best_k in KS and row.c == 0 and row.drafter.startswith("lookup") and row.tokens_per_s > 0
    ends = {(1.1, 2.0, False): "pays", (0.5, 0.9, False): "does not pay", (0.9, 1.1, False): "undecided"}
    for (low, high, busy), verdict in ends.items():
        of = row.model_copy(update={"low": low, "high": high, "busy": busy})
        assert of.verdict == verdict
        assert of.model_copy(update={"busy": True}).verdict.startswith("undecided")
    assert MachineRow.model_validate_json(row.model_dump_json()) == row
