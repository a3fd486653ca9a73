"""Bytes of the rollback strategies against the published table, and against real caches and real records."""

import inspect
from itertools import cycle
from typing import Any, NamedTuple

import pytest
import torch
from transformers import AutoConfig, DynamicCache

import specnb
from specnb.errors import InputError
from specnb.lm.hf.engine import cache_argument
from specnb.ssm import memory, shapes
from specnb.ssm.memory import table
from specnb.ssm.shapes import Kind, RecurrentShape, shape_of
from tests.tiny_models import mamba_gguf, torch_model

KIB, MIB = 1 << 10, 1 << 20

DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 12}
EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
SHARED = {"shared_expert_intermediate_size": 16, "shared_intermediate_size": 16, "num_local_experts": 2}
BAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 2, "mamba_d_state": 16, "mamba_chunk_size": 4}
MAMBA2 = {"num_heads": 8, "head_dim": 8, "n_groups": 2, "state_size": 16, "chunk_size": 4}
NEMOTRON = {"mamba_num_heads": 8, "mamba_head_dim": 8, "n_groups": 2, "ssm_state_size": 16, "n_routed_experts": 2}
FOUR = {"num_hidden_layers": 4, "head_dim": 8}
CONVS = ["conv", "full_attention", "conv", "conv"]
FAMILIES = {
    "qwen3_next": FOUR | DELTA | EXPERTS | SHARED,
    "qwen3_5_text": FOUR | DELTA,
    "qwen3_5_moe_text": FOUR | DELTA | EXPERTS | SHARED,
    "olmo_hybrid": {"num_hidden_layers": 4, **DELTA, "linear_num_key_heads": 4, "linear_conv_kernel_dim": 3},
    "mamba2": MAMBA2,
    "mamba": {"intermediate_size": 64, "state_size": 16, "conv_kernel": 5},
    "falcon_mamba": {"intermediate_size": 64, "state_size": 16},
    "jamba": {"num_hidden_layers": 4, "attn_layer_period": 4, "attn_layer_offset": 1, "mamba_d_state": 8} | EXPERTS,
    "falcon_h1": FOUR | BAMBA | {"mamba_d_ssm": 64},
    "bamba": FOUR | BAMBA | {"attn_layer_indices": [1]},
    "granitemoehybrid": FOUR | BAMBA | SHARED | {"layer_types": ["mamba", "attention", "mamba", "mamba"]},
    "nemotron_h": NEMOTRON | {"layer_types": ["linear_attention", "mlp", "full_attention", "linear_attention"]},
    "zamba2": {"num_hidden_layers": 4, "n_mamba_heads": 8, "mamba_ngroups": 2, "mamba_d_state": 16, "chunk_size": 4}
    | {"layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"], "num_mem_blocks": 1, "adapter_rank": 4},
    "lfm2": FOUR | {"layer_types": CONVS, "block_multiple_of": 8},
    "lfm2_moe": FOUR | EXPERTS | {"layer_types": CONVS},
}


class Call(NamedTuple):
    """Arguments by name, tensors as they were before the call, and what came back."""

    given: dict[str, Any]
    returned: Any


def record_calls(monkeypatch, where: object, name: str) -> list[Call]:
    """Every later call of `where.name`, in order; the list grows as the model runs."""
    inner, calls = getattr(where, name), []

    def outer(*args, **kwargs):
        given = inspect.signature(inner).bind(*args, **kwargs).arguments
        given = {key: value.clone() if torch.is_tensor(value) else value for key, value in given.items()}
        calls.append(Call(given, inner(*args, **kwargs)))
        return calls[-1].returned

    monkeypatch.setattr(where, name, outer)
    return calls


def config_of(kind, **settings):
    return AutoConfig.for_model(kind, **settings)


def qwen3_next_80b(dtype="bfloat16"):
    """transformers' defaults are the published model: 36 of 48 layers, 16 key and 32 value heads of 128, 4 taps."""
    return shape_of(config_of("qwen3_next"), layout="llama.cpp", dtype=dtype)


def held(cache, name):
    """Bytes of the tensors that a cache holds under `name`, all layers."""
    states = [state for layer in cache.layers for state in getattr(layer, name, {}).values()]
    return sum(state.nbytes for state in states if state is not None)


def test_qwen3_next_80b_is_the_published_table():
    shape = qwen3_next_80b()
    full, half = shape.model_copy(update={"record_dtype": "float32"}), shape
    assert shape.layers == 36
    assert memory.state_bytes(shape) == 72 * MIB
    assert memory.window_bytes(shape) == 3.375 * MIB
    assert memory.snapshot_bytes(shape) == 75.375 * MIB
    assert (memory.raw_replay_bytes(half), memory.raw_replay_bytes(full)) == (441 * KIB, 873 * KIB)
    assert (memory.factor_replay_bytes(half), memory.factor_replay_bytes(full)) == (436.5 * KIB, 868.5 * KIB)
    assert memory.raw_replay_bytes(half) + memory.conv_column_bytes(half) == 1017 * KIB
    assert memory.pre_conv_bytes(half) == 585 * KIB


