"""Find the parts of a model: expert banks, routers, attention, rotary embeddings, the head."""

from torch import nn
from torch.nn import Module

from specnb.divergence.trace import canonical
from specnb.errors import InputError

Named = tuple[str, Module]
"""A module with its canonical path."""


KINDS = {
    "bank": "bank of experts (a module with `num_experts` and fused weights)",
    "router": "router (a module with `top_k` next to a bank of experts)",
    "attention": "attention (a module with `layer_idx` and linear layers)",
    "rotary": "rotary embedding (a module with `inv_freq`)",
    "head": "output head (what `get_output_embeddings` returns)",
}
"""Kinds of parts, and how they are recognized."""


def find_modules(model: Module) -> list[Named]:
    """Return all modules with their canonical paths."""
    modules = dict(model.named_modules())
    names = canonical(modules)
    return [(names[path], module) for path, module in modules.items()]


def find(model: Module) -> dict[str, list[Named]]:
    """Return the parts of a Transformers-style model by kind, each in order of registration."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    tests = {
        "bank": _is_bank,
        "router": lambda module: hasattr(module, "top_k"),
        "attention": _is_attention,
        "rotary": lambda module: hasattr(module, "inv_freq"),
        "head": lambda module: module is head,
    }
    modules = find_modules(model)
    parts = {kind: [part for part in modules if test(part[1])] for kind, test in tests.items()}
    blocks = {path.rpartition(".")[0] for path, _ in parts["bank"]}
    parts["router"] = [part for part in parts["router"] if part[0].rpartition(".")[0] in blocks]
    return parts


def part_of(model: Module, kind: str, layer: int | None = None) -> Named:
    """Return the part of this kind in `layer`, by default the first; the model itself for "".

    Raises InputError if the model has no such part.
    """
    if not kind:
        return "", model
    parts = find(model)[kind]
    for part in parts:
        if layer in (None, layer_number(part[0])):
            return part
    layers = [layer_number(path) for path, _ in parts]
    raise InputError(f"got layer {layer}, which has no {KINDS[kind]}; layers with one: {layers}")


def layer_number(path: str) -> int | None:
    """Return the layer index of a module, the first number in its path; None outside layers."""
    return next((int(part) for part in path.split(".") if part.isdecimal()), None)


def _is_bank(module: Module) -> bool:
    sizes = {
        len(parameter) for parameter in module.parameters(recurse=False) if parameter.dim() == 3
    }
    return sizes == {getattr(module, "num_experts", None)}


def _is_attention(module: Module) -> bool:
    has_linear = any(isinstance(child, nn.Linear) for child in module.children())
    return isinstance(getattr(module, "layer_idx", None), int) and has_linear
