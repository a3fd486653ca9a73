"""The sizes of a model's recurrent layers, read from its config, and how an engine holds their state.

One description covers four kinds of layer, because a state is always heads x value_dim x key_dim numbers that a token
changes by an outer product of a value (heads x value_dim) and a key (key_heads x key_dim, shared by groups of heads):

                value               key                 gates, float32      convolved before
gated-delta     v                   k                   g, beta             q, k, v
mamba2          x                   B (groups)          dt                  x, B, C
mamba1          x, a channel a head B (one for all)     dt, a channel       x
short-conv      none: the convolution window is all its state               B * x
"""

from enum import StrEnum
from math import prod
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from specnb.errors import InputError, did_you_mean

Count = Annotated[int, Field(ge=0, le=1 << 24)]
Size = Annotated[int, Field(ge=1, le=1 << 24)]
Dtype = Literal["float64", "float32", "bfloat16", "float16"]
ITEM_BYTES: dict[Dtype, int] = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


class Kind(StrEnum):
    """What sort of recurrence the layers run."""

    GATED_DELTA = "gated-delta"
    MAMBA2 = "mamba2"
    MAMBA1 = "mamba1"
    SHORT_CONV = "short-conv"


class _Counts(NamedTuple):
    """How often: gates a head in a replay record; gates a head that exist before the convolution; keys in it."""

    gates: int
    gates_before_conv: int
    keys_in_conv: int


# Mamba-1 computes dt, B and C from the convolved x: its columns before the convolution bring back everything.
_COUNTS = {
    Kind.GATED_DELTA: _Counts(gates=2, gates_before_conv=2, keys_in_conv=2),
    Kind.MAMBA2: _Counts(gates=1, gates_before_conv=1, keys_in_conv=2),
    Kind.MAMBA1: _Counts(gates=1, gates_before_conv=0, keys_in_conv=0),
    Kind.SHORT_CONV: _Counts(gates=0, gates_before_conv=0, keys_in_conv=0),
}


class RecurrentShape(BaseModel):
    """The recurrent layers of one model and how an engine holds them.

    `heads`, `value_dim`, `key_heads`, `key_dim` as in the table above (zeros for short-conv); `conv_channels` is the
    width of the convolution; `conv_width` its taps (4: a step reads 3 columns before its own), `conv_columns` what the
    engine keeps. `record_dtype` is that of values, keys and columns in a replay record.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    family: str
    kind: Kind
    layers: Size
    heads: Count
    value_dim: Count
    key_heads: Count
    key_dim: Count
    conv_channels: Size
    conv_width: Size
    conv_columns: Count
    state_dtype: Dtype = "float32"
    conv_dtype: Dtype = "float32"
    record_dtype: Dtype = "bfloat16"

    @property
    def values(self) -> int:
        """Numbers in one token's value, one layer."""
        return self.heads * self.value_dim

    @property
    def keys(self) -> int:
        """Numbers in one token's key, one layer, not expanded to heads."""
        return self.key_heads * self.key_dim

    @property
    def gates(self) -> int:
        """Gates of one token that its update takes, one layer."""
        return self.heads * _COUNTS[self.kind].gates

    @property
    def gates_before_conv(self) -> int:
        """Of what the gates are made of, the numbers that are projected beside the convolution's input, one layer."""
        return self.heads * _COUNTS[self.kind].gates_before_conv


LAYOUTS: dict[str, tuple[int, Dtype | None]] = {"transformers": (1, None), "llama.cpp": (0, "float32")}
"""Window columns beyond the `conv_width - 1` that are read, and the window's dtype if not the model's.

transformers keeps as many columns as the kernel has taps, of which it reads all but one, in the model's dtype;
llama.cpp keeps what it reads, and all its recurrent planes in float32. Both hold the state itself in float32."""

RECURRENT_LAYERS = frozenset({"linear_attention", "hybrid", "conv", "mamba"})
"""Entries of `layer_types` that carry a recurrent state (hybrid: beside attention, in one layer)."""

_FIELDS = ("conv_width", "heads", "value_dim", "key_heads", "key_dim")
_Names = dict[str, tuple[str, ...]]


def _names(*attributes: str) -> _Names:
    """For each of _FIELDS the config's attributes whose product it is; "" is no attribute: 1."""
    return {field: tuple(names.split()) for field, names in zip(_FIELDS, attributes, strict=True)}


