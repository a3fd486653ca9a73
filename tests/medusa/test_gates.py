"""Gates in front of a speed: sound heads pass them all, and every planted fault is called by its name, and alone."""

import json

import numpy as np
import pytest
import torch
from torch import nn

from specnb.errors import InputError
from specnb.lm.hf.hidden import HiddenStates
from specnb.measure.curve import Curve, read
from specnb.medusa import gates as head_gates
from tests.medusa import periodic

STEPS, PROMPTS = 400, 6


class Clean:
    clean, findings = True, ()


class Doubtful:
    clean, findings = False, ("the weights were rounded twice",)


def checked(target, heads, *, report=Clean, curve=None, **options):
    return head_gates.run(target, heads, report, periodic.prompts(PROMPTS), curve=curve, max_new_tokens=14, **options)


def trained(target, *, norms=1, shift=0, steps=STEPS, **changed):
    heads = periodic.new_heads(target, **changed)
    periodic.fit(heads, target, norms=norms, shift=shift, steps=steps)
    return heads


def failed(found):
    return {gate.name for gate in found.gates if not gate.passed}


def with_borrowed(heads, *, norm=None, lm_head=None):
    """Heads that sit on other borrowed parts than the backbone's."""
    old = heads._borrowed
    heads._borrowed = (norm or old[0], old[1] if lm_head is None else lm_head, old[2])
    return heads


@pytest.fixture
def sound(target, fitted):
    """A copy of sound Medusa heads, to be broken."""
    heads = periodic.new_heads(target)
    heads.load_state_dict(fitted["medusa"].state_dict())
    return heads.eval().requires_grad_(False)


@pytest.fixture(scope="session")
def target(circles):
    return circles


def only_lm_heads(target, steps=10):
    """Private lm_heads that were trained a little in front of blocks that never were."""
    heads = periodic.new_heads(target, lm_head="private")
    blocks = [weight for head in heads.heads for weight in head.blocks.parameters()]
    keep = [weight.register_hook(torch.zeros_like) for weight in blocks]
    periodic.fit(heads, target, steps=steps)
    for hook in keep:
        hook.remove()
    return heads


def died(done):
    """A schedule that ends after a tenth of the steps."""
    return 1.0 if done < 0.1 else 0.0


# --- sound heads ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("changed", [
    {"kind": "hydra"}, {"input": "post_norm", "lm_head": "low_rank", "rank": 8}, {"lm_head": "private", "n_layers": 2},
    {"n_heads": 1},
], ids=str)  # fmt: skip
def test_sound_heads_pass_every_gate(target, changed):
    heads, steps = periodic.new_heads(target, **changed), []
    log = periodic.fit(heads, target, steps=STEPS)
    found = checked(target, heads, curve=Curve.of(log), progress=lambda *step: steps.append(step))
    assert found.passed and not found.diagnoses and not failed(found)
    assert [gate.name for gate in found.gates] == [
        "loader", "zero blocks", "acceptance", "alignment", "serving", "schedule",
    ]  # fmt: skip
    serving = found.gates[4].measured
    assert serving["apart"] == 0 and serving["identical"] == PROMPTS
    assert found.served["alpha"][0] == serving["served_alpha_1"] == pytest.approx(serving["offline_alpha_1"])
    assert serving["low"] <= serving["offline_alpha_1"] <= serving["high"]
    assert steps[0][:2] == (0, 7) and steps[-1][:2] == (7, 7)


def test_sound_heads_pass_in_bfloat16(sound):
    half = periodic.backbone_model(dtype=torch.bfloat16)
    heads = periodic.new_heads(half)
    heads.load_state_dict(sound.state_dict())
    assert checked(half, heads).passed


# --- faults ---------------------------------------------------------------------------------------------------------


def never_trained(target, sound):
    return periodic.new_heads(target)


def not_loaded(target, sound):
    return periodic.as_torch_draws(periodic.new_heads(target))


