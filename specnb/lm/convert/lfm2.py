"""LFM2 (short convolutions and attention) as llama.cpp's architecture "lfm2": the weights mean the same in both."""

from typing import TYPE_CHECKING

from specnb.lm.convert.plan import (
    MAX_VOCAB,
    Plan,
    Weight,
    convolution,
    decoder_keys,
    head_weights,
    invalid,
    numbers,
    refusal,
    require,
    require_both,
    skip_tied,
)

if TYPE_CHECKING:
    from transformers import PretrainedConfig

CONV, FULL = "conv", "full_attention"


def plan(config: "PretrainedConfig") -> Plan:
    """Keys and weights of an `Lfm2Config`. InputError for what llama.cpp's code for lfm2 does not compute."""
    _check(config)
    final_norm = Weight("token_embd_norm.weight", "model.embedding_norm.weight", (config.hidden_size,))
    weights = head_weights(config, final_norm)
    for i, kind in enumerate(config.layer_types):
        weights += _common(config, i) + (_conv(config, i) if kind == CONV else _full(config, i))
    return Plan("lfm2", _keys(config), weights, skipped=skip_tied(config))


def feed_forward_length(config: "PretrainedConfig") -> int:
    """The width that transformers builds: a config may ask for two thirds of `intermediate_size`, rounded up."""
    width = config.intermediate_size
    if config.block_auto_adjust_ff_dim:
        width = int(2 * width / 3)
        if config.block_ffn_dim_multiplier is not None:
            width = int(config.block_ffn_dim_multiplier * width)
            multiple = config.block_multiple_of
            width = multiple * ((width + multiple - 1) // multiple)
    return width


def _check(config: "PretrainedConfig") -> None:
    numbers(config, "hidden_size", "intermediate_size", "num_hidden_layers", "max_position_embeddings")
    numbers(config, "vocab_size", most=MAX_VOCAB)
    numbers(config, "num_attention_heads", "num_key_value_heads", "conv_L_cache", "block_multiple_of")
    require(config, "conv_bias", False, "llama.cpp adds none")
    if config.hidden_size % config.num_attention_heads:
        raise invalid("num_attention_heads", config.num_attention_heads, "hidden_size is not a multiple of it")
    if config.conv_L_cache < 2:
        raise refusal("conv_L_cache", config.conv_L_cache, "a window of one keeps no state, which ends llama.cpp")
    require_both(config, CONV, FULL)


def _keys(config: "PretrainedConfig") -> dict:
    return decoder_keys(config, feed_forward=feed_forward_length(config)) | {
        # a layer without heads of its own is a convolution
        "attention.head_count_kv": [config.num_key_value_heads if k == FULL else 0 for k in config.layer_types],
        "attention.layer_norm_rms_epsilon": float(config.norm_eps),
        "shortconv.l_cache": config.conv_L_cache,
    }


def _common(config: "PretrainedConfig", i: int) -> list[Weight]:
    layer, block = f"model.layers.{i}", f"blk.{i}"
    wide, narrow = feed_forward_length(config), config.hidden_size
    return [
        Weight(f"{block}.attn_norm.weight", f"{layer}.operator_norm.weight", (narrow,)),
        Weight(f"{block}.ffn_norm.weight", f"{layer}.ffn_norm.weight", (narrow,)),
        Weight(f"{block}.ffn_gate.weight", f"{layer}.feed_forward.w1.weight", (wide, narrow)),
        Weight(f"{block}.ffn_up.weight", f"{layer}.feed_forward.w3.weight", (wide, narrow)),
        Weight(f"{block}.ffn_down.weight", f"{layer}.feed_forward.w2.weight", (narrow, wide)),
    ]


def _full(config: "PretrainedConfig", i: int) -> list[Weight]:
    layer, block = f"model.layers.{i}.self_attn", f"blk.{i}"
    hidden = config.hidden_size
    size = hidden // config.num_attention_heads
    keys = config.num_key_value_heads * size
    return [
        Weight(f"{block}.attn_q.weight", f"{layer}.q_proj.weight", (hidden, hidden)),
        Weight(f"{block}.attn_k.weight", f"{layer}.k_proj.weight", (keys, hidden)),
        Weight(f"{block}.attn_v.weight", f"{layer}.v_proj.weight", (keys, hidden)),
        Weight(f"{block}.attn_output.weight", f"{layer}.out_proj.weight", (hidden, hidden)),
        Weight(f"{block}.attn_q_norm.weight", f"{layer}.q_layernorm.weight", (size,)),
        Weight(f"{block}.attn_k_norm.weight", f"{layer}.k_layernorm.weight", (size,)),
    ]


def _conv(config: "PretrainedConfig", i: int) -> list[Weight]:
    layer, block = f"model.layers.{i}.conv", f"blk.{i}.shortconv"
    hidden, window = config.hidden_size, config.conv_L_cache
    return [
        Weight(f"{block}.in_proj.weight", f"{layer}.in_proj.weight", (3 * hidden, hidden)),
        Weight(f"{block}.out_proj.weight", f"{layer}.out_proj.weight", (hidden, hidden)),
        convolution(f"{block}.conv.weight", f"{layer}.conv.weight", hidden, window),
    ]
