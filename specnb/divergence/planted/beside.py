"""Planted faults that come from a neighbour: its experts, its buffer, its routing, its memory.

Each is `fault(draft, target=None, *, …)`, a context manager that yields its `Fault`. Without a target they do nothing,
as in a draft that runs alone; `first` is None then.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from specnb.divergence.parts import Named, find
from specnb.divergence.planted.fault import ALL, Around, Clock, Fault, arguments, forward_replaced
from specnb.errors import InputError


@contextmanager
def positional_registry(
    draft: nn.Module, target: nn.Module | None = None, *, layer: int | None = None, in_custom_op: bool = False
) -> Iterator[Fault]:
    """The draft's i-th bank of experts runs with the parameters of the i-th bank that was registered in the process.

    The target is loaded first, so its banks come first in the list; routing stays the draft's. `layer`: only that
    layer's op resolves by position; None for all, as vLLM 0.15.0 did. `in_custom_op`: in a custom operation, as there:
    torch is shown the activations only. InputError where a foreign bank does not fit.
    """
    own = find(draft).every_bank()
    chosen = own if layer is None else (find(draft).bank(layer),)
    registry = (*(find(target).every_bank() if target is not None else ()), *own)
    foreign = [(bank, other) for bank, other in zip(own, registry, strict=False) if bank in chosen and bank != other]
    with ExitStack() as planted:
        for bank, other in foreign:
            _check_fits(bank, other)
            run = planted.enter_context(_operation(_run_as(other[1]))) if in_custom_op else _run_as(other[1])
            planted.enter_context(forward_replaced(bank[1], run))
        yield Fault(
            "IDENTITY",
            foreign[0][0][0] if foreign else None,
            ALL,
            f"the op resolved the target's {foreign[0][1][0]}" if foreign else "alone: every bank resolves itself",
            ("vllm#33497", "vllm#32805", "vllm#33624"),
        )


@contextmanager
def shared_buffer(
    draft: nn.Module, target: nn.Module | None = None, *, layer: int = 0, token: int | None = None
) -> Iterator[Fault]:
    """Both models' experts of a layer write to one buffer, and the target's rows are there when the draft reads.

    `token`: the logical position of the one row that is stale; None for every row the target wrote. Nothing happens
    until the target has run. Both outputs really share storage.
    """
    path, module = find(draft).bank(layer)
    fault = Fault(
        "STATE",
        path if target is not None else None,
        ALL if token is None else ((token, token + 1),),
        "the target's last output of this layer stands in the draft's rows",
    )
    buffer = _Buffer()
    with ExitStack() as planted:
        if target is not None:
            _check_fits((path, module), find(target).bank(layer), experts=False)
            clock = planted.enter_context(Clock(draft).running())
            theirs = find(target).bank(layer)[1]
            planted.enter_context(forward_replaced(theirs, buffer.of_target))
            planted.enter_context(forward_replaced(module, buffer.of_draft(clock, token, fault.struck)))
        yield fault


@contextmanager
def foreign_routing(draft: nn.Module, target: nn.Module | None = None, *, layer: int = 0) -> Iterator[Fault]:
    """Chosen experts are kept in one place for both models, keyed by layer: the draft reads what the target chose.

    The rows that both have get the target's choice (modulo the draft's number of experts); weights stay the draft's.
    Nothing happens until the target has run.
    """
    path, router = find(draft).router(layer)
    fault = Fault(
        "ROUTING",
        path if target is not None else None,
        ALL,
        "experts are those the target chose in its layer of the same number",
        ("vllm#48622", "sglang#26980"),
    )
    chosen: list[torch.Tensor] = []

    def of_target(original: Any, *args: Any, **kwargs: Any) -> Any:
        out = original(*args, **kwargs)
        chosen[:] = [part for part in _tensors(out) if not part.is_floating_point()]
        return out

    def of_draft(original: Any, *args: Any, **kwargs: Any) -> Any:
        out = original(*args, **kwargs)
        if not chosen:
            return out
        fault.struck.extend(clock.rows(len(_tensors(out)[0]))[:1].tolist())
        return type(out)(part if part.is_floating_point() else _first_rows(part, chosen[0] % n_experts) for part in out)

    n_experts = find(draft).bank(layer)[1].num_experts
    with ExitStack() as planted:
        if target is not None:
            clock = planted.enter_context(Clock(draft).running())
            planted.enter_context(forward_replaced(find(target).router(layer)[1], of_target))
            planted.enter_context(forward_replaced(router, of_draft))
        yield fault


@contextmanager
def neighbour_read(
    draft: nn.Module,
    target: nn.Module | None = None,
    *,
    layer: int = 0,
    strength: float = 0.1,
    poison: int | None = None,
) -> Iterator[Fault]:
    """A bank reads its output scales past its own end: each feature is off by the bytes another model has there.

    A feature is multiplied by 1 + strength * byte / 255. The bytes are the target's first expert weights, as they are
    at that moment; `poison` (0..255) fills that memory instead; with neither it holds zeros, and nothing is off. They
    are read as memory, not as a parameter: an unmasked load has no operand that names its owner.
    """
    path, module = find(draft).bank(layer)
    if poison is not None and not 0 <= poison <= 255:
        raise InputError(f"memory is poisoned with a byte, 0 to 255, not {poison!r}")
    behind = find(target).bank(layer)[1] if target is not None else None
    memory = None if behind is None else _memory(next(iter(behind.parameters(recurse=False))))

    def stray(original: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        out = original(*args, **kwargs)
        read = _bytes(memory, poison, out.shape[-1])
        return (out * (1 + strength / 255 * read.to(out.device)).to(out.dtype)) if read.any() else out

    with forward_replaced(module, stray):
        yield Fault(
            "STATE",
            path if target is not None or poison else None,
            ALL,
            "scales are read past the end of the bank, from memory that belongs to whatever is there",
            ("triton#10772", "vllm#47303"),
        )


class _Buffer:
    """One buffer for the outputs (rows, hidden) of two models, and the rows that the target last left in it."""

    def __init__(self) -> None:
        self._memory: torch.Tensor | None = None
        self._theirs: torch.Tensor | None = None

    def of_target(self, original: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        out = self._written(original(*args, **kwargs))
        self._theirs = out.clone()
        return out

    def of_draft(self, clock: Clock, token: int | None, struck: list[int]) -> Any:
        def run(original: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
            out = self._written(original(*args, **kwargs))
            if self._theirs is None:
                return out
            positions = clock.rows(len(out))
            stale = torch.arange(len(out), device=out.device) < len(self._theirs)
            if token is not None:
                stale &= positions.to(out.device) == token
            out[stale] = self._theirs[: len(out)][stale[: len(self._theirs)]].to(out)
            struck.extend(positions[stale.cpu()][:1].tolist())
            return out

        return run

    def _written(self, out: torch.Tensor) -> torch.Tensor:
        if self._memory is None or len(self._memory) < len(out) or self._memory.dtype != out.dtype:
            self._memory = torch.empty_like(out)
        view = self._memory[: len(out)]
        view.copy_(out.detach())
        return view


def _run_as(other: nn.Module) -> Any:
    """Run another module's forward on the caller's inputs, without its hooks: an op got hold of it."""
    return lambda original, *args, **kwargs: type(other).forward(other, *args, **kwargs)


@contextmanager
def _operation(around: Around) -> Iterator[Around]:
    """The same behind a custom operation with a kernel in Python, as engines hide theirs from compilers."""
    names: list[str] = []

    def kernel(given: list[torch.Tensor]) -> torch.Tensor:
        return around(None, **dict(zip(names, given, strict=True)))

    def through(original: Any, *args: Any, **kwargs: Any) -> Any:
        bound = arguments(original, args, kwargs).arguments
        names[:] = bound
        return operation(list(bound.values()))

    with torch.library._scoped_library("specnb_planted", "FRAGMENT") as library:
        name = f"experts_{id(kernel):x}"
        library.define(f"{name}(Tensor[] given) -> Tensor")
        library.impl(name, kernel, "CompositeExplicitAutograd")
        operation = getattr(torch.ops.specnb_planted, name)
        yield through


def _check_fits(own: Named, other: Named, *, experts: bool = True) -> None:
    """InputError unless the draft's routing and states fit the other bank: a real registry would crash instead."""
    ours, theirs = (
        {name: (*weight.shape[1:], weight.dtype) for name, weight in bank.named_parameters()}
        for _, bank in (own, other)
    )
    if ours != theirs:
        raise InputError(
            f"{other[0]} of the target does not fit {own[0]} of the draft: an expert has {theirs}, not {ours}"
        )
    if experts and other[1].num_experts < own[1].num_experts:
        raise InputError(f"{own[0]} routes to {own[1].num_experts} experts, {other[0]} has {other[1].num_experts}")


def _tensors(out: Any) -> list[torch.Tensor]:
    if not isinstance(out, (tuple, list)) or all(part.is_floating_point() for part in out):
        raise InputError("the router does not return the chosen experts: no integer tensor is among its outputs")
    return list(out)


def _first_rows(own: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    """`own` (rows, k) with its first rows replaced by those of `theirs`, as far as both have them."""
    rows, k = min(len(own), len(theirs)), min(own.shape[-1], theirs.shape[-1])
    new = own.clone()
    new[:rows, :k] = theirs[:rows, :k]
    return new


def _memory(weight: nn.Parameter) -> np.ndarray:
    """The bytes of a parameter, live where it is in main memory.

    numpy reads past torch's dispatcher, as the stray load does: nothing that watches operands sees whose memory it is.
    """
    return weight.detach().cpu().contiguous().view(torch.uint8).flatten().numpy()


def _bytes(memory: np.ndarray | None, poison: int | None, n: int) -> torch.Tensor:
    """What `n` stray loads of one byte find, as float32."""
    if poison is not None:
        return torch.full((n,), float(poison))
    return torch.zeros(n) if memory is None else torch.from_numpy(np.resize(memory, n)).float()
