"""Causes: the class of a planted fault comes first, and what speaks for it is said."""

from contextlib import ExitStack, contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch

from specnb.divergence.causes import Case, rank
from specnb.divergence.faults import FAULTS
from specnb.divergence.faults.planting import forward_replaced, replaced, values_changed
from specnb.divergence.investigate import judge
from specnb.divergence.pair import copy_of
from specnb.divergence.replay import one_offset
from specnb.divergence.script import Script
from specnb.divergence.setups import Lab
from specnb.divergence.tolerances import one_factor


@pytest.fixture(scope="module")
def lab(divergence_lab):
    return divergence_lab


def investigated(lab, fault, setups=("S0", "S1", "S2")):
    deploy = FAULTS[fault] if fault else None
    return Case.of(lab, {name: lab.run(name, deploy) for name in setups})


@pytest.mark.parametrize(
    "fault, cause",
    [
        ("positional_registry", "IDENTITY"),
        ("stale_row", "STATE"),
        ("foreign_routing", "ROUTING"),
        ("expert_scale_in_op", "WEIGHTS"),
        ("kv_slot_swap", "KV_SLOT"),
        ("rope_mismatch", "POSITION"),
        ("dummy_tokens", "INPUT"),
        ("random_head", "HEAD"),
    ],
)
def test_the_class_of_a_fault_comes_first(lab, fault, cause):
    ranked = rank(investigated(lab, fault))
    assert ranked[0].name == cause and ranked[0].score > ranked[1].score + 1
    assert ranked[0].for_it and ranked[0].issues and ranked[0].next_experiment


def test_a_foreign_module_is_named(lab):
    ranked = rank(investigated(lab, "positional_registry"))
    assert any("neighbour:model.layers.0.mlp.experts" in says for says in ranked[0].for_it)
    weights = next(cause for cause in ranked if cause.name == "WEIGHTS")
    assert any("alone" in says for says in weights.against_it)


def test_an_output_that_is_small_and_unrelated_is_no_scale(lab):
    case = investigated(lab, "random_head", ("S0",))
    assert abs(case.rows["gain"].median()) < 0.1 and case.factor is None
    scaled = investigated(lab, "expert_scale_in_op", ("S0",))
    assert scaled.factor == pytest.approx(scaled.rows["gain"].median()) and scaled.factor > 1


def test_sound_models_have_no_cause(lab):
    assert rank(investigated(lab, None)) == []


def test_one_offset_of_all_positions_is_no_fault_and_one_of_some_is(lab):
    """Attention sees differences of positions only."""
    shifted = investigated(lab, "uniform_offset", ("S0", "S3"))
    assert shifted.bad is None and all(one.offset for one in shifted.outcomes.values())
    case = investigated(lab, "rope_mismatch", ("S0",))
    assert case.first["module"] == "rotary_emb" and not case.bad.offset


def test_angles_that_are_all_too_long_are_no_offset(lab):
    case = investigated(lab, "uniform_offset", ("S0",))
    along = case.outcomes["S0"].along
    longer = {
        key: value * 1.1 if key.module == "rotary_emb" and key.role == "out" else value
        for key, value in along.values.items()
    }
    assert one_offset(along, lab.sound[0], "rotary_emb")
    assert not one_offset(replace(along, values=longer), lab.sound[0], "rotary_emb")
    assert not one_offset(lab.sound[1], lab.sound[0], "rotary_emb")  # nothing is turned


def cause_of(lab, deploy, setups=("S0",)):
    """The causes of a fault that is not among the planted ones, by name, likeliest first, and its case."""
    case = Case.of(lab, {name: lab.run(name, deploy) for name in setups})
    return {cause.name: cause for cause in rank(case)}, case


def likeliest(causes):
    return next(iter(causes))


def runs(path, around):
    """A service in which the draft's module at `path` runs `around(original, …)`."""
    return lambda draft, neighbour: forward_replaced(draft.get_submodule(path), around)


def repacked(scale):
    """A service that runs the first bank from a copy of its parameters, which no model has."""

    def deploy(draft, neighbour):
        packed = copy_of(draft.model.layers[0].mlp.experts)
        packed.down_proj.data *= scale
        return forward_replaced(draft.model.layers[0].mlp.experts, lambda original, *args: packed(*args))

    return deploy


