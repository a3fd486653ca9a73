"""Runs notebooks headless, each in a kernel of its own, and tells the truth about how it went.

`run_notebook` executes a copy of a notebook through papermill and writes, into `results/<notebook>/<run_id>/`,
`notebook.ipynb` (saved after every cell) and `outcome.json` (last). papermill's own metadata is not asked how it
went: after a timeout or a dead kernel it calls every cell completed.
"""

import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, BinaryIO, Literal

from pydantic import BaseModel, ConfigDict, Field

from specnb import store
from specnb.book.notebook import Source, read_notebook, resolve
from specnb.io import locked, write_atomic

if TYPE_CHECKING:
    from jupyter_client import AsyncKernelManager
    from nbformat import NotebookNode
    from papermill.engines import NotebookExecutionManager

START_TIMEOUT_S = 60
IOPUB_TIMEOUT_S = 60  # outputs may lag behind the reply on a busy machine; nbclient's 4 s fail good runs
MESSAGE_CHARS = 2000
LINE_CHARS = 80
REDRAW_S = 0.5
KERNEL_LOG = "kernel.log"
# ipykernel else passes it through a pipe to a thread of its own, where the last words of a crash are lost
NATIVE_OUTPUT_TO_LOG = "--IPKernelApp.capture_fd_output=False"

SOCKET_PATH_BYTES = 95  # "-ipc-1" is added to it; Linux takes 107, macOS 103

_NONE: Mapping[str, Any] = MappingProxyType({})


class Problem(BaseModel):
    """What ended a run: class name and message of the error, and the cell (zero-based, in the source notebook)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: str
    message: str
    cell: int | None = None


class Outcome(BaseModel):
    """How one run of a notebook ended. `params` are all its parameters, defaults included."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: Literal[1] = 1
    notebook: str
    notebook_sha256: str
    run_id: str
    params: dict[str, Any]
    status: Literal["completed", "failed"]
    error: Problem | None = None
    started: datetime
    ended: datetime
    duration_s: float
    kernel_starts: int = Field(description="2 where the first kernel died before its first reply")
    output: Path = Field(description="the executed notebook; the record of the run lies beside it")


def run_notebook(
    notebook: Path,
    params: Mapping[str, Any] = _NONE,
    *,
    results: Path,
    timeout_s: int | None = None,
    progress: bool = True,
) -> Outcome:
    """Run `notebook` with `params` in place of its defaults; the outcome says whether it completed.

    The kernel is this very Python, its working folder that of the notebook; `SPECNB_RESULTS` and
    `SPECNB_RUN_FOLDER` in its environment lead `store.save` to the folder of this run. `timeout_s` bounds each
    cell. A kernel that dies before its first reply is started once more. Raises InputError (and runs nothing) for
    a notebook or parameter that cannot be used, or while another process does the same run.
    """
    source = read_notebook(Path(notebook).absolute())
    given, resolved = resolve(source, params)
    results = Path(results).absolute()
    run_id = store.run_id(source.path.stem, resolved)
    folder = store.run_folder(results, source.path.stem, run_id)
    output = folder / "notebook.ipynb"
    with locked(folder / ".lock", "the same notebook runs with the same parameters; wait"):
        (folder / "outcome.json").unlink(missing_ok=True)
        nb = _prepared(source, given, output)
        environment = {"SPECNB_RESULTS": str(results), "SPECNB_RUN_FOLDER": str(folder), "PYTHONFAULTHANDLER": "1"}
        # published figures are those of the default parameters; others stay with their run
        environment |= {"SPECNB_FIGURES": str(folder / "figures")} if given else {}
        launch = {"env": {**os.environ, **environment}, "cwd": str(source.path.parent)}
        started, clock = datetime.now(UTC), time.perf_counter()
        try:
            with _kernel_log(folder) as log:
                launch |= {"stdout": log, "stderr": log}
                problem = _execute(nb, source, output, launch, timeout_s=timeout_s, progress=progress)
        except BaseException as error:  # a bug, a full disk, Ctrl-C: recorded below, then on its way
            problem = _marked_problem(nb, source) or _problem_of(error)
            raise
        finally:
            outcome = Outcome(
                notebook=source.path.name,
                notebook_sha256=source.sha256,
                run_id=run_id,
                params=resolved,
                status="completed" if problem is None else "failed",
                error=problem,
                started=started,
                ended=datetime.now(UTC),
                duration_s=time.perf_counter() - clock,
                kernel_starts=nb.metadata.papermill.get("kernel_starts", 0),
                output=output,
            )
            _save(nb, output)
            write_atomic(folder / "outcome.json", (outcome.model_dump_json(indent=1) + "\n").encode())
    return outcome


