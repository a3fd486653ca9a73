"""The four architectures that a GGUF is written of: header keys and a table of weights, as llama.cpp reads them.

A row of a table is a tensor: its GGUF name, its transformers name, its shape in sizes of the config ("->" a new shape,
in the same order of values), and what happens to the values, if anything. A plan is exhaustive both ways: a tensor
that the tables lack, and one that the folder lacks, are errors.

Where Qwen3.5 (`qwen3_5_text`, llama.cpp's "qwen35") disagrees on the meaning of a weight:

- transformers multiplies a normed vector by 1 + w, llama.cpp by w; the gated norm inside a linear layer has w in both;
- transformers keeps log(-A), llama.cpp A itself (of Mamba-2 too);
- with more value heads than key heads, transformers gives key head i the value heads i·r … i·r + r - 1 (r value heads
  a key head), llama.cpp the heads i, i + n, i + 2n … (n key heads): the value heads are put in that order everywhere.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from specnb.errors import InputError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

Change = Callable[[np.ndarray], np.ndarray]
Key = bool | int | float | str | Sequence[bool] | Sequence[int] | Sequence[str]

LINEAR, CONV, FULL = "linear_attention", "conv", "full_attention"
MAMBA2_CONTEXT = 2**20
"""Mamba has no positions and its config no limit; llama.cpp wants a number, and its own converter writes this one."""
DEFAULT_SECTIONS = [11, 11, 10]
"""What transformers takes for `mrope_section` where a config gives none."""


@dataclass(frozen=True)
class Weight:
    """One tensor: its GGUF name, the transformers tensor it comes from with its shape, and what happens to the values.

    Vectors, and weights that change their shape, stay float32 whatever the file's type is: llama.cpp's kernels read
    them so.
    """

    name: str
    source: str
    shape: tuple[int, ...]
    written_shape: tuple[int, ...]
    change: Change | None = None

    @property
    def exact(self) -> bool:
        """Whether it stays float32."""
        return self.written_shape != self.shape or len(self.shape) == 1


@dataclass(frozen=True)
class Plan:
    """`keys` are written as `ARCH.key`. Tensors whose name starts with one of `skipped` are not the text model's."""

    arch: str
    keys: Mapping[str, Key]
    weights: Sequence[Weight]
    skipped: tuple[str, ...] = ()


# --- Qwen3 and Qwen3.5 -----------------------------------------------------------------------------------------------

TOP = """
token_embd.weight           model.embed_tokens.weight           vocab,hidden
output_norm.weight          model.norm.weight                   hidden                 norm
output.weight               lm_head.weight                      vocab,hidden
"""
QWEN_FEED_FORWARD = """
attn_norm.weight            input_layernorm.weight              hidden                 norm
ffn_gate.weight             mlp.gate_proj.weight                wide,hidden
ffn_up.weight               mlp.up_proj.weight                  wide,hidden
ffn_down.weight             mlp.down_proj.weight                hidden,wide
"""
# with a gate both engines keep the rows of q_proj as query and gate by turns, head by head
QWEN_ATTENTION = """
attn_q.weight               self_attn.q_proj.weight             queries_gates,hidden
attn_k.weight               self_attn.k_proj.weight             keys,hidden
attn_v.weight               self_attn.v_proj.weight             keys,hidden
attn_output.weight          self_attn.o_proj.weight             hidden,queries
attn_q_norm.weight          self_attn.q_norm.weight             size                   norm
attn_k_norm.weight          self_attn.k_norm.weight             size                   norm
"""
QWEN3_NORM = """
ffn_norm.weight             post_attention_layernorm.weight     hidden
"""
QWEN35_NORM = """
post_attention_norm.weight  post_attention_layernorm.weight     hidden                 norm
"""
QWEN35_LINEAR = """
attn_qkv.weight             linear_attn.in_proj_qkv.weight      channels,hidden        after_keys
attn_gate.weight            linear_attn.in_proj_z.weight        values,hidden          by_value
ssm_beta.weight             linear_attn.in_proj_b.weight        heads,hidden           by_head
ssm_alpha.weight            linear_attn.in_proj_a.weight        heads,hidden           by_head
ssm_dt.bias                 linear_attn.dt_bias                 heads                  by_head
ssm_a                       linear_attn.A_log                   heads                  decay_by_head
ssm_conv1d.weight           linear_attn.conv1d.weight           channels,1,window->channels,window  after_keys
ssm_norm.weight             linear_attn.norm.weight             state
ssm_out.weight              linear_attn.out_proj.weight         hidden,values          columns_by_value
"""


