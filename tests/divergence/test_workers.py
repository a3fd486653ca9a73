"""A score shared by processes that is stopped: nothing runs on, nothing more is begun, what was done is kept."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.benchmarks.divergence_score.rows import read

WORK = """
import os, signal, sys, time
from pathlib import Path
from tests.benchmarks.divergence_score import rows, score
from tests.benchmarks.divergence_score.grid import Subject

FOLDER = Path(sys.argv[1])

def stand_in(part, note):
    (FOLDER / f"{part.seed}.begun.tmp").write_text(str(os.getpid()))
    (FOLDER / f"{part.seed}.begun.tmp").replace(FOLDER / f"{part.seed}.begun")
    if part.seed:
        time.sleep(600)
    return rows.table([Subject(part.dtype, part.seed).row("fault", "f")])

score.measured = stand_in  # in the processes, too: they import this file
if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job is started with it ignored
    score.score(seeds=9, dtypes=("float32",), workers=2, keep=FOLDER)
"""
ROOT = Path(__file__).parents[2]
PATIENCE = 120
"""Seconds; a quiet machine needs five."""


def wait_for(what, seconds=PATIENCE):
    end = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < end, "it never came"
        time.sleep(0.05)
    return found


def runs(pid):
    """Whether a process does anything: one that ended may wait for somebody to ask."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="asks /proc which processes run")
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM], ids=lambda how: how.name)
def test_workers_end_with_the_score_that_is_stopped(tmp_path, how):
    (tmp_path / "work.py").write_text(WORK)
    words = [sys.executable, str(tmp_path / "work.py"), str(tmp_path)]
    workers = set()
    with subprocess.Popen(
        words, env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}, stderr=subprocess.PIPE
    ) as process:
        try:
            begun = wait_for(lambda: len(found := [*tmp_path.glob("*.begun")]) == 3 and found)
            workers = {int(one.read_text()) for one in begun}
            assert len(workers) == 2 and all(map(runs, workers))
            process.send_signal(how)
            assert process.wait(60) == -how
            wait_for(lambda: not any(map(runs, workers)), 60)
        finally:
            process.kill()
            for pid in filter(runs, workers):  # where the test fails
                os.kill(pid, signal.SIGKILL)
    (kept,) = tmp_path.glob("*.parquet")
    assert kept.name.startswith("float32-0-") and len(read(kept)[0]) == 1
    assert len([*tmp_path.glob("*.begun")]) == 3