def one_zero(target, sound):
    for weight in sound.heads[1].parameters():
        weight.zero_()
    return sound


def own_lm_heads(target, sound):
    """Private lm_heads of another backbone."""
    heads = trained(target, lm_head="private")
    draw = torch.Generator().manual_seed(1)
    for head in heads.heads:
        head.lm_head.weight.copy_(torch.randn(head.lm_head.weight.shape, generator=draw))
    return heads


def normed(norm):
    return lambda target, sound: with_borrowed(sound, norm=norm(target.network.model.norm))


def fitted_otherwise(**changed):
    return lambda target, sound: trained(target, **changed)


FAULTS = {
    "zero blocks": ("never loaded", never_trained, {"loader", "acceptance"}),
    "blocks as torch draws them": ("never loaded", not_loaded, {"loader", "acceptance"}),
    "one head was not loaded": ("never loaded", one_zero, {"loader"}),
    "trained with the norm twice": ("double norm", fitted_otherwise(norms=2), {"alignment"}),
    "trained without the norm": ("missing norm", fitted_otherwise(norms=0), {"alignment"}),
    "fed with the norm twice": ("double norm", normed(lambda norm: nn.Sequential(norm, norm)), {"zero blocks"}),
    "fed without the norm": ("missing norm", normed(lambda norm: nn.Identity()), {"zero blocks"}),
    "fed through another norm": ("wrong norm", normed(lambda norm: nn.LayerNorm(periodic.HIDDEN)), {"zero blocks"}),
    "labels one too early": ("label shift", fitted_otherwise(shift=-1), {"acceptance", "alignment"}),
    "a single head's labels one too late": ("label shift", fitted_otherwise(shift=1, n_heads=1), {"alignment"}),
    "Hydra's labels too late": ("label shift", fitted_otherwise(shift=1, kind="hydra"), {"acceptance", "alignment"}),
    "another lm_head": (
        "wrong lm_head",
        lambda target, sound: with_borrowed(sound, lm_head=target.network.lm_head.weight.detach().flip(0)),
        {"zero blocks", "acceptance"},
    ),
    "own lm_heads of another backbone": ("wrong lm_head", own_lm_heads, {"acceptance"}),
}  # fmt: skip


@pytest.mark.parametrize(("name", "plant", "gates"), FAULTS.values(), ids=FAULTS)
def test_a_planted_fault_is_named_and_no_other(target, sound, name, plant, gates):
    found = checked(target, plant(target, sound))
    assert not found.passed and failed(found) >= gates
    assert [d.name for d in found.diagnoses] == [name]
    assert all(bool(gate.diagnoses) is not gate.passed for gate in found.gates)
    assert all(d.evidence and d.remedy for d in found.diagnoses)


def test_a_rate_that_decayed_to_zero_is_named(target):
    heads = periodic.new_heads(target)
    log = periodic.fit(heads, target, schedule=died, steps=STEPS)
    dead = checked(target, heads, curve=Curve.of(log))
    assert failed(dead) >= {"schedule"} and [d.name for d in dead.diagnoses] == ["dead schedule"]


def test_heads_that_training_hardly_moved_are_named_without_a_curve(target):
    heads = periodic.new_heads(target)
    periodic.fit(heads, target, steps=100, lr=2e-7)
    found = checked(target, heads)
    assert [d.name for d in found.diagnoses] == ["dead schedule"]
    assert "the backbone's next token in 100.0%" in found.diagnoses[0].evidence


def test_weights_that_nothing_explains_are_no_better_than_shuffled_ones(target):
    heads = periodic.randomised(periodic.new_heads(target), 0.5)
    found = checked(target, heads)
    assert failed(found) == {"acceptance"} and [d.name for d in found.diagnoses] == ["never loaded"]
    assert "shuffled" in found.diagnoses[0].evidence


