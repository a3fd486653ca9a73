"""Tables over runs: each number again from the generations."""

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
    """Return a run of six prompts, each plainly and with a lookup."""
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


def test_an_overview_has_a_row_a_run_and_says_in_what_runs_differ(results):
    table = overview(results)
    assert table["differs"].tolist() == ["k=2", "k=4"] and (table["generations"] == 12).all()
    assert table["tokens"].tolist() == [sum(len(g.token_ids) for g in record(k).generations) for k in (2, 4)]


ENDLESS = "WITH RECURSIVE t(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM t) SELECT count(*) FROM t"


def test_an_endless_query_is_one_error_after_its_time_limit(results, specnb):
    words = ["results", ENDLESS, "--results", str(results), "--timeout-s"]
    code, out, err = specnb(*words, "0.5")
    assert code == 2 and out == "" and err.count("\n") == 1 and "0.5 s" in err and "--timeout-s" in err
    words[1] = "SELECT 7 AS seven"
    assert specnb(*words, "0")[0] == 2
    code, out, _ = specnb("results", "SELECT 7 AS seven", "--results", str(results), "--json")
    assert code == 0 and json.loads(out) == [{"seven": 7}], "the default is long enough"


def test_odd_keys_of_a_bucket_are_named_and_the_others_are_copied(results, monkeypatch):
    run = next(results.rglob("run.json")).relative_to(results)
    odd = ["runs/one/../../evil/run.json", "runs/one/../two/rounds.parquet", "/etc/run.json"]
    no_files = [f"runs/one/{run}/run.json", f"runs/one/{'x' * 256}/run.json", "runs/one/\0/run.json"]
    opened = []

    class Bucket:
        """A file system that lists keys as they are, which S3 does and local folders cannot."""

        def get_file_info(self, selector):
            keys = [*odd, *(f"runs/one/{file}" for file in (run, run.with_name("rounds.parquet"))), *no_files]
            return [SimpleNamespace(path=key) for key in keys]

        def open_input_stream(self, key):
            opened.append(key)
            return (results / (run if key in no_files else key.removeprefix("runs/one/"))).open("rb")

    monkeypatch.setattr("specnb.batch.results.place", lambda name: (Bucket(), "runs/one"))
    with pytest.warns(UserWarning) as warned, local_copy("s3://runs/one") as folder:
        files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
        assert len(overview(folder)) == 1 and not (folder.parent / "evil").exists()
    assert files == {str(run), str(run.with_name("rounds.parquet"))} and not set(opened) & set(odd)
    assert len(warned) == 1 and all(key in str(warned[0].message) for key in odd + no_files)


def test_the_commands_print_the_same_numbers(results, tmp_path, specnb):
    code, out, _ = specnb("results", "--results", str(results), "--json")
    assert code == 0 and [row["differs"] for row in json.loads(out)] == ["k=2", "k=4"]
    a, b = (store.run_id("toys", {"k": k, "seed": 1}) for k in (2, 4))
    sql = "SELECT run_id, sum(n_accepted) AS kept FROM rounds GROUP BY run_id"
    code, out, _ = specnb("results", sql, "--results", str(results), "--json")
    kept = {row["run_id"]: row["kept"] for row in json.loads(out)}
    assert kept == {run: sum(g.accepted_tokens for g in record(k).generations) for run, k in ((a, 2), (b, 4))}
    out = specnb("results", 'SELECT 1 AS "\x1b[31mred[b]"', "--results", str(results))[1]
    assert r"\x1b[31mred[b]" in out and "\x1b" not in out
