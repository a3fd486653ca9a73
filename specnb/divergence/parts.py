"""The parts of a model that the lab speaks of: expert banks, routers, attention, rotary embeddings, the output head."""

from dataclasses import dataclass

from torch import nn

from specnb.divergence.trace import canonical
from specnb.errors import InputError

BANK = "bank of experts (a module with `num_experts` and fused weights)"

Named = tuple[str, nn.Module]
"""A module with its canonical path."""


@dataclass(frozen=True)
class Parts:
    """The modules of a model that faults are put on, in the order the model registers them."""

    banks: tuple[Named, ...]
    routers: tuple[Named, ...]
    attentions: tuple[Named, ...]
    rotaries: tuple[Named, ...]

    def every_bank(self) -> tuple[Named, ...]:
        """All banks of experts, in call order. InputError for a model without any."""
        if not self.banks:
            raise InputError(f"the model has no {BANK}: this fault is one of mixtures of experts")
        return self.banks

    def bank(self, layer: int) -> Named:
        """The bank of experts of a layer. InputError where there is none."""
        return _of_layer(self.banks, layer, BANK)

    def router(self, layer: int) -> Named:
        """The router of a layer. InputError where there is none."""
        return _of_layer(self.routers, layer, "router (a module with `top_k` beside a bank of experts)")

    def attention(self, layer: int) -> Named:
        """The attention of a layer. InputError where there is none."""
        return _of_layer(self.attentions, layer, "attention (a module with `layer_idx` and linear layers)")

    def rotary(self) -> Named:
        """The first module that makes rotary positions. InputError where there is none."""
        if not self.rotaries:
            raise InputError("the model has no rotary embedding (a module with `inv_freq`): this fault needs one")
        return self.rotaries[0]


def named(model: nn.Module) -> list[Named]:
    """All modules with their canonical paths. InputError for a compiled model, whose modules' forward is not run."""
    if hasattr(model, "_orig_mod"):
        raise InputError("a compiled model does not run its modules' own forward: plant faults in the eager model")
    modules = dict(model.named_modules())
    names = canonical(modules)
    return [(names[path], module) for path, module in modules.items()]


def find(model: nn.Module) -> Parts:
    """The parts of any transformers-like model, known by what they have, not by their class.

    Parts that are missing are empty, and an InputError where a fault asks for them. InputError for a compiled model.
    """
    modules = named(model)
    banks = tuple((path, module) for path, module in modules if _is_bank(module))
    blocks = {path.rpartition(".")[0] for path, _ in banks}
    return Parts(
        banks=banks,
        routers=tuple((p, m) for p, m in modules if p.rpartition(".")[0] in blocks and hasattr(m, "top_k")),
        attentions=tuple((path, module) for path, module in modules if _is_attention(module)),
        rotaries=tuple((path, module) for path, module in modules if hasattr(module, "inv_freq")),
    )


def output_head(model: nn.Module) -> Named:
    """The linear layer that makes logits. InputError where the model has none."""
    get = getattr(model, "get_output_embeddings", None)
    head = get() if get is not None else None
    for path, module in named(model):
        if module is head:
            return path, module
    raise InputError(f"{type(model).__name__} has no output head: give the model that makes logits")


def layer_number(path: str) -> int | None:
    """The number of the layer a module is in: the first number in its path; None outside the layers."""
    return next((int(part) for part in path.split(".") if part.isdecimal()), None)


def _is_bank(module: nn.Module) -> bool:
    n_experts = getattr(module, "num_experts", None)
    weights = [parameter for parameter in module.parameters(recurse=False) if parameter.dim() == 3]
    return isinstance(n_experts, int) and bool(weights) and all(len(weight) == n_experts for weight in weights)


def _is_attention(module: nn.Module) -> bool:
    has_linear = any(isinstance(child, nn.Linear) for child in module.children())
    return isinstance(getattr(module, "layer_idx", None), int) and has_linear


def _of_layer(parts: tuple[Named, ...], layer: int, noun: str) -> Named:
    for path, module in parts:
        if layer_number(path) == layer:
            return path, module
    numbers = sorted({number for path, _ in parts if (number := layer_number(path)) is not None})
    have = f"layers that have one: {', '.join(map(str, numbers))}" if numbers else "the model has none"
    raise InputError(f"layer {layer!r} has no {noun}; {have}")