_QWEN_NEXT = _names(
    "linear_conv_kernel_dim",
    *("linear_num_value_heads", "linear_value_head_dim", "linear_num_key_heads", "linear_key_head_dim"),
)
_MAMBA2 = _names("conv_kernel", "num_heads", "head_dim", "n_groups", "state_size")
_BAMBA = _names("mamba_d_conv", "mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state")
_NEMOTRON = _names("conv_kernel", "mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size")
_ZAMBA2 = _names("mamba_d_conv", "n_mamba_heads", "mamba_headdim", "mamba_ngroups", "mamba_d_state")
_MAMBA = _names("conv_kernel", "intermediate_size", "", "", "state_size")
_JAMBA = _names("mamba_d_conv", "mamba_expand hidden_size", "", "", "mamba_d_state")
_LFM2: _Names = {"conv_width": ("conv_L_cache",), "conv_channels": ("hidden_size",)}

FAMILIES: dict[str, tuple[Kind, _Names]] = {
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid"), (Kind.GATED_DELTA, _QWEN_NEXT)),
    **dict.fromkeys(("falcon_h1", "bamba", "granitemoehybrid"), (Kind.MAMBA2, _BAMBA)),
    "mamba2": (Kind.MAMBA2, _MAMBA2),
    "nemotron_h": (Kind.MAMBA2, _NEMOTRON),
    "zamba2": (Kind.MAMBA2, _ZAMBA2),
    **dict.fromkeys(("mamba", "falcon_mamba"), (Kind.MAMBA1, _MAMBA)),
    "jamba": (Kind.MAMBA1, _JAMBA),
    **dict.fromkeys(("lfm2", "lfm2_moe"), (Kind.SHORT_CONV, _LFM2)),
}
"""transformers' `model_type` -> the kind of its recurrent layers and where its config keeps their sizes."""


def shape_of(config: Any, *, layout: str = "transformers", dtype: Dtype | None = None) -> RecurrentShape:
    """The recurrent layers of a transformers config (of its text part, if it has parts), held as `layout` does.

    `dtype` is what the activations are computed in, by default the config's own, else float32. Sizes are read from the
    config; no model is built.

    Raises InputError for a family that is not known here, a config without recurrent layers or without a usable size.
    """
    text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    family = getattr(text, "model_type", None)
    if family not in FAMILIES:
        hint = did_you_mean(str(family), sorted(FAMILIES))
        raise InputError(f"no sizes of recurrent layers for model_type {family!r}: {hint}known: {', '.join(FAMILIES)}")
    kind, names = FAMILIES[family]
    dtype = dtype or str(getattr(text, "dtype", None) or "float32").removeprefix("torch.")
    spare_columns, conv_dtype = LAYOUTS[layout]
    sizes = {field: _product(text, family, parts) for field, parts in names.items()}
    sizes = dict.fromkeys(("heads", "value_dim", "key_heads", "key_dim"), 0) | sizes
    values, keys = sizes["heads"] * sizes["value_dim"], sizes["key_heads"] * sizes["key_dim"]
    channels = {"conv_channels": values + _COUNTS[kind].keys_in_conv * keys} | sizes
    return RecurrentShape(
        family=family,
        kind=kind,
        layers=_recurrent_layers(text, family),
        conv_columns=channels["conv_width"] - 1 + spare_columns,
        conv_dtype=conv_dtype or dtype,
        record_dtype=dtype,
        **channels,
    )


def _recurrent_layers(config: Any, family: str) -> int:
    kinds = [str(kind) for kind in getattr(config, "layer_types", None) or ()]
    count = sum(kind in RECURRENT_LAYERS for kind in kinds)
    if not count:
        seen = ", ".join(sorted(set(kinds))) or "none are listed"
        raise InputError(f"this {family} config has no recurrent layer (layer_types: {seen}): a crop rolls it back")
    return count


def _product(config: Any, family: str, names: tuple[str, ...]) -> int:
    sizes = {name: getattr(config, name, None) for name in names}
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int | float) or not 0 < size < 1 << 24:
            raise InputError(f"{name} is {size!r} in this {family} config: a size is a number from 1 up")
    return int(prod(sizes.values()))
