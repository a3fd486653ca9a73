"""The doctor checks each prerequisite, reports a fix per problem, and continues after errors."""

import pytest

from specnb import doctor
from specnb.doctor import check_decode, check_threads, diagnose


@pytest.mark.parametrize(
    ("probe", "detail", "fix"),
    [
        ("print('a line of a log'); print('token 42')", "token 42", ""),
        ("import os, signal; os.kill(os.getpid(), signal.SIGILL)", "SIGILL", doctor.CRASHED),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "SIGKILL", doctor.FREE_MEMORY),
        (
            "import os; os.write(2, b'GGML_ASSERT(x) failed'); os.abort()",
            "GGML_ASSERT(x)",
            doctor.REBUILD,
        ),
        ("import time; time.sleep(60)", "0.5 s", doctor.REBUILD),
        ("raise RuntimeError('no such library')", "no such library", doctor.REINSTALL),
    ],
)
def test_the_exit_of_the_decoding_process_determines_the_problem_and_its_fix(
    monkeypatch, probe, detail, fix
):
    monkeypatch.setattr("specnb.lm.files.zoo_file", lambda name: "model.gguf")
    (finding,) = check_decode(probe, timeout_s=0.5 if "sleep" in probe else 60)
    assert finding.ok is not bool(fix) and detail in finding.detail
    assert fix in finding.fix and bool(finding.fix) == bool(fix)


@pytest.mark.model
def test_the_real_model_decodes():
    decodes, fits = check_decode()
    assert decodes.ok is True and fits.ok is not False and "uses" in fits.detail


@pytest.mark.parametrize(
    ("isa", "lacks"),
    [
        (["avx2", "amx_int8"], ""),
        (["avx2", "avx512f", "avx512_vnni"], "AVX512 AVX512_VNNI"),
        ([], ""),  # unknown
    ],
)
def test_a_build_without_the_cpus_instructions_is_a_warning_even_if_it_crashes(
    monkeypatch, isa, lacks
):
    monkeypatch.setattr("specnb.lm.files.zoo_file", lambda name: "model.gguf")
    monkeypatch.setattr(doctor, "cpu_facts", lambda: {"isa": isa})
    probe = "print('CPU : AVX2 = 1 | FMA = 0 |', flush=True); import os; os.abort()"
    decodes, fits = check_decode(probe)
    assert decodes.ok is False and fits.ok is (None if lacks else True) and lacks in fits.detail
    assert "uses AVX2 FMA" not in fits.detail and (doctor.REBUILD in fits.fix) == bool(lacks)


@pytest.mark.parametrize(
    ("settings", "torch_threads", "fix"),
    [
        ({"OMP_NUM_THREADS": "8", "OPENBLAS_NUM_THREADS": "1", "GOMP_SPINCOUNT": "99"}, 8, ""),
        ({"OMP_NUM_THREADS": "8,2"}, 8, "export OMP_NUM_THREADS=8"),
        ({"OPENBLAS_NUM_THREADS": "8"}, 8, "export OPENBLAS_NUM_THREADS=1"),
        (
            {"MKL_NUM_THREADS": "9", "OMP_MAX_ACTIVE_LEVELS": "2"},
            8,
            "export MKL_NUM_THREADS=8 OMP_MAX_ACTIVE_LEVELS=1",
        ),
        ({}, 16, "export OMP_NUM_THREADS=8"),
    ],
)
def test_thread_settings_other_than_the_cores_are_a_warning_with_a_command(
    monkeypatch, settings, torch_threads, fix
):
    monkeypatch.setattr("os.environ", settings)
    monkeypatch.setattr("torch.get_num_threads", lambda: torch_threads)
    monkeypatch.setattr(doctor, "available_cores", lambda: 8)
    finding = check_threads()
    assert (finding.ok, finding.fix) == (None if fix else True, fix)


def test_a_missing_browser_is_a_warning(monkeypatch):
    for path, ok in ((__file__, True), (None, None), ("/no/such/chrome", None)):
        monkeypatch.setattr(
            "choreographer.browsers.chromium.Chromium.find_browser", lambda path=path, **_: path
        )
        assert doctor.check_browser().ok is ok


def test_every_problem_has_a_fix_even_if_a_check_raises_an_error(monkeypatch):
    def check_load():
        raise OSError("disk on fire")

    monkeypatch.setattr(doctor, "check_load", check_load)
    findings = {finding.name: finding for finding in diagnose(decode=False)}
    assert findings["load"].ok is False and "disk on fire" in findings["load"].detail
    assert all(f.fix for f in findings.values() if f.ok is not True)
    assert "torch" in findings and doctor.DECODES not in findings
