"""Provenance: JSON-able, without a machine's paths, honest about what is not known."""

import json
import os
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from specnb import provenance as prov
from specnb.provenance import git_state, provenance


def test_record_is_json_and_names_code_machine_and_time_but_no_path():
    models = [{"id": "/somewhere/private/model.gguf?backend=hf"}, {"id": "hf:org/name"}]
    record = provenance(seeds=(1, 2), models=models, prompts_digest="d", extra={"temperature": np.float32(0.5)})
    text = json.dumps(record, allow_nan=False)
    assert json.loads(text) == record
    assert (record["packages"]["numpy"], record["python"]) == (np.__version__, sys.version.split()[0])
    assert (record["seeds"], record["extra"], record["prompts_digest"]) == ([1, 2], {"temperature": 0.5}, "d")
    assert record["cpu"]["logical_cores"] >= record["cpu"]["usable_cores"] >= 1 and record["memory_bytes"] > 1 << 28
    assert abs((datetime.now(UTC) - datetime.fromisoformat(record["utc"])).total_seconds()) < 60
    assert record["models"] == [{"id": "model.gguf?backend=hf"}, {"id": "hf:org/name"}]
    assert not [path for path in (str(Path(prov.__file__).parents[1]), str(Path.home()), "/somewhere") if path in text]


def test_unknown_facts_are_null_and_no_error(monkeypatch):
    monkeypatch.setattr(prov.metadata, "requires", lambda _: ["numpy<3,>=2", "no-such_one>=1", 'x; extra == "lab"'])
    monkeypatch.setenv("PATH", "")
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace())  # an import under way has no attributes yet
    record = provenance()
    assert record["packages"] == {"numpy": np.__version__, "no-such_one": None}
    assert record["git"] is None and record["torch"] is None and record["gpu"] is None


def test_gpus_are_listed_where_torch_sees_some(monkeypatch):
    import torch

    device = SimpleNamespace(name="GPU X", total_memory=8 << 30)
    cuda = {"is_available": lambda: True, "device_count": lambda: 1, "get_device_properties": lambda index: device}
    for name, function in cuda.items():
        monkeypatch.setattr(torch.cuda, name, function)
    record = provenance()
    assert record["gpu"] == [{"name": "GPU X", "memory_bytes": 8 << 30}]
    assert record["torch"]["threads"] == torch.get_num_threads()


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
    assert git_state(folder) == {"commit": None, "dirty": False}
    (folder / "code.py").write_text("a = 1\n")
    git(folder, "add", ".")
    git(folder, "commit", "-qm", "first")
    return folder


def test_git_names_the_commit_and_whether_anything_but_figures_and_results_changed(checkout):
    for folder in ("figures", "results"):
        (checkout / folder).mkdir()
        (checkout / folder / "new.svg").write_text("x")
    assert git_state(checkout) == {"commit": git(checkout, "rev-parse", "HEAD"), "dirty": False}
    for name in ("new.py", "code.py"):
        (checkout / name).write_text("b = 2\n")
        assert git_state(checkout)["dirty"] is True
        git(checkout, "stash", "-u", "-q")


def test_the_commit_of_another_project_is_not_borrowed(checkout, tmp_path, monkeypatch):
    """A package installed inside a project, and a git hook, which exports the folders of its own repository."""
    assert git_state(tmp_path) is None
    git(tmp_path, "init", "-q", "other")
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "other" / ".git"))
    monkeypatch.setenv("GIT_INDEX_FILE", str(tmp_path / "other" / ".git" / "index"))
    state = git_state(checkout)
    assert state["commit"] is not None and state["dirty"] is False


def test_cpu_name_and_flags_come_from_the_first_core(tmp_path):
    two = "model name\t: Chip X\nflags\t\t: fpu avx2\n\nprocessor\t: 1\nflags\t: no\n"
    for text, facts in {
        two: ("Chip X", {"fpu", "avx2"}), "processor: 0\nFeatures\t: bf16\n": (None, {"bf16"}), "": (None, set()),
    }.items():  # fmt: skip
        (tmp_path / "cpuinfo").write_text(text)
        assert prov.cpuinfo(tmp_path / "cpuinfo") == facts
