"""Headless runs: one folder a run, every end told truthfully, this process left alone. Three kernels by default."""

import asyncio
import json
import os
import sys
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from unittest.mock import Mock

import nbformat
import papermill
import pytest
from nbformat.v4 import new_code_cell, new_output
from typer.testing import CliRunner

from specnb import cli, store
from specnb.book import engine
from specnb.book.engine import NotebookOutcome, run_notebook
from specnb.errors import InputError
from specnb.io import digest, project_dir
from tests.book.test_notebook import notebook_at

PARAMETERS = "k: int = 4  # draft length\ntemperature: float = 0  # 0 is greedy\nname: str = 'a'\n"


@pytest.fixture
def run(tmp_path):
    def run(*codes, params=(), **options) -> NotebookOutcome:
        path = notebook_at(
            tmp_path / "b{k}" / "01_test.ipynb", PARAMETERS, *codes
        )  # braces are no templates of papermill
        return run_notebook(path, dict(params), results=tmp_path / "r{x}", **options)

    return run


@pytest.fixture
def only_outcome(tmp_path):
    """Read the outcome of the only run there is."""

    def read() -> NotebookOutcome:
        (file,) = (tmp_path / "r{x}").glob("*/*/outcome.json")
        return NotebookOutcome(**json.loads(file.read_bytes()))

    return read


def executed(outcome: NotebookOutcome) -> nbformat.NotebookNode:
    return nbformat.read(outcome.output, 4)


def printed(outcome: NotebookOutcome) -> list[str]:
    """What the cells printed, a text a cell."""
    texts = ["".join(o.get("text", "") for o in cell.get("outputs", [])) for cell in executed(outcome).cells]
    return [text.strip() for text in texts if text]


def states(outcome: NotebookOutcome) -> list[str]:
    """How papermill's metadata call the cells that are in the source."""
    return [cell.metadata.papermill.status for cell in executed(outcome).cells if "papermill" in cell.metadata]


RECORD = """
from datetime import UTC, datetime
from specnb import cli, store
from specnb.records import RunRecord
now = datetime.now(UTC)
record = RunRecord(run_id="any", experiment="any", params={"k": k}, provenance={}, started=now, ended=now)
print(store.save(record, store.results_dir()))
"""


def test_a_run_lands_in_one_folder_with_all_its_files(run, only_outcome, tmp_path):
    before = dict(os.environ), Path.cwd()
    params, steps = {"k": 8, "temperature": 1.0, "name": 'quo"te\n{brace}'}, []

    async def cell() -> NotebookOutcome:
        return run(
            "import os, sys, json\nprint(json.dumps([sys.executable, os.getcwd(), k, temperature, name]))",
            "print(*(os.environ[f'SPECNB_{name}'] for name in ('RESULTS', 'RUN_FOLDER')))",
            RECORD,
            "from specnb.measure.experiment import ProgressBar\nwith ProgressBar() as show: show(3, 3, 'a')",
            "print('x' * 1_000_000, end=''); print('y\\r' + 'z' * 1_000_000 + '\\r\\nlast\\r')",
            "from ipywidgets import IntSlider\nIntSlider(4)",
            params=params,
            progress=lambda *step: steps.append(step),
        )

    outcome = asyncio.run(cell())  # a cell of a notebook runs inside an event loop
    folder = tmp_path / "r{x}" / "01_test" / outcome.run_id
    assert (outcome.status, outcome.output, outcome.params) == ("completed", str(folder / "notebook.ipynb"), params)
    assert outcome.run_id == store.run_id("01_test", outcome.params) and 0 < outcome.duration_s < 120
    assert outcome.notebook_sha256 == digest(tmp_path / "b{k}" / "01_test.ipynb")
    n_cells = len(executed(outcome).cells)
    assert [step[0] for step in steps] == [*range(n_cells)] and steps[0][1:] == (n_cells, "cells of 01_test.ipynb")
    first, second, third, _, long = printed(outcome)
    assert long == "z" * 1_000_000 + "\r\nlast"  # a regex for \r takes minutes on such a line
    # this interpreter, the notebook's folder as working folder
    assert json.loads(first) == [sys.executable, str(tmp_path / "b{k}"), *params.values()]
    assert (second, third) == (f"{tmp_path / 'r{x}'} {folder}", str(folder))
    files = {path.name for path in folder.iterdir() if not path.name.startswith(".")}
    assert files == {"notebook.ipynb", "outcome.json", "run.json", "rounds.parquet", "kernel.log"}
    assert store.load_record(folder).params == {"k": 8} and only_outcome() == outcome
    nb = executed(outcome)
    assert "application/vnd.jupyter.widget-view+json" in nb.cells[-1].outputs[0].data and "widgets" not in nb.metadata
    assert set(states(outcome)) == {"completed"} and "3/3" not in str(nb.cells[-3].outputs)
    assert (dict(os.environ), Path.cwd()) == before, "nothing of it in this process"


