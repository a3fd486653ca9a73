"""Provenance: JSON-able, without a machine's paths, honest about what is not known; digests that stay true."""

import enum
import hashlib
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
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from specnb import provenance as prov
from specnb.errors import InputError
from specnb.provenance import (
    canonical_json,
    cgroup_folders,
    file_digest,
    git_state,
    json_digest,
    model_facts,
    provenance,
)

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


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


@pytest.mark.parametrize("entry", ["smollm2", {"name": "x"}, {"id": 7}])
def test_a_model_entry_without_an_id_is_refused(entry):
    with pytest.raises(InputError, match="id"):
        provenance(models=[entry])


def test_model_facts_carry_size_and_digest(tmp_path):
    weights = tmp_path / "m.gguf"
    weights.write_bytes(b"GGUF")
    facts = model_facts("m", weights, dtype="f16")
    expected = {"id": "m", "sha256": hashlib.sha256(b"GGUF").hexdigest(), "file_bytes": 4, "dtype": "f16"}
    assert facts == expected
    assert provenance(models=[facts])["models"] == [expected]


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


# canonical JSON


@given(json_values)
def test_canonical_json_reads_back_as_the_same_value(value):
    assert json.loads(canonical_json(value)) == value
    assert canonical_json(value).isascii()


@given(st.dictionaries(st.text(), st.integers(), max_size=6), st.randoms())
def test_order_of_keys_does_not_change_the_digest(mapping, random):
    items = list(mapping.items())
    random.shuffle(items)
    assert json_digest(dict(items)) == json_digest(mapping)


class Colour(enum.StrEnum):
    RED = "red"


class OldColour(str, enum.Enum):  # noqa: UP042 - libraries still use this form, whose str() is not its value
    RED = "red"


class Params(BaseModel):
    k: int = 4


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (np.int64(3), 3),
        (np.float32(0.5), 0.5),
        (np.float64(0.1), 0.1),
        (np.bool_(True), True),
        (np.str_("a"), "a"),
        ((1, (2,)), [1, [2]]),
        ({4: "k"}, {"4": "k"}),
        (Colour.RED, "red"),
        (OldColour.RED, "red"),
        (Params(), {"k": 4}),
        (datetime(2026, 1, 2, tzinfo=UTC), "2026-01-02T00:00:00+00:00"),
    ],
)
def test_values_of_a_record_have_one_plain_form(value, plain):
    assert canonical_json(value) == canonical_json(plain) == json.dumps(plain, separators=(",", ":"))


@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        ({"a": [1, float("nan")]}, r"value\.a\[1\] is nan"),
        (float("inf"), "is inf"),
        (np.float32("nan"), "is nan"),
        ({"p": Path("x")}, r"value\.p is a PosixPath"),
        ({1, 2}, "is a set"),
        (b"x", "is a bytes"),
        (np.zeros(2), "is a ndarray"),
        ({(1, 2): 3}, "key"),
        ({True: 3}, "key"),
        ({1: "a", "1": "b"}, "two keys"),
    ],
)
def test_what_json_cannot_hold_is_refused_with_its_place(value, complaint):
    with pytest.raises(InputError, match=complaint):
        canonical_json(value)


# digests of files


def settled(file: Path, data: bytes, mtime: int = 1_600_000_000) -> Path:
    """A file that was written long ago: its digest may be remembered."""
    file.write_bytes(data)
    os.utime(file, (mtime, mtime))
    return file


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@given(st.binary(max_size=3000))
def test_digest_is_the_sha256_of_the_bytes(tmp_path_factory, data):
    file = tmp_path_factory.mktemp("digest") / "f"
    file.write_bytes(data)
    assert file_digest(file) == sha256(data)


def test_a_settled_file_is_hashed_once(tmp_path, monkeypatch):
    file = settled(tmp_path / "w", b"one")
    assert file_digest(file) == sha256(b"one")
    monkeypatch.setattr(hashlib, "file_digest", None)  # hashing again would fail
    assert file_digest(str(file)) == sha256(b"one")
    (tmp_path / "link").symlink_to(file)
    assert file_digest(tmp_path / "link") == sha256(b"one")


