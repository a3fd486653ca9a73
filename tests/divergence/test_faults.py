"""Planted faults: each acts as described, is found by the lab, and is removed completely."""

import pytest
import torch

from specnb.divergence import pair as small
from specnb.divergence.investigate import judge_service
from specnb.divergence.script import feed_script
from specnb.errors import InputError
from tests.benchmarks.divergence_score.faults import FAULTS
from tests.benchmarks.divergence_score.grid import within
from tests.tiny_models import torch_model

FOUND = {
    "positional_registry": ("layers.0.mlp.experts", 0, "IDENTITY", "S0 S2"),
    "registry_in_op": ("layers.0.mlp.experts", 0, "IDENTITY", "S0 S2"),
    "shared_buffer": ("layers.0.mlp.experts", 14, "STATE", "S0 S1"),
    "stale_row": ("layers.0.mlp.experts", 12, "STATE", "S0 S2"),
    "foreign_routing": ("layers.0.mlp.router", 0, "ROUTING", "S0 S2"),
    "neighbour_read": ("layers.0.mlp.experts", 0, "STATE", "S0 S1"),
    "expert_scale": ("layers.0.mlp.experts", 0, "WEIGHTS", "S0"),
    "expert_scale_in_op": ("layers.0.mlp.experts", 0, "WEIGHTS", "S0"),
    "experts_permuted": ("layers.0.mlp.experts", 0, "WEIGHTS", "S0"),
    "kv_slot_swap": ("layers.0.self_attn", 5, "KV_SLOT", "S0"),
    "foreign_writer": ("layers.0.self_attn", 14, "KV_SLOT", "S0"),
    "untrimmed": ("layers.0.self_attn", 18, "KV_SLOT", "S0"),
    "overtrimmed": ("layers.0.self_attn", 18, "KV_SLOT", "S0"),
    "overtrimmed_by_two": ("layers.0.self_attn", 18, "KV_SLOT", "S0"),
    "rope_mismatch": ("rotary_emb", 8, "POSITION", "S0"),
    "dummy_tokens": ("", 8, "INPUT", "S0"),
    "random_head": ("lm_head", 0, "HEAD", "S0"),
    "split_k": (None, None, "PRECISION_ONLY", "S0"),
    "uniform_offset": (None, None, "PRECISION_ONLY", "S0"),
}
"""By fault: the first wrong module and token, the cause, and the set-ups that show it."""


@pytest.mark.parametrize("name", FOUND)
def test_the_lab_names_module_and_cause(divergence_lab, name):
    module, token, cause, setups = FOUND[name]
    found = judge_service(divergence_lab, deploy=FAULTS[name], setups=setups.split())
    first = found.first
    assert (first and first.module, first and first.first_token) == (module, token), found.line
    if module is not None:
        assert found.causes[0].name == cause and found.bad.setup.id == setups[-2:], found.line
    else:
        says = "offset by one number" if name == "uniform_offset" else "another order"
        assert found.verdict == cause and says in found.reason and found.exit_code == 0, found.line


def state_of(model):
    """Return the addresses and values of tensors, and the modules that are hooked or replaced."""
    tensors = {
        name: (value.data_ptr(), value.numpy().tobytes())
        for name, value in model.state_dict().items()
    }
    changed = [
        path
        for path, module in model.named_modules()
        if "forward" in vars(module) or module._forward_pre_hooks or module._forward_hooks
    ]
    return tensors, changed


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_matches_its_description_and_is_removed_after_an_exception(divergence_lab, name):
    """If a fault did not declare that it waits, one that never acted would count as a case."""
    lab = divergence_lab
    first, token, cause, _ = FOUND[name]
    models = lab.draft, small.copy_of(lab.target)
    before = [*map(state_of, models)]
    with pytest.raises(KeyError), FAULTS[name](*models) as fault:
        text = torch.tensor([lab.script.text])
        feed_script(lab.draft, lab.script, before=lambda _: models[1](text, use_cache=False))
        raise KeyError
    assert (fault.first, fault.cause) == (first, cause)
    assert bool(fault.struck) == FAULTS[name].waits and (token is None or within(fault, token))
    assert [*map(state_of, models)] == before


def test_faults_work_in_other_architectures_that_have_the_part():
    dense = torch_model("llama").eval()
    ids = torch.arange(18)[None]
    with torch.no_grad():
        clean = dense(ids).logits
        for name in ("kv_slot_swap", "rope_mismatch", "random_head", "dummy_tokens"):
            with FAULTS[name](dense):
                assert not torch.equal(dense(ids).logits, clean), name
        assert torch.equal(dense(ids).logits, clean)
    for name in ("expert_scale", "shared_buffer"):
        with pytest.raises(InputError, match="experts"), FAULTS[name](dense, dense):
            pass
