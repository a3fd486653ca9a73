"""Provenance of a result: code, versions, hardware, seeds, digests. Part of each record and figure.

This module imports no model engine: versions come from package metadata, and torch's settings are
recorded only if the process has imported torch. Absolute paths and host names are not recorded, so
that records can be published.
"""

import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from specnb.io import JsonObject, plain
from specnb.machine import cpu_facts

THREAD_SETTINGS = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "OMP_MAX_ACTIVE_LEVELS",
    "OMP_WAIT_POLICY",
    "GOMP_SPINCOUNT",
)
"""Environment variables that set the number of threads and how they wait for each other."""
STATUS = (
    "git status --porcelain=v2 --branch --untracked-files=normal "
    "-- . ':(exclude)figures' ':(exclude)results'"
)
"""The commit of a checkout, and its changes except in folders that runs do not read."""


def provenance(
    *,
    seeds: Any = None,
    models: Iterable[JsonObject] = (),
    prompts_digest: str | None = None,
    extra: JsonObject | None = None,
) -> JsonObject:
    """Return the provenance of a result as a dict for `json.dumps`.

    Each of `models` has at least an `id`, whose absolute path is reduced to the file name. Unknown
    facts (no git, no GPU, a package that is not installed) are None. Raises InputError if `seeds`,
    `models` or `extra` contain values that JSON does not support.
    """
    import psutil

    # Required packages only: their versions can change a result, a table or a figure.
    requirements = [line for line in metadata.requires("specnb") if "extra ==" not in line]
    required = [re.match(r"[\w.-]+", line)[0] for line in requirements]
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
        "models": [
            {**model, "id": re.sub(r"^(/|[A-Za-z]:\\).*[/\\]", "", model["id"])} for model in models
        ],
        "prompts_digest": prompts_digest,
        "extra": dict(extra or {}),
    }
    return plain(record, "provenance")


def _version(distribution: str) -> str | None:
    return next((d.version for d in metadata.distributions(name=distribution)), None)


def git_state(root: Path) -> JsonObject | None:
    """Return `{"commit", "dirty"}` of the checkout with the root folder `root`; None if unknown.

    `dirty`: there are uncommitted or untracked files, except in `figures/` and `results/`, which
    runs do not read.
    """
    if not (root / ".git").exists():
        return None
    env = os.environ | {"GIT_OPTIONAL_LOCKS": "0"}  # concurrent runs do not wait for the index
    try:
        report = subprocess.check_output(
            shlex.split(STATUS), cwd=root, stderr=subprocess.DEVNULL, timeout=20, env=env
        ).decode()
    except (OSError, subprocess.SubprocessError):
        return None
    # "(initial)" before the first commit
    commit = re.search(r"^# branch\.oid ([0-9a-f]{40,64})$", report, re.MULTILINE)
    changed = any(not line.startswith("#") for line in report.splitlines())
    return {"commit": commit[1] if commit else None, "dirty": changed}


def _torch_facts() -> JsonObject:
    """Return torch's settings that affect results or speed, and its GPUs; None if not imported."""
    torch = sys.modules.get("torch")
    if not hasattr(torch, "get_num_threads"):  # not imported, or not completely
        return {"torch": None, "gpu": None}
    settings = {
        "threads": torch.get_num_threads(),
        "interop_threads": torch.get_num_interop_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "cuda": torch.version.cuda,
    }
    devices = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    gpus = [{"name": device.name, "memory_bytes": device.total_memory} for device in devices]
    return {"torch": settings, "gpu": gpus or None}
