"""The eleven faults that the scoring grid adds to those of the package, and all faults by name."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import Module

from specnb.divergence import faults as package
from specnb.divergence.capture.tensors import name_arguments
from specnb.divergence.faults import (
    Planting,
    Rows,
    banks_by_position,
    read_faults,
    run_as,
    share_buffer,
    tamper_with_cache,
)
from specnb.divergence.faults.planting import (
    Around,
    Fault,
    PlantedFault,
    change_values,
    replace_forward,
    replaced,
)

# --- faults through a neighbor: its experts, its memory -------------------------------------------


@contextmanager
def resolve_in_operation(fault: PlantedFault) -> Iterator[None]:
    """Do as `resolve_by_position`, in a custom operation: torch sees only the activations."""
    with ExitStack() as until:
        for bank, other in banks_by_position(fault):
            run = until.enter_context(_operation(bank, run_as(other)))
            until.enter_context(replace_forward(bank, run))
        yield


@contextmanager
def _operation(bank: Module, around: Around) -> Iterator[Around]:
    """Run `around` in a custom operation with a Python kernel, as engines hide their kernels."""

    def kernel(arguments: list[Tensor]) -> Tensor:
        return around(None, *arguments)

    def through(original, *args, **kwargs):
        arguments = name_arguments(bank, args, kwargs)
        return getattr(torch.ops.specnb_planted, name)([*arguments.values()])

    with torch.library._scoped_library("specnb_planted", "FRAGMENT") as library:
        name = f"experts_{id(kernel):x}"
        library.define(f"{name}(Tensor[] arguments) -> Tensor")
        library.impl(name, kernel, "CompositeExplicitAutograd")
        yield through


def read_past_the_end(fault: PlantedFault, *, strength: float) -> Planting:
    """Let a bank read its output scales past its own end: another model's bytes scale the features.

    A feature is multiplied by 1 + strength * byte / 255. The bytes are the target's first expert
    weights at that moment. They are read as memory, not as a parameter: an unmasked load has no
    operand that names its owner.
    """
    weight = next(iter(fault.other.parameters(recurse=False)))
    # numpy bypasses torch's dispatcher, as the stray load does: no operand shows the owner.
    memory = weight.detach().cpu().contiguous().view(torch.uint8).flatten().numpy()

    def stray(original, *args, **kwargs):
        out = original(*args, **kwargs)
        read = torch.from_numpy(np.resize(memory, out.shape[-1])).float()
        return out * (1 + strength / 255 * read.to(out.device)).to(out.dtype)

    return replace_forward(fault.module, stray)


# --- faults in weights: scaled experts, another order of experts, a head that was never loaded ----


def scale_in_operation(fault: PlantedFault, *, eps: float) -> Planting:
    """Multiply the output of one bank by 1 + eps inside its operation; its parameters are right."""
    return replace_forward(fault.module, partial(_combine_scaled, fault.module, eps))


def _combine_scaled(bank: Module, eps: float, original: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Scale the weights that combine a bank's experts: its output is linear in them."""
    arguments = name_arguments(bank, args, kwargs)
    _states, _indices, name = arguments
    weights = arguments[name]
    scale = torch.full_like(weights, 1 + eps)  # in the type of the weights
    return original(**arguments | {name: weights * scale})


def permute_experts(fault: PlantedFault, *, seed: int) -> Planting:
    """Move every expert of a bank to another index, as a loader with the wrong order does."""
    n_experts = fault.module.num_experts
    ring = torch.randperm(n_experts, generator=torch.Generator().manual_seed(seed))
    order = torch.empty_like(ring)
    order[ring] = ring.roll(1)  # one cycle through all of them: none stays in place
    return change_values(
        {
            weight: weight.detach()[order.to(weight.device)]
            for weight in fault.module.parameters(recurse=False)
            if len(weight) == n_experts
        }
    )


def draw_head(fault: PlantedFault, *, seed: int) -> Planting:
    """Give the output head newly drawn weights; an embedding tied to it keeps its values."""
    head = fault.module
    draw = torch.Generator().manual_seed(seed)
    std = getattr(fault.draft.config, "initializer_range", 0.02)
    drawn = (std * torch.randn(head.weight.shape, generator=draw)).to(head.weight)
    fresh = nn.Parameter(drawn, requires_grad=False)
    return replaced(head, "_parameters", head._parameters | {"weight": fresh})


# --- faults in the key/value cache: rows that others wrote, too many or too few rows --------------


