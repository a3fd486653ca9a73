"""Planted faults: bugs that really happened, put into any eager torch model for the time of a `with` block.

    with FAULTS["positional_registry"](draft, target) as fault:
        ...  # run the draft; an investigation must name fault.cause and fault.first
    # every bit of both models is what it was

So a user can see whether the lab finds on his own model what it finds on the embedded pair. Two causes at once are two
blocks, one in the other. The faults of sampling, of a drafter's loop and of checkpoints are not here: they live in no
module's forward.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from functools import partial
from types import MappingProxyType
from typing import Any, Protocol

from torch import nn

from specnb.divergence.planted.beside import foreign_routing, neighbour_read, positional_registry, shared_buffer
from specnb.divergence.planted.cache import foreign_writer, kv_slot_swap, overtrimmed, untrimmed
from specnb.divergence.planted.fault import ALL, CAUSES, Fault
from specnb.divergence.planted.inputs import dummy_tokens, rope_mismatch, split_k, uniform_offset
from specnb.divergence.planted.weights import expert_scale, experts_permuted, random_head

__all__ = [
    "ALL",
    "CAUSES",
    "FAULTS",
    "Fault",
    "FaultMaker",
    "dummy_tokens",
    "expert_scale",
    "experts_permuted",
    "foreign_routing",
    "foreign_writer",
    "kv_slot_swap",
    "neighbour_read",
    "overtrimmed",
    "positional_registry",
    "random_head",
    "rope_mismatch",
    "shared_buffer",
    "split_k",
    "uniform_offset",
    "untrimmed",
]


class FaultMaker(Protocol):
    """What every fault is: called with the draft and what runs beside it, it makes a context manager."""

    def __call__(
        self, draft: nn.Module, target: nn.Module | None = None, **options: Any
    ) -> AbstractContextManager[Fault]: ...


FAULTS: Mapping[str, FaultMaker] = MappingProxyType(
    {
        "positional_registry": positional_registry,
        "registry_in_op": partial(positional_registry, in_custom_op=True),
        "shared_buffer": shared_buffer,
        "stale_row": partial(shared_buffer, token=12),
        "foreign_routing": foreign_routing,
        "neighbour_read": neighbour_read,
        "expert_scale": expert_scale,
        "expert_scale_in_op": partial(expert_scale, in_op=True),
        "experts_permuted": experts_permuted,
        "kv_slot_swap": kv_slot_swap,
        "foreign_writer": foreign_writer,
        "untrimmed": untrimmed,
        "overtrimmed": overtrimmed,
        "overtrimmed_by_two": partial(overtrimmed, rows=2),
        "rope_mismatch": rope_mismatch,
        "dummy_tokens": dummy_tokens,
        "random_head": random_head,
        "split_k": split_k,
        "uniform_offset": uniform_offset,
    }
)
"""All faults by name; options of a fault are those of its function."""
