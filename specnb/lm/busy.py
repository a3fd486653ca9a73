"""Who else is on the processor: the cores that other processes take, slow forwards, and threads that follow.

llama.cpp's threads spin at a barrier after every operator. With as many threads as cores and one other busy process
they wait for the one that does not run, and the speed falls to a tenth.
"""

import ctypes
import math
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from time import perf_counter, process_time
from typing import NamedTuple

import numpy as np
import psutil

from specnb.lm.base import Capabilities
from specnb.lm.preflight import quota_cores
from specnb.records import Generation

SPIN_COUNT = "1000"
"""Turns of libgomp's waiting loop before a thread sleeps; its default spins for milliseconds."""
SLOW, SLOW_SHARE = 5.0, 0.05
"""A forward is slow at this many times the usual cost for its width, a machine is busy at a larger share of them."""
SPARE = 0.3
"""Cores that others may take before a thread counts as disturbed."""
LOOK_S = 0.5
"""Seconds between two looks at the processor: its clock ticks in hundredths."""


def shorten_spinning() -> None:
    """Set GOMP_SPINCOUNT, for an engine that is about to load libgomp; not where the user set it or OMP_WAIT_POLICY.

    libgomp reads it once, as it loads, and torch brings a copy under the same name. In a process that imported torch
    first it has no effect and is not set, so that the environment, which provenance records, is the truth.
    """
    if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & set(os.environ) and not libgomp_is_loaded():
        os.environ["GOMP_SPINCOUNT"] = SPIN_COUNT


def libgomp_is_loaded() -> bool:
    """Whether this process holds libgomp already, whoever brought it."""
    with suppress(OSError, AttributeError):  # not there; a system without dlopen
        return bool(ctypes.CDLL("libgomp.so.1", mode=os.RTLD_NOLOAD))
    return False


def allowed_cores() -> list[int]:
    """Numbers of the logical cores that this process may run on."""
    process = psutil.Process()  # macOS has no affinity
    return process.cpu_affinity() if hasattr(process, "cpu_affinity") else list(range(psutil.cpu_count() or 1))


def available_cores() -> int:
    """Physical cores this process may use: more threads than that make verification slower."""
    physical = psutil.cpu_count(logical=False) or 1
    return max(1, min(physical, len(allowed_cores()), math.ceil(quota_cores() or physical)))


def foreign_s() -> float:
    """Seconds that other processes have computed on the cores of this one, since the machine started."""
    cores = set(allowed_cores())
    times = [t for at, t in enumerate(psutil.cpu_times(percpu=True)) if at in cores]
    names = set(times[0]._fields) - {"idle", "iowait", "guest", "guest_nice"} if times else ()
    return sum(getattr(t, name) for t in times for name in names) - process_time()


class Contention(NamedTuple):
    """What shared the processor with a measurement: `other_cores` that other processes took on average, of `cores`.

    It is None for less than LOOK_S. `load_average` of one minute, before and after. `busy`: they left less than
    `threads` cores, or too many of the forwards were slow; then no time, and no ratio of times, is worth a verdict.
    """

    busy: bool
    other_cores: float | None
    cores: int
    threads: int
    load_average: tuple[float, float]
    slow_forwards: int
    n_forwards: int


class Neighbours:
    """The other processes since this object was made (`utc`), or since the last `look`."""

    def __init__(self) -> None:
        self.utc, self._load = datetime.now(UTC), os.getloadavg()[0]
        self._began = self._last = perf_counter(), foreign_s()

    def look(self) -> float | None:
        """Cores they took on average since the last look; None where that is less than LOOK_S ago."""
        if (taken := self._taken(self._last)) is not None:
            self._last = perf_counter(), foreign_s()
        return taken

    @staticmethod
    def _taken(since: tuple[float, float]) -> float | None:
        seconds = perf_counter() - since[0]
        return None if seconds < LOOK_S else max(0.0, foreign_s() - since[1]) / seconds

    def during(self, caps: Capabilities, generations: Iterable[Generation]) -> Contention:
        """The contention of `generations`."""
        return self.contention(caps, [(r.width, r.verify_s) for g in generations for r in g.rounds])

    def contention(self, caps: Capabilities, forwards: Sequence[tuple[int, float]]) -> Contention:
        """What came from them since the beginning, with `forwards` of (width, seconds) by a model of `caps`."""
        threads, cores = caps.details.get("threads") or available_cores(), len(allowed_cores())
        taken, slow = self._taken(self._began), slow_forwards(forwards)
        disturbed = taken is not None and taken > max(0, cores - threads) + SPARE
        is_busy, load = disturbed or slow > SLOW_SHARE * len(forwards), (self._load, os.getloadavg()[0])
        return Contention(is_busy, taken and round(taken, 2), cores, threads, load, slow, len(forwards))


def slow_forwards(forwards: Iterable[tuple[int, float]]) -> int:
    """How many of (width, seconds) took SLOW times the usual for their width, its lower quartile, or longer."""
    by_width: dict[int, list[float]] = defaultdict(list)
    for width, seconds in forwards:
        by_width[width].append(seconds)
    by_width.pop(0, None)  # nothing was computed
    return sum(int((np.array(s) >= SLOW * np.quantile(s, 0.25)).sum()) for s in by_width.values() if min(s) > 0)


class ThreadPace:
    """Lets the threads of an engine follow the cores that others leave: `asked` of them at most, 1 at least.

    `step` comes before each forward and looks every LOOK_S. Only for engines whose bits do not depend on the number.
    """

    def __init__(self, asked: int, apply: Callable[[int], None]) -> None:
        self.asked = self.threads = asked
        self._apply, self._neighbours = apply, Neighbours()

    def step(self) -> None:
        """Change the number of threads where the free cores did."""
        if (taken := self._neighbours.look()) is None:
            return
        threads = min(self.asked, max(1, math.floor(len(allowed_cores()) - taken + SPARE)))
        if threads != self.threads:
            self.threads = threads
            self._apply(threads)
