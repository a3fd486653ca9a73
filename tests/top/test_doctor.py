"""The doctor: every prerequisite is looked at, a missing one names its fix, and nothing that breaks stops it."""

import json
import shlex
import shutil
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from jupyter_client.kernelspec import KernelSpecManager, NoSuchKernel

from specnb import doctor
from specnb.doctor import Finding, all_ok, check_decode, check_packages, diagnose, guarded, read_probe
from specnb.errors import FetchError, LoadError
from specnb.lm import probe

REBUILD = (
    "pip install --no-cache-dir --force-reinstall --no-deps llama-cpp-python==0.3.36 "
    '--config-settings="cmake.define.GGML_NATIVE=OFF"'
)


def python(code: str) -> list[str]:
    return [sys.executable, "-S", "-c", code]


# one token, in a process of its own


@pytest.mark.parametrize(
    ("code", "ok", "detail", "fix"),
    [
        ("""print('log line'); print('{"ok": true, "argmax": 42}')""", True, "42", ""),
        ("import os, signal; os.kill(os.getpid(), signal.SIGILL)", False, "SIGILL", REBUILD),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", False, "memory", "memory"),
        ("import os; os.write(2, b'GGML_ASSERT(x) failed'); os.abort()", False, "GGML_ASSERT(x)", REBUILD),
        ("import time; time.sleep(60)", False, "1 s", REBUILD),
        ("""print('{"ok": true, "argmax": 42}'); raise SystemExit(3)""", False, "exit code 3", "pip install"),
        ("raise RuntimeError('no such library')", False, "no such library", "pip install"),
    ],
)
def test_how_the_probe_ends_says_what_is_wrong_and_what_to_do(code, ok, detail, fix):
    finding = check_decode(python(code), timeout_s=60 if "sleep" not in code else 1)
    assert finding.ok is ok and detail in finding.detail and fix in finding.fix and bool(finding.fix) is not ok


@pytest.mark.parametrize(
    ("code", "stdout", "detail"),
    [
        (1, b'{"ok": false, "error": "not a GGUF"}', "not a GGUF"),
        (0, b'{"ok": "yes", "argmax": 42}', "no answer"),
        (0, b"hello", "no answer"),
        (0, b"", "no answer"),
        (0, b"[1]", "no answer"),
        (0xC000001D, b"", "0xc000001d"),
    ],
)
def test_any_other_answer_is_a_failure_that_says_why(code, stdout, detail):
    finding = read_probe("decode", code, stdout, b"")
    assert finding.ok is False and detail in finding.detail and finding.fix


def test_the_rebuild_command_is_one_that_a_shell_splits_as_meant():
    words = shlex.split(doctor.REBUILD)
    assert words[-2:] == ["llama-cpp-python==0.3.36", "--config-settings=cmake.define.GGML_NATIVE=OFF"]


def test_a_model_that_cannot_be_fetched_is_a_finding_with_the_message(monkeypatch):
    def offline(name):
        raise FetchError(f"{name}: no network")

    monkeypatch.setattr("specnb.lm.zoo.path", offline)
    finding = check_decode()
    assert finding.ok is False and finding.detail == "smollm2-135m: no network"
    assert "specnb models fetch smollm2-135m" in finding.fix


@pytest.mark.model
def test_the_real_model_decodes():
    finding = check_decode()
    assert finding.ok is True, finding


# the probe


@pytest.mark.parametrize(
    ("logits", "answer"),
    [
        ([[0.0, 3.0, 1.0]], {"ok": True, "argmax": 1}),
        ([[0.0, np.nan, 1.0]], "not finite"),
        (LoadError("not a GGUF file"), "not a GGUF file"),
    ],
)
def test_the_probe_decodes_token_1_and_writes_the_likeliest_next(monkeypatch, capsys, logits, answer):
    def forward(ids, n_logits):
        assert (list(ids), n_logits) == ([1], 1)
        if isinstance(logits, Exception):
            raise logits
        return np.array(logits, dtype=np.float32)

    def open_model(path, *, n_ctx):
        assert (path, n_ctx) == ("m.gguf", 64)
        return SimpleNamespace(forward=forward)

    monkeypatch.setitem(
        sys.modules, "specnb.lm.gguf.model", SimpleNamespace(GgufModel=SimpleNamespace(open=open_model))
    )
    code, written = probe.main("m.gguf"), json.loads(capsys.readouterr().out)
    assert (code, written) == (0, answer) if isinstance(answer, dict) else (code == 1 and answer in written["error"])


# the other prerequisites


def test_packages_are_judged_by_their_ranges(monkeypatch):
    installed = {"torch": "2.13.0+cpu", "numpy": "1.26.4", "rc": "2.1rc1"}

    def version(name):
        if name not in installed:
            raise metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(metadata, "version", version)
    requires = [
        "torch<3,>=2.6",
        "numpy<3,>=2",
        "absent>=1",
        "rc>=2",
        'lab>=4; extra == "lab"',
        'win>=1; os_name == "x"',
    ]
    found = {f.name.removeprefix("package "): f for f in check_packages(requires)}
    assert found["torch"] == Finding("package torch", True, "2.13.0+cpu (needs <3,>=2.6)", "")
    assert {name: f.ok for name, f in found.items()} == {
        "torch": True, "numpy": False, "absent": False, "rc": True, "lab": None,
    }  # fmt: skip
    assert "1.26.4" in found["numpy"].detail and "requirements.txt" in found["numpy"].fix


