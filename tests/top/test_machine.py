"""The machine: Linux facts from test files, refused memory, and load on a fake clock."""

import sys
from types import SimpleNamespace

import psutil
import pytest

from specnb import machine
from specnb.errors import InputError, MemoryShortError
from specnb.io import write_atomic
from specnb.lm import toy
from specnb.lm.base import Capabilities, kv_bytes
from specnb.machine import (
    Neighbours,
    ThreadPace,
    cpu_facts,
    cpuinfo,
    free_bytes,
    need_bytes,
    require_memory,
)
from specnb.measure import cost

MIB = 1 << 20
GIB = 1 << 30


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Return a function that writes files under PROC and SYSTEM, which are empty."""
    monkeypatch.setattr(machine, "PROC", tmp_path / "proc")
    monkeypatch.setattr(machine, "SYSTEM", tmp_path / "sys")

    def write_files(files):
        for name, text in files.items():
            write_atomic(tmp_path / name, f"{text}\n".encode())

    return write_files


def test_cpu_name_and_flags_come_from_the_first_core(write):
    assert cpuinfo() == (None, set())
    two = "model name\t: Chip X\nflags\t\t: fpu avx2\n\nprocessor\t: 1\nflags\t: no"
    for text, facts in {
        two: ("Chip X", {"fpu", "avx2"}),
        "processor: 0\nFeatures\t: bf16": (None, {"bf16"}),
    }.items():
        write({"proc/cpuinfo": text})
        assert cpuinfo() == facts


SERVER = {
    f"sys/devices/system/cpu/cpu{n}/topology/thread_siblings_list": f"{n % 2},{n % 2 + 2}"
    for n in range(4)
}


def test_quota_and_hyperthreads_limit_the_number_of_cores(monkeypatch, write):
    monkeypatch.setattr(machine, "allowed_cores", lambda: [0, 1, 2, 3])
    monkeypatch.setattr(psutil, "cpu_count", lambda logical=True: 64)
    quota = {"sys/fs/cgroup/cpu.max": "50000 100000"}
    for files, expected in (({}, (4, None)), (SERVER, (2, None)), (quota, (1, 0.5))):
        write(files)
        facts = cpu_facts()
        assert (facts["available_cores"], facts["quota_cores"]) == expected
        assert len(facts["load_average"]) == 3


# ---- memory


def test_a_model_that_exceeds_free_memory_is_refused_with_every_number(monkeypatch):
    assert kv_bytes(30, 3, 64, 2048, 2) == 2 * 30 * 3 * 64 * 2048 * 2  # SmolLM2-135M
    assert need_bytes(GIB) == GIB + 256 * MIB and need_bytes(100 * GIB, 1) == 105 * GIB + 1
    monkeypatch.setattr(machine, "free_bytes", lambda device: need_bytes(3 * GIB, GIB))
    require_memory(3 * GIB, GIB, name="draft.gguf")
    monkeypatch.setattr(machine, "free_bytes", lambda device: 4 * GIB)
    with pytest.raises(MemoryShortError) as caught:
        require_memory(3 * GIB, GIB, name="draft.gguf")
    for part in ("draft.gguf", "4.25 GiB", "3.00 GiB", "1.00 GiB", "4.00 GiB"):
        assert part in str(caught.value)


ANON = f"anon 7\ninactive_file {2 * GIB}\nactive_file 77"


@pytest.mark.parametrize(
    ("path", "groups", "free"),
    [
        ("0::/", {"": {"max": "max", "high": 2 * GIB, "current": GIB}}, 1),  # a soft limit
        # file pages that the kernel drops
        ("0::/", {"": {"max": 4 * GIB, "current": 3 * GIB, "stat": ANON}}, 3),
        # the lowest
        (
            "0::/a",
            {"a/": {"max": 8 * GIB, "current": GIB}, "": {"max": 4 * GIB, "current": 3 * GIB}},
            1,
        ),
        ("4:cpu,cpuacct:/c\n0::/a/b", {"a/b/": {"max": 3 * GIB, "current": GIB}}, 2),
        ("0::/docker/of/the/host", {"": {"max": GIB, "current": 2 * GIB}}, 0),
        ("0::/../../elsewhere", {"elsewhere/": {"max": 0, "current": 0}}, 5),
    ],
)
def test_a_control_group_limits_free_memory(monkeypatch, write, path, groups, free):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=5 * GIB))
    assert free_bytes("cpu") == 5 * GIB
    write({"proc/self/cgroup": path})
    for folder, files in groups.items():
        write({f"sys/fs/cgroup/{folder}memory.{name}": value for name, value in files.items()})
    assert free_bytes("cpu") == free * GIB


def test_free_vram_includes_memory_that_torch_reserved_but_does_not_use(monkeypatch):
    cuda = SimpleNamespace(
        device_count=lambda: 2,
        mem_get_info=lambda index: ((10 + index) * GIB, 80 * GIB),
        memory_reserved=lambda index: 3 * GIB,
        memory_allocated=lambda index: 2 * GIB,
    )
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    for device, free in {"cuda:0": 11, "cuda": 11, "cuda:1": 12}.items():
        assert free_bytes(device) == free * GIB
    for device in ("cuda:2", "cuda:-1", "tpu", ""):
        with pytest.raises(InputError, match=f"'{device}'"):
            free_bytes(device)


# ---- load, on a fake clock

CORES = 4


class Clock:
    """A clock, and other processes that use `others` of CORES cores."""

    now = others_s = others = 0.0

    def run(self, seconds):
        self.now += seconds
        self.others_s += self.others * seconds


@pytest.fixture
def clock(monkeypatch):
    fake = Clock()
    monkeypatch.setattr(machine, "perf_counter", lambda: fake.now)
    monkeypatch.setattr(machine, "other_processes_s", lambda: fake.others_s)
    monkeypatch.setattr(machine, "allowed_cores", lambda: list(range(CORES)))
    return fake


def caps(threads) -> Capabilities:
    return Capabilities("e", "cpu", "f32", 9, 9, "crop", details={"threads": threads})


@pytest.mark.parametrize(
    ("threads", "others", "slow", "is_busy"),
    [
        (4, 0.2, 0, False),
        (4, 1.0, 0, True),
        (2, 1.0, 0, False),
        (2, 2.5, 0, True),
        (2, 0, 3, True),
    ],
)
def test_a_machine_is_busy_if_other_processes_leave_too_few_cores_or_forward_passes_are_slow(
    clock, threads, others, slow, is_busy
):
    clock.others = others
    neighbours = Neighbours()
    clock.run(machine.LOOK_S / 2)  # too short for the processor's clock
    assert neighbours.contention(caps(threads), [])[:2] == (False, None)
    clock.run(10)
    forwards = (
        [(1, 1.0)] * (40 - slow) + [(1, 20.0)] * slow + [(9, 20.0)] * 9 + [(0, 1e-9), (0, 1.0)]
    )
    contention = neighbours.contention(caps(threads), forwards)
    # width 9 is usual, width 0 computes nothing
    assert contention == (is_busy, others, CORES, threads, slow, 51)


def test_the_number_of_threads_follows_the_free_cores(clock):
    applied, history = [], []
    pace = ThreadPace([1, 2, 3], applied.append, any_time=True)
    for clock.others in (0.0, 1.0, 2.0, 2.9, 9.0, 2.0, 0.2, 0.0):
        clock.run(machine.LOOK_S)
        pace.step()
        history.append(pace.threads)
    assert history == [3, 3, 2, 1, 1, 2, 3, 3] and applied == [2, 1, 2, 3]


def test_threads_that_affect_rounding_change_only_between_generations(clock, monkeypatch):
    """The load at the start of a generation decides, not the average over a pause."""
    monkeypatch.setattr(machine, "sleep", clock.run)
    pace = ThreadPace([1, 2, 4], lambda _threads: None, any_time=False)
    history = []
    for paused_s, while_paused, now in ((0.5, 0, 0), (60, 0, 3), (60, 4, 0), (0.5, 2, 2)):
        clock.others = while_paused
        clock.run(paused_s)
        clock.others = now
        pace.begin()
        history.append(pace.threads)
        for clock.others in (9.0, 0.0):
            clock.run(machine.LOOK_S)
            pace.step()
            assert pace.threads == history[-1]
    assert history == [4, 1, 4, 1], history
    with machine.steady_threads(SimpleNamespace(pace=pace), SimpleNamespace(), None):
        fixed = pace.threads
        for clock.others in (0.0, 9.0):
            clock.run(60)
            pace.begin()
            assert pace.threads == fixed
    clock.others = 0.0
    clock.run(machine.LOOK_S)
    pace.begin()
    assert pace.threads == 4


def test_a_curve_measured_under_load_is_marked(clock, monkeypatch):
    model = toy.cyclic(5)
    forward = model.forward
    model.forward = lambda ids, n_logits=None: (clock.run(1.0), forward(ids, n_logits))[1]
    monkeypatch.setattr(cost, "perf_counter", lambda: clock.now)
    for clock.others in (0.0, 3.5):
        assert cost.verify_curve(model, widths=(1, 2), context=4).busy is (clock.others > 1)
