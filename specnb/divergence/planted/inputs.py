"""Planted faults of what goes in and comes out: positions, fed tokens, the head, the order of a sum.

Each is `fault(draft, target=None, *, …)`, a context manager that yields its `Fault`; none depends on the target. Two
are controls: `uniform_offset` and `split_k` change numbers and must not be called structural.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from specnb.divergence.parts import find, layer_number, named
from specnb.divergence.planted.fault import (
    ALL,
    Fault,
    arguments,
    forward_replaced,
    positions_argument,
    positions_fed,
    with_argument,
)
from specnb.errors import InputError


@contextmanager
def rope_mismatch(
    draft: nn.Module, target: nn.Module | None = None, *, start: int = 8, factor: float = 4.0
) -> Iterator[Fault]:
    """Positions from `start` on are rotated as if the context were scaled by `factor`; cached keys before are not.

    As where one code path reads the RoPE overrides and another does not.
    """
    note = f"positions from {start} on are divided by {factor:g} before they are rotated"
    path = find(draft).rotary()[0]
    fault = Fault("POSITION", path, ((start, None),), note, ("vllm#58080", "vllm#57941"))
    with _positions_changed(draft, lambda positions: torch.where(positions < start, positions, positions / factor)):
        yield fault


@contextmanager
def uniform_offset(draft: nn.Module, target: nn.Module | None = None, *, offset: int = 1) -> Iterator[Fault]:
    """Control: all positions are `offset` higher. RoPE is relative, so what attention makes is off by rounding only."""
    fault = Fault("PRECISION_ONLY", None, ALL, f"every position is {offset} higher: no fault at all")
    with _positions_changed(draft, lambda positions: positions + offset):
        yield fault


@contextmanager
def dummy_tokens(
    draft: nn.Module, target: nn.Module | None = None, *, start: int = 8, token: int = 0
) -> Iterator[Fault]:
    """From position `start` on the draft is fed `token` in place of its input, as past a wrong maximal length."""
    note = f"from position {start} on token {token} is fed"
    fault = Fault("INPUT", "", ((start, None),), note, ("vllm#58080",))

    def feed(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        bound = arguments(model.forward, args, kwargs)
        ids = bound.arguments.get("input_ids")
        if ids is None:
            raise InputError("the draft was not called with `input_ids`: there is no token to replace")
        fed = torch.where(positions_fed(bound) < start, ids, token)
        return with_argument(model.forward, args, kwargs, "input_ids", fed)

    # before all other hooks: whoever watches the model sees what it was really fed
    handle = draft.register_forward_pre_hook(feed, with_kwargs=True, prepend=True)
    try:
        yield fault
    finally:
        handle.remove()


@contextmanager
def split_k(draft: nn.Module, target: nn.Module | None = None, *, layer: int | None = None) -> Iterator[Fault]:
    """Control: linear layers sum in parts, how many depends on the number of rows, as kernels do. Rounding only.

    `layer`: only the linear layers in it, None for all in the model's layers. InputError where there is none.
    """
    modules = [(path, module) for path, module in _linears(draft) if layer in (None, layer_number(path))]
    if not modules:
        raise InputError(f"layer {layer!r} has no linear layer" if layer is not None else "no layer has a linear layer")
    with ExitStack() as planted:
        for _, module in modules:
            planted.enter_context(forward_replaced(module, _in_parts(module)))
        note = "sums over features are made in parts, whose number depends on the number of rows"
        yield Fault("PRECISION_ONLY", None, ALL, note, ("vllm#54506", "llama.cpp#23335"))


def _in_parts(linear: nn.Linear) -> Any:
    def run(original: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        (states,) = arguments(original, args, kwargs).args
        n_rows = states.numel() // states.shape[-1]
        n_parts = 4 if n_rows <= 4 else 2
        halves = zip(states.chunk(n_parts, -1), linear.weight.chunk(n_parts, -1), strict=True)
        total = sum(functional.linear(part, weight) for part, weight in halves)
        return total if linear.bias is None else total + linear.bias

    return run


@contextmanager
def _positions_changed(draft: nn.Module, change: Any) -> Iterator[None]:
    """All rotary embeddings of the draft see `change(positions)`."""

    def run(original: Any, *args: Any, **kwargs: Any) -> Any:
        name, positions = positions_argument(arguments(original, args, kwargs))
        args, kwargs = with_argument(original, args, kwargs, name, change(positions))
        return original(*args, **kwargs)

    find(draft).rotary()
    with ExitStack() as planted:
        for _, rotary in find(draft).rotaries:
            planted.enter_context(forward_replaced(rotary, run))
        yield


def _linears(draft: nn.Module) -> list[tuple[str, nn.Linear]]:
    inside = (each for each in named(draft) if layer_number(each[0]) is not None)
    return [(path, module) for path, module in inside if isinstance(module, nn.Linear)]
