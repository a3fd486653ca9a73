"""The machine: its cores, memory and instruction sets, and the load of other processes.

Facts are read from Linux files under PROC and SYSTEM. If a file cannot be read, the fact is
unknown; this is not an error. The load matters because llama.cpp's threads spin at a barrier after
every operator. With as many threads as cores, one other busy process makes all of them wait for the
descheduled thread, and the speed drops to a tenth.
"""

import contextlib
import math
import platform
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter, process_time, sleep
from typing import Any, NamedTuple

import numpy as np
import psutil

from specnb.errors import InputError, MemoryShortError
from specnb.io import JsonObject, read_toml
from specnb.records import Generation

PROC = Path("/proc")
SYSTEM = Path("/sys")

BFLOAT16 = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
"""Instruction sets that multiply bfloat16."""

MIN_MARGIN_BYTES = 256 << 20
MARGIN_SHARE = 0.05
"""Memory for work buffers: this share of the weights, and at least MIN_MARGIN_BYTES."""

SLOW = 5.0
"""A forward pass is slow if it takes this many times the usual time for its width."""
SLOW_SHARE = 0.05
"""The machine is busy if a larger share of the forward passes is slow."""
SPARE = 0.3
"""Cores that other processes may use before a thread counts as disturbed."""
LOOK_S = 0.5
"""Seconds between load measurements, because CPU times have a resolution of 0.01 s."""
GLANCE_S = 0.1
"""Duration in seconds of the load measurement at the start of a generation."""
STALE_S = 2.0
"""Age in seconds at which an average is out of date."""

INSTRUCTION_SETS = read_toml(Path(__file__).with_name("isa.toml"))["names"]
"""CPU instruction sets that decide which matrix kernels run."""


def kernel_text(file: Path) -> str:
    """Return the text of a kernel file; "" if it cannot be read."""
    with contextlib.suppress(OSError):
        return file.read_text(encoding="utf-8", errors="replace").strip()
    return ""


def cgroup_folders() -> list[Path]:
    """Return the cgroup v2 folders of this process and their parents, innermost first.

    In a container, PROC may name folders of the host. The root of the mount, which has the
    container's own limits, is always included.
    """
    mount = SYSTEM / "fs/cgroup"
    group = re.search(r"^0::/(?!\.\.)(.*)", kernel_text(PROC / "self/cgroup"), re.MULTILINE)
    innermost = mount / group[1] if group else mount
    return [
        folder
        for folder in (innermost, *innermost.parents)
        if folder.is_relative_to(mount) and folder.is_dir()
    ]


# ---- cores


def allowed_cores() -> list[int]:
    """Return the indices of the logical cores that this process may run on."""
    process = psutil.Process()  # macOS has no CPU affinity
    return (
        process.cpu_affinity()
        if hasattr(process, "cpu_affinity")
        else list(range(psutil.cpu_count() or 1))
    )


def core_siblings() -> set[str]:
    """Return the sibling list ("0,4") of each physical core that is allowed; empty if unknown."""
    folder = SYSTEM / "devices/system/cpu"
    return {
        kernel_text(folder / f"cpu{n}/topology/thread_siblings_list") for n in allowed_cores()
    } - {""}


def quota_cores() -> float | None:
    """Return the CPU quota in cores, the smallest of all `cgroup_folders`; None if unlimited."""
    matches = (
        re.fullmatch(r"(\d+) (\d+)", kernel_text(folder / "cpu.max")) for folder in cgroup_folders()
    )
    return min(
        (round(int(match[1]) / int(match[2]), 3) for match in matches if match), default=None
    )


def available_cores() -> int:
    """Return the number of physical cores this process may use; more threads slow verification."""
    physical = len(core_siblings()) or psutil.cpu_count(logical=False) or 1
    return max(1, min(physical, len(allowed_cores()), math.ceil(quota_cores() or physical)))


def cpuinfo() -> tuple[str | None, frozenset[str]]:
    """Return the model name and flags of the first core."""
    lines = (
        line.partition(":") for line in kernel_text(PROC / "cpuinfo").split("\n\n")[0].splitlines()
    )
    facts = {key.strip().lower(): value.strip() for key, _, value in lines}
    return facts.get("model name"), frozenset(facts.get("flags", facts.get("features", "")).split())


