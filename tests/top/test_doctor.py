"""The doctor: every prerequisite is looked at, a missing one names its fix, and nothing that breaks stops it."""

import shutil
from importlib import metadata
from types import SimpleNamespace

import pytest
import torch
from jupyter_client.kernelspec import KernelSpecManager, NoSuchKernel

from specnb import doctor
from specnb.doctor import Finding, check_decode, diagnose, guarded
from specnb.io import project_dir


@pytest.mark.parametrize(
    ("probe", "ok", "detail", "fix"),
    [
        ("print('a line of a log'); print('token 42')", True, "token 42", ""),
        ("import os, signal; os.kill(os.getpid(), signal.SIGILL)", False, "SIGILL", doctor.CRASHED),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", False, "SIGKILL", doctor.FREE_MEMORY),
        ("import os; os.write(2, b'GGML_ASSERT(x) failed'); os.abort()", False, "GGML_ASSERT(x)", doctor.REBUILD),
        ("import time; time.sleep(60)", False, "0.5 s", doctor.REBUILD),
        ("raise RuntimeError('no such library')", False, "no such library", doctor.REINSTALL),
    ],
)
def test_how_the_probe_ends_says_what_is_wrong_and_what_to_do(monkeypatch, probe, ok, detail, fix):
    monkeypatch.setattr("specnb.lm.zoo.path", lambda name: "model.gguf")
    (finding,) = check_decode(probe, timeout_s=0.5 if "sleep" in probe else 60)
    assert finding.ok is ok and detail in finding.detail and fix in finding.fix and bool(finding.fix) is not ok


@pytest.mark.model
def test_the_real_model_decodes():
    decodes, fits = check_decode()
    assert decodes.ok is True and fits.ok is not False and "uses" in fits.detail


@pytest.mark.parametrize(
    ("isa", "used", "ok", "lacks"),
    [
        (["avx2", "avx512f", "amx_int8"], ["AVX2", "AVX512", "OPENMP"], True, ""),
        (["avx2", "avx512f", "avx512_vnni"], ["AVX2"], None, "AVX512 AVX512_VNNI"),
        ([], ["NEON"], True, ""),  # a system that does not tell
    ],
)
def test_a_build_that_leaves_instructions_unused_warns_with_the_rebuild(monkeypatch, isa, used, ok, lacks):
    monkeypatch.setattr(doctor, "cpu_facts", lambda: {"isa": isa})
    finding = doctor.fit_of_build(used)
    assert finding.ok is ok and lacks in finding.detail and (doctor.REBUILD in finding.fix) is (ok is None)


def test_the_probe_says_what_the_build_uses_even_if_it_dies(monkeypatch):
    monkeypatch.setattr("specnb.lm.zoo.path", lambda name: "model.gguf")
    died = "print('CPU : AVX2 = 1 | FMA = 0 |', flush=True); import os; os.abort()"
    decodes, fits = check_decode(died, timeout_s=60)
    assert decodes.ok is False and "AVX2" in fits.detail and "uses AVX2 FMA" not in fits.detail


def test_the_rebuild_is_what_the_requirements_install():
    (line,) = [x for x in (project_dir() / "requirements.txt").read_text().splitlines() if x.startswith("llama-cpp")]
    assert set(line.partition("  #")[0].split()) < set(doctor.REBUILD.split())


def test_packages_are_judged_by_their_ranges(monkeypatch):
    installed = {"torch": "2.13.0+cpu", "numpy": "1.26.4", "rc": "2.1rc1"}

    def version(name):
        if name not in installed:
            raise metadata.PackageNotFoundError(name)
        return installed[name]

    requires = ["torch<3,>=2.6", "numpy<3,>=2", "absent>=1", "rc>=2", 'lab>=4; extra == "lab"', 'win; os_name == "x"']
    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setattr(metadata, "requires", lambda name: requires)
    verdicts = {f.name.removeprefix("package "): f.ok for f in doctor.check_packages()}
    assert verdicts == {"torch": True, "numpy": False, "absent": False, "rc": True, "lab": None}


def test_a_missing_compiler_only_warns(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert doctor.check_compiler().ok is None


def test_torch_computes_and_says_whether_bfloat16_is_in_the_cpu(monkeypatch):
    for flags, hint in ((["amx_bf16"], "in hardware (amx_bf16)"), (["avx2"], "float32")):
        monkeypatch.setattr(doctor, "cpu_facts", lambda flags=flags: {"isa": flags})
        assert doctor.check_torch().ok is True and hint in doctor.check_torch().detail
    right = torch.Tensor.__matmul__
    monkeypatch.setattr(torch.Tensor, "__matmul__", lambda a, b: right(a, b) + (a.dtype == torch.bfloat16))
    finding = doctor.check_torch()
    assert finding.ok is False and "bfloat16" in finding.detail and "float32" not in finding.detail


@pytest.mark.parametrize(("program", "ok"), [("python", True), ("/other/env/bin/python", None), (None, False)])
def test_the_kernel_has_to_start_this_environment(monkeypatch, program, ok):
    def kernel_spec(self, name):
        if program is None:
            raise NoSuchKernel(name)
        return SimpleNamespace(argv=[program, "-m", "x"])

    monkeypatch.setattr(KernelSpecManager, "get_kernel_spec", kernel_spec)
    assert doctor.check_kernel().ok is ok


@pytest.mark.parametrize(("path", "ok"), [(__file__, True), (None, None), ("/no/such/chrome", None)])
def test_a_browser_is_a_file_or_a_warning(monkeypatch, path, ok):
    monkeypatch.setattr("choreographer.browsers.chromium.Chromium.find_browser", lambda **_: path)
    assert doctor.check_browser().ok is ok


@pytest.mark.parametrize(("free", "ok"), [(3 << 30, True), ((2 << 30) - 1, False)])
def test_memory_and_disk_have_a_floor_and_disk_is_measured_where_the_cache_will_be(monkeypatch, tmp_path, free, ok):
    asked = []
    monkeypatch.setenv("SPECNB_CACHE", str(tmp_path / "not" / "yet"))
    monkeypatch.setattr(doctor, "free_bytes", lambda: free)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: asked.append(folder) or SimpleNamespace(free=free))
    assert [finding.ok for finding in doctor.check_room()] == [ok, ok] and asked == [tmp_path]


def test_a_cache_folder_is_written_to_and_left_empty(monkeypatch, tmp_path):
    monkeypatch.setenv("SPECNB_CACHE", str(tmp_path / "cache"))
    assert doctor.check_cache().ok is True and list((tmp_path / "cache").iterdir()) == []
    monkeypatch.setenv("SPECNB_CACHE", f"{__file__}/cache")
    assert doctor.check_cache().ok is False


def test_a_check_that_breaks_is_a_finding():
    def check_half_done():
        yield Finding("first", True, "", "")
        raise OSError("disk on fire")

    (broken,) = guarded(check_half_done)
    assert (broken.name, broken.ok) == ("half done", False) and "disk on fire" in broken.detail


def test_every_problem_has_a_fix(monkeypatch):
    monkeypatch.setattr(doctor, "free_bytes", lambda: 0)
    findings = {finding.name: finding for finding in diagnose(decode=False)}
    assert findings["free memory"].ok is False and all(f.fix for f in findings.values() if f.ok is not True)
    assert {"package torch", "package llama-cpp-python", "package jupyterlab", "python"} <= set(findings)
    assert "llama.cpp decodes" not in findings
