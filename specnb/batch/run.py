"""One run of a sweep in its own process: a crash, a hang or a kill ends only that run.

`execute` starts the process and reads its outcome. The process also ends if its parent dies,
because its standard input is then closed.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from specnb import store
from specnb.errors import SpecnbError
from specnb.io import JsonObject, reading

if TYPE_CHECKING:
    from pyarrow.fs import FileSystem

GRACE_S = 20.0
"""Seconds that an interrupted run has to save its outcome before it is terminated."""
INTERRUPTED = 130
RETRIES = 1


Status = Literal["completed", "skipped", "failed", "killed"]


class Job(NamedTuple):
    """One run of a notebook; `results` is a folder or s3://BUCKET/PREFIX, and contains `folder`.

    A run whose kernel or process dies is restarted up to RETRIES times.
    """

    notebook: str
    notebook_sha256: str
    params: JsonObject
    budget: str | None
    run_id: str
    results: str

    @property
    def folder(self) -> str:
        return f"{self.results}/{Path(self.notebook).stem}/{self.run_id}"


class Ended(NamedTuple):
    """The outcome of a job; `skipped`: an earlier run had completed. `error` is one line, or ""."""

    run_id: str
    params: JsonObject
    status: Status
    duration_s: float = 0.0
    error: str = ""
    attempts: int = 1
    folder: str = ""

    @property
    def ok(self) -> bool:
        return self.status in ("completed", "skipped")


def place(results: str) -> tuple["FileSystem", str]:
    """Return the filesystem of a results folder (local or s3://…) and the path in it."""
    from pyarrow import fs

    with reading(results):
        return fs.FileSystem.from_uri(results if "://" in results else Path(results))


def completed_notebook(job: Job) -> str:
    """Return the digest of the notebook whose run with these parameters has completed, or "".

    Raises InputError if the results cannot be read.
    """
    system, path = place(file := f"{job.folder}/{store.OUTCOME}")
    with reading(file), suppress(FileNotFoundError), system.open_input_stream(path) as stream:
        outcome = json.loads(stream.read())
        return outcome["notebook_sha256"] if outcome["status"] == "completed" else ""
    return ""


def execute(job: Job, running: set[subprocess.Popen]) -> Ended:
    """Run a job in its own process, listed in `running` meanwhile; closing its stdin ends it."""
    clock = time.perf_counter()
    for attempt in range(1, RETRIES + 2):
        with tempfile.TemporaryFile() as complaints:
            process = subprocess.Popen(
                [sys.executable, "-m", "specnb.batch.run"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=complaints,
                start_new_session=True,  # Ctrl-C goes to the sweep, which ends its runs
            )
            running.add(process)
            try:
                process.stdin.write(json.dumps(job).encode() + b"\n")
                process.stdin.flush()
                outcome = (process.stdout.read().splitlines() or [b"{}"])[-1]
                code = process.wait()
            finally:
                running.discard(process)
            complaints.seek(0)
            last = complaints.read().decode(errors="replace").strip().rpartition("\n")[2]
        status, error = _judge_end(json.loads(outcome), code, last)
        if status != "killed" or attempt > RETRIES:
            break
        time.sleep(attempt)  # the dead process may still hold the lock of the folder
    return Ended(
        job.run_id, job.params, status, time.perf_counter() - clock, error, attempt, job.folder
    )


def _judge_end(outcome: JsonObject, code: int, last: str) -> tuple[Status, str]:
    """Return the status and the error, from outcome ({} if none), exit code and last line."""
    from specnb.book.engine import format_error

    if outcome.get("status") == "completed":
        return "completed", ""
    if problem := outcome.get("error"):
        return "killed" if problem["kind"] == "DeadKernelError" else "failed", format_error(problem)
    if code == 2:
        return "failed", last
    return "killed", last or f"its process exited with {code}"


def run_job() -> None:
    """Run the job in stdin's first line; interrupt it when stdin closes; print the outcome."""
    job = Job(*json.loads(sys.stdin.readline()))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background sweep ignores SIGINT
    threading.Thread(target=_interrupt_at_end_of_input, daemon=True).start()
    from specnb.book.engine import run_notebook

    remote = "://" in job.results
    try:
        with tempfile.TemporaryDirectory() if remote else nullcontext(job.results) as results:
            outcome = run_notebook(
                Path(job.notebook), job.params, budget=job.budget, results=Path(results)
            )
            # a completed run is not replaced
            if remote and (outcome.status == "completed" or not completed_notebook(job)):
                _upload(Path(outcome.output).parent, *place(job.folder))
    except SpecnbError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    sys.stdout.write(f"{json.dumps(outcome._asdict())}\n")


def _interrupt_at_end_of_input() -> None:
    sys.stdin.read()
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(GRACE_S)
    os._exit(INTERRUPTED)  # the kernel ends when its parent dies


def _upload(folder: Path, system: "FileSystem", path: str) -> None:
    """Copy the files of a run, the outcome last: a run with an outcome is complete."""
    files = sorted(
        (file for file in folder.rglob("*") if file.is_file()),
        key=lambda file: file.name == store.OUTCOME,
    )
    for file in files:
        with system.open_output_stream(f"{path}/{file.relative_to(folder).as_posix()}") as stream:
            stream.write(file.read_bytes())


if __name__ == "__main__":
    run_job()