def cpu_facts() -> JsonObject:
    """Return the CPU's model, instruction sets and cores, and the load.

    Unknown values are None. Core counts are physical, logical, usable (affinity), quota (cgroup),
    and available, the default number of threads of the engines. `load_average` is over 1, 5 and 15
    minutes.
    """
    model, flags = cpuinfo()
    return {
        "model": model or platform.processor() or platform.machine() or None,
        "isa": [flag for flag in INSTRUCTION_SETS if flag in flags],
        "physical_cores": psutil.cpu_count(logical=False),
        "logical_cores": psutil.cpu_count(),
        "usable_cores": len(allowed_cores()),
        "quota_cores": quota_cores(),
        "available_cores": available_cores(),
        "load_average": [*psutil.getloadavg()],
    }


def auto_dtype(device: str = "cpu") -> str:
    """Return the dtype for `auto`: bfloat16 if `device` supports it in hardware, else float32."""
    if device == "cpu":
        return "bfloat16" if BFLOAT16 & cpuinfo()[1] else "float32"
    import torch

    has_it = torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)
    return "bfloat16" if has_it else "float32"


# ---- memory


def need_bytes(weights: int, state: int = 0) -> int:
    """Return the bytes a model needs: weights, state (KV cache, recurrent) and work buffers."""
    return weights + state + max(MIN_MARGIN_BYTES, math.ceil(MARGIN_SHARE * weights))


def require_memory(weights: int, state: int = 0, *, name: str, device: str = "cpu") -> None:
    """Check that `weights` and `state`, in bytes, fit the free memory of `device`.

    The check runs before a model is loaded, because running out of memory kills the process or
    makes the machine swap. `name` is the model's name for the error message. Raises
    MemoryShortError with all numbers and the remedy, and InputError for an unknown device.
    """
    free = free_bytes(device)
    need = need_bytes(weights, state)
    if need > free:
        parts = f"weights {human_bytes(weights)}, state {human_bytes(state)}, the rest for buffers"
        needs = (
            f"{name} does not fit on {device}: "
            f"it needs {human_bytes(need)} ({parts}), {human_bytes(free)} is free"
        )
        raise MemoryShortError(f"{needs}; use a smaller n_ctx or quantized type, or no draft model")


def free_bytes(device: str = "cpu") -> int:
    """Return the bytes that can be allocated on `cpu`, `cuda` or `cuda:N` without swapping or OOM.

    CPU: the available memory, bounded by the cgroup v2 memory limits. CUDA: the free memory that
    the driver reports, plus memory that torch has reserved but does not use. Raises InputError for
    an unknown device.
    """
    if device == "cpu":
        return int(
            min([psutil.virtual_memory().available, *map(_cgroup_room_bytes, cgroup_folders())])
        )
    if not (match := re.fullmatch(r"cuda(?::(\d+))?", str(device))):
        raise InputError(f"unknown device {device!r}: use cpu, cuda or cuda:N")
    import torch

    index = int(match[1] or 0)
    n_devices = torch.cuda.device_count()
    if index >= n_devices:
        raise InputError(
            f"device {device!r} does not exist: torch sees {n_devices} CUDA devices; use device=cpu"
        )
    free, _ = torch.cuda.mem_get_info(index)
    return free + torch.cuda.memory_reserved(index) - torch.cuda.memory_allocated(index)


def _cgroup_room_bytes(folder: Path) -> float:
    """Return limit minus usage of one cgroup in bytes, at least 0; infinity if unlimited."""
    texts = [kernel_text(folder / f"memory.{name}") for name in ("max", "high")]
    limit = min((int(text) for text in texts if text.isdigit()), default=math.inf)
    # usage includes file pages that the kernel drops on demand, such as those of the model file
    reclaimable = re.search(
        r"^inactive_file (\d+)", kernel_text(folder / "memory.stat"), re.MULTILINE
    )
    used = int(kernel_text(folder / "memory.current") or 0) - int(
        reclaimable[1] if reclaimable else 0
    )
    return max(0, limit - max(0, used))


def human_bytes(n_bytes: float) -> str:
    """Return `n_bytes` in powers of 1024: "256.0 MiB", "1.42 GiB"."""
    return f"{n_bytes / 2**30:.2f} GiB" if n_bytes >= 2**30 else f"{n_bytes / 2**20:.1f} MiB"


# ---- load of other processes


def other_processes_s() -> float:
    """Return the CPU seconds that other processes used on this process's cores since boot."""
    cores = set(allowed_cores())
    idle = {"idle", "iowait", "guest", "guest_nice"}
    times = [t._asdict() for core, t in enumerate(psutil.cpu_times(percpu=True)) if core in cores]
    return (
        sum(s for states in times for name, s in states.items() if name not in idle)
        - process_time()
    )


