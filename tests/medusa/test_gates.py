"""Gates: sound heads pass them all, and each planted fault gets its diagnosis and no other.

`tests/chapters/test_trained_heads.py` plants the faults of `medusa.faults`.
"""

from copy import deepcopy
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from specnb.lm.hf.hidden import HiddenStates
from specnb.medusa import gates
from specnb.medusa.accuracy import Reference
from specnb.medusa.checkpoint import LoadReport
from specnb.medusa.gates import dead_steps
from tests.medusa import periodic

CLEAN = LoadReport(Path(), "specnb", None)


@pytest.fixture(scope="module")
def reference(circles):
    return Reference(circles, periodic.prompts(6), 14)


@pytest.fixture(scope="module")
def trained(circles):
    return periodic.trained(circles)[0]


@pytest.fixture
def sound(trained):
    """A copy of sound heads, to be broken."""
    return deepcopy(trained)


def names(result):
    return [diagnosis.name for diagnosis in result.diagnoses]


def test_sound_heads_pass_every_gate(circles, reference):
    heads, log = periodic.trained(circles, input="post_norm", n_layers=2, lm_head="private")
    result = gates.judge_gates(reference, heads, CLEAN._replace(training={"log": log}))
    assert result.passed and not result.diagnoses
    assert result.table()["gate"].tolist() == [*gates.GATES]
    assert " 0 of " in result.gates[3].says
    assert result.evidence.served["alpha"][0] > 0.9 < result.evidence.by_head["accuracy"][0]


def test_sound_heads_pass_in_bfloat16(sound):
    half = periodic.backbone_model(dtype=torch.bfloat16)
    heads = periodic.new_heads(half).eval()
    heads.load_state_dict(sound.state_dict())
    assert gates.judge_gates(Reference(half, periodic.prompts(6), 14), heads, CLEAN).passed


def test_another_norm_than_that_of_the_backbone_is_diagnosed(reference, sound):
    vars(sound)["norm"] = nn.LayerNorm(periodic.HIDDEN)
    result = gates.judge_gates(reference, sound, CLEAN)
    assert "zero blocks" in result.failed and names(result) == ["wrong norm"]


def test_heads_trained_without_the_norm_are_diagnosed(circles, reference):
    heads, _ = periodic.trained(circles, normed=False)
    result = gates.judge_gates(reference, heads, CLEAN)
    assert result.failed == ["acceptance"] and names(result) == ["missing norm"]


def test_a_finding_of_the_loader_and_a_zero_learning_rate_fail_their_gates(reference, sound):
    log = [{"step": step, "lr": float(step <= 12)} for step in range(3, 19, 3)]
    report = CLEAN._replace(training={"log": log}, findings=("heads.1 is all zero",))
    result = gates.judge_gates(reference, sound, report)
    assert result.failed == ["loader", "schedule"] and "heads.1" in result.gates[0].says
    assert names(result) == ["never loaded", "dead schedule"]


def test_a_drafter_that_reads_other_states_fails_the_serving_gate(reference, sound, monkeypatch):
    at = HiddenStates.at
    monkeypatch.setattr(
        HiddenStates, "at", lambda self, position: tuple(x.flip(0) for x in at(self, position))
    )
    result = gates.judge_gates(reference, sound, CLEAN)
    assert result.failed == ["serving"] and names(result) == ["served differently than scored"]


def test_neither_a_cosine_to_zero_nor_a_warm_up_is_a_dead_schedule():
    for rates in (1 + np.cos(np.linspace(0, np.pi, 100)), [0, 0.5, 1, 1]):
        log = [{"step": 10 * i, "lr": rate} for i, rate in enumerate(rates, 1)]
        assert dead_steps(log) < gates.DEAD_STEPS
