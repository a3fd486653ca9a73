"""The families that a GGUF is written of: header keys and weights of each, as llama.cpp's code for it reads them.

Where Qwen3.5 (`qwen3_5_text`, llama.cpp's "qwen35") disagrees on the meaning of a weight:

- transformers multiplies a normed vector by 1 + w, llama.cpp by w; the gated norm inside a linear layer has w in both;
- transformers keeps log(-A), llama.cpp A itself (of Mamba-2 too);
- with more value heads than key heads, transformers gives key head i the value heads i·r … i·r + r - 1 (r value heads
  a key head), llama.cpp the heads i, i + n, i + 2n … (n key heads): the value heads are put in that order everywhere.
"""

from typing import TYPE_CHECKING

from specnb.lm.gguf.plan import (
    Change,
    Key,
    Plan,
    Weight,
    convolution,
    decoder_keys,
    head_weights,
    negative_exp,
    refusal,
    require,
    require_both,
    skip_tied,
    unchanged,
)  # fmt: skip

if TYPE_CHECKING:
    import numpy as np
    from transformers import PretrainedConfig

LINEAR, CONV, FULL = "linear_attention", "conv", "full_attention"


def _norms(config: "PretrainedConfig", i: int, change: Change = unchanged, **names: str) -> list[Weight]:
    """The norms of layer `i` over the hidden size: GGUF name = transformers name."""
    shape = (config.hidden_size,)
    return [Weight(f"blk.{i}.{to}.weight", f"model.layers.{i}.{of}.weight", shape, change) for to, of in names.items()]


def _feed_forward(config: "PretrainedConfig", i: int, wide: int, gate: str, up: str, down: str) -> list[Weight]:
    """The gated feed-forward part of layer `i`, `wide` inside, by its names in transformers."""
    layer, block, narrow = f"model.layers.{i}", f"blk.{i}", config.hidden_size
    return [
        Weight(f"{block}.ffn_gate.weight", f"{layer}.{gate}.weight", (wide, narrow)),
        Weight(f"{block}.ffn_up.weight", f"{layer}.{up}.weight", (wide, narrow)),
        Weight(f"{block}.ffn_down.weight", f"{layer}.{down}.weight", (narrow, wide)),
    ]


QWEN_FEED_FORWARD = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


def _attention(
    config: "PretrainedConfig",
    i: int,
    size: int,
    *,
    output: str = "o_proj",
    norm: str = "norm",
    change: Change = unchanged,
    gates: int = 0,
) -> list[Weight]:
    """Attention of layer `i` with heads of `size` and normed queries and keys (`change`: what happens to the norms).

    With one of `gates` both engines keep the rows of q_proj as query and gate by turns, head by head.
    """
    layer, block, hidden = f"model.layers.{i}.self_attn", f"blk.{i}", config.hidden_size
    queries, keys = config.num_attention_heads * size, config.num_key_value_heads * size
    return [
        Weight(f"{block}.attn_q.weight", f"{layer}.q_proj.weight", ((1 + gates) * queries, hidden)),
        Weight(f"{block}.attn_k.weight", f"{layer}.k_proj.weight", (keys, hidden)),
        Weight(f"{block}.attn_v.weight", f"{layer}.v_proj.weight", (keys, hidden)),
        Weight(f"{block}.attn_output.weight", f"{layer}.{output}.weight", (hidden, queries)),
        Weight(f"{block}.attn_q_norm.weight", f"{layer}.q_{norm}.weight", (size,), change),
        Weight(f"{block}.attn_k_norm.weight", f"{layer}.k_{norm}.weight", (size,), change),
    ]


def _qwen_keys(config: "PretrainedConfig") -> dict[str, Key]:
    return decoder_keys(config, feed_forward=config.intermediate_size) | {
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
    }


