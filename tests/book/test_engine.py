"""Headless runs: one folder a run, every end told truthfully, this process left alone. Three kernels by default."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from specnb import store
from specnb.book import engine
from specnb.book.engine import Outcome, run_notebook
from specnb.errors import InputError
from specnb.io import digest

PARAMETERS = "k: int = 4  # draft length\ntemperature: float = 0  # 0 is greedy\nname: str = 'a'\n"


def make(path: Path, *codes: str, parameters: str = PARAMETERS) -> Path:
    """A notebook: title, parameters, then one code cell per text (cells 2, 3, …)."""
    path.parent.mkdir(exist_ok=True)
    cells = [new_markdown_cell("# Question"), new_code_cell(parameters, metadata={"tags": ["parameters"]})]
    nb = new_notebook(cells=cells + [new_code_cell(textwrap.dedent(code).strip()) for code in codes])
    nb.metadata.kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(nb, path)
    return path


@pytest.fixture
def run(tmp_path):
    def run(*codes, params=(), **options) -> Outcome:
        path = make(tmp_path / "b{k}" / "01_test.ipynb", *codes)  # braces are no templates of papermill
        return run_notebook(path, dict(params), results=tmp_path / "r{x}", progress=False, **options)

    return run


def printed(outcome: Outcome) -> list[str]:
    """What the cells printed, a text a cell, of the executed notebook."""
    nb = nbformat.read(outcome.output, 4)
    texts = ["".join(o.text for o in cell.get("outputs", []) if o.output_type == "stream") for cell in nb.cells]
    return [text.strip() for text in texts if text]


def read_outcome(folder):
    return Outcome.model_validate_json((folder / "outcome.json").read_bytes())


def failed_cells(outcome: Outcome) -> list[str]:
    nb = nbformat.read(outcome.output, 4)
    return [c.source for c in nb.cells if any(o.output_type == "error" for o in c.get("outputs", []))]


RECORD = """
from datetime import UTC, datetime
from specnb import store
from specnb.records import RunRecord
now = datetime.now(UTC)
record = RunRecord(run_id="any", experiment="any", params={"k": k}, provenance={}, started=now, ended=now)
print(store.save(record, store.results_dir()))
"""


def other_python3(folder: Path) -> str:
    """A Jupyter path whose kernel `python3` is of another environment."""
    spec = folder / "kernels" / "python3"
    spec.mkdir(parents=True)
    argv = [sys.executable, "-c", "import time; time.sleep(5)", "{connection_file}"]
    (spec / "kernel.json").write_text(json.dumps({"argv": argv, "display_name": "Other", "language": "python"}))
    return str(folder)


def test_a_run_lands_in_one_folder_with_all_it_made(run, tmp_path, monkeypatch):
    monkeypatch.setenv("JUPYTER_PATH", other_python3(tmp_path / "share"))
    before = dict(os.environ), Path.cwd()

    async def cell() -> Outcome:
        return run(
            "import os, sys, json\nprint(json.dumps([sys.executable, os.getcwd(), k, temperature, name]))",
            "print(os.environ['SPECNB_RESULTS'], os.environ['SPECNB_RUN_FOLDER'])",
            RECORD,
            "from ipywidgets import IntSlider\nIntSlider(4)",
            params={"k": 8, "temperature": 1, "name": 'quo"te\n{brace}'},
        )

    outcome = asyncio.run(cell())  # a cell of a notebook runs inside an event loop
    folder = tmp_path / "r{x}" / "01_test" / outcome.run_id
    assert outcome.status == "completed"
    assert outcome.output == folder / "notebook.ipynb"
    assert outcome.params == {"k": 8, "temperature": 1.0, "name": 'quo"te\n{brace}'}
    assert outcome.run_id == store.run_id("01_test", outcome.params)
    assert outcome.notebook_sha256 == digest(tmp_path / "b{k}" / "01_test.ipynb")
    assert 0 < outcome.duration_s < 120
    assert outcome.started < outcome.ended
    first, second, third = printed(outcome)
    # this interpreter, the notebook's folder as working folder, an int given for a float arrives as one
    assert json.loads(first) == [sys.executable, str(tmp_path / "b{k}"), 8, 1.0, 'quo"te\n{brace}']
    nb = nbformat.read(outcome.output, 4)
    assert '"temperature = 1.0' in json.dumps(nb.cells[2].source.splitlines())
    assert second == f"{tmp_path / 'r{x}'} {folder}"
    assert third == str(folder)
    assert {path.name for path in folder.iterdir() if not path.name.startswith(".")} - {"kernel.log"} == {
        "notebook.ipynb",
        "outcome.json",
        "run.json",
        "rounds.parquet",
    }
    assert store.load(folder).params == {"k": 8}
    assert read_outcome(folder) == outcome
    assert "application/vnd.jupyter.widget-view+json" in nb.cells[-1].outputs[0].data
    assert "widgets" not in nb.metadata, "no widget state"
    # nothing of it in this process
    assert (dict(os.environ), Path.cwd()) == before


def test_a_failing_cell_keeps_the_partial_notebook_and_is_counted_in_the_source(run):
    outcome = run("print('before')", "raise ValueError('x' * 100_000)", "print('after')", params={"k": 9})
    assert outcome.status == "failed"
    assert (outcome.error.kind, outcome.error.cell) == ("ValueError", 3)
    assert len(outcome.error.message) < 2100 and "100000 characters" in outcome.error.message
    assert printed(outcome) == ["before"]
    assert failed_cells(outcome) == ["raise ValueError('x' * 100_000)"]
    assert read_outcome(outcome.output.parent) == outcome


def test_a_dead_kernel_is_a_failure_that_names_the_cell_and_keeps_its_last_words(run):
    outcome = run("print('before')", "import ctypes\nctypes.string_at(0)", "print('after')")
    assert (outcome.status, outcome.error.kind, outcome.error.cell) == ("failed", "DeadKernelError", 3)
    assert "specnb check" in outcome.error.message
    assert outcome.kernel_starts == 1
    assert printed(outcome) == ["before"]
    assert "Segmentation fault" in (outcome.output.parent / "kernel.log").read_text()
    nb = nbformat.read(outcome.output, 4)
    assert nb.cells[-1].metadata.papermill.status == "pending"  # papermill says completed
    assert nb.metadata.papermill.exception is True


# --- without a kernel -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "params, options, value",
    [
        ({"K": 4}, {}, "'K'"),
        ({"k": "4"}, {}, "'4'"),
        ({"k": (1,)}, {}, r"\(1,\)"),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(run, tmp_path, params, options, value):
    with pytest.raises(InputError, match=value):
        run("1", params=params, **options)
    assert not (tmp_path / "r{x}").exists()


def test_a_notebook_whose_name_cannot_be_a_folder_is_refused(tmp_path):
    with pytest.raises(InputError, match="cannot name a folder"):
        run_notebook(make(tmp_path / "my notes.ipynb", "1"), results=tmp_path / "results")
    assert not (tmp_path / "results").exists()


def test_an_older_outcome_does_not_outlive_the_start_of_a_new_run(run, monkeypatch):
    monkeypatch.setattr(engine, "_execute", lambda *args, **options: None)
    folder = run("1").output.parent
    there = []
    monkeypatch.setattr(engine, "_execute", lambda *a, **options: there.append((folder / "outcome.json").exists()))
    default = run("1", params={"k": 4, "temperature": 0})
    assert there == [False] and default.output.parent == folder, "a value equal to the default is the same run"


def test_an_unexpected_error_is_recorded_and_goes_on_its_way(run, tmp_path, monkeypatch):
    def broken(*args, **options):
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(engine, "_execute_managed", broken)
    with pytest.raises(ZeroDivisionError):
        run("1")
    (folder,) = (tmp_path / "r{x}" / "01_test").iterdir()
    outcome = read_outcome(folder)
    assert (outcome.status, outcome.error.kind, outcome.error.message) == ("failed", "ZeroDivisionError", "a bug")


def test_an_interrupted_run_calls_no_cell_completed_that_never_ran(run, tmp_path, monkeypatch):
    def interrupted(manager, *args, **options):
        manager.cell_start(manager.nb.cells[2], 2)
        raise KeyboardInterrupt

    monkeypatch.setattr(engine, "_execute_managed", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run("1", "2")
    (folder,) = (tmp_path / "r{x}" / "01_test").iterdir()
    outcome = read_outcome(folder)
    assert (outcome.status, outcome.error.kind, outcome.error.cell) == ("failed", "KeyboardInterrupt", 2)
    nb = nbformat.read(outcome.output, 4)
    states = {cell.source: cell.metadata.papermill.status for cell in nb.cells if "papermill" in cell.metadata}
    assert (states["1"], states["2"]) == ("failed", "pending")


def test_the_newest_line_of_a_cells_progress_is_shown_without_its_bar():
    assert engine._last_line("\r  0%|      | 0/24\r 12% ███▌      3/24 code-1, K 4") == "12% 3/24 code-1, K 4"


def test_the_same_run_twice_at_once_and_results_that_cannot_be_written_are_refused(run, tmp_path, monkeypatch):
    def again(*args, **options):
        with pytest.raises(InputError, match="01_test"):
            run("1")

    monkeypatch.setattr(engine, "_execute", again)
    assert run("1").status == "completed"
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(InputError, match="file"):
        run_notebook(make(tmp_path / "01_a.ipynb", "1"), results=tmp_path / "file")


def test_kernels_talk_over_private_sockets(tmp_path, monkeypatch):
    with engine.kernel_manager("python3") as one, engine.kernel_manager("python3") as two:
        assert one.connection_file != two.connection_file
        folder = Path(one.connection_file).parent
        assert folder.is_dir()
        assert one.kernel_spec.argv[0] == sys.executable
        assert one.transport == ("tcp" if sys.platform == "win32" else "ipc")
    assert not folder.exists()
    deep = tmp_path / ("d" * 80)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    with engine.kernel_manager("python3") as far:  # a socket path longer than the system takes
        assert far.transport == "tcp"


# --- slow: more kernels ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_timeout_is_a_failure_that_names_the_cell(run):
    started = time.monotonic()
    outcome = run("print('before', flush=True)", "import time\ntime.sleep(120)", "print('after')", timeout_s=1)
    assert time.monotonic() - started < 60
    assert (outcome.status, outcome.error.kind, outcome.error.cell) == ("failed", "CellTimeoutError", 3)
    assert "1 seconds" in outcome.error.message
    assert printed(outcome) == ["before"]
    assert failed_cells(outcome) == ["import time\ntime.sleep(120)"]
    nb = nbformat.read(outcome.output, 4)
    assert nb.cells[-1].metadata.papermill.status == "pending"  # papermill says completed
    assert nb.metadata.papermill.exception is True


STILLBORN = """
import os, pathlib, sys
flag = pathlib.Path({flag!r})
if "ipykernel_launcher" in sys.orig_argv:
    flag.write_text(flag.read_text() + "x" if flag.exists() else "x")
    if len(flag.read_text()) <= {deaths}:
        os._exit(1)