def test_the_window_in_transformers_has_a_column_more():
    shape = shape_of(config_of("qwen3_next"), dtype="float32")
    assert memory.window_bytes(shape) == 4.5 * MIB
    assert memory.window_bytes(shape_of(config_of("qwen3_next"), dtype="bfloat16")) == 2.25 * MIB
    assert memory.state_bytes(shape) == 72 * MIB


def test_the_table_by_width_is_the_published_one():
    rows = table(qwen3_next_80b(), widths=(2, 4, 8, 16, 64)).set_index("width") / MIB
    assert rows["snapshots_bytes"].round(0).tolist() == [226, 377, 678, 1281, 4899]
    assert rows["raw_replay_bytes"].round(1).tolist() == [77.4, 79.3, 83.3, 91.3, 138.9]
    assert rows["checkpoint_bytes"].round(0).eq(151).all()
    assert rows["live_bytes"].eq(75.375).all()
    assert (rows["factor_replay_bytes"] < rows["raw_replay_bytes"]).all()
    assert (rows["pre_conv_bytes"] < rows["factor_replay_bytes"]).all()


def test_mamba_2_8b_replays_in_an_eighth_of_its_state():
    """The ratio of 100 and more belongs to large key and value heads; with 16 columns a channel it is 8."""
    shape = shape_of(config_of("mamba", hidden_size=2560, num_hidden_layers=64), layout="llama.cpp")
    assert memory.state_bytes(shape) == 20 * MIB
    assert memory.raw_replay_bytes(shape) == 64 * (2 * 5120 + 16) * 4
    assert memory.raw_replay_bytes(shape) / MIB == pytest.approx(2.50, abs=0.005)
    assert memory.state_bytes(shape) / memory.raw_replay_bytes(shape) == pytest.approx(8, abs=0.02)
    assert memory.pre_conv_bytes(shape) == 64 * 5120 * 4, "dt, B and C come from the convolved x"


def test_mamba2_is_the_published_formula():
    """L (H P N b + (cw - 1) (d_in + 2 G N) b) a snapshot, L ((H P + G N) b + 4 H) a token."""
    shape = shape_of(config_of("mamba2"), layout="llama.cpp", dtype="float32")
    assert memory.snapshot_bytes(shape) == 64 * (128 * 64 * 128 * 4 + 3 * (8192 + 2 * 8 * 128) * 4)
    half = shape.model_copy(update={"record_dtype": "bfloat16"})
    assert memory.raw_replay_bytes(half) == 64 * ((128 * 64 + 8 * 128) * 2 + 128 * 4)
    assert memory.pre_conv_bytes(half) == 64 * ((8192 + 2 * 8 * 128) * 2 + 128 * 4)


@pytest.mark.parametrize(("family", "dtype"), [*zip(FAMILIES, cycle([torch.float32, torch.bfloat16]))], ids=str)
@torch.no_grad()
def test_formulas_are_the_bytes_of_the_caches_of_every_family(family, dtype):
    model = torch_model(family, **FAMILIES[family]).to(dtype).eval()
    cache = DynamicCache(config=model.config)
    for ids in (torch.arange(3, 9)[None], torch.tensor([[9]])):
        model(ids, **{cache_argument(model): cache}, use_cache=True)
    shape = shape_of(model.config, dtype=str(dtype).removeprefix("torch."))
    assert memory.state_bytes(shape) == held(cache, "recurrent_states")
    assert memory.window_bytes(shape) == held(cache, "conv_states") > 0
    assert (memory.state_bytes(shape) > 0) is (shape.kind is not Kind.SHORT_CONV)


def test_every_known_family_is_checked_on_a_real_cache():
    assert set(FAMILIES) == set(shapes.FAMILIES)


def test_formulas_are_the_bytes_of_llama_cpps_state(tmp_path):
    import llama_cpp

    shape = RecurrentShape(
        family="mamba",
        kind=Kind.MAMBA1,
        layers=2,
        heads=64,
        value_dim=1,
        key_heads=1,
        key_dim=16,
        conv_channels=64,
        conv_width=4,
        conv_columns=3,
    )
    model = specnb.load(f"{mamba_gguf(tmp_path / 'mamba.gguf')}?threads=1")
    try:
        model.forward([5, 6, 7])
        n_bytes = llama_cpp.llama_state_seq_get_size(model._context, 0)
    finally:
        model.close()
    assert 0 <= n_bytes - memory.snapshot_bytes(shape) < 100, "beside the state only a header"


