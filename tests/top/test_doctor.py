"""The doctor: every prerequisite is looked at, a missing one names its fix, and nothing that breaks stops it."""

import json
import shlex
import signal
import sys
from importlib import metadata
from types import SimpleNamespace

import numpy as np
import pytest

from specnb import doctor
from specnb.doctor import Finding, all_ok, check_decode, check_packages, diagnose, guarded, read_probe
from specnb.errors import FetchError, LoadError
from specnb.lm import probe

REBUILD = (
    "pip install --no-cache-dir --force-reinstall --no-deps llama-cpp-python==0.3.36 "
    '--config-settings="cmake.define.GGML_NATIVE=OFF"'
)


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


# one token, in a process of its own


@pytest.mark.parametrize("name", ["SIGSEGV", "SIGILL", "SIGBUS"])
def test_a_build_that_crashes_on_this_cpu_is_named_with_the_command_that_rebuilds_it(name):
    finding = check_decode(python(f"import os, signal; os.kill(os.getpid(), signal.{name})"))
    assert finding.ok is False
    assert name in finding.detail
    assert REBUILD in finding.fix
    assert "AMX with GCC 12" in finding.fix


def test_the_rebuild_command_is_one_that_a_shell_splits_as_meant():
    words = shlex.split(doctor.REBUILD)
    assert words[-2:] == ["llama-cpp-python==0.3.36", "--config-settings=cmake.define.GGML_NATIVE=OFF"]


def test_a_decode_that_hangs_is_given_up():
    finding = check_decode(python("import time; time.sleep(60)"), timeout_s=0.5)
    assert finding.ok is False
    assert "0.5 s" in finding.detail and REBUILD in finding.fix


def test_a_decode_that_answers_is_ok():
    finding = check_decode(python("""print('log line'); print('{"ok": true, "argmax": 42}')"""))
    assert finding == Finding("llama.cpp decodes", True, "token 42 follows token 1", "")


@pytest.mark.parametrize(
    ("code", "detail"),
    [
        ("""print('{"ok": false, "error": "not a GGUF"}'); raise SystemExit(1)""", "not a GGUF"),
        ("""print('{"ok": true, "argmax": 42}'); raise SystemExit(3)""", "exit code 3"),
        ("raise RuntimeError('no such library')", "no such library"),
        ("print('{\"ok\": true}')", "no answer"),
        ("""print('{"ok": "yes", "argmax": 42}')""", "no answer"),
        ("print('hello')", "no answer"),
        ("pass", "no answer"),
        ("print('[1]')", "no answer"),
    ],
)
def test_any_other_answer_is_a_failure_that_says_why(code, detail):
    finding = check_decode(python(code))
    assert finding.ok is False
    assert detail in finding.detail
    assert finding.fix


def test_a_kill_from_outside_speaks_of_memory_and_an_abort_of_its_last_words():
    killed = check_decode(python("import os, signal; os.kill(os.getpid(), signal.SIGKILL)"))
    assert killed.ok is False and "memory" in killed.detail and "memory" in killed.fix
    aborted = check_decode(
        python("import os, sys; sys.stderr.write('GGML_ASSERT(x) failed\\n'); sys.stderr.flush(); os.abort()")
    )
    assert aborted.ok is False and "SIGABRT" in aborted.detail and "GGML_ASSERT(x)" in aborted.detail


def test_a_crash_code_of_windows_is_a_crash():
    finding = read_probe("decode", 0xC000001D, b"", b"")
    assert finding.ok is False and "0xc000001d" in finding.detail and REBUILD in finding.fix


def test_a_program_that_does_not_start_is_a_finding():
    finding = check_decode(["/no/such/program"])
    assert finding.ok is False and "/no/such/program" in finding.detail


def test_a_model_that_cannot_be_fetched_is_a_finding_with_the_message(monkeypatch):
    def offline(name):
        raise FetchError(f"{name}: no network")

    monkeypatch.setitem(sys.modules, "specnb.lm.zoo", SimpleNamespace(path=offline))
    monkeypatch.setattr("specnb.lm.zoo", SimpleNamespace(path=offline), raising=False)
    finding = check_decode()
    assert finding.ok is False
    assert finding.detail == "smollm2-135m: no network"
    assert "specnb models fetch smollm2-135m" in finding.fix


def test_the_real_command_runs_the_probe_on_the_embedded_model(monkeypatch):
    monkeypatch.setattr("specnb.lm.zoo", SimpleNamespace(path=lambda name: f"/cache/{name}.gguf"), raising=False)
    assert doctor._probe_command() == [sys.executable, "-m", "specnb.lm.probe", "/cache/smollm2-135m.gguf"]


@pytest.mark.model
def test_the_real_model_decodes():
    finding = check_decode()
    assert finding.ok is True, finding


# the probe


def fake_engine(monkeypatch, forward, opened=None):
    """Put a model with the given `forward` in place of llama.cpp."""

    def open_model(path, *, n_ctx):
        if opened is not None:
            opened.append((path, n_ctx))
        return SimpleNamespace(forward=forward)

    monkeypatch.setitem(sys.modules, "specnb.lm.gguf", SimpleNamespace(GgufModel=SimpleNamespace(open=open_model)))