def test_little_trained_lm_heads_without_blocks_are_not_called_trained_without_the_norm(target):
    heads = only_lm_heads(target)
    assert not any(weight.any() for head in heads.heads for weight in head.blocks.parameters())
    found = checked(target, heads)
    assert "acceptance" in failed(found) and [d.name for d in found.diagnoses] == ["never loaded"]


def test_a_single_head_that_learned_little_is_not_called_shifted(target):
    """It says the backbone's next token, as it did at the start."""
    heads = periodic.new_heads(target, n_heads=1)
    periodic.fit(heads, target, steps=20, lr=2e-4)
    found = checked(target, heads)
    assert "alignment" not in failed(found) and "label shift" not in {d.name for d in found.diagnoses}


def test_a_drafter_that_hands_over_other_states_is_told_from_bad_heads(target, sound, monkeypatch):
    at = HiddenStates.at
    monkeypatch.setattr(HiddenStates, "at", lambda self, position: tuple(x.flip(0) for x in at(self, position)))
    found = checked(target, sound)
    assert failed(found) == {"serving"} and [d.name for d in found.diagnoses] == ["served otherwise than scored"]


def test_a_doubtful_load_is_no_speed(target, sound):
    found = checked(target, sound, report=Doubtful)
    assert failed(found) == {"loader"} and "rounded twice" in found.gates[0].says


# --- curves ---------------------------------------------------------------------------------------------------------


def curve(rates, losses):
    return Curve.of(
        [{"step": 10 * (i + 1), "lr": r, "loss": x} for i, (r, x) in enumerate(zip(rates, losses, strict=True))]
    )


def cosine(n, end):
    return end + (1 - end) * (1 + np.cos(np.pi * np.arange(n) / (n - 1))) / 2


FALLING, FLAT = np.linspace(5, 3, 100), np.full(100, 3.0)


def test_a_curve_knows_a_schedule_that_died():
    assert not curve(cosine(100, 1 / 30), FALLING).dead
    assert not curve(cosine(100, 0), FALLING).dead  # zero at the last step only
    early = curve([*cosine(70, 0), *np.zeros(30)], [*np.linspace(5, 3, 70), *np.full(30, 3.0)])
    assert early.dead and early.falling and early.dead_share == pytest.approx(0.31, abs=0.02)
    assert not curve([*cosine(70, 0), *np.zeros(30)], FLAT).falling
    assert curve([1, 1, 0, 1], [4, 3, 2, 1]).dead  # exactly zero in the middle
    assert not curve([1e-4, 0.5, 1, 1], [4, 3, 2, 1]).dead  # a warm-up is no death
    assert not curve([0, 0.5, 1, 1], [4, 3, 2, 1]).dead  # also one from zero


def test_losses_of_heads_are_averaged_and_bad_logs_refused(tmp_path):
    assert curve([1, 1], [[1.0, 3.0], [1.0, 2.0]]).loss.tolist() == [2.0, 1.5]
    for log in ([], [{"step": 1}], [{"step": 1, "lr": -1, "loss": 1}], [{"step": 1, "lr": "a", "loss": 1}],
                [{"step": 2, "lr": 1, "loss": 1}, {"step": 1, "lr": 1, "loss": 1}],
                [{"step": 1, "lr": 1, "loss": []}], [{"step": 1, "lr": 1, "loss": float("nan")}],
                [{"step": 0, "lr": 1, "loss": 1}], [{"step": 1, "lr": 0, "loss": 1}]):  # fmt: skip
        with pytest.raises(InputError):
            Curve.of(log)
    assert read(tmp_path) is None
    (tmp_path / "training.json").write_text(json.dumps({"log": [{"step": 5, "lr": 1e-3, "loss": [2, 4]}]}))
    assert read(tmp_path).loss.tolist() == [3.0] and read(tmp_path / "heads.safetensors").step.tolist() == [5]
    (tmp_path / "training.json").write_text('{"log": [{"step": 5}]}')
    with pytest.raises(InputError, match=r"training\.json"):
        read(tmp_path)
