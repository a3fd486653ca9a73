"""Rows of `data/machines`: measured on small models; invalid rows and options are refused."""

import json
from functools import partial

import pytest

from specnb.errors import InputError
from specnb.io import project_dir
from specnb.measure import baseline, bench, cost, machines
from specnb.measure.cost import verify_costs, verify_curve
from specnb.measure.machines import KS, MachineRow, bench_target, machine_rows

SHIPPED = sorted((project_dir() / "data" / "machines").glob("*.json"))


ODD = {
    "newer": {"schema_version": 2},
    "low above high": {"low": 2.0, "high": 1.0},
    "low above the speed-up": {"speedup": 1.0, "low": 1.5, "high": 2.0},
    "high below the speed-up": {"speedup": 3.0, "low": 1.5, "high": 2.0},
}


@pytest.mark.parametrize("values", ODD.values(), ids=ODD)
def test_an_invalid_row_is_refused_with_its_file_and_values(monkeypatch, tmp_path, values):
    folder = tmp_path / "data" / "machines"
    folder.mkdir(parents=True)
    (folder / "a.json").write_text(json.dumps(json.loads(SHIPPED[-1].read_text()) | values))
    monkeypatch.setattr("specnb.measure.machines.project_dir", lambda: tmp_path)
    with pytest.raises(InputError, match=r"a\.json") as caught:
        machine_rows.__wrapped__()
    assert all(str(value) in str(caught.value) for value in values.values())


@pytest.fixture(autouse=True)
def short_rates(monkeypatch):
    monkeypatch.setattr(machines, "RATES", {"n_prompt": 8, "n_gen": 4, "repeats": 2})
    monkeypatch.setattr(machines, "verify_curve", partial(verify_curve, context=8, repeats=1))
    monkeypatch.setattr(bench, "verify_costs", partial(verify_costs, quick=True))
    monkeypatch.setattr(cost, "QUICK_S", 0.1)
    monkeypatch.setattr(baseline, "TOKENS", 4)


def test_invalid_options_are_refused_before_loading_and_few_prompts_give_no_row(monkeypatch):
    few = bench_target("tiny-hybrid-draft", ["lookup"], [(5, 6)], ks=[2], max_new_tokens=4)
    assert (
        not few.rows and bench_target("tiny-hybrid-draft", [], [(5, 6)]).verify_curve.seconds(8) > 0
    )
    monkeypatch.setattr("specnb.measure.machines.load", lambda name: pytest.fail("loaded"))
    with pytest.raises(InputError, match="heads_checkpoint"):
        bench_target("tiny-hybrid-draft", ["lookup"], heads_checkpoint="x")
    with pytest.raises(InputError, match="checkpoint_of_heads"):
        bench_target("tiny-hybrid-draft", ["medusa"], checkpoint_of_heads="x")
    with pytest.raises(InputError, match="lokup"):
        bench_target("tiny-hybrid-draft", ["lookup", "lokup"])


def test_a_target_is_measured_with_its_drafters_and_undecided_if_the_interval_contains_1():
    result = bench_target("tiny-hybrid-draft", ["lookup", "suffix"], ks=[2], max_new_tokens=4)
    assert [rate["test"] for rate in result.rates] == ["prefill", "generation"] and len(
        result.pairs
    ) == 2
    (row, _) = result.rows
    assert (
        row.best_k in KS
        and row.c == 0
        and row.drafter.startswith("lookup")
        and row.tokens_per_s > 0
    )
    assert (
        row.baseline_engine == "torch float32"
        and row.over_fastest == row.speedup
        and row.share == 1
    )
    ends = {
        (1.1, 2.0, False): "pays",
        (0.5, 0.9, False): "does not pay",
        (0.9, 1.1, False): "undecided",
    }
    for (low, high, busy), verdict in ends.items():
        of = row.model_copy(
            update={"over_fastest_low": low, "over_fastest_high": high, "busy": busy}
        )
        assert of.verdict == verdict
        older = of.model_copy(
            update={"baseline_engine": None}
        ).verdict  # other engines were not timed
        assert older == verdict.replace("pays", "pays over the same engine")
        assert of.model_copy(update={"busy": True}).verdict.startswith("undecided")
    assert MachineRow.model_validate_json(row.model_dump_json()) == row
