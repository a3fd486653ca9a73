"""Tables over runs: each number equals one computed from the generations."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from specnb import store
from specnb.batch.results import local_copy
from tests.top.test_store import generation_of, record_of, round_of

RUNS = [
    record_of(
        *[generation_of(round_of(), k=k)] * k,
        run_id=f"run{k}",
        experiment="toys",
        params={"k": k, "seed": 1},
    )
    for k in (2, 4)
]


@pytest.fixture
def results(tmp_path) -> Path:
    for run in RUNS:
        store.save(run, tmp_path)
    return tmp_path


def test_only_keys_of_records_are_copied_from_a_bucket(results, monkeypatch):
    run = str(next(results.rglob("run.json")).relative_to(results))
    failed = f"{Path(run).parent}/.failed/run.json"
    odd = [
        "../evil/run.json",
        "one/../two/run.json",
        "/etc/run.json",
        ".failed/run.json",
        "run/notebook.ipynb",
    ]
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


def test_runs_are_listed_and_queried_and_their_texts_are_escaped(results, specnb):
    def read(*words):
        return json.loads(specnb("results", *words, "--results", str(results), "--json")[1])

    rows = [(row["params"], row["generations"], row["tokens"]) for row in read()]
    assert rows == [(f'{{"k": {k}, "seed": 1}}', k, 2 * k) for k in (2, 4)]
    sql = "SELECT k_asked, sum(n_accepted) AS n FROM rounds GROUP BY k_asked ORDER BY k_asked"
    assert [row["n"] for row in read(sql)] == [2, 4]
    out = specnb("results", 'SELECT 1 AS "\x1b[31mred[b]"', "--results", str(results))[1]
    assert r"\x1b[31mred[b]" in out and "\x1b" not in out
