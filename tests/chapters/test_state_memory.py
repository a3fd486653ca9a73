"""Memory of the rollback strategies compared with the published table and with real caches."""

import pytest
import torch
from transformers import AutoConfig, DynamicCache

from specnb.chapters import state_memory
from specnb.chapters.state_memory import sizes_of
from specnb.errors import InputError
from specnb.lm.hf.engine import cache_argument
from tests.tiny_models import FAMILIES, torch_model

KIB = 1 << 10
MIB = 1 << 20

STATES = dict.fromkeys(("state_size", "mamba_d_state", "ssm_state_size"), 16)
WIDTHS = {
    "linear_value_head_dim": 12,
    "linear_num_value_heads": 4,
    "conv_kernel": 5,
    "conv_L_cache": 5,
} | STATES
"""Distinct sizes, so that confusing two is an error."""
# the others share a row with them
MODELS = [family for family in state_memory.KINDS if family in FAMILIES]


def tiny(family):
    known = AutoConfig.for_model(family).to_dict()
    return torch_model(
        family, **{name: size for name, size in WIDTHS.items() if name in known}
    ).eval()


config_of = AutoConfig.for_model


def held(cache, name):
    """Return the bytes of a cache's tensors `name` in all layers."""
    states = [state for layer in cache.layers for state in getattr(layer, name, {}).values()]
    return sum(state.nbytes for state in states if state is not None)


def test_qwen3_next_80b_has_the_published_sizes():
    """transformers' defaults: 36 of 48 layers, 16 key and 32 value heads of 128, 4 taps."""
    n, full = (sizes_of(config_of("qwen3_next", dtype=dtype)) for dtype in ("bfloat16", "float32"))
    assert full == sizes_of(config_of("qwen3_next"))
    assert (n["state"], n["window"], n["snapshot"]) == (72 * MIB, 3.375 * MIB, 75.375 * MIB)
    assert (n["raw_replay"], full["raw_replay"]) == (441 * KIB, 873 * KIB)
    assert (n["factor_replay"], full["factor_replay"]) == (436.5 * KIB, 868.5 * KIB)
    assert (n["raw_replay"] + n["column"], n["pre_conv"]) == (1017 * KIB, 585 * KIB)
    rows = state_memory.tabulate_memory(n).set_index("width") / MIB
    for kind, by_width in {
        "snapshots": [226, 377, 678, 1281, 4899],
        "raw_replay": [77, 79, 83, 91, 139],
        "checkpoint": [151] * 5,
    }.items():
        assert rows[f"{kind}_bytes"].round().tolist() == by_width


@pytest.mark.parametrize("family", MODELS)
@torch.no_grad()
def test_the_formulas_give_the_bytes_of_every_familys_cache(family):
    """transformers stores all taps of the convolution, one column more than is needed."""
    model = tiny(family)
    cache = DynamicCache(config=model.config)
    for ids in (torch.arange(3, 9)[None], torch.tensor([[9]])):
        model(ids, **{cache_argument(model): cache}, use_cache=True)
    n = sizes_of(model.config)
    assert n["state"] == held(cache, "recurrent_states")
    assert n["window"] + n["column"] == held(cache, "conv_states") > 0
    assert (n["state"] == 0) is (family in ("lfm2", "lfm2_moe"))
    assert not state_memory.parts(n)["times_smaller"].isna().any()


def test_models_are_sized_by_name_or_config():
    """For a composite config, the text part is used."""
    composite = config_of("qwen3_5")
    assert sizes_of(composite) == sizes_of(composite.text_config)
    table = state_memory.of_models(state_memory.parts, ["mamba-2.8b", "tiny-hybrid"])
    window = table.query("model == 'mamba-2.8b' and quantity == 'window R'")["n_bytes"].item()
    assert window == 64 * 5120 * 3 * 4
    for name in ("no/such/folder", "smollm2-135m"):
        with pytest.raises(InputError, match=name):
            state_memory.find_config(name)
    for family, value in (("llama", "llama"), ("lfm2", "full_attention")):
        with pytest.raises(InputError, match=value):
            sizes_of(config_of(family))
