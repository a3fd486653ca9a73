"""The machine: its cores and memory, what its CPU can do, and what other processes take of it.

Facts are Linux's, from files under PROC and SYSTEM; one that cannot be read is not known, which is no error. The load
matters because llama.cpp's threads spin at a barrier after every operator: with as many threads as cores and one other
busy process they wait for the one that does not run, and the speed falls to a tenth.
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
from specnb.io import read_toml
from specnb.records import Generation

PROC, SYSTEM = Path("/proc"), Path("/sys")

BFLOAT16 = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
"""Instruction sets that multiply bfloat16."""

MIN_MARGIN_BYTES, MARGIN_SHARE = 256 << 20, 0.05
"""Memory for work buffers: at least so many bytes, and this share of the weights."""

SLOW, SLOW_SHARE = 5.0, 0.05
"""A forward is slow at this many times the usual cost for its width, a machine is busy at a larger share of them."""
SPARE = 0.3
"""Cores that others may take before a thread counts as disturbed."""
LOOK_S = 0.5
"""Seconds between two looks at the processor: its clock ticks in hundredths."""
GLANCE_S, STALE_S = 0.1, 2.0
"""Seconds of a look at the start of a generation, and the age at which an average is out of date."""

INSTRUCTION_SETS = read_toml(Path(__file__).with_name("isa.toml"))
"""Instruction sets of CPUs that decide which matrix kernels run, and llama.cpp's names for them."""


def kernel_text(file: Path) -> str:
    """Return a small file of the kernel; "" if it cannot be read."""
    with contextlib.suppress(OSError):
        return file.read_text(encoding="utf-8", errors="replace").strip()
    return ""


def cgroup_folders() -> list[Path]:
    """Return the folders that may limit this process, innermost first: its control group (version 2) and ancestors.

    In a container PROC can name folders of the host; the top of the mount, where its own limits are, is always one.
    """
    mount = SYSTEM / "fs/cgroup"
    group = re.search(r"^0::/(?!\.\.)(.*)", kernel_text(PROC / "self/cgroup"), re.MULTILINE)
    innermost = mount / group[1] if group else mount
    return [folder for folder in (innermost, *innermost.parents) if folder.is_relative_to(mount) and folder.is_dir()]


# ---- cores


def allowed_cores() -> list[int]:
    """Return the numbers of the logical cores that this process may run on."""
    process = psutil.Process()  # macOS has no affinity
    return process.cpu_affinity() if hasattr(process, "cpu_affinity") else list(range(psutil.cpu_count() or 1))


def core_siblings() -> set[str]:
    """Return for each physical core behind `allowed_cores` the list of its hyperthreads; empty where none is stated."""
    folder = SYSTEM / "devices/system/cpu"
    return {kernel_text(folder / f"cpu{n}/topology/thread_siblings_list") for n in allowed_cores()} - {""}


def quota_cores() -> float | None:
    """Return the cores that the control group grants, the smallest along the path; None where there is no limit."""
    matches = (re.fullmatch(r"(\d+) (\d+)", kernel_text(folder / "cpu.max")) for folder in cgroup_folders())
    return min((round(int(match[1]) / int(match[2]), 3) for match in matches if match), default=None)


def available_cores() -> int:
    """Return the physical cores this process may use: more threads than that make verification slower."""
    physical = len(core_siblings()) or psutil.cpu_count(logical=False) or 1
    return max(1, min(physical, len(allowed_cores()), math.ceil(quota_cores() or physical)))


def cpuinfo() -> tuple[str | None, frozenset[str]]:
    """Return name and flags of the first core; the rest of the file repeats them once a core."""
    lines = (line.partition(":") for line in kernel_text(PROC / "cpuinfo").split("\n\n")[0].splitlines())
    facts = {key.strip().lower(): value.strip() for key, _, value in lines}
    return facts.get("model name"), frozenset(facts.get("flags", facts.get("features", "")).split())