def test_probe_decodes_token_1_and_writes_the_likeliest_next(monkeypatch, capsys):
    calls, opened = [], []

    def forward(ids, n_logits):
        calls.append((list(ids), n_logits))
        return np.array([[0.0, 3.0, 1.0]], dtype=np.float32)

    fake_engine(monkeypatch, forward, opened)
    assert probe.main("m.gguf") == 0
    assert json.loads(capsys.readouterr().out) == {"ok": True, "argmax": 1}
    assert calls == [([1], 1)] and opened == [("m.gguf", 64)]


def test_probe_does_not_call_garbage_a_token(monkeypatch, capsys):
    fake_engine(monkeypatch, lambda ids, n_logits: np.array([[0.0, np.nan, 1.0]]))
    assert probe.main("m.gguf") == 1
    answer = json.loads(capsys.readouterr().out)
    assert answer["ok"] is False and "not finite" in answer["error"]


def test_probe_reports_an_error_on_purpose_as_json(monkeypatch, capsys):
    def refuse(ids, n_logits):
        raise LoadError("not a GGUF file")

    fake_engine(monkeypatch, refuse)
    assert probe.main("m.gguf") == 1
    assert json.loads(capsys.readouterr().out) == {"ok": False, "error": "not a GGUF file"}


# packages


def versions(**installed: str):
    def version_of(name: str) -> str:
        if name not in installed:
            raise metadata.PackageNotFoundError(name)
        return installed[name]

    return version_of


def test_packages_are_judged_by_their_ranges():
    requires = ["torch<3,>=2.6", "numpy<3,>=2", "absent>=1", 'lab>=4; extra == "lab"', 'win>=1; sys_platform == "none"']
    found = {f.name: f for f in check_packages(requires, versions(torch="2.13.0+cpu", numpy="1.26.4"))}
    assert found["package torch"] == Finding("package torch", True, "2.13.0+cpu (needs <3,>=2.6)", "")
    assert found["package numpy"].ok is False and "1.26.4" in found["package numpy"].detail
    assert found["package absent"].ok is False and "not installed" in found["package absent"].detail
    assert found["package lab"].ok is None, "an extra only warns"
    assert "package win" not in found
    assert all("requirements.txt" in f.fix for f in found.values() if f.ok is not True)


def test_a_release_candidate_counts_and_an_unreadable_version_hides_no_other():
    found = list(check_packages(["a>=2", "b>=1", "c>=1"], versions(a="2.1rc1", b="not-a-version", c="1.0")))
    assert [f.ok for f in found] == [True, False, True]


def test_the_ranges_are_those_of_the_project():
    names = {f.name for f in check_packages()}
    assert {"package torch", "package llama-cpp-python", "package papermill", "package jupyterlab"} <= names


# the other prerequisites


@pytest.mark.parametrize(("version", "ok"), [("3.11.0", True), ("3.13.1", True), ("3.10.14", False)])
def test_python_is_judged_by_what_the_package_requires(version, ok):
    finding = doctor.check_python(version)
    assert finding.ok is ok and (finding.fix == "") is ok


def test_a_missing_compiler_only_warns(monkeypatch):
    assert doctor.check_compiler(which=lambda name: None).ok is None
    assert doctor.check_compiler(which=lambda name: f"/bin/{name}" if name == "g++" else None).detail == "/bin/g++"
    monkeypatch.setenv("CXX", "my-c++")
    assert doctor.check_compiler(which=lambda name: f"/bin/{name}").detail == "/bin/my-c++"


def test_torch_computes_here():
    assert doctor.check_torch().ok is True


def test_a_torch_that_miscomputes_is_found(monkeypatch):
    import torch

    right = torch.Tensor.__matmul__

    def wrong(a, b):
        return right(a, b) + (1 if a.dtype == torch.bfloat16 else 0)

    monkeypatch.setattr(torch.Tensor, "__matmul__", wrong)
    finding = doctor.check_torch()
    assert finding.ok is False and "bfloat16" in finding.detail and "float32" not in finding.detail


@pytest.mark.parametrize(("flags", "hint"), [(["amx_bf16"], "in hardware (amx_bf16)"), (["avx2"], "take float32")])
def test_torch_tells_whether_bfloat16_is_in_the_cpu(monkeypatch, flags, hint):
    monkeypatch.setattr(doctor, "cpu_facts", lambda: {"isa": flags})
    assert hint in doctor.check_torch().detail


def kernels(monkeypatch, tmp_path, program):
    folder = tmp_path / "kernels" / "python3"
    folder.mkdir(parents=True)
    spec = {
        "argv": [program, "-m", "ipykernel_launcher", "-f", "{connection_file}"],
        "display_name": "p",
        "language": "python",
    }
    (folder / "kernel.json").write_text(json.dumps(spec))
    monkeypatch.setattr("jupyter_client.kernelspec.jupyter_path", lambda *parts: [str(tmp_path / "kernels")])


def test_the_kernel_has_to_start_this_environment(monkeypatch, tmp_path):
    kernels(monkeypatch, tmp_path, "python")
    assert doctor.check_kernel().ok is True


