"""Memory is checked before loading: the numbers are right, and a refusal carries all of them."""

import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specnb.errors import InputError, LoadError, MemoryShortError
from specnb.lm import memory
from specnb.lm.memory import Need, free_bytes, human_bytes, kv_bytes, require

MIB, GIB = 1 << 20, 1 << 30
sizes = st.integers(0, 1 << 50)


def test_kv_cache_of_a_known_model():
    # SmolLM2-135M: 30 layers, 3 key/value heads of 64; a position is 2 * 30 * 3 * 64 values
    assert kv_bytes(30, 3, 64, 2048, 2) == 2 * 30 * 3 * 64 * 2048 * 2


def test_margin_is_a_share_of_large_weights_and_can_be_given():
    assert Need(GIB).total == GIB + 256 * MIB
    assert Need(100 * GIB).margin_bytes == 5 * GIB
    assert Need(100 * GIB, 0, 0).total == 100 * GIB


@given(sizes, sizes, st.integers(0, GIB), st.integers(0, 1 << 51))
def test_require_refuses_exactly_what_does_not_fit(weights, state, margin, free):
    need = Need(weights, state, margin)
    if weights + state + margin <= free:
        assert require(need, name="m", free=free) == free
    else:
        with pytest.raises(MemoryShortError):
            require(need, name="m", free=free)


def test_refusal_names_every_number_and_the_remedy():
    with pytest.raises(MemoryShortError) as caught:
        require(Need(3 * GIB, GIB, 512 * MIB), device="cpu", name="draft.gguf", free=2 * GIB)
    message = str(caught.value)
    for part in ("draft.gguf", "cpu", "4.50 GiB", "3.00 GiB", "1.00 GiB", "512.0 MiB", "2.00 GiB", "2.50 GiB"):
        assert part in message
    for remedy in ("smaller context", "smaller quantisation", "target alone"):
        assert remedy in message
    assert isinstance(caught.value, LoadError)


@pytest.mark.parametrize(
    ("n_bytes", "text"),
    [
        (0, "0 B"),
        (812, "812 B"),
        (1024, "1.0 KiB"),
        (256 * MIB, "256.0 MiB"),
        (3 * GIB, "3.00 GiB"),
        (-MIB, "-1.0 MiB"),
    ],
)
def test_bytes_are_written_for_people(n_bytes, text):
    assert human_bytes(n_bytes) == text


@pytest.mark.parametrize("device", ["tpu", "cuda:", "cuda:-1", "cuda:0:1", ""])
def test_an_unknown_device_is_refused(device):
    with pytest.raises(InputError, match="unknown device"):
        free_bytes(device)


def group(folder: Path, **files: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        (folder / name.replace("__", ".")).write_text(f"{value}\n")
    return folder


def free_with(monkeypatch, available: int, *groups: Path) -> int:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=available))
    monkeypatch.setattr(memory, "cgroup_folders", lambda controller: list(groups) if controller == "memory" else [])
    return free_bytes("cpu")


def test_a_control_group_bounds_free_memory(monkeypatch, tmp_path):
    assert free_with(monkeypatch, 5 * GIB) == 5 * GIB
    assert free_with(monkeypatch, 5 * GIB, group(tmp_path / "no", memory__max="max", memory__current=GIB)) == 5 * GIB
    limited = group(tmp_path, memory__max=4 * GIB, memory__current=GIB)
    assert free_with(monkeypatch, 64 * GIB, limited) == 3 * GIB
    assert free_with(monkeypatch, GIB, limited) == GIB


def test_the_soft_limit_of_version_2_counts_and_a_limit_of_zero_is_a_limit(monkeypatch, tmp_path):
    soft = group(tmp_path / "soft", memory__max="max", memory__high=2 * GIB, memory__current=GIB)
    assert free_with(monkeypatch, 64 * GIB, soft) == GIB
    assert free_with(monkeypatch, 64 * GIB, group(tmp_path / "zero", memory__max=0, memory__current=0)) == 0


def test_file_pages_that_the_kernel_drops_are_not_in_use(monkeypatch, tmp_path):
    stat = f"anon {GIB}\ninactive_file {2 * GIB}\nactive_file 77"
    second = group(tmp_path / "2", memory__max=4 * GIB, memory__current=3 * GIB, memory__stat=stat)
    assert free_with(monkeypatch, 64 * GIB, second) == 3 * GIB


def test_the_tightest_ancestor_counts_and_overuse_leaves_nothing(monkeypatch, tmp_path):
    inner = group(tmp_path / "a" / "b", memory__max=8 * GIB, memory__current=GIB)
    outer = group(tmp_path / "a", memory__max=4 * GIB, memory__current=3 * GIB)
    assert free_with(monkeypatch, 64 * GIB, inner, outer) == GIB
    over = group(tmp_path / "over", memory__max=GIB, memory__current=2 * GIB)
    assert free_with(monkeypatch, 64 * GIB, over) == 0


def fake_torch(devices: int) -> SimpleNamespace:
    cuda = SimpleNamespace(
        is_available=lambda: devices > 0,
        device_count=lambda: devices,
        current_device=lambda: devices - 1,
        mem_get_info=lambda index: ((10 + index) * GIB, 80 * GIB),
        memory_reserved=lambda index: 3 * GIB,
        memory_allocated=lambda index: 2 * GIB,
    )
    return SimpleNamespace(cuda=cuda, __version__="2.0")


def test_vram_is_what_the_driver_has_free_and_torch_holds_unused(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", fake_torch(2))
    assert free_bytes("cuda:0") == 11 * GIB
    assert free_bytes("cuda") == free_bytes("cuda:1") == 12 * GIB


@pytest.mark.parametrize(("devices", "name"), [(0, "cuda"), (1, "cuda:1")])
def test_a_cuda_device_that_is_not_there_is_refused(monkeypatch, devices, name):
    monkeypatch.setitem(sys.modules, "torch", fake_torch(devices))
    with pytest.raises(InputError, match="is not there"):
        free_bytes(name)


def test_control_groups_of_both_versions_are_found_innermost_first(tmp_path):
    proc, mount = tmp_path / "cgroup", tmp_path / "sys"
    (mount / "a" / "b").mkdir(parents=True)
    (mount / "cpu" / "c").mkdir(parents=True)
    for text, controller, folders in (
        ("0::/a/b\n", "memory", ["a/b", "a", ""]),
        ("4:cpu,cpuacct:/c\n3:cpuset:/c\n2:name=systemd:/a\n", "cpu", ["cpu/c", "cpu"]),
        ("0::/docker/of/the/host\n", "memory", [""]),
        ("0::/../../elsewhere\n", "memory", [""]),
    ):
        proc.write_text(text)
        assert memory.cgroup_folders(controller, proc, mount) == [mount / folder for folder in folders]
    assert memory.cgroup_folders("memory", tmp_path / "absent", mount) == []


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"cpu.max": "150000 100000"}, 1.5),
        ({"cpu.max": "max 100000"}, None),
        ({"cpu.cfs_quota_us": "200000", "cpu.cfs_period_us": "100000"}, 2.0),
        ({"cpu.cfs_quota_us": "-1", "cpu.cfs_period_us": "100000"}, None),
        ({}, None),
    ],
)
def test_quota_of_cores(tmp_path, monkeypatch, files, cores):
    for name, text in files.items():
        (tmp_path / name).write_text(text + "\n")
    monkeypatch.setattr(memory, "cgroup_folders", lambda controller: [tmp_path])
    assert memory.quota_cores() == cores
