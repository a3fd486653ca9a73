"""Where a result came from: code, versions, hardware, seeds, digests. Every run record and figure carries it.

Nothing here imports a model engine: versions come from package metadata, and torch is asked about itself only if the
process has imported it already. No absolute path and no host name is recorded, so a record can be published.
"""

import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from specnb.io import plain
from specnb.lm.busy import available_cores
from specnb.lm.preflight import allowed_cores, core_siblings, cpuinfo, kernel_text, listed, quota_cores

ISA_FLAGS = (
    *("avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512vbmi", "avx512_vnni", "avx512_bf16", "avx512_fp16"),
    *("amx_tile", "amx_int8", "amx_bf16", "asimd", "asimddp", "bf16", "i8mm", "sve"),
)
"""CPU instruction sets that decide which matrix kernels run (x86 names, then ARM names)."""

THREAD_SETTINGS = (
    *("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "OMP_MAX_ACTIVE_LEVELS"),
    *("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"),
)
"""Environment variables that decide how many threads compute, and how they wait for each other."""


def provenance(
    *,
    seeds: Any = None,
    models: Iterable[Mapping[str, Any]] = (),
    prompts_digest: str | None = None,
    extra: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """What produced a result, as a dict that `json.dumps` takes.

    `models` are mappings with at least `id`, of which an absolute path is cut to its file name. Facts that cannot be
    known (no git, no GPU, a package that is not installed) are None, never an error. Raises InputError if `seeds`,
    `models` or `extra` hold something JSON has no form for.
    """
    import psutil

    # extras aside: the others' versions can change a result, a table or a figure
    required = [re.match(r"[\w.-]+", line)[0] for line in metadata.requires("specnb") if "extra ==" not in line]
    record = {
        "specnb": _version("specnb"),
        "git": git_state(Path(__file__).resolve().parent.parent),
        "packages": {name: _version(name) for name in required},
        "python": platform.python_version(),
        "os": platform.platform(),
        "cpu": cpu_facts(),
        "threads": {name: os.environ.get(name) for name in THREAD_SETTINGS},
        **_torch_facts(),
        "memory_bytes": psutil.virtual_memory().total,
        "utc": datetime.now(UTC).isoformat(timespec="seconds"),
        "seeds": seeds,
        "models": [{**model, "id": re.sub(r"^(/|[A-Za-z]:\\).*[/\\]", "", model["id"])} for model in models],
        "prompts_digest": prompts_digest,
        "extra": dict(extra or {}),
    }
    return plain(record, "provenance")


def _version(distribution: str) -> str | None:
    return next((d.version for d in metadata.distributions(name=distribution)), None)


def git_state(root: Path) -> dict[str, Any] | None:
    """`{"commit", "dirty"}` of the checkout whose top is `root`; None without git, and for any other folder.

    `dirty` means uncommitted or untracked files outside `figures/` and `results/`, from which no run reads.
    """
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "status", "--porcelain=v2", "--branch", "--untracked-files=normal"]
    command += ["--", ".", ":(exclude)figures", ":(exclude)results"]
    # a git hook exports GIT_DIR and friends, which point at its own repository
    env = {k: v for k, v in os.environ.items() if not k.startswith("GIT_") or k.startswith("GIT_CONFIG")}
    env["GIT_OPTIONAL_LOCKS"] = "0"  # runs side by side do not fight for the index
    try:
        report = subprocess.check_output(command, stderr=subprocess.DEVNULL, timeout=20, env=env).decode()
    except (OSError, subprocess.SubprocessError):
        return None
    commit = re.search(r"^# branch\.oid ([0-9a-f]{40,64})$", report, re.MULTILINE)  # "(initial)" before the first one
    changed = any(not line.startswith("#") for line in report.splitlines())
    return {"commit": commit[1] if commit else None, "dirty": changed}


def cpu_facts(system: Path = Path("/sys")) -> dict[str, Any]:
    """Model, instruction sets, cores, and settings of Linux that decide their speed; None for what is not known.

    Cores: physical, logical, usable (affinity), the quota of the control group, and available: the threads that engines
    take by default. `numa_nodes` counts those of the usable cores, `load_average` is over 1, 5 and 15 minutes.
    """
    import psutil

    model, flags = cpuinfo()
    cores, devices = allowed_cores(), system / "devices/system"
    nodes = [listed(kernel_text(file)) for file in (devices / "node").glob("node*/cpulist")]
    pages = re.search(r"\[(\w+)\]", kernel_text(system / "kernel/mm/transparent_hugepage/enabled"))
    return {
        "model": model or platform.processor() or platform.machine() or None,
        "isa": [flag for flag in ISA_FLAGS if flag in flags],
        "physical_cores": psutil.cpu_count(logical=False),
        "logical_cores": psutil.cpu_count(),
        "usable_cores": len(cores),
        "quota_cores": quota_cores(),
        "available_cores": available_cores(),
        "threads_per_core": max((len(listed(text)) for text in core_siblings(system)), default=None),
        "numa_nodes": sum(not node.isdisjoint(cores) for node in nodes) or None,
        "huge_pages": pages[1] if pages else None,
        "governor": kernel_text(devices / f"cpu/cpu{cores[0]}/cpufreq/scaling_governor") or None,
        "load_average": [*psutil.getloadavg()],
    }


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
