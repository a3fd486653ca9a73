"""Where a result came from: code, versions, hardware, seeds, digests. Every run record and figure carries it.

Nothing here imports a model engine: versions come from package metadata, and torch is asked about itself only if the
process has imported it already. No absolute path and no host name is recorded, so a record can be published.
"""

import contextlib
import hashlib
import json
import math
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from datetime import UTC, date, datetime
from importlib import metadata
from pathlib import Path, PureWindowsPath
from typing import Any

from specnb.errors import InputError
from specnb.paths import cache_dir

PACKAGES = (
    *("torch", "transformers", "tokenizers", "accelerate", "gguf", "safetensors", "huggingface-hub"),
    *("llama-cpp-python", "numpy", "jinja2", "pydantic", "pandas", "pyarrow", "duckdb"),
    *("papermill", "nbclient", "ipykernel", "ipywidgets", "plotly", "kaleido"),
)
"""Distributions whose version can change a result, a table or a figure."""
ISA_FLAGS = (
    *("avx2", "fma", "f16c", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16"),
    *("amx_tile", "amx_int8", "amx_bf16", "asimd", "bf16", "i8mm", "sve"),
)
"""CPU instruction sets that decide which matrix kernels run (x86 names, then ARM names)."""
PROC_CGROUP, CGROUP_MOUNT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
DIGEST = re.compile(r"[0-9a-f]{64}")
MAX_CACHE_BYTES = 4 << 20
SETTLED_S = 2.0  # a file changed less long ago may change again within the grain of its time stamp: not cached


def provenance(
    *,
    seeds: Any = None,
    models: Iterable[Mapping[str, Any]] = (),
    prompts_digest: str | None = None,
    extra: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """What produced a result, as a dict that `json.dumps` takes.

    `models` are mappings with at least `id` (see `model_facts`); an `id` that is an absolute path is cut to its file
    name. Facts that cannot be known (no git, no GPU, a package that is not installed) are None, never an error.
    Raises InputError if `seeds`, `models` or `extra` hold something JSON has no form for.
    """
    import psutil

    record = {
        "specnb": _version("specnb"),
        "git": git_state(Path(__file__).resolve().parent.parent),
        "packages": {name: _version(name) for name in PACKAGES},
        "python": platform.python_version(),
        "os": platform.platform(),
        "cpu": cpu_facts(),
        "threads": {name: os.environ.get(name) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")},
        **_torch_facts(),
        "memory_bytes": psutil.virtual_memory().total,
        "utc": datetime.now(UTC).isoformat(timespec="seconds"),
        "seeds": seeds,
        "models": [_named(model) for model in models],
        "prompts_digest": prompts_digest,
        "extra": dict(extra or {}),
    }
    return _plain(record, "provenance")


def model_facts(model_id: str, file: str | Path | None = None, **facts: Any) -> dict[str, Any]:
    """One entry of `provenance(models=…)`: the id, the sha256 and size of its weights file, and `facts` (dtype, …)."""
    weights = {} if file is None else {"sha256": file_digest(file), "file_bytes": Path(file).stat().st_size}
    return _named({"id": model_id, **weights, **facts})


def _named(model: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(model, Mapping) or not isinstance(model.get("id"), str):
        raise InputError(f"a model entry of the provenance needs a text `id`, got {model!r}; use model_facts(id, file)")
    name = model["id"]
    absolute = name.startswith("/") or PureWindowsPath(name).is_absolute()
    return {**model, "id": PureWindowsPath(name).name if absolute else name}


def _version(distribution: str) -> str | None:
    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version(distribution)
    return None


def git_state(root: Path, timeout_s: float = 2.0) -> dict[str, Any] | None:
    """`{"commit", "dirty"}` of the checkout at `root`; None without git or outside a checkout.

    `dirty` means uncommitted or untracked files outside `figures/` and `results/`, which runs themselves write.
    `root` has to be the top of the checkout: a package installed inside another project is not that project.
    """
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "status", "--porcelain=v2", "--branch", "--untracked-files=normal"]
    command += ["--", ".", ":(exclude)figures", ":(exclude)results"]
    # A git hook exports GIT_DIR and friends, which point at the hook's repository. Without optional locks, runs side
    # by side do not fight for the index.
    env = {k: v for k, v in os.environ.items() if not k.startswith("GIT_") or k.startswith("GIT_CONFIG")}
    env["GIT_OPTIONAL_LOCKS"] = "0"
    try:
        done = subprocess.run(command, capture_output=True, timeout=timeout_s, env=env, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    report = done.stdout.decode("utf-8", errors="replace")
    commit = re.search(r"^# branch\.oid ([0-9a-f]{40,64})$", report, re.MULTILINE)  # "(initial)" before the first one
    changed = any(not line.startswith("#") for line in report.splitlines())
    return {"commit": commit[1] if commit else None, "dirty": changed}


def cpu_facts() -> dict[str, Any]:
    """Model, instruction sets, cores: physical, logical, usable (affinity) and the quota of the control group."""
    import psutil

    model, flags = _cpuinfo()
    return {
        "model": model or platform.processor() or platform.machine() or None,
        "isa": [flag for flag in ISA_FLAGS if flag in flags],
        "physical_cores": psutil.cpu_count(logical=False),
        "logical_cores": psutil.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else psutil.cpu_count(),
        "quota_cores": quota_cores(),
    }


def _cpuinfo(path: Path = Path("/proc/cpuinfo")) -> tuple[str | None, frozenset[str]]:
    """Name and flags of the first core; the rest of the file repeats them once a core."""
    found: dict[str, str] = {}
    with contextlib.suppress(OSError), path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if not line.strip():
                break
            key, _, value = line.partition(":")
            found[key.strip().lower()] = value.strip()
    return found.get("model name"), frozenset(found.get("flags", found.get("features", "")).split())


def cgroup_folders(controller: str, proc: Path = PROC_CGROUP, mount: Path = CGROUP_MOUNT) -> list[Path]:
    """Folders that may limit this process, innermost first; version 2 and version 1 of Linux control groups.

    Every ancestor limits too. Inside a container the path in `/proc` can name folders of the host: those that do
    not exist here are left out, and the top of the mount, where the container sees its own limits, is always tried.
    """
    folders: list[Path] = []
    lines = (line.split(":", 2) for line in read_text(proc).splitlines() if line.count(":") >= 2)
    for _, names, inside in lines:
        if names and controller not in names.split(","):
            continue
        parts = [] if ".." in inside.split("/") else inside.strip("/").split("/")
        for top in [mount / names, mount / controller] if names else [mount, mount / "unified"]:
            folders += [top.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1)]
    return [folder for folder in dict.fromkeys(folders) if folder.is_dir()]


def read_text(file: Path) -> str:
    """A small file of the kernel; "" if it cannot be read."""
    with contextlib.suppress(OSError):
        return file.read_text(encoding="utf-8", errors="replace")
    return ""


def quota_cores() -> float | None:
    """Cores the control group grants, the smallest along the path; None where there is no limit."""
    quotas = []
    for folder in cgroup_folders("cpu"):
        old = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        words = (read_text(folder / "cpu.max") or " ".join(read_text(folder / name) for name in old)).split()
        # no limit is "max" in version 2 and -1 in version 1
        if len(words) == 2 and all(word.isdigit() and int(word) > 0 for word in words):
            quotas.append(int(words[0]) / int(words[1]))
    return round(min(quotas), 3) if quotas else None


def _torch_facts() -> dict[str, Any]:
    """Settings of torch that change numbers or speed, and the GPUs it sees; None if it was not imported here."""
    torch = sys.modules.get("torch")
    if not hasattr(torch, "get_num_threads"):  # absent, or its import is under way
        return {"torch": None, "gpu": None}
    settings = {
        "threads": torch.get_num_threads(),
        "interop_threads": torch.get_num_interop_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "cuda": torch.version.cuda,
    }
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    devices = [torch.cuda.get_device_properties(index) for index in range(count)]
    return {"torch": settings, "gpu": [{"name": d.name, "memory_bytes": d.total_memory} for d in devices] or None}


def canonical_json(obj: Any) -> str:
    """One text for equal values: keys sorted, no spaces, ASCII. Equal objects give equal digests.

    Takes what a record holds: numpy scalars, pydantic models, dates, tuples. Raises InputError for NaN and infinity,
    for keys that are not text or whole numbers, for two keys with one JSON form, and for anything else.
    """
    return json.dumps(_plain(obj, "value"), sort_keys=True, separators=(",", ":"), allow_nan=False)


def json_digest(obj: Any) -> str:
    """sha256 (hex) of `canonical_json(obj)`."""
    return hashlib.sha256(canonical_json(obj).encode("ascii")).hexdigest()


def _plain(obj: Any, where: str) -> Any:
    """`obj` in the types of JSON; `where` names the place in the error."""
    if obj is None or isinstance(obj, bool):
        return obj
    if isinstance(obj, str):
        return str.__str__(obj)  # the value of a text enumeration, not its name
    if isinstance(obj, int):
        return int(obj)
    if isinstance(obj, float):
        if not math.isfinite(obj):
            raise InputError(f"{where} is {obj!r}, which JSON cannot hold; use None or leave it out")
        return float(obj)
    if isinstance(obj, Mapping):
        keys = [_key(key, where) for key in obj]
        if len(set(keys)) < len(keys):
            raise InputError(f"{where} has two keys of one JSON form: {sorted(keys)}")
        return {key: _plain(value, f"{where}.{key}") for key, value in zip(keys, obj.values(), strict=True)}
    if isinstance(obj, list | tuple):
        return [_plain(item, f"{where}[{index}]") for index, item in enumerate(obj)]
    if isinstance(obj, date):
        return obj.isoformat()
    if hasattr(obj, "model_dump"):  # a pydantic model
        return _plain(obj.model_dump(mode="json"), where)
    if getattr(obj, "ndim", None) == 0 and hasattr(obj, "item"):  # a numpy scalar
        return _plain(obj.item(), where)
    raise InputError(f"{where} is a {type(obj).__name__}, which JSON has no form for; pass numbers, text, lists, dicts")


def _key(key: Any, where: str) -> str:
    if isinstance(key, bool) or not isinstance(key, str | int):
        raise InputError(f"{where} has the key {key!r}: keys must be text or whole numbers")
    return str.__str__(key) if isinstance(key, str) else str(int(key))


def file_digest(path: str | Path) -> str:
    """sha256 (hex) of a file's bytes.

    Remembered in `cache_dir()/digests.json` by resolved path, size and time stamp; a lost, unwritable or corrupt
    cache only costs the time to hash again. Raises InputError if `path` is not a readable regular file.
    """
    try:
        file = Path(path).expanduser().resolve(strict=True)
        if not file.is_file():
            raise OSError("not a regular file; only files have a digest")
        key, stamp = str(file), _stamp(file)
        known = _read_cache().get(key)
        if known and known[:2] == stamp:
            return known[2]
        with file.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        if _stamp(file) == stamp and time.time() - stamp[1] / 1e9 >= SETTLED_S:
            _write_cache({**_read_cache(), key: [*stamp, digest]})
    except (OSError, RuntimeError, ValueError) as error:
        raise InputError(f"cannot read {path}: {error}") from error
    return digest


def _stamp(file: Path) -> list[int]:
    return [file.stat().st_size, file.stat().st_mtime_ns]


def _read_cache() -> dict[str, list[Any]]:
    """`{path: [size, mtime_ns, sha256]}`; entries of any other form are dropped."""
    try:
        file = cache_dir() / "digests.json"
        entries = json.loads(file.read_bytes()) if file.stat().st_size <= MAX_CACHE_BYTES else {}
    except (OSError, ValueError, RecursionError):
        return {}
    found = entries.items() if isinstance(entries, dict) else []
    sound = (e for e in found if isinstance(e[1], list) and [type(x) for x in e[1]] == [int, int, str])
    return {path: entry for path, entry in sound if DIGEST.fullmatch(entry[2])}


def _write_cache(entries: Mapping[str, list[Any]]) -> None:
    """Replace the cache in one step; of two writers at once one may lose its entry, never the file."""
    with contextlib.suppress(OSError):
        folder = cache_dir()
        folder.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=folder, prefix=".digests-", suffix=".json")
        try:
            with os.fdopen(handle, "w", encoding="ascii") as stream:
                json.dump(entries, stream, indent=0, sort_keys=True)
            Path(temporary).replace(folder / "digests.json")
        finally:
            Path(temporary).unlink(missing_ok=True)  # gone already if it was moved into place
