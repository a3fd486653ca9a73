"""Provenance: JSON-able, without a machine's paths, honest about what is not known; digests that stay true."""

import json
import os
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from specnb import provenance as prov
from specnb.provenance import cgroup_folders, git_state, provenance


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECNB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


# the record


def test_record_is_json_and_names_code_machine_and_time():
    record = provenance(seeds=(1, 2), prompts_digest="d", extra={"temperature": np.float32(0.5)})
    assert json.loads(json.dumps(record, allow_nan=False)) == record
    assert record["packages"]["numpy"] == np.__version__
    assert record["python"] == sys.version.split()[0]
    assert record["seeds"] == [1, 2] and record["extra"] == {"temperature": 0.5}
    assert record["cpu"]["logical_cores"] >= record["cpu"]["usable_cores"] >= 1
    assert record["memory_bytes"] > 1 << 28
    taken = datetime.fromisoformat(record["utc"])
    assert taken.utcoffset().total_seconds() == 0
    assert abs((datetime.now(UTC) - taken).total_seconds()) < 60


def test_record_holds_no_path_and_no_host_name():
    record = json.dumps(provenance(models=[{"id": "/somewhere/private/model.gguf?backend=hf"}]))
    for private in (str(Path(prov.__file__).parents[1]), str(Path.home()), "/somewhere"):
        assert private not in record
    assert '"id": "model.gguf?backend=hf"' in record


def test_what_is_not_known_is_null_and_not_an_error(monkeypatch):
    monkeypatch.setattr(prov, "PACKAGES", ("numpy", "no-such-distribution"))
    monkeypatch.setenv("PATH", "")
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace())  # an import under way has no attributes yet
    record = provenance()
    assert record["packages"] == {"numpy": np.__version__, "no-such-distribution": None}
    assert record["git"] is None and record["torch"] is None and record["gpu"] is None


def test_gpus_are_listed_only_if_torch_is_there(monkeypatch):
    device = SimpleNamespace(name="GPU X", total_memory=8 << 30)
    cuda = SimpleNamespace(is_available=lambda: True, device_count=lambda: 1, get_device_properties=lambda i: device)
    torch = SimpleNamespace(
        cuda=cuda,
        version=SimpleNamespace(cuda="12.8"),
        get_num_threads=lambda: 3,
        get_num_interop_threads=lambda: 1,
        are_deterministic_algorithms_enabled=lambda: False,
        get_float32_matmul_precision=lambda: "highest",
    )
    monkeypatch.setitem(sys.modules, "torch", torch)
    record = provenance()
    assert record["gpu"] == [{"name": "GPU X", "memory_bytes": 8 << 30}]
    assert record["torch"]["threads"] == 3


