"""Provenance: JSON without local paths; unknown facts are None."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from specnb import provenance as prov
from specnb.provenance import git_state, provenance


def test_provenance_is_json_with_code_machine_and_time_but_without_paths():
    models = [{"id": "/somewhere/private/model.gguf?backend=hf"}, {"id": "hf:org/name"}]
    record = provenance(
        seeds=(1, 2), models=models, prompts_digest="d", extra={"temperature": np.float32(0.5)}
    )
    text = json.dumps(record, allow_nan=False)
    assert json.loads(text) == record and record["packages"]["numpy"] == np.__version__
    assert record["seeds"] == [1, 2] and record["extra"] == {"temperature": 0.5}
    assert record["cpu"]["usable_cores"] >= 1 and record["memory_bytes"] > 1 << 28
    assert record["models"] == [{"id": "model.gguf?backend=hf"}, {"id": "hf:org/name"}]
    for path in (str(Path(prov.__file__).parents[1]), str(Path.home()), "/somewhere"):
        assert path not in text


def test_unknown_facts_are_null(monkeypatch):
    monkeypatch.setattr(
        prov.metadata, "requires", lambda _: ["numpy<3,>=2", "no-such_one>=1", 'x; extra == "lab"']
    )
    monkeypatch.setenv("PATH", "")
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace())  # during its import
    record = provenance()
    assert record["packages"] == {"numpy": np.__version__, "no-such_one": None}
    assert record["git"] is None and record["torch"] is None and record["gpu"] is None


def git(folder: Path, *words: str) -> str:
    who = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false"]
    done = subprocess.run(
        ["git", "-C", str(folder), *who, *words], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_git_state_has_commit_and_changes_outside_figures_and_results(tmp_path):
    for folder in ("figures", "results"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "new.svg").write_text("x")
    assert git_state(tmp_path) is None
    git(tmp_path, "init", "-q")
    assert git_state(tmp_path) == {"commit": None, "dirty": False}
    (tmp_path / "code.py").write_text("a = 1\n")
    git(tmp_path, "add", "code.py")
    git(tmp_path, "commit", "-qm", "first")
    state = {"commit": git(tmp_path, "rev-parse", "HEAD"), "dirty": False}
    assert git_state(tmp_path) == state and git_state(tmp_path / "figures") is None
    for name in ("new.py", "code.py"):
        (tmp_path / name).write_text("b = 2\n")
        assert git_state(tmp_path) == state | {"dirty": True}
        git(tmp_path, "stash", "-u", "-q")