def test_a_kernel_of_another_environment_is_found(monkeypatch, tmp_path):
    kernels(monkeypatch, tmp_path, "/other/env/bin/python")
    finding = doctor.check_kernel()
    assert finding.ok is None and "/other/env/bin/python" in finding.detail and "ipykernel install" in finding.fix


def test_no_kernel_is_found_missing(monkeypatch):
    from jupyter_client.kernelspec import KernelSpecManager, NoSuchKernel

    def nothing(self, name):
        raise NoSuchKernel(name)

    monkeypatch.setattr(KernelSpecManager, "get_kernel_spec", nothing)
    finding = doctor.check_kernel()
    assert finding.ok is False and finding.fix


@pytest.mark.parametrize(
    ("points", "ok"),
    [
        ([SimpleNamespace(module="json", value="json:X")], True),
        ([SimpleNamespace(module="no_such_module_here", value="no_such_module_here:X")], False),
        ([], False),
    ],
)
def test_the_papermill_engine_has_to_be_registered_and_there(monkeypatch, points, ok):
    monkeypatch.setattr(metadata, "entry_points", lambda **query: points)
    assert doctor.check_papermill_engine().ok is ok


def test_a_browser_is_a_file_or_a_warning(tmp_path):
    program = tmp_path / "chromium"
    program.write_text("")
    assert doctor.check_browser(lambda: str(program)).ok is True
    missing, wrong = doctor.check_browser(lambda: None), doctor.check_browser(lambda: "/no/such/chrome")
    assert missing.ok is None and "chromium" in missing.fix
    assert wrong.ok is None and "/no/such/chrome" in wrong.detail and "BROWSER_PATH" in wrong.detail


def test_the_browser_variable_is_heeded(monkeypatch, tmp_path):
    monkeypatch.setattr("choreographer.browsers.chromium.get_chrome_download_path", lambda mkdir: None)
    monkeypatch.setattr("choreographer.browsers.chromium.get_old_chrome_download_path", lambda: None)
    monkeypatch.setenv("BROWSER_PATH", str(tmp_path / "mine"))
    assert str(tmp_path / "mine") in doctor.check_browser().detail


@pytest.mark.parametrize(("room", "ok"), [(3 << 30, True), ((3 << 30) - 1, False)])
def test_memory_and_disk_have_a_floor(monkeypatch, room, ok):
    assert doctor.check_memory(lambda: room).ok is ok
    monkeypatch.setattr(doctor, "NEEDED_DISK_BYTES", 3 << 30)
    assert doctor.check_disk(lambda folder: (0, 0, room)).ok is ok


def test_disk_is_measured_where_the_cache_will_be(monkeypatch, tmp_path):
    monkeypatch.setenv("SPECNB_CACHE", str(tmp_path / "not" / "yet"))
    asked = []
    doctor.check_disk(lambda folder: asked.append(folder) or (0, 0, 1 << 40))
    assert asked == [tmp_path]


def test_a_cache_folder_is_written_to_and_left_empty(monkeypatch, tmp_path):
    monkeypatch.setenv("SPECNB_CACHE", str(tmp_path / "cache"))
    assert doctor.check_cache().ok is True
    assert list((tmp_path / "cache").iterdir()) == []
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SPECNB_CACHE", str(tmp_path / "file" / "cache"))
    finding = doctor.check_cache()
    assert finding.ok is False and "SPECNB_CACHE" in finding.fix


# together


def test_a_check_that_breaks_is_a_finding_and_keeps_what_it_found():
    def check_half_done():
        yield Finding("first", True, "", "")
        raise OSError("disk on fire")

    first, broken = guarded(check_half_done)
    assert first.name == "first"
    assert broken.name == "half done" and broken.ok is False and "disk on fire" in broken.detail


def test_diagnosis_goes_on_when_a_check_breaks(monkeypatch):
    def check_memory():
        raise RuntimeError("no /proc")

    monkeypatch.setattr(doctor, "check_memory", check_memory)
    names = [finding.name for finding in diagnose(decode=False)]
    assert names[-2:] == ["free disk", "cache folder"]


def test_every_problem_has_a_fix_and_decoding_can_be_left_out(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "check_decode", lambda: Finding("llama.cpp decodes", True, "", ""))
    findings = diagnose(decode=True)
    assert all(finding.fix for finding in findings if finding.ok is not True)
    assert all(finding.detail for finding in findings if finding.name != "llama.cpp decodes")
    assert [f for f in findings if f.name == "llama.cpp decodes"]
    assert not [f for f in diagnose(decode=False) if f.name == "llama.cpp decodes"]
    assert capsys.readouterr().out == ""


def test_warnings_do_not_spoil_the_whole_but_one_failure_does():
    good, warning, bad = (Finding("x", ok, "", "") for ok in (True, None, False))
    assert all_ok([good, warning]) and all_ok([])
    assert not all_ok([good, warning, bad])


def test_signals_are_negative_exit_codes():
    assert -signal.SIGSEGV in doctor.HARDWARE_SIGNALS and -signal.SIGKILL not in doctor.HARDWARE_SIGNALS
