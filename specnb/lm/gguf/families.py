"""The four architectures that a GGUF is written of: header keys as llama.cpp reads them, and weights that change.

Where transformers and llama.cpp disagree on the meaning of a weight:

- Qwen3.5 ("qwen35") multiplies a normed vector by 1 + w, llama.cpp by w; the gated norm inside a linear layer has w
  in both;
- transformers keeps log(-A) of a recurrence, llama.cpp A itself;
- with more value heads than key heads, transformers gives key head i the value heads i·r … i·r + r - 1 (r value heads
  a key head), llama.cpp the heads i, i + n, i + 2n … (n key heads): the value heads are put in that order everywhere.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from specnb.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PretrainedConfig

Key = bool | int | float | str | Sequence[bool] | Sequence[int] | Sequence[str]
Change = Callable[["Tensor"], "Tensor"]

LINEAR, CONV, FULL = "linear_attention", "conv", "full_attention"


class Family(NamedTuple):
    """How the models of one `model_type` are written.

    `keys(config)` are written as `ARCH.key`; it raises InputError for what llama.cpp's code does not compute.
    `changes(config)` maps endings of transformers' names to what happens to the values.
    """

    arch: str
    keys: Callable[["PretrainedConfig"], dict[str, Key]]
    changes: Callable[["PretrainedConfig"], dict[str, Change]]


# --- Qwen3 and Qwen3.5 -----------------------------------------------------------------------------------------------


def _qwen3(config: "PretrainedConfig") -> dict[str, Key]:
    _require(config, hidden_act="silu", attention_bias=False)
    _require_layers(config, FULL)
    return _qwen_keys(config)


def _qwen35(config: "PretrainedConfig") -> dict[str, Key]:
    # llama.cpp takes the norms' epsilon for the length of q and k too, and its recurrent state is square
    state = config.linear_key_head_dim
    _require(config, hidden_act="silu", attention_bias=False, rms_norm_eps=1e-6, linear_value_head_dim=state)
    _require_layers(config, LINEAR, FULL)
    rotated = int(config.head_dim * config.rope_parameters.get("partial_rotary_factor", 0.25))
    sections = config.rope_parameters.get("mrope_section", [11, 11, 10])  # as in transformers
    return _qwen_keys(config) | {
        # the pattern itself; a `full_attention_interval` could only say "every n-th"
        "attention.recurrent_layers": [kind == LINEAR for kind in config.layer_types],
        "rope.dimension_count": rotated,
        "rope.dimension_sections": [*sections, 0],
        "ssm.conv_kernel": config.linear_conv_kernel_dim,
        "ssm.state_size": state,
        "ssm.group_count": config.linear_num_key_heads,
        "ssm.time_step_rank": config.linear_num_value_heads,
        "ssm.inner_size": config.linear_num_value_heads * state,
    }


def _qwen35_changes(config: "PretrainedConfig") -> dict[str, Change]:
    n_keys, n_values, state = config.linear_num_key_heads, config.linear_num_value_heads, config.linear_key_head_dim
    by_head, by_value = (partial(tiled, n_keys=n_keys, n_values=n_values, width=width) for width in (1, state))

    def after_keys(w: "Tensor") -> "Tensor":
        import torch

        queries_keys, values = w.split((2 * n_keys * state, n_values * state))
        return torch.cat((queries_keys, by_value(values)))

    return {
        "linear_attn.norm.weight": lambda w: w,
        "norm.weight": lambda w: 1 + w,
        "in_proj_qkv.weight": after_keys,
        "conv1d.weight": lambda w: after_keys(w.squeeze(1)),
        "in_proj_z.weight": by_value,
        "in_proj_b.weight": by_head,
        "in_proj_a.weight": by_head,
        "dt_bias": by_head,
        "A_log": lambda w: -by_head(w).exp(),
        "linear_attn.out_proj.weight": lambda w: by_value(w.T).T,
    }


def tiled(w: "Tensor", n_keys: int, n_values: int, width: int = 1) -> "Tensor":
    """Value heads, `width` rows of `w` each, from grouped to tiled order."""
    return w.unflatten(0, (n_keys, n_values // n_keys, width)).transpose(0, 1).flatten(0, 2)


def _qwen_keys(config: "PretrainedConfig") -> dict[str, Key]:
    return _decoder_keys(config) | {
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
    }


# --- LFM2 and Mamba-2 ------------------------------------------------------------------------------------------------


def _lfm2(config: "PretrainedConfig") -> dict[str, Key]:
    _require(config, conv_bias=False)
    _require_layers(config, CONV, FULL)
    return _decoder_keys(config) | {
        # a layer without heads of its own is a convolution
        "attention.head_count_kv": [config.num_key_value_heads if k == FULL else 0 for k in config.layer_types],
        "attention.layer_norm_rms_epsilon": float(config.norm_eps),
        "shortconv.l_cache": config.conv_L_cache,
    }


def _mamba2(config: "PretrainedConfig") -> dict[str, Key]:
    _require(config, hidden_act="silu", use_bias=False, use_conv_bias=True, time_step_limit=(0.0, float("inf")))
    return {
        "block_count": config.num_hidden_layers,
        "context_length": 2**20,  # Mamba has no positions; llama.cpp's own converter writes this one
        "embedding_length": config.hidden_size,
        "attention.head_count": 0,
        "vocab_size": config.vocab_size,
        "attention.layer_norm_rms_epsilon": float(config.layer_norm_epsilon),
        "ssm.conv_kernel": config.conv_kernel,
        "ssm.inner_size": config.num_heads * config.head_dim,
        "ssm.state_size": config.state_size,
        "ssm.time_step_rank": config.num_heads,
        "ssm.group_count": config.n_groups,
    }


def _mamba2_changes(config: "PretrainedConfig") -> dict[str, Change]:
    return {
        "conv1d.weight": lambda w: w.squeeze(1),
        "A_log": lambda w: -w.exp()[:, None],
        "mixer.D": lambda w: w[:, None],
        "mixer.norm.weight": lambda w: w.unflatten(0, (config.n_groups, -1)),
    }


FAMILIES: Mapping[str, Family] = {
    "qwen3_5_text": Family("qwen35", _qwen35, _qwen35_changes),
    "lfm2": Family("lfm2", _lfm2, lambda config: {"conv.conv.weight": lambda w: w.squeeze(1)}),
    "mamba2": Family("mamba2", _mamba2, _mamba2_changes),
    "qwen3": Family("qwen3", _qwen3, lambda config: {}),
}
"""By the `model_type` of a config.json."""


def _decoder_keys(config: "PretrainedConfig") -> dict[str, Key]:
    """The sizes that every decoder with attention layers states. InputError for scaled rotary embeddings."""
    rope = config.rope_parameters or {}
    if rope.get("rope_type", "default") != "default":
        raise refusal("rope_type", rope["rope_type"], "only default, unscaled positions are written")
    return {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "vocab_size": config.vocab_size,
        "attention.head_count": config.num_attention_heads,
        "rope.freq_base": float(rope["rope_theta"]),
    }


def _require(config: "PretrainedConfig", **fields: Any) -> None:
    """InputError unless each field has the one value that llama.cpp's code for this model has built in."""
    for name, wanted in fields.items():
        value = getattr(config, name, None)
        if (tuple(value) if isinstance(value, list) else value) != wanted:
            raise refusal(name, value, f"llama.cpp computes with {wanted!r}")


def _require_layers(config: "PretrainedConfig", *kinds: str) -> None:
    """InputError unless the layers are of these kinds, each there: llama.cpp ends the process on half a hybrid."""
    if set(config.layer_types) != {*kinds}:
        raise refusal("layer_types", config.layer_types, f"it must have layers of {' and of '.join(kinds)}")


def refusal(part: str, value: object, why: str) -> InputError:
    """For a config or tokenizer that transformers runs and llama.cpp, or this converter, does not."""
    return InputError(f"{part} is {value!r:.400}: {why}; such a model runs in torch only (?backend=hf)")