def __getattr__(name: str) -> Any:
    """`SpecnbEngine`, made when asked for.

    papermill loads this module, for its entry point, while papermill is itself half imported; a class statement
    with a papermill base at module level would make one of the two import orders fail.
    """
    if name != "SpecnbEngine":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import papermill.engines  # noqa: F401  comes back here through the entry point, so before the class is made

    return _engine_class()


@cache
def _engine_class() -> type:
    from nbclient.exceptions import CellTimeoutError, DeadKernelError
    from papermill.engines import NBClientEngine, NotebookExecutionManager

    class Manager(NotebookExecutionManager):
        """Saves in one step (papermill truncates the file first), and calls no cell completed that never ran."""

        def save(self, **kwargs: Any) -> None:
            if self.output_path:
                _save(self.nb, Path(self.output_path))
            self.last_save_time = self.now()

        def notebook_complete(self, **kwargs: Any) -> None:
            waiting = [cell for cell in self.nb.cells if not cell.metadata.papermill["start_time"]]
            ended_early = bool(self.nb.metadata.papermill["exception"])
            super().notebook_complete(**kwargs)
            for cell in waiting if ended_early else ():
                cell.metadata.papermill["status"] = self.PENDING
            self.save()

    class SpecnbEngine(NBClientEngine):
        """papermill engine `specnb`: this Python, private sockets, no widget state, one retry of a stillborn kernel.

        A timeout, a dead kernel and Ctrl-C are errors of the cell that was running.
        """

        @classmethod
        def execute_notebook(
            cls,
            nb: "NotebookNode",
            kernel_name: str,
            output_path: str | None = None,
            progress_bar: bool | dict[str, Any] = True,
            log_output: bool = False,
            autosave_cell_every: int = 30,
            **options: Any,
        ) -> "NotebookNode":
            manager = Manager(nb, output_path, log_output, progress_bar, autosave_cell_every)
            manager.notebook_start()
            try:
                _execute_managed(manager, kernel_name, **options)
            except (CellTimeoutError, DeadKernelError, KeyboardInterrupt) as error:
                begun = _blame_running_cell(nb, _problem_of(error))
                if not begun or isinstance(error, KeyboardInterrupt):
                    raise
            finally:
                manager.cleanup_pbar()
                manager.notebook_complete()
            return nb

    return SpecnbEngine


def _problem_of(error: BaseException) -> "Problem":
    """What ended a run from outside its cells, in words."""
    match kind := type(error).__name__:
        case "CellTimeoutError":
            message = " ".join(str(error).splitlines()[:2])
        case "DeadKernelError":
            advice = f"read {KERNEL_LOG}, if there is one, and run `specnb check`"
            message = f"{_short(str(error))} (out of memory, or a crash in native code: {advice})"
        case "KeyboardInterrupt":
            message = "interrupted from the keyboard"
        case _:
            message = _short(str(error))
    return Problem(kind=kind, message=message)


@contextmanager
def kernel_manager(kernel_name: str) -> Iterator["AsyncKernelManager"]:
    """A manager for one kernel; with the name `python3` that kernel is this interpreter, whatever is installed.

    A spec named python3 of another environment may lie earlier on Jupyter's path. TCP ports, and socket names in a
    shared folder, collide when several kernels start at once: the sockets lie in a temporary folder of their own,
    removed at the end. Windows, and a temporary folder with too long a name, get TCP.
    """
    from jupyter_client import AsyncKernelManager
    from jupyter_client.kernelspec import NATIVE_KERNEL_NAME, KernelSpecManager

    specs = KernelSpecManager(kernel_dirs=[]) if kernel_name == NATIVE_KERNEL_NAME else KernelSpecManager()
    with tempfile.TemporaryDirectory(prefix="specnb-", ignore_cleanup_errors=True) as folder:
        file = os.path.realpath(Path(folder) / "k.json")
        ipc = sys.platform != "win32" and len(os.fsencode(file)) <= SOCKET_PATH_BYTES
        yield AsyncKernelManager(
            kernel_name=kernel_name,
            kernel_spec_manager=specs,
            connection_file=file,
            transport="ipc" if ipc else "tcp",
        )


