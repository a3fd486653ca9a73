"""Who else is on the processor: the cores that other processes take, slow forwards, and threads that follow.

llama.cpp's threads spin at a barrier after every operator. With as many threads as cores and one other busy process
they wait for the one that does not run, and the speed falls to a tenth.
"""

import math
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from time import perf_counter, process_time
from typing import NamedTuple

import numpy as np
import psutil

from specnb.lm.base import Capabilities
from specnb.lm.preflight import allowed_cores, core_siblings, quota_cores
from specnb.records import Generation

SLOW, SLOW_SHARE = 5.0, 0.05
"""A forward is slow at this many times the usual cost for its width, a machine is busy at a larger share of them."""
SPARE = 0.3
"""Cores that others may take before a thread counts as disturbed."""
LOOK_S = 0.5
"""Seconds between two looks at the processor: its clock ticks in hundredths."""


def available_cores() -> int:
    """Physical cores this process may use: more threads than that make verification slower."""
    physical = len(core_siblings()) or psutil.cpu_count(logical=False) or 1
    return max(1, min(physical, len(allowed_cores()), math.ceil(quota_cores() or physical)))


def foreign_s() -> float:
    """Seconds that other processes have computed on the cores of this one, since the machine started."""
    cores, idle = set(allowed_cores()), {"idle", "iowait", "guest", "guest_nice"}
    times = [t._asdict() for at, t in enumerate(psutil.cpu_times(percpu=True)) if at in cores]
    return sum(s for each in times for name, s in each.items() if name not in idle) - process_time()


class Contention(NamedTuple):
    """What shared the processor with a measurement: other processes took `other_cores` (None: too short to tell).

    `load_average` of one minute, before and after. `busy`: they left less than `threads` of the `cores`, or too many
    forwards were slow. Then no time, and no ratio of times, is worth a verdict.
    """

    busy: bool
    other_cores: float | None
    cores: int
    threads: int
    load_average: tuple[float, float]
    slow_forwards: int
    n_forwards: int


class Neighbours:
    """The other processes since this object was made (`utc`)."""

    def __init__(self) -> None:
        self.utc, self._load = datetime.now(UTC), os.getloadavg()[0]
        self._began, self._before_s = perf_counter(), foreign_s()

    def cores(self) -> float | None:
        """Cores they took on average; None for less than LOOK_S."""
        seconds = perf_counter() - self._began
        return None if seconds < LOOK_S else max(0.0, foreign_s() - self._before_s) / seconds

    def during(self, caps: Capabilities, generations: Iterable[Generation]) -> Contention:
        """The contention of `generations`."""
        return self.contention(caps, [(r.width, r.verify_s) for g in generations for r in g.rounds])

    def contention(self, caps: Capabilities, forwards: Sequence[tuple[int, float]]) -> Contention:
        """What came from them since the beginning, with `forwards` of (width, seconds) by a model of `caps`."""
        threads, cores = caps.details.get("threads") or available_cores(), len(allowed_cores())
        taken, slow = self.cores(), slow_forwards(forwards)
        disturbed = taken is not None and taken > max(0, cores - threads) + SPARE
        is_busy, load = disturbed or slow > SLOW_SHARE * len(forwards), (self._load, os.getloadavg()[0])
        return Contention(is_busy, taken and round(taken, 2), cores, threads, load, slow, len(forwards))


def slow_forwards(forwards: Iterable[tuple[int, float]]) -> int:
    """How many of (width, seconds) took SLOW times the usual for their width, its lower quartile, or longer."""
    by_width: dict[int, list[float]] = defaultdict(list)
    for width, seconds in forwards:
        by_width[width].append(seconds)  # of width 0 nothing was computed
    return sum(int((np.array(s) >= SLOW * np.quantile(s, 0.25)).sum()) for n, s in by_width.items() if n and min(s))


class ThreadPace:
    """Threads that follow the free cores, 1 to `asked`; for engines whose bits do not depend on their number."""

    def __init__(self, asked: int, apply: Callable[[int], None]) -> None:
        self.asked = self.threads = asked
        self._apply, self._neighbours = apply, Neighbours()

    def step(self) -> None:
        """Before each forward: look every LOOK_S, and change the number where the free cores did."""
        if (taken := self._neighbours.cores()) is None:
            return
        self._neighbours = Neighbours()
        threads = min(self.asked, max(1, math.floor(len(allowed_cores()) - taken + SPARE)))
        if threads != self.threads:
            self.threads = threads
            self._apply(threads)