@torch.no_grad()
def test_one_layer_of_the_80b_model_measured(monkeypatch):
    """Random weights at the true shapes, bfloat16: the cache, and what replay has to keep, as tensors."""
    from transformers.models.qwen3_next import modeling_qwen3_next as code

    config = config_of("qwen3_next")
    with torch.device("meta"):
        layer = code.Qwen3NextGatedDeltaNet(config, 0)
    layer = layer.to_empty(device="cpu").to(torch.bfloat16)
    for parameter in layer.parameters():
        parameter.normal_(0, 0.02)
    kernels = record_calls(monkeypatch, code, "torch_chunk_gated_delta_rule")
    convs = record_calls(monkeypatch, DynamicCache, "update_conv_state")
    cache, n_tokens = DynamicCache(config=config), 5
    for length in (3, n_tokens):
        layer(torch.ones(1, length, config.hidden_size, dtype=torch.bfloat16), cache_params=cache)
    whole = shape_of(config, dtype="bfloat16")
    shape = whole.model_copy(update={"layers": 1})
    assert memory.state_bytes(shape) == held(cache, "recurrent_states") == 2 * MIB
    assert memory.window_bytes(shape) == held(cache, "conv_states")
    call = kernels[-1].given
    gates = call["g"].float().nbytes + call["beta"].float().nbytes  # beta comes in bfloat16 and is kept in float32
    raw = call["key"].nbytes + call["value"].nbytes + gates
    column = convs[-1].given["conv_states"].nbytes
    assert raw == n_tokens * memory.raw_replay_bytes(shape)
    assert column == n_tokens * memory.conv_column_bytes(shape)
    assert column + gates == n_tokens * memory.pre_conv_bytes(shape), "a and b are as many as g and beta"
    snapshot = held(cache, "recurrent_states") + held(cache, "conv_states")
    assert (raw + column) / n_tokens < snapshot / 20
    assert (raw + column) / n_tokens * 36 == 1017 * KIB


@pytest.mark.parametrize(
    ("family", "scan"), [("mamba2", "mamba2_chunk_scan"), ("mamba", "mamba_selective_scan")], ids=str
)
@torch.no_grad()
def test_the_record_of_a_scan_measured(family, scan, monkeypatch):
    from transformers.models.mamba import modeling_mamba
    from transformers.models.mamba2 import modeling_mamba2

    model = torch_model(family, **FAMILIES[family]).eval()
    scans = record_calls(monkeypatch, modeling_mamba2 if family == "mamba2" else modeling_mamba, scan)
    convs = record_calls(monkeypatch, DynamicCache, "update_conv_state")
    model(torch.arange(3, 8)[None], cache_params=DynamicCache(config=model.config))
    shape = shape_of(model.config)
    before = [call.given["conv_states"] for call in convs]
    before += [call.given["dt"] for call in scans] if family == "mamba2" else []  # Mamba-1 has dt from the convolved x
    assert sum(tensor.nbytes for tensor in before) == 5 * memory.pre_conv_bytes(shape)
    kept = [call.given[name] for call in scans for name in ("hidden_states", "dt", "B")]
    assert sum(tensor.nbytes for tensor in kept) == 5 * memory.raw_replay_bytes(shape)


def test_parts_name_every_quantity_once():
    rows = memory.parts(qwen3_next_80b())
    assert rows["quantity"].is_unique
    assert rows.set_index("quantity")["times_smaller"].round().astype(int).to_dict() == {
        "state S": 1,
        "window R": 22,
        "snapshot S + R, a position": 1,
        "raw replay, a token": 175,
        "raw replay and conv column, a token": 76,
        "factor replay, a token": 177,
        "factor replay and conv column, a token": 76,
        "inputs before the convolution, a token": 132,
    }
    conv_only = memory.parts(shape_of(config_of("lfm2", layer_types=CONVS, num_hidden_layers=4)))
    assert conv_only["n_bytes"].ge(0).all()
    assert not conv_only["times_smaller"].isna().any()


def test_a_composite_config_is_read_by_its_text_part():
    composite = config_of("qwen3_5")
    assert shape_of(composite) == shape_of(composite.text_config)
    assert memory.state_bytes(shape_of(composite)) == 48 * MIB
    assert memory.window_bytes(shape_of(composite, dtype="bfloat16")) == 1.5 * MIB


def test_the_dtype_of_activations_is_the_configs_own_unless_given():
    config = config_of("mamba2", dtype="bfloat16")
    assert (shape_of(config).conv_dtype, shape_of(config).record_dtype) == ("bfloat16", "bfloat16")
    assert shape_of(config, dtype="float32").conv_dtype == "float32"
    assert shape_of(config, layout="llama.cpp").conv_dtype == "float32"
    assert shape_of(config_of("mamba2")).record_dtype == "float32"


@pytest.mark.parametrize(
    ("value", "wrong"),
    [
        ("llama", lambda: shape_of(config_of("llama"))),
        ("full_attention", lambda: shape_of(config_of("lfm2"))),
    ],
)
def test_an_error_names_the_value(value, wrong):
    with pytest.raises(InputError, match=value):
        wrong()
