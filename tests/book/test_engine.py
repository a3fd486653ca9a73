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
from specnb.book.engine import Outcome, read_outcome, run_notebook
from specnb.errors import InputError, NotebookFailed

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
    def run(*codes, params=(), parameters=PARAMETERS, **options) -> Outcome:
        path = make(tmp_path / "book" / "01_test.ipynb", *codes, parameters=parameters)
        return run_notebook(path, dict(params), results=tmp_path / "results", progress=False, **options)

    return run


def printed(outcome: Outcome) -> list[str]:
    """What the cells printed, a text a cell, of the executed notebook."""
    nb = nbformat.read(outcome.output, 4)
    texts = ["".join(o.text for o in cell.get("outputs", []) if o.output_type == "stream") for cell in nb.cells]
    return [text.strip() for text in texts if text]


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


def test_a_run_lands_in_one_folder_with_all_it_made(run, tmp_path):
    before = dict(os.environ), Path.cwd()
    outcome = run(
        "import os, sys, json\nprint(json.dumps([sys.executable, os.getcwd(), k, temperature, name]))",
        "print(os.environ['SPECNB_RESULTS'], os.environ['SPECNB_RUN_FOLDER'])",
        RECORD,
        params={"k": 8, "temperature": 1, "name": 'quo"te\n{brace}'},
    )
    folder = tmp_path / "results" / "01_test" / outcome.run_id
    assert outcome.status == "completed"
    assert outcome.raise_for_failure() is outcome
    assert outcome.output == folder / "notebook.ipynb"
    assert outcome.params == {"k": 8, "temperature": 1.0, "name": 'quo"te\n{brace}'}
    assert outcome.run_id == store.run_id("01_test", outcome.params)
    assert 0 < outcome.duration_s < 60
    assert outcome.started < outcome.ended
    first, second, third = printed(outcome)
    # the interpreter is ours, the working folder the notebook's, an int given for a float arrives as one
    assert json.loads(first) == [sys.executable, str(tmp_path / "book"), 8, 1.0, 'quo"te\n{brace}']
    assert '"temperature = 1.0' in json.dumps(nbformat.read(outcome.output, 4).cells[2].source.splitlines())
    assert second == f"{tmp_path / 'results'} {folder}"
    assert third == str(folder)
    assert {path.name for path in folder.iterdir()} - {".lock", "kernel.log"} == {
        "notebook.ipynb",
        "outcome.json",
        "run.json",
        "rounds.parquet",
    }
    assert store.load(folder).params == {"k": 8}
    assert read_outcome(folder) == outcome
    # nothing of it in this process
    assert (dict(os.environ), Path.cwd()) == before


def test_the_source_notebook_is_left_alone_and_its_digest_recorded(run, tmp_path):
    import hashlib

    path = make(tmp_path / "book" / "01_test.ipynb", "1")
    before = path.read_bytes()
    outcome = run("1")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert outcome.notebook_sha256 == digest
    assert len(before) == len(path.read_bytes())


def test_a_value_equal_to_the_default_is_the_same_run(run):
    assert run("1").run_id == run("1", params={"k": 4, "temperature": 0}).run_id


def test_a_failing_cell_keeps_the_partial_notebook(run):
    outcome = run("print('before')", "raise ValueError(f'no {k}')", "print('after')")
    assert outcome.status == "failed"
    assert (outcome.error.kind, outcome.error.message, outcome.error.cell) == ("ValueError", "no 4", 3)
    assert printed(outcome) == ["before"]
    assert failed_cells(outcome) == ["raise ValueError(f'no {k}')"]
    assert read_outcome(outcome.output.parent) == outcome
    with pytest.raises(NotebookFailed, match=r"01_test\.ipynb failed in cell 3: ValueError: no 4 .*notebook\.ipynb"):
        outcome.raise_for_failure()


def test_the_cell_index_is_that_of_the_source_notebook_with_injected_parameters_too(run):
    assert run("1", "raise ValueError('x')", params={"k": 9}).error.cell == 3


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


def test_a_dead_kernel_is_a_failure_that_names_the_cell_and_the_remedy(run):
    outcome = run("print('before')", "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)", "print('after')")
    assert (outcome.status, outcome.error.kind, outcome.error.cell) == ("failed", "DeadKernelError", 3)
    assert "specnb check" in outcome.error.message
    assert outcome.kernel_starts == 1
    assert printed(outcome) == ["before"]
    assert read_outcome(outcome.output.parent) == outcome


def test_the_last_words_of_a_crashing_kernel_are_kept(run):
    outcome = run("import ctypes\nctypes.string_at(0)")
    assert outcome.error.kind == "DeadKernelError"
    assert "Segmentation fault" in (outcome.output.parent / "kernel.log").read_text()


STILLBORN = """
import os, pathlib, sys
flag = pathlib.Path({flag!r})
if "ipykernel_launcher" in sys.orig_argv:
    flag.write_text(flag.read_text() + "x" if flag.exists() else "x")
    if len(flag.read_text()) <= {deaths}:
        os._exit(1)
"""


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


