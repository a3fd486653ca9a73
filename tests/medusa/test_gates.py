"""Gates: sound heads pass them all, and each planted fault gets its diagnosis and no other."""

from copy import deepcopy
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from specnb.lm.hf.hidden import HiddenStates
from specnb.medusa import checkpoint, gates
from specnb.medusa.accuracy import Reference
from specnb.medusa.checkpoint import LoadReport
from specnb.medusa.gates import dead_steps
from specnb.medusa.nets import Backbone
from tests.medusa import periodic

PROMPTS = 6
CLEAN = LoadReport(Path(), "specnb", None)
REFERENCES: dict[int, Reference] = {}


def checked(target, heads, *, report=CLEAN):
    if id(target) not in REFERENCES:
        REFERENCES[id(target)] = Reference(target, periodic.prompts(PROMPTS), 14)
    return gates.judge_gates(REFERENCES[id(target)], heads, report)


@pytest.fixture
def sound(fitted):
    """A copy of sound Medusa heads, to be broken."""
    return deepcopy(fitted["medusa"])


@pytest.mark.parametrize(
    "changed",
    [
        {"kind": "hydra"},
        {"input": "post_norm", "n_layers": 2, "lm_head": "private"},
    ],
    ids=str,
)
def test_sound_heads_pass_every_gate(circles, changed):
    heads, log = periodic.trained(circles, **changed)
    result = checked(circles, heads, report=CLEAN._replace(training={"log": log}))
    assert result.passed and not result.diagnoses
    names = ["loader", "zero blocks", "acceptance", "serving", "schedule"]
    assert result.table()["gate"].tolist() == names
    assert " 0 of " in result.gates[3].says
    assert result.evidence.served["alpha"][0] > 0.9 < result.evidence.by_head["accuracy"][0]


def test_sound_heads_pass_in_bfloat16(sound):
    half = periodic.backbone_model(dtype=torch.bfloat16)
    heads = periodic.new_heads(half).eval()
    heads.load_state_dict(sound.state_dict())
    assert checked(half, heads).passed


# --- faults ---


def train_without_the_norm(circles, _sound):
    return periodic.trained(circles, norms=0)[0]


def serve_another_norm(_circles, sound):
    vars(sound)["norm"] = nn.LayerNorm(periodic.HIDDEN)
    return sound


FAULTS = {
    "random weights": (
        "undertrained",
        lambda circles, _: periodic.random_heads(circles),
        "acceptance",
    ),
    "trained without the norm": ("missing norm", train_without_the_norm, "acceptance"),
    "served with another norm": ("wrong norm", serve_another_norm, "zero blocks"),
}


@pytest.mark.parametrize(("name", "plant", "gate"), FAULTS.values(), ids=FAULTS)
def test_a_planted_fault_has_one_diagnosis(circles, sound, name, plant, gate):
    """`tests/chapters/test_trained_heads.py` plants those of `medusa.faults`."""
    result = checked(circles, plant(circles, sound))
    assert gate in result.failed and [d.name for d in result.diagnoses] == [name]


def test_a_checkpoint_with_an_untrained_head_fails_the_loader_gate(circles, sound, tmp_path):
    for weight in sound.heads[1].parameters():
        weight.zero_()
    folder = checkpoint.save_heads(sound, tmp_path / "heads", dtype="float32")
    heads, report = checkpoint.load_trained_heads(folder, Backbone.of(circles.network))
    result = checked(circles, heads, report=report)
    assert result.failed == ["loader"] and [d.name for d in result.diagnoses] == ["never loaded"]
    assert "heads.1.blocks.0" in result.gates[0].says


def test_a_zero_learning_rate_is_diagnosed_even_in_untrained_heads(circles, sound):
    log = [
        {"step": step, "lr": 0.0 if step > 12 else 1e-3, "loss": 9.0} for step in range(3, 19, 3)
    ]
    report = CLEAN._replace(training={"log": log})
    result = checked(circles, sound, report=report)
    assert result.failed == ["schedule"] and [d.name for d in result.diagnoses] == ["dead schedule"]
    result = checked(circles, periodic.random_heads(circles), report=report)
    assert result.failed == ["acceptance", "schedule"] and [d.name for d in result.diagnoses] == [
        "dead schedule"
    ]


def test_a_drafter_that_reads_other_states_fails_the_serving_gate(circles, sound, monkeypatch):
    at = HiddenStates.at
    monkeypatch.setattr(
        HiddenStates, "at", lambda self, position: tuple(x.flip(0) for x in at(self, position))
    )
    result = checked(circles, sound)
    assert result.failed == ["serving"]
    assert [d.name for d in result.diagnoses] == ["served differently than scored"]


COSINE, EARLY = ((1 + np.cos(np.pi * np.arange(n) / (n - 1))) / 2 for n in (100, 70))


@pytest.mark.parametrize(
    ("rates", "share"),
    [
        (COSINE, 0.03),  # 2 % and the last step
        ([*EARLY, *np.zeros(30)], 0.32),
        ([1, 1, 0, 1], 0.25),
        ([0, 0.5, 1, 1], 0),  # a warm-up
    ],
)
def test_the_share_of_steps_with_zero_learning_rate(rates, share):
    log = [{"step": 10 * i, "lr": rate} for i, rate in enumerate(rates, 1)]
    assert dead_steps(log) == pytest.approx(share, abs=0.011)