def test_provenance_imports_no_engine():
    code = (
        "import sys; from specnb.provenance import provenance; provenance(); "
        "sys.exit(bool({'torch', 'transformers', 'llama_cpp', 'numpy', 'pandas'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


# git


def git(folder: Path, *words: str) -> str:
    who = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", "-C", str(folder), *who, *words], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)
    folder = tmp_path / "checkout"
    folder.mkdir()
    git(folder, "init", "-q")
    (folder / "code.py").write_text("a = 1\n")
    git(folder, "add", ".")
    git(folder, "commit", "-qm", "first")
    return folder


def test_git_names_the_commit_and_clean_is_clean(checkout):
    assert git_state(checkout) == {"commit": git(checkout, "rev-parse", "HEAD"), "dirty": False}


def test_a_change_and_an_untracked_file_are_dirty_but_figures_and_results_are_not(checkout):
    for folder in ("figures", "results"):
        (checkout / folder).mkdir()
        (checkout / folder / "new.svg").write_text("x")
    assert git_state(checkout)["dirty"] is False
    (checkout / "new.py").write_text("b = 2\n")
    assert git_state(checkout)["dirty"] is True
    (checkout / "new.py").unlink()
    (checkout / "code.py").write_text("a = 2\n")
    assert git_state(checkout)["dirty"] is True


def test_a_package_inside_another_project_does_not_borrow_its_commit(checkout):
    inner = checkout / "venv" / "specnb"
    inner.mkdir(parents=True)
    assert git_state(inner) is None


def test_a_hook_of_another_repository_does_not_redirect_git(checkout, tmp_path, monkeypatch):
    other = tmp_path / "other"
    other.mkdir()
    git(other, "init", "-q")
    monkeypatch.setenv("GIT_DIR", str(other / ".git"))
    monkeypatch.setenv("GIT_INDEX_FILE", str(other / ".git" / "index"))
    state = git_state(checkout)
    assert state["commit"] is not None and state["dirty"] is False


def test_before_the_first_commit_there_is_no_commit(tmp_path):
    git(tmp_path, "init", "-q")
    assert git_state(tmp_path) == {"commit": None, "dirty": False}


def test_a_git_that_hangs_or_fails_is_not_waited_for(checkout, tmp_path, monkeypatch):
    tools = tmp_path / "tools"
    tools.mkdir()
    fake = tools / "git"
    monkeypatch.setenv("PATH", str(tools), prepend=os.pathsep)
    for script in ("#!/bin/sh\nexec sleep 30\n", "#!/bin/sh\nexit 128\n"):
        fake.write_text(script)
        fake.chmod(0o755)
        start = time.monotonic()
        assert git_state(checkout, timeout_s=0.3) is None
        assert time.monotonic() - start < 10


# the machine


def test_cpu_name_and_flags_come_from_the_first_core(tmp_path):
    file = tmp_path / "cpuinfo"
    file.write_text(
        "processor\t: 0\nmodel name\t: Chip X\nflags\t\t: fpu avx2 amx_bf16\n\nprocessor\t: 1\nflags\t: no\n"
    )
    assert prov._cpuinfo(file) == ("Chip X", {"fpu", "avx2", "amx_bf16"})
    file.write_text("processor\t: 0\nFeatures\t: asimd bf16\n")
    assert prov._cpuinfo(file) == (None, {"asimd", "bf16"})
    assert prov._cpuinfo(tmp_path / "absent") == (None, frozenset())


def test_control_groups_of_both_versions_are_found_innermost_first(tmp_path):
    proc, mount = tmp_path / "cgroup", tmp_path / "sys"
    (mount / "a" / "b").mkdir(parents=True)
    proc.write_text("0::/a/b\n")
    assert cgroup_folders("memory", proc, mount) == [mount / "a" / "b", mount / "a", mount]
    (mount / "cpu,cpuacct" / "c").mkdir(parents=True)
    proc.write_text("4:cpu,cpuacct:/c\n3:cpuset:/c\n2:name=systemd:/a\n")
    assert cgroup_folders("cpu", proc, mount) == [mount / "cpu,cpuacct" / "c", mount / "cpu,cpuacct"]


def test_a_path_of_the_host_falls_back_to_the_top_of_the_mount(tmp_path):
    proc, mount = tmp_path / "cgroup", tmp_path / "sys"
    mount.mkdir()
    for text in ("0::/docker/0123/x\n", "0::/../../elsewhere\n", "0::/\n"):
        proc.write_text(text)
        assert cgroup_folders("memory", proc, mount) == [mount]
    assert cgroup_folders("memory", tmp_path / "absent", mount) == []


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"cpu.max": "150000 100000"}, 1.5),
        ({"cpu.max": "max 100000"}, None),
        ({"cpu.cfs_quota_us": "200000", "cpu.cfs_period_us": "100000"}, 2.0),
        ({"cpu.cfs_quota_us": "-1", "cpu.cfs_period_us": "100000"}, None),
        ({"cpu.max": "garbage"}, None),
        ({}, None),
    ],
)
def test_quota_of_cores(tmp_path, monkeypatch, files, cores):
    for name, text in files.items():
        (tmp_path / name).write_text(text + "\n")
    monkeypatch.setattr(prov, "cgroup_folders", lambda controller: [tmp_path])
    assert prov.quota_cores() == cores
