"""Qwen3 (dense, attention only) as llama.cpp's architecture "qwen3": the weights mean the same in both."""

from typing import TYPE_CHECKING

from specnb.lm.convert.plan import (
    MAX_VOCAB,
    Plan,
    Weight,
    decoder_keys,
    head_weights,
    numbers,
    refusal,
    require,
    skip_tied,
)

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def plan(config: "PretrainedConfig") -> Plan:
    """Keys and weights of a `Qwen3Config`. InputError for what llama.cpp's code for qwen3 does not compute."""
    _check(config)
    weights = head_weights(config, Weight("output_norm.weight", "model.norm.weight", (config.hidden_size,)))
    for i in range(config.num_hidden_layers):
        weights += _layer(config, i)
    return Plan("qwen3", _keys(config), weights, skipped=skip_tied(config))


def _check(config: "PretrainedConfig") -> None:
    numbers(config, "hidden_size", "intermediate_size", "num_hidden_layers", "max_position_embeddings", "head_dim")
    numbers(config, "vocab_size", most=MAX_VOCAB)
    numbers(config, "num_attention_heads", "num_key_value_heads")
    require(config, "hidden_act", "silu", "llama.cpp has no other here")
    require(config, "attention_bias", False, "llama.cpp adds none")
    if set(config.layer_types) != {"full_attention"}:
        raise refusal("layer_types", config.layer_types, "llama.cpp's qwen3 has no sliding windows")


def _keys(config: "PretrainedConfig") -> dict:
    return decoder_keys(config, feed_forward=config.intermediate_size) | {
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
    }


def _layer(config: "PretrainedConfig", i: int) -> list[Weight]:
    layer, block = f"model.layers.{i}", f"blk.{i}"
    wide, narrow, size = config.intermediate_size, config.hidden_size, config.head_dim
    heads, shared = config.num_attention_heads * size, config.num_key_value_heads * size
    return [
        Weight(f"{block}.attn_norm.weight", f"{layer}.input_layernorm.weight", (narrow,)),
        Weight(f"{block}.ffn_norm.weight", f"{layer}.post_attention_layernorm.weight", (narrow,)),
        Weight(f"{block}.attn_q.weight", f"{layer}.self_attn.q_proj.weight", (heads, narrow)),
        Weight(f"{block}.attn_k.weight", f"{layer}.self_attn.k_proj.weight", (shared, narrow)),
        Weight(f"{block}.attn_v.weight", f"{layer}.self_attn.v_proj.weight", (shared, narrow)),
        Weight(f"{block}.attn_output.weight", f"{layer}.self_attn.o_proj.weight", (narrow, heads)),
        Weight(f"{block}.attn_q_norm.weight", f"{layer}.self_attn.q_norm.weight", (size,)),
        Weight(f"{block}.attn_k_norm.weight", f"{layer}.self_attn.k_norm.weight", (size,)),
        Weight(f"{block}.ffn_gate.weight", f"{layer}.mlp.gate_proj.weight", (wide, narrow)),
        Weight(f"{block}.ffn_up.weight", f"{layer}.mlp.up_proj.weight", (wide, narrow)),
        Weight(f"{block}.ffn_down.weight", f"{layer}.mlp.down_proj.weight", (narrow, wide)),
    ]
