"""Tables over runs: each number equals one computed from the generations."""

import json
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import pytest

from specnb import generate, store
from specnb.batch.results import local_copy, overview
from specnb.lm import toy
from specnb.records import RunRecord

PROMPTS = {f"p{i}": [i, i + 1] for i in range(6)}


def record(k: int) -> RunRecord:
    """Return a run of six prompts, each decoded plainly and with prompt lookup."""
    model, generations = toy.markov(8, seed=1), []
    for prompt_id, ids in PROMPTS.items():
        for drafted in (0, k):
            given = {"drafter": "lookup", "k": drafted} if drafted else {}
            g = generate(model, ids, max_new_tokens=24, **given)
            generations.append(g.model_copy(update={"prompt_id": prompt_id, "category": "toys"}))
    params, now = {"k": k, "seed": 1}, datetime.now(UTC)
    named = {"run_id": store.run_id("toys", params), "experiment": "toys", "params": params}
    return RunRecord(**named, provenance={}, started=now, ended=now, generations=tuple(generations))


@pytest.fixture
def results(tmp_path) -> Path:
    for k in (2, 4):
        store.save(record(k), tmp_path)
    return tmp_path


def test_an_overview_has_a_row_per_run_with_the_parameters_that_differ(results):
    table = overview(results)
    assert table["differs"].tolist() == ["k=2", "k=4"] and (table["generations"] == 12).all()
    assert table["tokens"].tolist() == [sum(len(g.token_ids) for g in record(k).generations) for k in (2, 4)]


def test_only_keys_of_records_are_copied_from_a_bucket(results, monkeypatch):
    run = str(next(results.rglob("run.json")).relative_to(results))
    failed = f"{Path(run).parent}/.failed/run.json"
    odd = ["../evil/run.json", "one/../two/run.json", "/etc/run.json", ".failed/run.json", "run/notebook.ipynb"]
    opened = []

    class Bucket:
        """A file system that lists raw keys, as S3 does and local folders cannot."""

        def get_file_info(self, selector):
            return [SimpleNamespace(path=f"runs/one/{key}") for key in (*odd, run, failed)]

        def open_input_stream(self, key):
            opened.append(key)
            return (results / run).open("rb")

    monkeypatch.setattr("specnb.batch.results.place", lambda name: (Bucket(), "runs/one"))
    with local_copy("s3://runs/one") as folder:
        assert {str(path.relative_to(folder)) for path in folder.rglob("run.json")} == {run, failed}
    assert opened == [f"runs/one/{run}", f"runs/one/{failed}"]


def test_the_commands_print_the_same_numbers(results, specnb):
    rows = json.loads(specnb("results", "--results", str(results), "--json")[1])
    assert [row["differs"] for row in rows] == ["k=2", "k=4"]
    sql = "SELECT k_asked, sum(n_accepted) AS n FROM rounds WHERE k_asked > 0 GROUP BY k_asked ORDER BY k_asked"
    rows = json.loads(specnb("results", sql, "--results", str(results), "--json")[1])
    assert rows == [{"k_asked": k, "n": sum(g.accepted_tokens for g in record(k).generations)} for k in (2, 4)]
    out = specnb("results", 'SELECT 1 AS "\x1b[31mred[b]"', "--results", str(results))[1]
    assert r"\x1b[31mred[b]" in out and "\x1b" not in out