@pytest.mark.parametrize(
    "params, options, reason",
    [
        ({"K": 4}, {}, "no parameter 'K'"),
        ({"temprature": 1.0}, {}, "did you mean temperature"),
        ({"k": "4"}, {}, "k takes int, got '4'"),
        ({"k": 4.0}, {}, "k takes int, got 4.0"),
        ({"name": 3}, {}, "name takes str, got 3"),
        ({"k": (1,)}, {}, "give finite numbers"),
        ({}, {"timeout_s": 0}, "timeout_s is 0"),
        ({}, {"timeout_s": 1.5}, "timeout_s is 1.5"),
        ({}, {"timeout_s": True}, "timeout_s is True"),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(run, tmp_path, params, options, reason):
    with pytest.raises(InputError, match=reason):
        run("1", params=params, **options)
    assert not (tmp_path / "results").exists()


def test_a_notebook_whose_name_cannot_be_a_folder_is_refused(tmp_path):
    with pytest.raises(InputError, match="cannot name a folder"):
        run_notebook(make(tmp_path / "my notes.ipynb", "1"), results=tmp_path / "results")
    assert not (tmp_path / "results").exists()


def test_braces_in_a_folder_name_are_no_papermill_templates(tmp_path):
    outcome = run_notebook(make(tmp_path / "b{k}" / "01_a.ipynb", "1"), results=tmp_path / "r{x}", progress=False)
    assert outcome.status == "completed"
    assert outcome.output.is_relative_to(tmp_path / "r{x}")


def test_no_widget_state_is_saved(run):
    outcome = run("from ipywidgets import IntSlider\nIntSlider(4)")
    assert outcome.status == "completed"
    nb = nbformat.read(outcome.output, 4)
    assert "application/vnd.jupyter.widget-view+json" in nb.cells[-1].outputs[0].data
    assert "widgets" not in nb.metadata


def test_another_python3_on_jupyters_path_is_not_used(run, tmp_path, monkeypatch):
    spec = tmp_path / "share" / "kernels" / "python3"
    spec.mkdir(parents=True)
    argv = [sys.executable, "-c", "import time; time.sleep(5)", "{connection_file}"]
    (spec / "kernel.json").write_text(json.dumps({"argv": argv, "display_name": "Other", "language": "python"}))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "share"))
    assert printed(run("import sys\nprint(sys.executable)")) == [sys.executable]


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


def test_two_processes_can_run_notebooks(tmp_path):
    path = make(tmp_path / "book" / "01_test.ipynb", "print(k)")
    code = (
        "import sys; from specnb.book.engine import run_notebook\n"
        f"print(run_notebook({str(path)!r}, {{'k': int(sys.argv[1])}}, results={str(tmp_path / 'r')!r}).status)"
    )
    jobs = [
        subprocess.Popen([sys.executable, "-c", code, k], stdout=subprocess.PIPE, stderr=subprocess.PIPE) for k in "12"
    ]
    assert [job.communicate(timeout=120)[0].decode().strip() for job in jobs] == ["completed"] * 2
    assert len(list((tmp_path / "r" / "01_test").iterdir())) == 2


def test_the_same_run_twice_at_once_is_refused(run, tmp_path):
    go = tmp_path / "go"
    wait = f"import pathlib, time\nwhile not pathlib.Path({str(go)!r}).exists(): time.sleep(0.05)"
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(run, wait, timeout_s=60)
        try:
            while not list(tmp_path.glob("results/01_test/*/notebook.ipynb")):
                time.sleep(0.05)
            assert not list(tmp_path.glob("results/01_test/*/outcome.json"))
            with pytest.raises(InputError, match="is in use"):
                run(wait, timeout_s=20)
        finally:
            go.touch()
        assert first.result().status == "completed"


def test_a_run_can_be_started_from_inside_an_event_loop(tmp_path):
    # a cell of a notebook runs inside one
    async def main():
        return run_notebook(make(tmp_path / "01_a.ipynb", "print(1)"), results=tmp_path / "r", progress=False)

    assert asyncio.run(main()).status == "completed"


def test_an_older_outcome_does_not_outlive_the_start_of_a_new_run(run, tmp_path, monkeypatch):
    folder = run("1").output.parent
    seen = []
    real = engine._execute

    def spy(*args, **options):
        seen.append((folder / "outcome.json").exists())
        return real(*args, **options)

    monkeypatch.setattr(engine, "_execute", spy)
    assert run("1").status == "completed"
    assert seen == [False]


def test_an_unexpected_error_is_recorded_and_goes_on_its_way(run, tmp_path, monkeypatch):
    def broken(*args, **options):
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(engine, "_execute_managed", broken)
    with pytest.raises(ZeroDivisionError):
        run("1")
    (folder,) = (tmp_path / "results" / "01_test").iterdir()
    outcome = read_outcome(folder)
    assert (outcome.status, outcome.error.kind, outcome.error.message) == ("failed", "ZeroDivisionError", "a bug")


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
    assert (outcome.status, outcome.error.kind) == ("failed", "KeyboardInterrupt")
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text()), 0)


def test_the_notebook_on_disk_is_whole_at_any_moment(run, tmp_path):
    stop, torn = threading.Event(), []

    def watch():
        while not stop.is_set():
            for path in tmp_path.glob("results/01_test/*/notebook.ipynb"):
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


def test_importing_the_engine_is_light():
    code = "import sys, specnb.book.engine; print({'papermill', 'nbclient', 'nbformat', 'pandas'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "set()"


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


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"status": "completed"}'])
def test_a_damaged_outcome_is_named(tmp_path, content):
    (tmp_path / "outcome.json").write_text(content)
    with pytest.raises(InputError, match=r"outcome\.json is not an outcome record"):
        read_outcome(tmp_path)


def test_no_outcome_is_none(tmp_path):
    assert read_outcome(tmp_path) is None


def test_a_long_message_is_cut(run):
    message = run("raise ValueError('x' * 100_000)").error.message
    assert len(message) < 2100
    assert "100000 characters" in message
