"""Mamba-2 as llama.cpp's architecture "mamba2": the same weights, except that llama.cpp keeps A, not log(-A)."""

from typing import TYPE_CHECKING

from specnb.lm.convert.plan import (
    MAX_VOCAB,
    Plan,
    Weight,
    convolution,
    invalid,
    negative_exp,
    numbers,
    refusal,
    require,
    skip_tied,
)

if TYPE_CHECKING:
    from transformers import PretrainedConfig

CONTEXT = 2**20
"""Mamba has no positions and its config no limit; llama.cpp wants a number, and its own converter writes this one."""


def plan(config: "PretrainedConfig") -> Plan:
    """Keys and weights of a `Mamba2Config`. InputError for what llama.cpp's code for mamba2 does not compute."""
    _check(config)
    embedding = (config.vocab_size, config.hidden_size)
    weights = [
        Weight("token_embd.weight", "backbone.embeddings.weight", embedding),
        Weight("output_norm.weight", "backbone.norm_f.weight", (config.hidden_size,)),
    ]
    if not config.tie_word_embeddings:
        weights.append(Weight("output.weight", "lm_head.weight", embedding))
    for i in range(config.num_hidden_layers):
        weights += _layer(config, i)
    return Plan("mamba2", _keys(config), weights, skipped=skip_tied(config))


def _check(config: "PretrainedConfig") -> None:
    numbers(config, "hidden_size", "num_hidden_layers", "num_heads", "head_dim", "state_size", "n_groups")
    numbers(config, "conv_kernel")
    numbers(config, "vocab_size", most=MAX_VOCAB)
    require(config, "hidden_act", "silu", "llama.cpp has no other here")
    require(config, "use_bias", False, "llama.cpp adds none")
    require(config, "use_conv_bias", True, "llama.cpp asks for one")
    if tuple(config.time_step_limit) != (0.0, float("inf")):
        raise refusal("time_step_limit", config.time_step_limit, "llama.cpp does not limit time steps")
    if config.num_heads % config.n_groups:
        raise invalid("n_groups", config.n_groups, "num_heads is not a multiple of it")
    if config.conv_kernel < 2:
        raise refusal("conv_kernel", config.conv_kernel, "a window of one keeps no state")


def _keys(config: "PretrainedConfig") -> dict:
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


def _layer(config: "PretrainedConfig", i: int) -> list[Weight]:
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
        Weight(
            f"{block}.ssm_a",
            f"{layer}.mixer.A_log",
            (heads,),
            lambda w: negative_exp(w)[:, None],
            out_shape=per_head,
            exact=True,
        ),
        Weight(f"{block}.ssm_d", f"{layer}.mixer.D", (heads,), lambda w: w[:, None], out_shape=per_head, exact=True),
        Weight(
            f"{block}.ssm_norm.weight",
            f"{layer}.mixer.norm.weight",
            (inner,),
            lambda w: w.reshape(per_group),
            out_shape=per_group,
            exact=True,
        ),
        Weight(f"{block}.ssm_out.weight", f"{layer}.mixer.out_proj.weight", (hidden, inner)),
    ]
