"""Sweeps: no run is lost if others fail or are killed; a second call skips completed runs."""

import json
import os
import signal
import threading
from collections import Counter
from pathlib import Path

import pytest

from specnb import store
from specnb.batch.run import Job
from specnb.batch.sweep import Batch, batch_of, jobs, read_batch, run_sweep
from specnb.errors import FetchError, InputError
from tests.book.test_notebook import notebook_at

PARAMETERS = (
    'seed: int = 0\nend: str = "well"\npause: float = 0.0\nks: list[int] = [4]\nlength = None'
)
CELL = """
import os, time
from datetime import UTC, datetime
from specnb import store
from specnb.records import RunRecord
params = {"seed": seed, "end": end}
now = {"started": datetime.now(UTC), "ended": datetime.now(UTC)}
named = {"run_id": os.environ["SPECNB_RUN_FOLDER"].rpartition("/")[2], "experiment": "07_test"}
store.save(RunRecord(**named, params=params, provenance={}, **now))
time.sleep(pause)
while end == "waits" and not os.path.exists("go"):
    time.sleep(0.1)
if end == "error":
    raise ValueError("wrong")
if end == "crash":
    os.kill(os.getpid(), 9)
"""
STATUS = {
    "well": "completed",
    "waits": "completed",
    "error": "failed",
    "crash": "killed",
}


@pytest.fixture
def notebook(tmp_path) -> str:
    return str(notebook_at(tmp_path / "07_test.ipynb", PARAMETERS, CELL))


@pytest.fixture
def chosen(notebook, tmp_path):
    def grid(results: str = "", **values: list) -> list[Job]:
        batch = Batch(notebook=notebook, grid=values)
        folder = results or str(tmp_path / "results")
        return jobs(batch, results=folder)

    return grid


@pytest.mark.parametrize("seeds", [1, pytest.param(57, marks=pytest.mark.slow)])
def test_no_run_is_lost_if_the_sweep_is_interrupted_or_a_run_fails_or_dies(chosen, tmp_path, seeds):
    done = chosen(seed=list(range(seeds)))
    first, waiting, queued = done[:1] + chosen(seed=[1, 2], end=["waits"])
    half = run_sweep([first, waiting, queued], workers=2)
    assert next(half).status == "completed"
    half.close()  # returns when no process is left
    (tmp_path / "go").touch()
    grid = [*done, waiting, *chosen(end=["error", "crash"])]
    ended = list(run_sweep(grid, workers=3))
    assert Counter(run.run_id for run in ended) == Counter(job.run_id for job in grid)
    for run in ended:  # the record was saved before the failure
        end = run.params.get("end", "well")
        assert run.status == ("skipped" if run.run_id == first.run_id else STATUS[end])
        assert end != "crash" or run.attempts == 2, "a dead kernel is begun again"
        assert store.load_record(Path(run.folder)).params["seed"] == run.params.get("seed", 0)
        outcome = json.loads((Path(run.folder) / "outcome.json").read_text())
        assert outcome["run_id"] == run.run_id and (outcome["status"] == "completed") == run.ok


def test_unusable_results_are_refused_in_one_line(chosen, notebook, specnb):
    with pytest.raises(InputError, match="nowhere://bucket"):
        list(run_sweep(chosen("nowhere://bucket")))
    for words in (["-p", "seed", "[]"], ["--results", "nowhere://bucket"]):
        code, _, error = specnb("sweep", notebook, *words)
        assert code == 2 and words[1] in error and error.count("\n") == 1


@pytest.mark.slow  # the default tests cover dying kernels
def test_no_run_is_lost_if_a_dask_worker_is_killed(chosen):
    distributed = pytest.importorskip("distributed")
    grid = chosen(seed=[0, 1, 2], pause=[6.0])
    options = {
        "n_workers": 2,
        "threads_per_worker": 1,
        "processes": True,
        "dashboard_address": None,
    }
    with distributed.LocalCluster(**options) as cluster:
        threading.Timer(4.0, os.kill, (cluster.workers[0].pid, signal.SIGKILL)).start()
        ended = list(run_sweep(grid, scheduler=cluster.scheduler_address))
        assert Counter(run.status for run in ended) == {"completed": 3}
        assert {run.status for run in run_sweep(grid, scheduler=cluster.scheduler_address)} == {
            "skipped"
        }
    with pytest.raises(FetchError, match="tcp://127"):
        list(run_sweep(chosen(seed=[9]), scheduler="tcp://127.0.0.1:9"))


