"""Headless runs: one folder per run, with an outcome that states how the run ended."""

import asyncio
import json
import os
import sys
from pathlib import Path
from unittest.mock import Mock

import nbformat
import pytest
from typer.testing import CliRunner

from specnb import cli, store
from specnb.book import engine
from specnb.book.engine import NotebookOutcome, run_notebook
from specnb.errors import InputError
from specnb.io import digest
from tests.book.test_notebook import notebook_at

PARAMETERS = "k: int = 4  # draft length\ntemperature: float = 0  # 0 is greedy\nname: str = 'a'\n"
RECORD = """
from datetime import UTC, datetime
from specnb import store
from specnb.records import RunRecord
now = datetime.now(UTC)
record = RunRecord(
    run_id="any", experiment="any", params={"k": k}, provenance={}, started=now, ended=now
)
print(store.save(record, store.results_dir()))
"""


@pytest.fixture
def run(tmp_path):
    """Return a function that runs these cells; braces in paths are not papermill templates."""

    def run(*codes, params=(), **options) -> NotebookOutcome:
        path = notebook_at(tmp_path / "b{k}" / "01_test.ipynb", PARAMETERS, *codes)
        return run_notebook(path, dict(params), results=tmp_path / "r{x}", **options)

    return run


def stored(outcome: NotebookOutcome, file: str = "outcome.json") -> NotebookOutcome:
    """Return the outcome that a file next to the executed notebook contains."""
    return NotebookOutcome(**json.loads(Path(outcome.output).with_name(file).read_bytes()))


def last_source(outcome: NotebookOutcome) -> str:
    return nbformat.read(outcome.output, 4).cells[-1].source


def printed(outcome: NotebookOutcome) -> list[str]:
    """Return the printed text of each cell that printed any."""
    cells = nbformat.read(outcome.output, 4).cells
    texts = [
        "".join(output.get("text", "") for output in cell.get("outputs", [])) for cell in cells
    ]
    return [text.strip() for text in texts if text]


def test_a_run_writes_all_its_files_to_one_folder(run, tmp_path):
    before = dict(os.environ), Path.cwd()
    params = {"k": 8, "temperature": 1.0, "name": 'quo"te\n{brace}'}

    async def cell() -> NotebookOutcome:
        facts = "[sys.executable, os.getcwd(), os.environ['SPECNB_RESULTS'], k, temperature, name]"
        slider = "from ipywidgets import IntSlider\nIntSlider(4)"
        return run(
            f"import os, sys, json\nprint(json.dumps({facts}))", RECORD, slider, params=params
        )

    outcome = asyncio.run(cell())  # a cell of a notebook runs inside an event loop
    folder = tmp_path / "r{x}" / "01_test" / store.run_id("01_test", params)
    assert (outcome.status, outcome.output, outcome.params) == (
        "completed",
        str(folder / "notebook.ipynb"),
        params,
    )
    assert (
        outcome.notebook_sha256 == digest(tmp_path / "b{k}" / "01_test.ipynb")
        and stored(outcome) == outcome
    )
    first, second = printed(outcome)
    # this interpreter, with the notebook's folder as the working directory
    here = [sys.executable, str(tmp_path / "b{k}"), str(tmp_path / "r{x}")]
    assert json.loads(first) == [*here, *params.values()] and second == str(folder)
    files = {path.name for path in folder.iterdir() if not path.name.startswith(".")}
    assert files == {"notebook.ipynb", "outcome.json", "run.json", "kernel.log"}
    assert "widgets" not in nbformat.read(outcome.output, 4).metadata
    assert (dict(os.environ), Path.cwd()) == before, "nothing of it in this process"


@pytest.mark.parametrize(
    ("code", "kind", "options"),
    [
        ("raise ValueError('x' * 100_000)", "ValueError", {"params": {"k": 9}}),
        ("import ctypes\nctypes.string_at(0)", "DeadKernelError", {}),
        pytest.param(
            "import time\ntime.sleep(120)",
            "CellTimeoutError",
            {"timeout_s": 1},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["error", "dead kernel", "timeout"],
)
def test_a_failed_run_reports_its_error_and_keeps_the_partial_notebook(run, code, kind, options):
    outcome = run("print('before', flush=True)", code, "print('after')", **options)
    assert (
        outcome.status == "failed" and outcome.error["kind"] == kind and stored(outcome) == outcome
    )
    assert outcome.error["cell"] == (2 if kind == "ValueError" else None), "counted in the source"
    assert (
        len(outcome.error["message"]) <= 2100
        and outcome.duration_s < 60
        and printed(outcome)[0] == "before"
    )
    if kind == "DeadKernelError":
        assert "specnb check" in outcome.error["message"]
        assert "Segmentation fault" in (Path(outcome.output).parent / "kernel.log").read_text()


# --- without a kernel -----------------------------------------------------------------------------


def write_notebook(source: Path, output: Path, *_) -> None:
    """Copy the notebook instead of executing it."""
    output.write_bytes(source.read_bytes())


def test_bad_input_is_refused_before_anything_is_written(run, tmp_path):
    for name, params in {
        "01_test.ipynb": {"K": 4},
        "my notes.ipynb": {},
    }.items():  # a folder name cannot have a space
        with pytest.raises(InputError, match=r"'K'|my notes"):
            run_notebook(
                notebook_at(tmp_path / name, PARAMETERS), params, results=tmp_path / "r{x}"
            )
    assert not (tmp_path / "r{x}").exists()


def test_the_same_run_twice_at_once_is_refused(run, monkeypatch):
    def again(*paths):
        write_notebook(*paths)
        with pytest.raises(InputError, match="01_test"):
            run("1")

    monkeypatch.setattr(engine, "_execute", again)
    first = run("1")
    default = run("1", params={"k": 4})
    assert first.output == default.output, "a value equal to the default is the same run"


def test_only_a_completed_run_replaces_a_completed_run(run, tmp_path, monkeypatch):
    errors = iter([ZeroDivisionError("a bug"), None, KeyboardInterrupt(), None])

    def execute(*paths):
        write_notebook(*paths)
        if error := next(errors):
            raise error

    monkeypatch.setattr(engine, "_execute", execute)
    with pytest.raises(ZeroDivisionError, match="a bug"):
        run("1")
    (file,) = tmp_path.glob("r{x}/*/*/outcome.json")
    problem = {"kind": "ZeroDivisionError", "message": "a bug", "cell": None}
    assert json.loads(file.read_bytes())["error"] == problem
    outcome = run("2")
    assert outcome.status == "completed"
    with pytest.raises(KeyboardInterrupt):
        run("3")
    assert stored(outcome) == outcome and last_source(outcome) == "2"
    interrupted = stored(outcome, "outcome.again.json")
    assert interrupted.error["message"] == "interrupted" and last_source(interrupted) == "3"
    latest = run("4")
    assert latest == stored(latest) != outcome and last_source(latest) == "4"
    files = {path.name for path in file.parent.iterdir() if path.name[0] != "."}
    assert files == {"notebook.ipynb", "outcome.json", "kernel.log"}


def test_ctrl_c_ends_the_command_with_130(monkeypatch, tmp_path):
    monkeypatch.setattr(engine, "run_notebook", Mock(side_effect=KeyboardInterrupt))
    monkeypatch.setattr("specnb.lm.files.zoo_file", Mock())
    result = CliRunner().invoke(cli.app, ["run", "01", "03", "--results", str(tmp_path)])
    assert (
        result.exit_code == 130
        and "interrupted" in result.stderr
        and engine.run_notebook.call_count == 1
    )
