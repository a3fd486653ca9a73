"""Qwen3.5's dense text model (`qwen3_5_text`) as llama.cpp's architecture "qwen35".

Where the two disagree on the meaning of a weight:

- transformers multiplies a normed vector by 1 + w, llama.cpp by w; the gated norm inside a linear layer has w in both;
- transformers keeps log(-A), llama.cpp A itself;
- with more value heads than key heads, transformers gives key head i the value heads i·r … i·r + r - 1 (r value heads
  a key head), llama.cpp the heads i, i + n, i + 2n … (n key heads): the value heads are put in that order everywhere.
"""

from typing import TYPE_CHECKING

from specnb.lm.convert.plan import (
    MAX_VOCAB,
    Change,
    Plan,
    Weight,
    convolution,
    decoder_keys,
    head_weights,
    invalid,
    negative_exp,
    numbers,
    refusal,
    require,
    require_both,
    skip_tied,
)

if TYPE_CHECKING:
    import numpy as np
    from transformers import PretrainedConfig

LINEAR, FULL = "linear_attention", "full_attention"
MAX_HEAD = 2**16
DEFAULT_SECTIONS = [11, 11, 10]
"""What transformers takes where a config gives none."""


def plan(config: "PretrainedConfig") -> Plan:
    """Keys and weights of a `Qwen3_5TextConfig`. InputError for what llama.cpp's code for qwen35 does not compute."""
    _check(config)
    weights = head_weights(config, _norm("output_norm.weight", "model.norm.weight", config.hidden_size))
    for i, kind in enumerate(config.layer_types):
        weights += _common(config, i) + (_linear(config, i) if kind == LINEAR else _full(config, i))
    # heads for predicting several tokens are not part of what transformers runs either
    return Plan("qwen35", _keys(config), weights, skipped=("mtp.", *skip_tied(config)))


def one_plus(weight: "np.ndarray") -> "np.ndarray":
    """The factor of a norm that transformers stores as its distance from one."""
    return 1 + weight


