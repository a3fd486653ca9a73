"""Runs notebooks headless through papermill, each in a kernel of its own, and records truthfully how it ended.

`run_notebook` executes a copy of a notebook and writes, into `results/<notebook>/<run_id>/`, `notebook.ipynb` (saved
after every cell) and `outcome.json` (last). papermill itself calls every cell completed after a timeout or a dead
kernel; here the cell that was running holds the error, and those behind it stay pending. What has completed is
replaced by what completes: a second run that fails lies beside it, in `notebook.again.ipynb` and `outcome.again.json`.
"""

import json
import os
import re
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from time import perf_counter
from typing import Any, Literal, NamedTuple

import nbformat
from jupyter_client import AsyncKernelManager
from jupyter_client.kernelspec import NATIVE_KERNEL_NAME, KernelSpecManager
from nbclient.exceptions import CellTimeoutError, DeadKernelError
from nbformat import NotebookNode
from papermill.clientwrap import PapermillNotebookClient
from papermill.engines import NotebookExecutionManager
from papermill.exceptions import PapermillExecutionError
from papermill.execute import prepare_notebook_metadata, raise_for_execution_errors, remove_error_markers
from papermill.iorw import load_notebook_node
from papermill.parameterize import parameterize_notebook

from specnb import store
from specnb.book.notebook import read_notebook, resolve_params
from specnb.errors import InputError
from specnb.io import locked, read_json, write_atomic
from specnb.measure.experiment import Progress, silent
from specnb.params import BUDGET

IOPUB_TIMEOUT_S = 60  # outputs may lag behind the reply on a busy machine; nbclient's 4 s fail good runs
MESSAGE_CHARS = 2000
KERNEL_LOG = "kernel.log"
OVERWRITTEN = re.compile(r"^.*\r(?=[^\n])", re.MULTILINE)  # without ^ in quadratic time
# ipykernel else passes it through a pipe to a thread of its own, where the last words of a crash are lost
NATIVE_OUTPUT_TO_LOG = "--IPKernelApp.capture_fd_output=False"


class NotebookOutcome(NamedTuple):
    """The end of one run of a notebook, in the types of JSON. `params` are all its parameters, defaults included.

    `error`: kind and message of what ended it, and the cell (zero-based, in the source notebook). `kernel_starts` is 2
    where the first kernel died before its first reply. `output` is the executed notebook, beside the record of the run.
    """

    notebook: str
    notebook_sha256: str
    run_id: str
    params: dict[str, Any]
    status: Literal["completed", "failed"]
    error: dict[str, Any] | None
    started: str
    ended: str
    duration_s: float
    kernel_starts: int
    output: str
    schema_version: int = 1


def run_notebook(
    notebook: Path,
    params: Mapping[str, Any],
    *,
    budget: str | None = None,
    results: Path,
    timeout_s: int | None = None,
    progress: Progress = silent,
) -> NotebookOutcome:
    """Run `notebook` with `params` in place of its defaults, others by the budget; the outcome says how it ended.

    The kernel is this very Python, its working folder that of the notebook; `SPECNB_RESULTS` and
    `SPECNB_RUN_FOLDER` in its environment lead `store.save` to the folder of this run. `timeout_s` bounds each
    cell. A kernel that dies before its first reply is started once more. Raises InputError (and runs nothing) for
    a notebook or parameter that cannot be used, or while another process does the same run.
    """
    source, results = read_notebook(notebook.absolute()), results.absolute()
    given, resolved = resolve_params(source, params, budget)
    run_id = store.run_id(source.path.stem, resolved)
    folder = store.run_folder(results, source.path.stem, run_id)
    with locked(folder / ".lock", "the same notebook runs with the same parameters; wait"):
        earlier = folder / store.OUTCOME
        try:
            again = ".again" * (earlier.is_file() and read_json(earlier)["status"] == "completed")
        except (InputError, KeyError):
            raise InputError(f"{earlier} is damaged, expected an outcome: remove it, and run again") from None
        output = folder / f"notebook{again}.ipynb"
        (folder / f"outcome{again}.json").unlink(missing_ok=True)
        nb = load_notebook_node(source.nb)  # a copy
        if given:
            nb = parameterize_notebook(nb, given, kernel_name=NATIVE_KERNEL_NAME, language="python")
        nb = remove_error_markers(prepare_notebook_metadata(nb, str(source.path), str(output)))
        env = os.environ | {"SPECNB_RESULTS": str(results), "SPECNB_RUN_FOLDER": str(folder), "PYTHONFAULTHANDLER": "1"}
        env |= {BUDGET: resolved["budget"]} if "budget" in resolved else {}
        manager = _Manager(nb, str(output), progress_bar=False)
        manager.progress = progress
        started, problem = datetime.now(UTC), None
        start_s = perf_counter()
        try:
            # what native code and the kernel itself print, last words above all
            with (folder / KERNEL_LOG).open("wb") as log:
                _execute(manager, timeout_s, env=env, cwd=str(source.path.parent), stdout=log, stderr=log)
        except BaseException as error:  # a bug, a full disk and Ctrl-C are recorded below, and go on their way
            problem = _blame_running_cell(nb, error)
            if not isinstance(error, CellTimeoutError | DeadKernelError):
                raise
        finally:
            for cell in nb.cells:
                join_streams(cell)
            problem = _marked_problem(nb, source.nb) or problem
            manager.save()
            if again and problem is None:
                again, output = "", output.replace(folder / "notebook.ipynb")
            duration_s = perf_counter() - start_s
            outcome = NotebookOutcome(
                source.path.name, source.sha256, run_id, resolved, "failed" if problem else "completed", problem,
                started.isoformat(), (started + timedelta(seconds=duration_s)).isoformat(), duration_s,
                nb.metadata.papermill.get("kernel_starts", 0), str(output),
            )  # fmt: skip
            write_atomic(folder / f"outcome{again}.json", f"{json.dumps(outcome._asdict(), indent=1)}\n".encode())
    return outcome


