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
    finding = check_decode(probe, timeout_s=0.5 if "sleep" in probe else 60)
    assert finding.ok is not bool(fix) and detail in finding.detail
    assert fix in finding.fix and bool(finding.fix) == bool(fix)


@pytest.mark.model
def test_the_real_model_decodes():
    assert check_decode().ok is True


def test_more_threads_than_cores_are_a_warning_with_a_command(monkeypatch):
    monkeypatch.setattr(doctor, "available_cores", lambda: 8)
    for threads, fix in ((8, ""), (16, "export OMP_NUM_THREADS=8")):
        monkeypatch.setattr("torch.get_num_threads", lambda threads=threads: threads)
        finding = check_threads()
        assert (finding.ok, finding.fix) == (None if fix else True, fix)


def test_every_problem_has_a_fix_even_if_a_check_raises_an_error(monkeypatch):
    def check_load():
        raise OSError("disk on fire")

    monkeypatch.setattr(doctor, "check_load", check_load)
    findings = {finding.name: finding for finding in diagnose(decode=False)}
    assert findings["load"].ok is False and "disk on fire" in findings["load"].detail
    assert all(f.fix for f in findings.values() if f.ok is not True)
    assert "torch" in findings and doctor.DECODES not in findings
