"""Services that change how a draft runs and nothing that counts: other kernels, other slots, other settings.

Each is called with (draft, neighbour), as what `Lab.run` deploys, and leaves the draft as it was.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from specnb.divergence.kv_slots import BLOCK_SIZE
from specnb.divergence.parts import find
from specnb.divergence.planted.fault import forward_replaced, replaced
from specnb.divergence.setups import Deploy

POOL_BLOCKS = 64
"""Blocks of a layer's pool of slots, which caches of several models share."""


def configured(**values: object) -> Deploy:
    """The draft's configuration says something else: another implementation of attention or of experts."""
    return lambda draft, neighbour: _assigned(draft.config, values)


def generating(**values: object) -> Deploy:
    """Other defaults of generation, such as the temperature: no forward reads them."""
    return lambda draft, neighbour: _assigned(draft.generation_config, values)


@contextmanager
def other_products(draft: nn.Module, neighbour: nn.Module | None) -> Iterator[None]:
    """Linear layers compute in the other dtype: a float32 draft in bfloat16, one in bfloat16 in float32."""
    with ExitStack() as planted:
        for module in draft.modules():
            if isinstance(module, nn.Linear):
                planted.enter_context(forward_replaced(module, _in_other_dtype(module)))
        yield


def paged(first_slot: int) -> Deploy:
    """Keys and values lie in blocks of a pool, from `first_slot` on and in reverse order, as a paged cache has them.

    Attention gets them gathered by position: where they lie must not matter.
    """

    @contextmanager
    def service(draft: nn.Module, neighbour: nn.Module | None) -> Iterator[None]:
        with ExitStack() as planted:
            for _, attention in find(draft).attentions:
                planted.enter_context(forward_replaced(attention, _from_slots(first_slot)))
            yield

    return service


def _in_other_dtype(linear: nn.Linear) -> Any:
    other = torch.bfloat16 if linear.weight.dtype == torch.float32 else torch.float32
    weights = [None if one is None else one.detach().to(other) for one in (linear.weight, linear.bias)]

    def run(original: Any, states: torch.Tensor) -> torch.Tensor:
        return functional.linear(states.to(other), *weights).to(states.dtype)

    return run


def _from_slots(first_slot: int) -> Any:
    def run(original: Any, *args: Any, **kwargs: Any) -> Any:
        cache = kwargs.get("past_key_values")
        if cache is None:  # a neighbour that verifies without one
            return original(*args, **kwargs)
        update = cache.update

        def placed(*more: Any, **options: Any) -> tuple[torch.Tensor, ...]:
            return tuple(_gathered(rows, first_slot) for rows in update(*more, **options))

        with replaced(cache, "update", placed):
            return original(*args, **kwargs)

    return run


def _gathered(rows: torch.Tensor, first_slot: int) -> torch.Tensor:
    """Rows `(batch, heads, positions, size)` written to their slots and read back by position."""
    positions = torch.arange(rows.shape[-2])
    last_block = first_slot // BLOCK_SIZE + int(positions[-1]) // BLOCK_SIZE
    slots = (last_block - positions // BLOCK_SIZE) * BLOCK_SIZE + positions % BLOCK_SIZE
    pool = torch.full((*rows.shape[:2], POOL_BLOCKS * BLOCK_SIZE, rows.shape[-1]), float("nan"), dtype=rows.dtype)
    pool[:, :, slots] = rows
    return pool[:, :, slots]


@contextmanager
def _assigned(owner: object, values: dict[str, object]) -> Iterator[None]:
    """Attributes, properties among them, hold other values inside."""
    before = {name: getattr(owner, name) for name in values}
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)