def qwen3(config: "PretrainedConfig") -> Plan:
    """Keys and weights of a `Qwen3Config`. InputError for what llama.cpp's code for qwen3 does not compute."""
    _require(config, hidden_act="silu", attention_bias=False)
    if set(config.layer_types) != {FULL}:
        raise _refusal("layer_types", config.layer_types, "llama.cpp's qwen3 has no sliding windows")
    sizes = _sizes(config, config.head_dim)
    layer = QWEN_FEED_FORWARD + QWEN3_NORM + QWEN_ATTENTION
    return _plan("qwen3", config, _qwen_keys(config), TOP, [layer] * config.num_hidden_layers, sizes)


def qwen35(config: "PretrainedConfig") -> Plan:
    """Keys and weights of a `Qwen3_5TextConfig`. InputError for what llama.cpp's code for qwen35 does not compute."""
    state = config.linear_key_head_dim
    # llama.cpp takes the norms' epsilon for the length of q and k too, and its recurrent state is square
    _require(config, hidden_act="silu", attention_bias=False, rms_norm_eps=1e-6, linear_value_head_dim=state)
    _require_both(config, LINEAR, FULL)
    n_keys, n_values = config.linear_num_key_heads, config.linear_num_value_heads
    sizes = _sizes(config, config.head_dim, gates=1) | {
        "channels": (2 * n_keys + n_values) * state,
        "values": n_values * state,
        "heads": n_values,
        "state": state,
        "window": config.linear_conv_kernel_dim,
    }
    by_head, by_value = (_tiled_rows(n_keys, n_values, width) for width in (1, state))
    changes = {
        "norm": lambda w: 1 + w,
        "by_head": by_head,
        "decay_by_head": lambda w: -np.exp(by_head(w)),
        "by_value": by_value,
        "columns_by_value": lambda w: by_value(w.T).T,
        "after_keys": _tiled_rows(n_keys, n_values, state, start=2 * n_keys * state),
    }
    kinds = {LINEAR: QWEN35_LINEAR, FULL: QWEN_ATTENTION}
    layers = [QWEN_FEED_FORWARD + QWEN35_NORM + kinds[kind] for kind in config.layer_types]
    # heads for predicting several tokens are not part of what transformers runs either
    return _plan("qwen35", config, _qwen35_keys(config), TOP, layers, sizes, changes=changes, skipped=("mtp.",))