def test_another_size_or_time_is_another_file(tmp_path):
    file = tmp_path / "w"
    assert file_digest(settled(file, b"one")) == sha256(b"one")
    assert file_digest(settled(file, b"three")) == sha256(b"three")
    assert file_digest(settled(file, b"seven", mtime=1_600_000_001)) == sha256(b"seven")


def test_a_file_just_written_is_not_remembered(tmp_path):
    """Two writes within the grain of the time stamp look alike; only hashing tells them apart."""
    file = tmp_path / "w"
    now = time.time_ns()
    for data in (b"one", b"two"):
        file.write_bytes(data)
        os.utime(file, ns=(now, now))
        assert file_digest(file) == sha256(data)


@pytest.mark.parametrize(
    "garbage",
    [b"", b"{", b"[1]", b"null", b"\xff\xfe", b"[" * 100_000, b'{"x": 1}', b'{"x": [1, 2, 3]}'],
)
def test_a_corrupt_cache_is_ignored_and_replaced(tmp_path, own_cache, garbage):
    own_cache.mkdir()
    (own_cache / "digests.json").write_bytes(garbage)
    file = settled(tmp_path / "w", b"one")
    assert file_digest(file) == sha256(b"one")
    assert json.loads((own_cache / "digests.json").read_bytes()) == {
        str(file): [3, 1_600_000_000 * 10**9, sha256(b"one")]
    }


def test_an_entry_that_is_no_digest_is_not_believed(tmp_path, own_cache):
    file = settled(tmp_path / "w", b"one")
    own_cache.mkdir()
    for lie in ("abc", 10**63, None, "Z" * 64):
        (own_cache / "digests.json").write_text(json.dumps({str(file): [3, 1_600_000_000 * 10**9, lie]}))
        assert file_digest(file) == sha256(b"one")


def test_a_huge_cache_is_not_read(tmp_path, own_cache, monkeypatch):
    monkeypatch.setattr(prov, "MAX_CACHE_BYTES", 10)
    file = settled(tmp_path / "w", b"one")
    own_cache.mkdir()
    (own_cache / "digests.json").write_text(json.dumps({str(file): [3, 1_600_000_000 * 10**9, "0" * 64]}))
    assert file_digest(file) == sha256(b"one")


def test_entries_of_other_files_stay(tmp_path, own_cache):
    for name in ("a", "b"):
        file_digest(settled(tmp_path / name, name.encode()))
    assert set(json.loads((own_cache / "digests.json").read_bytes())) == {str(tmp_path / "a"), str(tmp_path / "b")}
    assert [file.name for file in own_cache.iterdir()] == ["digests.json"], "no temporary file is left"


def test_the_cache_is_replaced_in_one_step(tmp_path, own_cache, monkeypatch):
    cache = own_cache / "digests.json"
    file_digest(settled(tmp_path / "a", b"a"))
    node = cache.stat().st_ino
    file_digest(settled(tmp_path / "b", b"b"))
    assert cache.stat().st_ino != node, "a reader never sees a file that is being written"
    before = cache.read_bytes()

    def full(entries, stream, **options):
        stream.write("{")
        raise OSError("no space left")

    monkeypatch.setattr(json, "dump", full)
    assert file_digest(settled(tmp_path / "c", b"c")) == sha256(b"c")
    assert cache.read_bytes() == before
    assert [file.name for file in own_cache.iterdir()] == ["digests.json"]


def test_a_cache_that_cannot_be_written_costs_nothing_but_time(tmp_path, monkeypatch):
    (tmp_path / "blocked").write_text("a file where the folder should be")
    monkeypatch.setenv("SPECNB_CACHE", str(tmp_path / "blocked" / "cache"))
    assert file_digest(settled(tmp_path / "w", b"one")) == sha256(b"one")


def test_what_is_no_readable_file_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for bad in (tmp_path / "absent", tmp_path, tmp_path / "pipe", "nul\0byte"):
        with pytest.raises(InputError, match="cannot read"):
            file_digest(bad)