def other_weights(path, change):
    def deploy(draft, neighbour):
        weight = draft.get_submodule(path).weight
        return values_changed({weight: change(weight.detach())})

    return deploy


@contextmanager
def shared_logits(draft, neighbour):
    """Both heads write to one buffer, and the neighbour's rows are there when the draft reads."""
    left = []

    def of_neighbour(original, states):
        left[:] = [original(states)]
        return left[0].clone()

    def of_draft(original, states):
        own = original(states)
        return left[0][:, -own.shape[1] :].clone() if left else own

    with ExitStack() as planted:
        if neighbour is not None:
            planted.enter_context(forward_replaced(neighbour.lm_head, of_neighbour))
            planted.enter_context(forward_replaced(draft.lm_head, of_draft))
        yield


def sharper(draft, neighbour):
    attention = draft.model.layers[1].self_attn
    return replaced(attention, "scaling", 1.2 * attention.scaling)


def unmasked(original, *args, **kwargs):
    return original(*args, **kwargs | {"attention_mask": torch.zeros_like(kwargs["attention_mask"])})


def test_own_weights_repacked_are_no_other_models(lab):
    causes, case = cause_of(lab, repacked(1.1))
    assert likeliest(causes) == "WEIGHTS" and not case.foreign and case.strange
    assert causes["WEIGHTS"].score > causes["IDENTITY"].score + 3
    assert any("no known model has" in says for says in causes["WEIGHTS"].for_it)


def test_parameters_of_nobody_are_told_by_their_content(lab):
    _, case = cause_of(lab, repacked(1.1))
    assert case.copies and not any("down_proj" in path and "bias" not in path for path in case.copies)
    assert "model.layers.0.mlp.experts.gate_up_proj" in case.copies


def test_another_models_weights_repacked_are_still_another_models(lab):
    """They are not the draft's, and only beside other values than its own is anything wrong."""

    @contextmanager
    def deploy(draft, neighbour):
        with ExitStack() as planted:
            if neighbour is not None:
                packed = copy_of(neighbour.model.layers[0].mlp.experts)
                bank = draft.model.layers[0].mlp.experts
                planted.enter_context(forward_replaced(bank, lambda original, *args: packed(*args)))
            yield

    causes, case = cause_of(lab, deploy, ("S0", "S1", "S2", "S5"))
    assert likeliest(causes) == "IDENTITY" and case.strange


def test_a_head_that_is_right_alone_shares_memory(lab):
    causes, _ = cause_of(lab, shared_logits, ("S0", "S1", "S2"))
    assert likeliest(causes) == "STATE" and causes["STATE"].score > causes["HEAD"].score + 3


def test_a_router_with_other_weights_is_one_of_weights(lab):
    causes, case = cause_of(lab, other_weights("model.layers.1.mlp.router", lambda weight: weight.flip(0)))
    assert likeliest(causes) == "WEIGHTS" and case.changed and causes["WEIGHTS"].score > causes["ROUTING"].score + 3


@pytest.mark.parametrize("deploy", [sharper, runs("model.layers.1.self_attn", unmasked)], ids=["scale", "mask"])
def test_attention_over_the_right_keys_and_values_is_no_matter_of_slots(lab, deploy):
    causes, case = cause_of(lab, deploy, ("S0", "S0w"))
    assert likeliest(causes) == "COMPUTATION" and case.cached == {"keys": True, "values": True}
    assert causes["COMPUTATION"].score > causes["KV_SLOT"].score + 3


def int8_cache(draft, neighbour):
    """Keys and values of one layer are stored as 127 steps of their largest value."""

    def rounded(rows):
        step = rows.abs().amax(-1, keepdim=True) / 127
        return (rows / step).round() * step

    def around(original, *args, past_key_values, **kwargs):
        update = past_key_values.update
        stored = lambda keys, values, *rest, **more: update(rounded(keys), rounded(values), *rest, **more)  # noqa: E731
        with replaced(past_key_values, "update", stored):
            return original(*args, past_key_values=past_key_values, **kwargs)

    return forward_replaced(draft.model.layers[1].self_attn, around)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_keys_and_values_of_a_coarser_type_are_not_the_right_ones(lab, dtype):
    draft = copy_of(lab.draft).to(getattr(torch, dtype))
    short = lab if dtype == "float32" else Lab(draft, script=Script.drafting(range(8), prompt=6, k=1, vocab_size=64))
    result = judge(short, deploy=int8_cache, setups=["S0", "S0w"])
    assert result.first.module == "layers.1.self_attn" and not any(result.case.cached.values())
    assert not (result.cause_known and result.causes[0].name == "COMPUTATION"), result.line
    assert "right values" not in result.line