"""


@pytest.mark.slow
@pytest.mark.parametrize("deaths, status, starts", [(1, "completed", 2), (9, "failed", 2)])
def test_a_kernel_that_dies_before_its_first_reply_is_started_once_more(
    run, tmp_path, monkeypatch, deaths, status, starts
):
    flag = tmp_path / "starts"
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(STILLBORN.format(flag=str(flag), deaths=deaths))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    outcome = run("print('here')")
    assert (outcome.status, outcome.kernel_starts, len(flag.read_text())) == (status, starts, 2)
    assert printed(outcome) == (["here"] if status == "completed" else [])
    if status == "failed":
        assert outcome.error.kind == "DeadKernelError"
        assert "two attempts" in outcome.error.message
        assert "specnb check" in outcome.error.message
        assert outcome.error.cell is None


@pytest.mark.slow
def test_four_runs_at_once_do_not_collide(tmp_path):
    path = make(tmp_path / "book" / "01_test.ipynb", "import time\ntime.sleep(0.5)\nprint(k)", RECORD)
    before = Path.cwd()
    with ThreadPoolExecutor(4) as pool:
        jobs = [
            pool.submit(run_notebook, path, {"k": k}, results=tmp_path / "results", progress=False) for k in range(4)
        ]
        outcomes = [job.result() for job in jobs]
    assert [outcome.status for outcome in outcomes] == ["completed"] * 4
    assert [printed(outcome)[0] for outcome in outcomes] == ["0", "1", "2", "3"]
    assert [store.load(outcome.output.parent).params["k"] for outcome in outcomes] == [0, 1, 2, 3]
    assert len(store.query("select * from runs", tmp_path / "results")) == 4
    assert Path.cwd() == before


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="sends SIGINT")
def test_ctrl_c_leaves_an_outcome_and_no_kernel(tmp_path):
    pid_file = tmp_path / "pid"
    path = make(
        tmp_path / "01_test.ipynb",
        f"import os, pathlib, time\npathlib.Path({str(pid_file)!r}).write_text(str(os.getpid()))\ntime.sleep(120)",
    )
    code = (
        # a test run started in the background hands down an ignored SIGINT
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from specnb.book.engine import run_notebook\n"
        f"run_notebook({str(path)!r}, results={str(tmp_path / 'r')!r}, progress=False)"
    )
    job = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE)
    deadline = time.monotonic() + 60
    while not (pid_file.exists() and pid_file.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    job.send_signal(signal.SIGINT)
    assert b"KeyboardInterrupt" in job.communicate(timeout=60)[1]
    (folder,) = (tmp_path / "r" / "01_test").iterdir()
    outcome = read_outcome(folder)
    assert (outcome.status, outcome.error.kind, outcome.error.cell) == ("failed", "KeyboardInterrupt", 2)
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text()), 0)


@pytest.mark.slow
def test_the_notebook_on_disk_is_whole_at_any_moment(run, tmp_path):
    stop, torn = threading.Event(), []

    def watch():
        while not stop.is_set():
            for path in tmp_path.glob("r{x}/01_test/*/notebook.ipynb"):
                try:
                    nbformat.read(path, 4)
                except Exception as error:
                    torn.append(error)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        run(*["print('x' * 200_000)"] * 5)
    finally:
        stop.set()
        watcher.join()
    assert torn == []


@pytest.mark.slow
def test_papermill_knows_the_engine_in_either_import_order():
    for first, second in [
        ("import papermill", "from specnb.book.engine import SpecnbEngine"),
        ("from specnb.book.engine import SpecnbEngine", "import papermill"),
    ]:
        check = "from papermill.engines import papermill_engines as e; print(e.get_engine('specnb') is SpecnbEngine)"
        result = subprocess.run(
            [sys.executable, "-c", f"{first}\n{second}\n{check}"], capture_output=True, text=True, check=False
        )
        assert result.stdout.strip() == "True", result.stderr


@pytest.mark.slow
def test_the_registered_engine_works_without_run_notebook(tmp_path):
    import papermill

    path = make(
        tmp_path / "01_a.ipynb", "import sys\nfrom ipywidgets import IntSlider\nprint(sys.executable, k)", "IntSlider()"
    )
    nb = papermill.execute_notebook(
        path, tmp_path / "out.ipynb", {"k": 7}, engine_name="specnb", kernel_name="python3", progress_bar=False
    )
    assert nb.cells[3].outputs[0].text.strip() == f"{sys.executable} 7"
    assert "widgets" not in nb.metadata
    assert nb.metadata.papermill.kernel_starts == 1