def qwen3(config: "PretrainedConfig") -> Plan:
    """Keys and weights of a `Qwen3Config`. InputError for what llama.cpp's code for qwen3 does not compute."""
    require(config, "hidden_act", "silu", "llama.cpp has no other here")
    require(config, "attention_bias", False, "llama.cpp adds none")
    if set(config.layer_types) != {FULL}:
        raise refusal("layer_types", config.layer_types, "llama.cpp's qwen3 has no sliding windows")
    weights = head_weights(config, Weight("output_norm.weight", "model.norm.weight", (config.hidden_size,)))
    for i in range(config.num_hidden_layers):
        weights += [
            *_norms(config, i, attn_norm="input_layernorm", ffn_norm="post_attention_layernorm"),
            *_attention(config, i, config.head_dim),
            *_feed_forward(config, i, config.intermediate_size, *QWEN_FEED_FORWARD),
        ]
    return Plan("qwen3", _qwen_keys(config), weights, skipped=skip_tied(config))


DEFAULT_SECTIONS = [11, 11, 10]
"""What transformers takes where a config gives none."""


def qwen35(config: "PretrainedConfig") -> Plan:
    """Keys and weights of a `Qwen3_5TextConfig`. InputError for what llama.cpp's code for qwen35 does not compute."""
    require(config, "hidden_act", "silu", "llama.cpp has no other here")
    require(config, "attention_bias", False, "llama.cpp adds none")
    require(config, "rms_norm_eps", 1e-6, "llama.cpp takes it for the length of q and k too, transformers 1e-6")
    size = config.linear_key_head_dim
    require(config, "linear_value_head_dim", size, "llama.cpp's recurrent state is square (linear_key_head_dim)")
    require_both(config, LINEAR, FULL)
    weights = head_weights(config, Weight("output_norm.weight", "model.norm.weight", (config.hidden_size,), one_plus))
    for i, kind in enumerate(config.layer_types):
        weights += [
            *_norms(config, i, one_plus, attn_norm="input_layernorm", post_attention_norm="post_attention_layernorm"),
            *_feed_forward(config, i, config.intermediate_size, *QWEN_FEED_FORWARD),
        ]
        weights += (
            _qwen35_linear(config, i)
            if kind == LINEAR
            else _attention(config, i, config.head_dim, change=one_plus, gates=1)
        )
    # heads for predicting several tokens are not part of what transformers runs either
    return Plan("qwen35", _qwen35_keys(config), weights, skipped=("mtp.", *skip_tied(config)))


def one_plus(weight: "np.ndarray") -> "np.ndarray":
    """The factor of a norm that transformers stores as its distance from one."""
    return 1 + weight


