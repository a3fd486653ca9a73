"""Planted faults of weights: scaled experts, experts in another order, a head that was never loaded.

Each is `fault(draft, target=None, *, …)`, a context manager that yields its `Fault`; none depends on the target.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from specnb.divergence.parts import find, output_head
from specnb.divergence.planted.fault import ALL, Fault, arguments, forward_replaced, values_changed, with_argument
from specnb.errors import InputError

OUTPUT_SIDE = ("down_proj", "w2")
"""How names of the parameters begin that make an expert's output, so that scaling them scales it."""


@contextmanager
def expert_scale(
    draft: nn.Module,
    target: nn.Module | None = None,
    *,
    layer: int = 0,
    eps: float = 0.02,
    expert: int | None = None,
    in_op: bool = False,
) -> Iterator[Fault]:
    """The output of one bank of experts is (1 + eps) times what it should be: a wrong quantisation scale.

    `expert`: only that one, so only tokens routed to it; None for the whole bank. The wrong scale is in the parameters,
    or with `in_op` in what the op makes of right ones (the weights it combines experts with).
    """
    path, module = find(draft).bank(layer)
    if expert is not None and not 0 <= expert < module.num_experts:
        raise InputError(f"there is no expert {expert!r} in {path}: it has {module.num_experts}")
    fault = Fault("WEIGHTS", path, ALL, f"output times {1 + eps:g}", ("sglang#39087", "sglang#22823"))
    if in_op:
        with forward_replaced(module, _combine_scaled(eps, expert)):
            yield fault
        return
    which = slice(None) if expert is None else expert
    with values_changed({weight: _scaled(weight, which, eps) for weight in _output_side(path, module)}):
        yield fault


@contextmanager
def experts_permuted(
    draft: nn.Module, target: nn.Module | None = None, *, layer: int = 0, seed: int = 0
) -> Iterator[Fault]:
    """Every expert of a bank stands at another expert's index: a loader that got the order wrong."""
    path, module = find(draft).bank(layer)
    ring = torch.randperm(module.num_experts, generator=torch.Generator().manual_seed(seed))
    order = torch.empty_like(ring)
    order[ring] = ring.roll(1)  # one cycle through all of them: none stays where it was
    weights = [weight for weight in module.parameters(recurse=False) if len(weight) == module.num_experts]
    with values_changed({weight: weight.detach()[order.to(weight.device)] for weight in weights}):
        yield Fault("WEIGHTS", path, ALL, "the experts of this bank are in another order")


@contextmanager
def random_head(draft: nn.Module, target: nn.Module | None = None, *, seed: int = 0) -> Iterator[Fault]:
    """The output head has weights as drawn at construction: a head that no checkpoint had, or a tie that was lost.

    The parameter is another object inside, so an embedding that was tied to the head keeps its values.
    """
    path, head = output_head(draft)
    draw = torch.Generator().manual_seed(seed)
    std = getattr(getattr(draft, "config", None), "initializer_range", 0.02)
    fresh = (std * torch.randn(head.weight.shape, generator=draw)).to(head.weight)
    note = "the head's weights are those of a new layer"
    fault = Fault("HEAD", path, ALL, note, ("vllm#46435", "sglang#27829", "speculators#1131"))
    before = head.weight
    head.weight = nn.Parameter(fresh, requires_grad=before.requires_grad)
    try:
        yield fault
    finally:
        head.weight = before


def _combine_scaled(eps: float, expert: int | None) -> Any:
    """A bank's output is linear in the weights that combine its experts: scaling those scales the output."""

    def run(original: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        bound = arguments(original, args, kwargs)
        names = list(bound.arguments)
        if len(names) != 3:
            raise InputError(f"a bank that is called with {', '.join(names)} does not take (states, indices, weights)")
        indices, weights = (bound.arguments[name] for name in names[1:])
        scale = torch.full_like(weights, 1 + eps)
        combined = weights * (scale if expert is None else scale.where(indices == expert, 1))
        args, kwargs = with_argument(original, args, kwargs, names[2], combined)
        return original(*args, **kwargs)

    return run


def _output_side(path: str, module: nn.Module) -> list[nn.Parameter]:
    found = [weight for name, weight in module.named_parameters(recurse=False) if name.startswith(OUTPUT_SIDE)]
    if not found:
        names = ", ".join(name for name, _ in module.named_parameters(recurse=False))
        raise InputError(f"{path} has no parameter named {' or '.join(OUTPUT_SIDE)}…, only {names}: use in_op=True")
    return found


def _scaled(weight: nn.Parameter, which: slice | int, eps: float) -> torch.Tensor:
    new = weight.detach().clone()
    new[which] *= 1 + eps
    return new