class _Manager(NotebookExecutionManager):
    """Reports cells to `progress`, and saves in one step: papermill truncates the file first."""

    progress: Progress

    def cell_start(self, cell, cell_index=None, **options):
        self.progress(cell_index, len(self.nb.cells), f"cells of {Path(self.nb.metadata.papermill.input_path).name}")
        super().cell_start(cell, cell_index, **options)

    def save(self, **_: Any) -> None:
        write_atomic(self.output_path, (nbformat.writes(self.nb) + "\n").encode())
        self.last_save_time = self.now()


def _execute(manager: NotebookExecutionManager, timeout_s: int | None, **launch: Any) -> None:
    """Run the notebook in place, saving it after every cell; `launch` (env, cwd, stdout, stderr) is for the kernel.

    An error of a cell is left in the cell. Raises CellTimeoutError, DeadKernelError and what stops this process.
    """
    manager.notebook_start()
    for attempt in (1, 2):
        manager.nb.metadata.papermill["kernel_starts"] = attempt
        # of this interpreter, though another environment's spec lies earlier on Jupyter's path
        specs = KernelSpecManager(kernel_dirs=[])
        kernel = AsyncKernelManager(kernel_name=NATIVE_KERNEL_NAME, kernel_spec_manager=specs)
        client = PapermillNotebookClient(
            manager, km=kernel, timeout=timeout_s, iopub_timeout=IOPUB_TIMEOUT_S,
            extra_arguments=[NATIVE_OUTPUT_TO_LOG], store_widget_state=False,
        )  # fmt: skip
        try:
            client.execute(cleanup_kc=True, **launch)
            return manager.notebook_complete()
        except RuntimeError as error:
            if _begun(manager.nb):
                raise
            stillborn = error
    raise DeadKernelError(f"no kernel came up in two attempts: {stillborn}") from stillborn


def join_streams(cell: NotebookNode) -> None:
    """Join what a cell printed into one output per stream, as a terminal shows it.

    The result is that of nbclient's `coalesce_streams`, which takes quadratic time on a long line.
    """
    outputs, streams = cell.get("outputs", []), {}
    for output in outputs:
        parts = streams.setdefault(output.get("name", id(output)), [])
        # which of the two comes first is chance
        if not parts and [*streams][-2:] == ["stderr", "stdout"]:
            streams["stderr"] = streams.pop("stderr")
        parts.append(output)
    outputs[:] = [parts[0] for parts in streams.values()]
    for parts in streams.values():
        if "text" in parts[0]:
            parts[0].text = OVERWRITTEN.sub("", "".join(part.text for part in parts))


def _begun(nb: NotebookNode) -> list[NotebookNode]:
    """Cells that ran, the last one perhaps to no end."""
    return [cell for cell in nb.cells if cell.metadata.get("papermill", {}).get("start_time")]


def _blame_running_cell(nb: NotebookNode, error: BaseException) -> dict[str, Any]:
    """What ended a run from outside its cells, put into the cell that was running, if any had started."""
    message = str(error)[:MESSAGE_CHARS] or "interrupted"
    if isinstance(error, DeadKernelError):
        message += f" (out of memory, or a crash in native code: read {KERNEL_LOG}, and run `specnb check`)"
    kind = type(error).__name__
    nb.metadata.papermill["exception"] = True
    for cell in _begun(nb)[-1:]:
        cell.metadata.papermill.update(status="failed", exception=True)
        output = nbformat.v4.new_output("error", ename=kind, evalue=message, traceback=[message])
        # before the KeyboardInterrupt that stopping the kernel may have left: the first error counts
        cell.outputs = sorted([output, *cell.get("outputs", [])], key=lambda each: each.output_type == "error")
    return {"kind": kind, "message": message, "cell": None}


def _marked_problem(nb: NotebookNode, source: NotebookNode) -> dict[str, Any] | None:
    """The error that a cell of `nb` holds, if any; papermill's red markers are put at it."""
    places = {cell.id: index for index, cell in enumerate(source.cells)}
    cells = [*nb.cells]
    try:
        raise_for_execution_errors(nb, None)
    except PapermillExecutionError as error:
        cell = places.get(cells[error.cell_index].id)
        return {"kind": error.ename, "message": error.evalue[:MESSAGE_CHARS], "cell": cell}
    return None