@pytest.mark.parametrize(
    ("code", "kind", "options"),
    [
        ("raise ValueError('x' * 100_000)", "ValueError", {"params": {"k": 9}}),
        ("import ctypes\nctypes.string_at(0)", "DeadKernelError", {}),
        pytest.param("import time\ntime.sleep(120)", "CellTimeoutError", {"timeout_s": 1}, marks=pytest.mark.slow),
    ],
    ids=["error", "dead kernel", "timeout"],
)
def test_what_ends_a_cell_is_named_with_it_and_the_partial_notebook_stays(run, only_outcome, code, kind, options):
    outcome = run("print('before', flush=True)", code, "print('after')", **options)
    # the cell is counted in the source
    assert (outcome.status, outcome.error["kind"], outcome.error["cell"]) == ("failed", kind, 2)
    assert len(outcome.error["message"]) <= 2000 and outcome.duration_s < 60 and outcome.kernel_starts == 1
    assert printed(outcome) == ["before"] and states(outcome)[-2:] == ["failed", "pending"]
    assert only_outcome() == outcome
    if kind == "DeadKernelError":
        assert "specnb check" in outcome.error["message"]
        assert "Segmentation fault" in (Path(outcome.output).parent / "kernel.log").read_text()


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ([("out", "a\n"), ("out", "b\n")], [("out", "a\nb\n")]),
        ([("out", "1/3\r"), ("out", "2/3\r3/3\n"), ("out", "4\r\n")], [("out", "3/3\n4\r\n")]),
        ([("out", "1/2"), ("out", "\r2/2\r")], [("out", "2/2\r")]),
        ([("err", "w"), ("out", "a"), ("err", "v")], [("out", "a"), ("err", "wv")]),
        ([("err", "w"), (None, "1"), ("out", "a")], [("err", "w"), (None, "1"), ("out", "a")]),
        ([("out", "a"), (None, "1"), ("out", "b")], [("out", "ab"), (None, "1")]),
        ([], []),
    ],
)
def test_what_a_cell_printed_is_one_output_per_stream_as_a_terminal_shows_it(written, shown):
    def outputs(texts: list) -> list:
        streams = [new_output("stream", name=f"std{name}", text=text) for name, text in texts]
        tables = [new_output("display_data", {"text/plain": text}) for _, text in texts]
        return [streams[i] if name else tables[i] for i, (name, _) in enumerate(texts)]

    cell = new_code_cell(outputs=outputs(written))
    engine.join_streams(cell)
    assert cell.outputs == outputs(shown)


# --- without a kernel -----------------------------------------------------------------------------------------------


def test_plain_papermill_leaves_the_same_record(run, tmp_path, monkeypatch):
    folder = Path(run(RECORD, params={"k": 5}).output).parent
    monkeypatch.setenv("SPECNB_RESULTS", str(tmp_path / "plain"))
    source = (tmp_path / "b{k}" / "01_test.ipynb").rename(tmp_path / "01_test.ipynb")
    papermill.execute_notebook(source, tmp_path / "out.ipynb", {"k": 5}, kernel_name="python3", progress_bar=False)
    records = (
        store.load_record(of).model_dump(exclude={"started", "ended"}) for of in (folder, tmp_path / "plain/any/any")
    )
    assert next(records) == next(records) and store.load_record(folder).params == {"k": 5}


def test_the_internals_of_papermill_are_those_that_the_engine_was_checked_with():
    assert '"papermill>=2.7,<2.8"' in (project_dir() / "pyproject.toml").read_text(encoding="utf-8")
    assert version("papermill").startswith("2.7.")


def test_bad_input_is_refused_before_anything_is_written(run, tmp_path):
    for name, params in {"01_test.ipynb": {"K": 4}, "my notes.ipynb": {}}.items():  # this is no folder
        with pytest.raises(InputError, match=r"'K'|my notes"):
            run_notebook(notebook_at(tmp_path / name, PARAMETERS), params, results=tmp_path / "r{x}")
    assert not (tmp_path / "r{x}").exists()