def test_slots_are_told_by_what_is_in_them(lab):
    _, case = cause_of(lab, FAULTS["kv_slot_swap"])
    assert case.cached == {"keys": False, "values": False}
    _, elsewhere = cause_of(lab, FAULTS["rope_mismatch"])
    assert elsewhere.cached == {}


def test_keys_turned_otherwise_are_in_their_slots(lab):
    def turned(original, *args, **kwargs):
        cos, sin = kwargs["position_embeddings"]
        return original(*args, **kwargs | {"position_embeddings": (cos, -sin)})

    causes, case = cause_of(lab, runs("model.layers.1.self_attn", turned))
    assert case.cached == {"keys": False, "values": True} and likeliest(causes) == "COMPUTATION"


@pytest.mark.parametrize(
    "deploy",
    [
        lambda draft, _: replaced(draft.model.layers[1].input_layernorm, "variance_epsilon", 1.0),
        runs("model.layers.2.self_attn.q_proj", lambda original, states: original(states).roll(1, -1)),
        runs("lm_head", lambda original, states: original(states).roll(1, -1)),
    ],
    ids=["eps", "rolled", "rolled head"],
)
def test_what_is_wrong_with_the_right_weights_is_computed_wrong(lab, deploy):
    causes, case = cause_of(lab, deploy)
    assert likeliest(causes) == "COMPUTATION" and case.unchanged
    assert causes["COMPUTATION"].score > 2 + max(c.score for name, c in causes.items() if name != "COMPUTATION")
    assert any("pristine copy" in says for says in causes["WEIGHTS"].against_it)


@pytest.fixture(scope="module")
def dense():
    """A lab with a small model of another kind, on a short text."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
                         num_attention_heads=2, hidden_act="gelu")  # fmt: skip
    torch.manual_seed(0)
    return Lab(LlamaForCausalLM(config).eval(), script=Script.drafting(range(8), prompt=6, k=1, vocab_size=64))


def test_a_module_without_parameters_has_no_wrong_ones(dense):
    """An activation in the place of another."""
    causes, case = cause_of(dense, runs("model.layers.1.mlp.act_fn", lambda original, states: states.relu()))
    assert case.first["module"] == "layers.1.mlp.act_fn" and case.bare
    assert likeliest(causes) == "COMPUTATION"
    assert any("has no parameters" in says for says in causes["WEIGHTS"].against_it)


def test_a_bias_that_is_left_out_is_not_read(lab):
    path = "model.layers.1.self_attn.q_proj"
    projection = lab.draft.get_submodule(path)
    _, case = cause_of(lab, runs(path, lambda original, states: states @ projection.weight.T))
    assert case.first["module"] == "layers.1.self_attn.q_proj" and not case.unchanged and not case.changed


def test_one_factor_is_as_wide_as_is_said():
    gain = np.array([1.7, 2.0, 2.3])
    assert one_factor(gain, gain - 1, limit=0.2) is None and one_factor(gain, gain - 1, limit=0.4) == 2
    assert one_factor(gain, gain - 1, limit=0.2, spread=np.median) is None
    assert one_factor(np.full(3, 2.0), np.full(3, 1.5), limit=0.4) is None  # much is left once it is out
    assert one_factor(np.full(3, 2.0), np.full(3, 1.5), limit=0.4, rest=np.zeros(3)) == 2


def test_weights_that_a_fused_kernel_reads_for_its_parts_are_its_own(dense):
    held = dense.draft.model.layers[1].mlp

    def fused(original, states):
        gated = (states @ held.gate_proj.weight.T).relu() * (states @ held.up_proj.weight.T)
        return gated @ held.down_proj.weight.T

    causes, case = cause_of(dense, runs("model.layers.1.mlp", fused))
    assert case.first["module"] == "layers.1.mlp" and case.unchanged and len(case.parameters) == 3
    assert likeliest(causes) == "COMPUTATION"