def tiled_heads(n_keys: int, n_values: int, width: int) -> "np.ndarray":
    """Where each of `n_values * width` rows comes from when value heads go from grouped to tiled order."""
    import numpy as np

    return np.arange(n_values * width).reshape(n_keys, n_values // n_keys, width).swapaxes(0, 1).ravel()


def _qwen35_keys(config: "PretrainedConfig") -> dict:
    rotated, sections = _qwen35_rotation(config)
    return _qwen_keys(config) | {
        # the pattern itself; a `full_attention_interval` could only say "every n-th"
        "attention.recurrent_layers": [kind == LINEAR for kind in config.layer_types],
        "rope.dimension_count": rotated,
        "rope.dimension_sections": sections,
        "ssm.conv_kernel": config.linear_conv_kernel_dim,
        "ssm.state_size": config.linear_key_head_dim,
        "ssm.group_count": config.linear_num_key_heads,
        "ssm.time_step_rank": config.linear_num_value_heads,
        "ssm.inner_size": config.linear_num_value_heads * config.linear_value_head_dim,
    }


def _qwen35_rotation(config: "PretrainedConfig") -> tuple[int, list[int]]:
    """Rotated values of a head, and the sections of three-dimensional positions.

    In text the three positions are equal, and the sections change nothing in transformers. llama.cpp gives a
    frequency that no section covers position 0: such sections are refused.
    """
    factor = config.rope_parameters.get("partial_rotary_factor", 0.25)
    rotated = int(config.head_dim * factor)
    if rotated < 2 or rotated % 2:
        raise refusal("partial_rotary_factor", factor, f"it rotates {rotated} values of a head, not an even number")
    sections = config.rope_parameters.get("mrope_section", DEFAULT_SECTIONS)
    uncovered = [i for i in range(min(rotated // 2, sum(sections))) if i >= 3 * sections[i % 3]]
    if uncovered:
        raise refusal("mrope_section", sections, f"llama.cpp would not turn frequency {uncovered[0]}")
    return rotated, [*sections, 0]


def _qwen35_linear(config: "PretrainedConfig", i: int) -> list[Weight]:
    """Gated delta rule layer: what is indexed by value head goes into llama.cpp's order of heads."""
    layer, block = f"model.layers.{i}.linear_attn", f"blk.{i}"
    n_keys, n_values = config.linear_num_key_heads, config.linear_num_value_heads
    size, hidden, window = config.linear_key_head_dim, config.hidden_size, config.linear_conv_kernel_dim
    queries_keys, values = 2 * n_keys * size, n_values * size
    channels = queries_keys + values
    by_head = _qwen35_rows(n_keys, n_values, 1)
    by_value = _qwen35_rows(n_keys, n_values, size)
    after_keys = _qwen35_rows(n_keys, n_values, size, start=queries_keys)
    return [
        Weight(f"{block}.attn_qkv.weight", f"{layer}.in_proj_qkv.weight", (channels, hidden), after_keys),
        Weight(f"{block}.attn_gate.weight", f"{layer}.in_proj_z.weight", (values, hidden), by_value),
        Weight(f"{block}.ssm_beta.weight", f"{layer}.in_proj_b.weight", (n_values, hidden), by_head),
        Weight(f"{block}.ssm_alpha.weight", f"{layer}.in_proj_a.weight", (n_values, hidden), by_head),
        Weight(f"{block}.ssm_dt.bias", f"{layer}.dt_bias", (n_values,), by_head),
        Weight(f"{block}.ssm_a", f"{layer}.A_log", (n_values,), lambda w: negative_exp(by_head(w))),
        convolution(f"{block}.ssm_conv1d.weight", f"{layer}.conv1d.weight", channels, window, after_keys),
        Weight(f"{block}.ssm_norm.weight", f"{layer}.norm.weight", (size,)),
        Weight(f"{block}.ssm_out.weight", f"{layer}.out_proj.weight", (hidden, values), lambda w: by_value(w.T).T),
    ]


def _qwen35_rows(n_keys: int, n_values: int, width: int, start: int = 0) -> Change:
    """Value heads of `width` rows each, from row `start` on, in tiled order."""

    def reorder(weight: "np.ndarray") -> "np.ndarray":
        import numpy as np

        return np.concatenate([weight[:start], weight[start:][tiled_heads(n_keys, n_values, width)]])

    return reorder


def lfm2(config: "PretrainedConfig") -> Plan:
    """Keys and weights of an `Lfm2Config`. InputError for what llama.cpp's code for lfm2 does not compute."""
    require(config, "conv_bias", False, "llama.cpp adds none")
    if config.conv_L_cache < 2:
        raise refusal("conv_L_cache", config.conv_L_cache, "a window of one keeps no state, which ends llama.cpp")
    require_both(config, CONV, FULL)
    final_norm = Weight("token_embd_norm.weight", "model.embedding_norm.weight", (config.hidden_size,))
    weights, wide = head_weights(config, final_norm), feed_forward_length(config)
    size = config.hidden_size // config.num_attention_heads
    for i, kind in enumerate(config.layer_types):
        weights += _norms(config, i, attn_norm="operator_norm", ffn_norm="ffn_norm")
        weights += _feed_forward(config, i, wide, "feed_forward.w1", "feed_forward.w3", "feed_forward.w2")
        weights += (
            _lfm2_conv(config, i) if kind == CONV else _attention(config, i, size, output="out_proj", norm="layernorm")
        )
    keys = decoder_keys(config, feed_forward=wide) | {
        # a layer without heads of its own is a convolution
        "attention.head_count_kv": [config.num_key_value_heads if k == FULL else 0 for k in config.layer_types],
        "attention.layer_norm_rms_epsilon": float(config.norm_eps),
        "shortconv.l_cache": config.conv_L_cache,
    }
    return Plan("lfm2", keys, weights, skipped=skip_tied(config))


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


def _lfm2_conv(config: "PretrainedConfig", i: int) -> list[Weight]:
    layer, block = f"model.layers.{i}.conv", f"blk.{i}.shortconv"
    hidden, window = config.hidden_size, config.conv_L_cache
    return [
        Weight(f"{block}.in_proj.weight", f"{layer}.in_proj.weight", (3 * hidden, hidden)),
        Weight(f"{block}.out_proj.weight", f"{layer}.out_proj.weight", (hidden, hidden)),
        convolution(f"{block}.conv.weight", f"{layer}.conv.weight", hidden, window),
    ]


CONTEXT = 2**20
"""Mamba has no positions and its config no limit; llama.cpp wants a number, and its own converter writes this one."""


def mamba2(config: "PretrainedConfig") -> Plan:
    """Keys and weights of a `Mamba2Config`. InputError for what llama.cpp's code for mamba2 does not compute."""
    require(config, "hidden_act", "silu", "llama.cpp has no other here")
    require(config, "use_bias", False, "llama.cpp adds none")
    require(config, "use_conv_bias", True, "llama.cpp asks for one")
    if tuple(config.time_step_limit) != (0.0, float("inf")):
        raise refusal("time_step_limit", config.time_step_limit, "llama.cpp does not limit time steps")
    final_norm = Weight("output_norm.weight", "backbone.norm_f.weight", (config.hidden_size,))
    weights = head_weights(config, final_norm, embedding="backbone.embeddings.weight")
    for i in range(config.num_hidden_layers):
        weights += _mamba2_layer(config, i)
    return Plan("mamba2", _mamba2_keys(config), weights, skipped=skip_tied(config))


def _mamba2_keys(config: "PretrainedConfig") -> dict:
    return {
        "block_count": config.num_hidden_layers,
        "context_length": CONTEXT,
        "embedding_length": config.hidden_size,
        "feed_forward_length": 0,  # unused, but asked for
        "attention.head_count": 0,
        "vocab_size": config.vocab_size,
        "attention.layer_norm_rms_epsilon": float(config.layer_norm_epsilon),
        "ssm.conv_kernel": config.conv_kernel,
        "ssm.inner_size": config.num_heads * config.head_dim,
        "ssm.state_size": config.state_size,
        "ssm.time_step_rank": config.num_heads,
        "ssm.group_count": config.n_groups,
    }


def _mamba2_layer(config: "PretrainedConfig", i: int) -> list[Weight]:
    layer, block = f"backbone.layers.{i}", f"blk.{i}"
    hidden, heads, groups = config.hidden_size, config.num_heads, config.n_groups
    inner, window = heads * config.head_dim, config.conv_kernel
    channels = inner + 2 * groups * config.state_size
    per_group, per_head = (groups, inner // groups), (heads, 1)
    return [
        Weight(f"{block}.attn_norm.weight", f"{layer}.norm.weight", (hidden,)),
        Weight(f"{block}.ssm_in.weight", f"{layer}.mixer.in_proj.weight", (inner + channels + heads, hidden)),
        convolution(f"{block}.ssm_conv1d.weight", f"{layer}.mixer.conv1d.weight", channels, window),
        Weight(f"{block}.ssm_conv1d.bias", f"{layer}.mixer.conv1d.bias", (channels,)),
        Weight(f"{block}.ssm_dt.bias", f"{layer}.mixer.dt_bias", (heads,)),
        Weight(f"{block}.ssm_a", f"{layer}.mixer.A_log", (heads,), lambda w: negative_exp(w)[:, None], per_head),
        Weight(f"{block}.ssm_d", f"{layer}.mixer.D", (heads,), lambda w: w[:, None], per_head),
        Weight(
            f"{block}.ssm_norm.weight",
            f"{layer}.mixer.norm.weight",
            (inner,),
            lambda w: w.reshape(per_group),
            per_group,
        ),
        Weight(f"{block}.ssm_out.weight", f"{layer}.mixer.out_proj.weight", (hidden, inner)),
    ]
