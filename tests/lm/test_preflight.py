"""Memory is counted before a model is loaded: the numbers are right, and a refusal carries all of them."""

import sys
from types import SimpleNamespace

import psutil
import pytest

from specnb.errors import InputError, MemoryShortError
from specnb.lm import preflight
from specnb.lm.preflight import free_bytes, kv_bytes, need_bytes, require

MIB, GIB = 1 << 20, 1 << 30


def test_what_does_not_fit_is_refused_with_every_number(monkeypatch):
    assert kv_bytes(30, 3, 64, 2048, 2) == 2 * 30 * 3 * 64 * 2048 * 2  # SmolLM2-135M
    assert need_bytes(GIB) == GIB + 256 * MIB and need_bytes(100 * GIB, 1) == 105 * GIB + 1
    monkeypatch.setattr(preflight, "free_bytes", lambda device: need_bytes(3 * GIB, GIB))
    require(3 * GIB, GIB, name="draft.gguf")
    monkeypatch.setattr(preflight, "free_bytes", lambda device: 4 * GIB)
    with pytest.raises(MemoryShortError) as caught:
        require(3 * GIB, GIB, name="draft.gguf")
    for part in ("draft.gguf", "4.25 GiB", "3.00 GiB", "1.00 GiB", "4.00 GiB"):
        assert part in str(caught.value)


GROUPS = {
    "without a limit": ([{"max": "max", "current": GIB}], 5 * GIB),
    "a soft limit": ([{"max": "max", "high": 2 * GIB, "current": GIB}], GIB),
    "file pages that the kernel drops": (
        [{"max": 4 * GIB, "current": 3 * GIB, "stat": f"anon 7\ninactive_file {2 * GIB}\nactive_file 77"}], 3 * GIB),
    "the tightest of two": ([{"max": 8 * GIB, "current": GIB}, {"max": 4 * GIB, "current": 3 * GIB}], GIB),
    "over its limit": ([{"max": GIB, "current": 2 * GIB}], 0),
}  # fmt: skip


@pytest.mark.parametrize("name", GROUPS)
def test_a_control_group_bounds_free_memory(monkeypatch, tmp_path, name):
    groups, free = GROUPS[name]
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=5 * GIB))
    monkeypatch.setattr(preflight, "cgroup_folders", lambda: [tmp_path / str(i) for i in range(len(groups))])
    for i, files in enumerate(groups):
        (tmp_path / str(i)).mkdir()
        for file, value in files.items():
            (tmp_path / str(i) / f"memory.{file}").write_text(f"{value}\n")
    assert free_bytes("cpu") == free


def test_vram_is_what_the_driver_has_free_and_torch_holds_unused(monkeypatch):
    cuda = SimpleNamespace(
        device_count=lambda: 2, mem_get_info=lambda index: ((10 + index) * GIB, 80 * GIB),
        memory_reserved=lambda index: 3 * GIB, memory_allocated=lambda index: 2 * GIB,
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    assert (free_bytes("cuda:0"), free_bytes("cuda"), free_bytes("cuda:1")) == (11 * GIB, 11 * GIB, 12 * GIB)
    for device in ("cuda:2", "cuda:-1", "tpu", ""):
        with pytest.raises(InputError, match=f"'{device}'"):
            free_bytes(device)


def test_control_groups_are_found_innermost_first(tmp_path):
    proc, mount = tmp_path / "cgroup", tmp_path / "sys"
    (mount / "a" / "b").mkdir(parents=True)
    for text, folders in (
        ("0::/a/b\n", ["a/b", "a", ""]),
        ("4:cpu,cpuacct:/c\n0::/a\n", ["a", ""]),
        ("0::/docker/of/the/host\n", [""]),
        ("0::/../../elsewhere\n", [""]),
    ):
        proc.write_text(text)
        assert preflight.cgroup_folders(proc, mount) == [mount / folder for folder in folders]
    assert preflight.cgroup_folders(tmp_path / "absent", mount) == [mount]