def test_the_ranges_are_those_of_the_project():
    names = {f.name for f in check_packages()}
    assert {"package torch", "package llama-cpp-python", "package papermill", "package jupyterlab"} <= names


@pytest.mark.parametrize(("version", "ok"), [("3.11.0", True), ("3.10.14", False)])
def test_python_is_judged_by_what_the_package_requires(version, ok):
    finding = doctor.check_python(version)
    assert finding.ok is ok and (finding.fix == "") is ok


def test_a_missing_compiler_only_warns(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert doctor.check_compiler().ok is None
    monkeypatch.setenv("CXX", "my-c++")
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}")
    assert doctor.check_compiler().detail == "/bin/my-c++"


@pytest.mark.parametrize(("flags", "hint"), [(["amx_bf16"], "in hardware (amx_bf16)"), (["avx2"], "take float32")])
def test_torch_computes_and_says_whether_bfloat16_is_in_the_cpu(monkeypatch, flags, hint):
    monkeypatch.setattr(doctor, "cpu_facts", lambda: {"isa": flags})
    finding = doctor.check_torch()
    assert finding.ok is True and hint in finding.detail


def test_a_torch_that_miscomputes_is_found(monkeypatch):
    import torch

    right = torch.Tensor.__matmul__
    monkeypatch.setattr(torch.Tensor, "__matmul__", lambda a, b: right(a, b) + (a.dtype == torch.bfloat16))
    finding = doctor.check_torch()
    assert finding.ok is False and "bfloat16" in finding.detail and "float32" not in finding.detail


@pytest.mark.parametrize(("program", "ok"), [("python", True), ("/other/env/bin/python", None), (None, False)])
def test_the_kernel_has_to_start_this_environment(monkeypatch, tmp_path, program, ok):
    monkeypatch.setattr("jupyter_client.kernelspec.jupyter_path", lambda *parts: [str(tmp_path)])
    if program is None:

        def nothing(self, name):
            raise NoSuchKernel(name)

        monkeypatch.setattr(KernelSpecManager, "get_kernel_spec", nothing)
    else:
        (tmp_path / "python3").mkdir()
        spec = {"argv": [program, "-m", "x"], "display_name": "p", "language": "python"}
        (tmp_path / "python3" / "kernel.json").write_text(json.dumps(spec))
    finding = doctor.check_kernel()
    assert finding.ok is ok and (ok or "ipykernel install" in finding.fix)
    assert program in (None, "python") or program in finding.detail


@pytest.mark.parametrize(("path", "ok"), [(__file__, True), (None, None), ("/no/such/chrome", None)])
def test_a_browser_is_a_file_or_a_warning(monkeypatch, path, ok):
    monkeypatch.setattr("choreographer.browsers.chromium.Chromium.find_browser", lambda **_: path)
    finding = doctor.check_browser()
    assert finding.ok is ok and (path or "BROWSER_PATH") in finding.detail


@pytest.mark.parametrize(("room", "ok"), [(3 << 30, True), ((2 << 30) - 1, False)])
def test_memory_and_disk_have_a_floor_and_disk_is_measured_where_the_cache_will_be(monkeypatch, tmp_path, room, ok):
    asked: list[Path] = []
    monkeypatch.setenv("SPECNB_CACHE", str(tmp_path / "not" / "yet"))
    monkeypatch.setattr(doctor, "free_bytes", lambda: room)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: asked.append(folder) or SimpleNamespace(free=room))
    assert doctor.check_memory().ok is ok and doctor.check_disk().ok is ok and asked == [tmp_path]


def test_a_cache_folder_is_written_to_and_left_empty(monkeypatch, tmp_path):
    monkeypatch.setenv("SPECNB_CACHE", str(tmp_path / "cache"))
    assert doctor.check_cache().ok is True
    assert list((tmp_path / "cache").iterdir()) == []
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SPECNB_CACHE", str(tmp_path / "file" / "cache"))
    finding = doctor.check_cache()
    assert finding.ok is False and "SPECNB_CACHE" in finding.fix


# together


def test_a_check_that_breaks_is_a_finding():
    def check_half_done():
        yield Finding("first", True, "", "")
        raise OSError("disk on fire")

    (broken,) = guarded(check_half_done)
    assert broken.name == "half done" and broken.ok is False and "disk on fire" in broken.detail


def test_every_problem_has_a_fix_and_decoding_can_be_left_out(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "check_decode", lambda: Finding("llama.cpp decodes", True, "", ""))
    findings = diagnose()
    assert all(finding.fix for finding in findings if finding.ok is not True)
    assert [f for f in findings if f.name == "llama.cpp decodes"]
    assert not [f for f in diagnose(decode=False) if f.name == "llama.cpp decodes"]
    assert capsys.readouterr().out == ""


def test_warnings_do_not_spoil_the_whole_but_one_failure_does():
    good, warning, bad = (Finding("x", ok, "", "") for ok in (True, None, False))
    assert all_ok([good, warning]) and all_ok([]) and not all_ok([good, warning, bad])
