"""Check what the suite needs on this machine. `specnb check` shows the results.

A check runs the component itself: for example, it decodes with a model. An exception in one check
becomes its result, and the other checks still run.
"""

import signal
import subprocess
import sys
from time import sleep
from typing import NamedTuple

from specnb.errors import SpecnbError
from specnb.machine import (
    LOOK_S,
    SPARE,
    Neighbours,
    allowed_cores,
    available_cores,
)

PROBE_MODEL = "smollm2-135m"

REINSTALL = "pip install -r requirements.txt"
REBUILD = (
    "pip install --no-cache-dir --force-reinstall --no-deps "
    "-r <(grep ^llama-cpp-python requirements.txt)"
)
FREE_MEMORY = (
    "close other programs and notebook kernels, or raise the memory limit of the container"
)
CRASHED = (
    "llama-cpp-python was built for another CPU, or for AMX by GCC 12; "
    f"rebuild with exactly: {REBUILD}"
)
PROBE = """
import sys, numpy, specnb
model = specnb.load(sys.argv[1] + "?backend=llama&n_ctx=64")
row = model.forward([1])[-1]
# 9 tokens use different kernels from 1 token
assert numpy.isfinite(model.forward([1] * 9)).all(), "the logits are not finite"
print("token", row.argmax(), "follows token 1")
"""
DECODES = "llama.cpp decodes"


class Prerequisite(NamedTuple):
    """One prerequisite. `ok` is True, False, or None for a warning; `fix` is "" if ok."""

    name: str
    ok: bool | None
    detail: str
    fix: str


def diagnose(*, decode: bool = True) -> list[Prerequisite]:
    """Check all prerequisites. Takes seconds, and imports torch.

    With `decode`, PROBE_MODEL also decodes; it is downloaded if it is not in the cache. A missing
    prerequisite is a finding and never raises.
    """
    checks = [check_torch, check_threads, check_load]
    if decode:
        checks.append(check_decode)
    findings = []
    for check in checks:
        try:
            findings.append(check())
        except Exception as error:
            name = check.__name__.removeprefix("check_")
            findings.append(
                Prerequisite(name, False, f"{type(error).__name__}: {error}", REINSTALL)
            )
    return findings


def judge(
    name: str, ok: bool, detail: str, fix: str, otherwise: bool | None = None
) -> Prerequisite:
    """Return a finding: True if `ok`, else `otherwise` (None: a warning) with its `fix`."""
    return (
        Prerequisite(name, True, detail, "") if ok else Prerequisite(name, otherwise, detail, fix)
    )


def check_torch() -> Prerequisite:
    """Import torch, and report its version and GPU."""
    import torch

    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "no GPU"
    return Prerequisite("torch", True, f"{torch.__version__}, {gpu}", "")


def check_decode(probe: str = PROBE, timeout_s: float = 120) -> Prerequisite:
    """Decode in a subprocess, because llama.cpp built for another CPU crashes."""
    from specnb.lm.files import zoo_file

    try:
        command = [sys.executable, "-c", probe, str(zoo_file(PROBE_MODEL))]
        done = subprocess.run(
            command,
            capture_output=True,
            stdin=subprocess.DEVNULL,
            timeout=timeout_s,
            errors="replace",
        )
    except SpecnbError as error:
        fix = f"with a network, once: specnb models --fetch {PROBE_MODEL}"
        return Prerequisite(DECODES, False, str(error), fix)
    except subprocess.TimeoutExpired:
        fix = f"retry on an idle machine, or rebuild: {REBUILD}"
        return Prerequisite(DECODES, False, f"no token within {timeout_s:g} s", fix)
    code = done.returncode
    output = done.stderr if code else done.stdout
    line = output.strip().rpartition("\n")[2][:500]
    fix = REINSTALL
    if code < 0:
        line = f"crashed while decoding ({signal.Signals(-code).name}): {line}"
        fix = FREE_MEMORY if code == -signal.SIGKILL else CRASHED
    return judge(DECODES, code == 0, line, fix, False)


def check_threads() -> Prerequisite:
    """Compare the number of torch's threads with the cores."""
    import torch

    cores = available_cores()
    threads = torch.get_num_threads()
    detail = f"torch uses {threads}; {cores} cores are available"
    return judge("threads", threads <= cores, detail, f"export OMP_NUM_THREADS={cores}")


def check_load() -> Prerequisite:
    """Measure for half a second how many cores other processes use."""
    neighbours = Neighbours()
    cores = len(allowed_cores())
    sleep(1.1 * LOOK_S)
    taken = neighbours.cores() or 0.0
    idle = taken <= cores - available_cores() + SPARE
    detail = f"other processes use {taken:.1f} of {cores} cores"
    return judge("load", idle, detail, "wait for them (see `top`), then check again")
