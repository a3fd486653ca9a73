"""The doctor: is everything here that the suite needs, and if not, what to type. `specnb check` shows the findings.

Each check looks at the thing itself (the decode runs, the file is written, the matrix product is right), not at a
proxy for it, and none of them stops the others: a check that breaks is itself a finding.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from specnb.errors import SpecnbError
from specnb.io import write_atomic
from specnb.lm.memory import free_bytes, human_bytes
from specnb.paths import cache_dir
from specnb.provenance import cpu_facts

PROBE_MODEL = "smollm2-135m"
PROBE_TIMEOUT_S = 120.0
NEEDED_MEMORY_BYTES = 3 << 30
NEEDED_DISK_BYTES = 2 << 30

REINSTALL = "pip install -r requirements.txt"
REBUILD = (
    "pip install --no-cache-dir --force-reinstall --no-deps llama-cpp-python==0.3.36 "
    '--config-settings="cmake.define.GGML_NATIVE=OFF"'
)
CRASHES_ON_THIS_CPU = (
    "the llama-cpp-python build crashes on this CPU (AMX with GCC 12, or a cached wheel built for another CPU); "
    f"rebuild with exactly: {REBUILD}"
)
FREE_MEMORY = "close other programs and notebook kernels, or raise the memory limit of the container"
OTHER_CACHE = "export SPECNB_CACHE=FOLDER, a folder with room that you can write to"
HARDWARE_CRASHES = {-signal.SIGSEGV, -signal.SIGILL, -getattr(signal, "SIGBUS", signal.SIGSEGV)}
HARDWARE_CRASHES |= {0xC0000005, 0xC000001D}  # Windows: access violation, illegal instruction


class Finding(NamedTuple):
    """One prerequisite: `ok` is True, False, or None for a warning (something works less well); `fix` is "" if ok."""

    name: str
    ok: bool | None
    detail: str
    fix: str


def diagnose(*, decode: bool = True) -> list[Finding]:
    """Return one finding for each prerequisite. Seconds: imports torch and, with `decode`, runs the real model once.

    `decode` fetches the embedded model if it is not in the cache yet. Never raises for something missing.
    """
    checks = [check_python, check_packages, check_compiler, check_torch]
    checks += [check_decode] if decode else []
    checks += [check_kernel, check_browser, check_memory, check_disk, check_cache]
    return [finding for check in checks for finding in guarded(check)]


def all_ok(findings: Iterable[Finding]) -> bool:
    """Return whether nothing is missing; warnings (`ok` None) do not count."""
    return all(finding.ok is not False for finding in findings)


def guarded(check: Callable[[], Finding | Iterable[Finding]]) -> list[Finding]:
    """Return the findings of one check; an exception in it is a finding too, so that the other checks still run."""
    try:
        result = check()
        return [result] if isinstance(result, Finding) else list(result)
    except Exception as error:
        name = check.__name__.removeprefix("check_").replace("_", " ")
        return [Finding(name, False, f"{type(error).__name__}: {error}", REINSTALL)]


def judge(name: str, ok: bool, detail: str, fix: str, *, only_warn: bool = False) -> Finding:
    """Return a finding whose fix is shown only if it is needed."""
    return Finding(name, True, detail, "") if ok else Finding(name, None if only_warn else False, detail, fix)


def check_python(version: str | None = None) -> Finding:
    """Compare the running Python with `requires-python` of the package."""
    version = version or ".".join(map(str, sys.version_info[:3]))
    needed = metadata.metadata("specnb").get("Requires-Python") or ">=3.11"
    ok = SpecifierSet(needed).contains(version, prereleases=True)
    fix = f"make the environment with Python {needed}: python3.12 -m venv .venv && .venv/bin/{REINSTALL}"
    return judge("python", ok, f"{version} (needs {needed})", fix)


def check_packages(requires: Sequence[str] | None = None) -> Iterator[Finding]:
    """Compare each requirement's installed version with its range; those of extras only warn."""
    extras = metadata.metadata("specnb").get_all("Provides-Extra") or []
    for requirement in map(Requirement, metadata.requires("specnb") if requires is None else requires):
        marker = requirement.marker
        core = marker is None or marker.evaluate({"extra": ""})
        if core or any(marker.evaluate({"extra": extra}) for extra in extras):  # else meant for another system
            try:
                version = metadata.version(requirement.name)
                fits = requirement.specifier.contains(version, prereleases=True)
            except metadata.PackageNotFoundError:
                version, fits = "not installed", False
            detail = f"{version} (needs {requirement.specifier or 'any version'})"
            yield judge(f"package {requirement.name}", fits, detail, REINSTALL, only_warn=not core)


def check_compiler() -> Finding:
    """Look for a C++ compiler: needed only to build llama-cpp-python, so its absence warns."""
    names = [name for name in (os.environ.get("CXX"), "c++", "g++", "clang++", "cl") if name]
    compiler = next(filter(None, map(shutil.which, names)), None)
    fix = "needed to build llama-cpp-python: apt-get install g++ (Debian, Ubuntu), xcode-select --install (macOS)"
    return judge("c++ compiler", compiler is not None, compiler or "none in PATH", fix, only_warn=True)