def tiled_heads(n_keys: int, n_values: int, width: int) -> np.ndarray:
    """Where each of `n_values * width` rows comes from when value heads go from grouped to tiled order."""
    return np.arange(n_values * width).reshape(n_keys, n_values // n_keys, width).swapaxes(0, 1).ravel()


def _tiled_rows(n_keys: int, n_values: int, width: int, start: int = 0) -> Change:
    """Value heads of `width` rows each, from row `start` on, in tiled order."""

    def reorder(weight: np.ndarray) -> np.ndarray:
        return np.concatenate([weight[:start], weight[start:][tiled_heads(n_keys, n_values, width)]])

    return reorder


def _qwen_keys(config: "PretrainedConfig") -> dict[str, Key]:
    return _decoder_keys(config, config.intermediate_size) | {
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
    }


def _qwen35_keys(config: "PretrainedConfig") -> dict[str, Key]:
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
        raise _refusal("partial_rotary_factor", factor, f"it rotates {rotated} values of a head, not an even number")
    sections = config.rope_parameters.get("mrope_section", DEFAULT_SECTIONS)
    uncovered = [i for i in range(min(rotated // 2, sum(sections))) if i >= 3 * sections[i % 3]]
    if uncovered:
        raise _refusal("mrope_section", sections, f"llama.cpp would not turn frequency {uncovered[0]}")
    return rotated, [*sections, 0]


# --- LFM2 ------------------------------------------------------------------------------------------------------------

LFM2_TOP = """
token_embd.weight           model.embed_tokens.weight           vocab,hidden
token_embd_norm.weight      model.embedding_norm.weight         hidden
output.weight               lm_head.weight                      vocab,hidden
"""
LFM2_FEED_FORWARD = """
attn_norm.weight            operator_norm.weight                hidden
ffn_norm.weight             ffn_norm.weight                     hidden
ffn_gate.weight             feed_forward.w1.weight              wide,hidden
ffn_up.weight               feed_forward.w3.weight              wide,hidden
ffn_down.weight             feed_forward.w2.weight              hidden,wide
"""
LFM2_ATTENTION = (
    QWEN_ATTENTION.replace("o_proj", "out_proj").replace(".q_norm", ".q_layernorm").replace(".k_norm", ".k_layernorm")
)
LFM2_CONV = """
shortconv.in_proj.weight    conv.in_proj.weight                 channels,hidden
shortconv.out_proj.weight   conv.out_proj.weight                hidden,hidden
shortconv.conv.weight       conv.conv.weight                    hidden,1,window->hidden,window
"""


def lfm2(config: "PretrainedConfig") -> Plan:
    """Keys and weights of an `Lfm2Config`. InputError for what llama.cpp's code for lfm2 does not compute."""
    _require(config, conv_bias=False)
    if config.conv_L_cache < 2:
        raise _refusal("conv_L_cache", config.conv_L_cache, "a window of one keeps no state, which ends llama.cpp")
    _require_both(config, CONV, FULL)
    wide = _lfm2_width(config)
    sizes = _sizes(config, config.hidden_size // config.num_attention_heads)
    sizes |= {"wide": wide, "channels": 3 * config.hidden_size, "window": config.conv_L_cache}
    keys = _decoder_keys(config, wide) | {
        # a layer without heads of its own is a convolution
        "attention.head_count_kv": [config.num_key_value_heads if k == FULL else 0 for k in config.layer_types],
        "attention.layer_norm_rms_epsilon": float(config.norm_eps),
        "shortconv.l_cache": config.conv_L_cache,
    }
    kinds = {CONV: LFM2_CONV, FULL: LFM2_ATTENTION}
    layers = [LFM2_FEED_FORWARD + kinds[kind] for kind in config.layer_types]
    return _plan("lfm2", config, keys, LFM2_TOP, layers, sizes)


def _lfm2_width(config: "PretrainedConfig") -> int:
    """The width that transformers builds: a config may ask for two thirds of `intermediate_size`, rounded up."""
    width = config.intermediate_size
    if config.block_auto_adjust_ff_dim:
        width = int(2 * width / 3)
        if config.block_ffn_dim_multiplier is not None:
            width = int(config.block_ffn_dim_multiplier * width)
            multiple = config.block_multiple_of
            width = multiple * ((width + multiple - 1) // multiple)
    return width


# --- Mamba-2 ---------------------------------------------------------------------------------------------------------

MAMBA2_TOP = """
token_embd.weight           backbone.embeddings.weight          vocab,hidden
output_norm.weight          backbone.norm_f.weight              hidden
output.weight               lm_head.weight                      vocab,hidden
"""
MAMBA2_LAYER = """
attn_norm.weight            norm.weight                         hidden
ssm_in.weight               mixer.in_proj.weight                projected,hidden
ssm_conv1d.weight           mixer.conv1d.weight                 channels,1,window->channels,window
ssm_conv1d.bias             mixer.conv1d.bias                   channels
ssm_dt.bias                 mixer.dt_bias                       heads
ssm_a                       mixer.A_log                         heads->heads,1         decay
ssm_d                       mixer.D                             heads->heads,1
ssm_norm.weight             mixer.norm.weight                   inner->groups,in_group
ssm_out.weight              mixer.out_proj.weight               hidden,inner
"""


def mamba2(config: "PretrainedConfig") -> Plan:
    """Keys and weights of a `Mamba2Config`. InputError for what llama.cpp's code for mamba2 does not compute."""
    _require(config, hidden_act="silu", use_bias=False, use_conv_bias=True, time_step_limit=(0.0, float("inf")))
    heads, groups = config.num_heads, config.n_groups
    inner = heads * config.head_dim
    channels = inner + 2 * groups * config.state_size
    sizes = {
        "vocab": config.vocab_size,
        "hidden": config.hidden_size,
        "projected": inner + channels + heads,
        "channels": channels,
        "window": config.conv_kernel,
        "heads": heads,
        "inner": inner,
        "groups": groups,
        "in_group": inner // groups,
    }
    keys = {
        "block_count": config.num_hidden_layers,
        "context_length": MAMBA2_CONTEXT,
        "embedding_length": config.hidden_size,
        "feed_forward_length": 0,  # unused, but asked for
        "attention.head_count": 0,
        "vocab_size": config.vocab_size,
        "attention.layer_norm_rms_epsilon": float(config.layer_norm_epsilon),
        "ssm.conv_kernel": config.conv_kernel,
        "ssm.inner_size": inner,
        "ssm.state_size": config.state_size,
        "ssm.time_step_rank": heads,
        "ssm.group_count": groups,
    }
    layers = [MAMBA2_LAYER] * config.num_hidden_layers
    changes = {"decay": lambda log: -np.exp(log)}
    return _plan("mamba2", config, keys, MAMBA2_TOP, layers, sizes, prefix="backbone.layers", changes=changes)


FAMILIES: Mapping[str, Callable[["PretrainedConfig"], Plan]] = {
    "qwen3_5_text": qwen35,
    "lfm2": lfm2,
    "mamba2": mamba2,
    "qwen3": qwen3,
}
"""`model_type` of a config.json -> its plan."""


# --- from tables to a plan -------------------------------------------------------------------------------------------


def _plan(
    arch: str,
    config: "PretrainedConfig",
    keys: Mapping[str, Key],
    top: str,
    layers: Sequence[str],
    sizes: Mapping[str, int],
    *,
    prefix: str = "model.layers",
    changes: Mapping[str, Change] | None = None,
    skipped: tuple[str, ...] = (),
) -> Plan:
    """The plan of tables: `top`, and one of `layers` for each layer.

    A tied output may be stored all the same; transformers takes the embedding.
    """
    changes = changes or {}
    weights = _weights(top, sizes, changes)
    for i, layer in enumerate(layers):
        weights += _weights(layer, sizes, changes, f"blk.{i}.", f"{prefix}.{i}.")
    if config.tie_word_embeddings:
        weights = [weight for weight in weights if weight.name != "output.weight"]
        skipped += ("lm_head.weight",)
    return Plan(arch, keys, weights, skipped)


def _weights(
    table: str, sizes: Mapping[str, int], changes: Mapping[str, Change], to: str = "", of: str = ""
) -> list[Weight]:
    known = {**sizes, "1": 1}
    weights = []
    for row in filter(None, table.splitlines()):
        name, source, shapes, *change = row.split()
        before, _, after = shapes.partition("->")
        shape, written = (tuple(known[size] for size in part.split(",")) for part in (before, after or before))
        weights.append(Weight(to + name, of + source, shape, written, changes.get(change[0]) if change else None))
    return weights


def _sizes(config: "PretrainedConfig", size: int, gates: int = 0) -> dict[str, int]:
    """The sizes of a decoder with attention heads of `size` values."""
    queries = config.num_attention_heads * size
    return {
        "vocab": config.vocab_size,
        "hidden": config.hidden_size,
        "wide": config.intermediate_size,
        "size": size,
        "queries": queries,
        "queries_gates": (1 + gates) * queries,
        "keys": config.num_key_value_heads * size,
    }


def _decoder_keys(config: "PretrainedConfig", feed_forward: int) -> dict[str, Key]:
    """The sizes that every decoder with attention layers states. InputError for scaled rotary embeddings."""
    rope = config.rope_parameters or {}
    if rope.get("rope_type", "default") != "default":
        raise _refusal("rope_type", rope["rope_type"], "only default, unscaled positions are written")
    return {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": feed_forward,
        "vocab_size": config.vocab_size,
        "attention.head_count": config.num_attention_heads,
        "rope.freq_base": float(rope["rope_theta"]),
    }


def _require(config: "PretrainedConfig", **fields: Any) -> None:
    """InputError unless each field has the one value that llama.cpp's code for this model has built in."""
    for name, wanted in fields.items():
        value = getattr(config, name, None)
        if (tuple(value) if isinstance(value, list) else value) != wanted:
            raise _refusal(name, value, f"llama.cpp computes with {wanted!r}")


def _require_both(config: "PretrainedConfig", recurrent: str, full: str) -> None:
    """InputError unless `layer_types` names one of the two kinds for each layer, and both of them.

    llama.cpp ends the process on a hybrid without recurrent layers, transformers fails on one without attention.
    """
    kinds = config.layer_types
    if len(kinds) != config.num_hidden_layers or set(kinds) != {recurrent, full}:
        raise _refusal("layer_types", kinds, f"it must name {recurrent} or {full} for each layer, and both of them")


def _refusal(name: str, value: object, why: str) -> InputError:
    """For a config that transformers runs and llama.cpp, or this converter, does not."""
    return InputError(f"config.json: {name} is {value!r:.80}: {why}; such a model runs in torch only (?backend=hf)")