@pytest.mark.parametrize("error", [ZeroDivisionError("a bug"), KeyboardInterrupt()], ids=repr)
def test_what_stops_this_process_is_recorded_and_goes_on_its_way(run, only_outcome, monkeypatch, error):
    def interrupted(manager, *_, **__):
        manager.notebook_start()
        manager.cell_start(manager.nb.cells[1], 1)
        raise error

    monkeypatch.setattr(engine, "_execute", interrupted)
    with pytest.raises(type(error)):
        run("1", "2")
    outcome = only_outcome()
    assert (outcome.status, outcome.error["kind"], outcome.error["cell"]) == ("failed", type(error).__name__, 1)
    assert states(outcome)[-2:] == ["failed", "pending"]


@pytest.mark.parametrize("outcome", [{}, {"state": "completed"}, ["completed"]], ids=str)
def test_a_damaged_outcome_is_named(run, tmp_path, monkeypatch, outcome):
    monkeypatch.setattr(engine, "_execute", Mock())
    folder = Path(run("1").output).parent
    (folder / "outcome.json").write_text(json.dumps(outcome))
    with pytest.raises(InputError, match=r"outcome\.json.*remove"):
        run("1")


def test_a_clock_that_is_set_back_makes_no_negative_duration(run, monkeypatch):
    clock = Mock(wraps=datetime)
    clock.now.side_effect = [datetime(2026, 11, 21, tzinfo=UTC), datetime(2026, 10, 1, tzinfo=UTC)]
    monkeypatch.setattr(engine, "datetime", clock)
    monkeypatch.setattr(engine, "_execute", Mock())
    outcome = run("1")
    assert 0 <= outcome.duration_s < 60 and outcome.started < outcome.ended


def test_the_same_run_twice_at_once_is_refused(run, monkeypatch):
    def again(manager, *_, **__):
        with pytest.raises(InputError, match="01_test"):
            run("1")

    monkeypatch.setattr(engine, "_execute", again)
    first, default = run("1"), run("1", params={"k": 4})
    assert first.output == default.output, "a value equal to the default is the same run"


def test_a_completed_run_is_replaced_by_a_completed_one_only_and_a_failed_one_by_any(run, only_outcome, monkeypatch):
    execute = Mock(side_effect=[ValueError("a bug"), None, KeyboardInterrupt, None])
    monkeypatch.setattr(engine, "_execute", execute)
    with pytest.raises(ValueError, match="a bug"):
        run("1")
    outcome = run("2")
    assert outcome == only_outcome() and outcome.status == "completed"
    with pytest.raises(KeyboardInterrupt):
        run("3")
    folder = Path(outcome.output).parent
    assert only_outcome() == outcome and executed(outcome).cells[-1].source == "2"
    interrupted = NotebookOutcome(**json.loads((folder / "outcome.again.json").read_bytes()))
    assert interrupted.error["kind"] == "KeyboardInterrupt" and executed(interrupted).cells[-1].source == "3"
    latest = run("4")
    assert latest == only_outcome() != outcome and executed(latest).cells[-1].source == "4"
    assert {path.name for path in folder.iterdir() if path.name[0] != "."} == {
        "notebook.ipynb", "outcome.json", "kernel.log"
    }  # fmt: skip


def test_a_kernel_that_dies_before_its_first_reply_is_started_once_more(run, monkeypatch):
    for deaths, status in ((1, "completed"), (2, "failed")):
        replies = Mock(side_effect=[RuntimeError("Kernel died")] * deaths + [None])
        monkeypatch.setattr(engine.PapermillNotebookClient, "execute", replies)
        outcome = run("print('here')")
        assert (outcome.status, outcome.kernel_starts) == (status, 2)
    assert (outcome.error["kind"], outcome.error["cell"]) == ("DeadKernelError", None)
    assert set(states(outcome)) == {"pending"}


def test_ctrl_c_ends_the_command_with_130(monkeypatch, tmp_path):
    monkeypatch.setattr(engine, "run_notebook", Mock(side_effect=KeyboardInterrupt))
    monkeypatch.setattr("specnb.lm.files.zoo_file", Mock())
    result = CliRunner().invoke(cli.app, ["run", "01", "03", "--results", str(tmp_path)])
    assert result.exit_code == 130 and "interrupted" in result.stderr and engine.run_notebook.call_count == 1
