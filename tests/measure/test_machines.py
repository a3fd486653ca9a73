"""Rows of `data/machines`: measured on small models; invalid rows and options are refused."""

import json
from functools import partial

import pytest

from specnb.errors import InputError
from specnb.io import project_dir
from specnb.lm import toy
from specnb.measure import baseline, bench, cost, machines
from specnb.measure.cost import verify_costs
from specnb.measure.machines import MachineRow, bench_target, machine_rows


@pytest.mark.parametrize(
    "values",
    [
        {"schema_version": 2},
        {"speedup": 1.0, "low": 1.5, "high": 2.0},
        {"speedup": 3.0, "low": 1.5, "high": 2.0},
    ],
)
def test_an_invalid_row_is_refused_with_its_file_and_values(monkeypatch, tmp_path, values):
    shipped = next((project_dir() / "data" / "machines").glob("*.json"))
    folder = tmp_path / "data" / "machines"
    folder.mkdir(parents=True)
    (folder / "a.json").write_text(json.dumps(json.loads(shipped.read_text()) | values))
    monkeypatch.setattr(machines, "project_dir", lambda: tmp_path)
    with pytest.raises(InputError, match=r"a\.json") as caught:
        machine_rows.__wrapped__()
    assert all(str(value) in str(caught.value) for value in values.values())


@pytest.fixture(autouse=True)
def short_rates(monkeypatch):
    monkeypatch.setattr(machines, "RATES", {"n_prompt": 8, "n_gen": 4, "repeats": 2})

    monkeypatch.setattr(bench, "verify_costs", partial(verify_costs, quick=True))
    monkeypatch.setattr(cost, "QUICK_S", 0.1)
    monkeypatch.setattr(baseline, "TOKENS", 4)


def test_drafters_get_their_options_and_invalid_ones_are_refused_before_loading(monkeypatch):
    monkeypatch.setattr(machines, "load", lambda name: toy.cyclic(5))
    with pytest.raises(InputError, match="no-such"):
        bench_target("five", ["auto"], [(1, 2)], arms="no-such")
    monkeypatch.setattr(machines, "load", lambda name: pytest.fail("loaded"))
    for drafter, options, named in (
        ("lookup", {"heads_checkpoint": "x"}, "heads_checkpoint"),
        ("medusa", {"checkpoint_of_heads": "x"}, "checkpoint_of_heads"),
        ("lokup", {}, "lokup"),
    ):
        with pytest.raises(InputError, match=named):
            bench_target("five", [drafter], **options)


def test_a_target_is_measured_with_its_drafters_and_undecided_if_the_interval_contains_1():
    result = bench_target("tiny-hybrid-draft", ["lookup", "suffix"], ks=[2], max_new_tokens=4)
    assert [rate["test"] for rate in result.rates] == ["prefill", "generation"]
    row, other = result.rows
    assert row.drafter.startswith("lookup") and other.drafter.startswith("suffix")
    assert (row.best_k, row.c, row.share) == (2, 0, 1) and row.tokens_per_s > 0
    assert row.baseline_engine == "torch float32" and row.over_fastest == row.speedup
    assert MachineRow.model_validate_json(row.model_dump_json()) == row
    idle = {"busy": False, "over_fastest_low": 1.1, "over_fastest_high": 2.0}
    for changed, verdict in (
        ({}, "pays"),
        ({"over_fastest_low": 0.9}, "undecided"),
        ({"busy": True}, "undecided: the machine was busy"),
    ):
        assert row.model_copy(update=idle | changed).verdict == verdict
