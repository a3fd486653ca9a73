"""Check what the suite needs on this machine, with a fix for what is missing. `specnb check` shows the results.

Checks try the thing itself: a model decodes, and threads are timed. An error in a check is a result of
that check, and the others still run.
"""

import math
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from time import sleep
from typing import Any, NamedTuple

from specnb.errors import SpecnbError
from specnb.machine import (
    BFLOAT16,
    INSTRUCTION_SETS,
    LOOK_S,
    SPARE,
    Neighbours,
    allowed_cores,
    available_cores,
    cpu_facts,
)
from specnb.provenance import provenance

PROBE_MODEL = "smollm2-135m"

REINSTALL = "pip install -r requirements.txt"
REBUILD = "pip install --no-cache-dir --force-reinstall --no-deps -r <(grep ^llama-cpp-python requirements.txt)"
FREE_MEMORY = "close other programs and notebook kernels, or raise the memory limit of the container"
CRASHED = f"llama-cpp-python was built for another CPU, or for AMX by GCC 12; rebuild with exactly: {REBUILD}"
DEATHS = dict.fromkeys((signal.SIGSEGV, signal.SIGILL, signal.SIGBUS), CRASHED) | {signal.SIGKILL: FREE_MEMORY}
"""Fixes for a probe that was killed by a signal."""
PROBE = """
import sys, numpy, specnb
from specnb.lm.gguf.binding import load_library
print(load_library().api.llama_print_system_info().decode(), flush=True)
model = specnb.load(sys.argv[1] + "?backend=llama&n_ctx=64")
row = model.forward([1])[-1]
assert numpy.isfinite(model.forward([1] * 9)).all(), "the logits are not finite"  # other kernels than for one token
print("token", row.argmax(), "follows token 1")
"""
DECODES, LOAD, SPEED = "llama.cpp decodes", "load", "speed by threads"
CLOSE = 0.9
"""Share of the best speed that is good enough for a default: smaller differences are noise."""


class Prerequisite(NamedTuple):
    """One prerequisite. `ok` is True, False, or None for a warning; `fix` is "" if ok."""

    name: str
    ok: bool | None
    detail: str
    fix: str


def diagnose(*, decode: bool = True) -> list[Prerequisite]:
    """Check each prerequisite, and what makes models slow on this machine. Takes seconds, and imports torch.

    With `decode` the real model runs, and is timed for about ten seconds; it is fetched if it is not in
    the cache. Never raises for something that is missing.
    """
    checks = [check_torch, check_hardware, check_load, check_browser] + [check_decode] * decode
    findings = [finding for check in checks for finding in guarded(check)]
    ready = {LOAD, DECODES} <= {finding.name for finding in findings if finding.ok}
    return findings + (guarded(check_threads) if ready else [])


def guarded(check: Callable[[], Prerequisite | Iterable[Prerequisite]]) -> list[Prerequisite]:
    """Return the findings of one check, or its exception as a finding."""
    try:
        result = check()
        return [result] if isinstance(result, Prerequisite) else list(result)
    except Exception as error:
        name = check.__name__.removeprefix("check_").replace("_", " ")
        return [Prerequisite(name, False, f"{type(error).__name__}: {error}", REINSTALL)]


def judge(name: str, ok: bool, detail: str, fix: str, otherwise: bool | None = None) -> Prerequisite:
    """Return a finding with the fix only if it is not `ok`; then it is `otherwise`, by default a warning."""
    return Prerequisite(name, True, detail, "") if ok else Prerequisite(name, otherwise, detail, fix)


def check_torch() -> Prerequisite:
    """Import torch, and report whether the CPU has bfloat16 in hardware."""
    import torch

    flags = sorted(BFLOAT16.intersection(cpu_facts()["isa"]))
    hint = f"bfloat16 in hardware ({flags[0]})" if flags else "no bfloat16 in this CPU, where dtype=auto takes float32"
    if torch.cuda.is_available():
        hint += f"; {torch.cuda.get_device_name(0)}, bfloat16 {'yes' if torch.cuda.is_bf16_supported() else 'no'}"
    return Prerequisite("torch", True, f"{torch.__version__}; {hint}", "")


def check_decode(probe: str = PROBE, timeout_s: float = 120) -> Iterable[Prerequisite]:
    """Decode with llama.cpp in a separate process, because a build for another CPU is killed; check the build."""
    from specnb.lm.files import zoo_file

    try:
        command = [sys.executable, "-c", probe, str(zoo_file(PROBE_MODEL))]
        done = subprocess.run(
            command, capture_output=True, stdin=subprocess.DEVNULL, timeout=timeout_s, errors="replace"
        )
    except SpecnbError as error:
        return [Prerequisite(DECODES, False, str(error), f"with a network, once: specnb models --fetch {PROBE_MODEL}")]
    except subprocess.TimeoutExpired:
        fix = f"try again with the machine idle, else rebuild: {REBUILD}"
        return [Prerequisite(DECODES, False, f"no token within {timeout_s:g} s", fix)]
    code = done.returncode
    output = done.stderr if done.returncode else done.stdout
    line = output.strip().rpartition("\n")[2][:500]
    if code < 0:
        line = f"died decoding ({signal.Signals(-code).name}): {line}"
    decodes = judge(DECODES, code == 0, line, DEATHS.get(-code, REBUILD) if code < 0 else REINSTALL, False)
    used = re.findall(r"(\w+) = 1", done.stdout.partition("\n")[0])  # printed before it died
    lacks = [name for flag in cpu_facts()["isa"] if (name := INSTRUCTION_SETS[flag]) not in ("", *used)]
    detail = f"uses {' '.join(used)}" + (f"; this CPU also has {' '.join(lacks)}" if lacks else "")
    fits = judge("llama.cpp fits the CPU", not lacks, detail, f"for faster forwards: {REBUILD}")
    return [decodes, fits] if used else [decodes]