class Contention(NamedTuple):
    """The load of other processes during a measurement.

    They used `other_cores` on average (None if the measurement was too short). The machine is
    `busy` if they left less than `threads` of the `cores`, or if too many forward passes were slow.
    Neither times nor ratios of times then support a verdict.
    """

    busy: bool
    other_cores: float | None
    cores: int
    threads: int
    slow_forwards: int
    n_forwards: int


class Neighbours:
    """The load of other processes since this object was created (`utc`)."""

    def __init__(self) -> None:
        self.utc = datetime.now(UTC)
        self._start_s = perf_counter()
        self._before_s = other_processes_s()

    def age_s(self) -> float:
        """Return the seconds since this object was created."""
        return perf_counter() - self._start_s

    def cores(self, least_s: float = LOOK_S) -> float | None:
        """Return the average number of cores they used; None in the first `least_s` seconds."""
        seconds = self.age_s()
        return (
            None if seconds < least_s else max(0.0, other_processes_s() - self._before_s) / seconds
        )

    def during(self, caps: Any, generations: Iterable[Generation]) -> Contention:
        """Return the contention during `generations` by a model with `caps`; see `contention`."""
        return self.contention(caps, [(r.width, r.verify_s) for g in generations for r in g.rounds])

    def contention(self, caps: Any, forwards: Sequence[tuple[int, float]]) -> Contention:
        """Return the contention since this object was created.

        `forwards` are the (width, seconds) of the forward passes of a model with `caps`, whose
        `details` have its number of threads.
        """
        threads = caps.details.get("threads") or available_cores()
        cores = len(allowed_cores())
        taken = self.cores()
        slow = slow_forwards(forwards)
        disturbed = taken is not None and taken > max(0, cores - threads) + SPARE
        is_busy = disturbed or slow > SLOW_SHARE * len(forwards)
        return Contention(is_busy, taken and round(taken, 2), cores, threads, slow, len(forwards))


def slow_forwards(forwards: Iterable[tuple[int, float]]) -> int:
    """Count the passes (width, seconds) of at least SLOW times their width's lower quartile."""
    by_width = defaultdict(list)
    for width, seconds in forwards:
        by_width[width].append(seconds)  # width 0 computes nothing
    return sum(
        int((np.array(s) >= SLOW * np.quantile(s, 0.25)).sum())
        for n, s in by_width.items()
        if n and min(s)
    )


class ThreadPace:
    """Adapt the number of threads to the free cores: the largest of `counts` (ascending) that fits.

    With `any_time`, it may change during a generation. This is for an engine whose logits do not
    depend on it, bit for bit. Otherwise it is chosen once, at the start of each generation. `apply`
    sets the number of threads of the engine.
    """

    def __init__(
        self, counts: Sequence[int], apply: Callable[[int], None], *, any_time: bool
    ) -> None:
        self.counts = counts
        self.threads = counts[-1]
        self.any_time = any_time
        self._apply = apply
        self._neighbours = Neighbours()

    def begin(self) -> None:
        """Choose the number of threads at the start of a generation."""
        if len(self.counts) > 1 and not self.any_time and self._neighbours.age_s() > STALE_S:
            self._neighbours = Neighbours()
            sleep(GLANCE_S)
        self._follow(GLANCE_S / 2)

    def step(self) -> None:
        """With `any_time`, adapt the number before a forward pass, at most every LOOK_S seconds."""
        if self.any_time:
            self._follow(LOOK_S)

    def _follow(self, least_s: float) -> None:
        if (taken := self._neighbours.cores(least_s)) is None:
            return
        self._neighbours = Neighbours()
        free = len(allowed_cores()) - taken + SPARE
        threads = max((n for n in self.counts if n <= free), default=self.counts[0])
        if threads != self.threads:
            self.threads = threads
            self._apply(threads)


@contextlib.contextmanager
def steady_threads(*models: Any) -> Iterator[None]:
    """Fix the thread counts of models whose logits depend on them, so that texts are comparable."""
    paces = [
        model.pace for model in models if getattr(model, "pace", None) and not model.pace.any_time
    ]
    choices = [pace.counts for pace in paces]
    for pace in paces:
        pace.begin()
        pace.counts = [pace.threads]
    try:
        yield
    finally:
        for pace, counts in zip(paces, choices, strict=True):
            pace.counts = counts


def thread_counts(most: int) -> list[int]:
    """Return the `counts` of a ThreadPace: a quarter of `most`, half of it, and all of it."""
    return sorted({max(1, most // share) for share in (4, 2, 1)})