def overwrite_row(fault: PlantedFault, *, position: int, after: int | None) -> Planting:
    """Let another batch, with a stale table, write one cache row outside this step's slots.

    It acts once, before attention of the first forward pass that starts at `after` or later (None:
    right after `position`): the row then holds the key and value of the new token. A sliding window
    must not have dropped the row.
    """
    start = position + 1 if after is None else after
    fault.tokens = ((start, None),)

    def write(rows: Rows, first: int, past: int, end: int) -> None:
        if past >= start and not fault.struck:
            for values in rows:
                values[..., position - first, :] = values[..., past - first, :]
            fault.struck.append(past)

    return tamper_with_cache(fault, write)


def crop_wrongly(fault: PlantedFault, *, rows: int) -> Planting:
    """After a rejection, leave the cropped cache `rows` rows too long, or too short if negative.

    Positions go on as they should.
    """
    model = fault.draft.base_model  # without its head: called with the cache in any case
    # After the last forward pass: the cache, its length, and each layer's keys and values.
    last, before, states = None, 0, []

    def run(original, *args, **kwargs):
        nonlocal last, before, states
        arguments = name_arguments(model, args, kwargs)
        cache = arguments.get("past_key_values")
        length = 0 if cache is None else cache.get_seq_length()
        if cache is last and before - length >= max(rows, 1) and length >= max(1, 1 - rows):
            # The engine goes on from its own position, though the cache would now give another.
            arguments |= {"position_ids": positions_fed(arguments)}
            for layer, state in zip(cache.layers, states, strict=True):
                _restore(layer, state, before, length + rows)
            fault.struck.append(length)
        out = original(**arguments)
        last = getattr(out, "past_key_values", None)
        if last is not None:  # growing caches make new tensors: keeping the old ones costs no copy
            before = last.get_seq_length()
            states = [(layer.keys, layer.values) for layer in last.layers]
        return out

    return replace_forward(model, run)


def _restore(layer: Any, rows: Rows, before: int, length: int) -> None:
    """Set a layer to its first `length` positions, from its `rows` at `before` positions.

    A sliding window must not have dropped them.
    """
    first = before - rows[0].shape[-2]
    start = 0
    if window := getattr(layer, "sliding_window", None):
        start = max(0, length - window + 1)
        layer.cumulative_length = length
    layer.keys, layer.values = (values[..., start - first : length - first, :] for values in rows)


# --- faults in the input --------------------------------------------------------------------------


def feed_dummies(fault: PlantedFault, *, start: int, token: int) -> Planting:
    """Feed the draft `token` in place of its input from position `start` on."""

    def feed(model: Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        arguments = name_arguments(model, args, kwargs)
        ids = torch.where(positions_fed(arguments) < start, arguments["input_ids"], token)
        return (), arguments | {"input_ids": ids}

    # Before all other hooks, so that observers see the actual input.
    return fault.draft.register_forward_pre_hook(feed, with_kwargs=True, prepend=True)


def positions_fed(arguments: dict[str, Any]) -> Tensor:
    """Return the logical positions (1 or batch, length) of a call, else those after its cache."""
    if arguments.get("position_ids") is not None:
        return arguments["position_ids"]
    cache = arguments.get("past_key_values")
    ids = arguments["input_ids"]
    past = 0 if cache is None else cache.get_seq_length()
    return torch.arange(past, past + ids.shape[1], device=ids.device)[None]


# --- all faults by name ---------------------------------------------------------------------------

MORE = read_faults(
    Path(__file__).with_name("faults.toml"),
    resolve_in_operation,
    share_buffer,
    read_past_the_end,
    scale_in_operation,
    permute_experts,
    draw_head,
    overwrite_row,
    crop_wrongly,
    feed_dummies,
)
ORDER = (
    "positional_registry",
    "registry_in_op",
    "shared_buffer",
    "stale_row",
    "foreign_routing",
    "neighbour_read",
    "expert_scale",
    "expert_scale_in_op",
    "experts_permuted",
    "kv_slot_swap",
    "foreign_writer",
    "untrimmed",
    "overtrimmed",
    "overtrimmed_by_two",
    "rope_mismatch",
    "dummy_tokens",
    "random_head",
    "split_k",
    "uniform_offset",
)
"""Names in the order that seeds the options of a case: append new ones at the end."""
FAULTS: dict[str, Fault] = {name: (package.FAULTS | MORE)[name] for name in ORDER}
"""The 17 faults and the two controls of the grid, by name."""