def check_hardware() -> Iterator[Prerequisite]:
    """Warn of settings of this machine that cost speed; unknown ones are left out.

    The `provenance` of every result has the same facts.
    """
    record = provenance()
    cpu, settings = record["cpu"], record["threads"]
    yield threads_asked(cpu["available_cores"], settings, record["torch"])
    if per_core := cpu["threads_per_core"]:
        logical = f"{cpu['usable_cores']} usable logical cores, {per_core} on a physical core"
        yield Prerequisite("hyperthreads", True, f"{logical}: specnb takes {cpu['available_cores']} threads", "")
    nodes, pages, governor = cpu["numa_nodes"], cpu["huge_pages"], cpu["governor"]
    for name, setting, slow, why, fix in (
        ("NUMA", nodes and f"nodes: {nodes}", nodes != 1, "the memory of another node is slower",
         "numactl --cpunodebind=0 --membind=0 specnb …; for a model larger than a node: numactl --interleave=all"),
        ("transparent huge pages", pages, pages == "never", "many small pages are slow to look up",
         "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled"),
        ("CPU governor", governor, governor == "powersave", "it may hold the clock below what the CPU can do",
         "sudo cpupower frequency-set -g performance"),
    ):  # fmt: skip
        if setting:
            yield judge(name, not slow, f"{setting}; {why}" if slow else setting, fix)


def threads_asked(cores: int, settings: Mapping[str, str | None], torch: Mapping[str, Any] | None) -> Prerequisite:
    """Compare the threads set in the environment and in torch with the cores; nested regions multiply them."""
    best = {"OMP_NUM_THREADS": cores, "MKL_NUM_THREADS": cores, "OPENBLAS_NUM_THREADS": 1, "OMP_MAX_ACTIVE_LEVELS": 1}
    stated = {name: text for name in best if (text := settings.get(name))}
    fixes = {name: best[name] for name, text in stated.items() if text != str(best[name])}
    takes = [f"{name}={text}" for name, text in stated.items()]
    if torch:
        takes.append(f"torch takes {torch['threads']}")
        if torch["threads"] > cores:
            fixes["OMP_NUM_THREADS"] = cores
    detail = f"{', '.join(takes) or 'none asked for'}; {cores} cores are available"
    if fixes:
        detail += ": more threads, or nested ones, wait for each other, fewer leave cores idle"
    fix = f"export {' '.join(f'{name}={n}' for name, n in fixes.items())}"
    return judge("threads", not fixes, detail, fix)


def check_load() -> Prerequisite:
    """Measure for half a second how many cores other processes use."""
    neighbours = Neighbours()
    cores = len(allowed_cores())
    sleep(1.1 * LOOK_S)
    taken = neighbours.cores() or 0.0
    fix = "wait for them (see `top`), then check again: no speed was measured"
    return judge(
        LOAD, taken <= cores - available_cores() + SPARE, f"other processes take {taken:.1f} of {cores} cores", fix
    )


def check_threads() -> Prerequisite:
    """Time the real model by number of threads, in both directions against drift."""
    import pandas as pd

    usual = available_cores()
    threads = sorted({1, math.ceil(usual / 2), usual, len(allowed_cores())})
    runs = pd.DataFrame(
        [(n, *time_forwards(n)) for n in threads + threads[::-1]], columns=["n", "single", "block", "busy"]
    )
    rates = runs.groupby("n")[["single", "block"]]
    score = rates.prod().prod(axis=1) ** (1 / 4)
    best = score.idxmax()
    share = score[usual] / score.max()
    table = [f"threads {row.Index}: {row.single:.1f}, {row.block:.1f}" for row in rates.mean().itertuples()]
    detail = "\n".join([f"{PROBE_MODEL}, tokens/s in forwards of 1, and of 8", *table])
    if runs["busy"].any():
        fix = "wait until the machine is idle, then: specnb check"
        return Prerequisite(SPEED, None, f"{detail}\nother processes disturbed it, so it advises nothing", fix)
    detail += f"\nthe default, threads {usual}, has {share:.0%} of the best speed"
    fix = f"for a model of this size: {PROBE_MODEL}?threads={best}"
    return judge(SPEED, share >= CLOSE, detail, fix)


def time_forwards(threads: int) -> tuple[float, float, bool]:
    """Return tokens per second in forward passes over 1 and 8 tokens, and whether other processes disturbed them."""
    from specnb.lm.load import load
    from specnb.measure.cost import verify_curve

    with closing(load(PROBE_MODEL, backend="llama", n_ctx=64, threads=threads)) as model:
        curve = verify_curve(model, widths=(1, 8), context=32, repeats=99, limit_s=0.6)
    return 1 / curve.seconds(1), 8 / curve.seconds(8), bool(curve.busy)


def check_browser() -> Prerequisite:
    """Look for a Chromium that kaleido can use: without it figures are not exported to svg, png and pdf."""
    from choreographer.browsers.chromium import Chromium  # what kaleido itself asks

    path = Chromium.find_browser(skip_local=False)
    ok = path is not None and Path(path).is_file()
    fix = "apt-get install chromium, or: kaleido_get_chrome"
    return judge("browser for svg and png", ok, path or "none in PATH, BROWSER_PATH not set", fix)
