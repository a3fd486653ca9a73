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
from specnb.machine import cpu_facts

THREAD_SETTINGS = (
    "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "OMP_MAX_ACTIVE_LEVELS", "OMP_WAIT_POLICY",
    "GOMP_SPINCOUNT",
)  # fmt: skip
"""Environment variables that decide how many threads compute, and how they wait for each other."""


def provenance(
    *,
    seeds: Any = None,
    models: Iterable[Mapping[str, Any]] = (),
    prompts_digest: str | None = None,
    extra: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return what produced a result, as a dict that `json.dumps` takes.

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


def _torch_facts() -> dict[str, Any]:
    """Settings of torch that change numbers or speed, and the GPUs it sees; None if it was not imported here."""
    torch = sys.modules.get("torch")
    if not hasattr(torch, "get_num_threads"):  # absent, or its import is under way
        return {"torch": None, "gpu": None}
    settings = {
        "threads": torch.get_num_threads(), "interop_threads": torch.get_num_interop_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "float32_matmul_precision": torch.get_float32_matmul_precision(), "cuda": torch.version.cuda,
    }  # fmt: skip
    devices = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    return {"torch": settings, "gpu": [{"name": d.name, "memory_bytes": d.total_memory} for d in devices] or None}