def test_runs_on_s3_are_skipped_and_read_like_local_ones(chosen, monkeypatch):
    server_module = pytest.importorskip("moto.server")
    from specnb.batch.results import local_copy, overview

    server = server_module.ThreadedMotoServer(port=0)
    server.start()
    try:
        host, port = server.get_host_and_port()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY"):
            monkeypatch.setenv(f"AWS_{name}", "test")
        import boto3

        boto3.client("s3", region_name="us-east-1").create_bucket(Bucket="runs")
        (job,) = chosen("s3://runs/one", seed=[3])
        assert [run.status for _ in range(2) for run in run_sweep([job])] == [
            "completed",
            "skipped",
        ]
        with local_copy("s3://runs/one") as folder:
            assert overview(folder)["run_id"].tolist() == [job.run_id]
    finally:
        server.stop()


def test_a_command_line_and_a_file_give_the_same_grid(notebook, tmp_path):
    given = {"seed": "0,1", "ks": [[4], [8, 9]], "end": "well", "length": 7}
    batch = batch_of(notebook, given, None)
    assert batch.grid == {"seed": [0, 1], "ks": [[4], [8, 9]], "end": ["well"], "length": [7]}
    file = tmp_path / "batch.yaml"
    grid = "{seed: [0, 1, 1], ks: [[4], [8, 9]]}"
    file.write_text(f"notebook: {notebook}\nparameters: {{length: 7, end: well}}\ngrid: {grid}\n")
    typed, read = ({job.run_id for job in jobs(b, results="r")} for b in (batch, read_batch(file)))
    assert typed == read and len(typed) == 4
    assert batch_of(notebook, {"ks": "4,8"}, None).grid == {"ks": ["4,8"]}, "one list"


def test_a_batch_file_reads_a_value_as_the_command_line_does(tmp_path):
    file = tmp_path / "batch.yaml"
    values = {"1e-3": 0.001, "8": 8, "true": True, "[1, 2]": [1, 2], "{a: 1}": {"a": 1}}
    values |= {"null": None, "": None, '"8"': "8", '""': ""}
    values |= {text: text for text in ("012", "1:30", "yes", "2026-01-02")}
    lines = "".join(f"  p{index}: {text}\n" for index, text in enumerate(values))
    file.write_text(f"notebook: 01\nparameters:\n{lines}")
    batch = read_batch(file)
    assert batch.notebook == "01"
    for (text, value), read in zip(values.items(), batch.parameters.values(), strict=True):
        assert (read, type(read)) == (value, type(value)), text


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("grid: [1", "YAML"),
        ("notebook: x\nkind: y\n", "kind"),
        ("notebook: nowhere\n", "nowhere"),
        ('notebook: "01"\nparameters: {seed: 1}\ngrid: {seed: [2]}\n', "seed"),
        ("notebook: 01\ngrid:\n  seed: [0]\n  k_max: [8]\n  seed: [1]\n", "'seed' .*line 5"),
        ("notebook: 01\ngrid: &all\n  seed: *all\n", "'all'"),
        ('notebook: "01"\ngrid: {sead: [2]}\n', "sead"),
        ('notebook: "01"\ngrid: {seed: []}\n', "0 runs"),
        (f'notebook: "01"\ngrid: {{seed: {[0] * 101}, k_max: {[1] * 100}}}\n', "10100 runs"),
    ],
)
def test_an_invalid_batch_is_refused_before_anything_runs(tmp_path, text, value):
    file = tmp_path / "batch.yaml"
    file.write_text(text)
    with pytest.raises(InputError, match=value):
        jobs(read_batch(file), results="r")
