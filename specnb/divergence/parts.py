"""The parts of a model that the lab speaks of: expert banks, routers, attention, rotary embeddings, the output head."""

from typing import NamedTuple

from torch import nn
from torch.nn import Module

from specnb.divergence.trace import canonical
from specnb.errors import InputError

Named = tuple[str, Module]
"""A module with its canonical path."""


class Parts(NamedTuple):
    """The modules of a model that faults are put on, in the order the model registers them."""

    banks: tuple[Named, ...]
    routers: tuple[Named, ...]
    attentions: tuple[Named, ...]
    rotaries: tuple[Named, ...]


KINDS = {
    "bank": ("banks", "bank of experts (a module with `num_experts` and fused weights)"),
    "router": ("routers", "router (a module with `top_k` beside a bank of experts)"),
    "attention": ("attentions", "attention (a module with `layer_idx` and linear layers)"),
    "rotary": ("rotaries", "rotary embedding (a module with `inv_freq`)"),
}
"""Kinds of parts: where `Parts` has them, and what they are."""


def named(model: Module) -> list[Named]:
    """All modules with their canonical paths."""
    modules = dict(model.named_modules())
    names = canonical(modules)
    return [(names[path], module) for path, module in modules.items()]


def find(model: Module) -> Parts:
    """The parts of any transformers-like model, known by what they have, not by their class."""
    modules = named(model)
    banks = tuple((path, module) for path, module in modules if _is_bank(module))
    blocks = {path.rpartition(".")[0] for path, _ in banks}
    return Parts(
        banks=banks,
        routers=tuple((p, m) for p, m in modules if p.rpartition(".")[0] in blocks and hasattr(m, "top_k")),
        attentions=tuple((path, module) for path, module in modules if _is_attention(module)),
        rotaries=tuple((path, module) for path, module in modules if hasattr(module, "inv_freq")),
    )


def output_head(model: Module) -> Named:
    """The linear layer that makes logits. InputError where the model has none."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    for part in named(model):
        if part[1] is head:
            return part
    raise InputError(f"{type(model).__name__} has no output head: give the model that makes logits")


def part_of(model: Module, kind: str, layer: int | None = None) -> Named:
    """A part of one of KINDS, "head", or "" for the model itself; `layer` None is the first.

    InputError where the model has no such part.
    """
    if kind not in KINDS:
        return output_head(model) if kind else ("", model)
    field, noun = KINDS[kind]
    parts = getattr(find(model), field)
    fitting = [part for part in parts if layer is None or layer_number(part[0]) == layer]
    if not fitting:
        numbers = ", ".join(str(layer_number(path)) for path, _ in parts)
        have = f"layers that have one: {numbers}" if parts else "the model has none"
        raise InputError(f"there is no {noun}" + ("" if layer is None else f" in layer {layer!r}; {have}"))
    return fitting[0]


def layer_number(path: str) -> int | None:
    """The number of the layer a module is in: the first number in its path; None outside the layers."""
    return next((int(part) for part in path.split(".") if part.isdecimal()), None)


def _is_bank(module: Module) -> bool:
    n_experts = getattr(module, "num_experts", None)
    weights = [parameter for parameter in module.parameters(recurse=False) if parameter.dim() == 3]
    return isinstance(n_experts, int) and bool(weights) and all(len(weight) == n_experts for weight in weights)


def _is_attention(module: Module) -> bool:
    has_linear = any(isinstance(child, nn.Linear) for child in module.children())
    return isinstance(getattr(module, "layer_idx", None), int) and has_linear
