"""Gates in front of a speed: sound heads pass them all, and every planted fault is called by its name, and alone."""

from copy import deepcopy
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from specnb.lm.hf.hidden import HiddenStates
from specnb.medusa import faults, gates
from specnb.medusa.accuracy import Reference
from specnb.medusa.checkpoint import LoadReport
from specnb.medusa.gates import Curve
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


@pytest.mark.parametrize("changed", [
    {"kind": "hydra"}, {"input": "post_norm", "n_layers": 2}, {"lm_head": "private"}, {"n_heads": 1},
], ids=str)  # fmt: skip
def test_sound_heads_pass_every_gate(circles, changed):
    heads, log = periodic.trained(circles, **changed)
    result = checked(circles, heads, report=CLEAN._replace(training={"log": log}))
    assert result.passed and not result.diagnoses
    names = ["loader", "zero blocks", "acceptance", "alignment", "serving", "schedule"]
    assert result.table()["gate"].tolist() == names
    serving = result.gates[4].measured
    assert serving["apart"] == 0 and serving["identical"] == PROMPTS
    assert result.evidence.served["alpha"][0] == serving["served_alpha_1"] == pytest.approx(serving["offline_alpha_1"])
    assert serving["low"] <= serving["offline_alpha_1"] <= serving["high"]


def test_sound_heads_pass_in_bfloat16(sound):
    half = periodic.backbone_model(dtype=torch.bfloat16)
    heads = periodic.new_heads(half).eval()
    heads.load_state_dict(sound.state_dict())
    assert checked(half, heads).passed


# --- faults ---------------------------------------------------------------------------------------------------------


def one_zero(circles, sound):
    for weight in sound.heads[1].parameters():
        weight.zero_()
    return sound


def normed(make):
    def plant(circles, sound):
        vars(sound)["norm"] = make(circles.network.model.norm)
        return sound

    return plant


def training(**changed):
    return lambda circles, sound: periodic.trained(circles, **changed)[0]


def as_torch_draws(circles, sound):
    return faults.draw_new_heads(faults.Sound(sound, CLEAN, Backbone.of(circles.network), Path()))[0]


FAULTS = {
    "zero blocks": ("never loaded", training(steps=0), {"loader", "acceptance"}),
    "blocks as torch draws them": ("never loaded", as_torch_draws, {"loader", "acceptance"}),
    "one head was not loaded": ("never loaded", one_zero, {"loader"}),
    "weights that nothing explains": (
        "undertrained", lambda circles, sound: periodic.random_heads(circles), {"acceptance"}),
    "trained with the norm twice": ("double norm", training(norms=2), {"alignment"}),
    "trained without the norm": ("missing norm", training(norms=0), {"alignment"}),
    "fed with the norm twice": ("double norm", normed(lambda norm: nn.Sequential(norm, norm)), {"zero blocks"}),
    "fed without the norm": ("missing norm", normed(lambda norm: nn.Identity()), {"zero blocks"}),
    "fed through another norm": ("wrong norm", normed(lambda norm: nn.LayerNorm(periodic.HIDDEN)), {"zero blocks"}),
    "labels one too early": ("label shift", training(shift=-1), {"acceptance", "alignment"}),
    "a single head's labels one too late": ("label shift", training(shift=1, n_heads=1), {"alignment"}),
    "Hydra's labels too late": ("label shift", training(shift=1, kind="hydra"), {"acceptance", "alignment"}),
    "hardly moved": ("dead schedule", training(steps=100, lr=2e-7), {"acceptance"}),
}  # fmt: skip


@pytest.mark.parametrize(("name", "plant", "names"), FAULTS.values(), ids=FAULTS)
def test_a_planted_fault_is_named_and_no_other(circles, sound, name, plant, names):
    result = checked(circles, plant(circles, sound))
    assert not result.passed and {*result.failed} >= names
    assert [d.name for d in result.diagnoses] == [name]
    assert all(bool(gate.diagnoses) is not gate.passed for gate in result.gates)


def test_heads_that_no_checkpoint_was_loaded_into_are_never_loaded_whatever_their_weights(circles):
    result = checked(circles, periodic.random_heads(circles), report=None)
    assert {"loader", "acceptance"} <= {*result.failed} and [d.name for d in result.diagnoses] == ["never loaded"]


def test_a_single_head_that_learned_little_is_not_called_shifted(circles):
    """It says the backbone's next token, as it did at the start."""
    result = checked(circles, periodic.trained(circles, n_heads=1, steps=20, lr=2e-4)[0])
    assert "alignment" not in result.failed and "label shift" not in {d.name for d in result.diagnoses}


def test_a_drafter_that_hands_over_other_states_is_told_from_bad_heads(circles, sound, monkeypatch):
    at = HiddenStates.at
    monkeypatch.setattr(HiddenStates, "at", lambda self, position: tuple(x.flip(0) for x in at(self, position)))
    result = checked(circles, sound, report=CLEAN._replace(findings=("rounded twice",)))
    assert result.failed == ["loader", "serving"] and "rounded twice" in result.gates[0].says
    assert [d.name for d in result.diagnoses] == ["served otherwise than scored"]


# --- curves ---

FALLING, FLAT, SHORT = np.linspace(5, 3, 100), np.full(100, 3.0), [*np.linspace(5, 3, 70), *np.full(30, 3.0)]
COSINE, EARLY = ((1 + np.cos(np.pi * np.arange(n) / (n - 1))) / 2 for n in (100, 70))
EARLY = [*EARLY, *np.zeros(30)]


@pytest.mark.parametrize(("rates", "losses", "dead", "falling"), [
    (COSINE, FALLING, False, True),  # zero at the last step only
    (EARLY, SHORT, True, True), (EARLY, FLAT, True, False),
    ([1, 1, 0, 1], [4, 3, 2, 1], True, True),  # exactly zero in the middle
    ([0, 0.5, 1, 1], [4, 3, 2, 1], False, True),  # a warm-up
])  # fmt: skip
def test_a_curve_knows_a_schedule_that_died(rates, losses, dead, falling):
    lines = enumerate(zip(rates, losses, strict=True), start=1)
    curve = Curve.of([{"step": 10 * i, "lr": rate, "loss": loss} for i, (rate, loss) in lines])
    assert (curve.dead, curve.falling) == (dead, falling)
