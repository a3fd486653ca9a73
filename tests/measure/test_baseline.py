"""The baseline of speedups: other names of the same weights, timed interleaved with the target."""

from dataclasses import replace
from math import log
from unittest.mock import Mock

import pandas as pd
import pytest

from specnb import machine
from specnb.errors import LoadError
from specnb.lm.files import weights_origin
from specnb.lm.hf import int4
from specnb.measure import baseline
from specnb.measure.baseline import Baseline, BaselineTimer, find_rivals, time_baseline
from tests.measure.test_cost import fake_clock, timed_model

INT4 = "smollm2-135m?backend=hf&dtype=int4"
RIVALS = {
    "smollm2-135m?backend=hf&dtype=bfloat16": ["smollm2-135m", INT4],
    INT4: ["smollm2-135m"],
    "smollm2-135m:bf16?backend=hf&threads=2": ["smollm2-135m?threads=2", f"{INT4}&threads=2"],
    "smollm2-135m:f16?n_ctx=64": ["smollm2-135m?n_ctx=64", f"{INT4}&n_ctx=64"],
    "smollm2-135m:q8_0?backend=hf": ["smollm2-135m:q8_0"],  # rounded again: other weights
    "smollm2-135m?backend=llama": [INT4],
    "smollm2-135m?kv=f32": ["smollm2-135m", INT4],
    "m.gguf?backend=hf": ["m.gguf"],
    "m.gguf": ["m.gguf?backend=hf&dtype=float32"],
    "hf:ORG/NAME:Q4_K_M?revision=v1": ["hf:ORG/NAME:Q4_K_M?backend=hf&dtype=int4&revision=v1"],
    "tiny-hybrid?backend=llama": ["tiny-hybrid?backend=hf&dtype=float32"],
    "tiny-hybrid": [],
    "hf:ORG/NAME": [],
    "a toy": [],
}


@pytest.fixture(autouse=True)
def _a_cpu_without_bfloat16_where_int4_is_fastest(monkeypatch):
    monkeypatch.setattr(machine, "cpuinfo", lambda: (None, frozenset()))
    monkeypatch.setattr(int4, "is_fastest", lambda wide: True)


@pytest.mark.parametrize("name", RIVALS)
def test_the_rivals_are_llama_cpp_and_int4_in_torch(name):
    assert find_rivals(name) == RIVALS[name]


def test_a_name_determines_the_weights():
    assert weights_origin("smollm2-135m:f16?n_ctx=8") == "of the shipped q4_1 file, as f16"
    assert weights_origin("smollm2-135m?backend=hf&dtype=float32") == "of the shipped q4_1 file"
    assert "rounded to 4 bits" in weights_origin("hf:ORG/NAME?dtype=int4")
    assert (
        weights_origin("m.gguf") is None and weights_origin("m.gguf?backend=hf&dtype=int4") is None
    )


@pytest.fixture
def timed(monkeypatch):
    """Return a function that makes a target of 1 s a token and a rival of `rival_s` for `load`."""
    now = fake_clock(monkeypatch)

    def model(engine, seconds):
        made = timed_model(now, "m.gguf?backend=hf", seconds, 0.0)
        made.close = Mock()
        made.caps = replace(made.caps, engine=engine, dtype="x")
        return made

    def make(rival_s):
        rival = model("llama.cpp", rival_s)
        load = Mock(return_value=rival)
        monkeypatch.setattr(baseline, "load", load)
        return model("torch", 1.0), rival, load

    return make


@pytest.mark.parametrize(
    ("rival_s", "engine", "share"), [(0.25, "llama.cpp x", 0.25), (4.0, "torch x", 1.0)]
)
def test_the_faster_model_is_the_baseline_and_the_rival_is_closed(timed, rival_s, engine, share):
    target, rival, load = timed(rival_s)
    found = time_baseline(target, [(0,), (1,)])
    load.assert_called_once_with("m.gguf")
    rival.close.assert_called_once()
    target.close.assert_not_called()
    assert (found.baseline_engine, found.baseline_note) == (engine, None)
    assert (found.share, found.plain_tokens_per_s) == pytest.approx((share, 1.0))


def test_the_share_covers_the_whole_time_of_the_experiment(timed):
    """A rival that slows down after the first prompts is not judged by its first speed."""
    target, rival, _ = timed(0.25)
    with BaselineTimer(target) as timer:
        timer.time((0,))
        early = timer.baseline()
        rival.base = 1.0
        for _ in range(3):
            timer.time((0,))
        rival.close.assert_not_called()
        late = timer.baseline()
    rival.close.assert_called_once()
    assert (early.share, late.share) == pytest.approx((0.25, (0.25 + 3 * 1.0) / 4))


def test_the_interval_over_the_baseline_includes_the_baselines_own():
    noisy = Baseline(
        baseline_engine="x", baseline_tokens_per_s=2.0, plain_tokens_per_s=1.0, share_error=log(2)
    )
    table = pd.DataFrame({"speedup": 2.0, "low": [2.0, 1.0], "high": [2.0, 4.0]})
    exact, wide = noisy.over(table).iloc[:, -3:].to_numpy()
    assert exact == pytest.approx([1.0, 0.5, 2.0])
    assert wide == pytest.approx([1.0, 2 ** -(2**0.5), 2**2**0.5])


@pytest.mark.parametrize(
    ("live", "said", "off"),
    [
        (None, "", ""),
        (9.8, "", ""),
        (8.0, "20% less", "25% too high"),
        (13.0, "30% more", "23% too low"),
    ],
)
def test_another_speed_during_the_experiment_is_reported(live, said, off):
    speeds = {"baseline_tokens_per_s": 20.0, "plain_tokens_per_s": 10.0, "live_tokens_per_s": live}
    drift = Baseline(baseline_engine="x", **speeds).drift
    assert said in drift and off in drift and bool(said) == bool(drift)


def test_a_rival_that_cannot_be_opened_is_reported_with_the_reason(timed, monkeypatch):
    target, _, load = timed(0.25)
    load.side_effect = LoadError("of another family")
    found = time_baseline(target, [(0,)])
    assert found.baseline_engine == "torch x" and "of another family" in found.baseline_note
    target.name = "smollm2-1.7b"
    monkeypatch.setattr(int4, "is_fastest", lambda wide: False)
    load.reset_mock()
    assert "too large" in time_baseline(target, [(0,)]).baseline_note and not load.called
