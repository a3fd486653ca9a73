"""Run notebooks headless with papermill, and record how each run ended.

`run_notebook` executes a copy of a notebook. Into `results/<notebook>/<run_id>/` it writes
`notebook.ipynb` (saved after every cell), `kernel.log` and, last and atomically, `outcome.json`.
Only a completed run replaces a completed run: a repeated run that fails writes
`notebook.again.ipynb` and `outcome.again.json` instead.
"""

import os
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter
from typing import Any, Literal, NamedTuple

from jupyter_client import AsyncKernelManager
from jupyter_client.kernelspec import NATIVE_KERNEL_NAME, KernelSpecManager
from nbclient.exceptions import CellTimeoutError
from nbformat import NotebookNode
from papermill.exceptions import PapermillExecutionError
from papermill.execute import execute_notebook

from specnb import store
from specnb.book.notebook import read_notebook, resolve_params
from specnb.io import JsonObject, locked, read_json, write_json
from specnb.params import BUDGET

IOPUB_TIMEOUT_S = 60  # on a busy machine, outputs arrive late; nbclient's 4 s fail good runs
MESSAGE_CHARS = 2000
KERNEL_LOG = "kernel.log"
NATIVE_OUTPUT_TO_LOG = (
    "--IPKernelApp.capture_fd_output=False"  # ipykernel loses the last output before a crash
)


class NotebookOutcome(NamedTuple):
    """The outcome of one run of a notebook, in JSON types. `params` includes the defaults.

    `error` has the kind and the message of the error that ended the run, and the number of the
    failed cell in the source notebook, from 0 (None if papermill does not report it). `output` is
    the executed notebook, in the folder of the record.
    """

    notebook: str
    notebook_sha256: str
    run_id: str
    params: JsonObject
    status: Literal["completed", "failed"]
    error: JsonObject | None
    started: str
    ended: str
    duration_s: float
    output: str
    schema_version: int = 1


def run_notebook(
    notebook: Path,
    params: JsonObject,
    *,
    budget: str | None = None,
    results: Path,
    timeout_s: int | None = None,
    progress: bool = False,
) -> NotebookOutcome:
    """Run `notebook` with `params`, and with the budget's or its own defaults for all others.

    The kernel is this Python interpreter; it runs in the folder of the notebook. `SPECNB_RESULTS`
    and `SPECNB_RUN_FOLDER` in its environment direct `store.save` to the folder of this run.
    `timeout_s` limits each cell; `progress` shows papermill's bar on stderr.

    Raises InputError, before running anything, for an invalid notebook or parameter, or while
    another process does the same run. A failed cell, a dead kernel and a timeout are outcomes; any
    other exception is recorded and raised.
    """
    source = read_notebook(notebook.absolute())
    results = results.absolute()
    given, resolved = resolve_params(source, params, budget)
    run_id = store.run_id(source.path.stem, resolved)
    folder = store.run_folder(results, source.path.stem, run_id)
    environment = {
        **os.environ,
        "SPECNB_RESULTS": str(results),
        "SPECNB_RUN_FOLDER": str(folder),
        "PYTHONFAULTHANDLER": "1",
    }
    if "budget" in resolved:
        environment[BUDGET] = resolved["budget"]
    with locked(
        folder / ".lock", "another process runs this notebook with the same parameters; wait"
    ):
        before = folder / store.OUTCOME
        completed = before.is_file() and read_json(before).get("status") == "completed"
        again = ".again" if completed else ""
        output = folder / f"notebook{again}.ipynb"
        (folder / f"outcome{again}.json").unlink(missing_ok=True)
        started = datetime.now(UTC)
        start_s = perf_counter()
        problem = None
        try:
            with (folder / KERNEL_LOG).open("wb") as log:
                launch = {
                    "env": environment,
                    "cwd": str(source.path.parent),
                    "stdout": log,
                    "stderr": log,
                }
                _execute(source.path, output, given, launch, timeout_s, progress)
        except BaseException as error:
            problem = _describe(error, source.nb.cells)
            if not isinstance(error, PapermillExecutionError | CellTimeoutError | RuntimeError):
                raise  # a bug, a full disk, Ctrl-C
        finally:
            if again and not problem:
                again = ""
                output = output.replace(folder / "notebook.ipynb")
            outcome = NotebookOutcome(
                notebook=source.path.name,
                notebook_sha256=source.sha256,
                run_id=run_id,
                params=resolved,
                status="failed" if problem else "completed",
                error=problem,
                started=started.isoformat(),
                ended=datetime.now(UTC).isoformat(),
                duration_s=perf_counter() - start_s,
                output=str(output),
            )
            write_json(folder / f"outcome{again}.json", outcome._asdict())
    return outcome


def _execute(
    source: Path,
    output: Path,
    params: JsonObject,
    launch: dict[str, Any],
    timeout_s: int | None,
    progress: bool,
) -> None:
    """Execute a notebook with papermill; `launch` has the kernel's env, cwd, stdout and stderr.

    Raises PapermillExecutionError for an error in a cell, CellTimeoutError, and RuntimeError for a
    dead kernel.
    """

    class Kernel(AsyncKernelManager):
        """A kernel of this interpreter, even if Jupyter finds that of another environment first."""

        def __init__(self, **options):
            super().__init__(kernel_spec_manager=KernelSpecManager(kernel_dirs=[]), **options)

        async def start_kernel(self, **options):
            await super().start_kernel(**options, **launch)

    # papermill formats paths, so their braces are doubled
    paths = [str(path).replace("{", "{{").replace("}", "}}") for path in (source, output)]
    execute_notebook(
        *paths,
        params,
        kernel_name=NATIVE_KERNEL_NAME,
        language="python",
        progress_bar={"desc": source.name} if progress else False,
        execution_timeout=timeout_s,
        iopub_timeout=IOPUB_TIMEOUT_S,
        kernel_manager_class=Kernel,
        extra_arguments=[NATIVE_OUTPUT_TO_LOG],
        store_widget_state=False,
    )


def _describe(error: BaseException, cells: Sequence[NotebookNode]) -> JsonObject:
    """Return the kind and message of an error, and its cell's number in the source `cells`."""
    if isinstance(error, PapermillExecutionError):
        cell = error.cell_index
        if cell == len(cells) or cells[cell].source != error.source:
            cell -= 1  # papermill injected a parameters cell before it
        return {"kind": error.ename, "message": error.evalue[:MESSAGE_CHARS], "cell": cell}
    kind = type(error).__name__
    message = str(error)[:MESSAGE_CHARS] or "interrupted"
    if isinstance(error, RuntimeError):  # also raised before the kernel's first reply
        kind = "DeadKernelError"
        message += (
            " (out of memory, or a crash in native code: "
            f"read {KERNEL_LOG}, and run `specnb check`)"
        )
    return {"kind": kind, "message": message, "cell": None}


def format_error(error: JsonObject) -> str:
    """Return the error of an outcome on one line.

    >>> format_error({"kind": "KeyError", "message": "'x'", "cell": 2})
    "cell 2 (from 0): KeyError: 'x'"
    """
    place = "" if error["cell"] is None else f"cell {error['cell']} (from 0): "
    return f"{place}{error['kind']}: {error['message']}"
