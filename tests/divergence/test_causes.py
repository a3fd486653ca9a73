"""Causes: the class of a planted fault comes first, and what speaks for it is said."""

from contextlib import ExitStack, contextmanager

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from specnb.divergence.causes import Case, rank
from specnb.divergence.faults import FAULTS
from specnb.divergence.faults.planting import forward_replaced, replaced
from specnb.divergence.investigate import judge
from specnb.divergence.pair import copy_of
from specnb.divergence.script import Script
from specnb.divergence.setups import Lab


@pytest.fixture(scope="module")
def lab(divergence_lab):
    return divergence_lab


def investigated(lab, deploy, setups=("S0",)):
    """The causes of a service by name, likeliest first, and its case."""
    deploy = FAULTS[deploy] if isinstance(deploy, str) else deploy
    case = Case.of(lab, {name: lab.run(name, deploy) for name in setups})
    return {cause.name: cause for cause in rank(case)}, case


def likeliest(causes):
    return next(iter(causes))


def lead(causes, name):
    """How far a cause leads all others."""
    return causes[name].score - max(cause.score for other, cause in causes.items() if other != name)


def runs(path, around):
    """A service in which the draft's module at `path` runs `around(original, …)`."""
    return lambda draft, neighbour: forward_replaced(draft.get_submodule(path), around)


@contextmanager
def shared_logits(draft, neighbour):
    """Both heads write to one buffer, and the neighbour's rows are there when the draft reads."""
    left = []

    def of_neighbour(original, states):
        left[:] = [original(states)]
        return left[0].clone()

    def of_draft(original, states):
        logits = original(states)
        return left[0][:, -logits.shape[1] :].clone() if left else logits

    with ExitStack() as planted:
        if neighbour is not None:
            planted.enter_context(forward_replaced(neighbour.lm_head, of_neighbour))
            planted.enter_context(forward_replaced(draft.lm_head, of_draft))
        yield


def repacked(draft, neighbour):
    """The first bank runs from a copy of its parameters that no model has, one of them scaled."""
    packed = copy_of(draft.model.layers[0].mlp.experts)
    packed.down_proj.data *= 1.1
    return forward_replaced(draft.model.layers[0].mlp.experts, lambda original, *args: packed(*args))


def test_repacked_parameters_are_told_by_their_content(lab):
    causes, case = investigated(lab, repacked)
    assert lead(causes, "WEIGHTS") > 3 and not case.reads.foreign and case.reads.strange
    assert "model.layers.0.mlp.experts.gate_up_proj" in case.reads.copies
    assert not any("down_proj" in path and "bias" not in path for path in case.reads.copies)


def test_another_models_weights_repacked_are_still_another_models(lab):
    """They are not the draft's, and only beside other values than its own is anything wrong."""

    def deploy(draft, neighbour):
        if neighbour is None:
            return ExitStack()
        packed = copy_of(neighbour.model.layers[0].mlp.experts)
        return forward_replaced(draft.model.layers[0].mlp.experts, lambda original, *args: packed(*args))

    causes, case = investigated(lab, deploy, ("S0", "S1", "S2", "S5"))
    assert likeliest(causes) == "IDENTITY" and case.reads.strange


def test_a_head_that_is_right_alone_shares_memory(lab):
    causes, _ = investigated(lab, shared_logits, ("S0", "S1", "S2"))
    assert likeliest(causes) == "STATE" and causes["STATE"].score > causes["HEAD"].score + 3


def sharper(draft, neighbour):
    attention = draft.model.layers[1].self_attn
    return replaced(attention, "scaling", 1.2 * attention.scaling)


def unmasked(original, *args, **kwargs):
    return original(*args, **kwargs | {"attention_mask": torch.zeros_like(kwargs["attention_mask"])})


def turned(original, *args, **kwargs):
    cos, sin = kwargs["position_embeddings"]
    return original(*args, **kwargs | {"position_embeddings": (cos, -sin)})


@pytest.mark.parametrize(
    ("deploy", "cached", "cause"),
    [
        (sharper, {"keys": True, "values": True}, "COMPUTATION"),
        (runs("model.layers.1.self_attn", unmasked), {"keys": True, "values": True}, "COMPUTATION"),
        (runs("model.layers.1.self_attn", turned), {"keys": False, "values": True}, "COMPUTATION"),
        (FAULTS["kv_slot_swap"], {"keys": False, "values": False}, "KV_SLOT"),
    ],
    ids=["scale", "mask", "keys turned", "slots"],
)
def test_attention_is_judged_by_what_is_in_its_cache(lab, deploy, cached, cause):
    causes, case = investigated(lab, deploy, ("S0", "S0w"))
    assert likeliest(causes) == cause and case.cached == cached
    if all(cached.values()):
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


def test_keys_and_values_of_a_coarser_type_are_not_the_right_ones(lab):
    result = judge(lab, deploy=int8_cache, setups=["S0", "S0w"])
    assert result.first.module == "layers.1.self_attn" and not any(result.case.cached.values())
    assert not (result.cause_known and result.causes[0].name == "COMPUTATION"), result.line
    assert "right values" not in result.line


@pytest.mark.parametrize(
    "deploy",
    [
        lambda draft, _: replaced(draft.model.layers[1].input_layernorm, "variance_epsilon", 1.0),
        runs("lm_head", lambda original, states: original(states).roll(1, -1)),
    ],
    ids=["eps", "rolled head"],
)
def test_what_is_wrong_with_the_right_weights_is_computed_wrong(lab, deploy):
    causes, case = investigated(lab, deploy)
    assert lead(causes, "COMPUTATION") > 2 and case.unchanged
    assert any("pristine copy" in says for says in causes["WEIGHTS"].against_it)


def test_a_module_without_parameters_has_no_wrong_ones():
    """An activation in the place of another, in a small model of another kind."""
    config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
                         num_attention_heads=2, hidden_act="gelu")  # fmt: skip
    torch.manual_seed(0)
    dense = Lab(LlamaForCausalLM(config).eval(), script=Script.drafting(range(8), prompt=6, k=1, vocab_size=64))
    causes, case = investigated(dense, runs("model.layers.1.mlp.act_fn", lambda original, states: states.relu()))
    assert case.first["module"] == "layers.1.mlp.act_fn" and case.bare and likeliest(causes) == "COMPUTATION"