def _execute_managed(
    nb_man: "NotebookExecutionManager",
    kernel_name: str,
    *,
    start_timeout: int = START_TIMEOUT_S,
    execution_timeout: int | None = None,
    launch: Mapping[str, Any] = _NONE,
    input_path: str | None = None,
    **options: Any,
) -> None:
    """Run the cells. `launch` (env, cwd, stdout, stderr) is for the kernel's process alone, this one keeps its own."""
    from nbclient.exceptions import DeadKernelError
    from papermill.clientwrap import PapermillNotebookClient

    class Client(PapermillNotebookClient):
        shown_at = 0.0

        def process_message(self, *args: Any, **kwargs: Any) -> Any:
            """Show what a long cell reports on stderr (its own progress bar) behind the bar of the cells."""
            output = super().process_message(*args, **kwargs)
            on_stderr = output is not None and output.get("name") == "stderr"
            if nb_man.pbar is not None and on_stderr and time.monotonic() > self.shown_at + REDRAW_S:
                self.shown_at = time.monotonic()
                nb_man.pbar.set_postfix_str(_last_line(output.text))
            return output

    for attempt in (1, 2):
        replied: list[bool] = []
        nb_man.nb.metadata.papermill["kernel_starts"] = attempt
        with kernel_manager(kernel_name) as manager:
            client = Client(
                nb_man,
                km=manager,
                kernel_name=kernel_name,
                startup_timeout=start_timeout,
                timeout=execution_timeout,
                iopub_timeout=IOPUB_TIMEOUT_S,
                store_widget_state=False,
                on_notebook_start=lambda notebook, replied=replied: replied.append(True),
                **options,
            )
            try:
                client.execute(cleanup_kc=True, **launch)
                return
            except RuntimeError as error:
                if replied:
                    raise
                stillborn = error
    raise DeadKernelError(f"no kernel came up in two attempts: {stillborn}") from stillborn


def _execute(
    nb: "NotebookNode",
    source: Source,
    output: Path,
    launch: Mapping[str, Any],
    *,
    timeout_s: int | None,
    progress: bool,
) -> Problem | None:
    """Run `nb` in place, saving it after every cell; the problem that ended it, None where it completed."""
    from nbclient.exceptions import DeadKernelError

    try:
        _engine_class().execute_notebook(
            nb, "python3", str(output), {"desc": source.path.stem} if progress else False,
            execution_timeout=timeout_s, launch=launch, extra_arguments=[NATIVE_OUTPUT_TO_LOG],
        )  # fmt: skip
    except DeadKernelError as error:  # before the first cell
        return _problem_of(error)
    return _marked_problem(nb, source)


def _prepared(source: Source, given: Mapping[str, Any], output: Path) -> "NotebookNode":
    """A copy of the notebook as papermill wants it, with the given parameters put in."""
    from papermill.execute import prepare_notebook_metadata, remove_error_markers
    from papermill.iorw import load_notebook_node
    from papermill.parameterize import parameterize_notebook

    nb = load_notebook_node(source.nb)
    if given:
        nb = parameterize_notebook(nb, dict(given), kernel_name="python3", language="python")
    return remove_error_markers(prepare_notebook_metadata(nb, str(source.path), str(output)))


def _blame_running_cell(nb: "NotebookNode", stopped: Problem) -> bool:
    """Put into the cell that was running what papermill leaves out when the kernel, not the cell, fails.

    False where no cell had started.
    """
    from nbformat.v4 import new_output

    nb.metadata.papermill["exception"] = True
    begun = [index for index, cell in enumerate(nb.cells) if cell.metadata.papermill.get("start_time")]
    if not begun:
        return False
    cell = nb.cells[begun[-1]]
    cell.metadata.papermill.update(status="failed", exception=True)
    error = new_output("error", ename=stopped.kind, evalue=stopped.message, traceback=[stopped.message])
    # before the KeyboardInterrupt that stopping the kernel may have left: the first error counts
    cell.outputs = sorted([error, *cell.get("outputs", [])], key=lambda each: each.output_type == "error")
    return True


def _marked_problem(nb: "NotebookNode", source: Source) -> Problem | None:
    """The error that a cell of `nb` holds, if any; papermill's red markers are put at it."""
    from papermill.exceptions import PapermillExecutionError
    from papermill.execute import raise_for_execution_errors

    executed = list(nb.cells)
    try:
        raise_for_execution_errors(nb, None)
    except PapermillExecutionError as error:
        places = {cell.id: index for index, cell in enumerate(source.nb.cells)}
        cell = places.get(executed[error.cell_index].id)
        return Problem(kind=error.ename, message=_short(error.evalue), cell=cell)
    return None


@contextmanager
def _kernel_log(folder: Path) -> Iterator[BinaryIO]:
    """A file for what native code and the kernel itself print, last words above all; removed when empty."""
    path = folder / KERNEL_LOG
    try:
        with path.open("wb") as file:
            yield file
    finally:
        if not path.stat().st_size:
            path.unlink()


def _save(nb: "NotebookNode", path: Path) -> None:
    import nbformat

    write_atomic(path, (nbformat.writes(nb) + "\n").encode())


def _last_line(text: str) -> str:
    """The newest line of a progress bar, without the bar: `12% 3/24 code-1, K 4`."""
    words = re.split(r"[\r\n]", text.strip())[-1].split()
    return " ".join(word for word in words if word.isascii() and word != "|")[:LINE_CHARS]


def _short(text: str) -> str:
    return text if len(text) <= MESSAGE_CHARS else f"{text[:MESSAGE_CHARS]} … ({len(text)} characters)"