def cpu_facts() -> dict[str, Any]:
    """Return model, instruction sets, cores, and settings of Linux that decide their speed; None for what is not known.

    Cores: physical, logical, usable (affinity), the quota of the control group, and available: the threads that engines
    take by default. `numa_nodes` counts those of the usable cores, `load_average` is over 1, 5 and 15 minutes.
    """
    (model, flags), cores, folder = cpuinfo(), allowed_cores(), SYSTEM / "devices/system/cpu"
    nodes = {node.name for n in cores for node in folder.glob(f"cpu{n}/node*")}
    pages = re.search(r"\[(\w+)\]", kernel_text(SYSTEM / "kernel/mm/transparent_hugepage/enabled"))
    return {
        "model": model or platform.processor() or platform.machine() or None,
        "isa": [flag for flag in INSTRUCTION_SETS if flag in flags],
        "physical_cores": psutil.cpu_count(logical=False),
        "logical_cores": psutil.cpu_count(),
        "usable_cores": len(cores),
        "quota_cores": quota_cores(),
        "available_cores": available_cores(),
        "threads_per_core": len(cores) // len(siblings) if (siblings := core_siblings()) else None,
        "numa_nodes": len(nodes) or None,
        "huge_pages": pages[1] if pages else None,
        "governor": kernel_text(folder / f"cpu{cores[0]}/cpufreq/scaling_governor") or None,
        "load_average": [*psutil.getloadavg()],
    }


def auto_dtype(device: str = "cpu") -> str:
    """Return the type that `dtype=auto` stands for: bfloat16 where `device` has it in hardware, else float32."""
    if device == "cpu":
        return "bfloat16" if BFLOAT16 & cpuinfo()[1] else "float32"
    import torch

    has_it = torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)
    return "bfloat16" if has_it else "float32"


# ---- memory


def need_bytes(weights: int, state: int = 0) -> int:
    """Return the bytes a model takes: weights, state (KV cache, recurrent state) and a margin for work buffers."""
    return weights + state + max(MIN_MARGIN_BYTES, math.ceil(MARGIN_SHARE * weights))


def require_memory(weights: int, state: int = 0, *, name: str, device: str = "cpu") -> None:
    """Refuse what the free memory of `device` does not hold, in bytes; `name` is that of the model in the error.

    Counted before a model is loaded: running out of memory kills the process, or the machine swaps for minutes. Raises
    MemoryShortError with every number and the remedy, and InputError for a device that is not there.
    """
    free, need = free_bytes(device), need_bytes(weights, state)
    if need > free:
        parts = f"weights {human_bytes(weights)}, state {human_bytes(state)}, the rest for work"
        needs = f"{name} does not fit on {device}: it needs {human_bytes(need)} ({parts}), {human_bytes(free)} is free"
        raise MemoryShortError(f"{needs}; use a smaller n_ctx or quantisation, or no draft model")


def free_bytes(device: str = "cpu") -> int:
    """Return the bytes that can still be taken on `cpu`, `cuda` or `cuda:N` without swapping or being killed.

    CPU: what the system calls available, bounded by every memory limit of the control group (version 2). CUDA: what
    the driver reports free and what torch holds unused. Raises InputError for a device that is not there.
    """
    if device == "cpu":
        return int(min([psutil.virtual_memory().available, *map(_cgroup_room_bytes, cgroup_folders())]))
    if not (match := re.fullmatch(r"cuda(?::(\d+))?", str(device))):
        raise InputError(f"unknown device {device!r}: use cpu, cuda or cuda:N")
    import torch

    index, n_devices = int(match[1] or 0), torch.cuda.device_count()
    if index >= n_devices:
        raise InputError(f"device {device!r} is not there: torch sees {n_devices} CUDA devices; use device=cpu")
    free, _ = torch.cuda.mem_get_info(index)
    return free + torch.cuda.memory_reserved(index) - torch.cuda.memory_allocated(index)


def _cgroup_room_bytes(folder: Path) -> float:
    """Return limit minus use of one control group, never below 0; infinity where it sets no limit."""
    texts = [kernel_text(folder / f"memory.{name}") for name in ("max", "high")]
    limit = min((int(text) for text in texts if text.isdigit()), default=math.inf)
    # The use counts file pages that the kernel drops on demand, among them the model file just written or read.
    reclaimable = re.search(r"^inactive_file (\d+)", kernel_text(folder / "memory.stat"), re.MULTILINE)
    used = int(kernel_text(folder / "memory.current") or 0) - int(reclaimable[1] if reclaimable else 0)
    return max(0, limit - max(0, used))


