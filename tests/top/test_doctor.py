"""The doctor: it checks every prerequisite, reports a fix for each problem, and continues after errors."""

from itertools import repeat
from types import SimpleNamespace

import pytest

from specnb import doctor
from specnb.doctor import Prerequisite, check_decode, check_hardware, diagnose, guarded


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
def test_the_exit_of_the_decoding_process_determines_the_problem_and_its_fix(monkeypatch, probe, ok, detail, fix):
    monkeypatch.setattr("specnb.lm.files.zoo_file", lambda name: "model.gguf")
    (finding,) = check_decode(probe, timeout_s=0.5 if "sleep" in probe else 60)
    assert finding.ok is ok and detail in finding.detail and fix in finding.fix and bool(finding.fix) is not ok


@pytest.mark.model
def test_the_real_model_decodes():
    decodes, fits = check_decode()
    assert decodes.ok is True and fits.ok is not False and "uses" in fits.detail


def test_a_build_without_the_cpus_instructions_is_a_warning_with_the_rebuild_command_even_if_it_crashes(monkeypatch):
    monkeypatch.setattr("specnb.lm.files.zoo_file", lambda name: "model.gguf")
    for isa, ok, lacks in (
        (["avx2", "amx_int8"], True, ""), (["avx2", "avx512f", "avx512_vnni"], None, "AVX512 AVX512_VNNI"),
        ([], True, ""),  # unknown
    ):  # fmt: skip
        monkeypatch.setattr(doctor, "cpu_facts", lambda isa=isa: {"isa": isa})
        decodes, fits = check_decode("print('CPU : AVX2 = 1 | FMA = 0 |', flush=True); import os; os.abort()")
        assert decodes.ok is False and fits.ok is ok and lacks in fits.detail and "uses AVX2 FMA" not in fits.detail
        assert (doctor.REBUILD in fits.fix) == (ok is None)


FACTS = {"threads_per_core": 2, "numa_nodes": 1, "huge_pages": "madvise", "governor": "performance"}
CPU = {"available_cores": 8, "usable_cores": 16, **FACTS}
THREADS = {"OMP_NUM_THREADS": "8", "OPENBLAS_NUM_THREADS": "1", "GOMP_SPINCOUNT": "99"}


@pytest.mark.parametrize(("cpu", "settings", "name", "fix"), [
    ({}, {"OMP_NUM_THREADS": "1"}, "threads", "export OMP_NUM_THREADS=8"),
    ({}, {"OMP_NUM_THREADS": "8,2"}, "threads", "export OMP_NUM_THREADS=8"),
    ({}, {"OPENBLAS_NUM_THREADS": "8"}, "threads", "export OPENBLAS_NUM_THREADS=1"),
    ({}, {"OMP_MAX_ACTIVE_LEVELS": "2", "MKL_NUM_THREADS": "9"}, "threads", "MKL_NUM_THREADS=8 OMP_MAX_ACTIVE"),
    ({"available_cores": 4}, {"OMP_NUM_THREADS": None}, "threads", "export OMP_NUM_THREADS=4"),  # quota
    ({"numa_nodes": 2}, {}, "NUMA", "numactl --cpunodebind=0 --membind=0"),
    ({"huge_pages": "never"}, {}, "transparent huge pages", "echo madvise | sudo tee /sys/"),
    ({"governor": "powersave"}, {}, "CPU governor", "cpupower frequency-set -g performance"),
])  # fmt: skip
def test_settings_that_slow_models_down_are_reported_with_a_command(monkeypatch, cpu, settings, name, fix):
    record = {"cpu": CPU, "threads": THREADS, "torch": {"threads": 8}}
    monkeypatch.setattr(doctor, "provenance", lambda: record)
    assert [finding.ok for finding in check_hardware()] == [True] * 5
    record |= {"cpu": CPU | cpu, "threads": THREADS | settings}
    (warning,) = [finding for finding in check_hardware() if not finding.ok]
    assert (warning.name, warning.ok) == (name, None) and fix in warning.fix and len(warning.detail) > len(name)
    record |= {"cpu": CPU | dict.fromkeys(FACTS), "torch": None}
    assert [finding.name for finding in check_hardware()] == ["threads"]


def test_load_of_other_processes_is_a_warning_and_prevents_timing(monkeypatch):
    monkeypatch.setattr(doctor, "check_decode", lambda: Prerequisite(doctor.DECODES, True, "", ""))
    monkeypatch.setattr(doctor, "check_threads", lambda: Prerequisite(doctor.SPEED, True, "", ""))
    for taken, ok in ((0.1, True), (1.0, None)):
        monkeypatch.setattr(doctor, "Neighbours", lambda taken=taken: SimpleNamespace(cores=lambda: taken))
        findings = {finding.name: finding.ok for finding in diagnose()}
        assert findings["load"] is ok and (doctor.SPEED in findings) == (ok is True)


@pytest.mark.parametrize(("single_threaded", "fix"), [
    ([(40, 80, False)] * 2, ""),
    ([(59, 149, False), (63, 155, False)], ""),  # 3 % is noise
    ([(80, 160, False)] * 2, "smollm2-135m?threads=1"),
    ([(90, 80, False)] * 2, ""),  # faster at 1, slower at 8
    ([(90, 200, True), (90, 200, False)], "wait until the machine is idle, then: specnb check"),
])  # fmt: skip
def test_a_thread_count_is_recommended_only_if_it_is_clearly_faster_on_an_idle_machine(
    monkeypatch, single_threaded, fix
):
    monkeypatch.setattr(doctor, "available_cores", lambda: 2)
    monkeypatch.setattr(doctor, "allowed_cores", lambda: [0, 1])
    speeds = {1: iter(single_threaded), 2: repeat((60, 150, False))}
    monkeypatch.setattr(doctor, "time_forwards", lambda threads: next(speeds[threads]))
    finding = doctor.check_threads()
    assert finding.ok is (None if fix else True) and finding.fix.endswith(fix)
    assert "threads 2: 60.0, 150.0" in finding.detail


@pytest.mark.slow
@pytest.mark.model
def test_the_real_model_is_timed():
    (finding,) = guarded(doctor.check_threads)
    assert finding.ok is not False and "threads 1: " in finding.detail


def test_a_missing_browser_is_a_warning(monkeypatch):
    for path, ok in ((__file__, True), (None, None), ("/no/such/chrome", None)):
        monkeypatch.setattr("choreographer.browsers.chromium.Chromium.find_browser", lambda path=path, **_: path)
        assert doctor.check_browser().ok is ok


def test_every_problem_has_a_fix_even_if_a_check_raises_an_error(monkeypatch):
    def check_half_done():
        yield Prerequisite("first", True, "", "")
        raise OSError("disk on fire")

    (broken,) = guarded(check_half_done)
    assert (broken.name, broken.ok) == ("half done", False) and "disk on fire" in broken.detail
    monkeypatch.setattr(doctor, "check_load", check_half_done)
    findings = {finding.name: finding for finding in diagnose(decode=False)}
    assert findings["half done"].ok is False and all(f.fix for f in findings.values() if f.ok is not True)
    assert "torch" in findings and "llama.cpp decodes" not in findings
