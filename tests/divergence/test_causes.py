"""Causes: the right class ranks first, based on what the module read and what was cached."""

from contextlib import ExitStack

import pytest

from specnb.divergence.causes import gather, rank
from specnb.divergence.faults.planting import replace_forward, replaced
from specnb.divergence.investigate import judge_service
from specnb.divergence.pair import copy_of
from specnb.divergence.script import Script
from specnb.divergence.setups import Lab
from tests.divergence.lab import patched
from tests.tiny_models import torch_model

BANK = "model.layers.0.mlp.experts"


def runs(path, around):
    """Return a service in which the draft's module at `path` runs `around(original, …)`."""
    return lambda draft, neighbour: replace_forward(draft.get_submodule(path), around)


def shared_logits(draft, neighbour):
    """Let the draft's head return the rows that its neighbor's head wrote last."""
    planted = ExitStack()
    if neighbour is not None:
        left = []
        read = patched("lm_head", lambda out: left[-1][:, -out.shape[1] :] if left else out)
        planted.enter_context(read(draft, neighbour))
        planted.enter_context(
            neighbour.lm_head.register_forward_hook(lambda _, args, out: left.append(out))
        )
    return planted


def packed(bank, scale, draft):
    """Let the draft's first bank run a scaled copy of `bank`, whose parameters no model owns."""
    copy = copy_of(bank)
    copy.down_proj.data *= scale
    return replace_forward(draft.get_submodule(BANK), lambda original, *args: copy(*args))


def repacked(draft, neighbour):
    return packed(draft.get_submodule(BANK), 1.1, draft)


def repacked_of_another(draft, neighbour):
    return ExitStack() if neighbour is None else packed(neighbour.get_submodule(BANK), 1.0, draft)


def sharper(draft, neighbour):
    attention = draft.model.layers[1].self_attn
    return replaced(attention, "scaling", 1.2 * attention.scaling)


def turned(original, *args, **kwargs):
    cos, sin = kwargs["position_embeddings"]
    return original(*args, **kwargs | {"position_embeddings": (cos, -sin)})


CASES = {
    "repacked": (repacked, "S0", "WEIGHTS", {"strange read"}, {"foreign read"}),
    "repacked, of another": (
        repacked_of_another,
        "S0 S1 S2 S5",
        "IDENTITY",
        {"strange read"},
        set(),
    ),
    "a head that is right alone": (shared_logits, "S0 S1 S2", "STATE", {"head"}, set()),
    "scale": (sharper, "S0 S0w", "COMPUTATION", {"slots right", "values right"}, {"near"}),
    "keys turned": (
        runs("model.layers.1.self_attn", turned),
        "S0 S0w",
        "COMPUTATION",
        {"values right"},
        {"slots right", "near"},
    ),
    "eps": (
        lambda draft, _: replaced(draft.model.layers[1].input_layernorm, "variance_epsilon", 1.0),
        "S0",
        "COMPUTATION",
        {"right read"},
        set(),
    ),
}
"""Services, set-ups to run, the cause that must rank first, facts that must and must not hold."""


@pytest.mark.parametrize("name", CASES)
def test_the_right_cause_ranks_first(divergence_lab, name):
    deploy, setups, cause, hold, fail = CASES[name]
    evidence = gather(
        divergence_lab, {setup: divergence_lab.run(setup, deploy) for setup in setups.split()}
    )
    first, second, *_ = rank(evidence)
    assert first.name == cause and first.score > second.score + 1, [*map(str, (first, second))]
    assert all(map(evidence.get, hold)) and not any(map(evidence.get, fail)), evidence


def int8_cache(draft, neighbour):
    """Store keys and values of one layer in steps of 1/127 of their largest value."""

    def rounded(rows):
        step = rows.abs().amax(-1, keepdim=True) / 127
        return (rows / step).round() * step

    def around(original, *args, past_key_values, **kwargs):
        update = past_key_values.update
        stored = lambda keys, values, *rest, **more: update(  # noqa: E731
            rounded(keys), rounded(values), *rest, **more
        )
        with replaced(past_key_values, "update", stored):
            return original(*args, past_key_values=past_key_values, **kwargs)

    return replace_forward(draft.model.layers[1].self_attn, around)


def test_keys_and_values_rounded_to_int8_do_not_count_as_right(divergence_lab):
    result = judge_service(divergence_lab, deploy=int8_cache, setups=["S0", "S0w"])
    assert result.first.module == "layers.1.self_attn"
    evidence = gather(divergence_lab, result.outcomes)
    assert not evidence["slots right"] and not evidence["values right"]
    assert not (result.cause_known and result.causes[0].name == "COMPUTATION"), result.line


def test_a_fault_in_a_module_without_parameters_is_a_computation_fault():
    """One activation function replaces another, in a small dense model."""
    dense = Lab(
        torch_model(hidden_act="gelu").eval(),
        script=Script.drafting(range(8), prompt=6, k=1, vocab_size=64),
    )
    deploy = runs("model.layers.1.mlp.act_fn", lambda original, states: states.relu())
    evidence = gather(dense, {"S0": dense.run("S0", deploy)})
    assert evidence["module"] == "layers.1.mlp.act_fn" and not evidence["parameters"]
    assert rank(evidence)[0].name == "COMPUTATION"