def tiled_heads(n_keys: int, n_values: int, width: int) -> "np.ndarray":
    """Where each of `n_values * width` rows comes from when value heads go from grouped to tiled order."""
    import numpy as np

    return np.arange(n_values * width).reshape(n_keys, n_values // n_keys, width).swapaxes(0, 1).ravel()


def _check(config: "PretrainedConfig") -> None:
    numbers(config, "hidden_size", "intermediate_size", "num_hidden_layers", "max_position_embeddings")
    numbers(config, "vocab_size", most=MAX_VOCAB)
    numbers(config, "num_attention_heads", "num_key_value_heads")
    numbers(config, "head_dim", most=MAX_HEAD)
    numbers(config, "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_conv_kernel_dim")
    require(config, "hidden_act", "silu", "llama.cpp has no other here")
    require(config, "attention_bias", False, "llama.cpp adds none")
    require(config, "rms_norm_eps", 1e-6, "llama.cpp takes it for the length of q and k too, transformers 1e-6")
    size = config.linear_key_head_dim
    require(config, "linear_value_head_dim", size, "llama.cpp's recurrent state is square (linear_key_head_dim)")
    if config.linear_num_value_heads % config.linear_num_key_heads:
        raise invalid("linear_num_value_heads", config.linear_num_value_heads, "not a multiple of linear_num_key_heads")
    if config.linear_conv_kernel_dim < 2:
        raise refusal("linear_conv_kernel_dim", config.linear_conv_kernel_dim, "a window of one keeps no state")
    require_both(config, LINEAR, FULL)


def _keys(config: "PretrainedConfig") -> dict:
    rotated, sections = _rotation(config)
    return decoder_keys(config, feed_forward=config.intermediate_size) | {
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
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


def _rotation(config: "PretrainedConfig") -> tuple[int, list[int]]:
    """Rotated values of a head, and the sections of three-dimensional positions.

    In text the three positions are equal, and the sections change nothing in transformers. llama.cpp gives a
    frequency that no section covers position 0: such sections are refused.
    """
    factor = config.rope_parameters.get("partial_rotary_factor", 0.25)
    if not isinstance(factor, int | float) or not 0 < factor <= 1:
        raise invalid("partial_rotary_factor", factor, "it must be more than 0 and at most 1")
    rotated = int(config.head_dim * factor)
    if rotated < 2 or rotated % 2:
        raise refusal("partial_rotary_factor", factor, f"it rotates {rotated} values of a head, not an even number")
    sections = config.rope_parameters.get("mrope_section", DEFAULT_SECTIONS)
    if not isinstance(sections, list) or len(sections) != 3 or not all(type(n) is int and n > 0 for n in sections):
        raise invalid("mrope_section", sections, "it must be three positive whole numbers")
    uncovered = [i for i in range(min(rotated // 2, sum(sections))) if i >= 3 * sections[i % 3]]
    if uncovered:
        raise refusal("mrope_section", sections, f"llama.cpp would not turn frequency {uncovered[0]}")
    return rotated, [*sections, 0]


def _norm(name: str, source: str, size: int) -> Weight:
    return Weight(name, source, (size,), one_plus)


def _common(config: "PretrainedConfig", i: int) -> list[Weight]:
    layer, block = f"model.layers.{i}", f"blk.{i}"
    wide, narrow = config.intermediate_size, config.hidden_size
    return [
        _norm(f"{block}.attn_norm.weight", f"{layer}.input_layernorm.weight", narrow),
        _norm(f"{block}.post_attention_norm.weight", f"{layer}.post_attention_layernorm.weight", narrow),
        Weight(f"{block}.ffn_gate.weight", f"{layer}.mlp.gate_proj.weight", (wide, narrow)),
        Weight(f"{block}.ffn_up.weight", f"{layer}.mlp.up_proj.weight", (wide, narrow)),
        Weight(f"{block}.ffn_down.weight", f"{layer}.mlp.down_proj.weight", (narrow, wide)),
    ]


def _full(config: "PretrainedConfig", i: int) -> list[Weight]:
    """Gated attention. Both engines keep the rows of q_proj as query and gate by turns, head by head."""
    layer, block = f"model.layers.{i}.self_attn", f"blk.{i}"
    hidden, size = config.hidden_size, config.head_dim
    queries, keys = config.num_attention_heads * size, config.num_key_value_heads * size
    return [
        Weight(f"{block}.attn_q.weight", f"{layer}.q_proj.weight", (2 * queries, hidden)),
        Weight(f"{block}.attn_k.weight", f"{layer}.k_proj.weight", (keys, hidden)),
        Weight(f"{block}.attn_v.weight", f"{layer}.v_proj.weight", (keys, hidden)),
        Weight(f"{block}.attn_output.weight", f"{layer}.o_proj.weight", (hidden, queries)),
        _norm(f"{block}.attn_q_norm.weight", f"{layer}.q_norm.weight", size),
        _norm(f"{block}.attn_k_norm.weight", f"{layer}.k_norm.weight", size),
    ]


def _linear(config: "PretrainedConfig", i: int) -> list[Weight]:
    """Gated delta rule layer: what is indexed by value head goes into llama.cpp's order of heads."""
    layer, block = f"model.layers.{i}.linear_attn", f"blk.{i}"
    n_keys, n_values = config.linear_num_key_heads, config.linear_num_value_heads
    size, hidden, window = config.linear_key_head_dim, config.hidden_size, config.linear_conv_kernel_dim
    queries_keys, values = 2 * n_keys * size, n_values * size
    channels = queries_keys + values
    by_head = _rows(n_keys, n_values, 1)
    by_value = _rows(n_keys, n_values, size)
    after_keys = _rows(n_keys, n_values, size, start=queries_keys)
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


def _rows(n_keys: int, n_values: int, width: int, start: int = 0) -> Change:
    """Value heads of `width` rows each, from row `start` on, in tiled order."""

    def reorder(weight: "np.ndarray") -> "np.ndarray":
        import numpy as np

        return np.concatenate([weight[:start], weight[start:][tiled_heads(n_keys, n_values, width)]])

    return reorder