def human_bytes(n_bytes: float) -> str:
    """Return `n_bytes` for people, in powers of 1024: "256.0 MiB", "1.42 GiB"."""
    return f"{n_bytes / 2**30:.2f} GiB" if n_bytes >= 2**30 else f"{n_bytes / 2**20:.1f} MiB"


# ---- load of other processes


def other_processes_s() -> float:
    """Return the seconds that other processes have computed on the cores of this one, since the machine started."""
    cores, idle = set(allowed_cores()), {"idle", "iowait", "guest", "guest_nice"}
    times = [t._asdict() for core, t in enumerate(psutil.cpu_times(percpu=True)) if core in cores]
    return sum(s for states in times for name, s in states.items() if name not in idle) - process_time()


class Contention(NamedTuple):
    """Other load during a measurement: other processes took `other_cores` (None: too short to tell).

    `busy`: they left less than `threads` of the `cores`, or too many
    forwards were slow. Then no time, and no ratio of times, is worth a verdict.
    """

    busy: bool
    other_cores: float | None
    cores: int
    threads: int
    slow_forwards: int
    n_forwards: int


class Neighbours:
    """The other processes since this object was made (`utc`)."""

    def __init__(self) -> None:
        self.utc, self._start_s, self._before_s = datetime.now(UTC), perf_counter(), other_processes_s()

    def age_s(self) -> float:
        """Return the seconds since this object was made."""
        return perf_counter() - self._start_s

    def cores(self, least_s: float = LOOK_S) -> float | None:
        """Return the cores they took on average; None for less than `least_s` seconds."""
        seconds = self.age_s()
        return None if seconds < least_s else max(0.0, other_processes_s() - self._before_s) / seconds

    def during(self, caps: Any, generations: Iterable[Generation]) -> Contention:
        """Return the contention of `generations` by a model of `caps`, whose `details` tell its threads."""
        return self.contention(caps, [(r.width, r.verify_s) for g in generations for r in g.rounds])

    def contention(self, caps: Any, forwards: Sequence[tuple[int, float]]) -> Contention:
        """Return what came from them since the beginning, with `forwards` of (width, seconds) by a model of `caps`."""
        threads, cores = caps.details.get("threads") or available_cores(), len(allowed_cores())
        taken, slow = self.cores(), slow_forwards(forwards)
        disturbed = taken is not None and taken > max(0, cores - threads) + SPARE
        is_busy = disturbed or slow > SLOW_SHARE * len(forwards)
        return Contention(is_busy, taken and round(taken, 2), cores, threads, slow, len(forwards))


def slow_forwards(forwards: Iterable[tuple[int, float]]) -> int:
    """Count the (width, seconds) that took SLOW times the usual for their width, its lower quartile, or longer."""
    by_width = defaultdict(list)
    for width, seconds in forwards:
        by_width[width].append(seconds)  # of width 0 nothing was computed
    return sum(int((np.array(s) >= SLOW * np.quantile(s, 0.25)).sum()) for n, s in by_width.items() if n and min(s))


class ThreadPace:
    """A number of threads that follows the free cores: the largest of `counts` (ascending) that fits them.

    Within a text it changes only where `any_time`, for an engine whose bits do not depend on the number of threads;
    otherwise it is chosen once, at the start of each generation. `apply` sets it.
    """

    def __init__(self, counts: Sequence[int], apply: Callable[[int], None], *, any_time: bool) -> None:
        self.counts = counts
        self.threads = counts[-1]
        self.any_time = any_time
        self._apply = apply
        self._neighbours = Neighbours()

    def begin(self) -> None:
        """Choose the number for a generation that starts now."""
        if len(self.counts) > 1 and not self.any_time and self._neighbours.age_s() > STALE_S:
            self._neighbours = Neighbours()
            sleep(GLANCE_S)
        self._follow(GLANCE_S / 2)

    def step(self) -> None:
        """Before a forward pass, look at most every LOOK_S, and change the number where the free cores did."""
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
    """Keep the number of threads of models whose logits depend on it, so that their texts can be compared."""
    paces = [model.pace for model in models if getattr(model, "pace", None) and not model.pace.any_time]
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
    """Return the numbers of threads that a pace chooses among: a quarter of `most`, half of it, and all."""
    return sorted({max(1, most // share) for share in (4, 2, 1)})