def check_torch() -> Finding:
    """Check that torch multiplies matrices rightly in float32 and bfloat16; say if the CPU has bfloat16 in hardware."""
    import torch

    index = torch.arange(64)
    whole = (index[:, None] + 2 * index) % 3  # sums stay within 256, which bfloat16 holds exactly
    products = {kind: (whole.to(kind) @ whole.to(kind)).long() for kind in (torch.float32, torch.bfloat16)}
    wrong = [kind for kind, product in products.items() if not torch.equal(product, whole @ whole)]
    flags = [flag for flag in ("amx_bf16", "avx512_bf16", "bf16") if flag in cpu_facts()["isa"]]
    hint = f"bfloat16 in hardware ({flags[0]})" if flags else "no bfloat16 in this CPU: take float32"
    if torch.cuda.is_available():
        hint += f"; {torch.cuda.get_device_name(0)}, bfloat16 {'yes' if torch.cuda.is_bf16_supported() else 'no'}"
    detail = f"{torch.__version__} miscomputes {wrong}" if wrong else f"{torch.__version__} computes; {hint}"
    release = torch.__version__.partition("+")[0]
    return judge("torch", not wrong, detail, f"pip install --force-reinstall --no-deps torch=={release}")


def check_decode(command: Sequence[str] | None = None, timeout_s: float = PROBE_TIMEOUT_S) -> Finding:
    """Let llama.cpp decode one token, in a process of its own: a build for another CPU dies by a signal.

    `command` replaces `python -m specnb.lm.probe MODEL_PATH`.
    """
    from specnb.lm import zoo

    name = "llama.cpp decodes"
    try:
        command = command or [sys.executable, "-m", "specnb.lm.probe", str(zoo.path(PROBE_MODEL))]
        done = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, timeout=timeout_s)
    except SpecnbError as error:
        return Finding(name, False, str(error), f"with a network, once: specnb models fetch {PROBE_MODEL}")
    except subprocess.TimeoutExpired:
        fix = f"try again with the machine idle, else rebuild: {REBUILD}"
        return Finding(name, False, f"no token within {timeout_s:g} s", fix)
    return read_probe(name, done.returncode, done.stdout, done.stderr)


def read_probe(name: str, code: int, stdout: bytes, stderr: bytes) -> Finding:
    """Return what the exit code and the line of JSON of the probe mean."""
    last_words = _last_line(stderr)
    if code in HARDWARE_CRASHES:
        return Finding(name, False, f"died at the first decode: {_exit_name(code)}", CRASHES_ON_THIS_CPU)
    if code == -getattr(signal, "SIGKILL", 0):
        return Finding(name, False, "killed from outside (SIGKILL), most likely for lack of memory", FREE_MEMORY)
    if code < 0:
        return Finding(name, False, f"died by {_exit_name(code)}: {last_words}", REBUILD)
    try:
        answer = dict(json.loads(_last_line(stdout)))
    except (ValueError, TypeError):
        answer = {}
    if code == 0 and answer.get("ok") is True and isinstance(answer.get("argmax"), int):
        return Finding(name, True, f"token {answer['argmax']} follows token 1", "")
    error = answer.get("error") or last_words or f"exit code {code}, no answer"
    return Finding(name, False, str(error)[:500], REINSTALL)


def _exit_name(code: int) -> str:
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"exit code {code:#x}"


def _last_line(output: bytes) -> str:
    return (output.decode("utf-8", errors="replace").strip().splitlines() or [""])[-1]


def check_kernel() -> Finding:
    """Check that the Jupyter kernel `python3` exists and starts this environment's Python."""
    from jupyter_client.kernelspec import KernelSpecManager, NoSuchKernel

    name, fix = "jupyter kernel python3", "python -m ipykernel install --sys-prefix --name python3"
    try:
        program = Path(KernelSpecManager().get_kernel_spec("python3").argv[0])
    except NoSuchKernel:
        return Finding(name, False, "not installed", fix)
    # a bare `python` is replaced by this interpreter; another environment's python3 does not have specnb
    here = not program.is_absolute() or program.parent == Path(sys.executable).parent
    detail = f"starts {sys.executable}" if here else f"starts {program}, not this environment's {sys.executable}"
    return judge(name, here, detail, fix, only_warn=True)


def check_browser() -> Finding:
    """Look for a Chromium that kaleido can drive: without it figures are not exported to svg and png."""
    from choreographer.browsers.chromium import Chromium  # what kaleido itself asks

    path = Chromium.find_browser(skip_local=False)
    ok = path is not None and Path(path).is_file()
    detail = path if ok else f"{path} is not a file: see BROWSER_PATH" if path else "none in PATH, BROWSER_PATH not set"
    fix = "apt-get install chromium, or: kaleido_get_chrome"
    return judge("browser for svg and png", ok, detail, fix, only_warn=True)


def check_memory() -> Finding:
    """Check free memory for a target, a drafter and the notebook kernel."""
    room = free_bytes()
    detail = f"{human_bytes(room)} free (needs {human_bytes(NEEDED_MEMORY_BYTES)})"
    return judge("free memory", room >= NEEDED_MEMORY_BYTES, detail, FREE_MEMORY)


def check_disk() -> Finding:
    """Check free disk where models are cached."""
    folder = cache_dir()
    there = next(parent for parent in (folder, *folder.parents) if parent.exists())
    room = shutil.disk_usage(there).free
    detail = f"{human_bytes(room)} free at {folder} (needs {human_bytes(NEEDED_DISK_BYTES)})"
    return judge("free disk", room >= NEEDED_DISK_BYTES, detail, f"free some space, or {OTHER_CACHE}")


def check_cache() -> Finding:
    """Check that the cache folder can be written to."""
    probe = cache_dir() / ".probe"
    try:
        write_atomic(probe, b"specnb")
        probe.unlink()
    except SpecnbError as error:
        return Finding("cache folder", False, str(error), OTHER_CACHE)
    return Finding("cache folder", True, f"{cache_dir()} is writable", "")
