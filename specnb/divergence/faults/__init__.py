"""Planted faults: bugs that really happened, put into any eager torch model for the time of a `with` block.

    with FAULTS["positional_registry"](draft, target) as planted:
        ...  # run the draft; an investigation must name planted.cause and planted.first
    # every bit of both models is what it was

A fault of a neighbour does nothing without a target: `first` is None then. `split_k` and `uniform_offset` are controls:
they change numbers and must not be called structural. Faults of sampling are in `lossless`.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import Module, functional

from specnb.divergence.capture.tensors import name_arguments
from specnb.divergence.faults.planting import (
    Around,
    Deploy,
    Fault,
    PlantedFault,
    change_values,
    positions_fed,
    replace_forward,
    replace_forwards,
    replaced,
    rotary_positions,
)
from specnb.divergence.parts import find, find_modules, layer_number, part_of
from specnb.errors import InputError, require_known
from specnb.io import read_toml

Planting = AbstractContextManager[None]

OUTPUT_SIDE = ("down_proj", "w2")
"""How names of the parameters begin that make an expert's output."""
Rows = tuple[Tensor, Tensor]
"""Keys and values, each (batch, heads, rows, head size)."""

Tamper = Callable[[Rows, int, int, int], None]
"""`tamper(rows, first, past, end)` changes rows of the positions first..end in place; past..end are new."""

# --- of a neighbour: its experts, its buffer, its routing, its memory -----------------------------------------------


@contextmanager
def resolve_by_position(fault: PlantedFault, *, in_custom_op: bool) -> Iterator[None]:
    """The draft's i-th bank of experts runs with the parameters of the i-th bank that was registered in the process.

    The target is loaded first, so its banks come first in the list; routing stays the draft's. In one layer only that
    layer's op resolves by position; in all as vLLM 0.15.0 did. `in_custom_op`: in a custom operation, as there: torch
    is shown the activations only.
    """
    banks = find(fault.draft)["bank"]
    registered = find(fault.target)["bank"] + banks
    foreign = [(bank, other) for bank, other in zip(banks, registered, strict=False)
               if fault.layer in (None, layer_number(bank[0]))]  # fmt: skip
    _, (path, _) = foreign[0]
    fault.note = f"the op resolved the target's {path}"
    with ExitStack() as until:
        for (_, bank), (_, other) in foreign:
            run = until.enter_context(_operation(bank, _run_as(other))) if in_custom_op else _run_as(other)
            until.enter_context(replace_forward(bank, run))
        yield


def share_buffer(fault: PlantedFault, *, token: int | None) -> Planting:
    """Both models' experts of a layer write to one buffer, and the target's rows are there when the draft reads.

    `token`: the logical position of the one row that is stale; None for every row the target wrote. Nothing happens
    until the target has run.
    """
    if token is not None:
        fault.tokens = ((token, token + 1),)

    def stale(out: Tensor, left: Tensor, positions: Tensor) -> Tensor:
        out, positions = out.clone(), positions.repeat(len(out) // len(positions))[: len(left)]
        rows = torch.arange(len(positions)) if token is None else (positions == token).nonzero().flatten()
        out[rows] = left[rows].to(out)
        fault.struck.extend(positions[rows][:1].tolist())
        return out

    return _left_behind(fault, stale)


def read_foreign_choice(fault: PlantedFault) -> Planting:
    """Chosen experts are kept in one place for both models, keyed by layer: the draft reads what the target chose.

    The rows that both have get the target's choice (modulo the draft's number of experts); weights stay the draft's.
    Nothing happens until the target has run.
    """
    n_experts = part_of(fault.draft, "bank", fault.layer)[1].num_experts

    def chosen(out: Any, left: Any, positions: Tensor) -> Any:
        of_target = next(part for part in left if not part.is_floating_point()) % n_experts
        rows, k = min(len(out[0]), len(of_target)), of_target.shape[-1]
        fault.struck.append(positions[0].item())
        new = [part.clone() for part in out]
        for part in new:
            if not part.is_floating_point():
                part[:rows, :k] = of_target[:rows, : part.shape[-1]]
        return type(out)(new)

    return _left_behind(fault, chosen)


@contextmanager
def _left_behind(fault: PlantedFault, read: Callable[..., Any]) -> Iterator[None]:
    """Once the target's module has run, the draft's gives what `read(out, left, positions)` makes of both outputs.

    Positions `(tokens,)` are those that the draft's rotary embedding was last called with.
    """
    left, positions = [], torch.empty(0)

    def hear(rotary: Module, args: tuple, kwargs: dict) -> None:
        nonlocal positions
        positions = rotary_positions(name_arguments(rotary, args, kwargs))[1].flatten().cpu()

    def of_target(original, *args, **kwargs):
        left[:] = [original(*args, **kwargs)]
        return left[0]

    def of_draft(original, *args, **kwargs):
        out = original(*args, **kwargs)
        return read(out, left[0], positions) if left else out

    heard = part_of(fault.draft, "rotary")[1].register_forward_pre_hook(hear, with_kwargs=True)
    with heard, replace_forwards({fault.other: of_target, fault.module: of_draft}):
        yield


def read_past_the_end(fault: PlantedFault, *, strength: float) -> Planting:
    """A bank reads its output scales past its own end: each feature is off by the bytes another model has there.

    A feature is multiplied by 1 + strength * byte / 255. The bytes are the target's first expert weights, as they are
    at that moment. They are read as memory, not as a parameter: an unmasked load has no operand that names its owner.
    """
    weight = next(iter(fault.other.parameters(recurse=False)))
    # numpy reads past torch's dispatcher, as the stray load does: nothing that watches operands sees whose memory it is
    memory = weight.detach().cpu().contiguous().view(torch.uint8).flatten().numpy()

    def stray(original, *args, **kwargs):
        out = original(*args, **kwargs)
        read = torch.from_numpy(np.resize(memory, out.shape[-1])).float()
        return out * (1 + strength / 255 * read.to(out.device)).to(out.dtype)

    return replace_forward(fault.module, stray)


def _run_as(other: Module) -> Around:
    """Run another module's forward on the caller's inputs, without its hooks: an op got hold of it."""
    return lambda original, *args, **kwargs: type(other).forward(other, *args, **kwargs)


@contextmanager
def _operation(bank: Module, around: Around) -> Iterator[Around]:
    """The same behind a custom operation with a kernel in Python, as engines hide theirs from compilers."""

    def kernel(given: list[Tensor]) -> Tensor:
        return around(None, *given)

    def through(original, *args, **kwargs):
        given = name_arguments(bank, args, kwargs)
        return getattr(torch.ops.specnb_planted, name)([*given.values()])

    with torch.library._scoped_library("specnb_planted", "FRAGMENT") as library:
        name = f"experts_{id(kernel):x}"
        library.define(f"{name}(Tensor[] given) -> Tensor")
        library.impl(name, kernel, "CompositeExplicitAutograd")
        yield through


# --- of weights: scaled experts, experts in another order, a head that was never loaded ---------------------------


def scale_experts(fault: PlantedFault, *, eps: float, in_op: bool) -> Planting:
    """The output of one bank of experts is (1 + eps) times what it should be: a wrong quantisation scale.

    The wrong scale is in the parameters, or with `in_op` in what the op makes of right ones (the weights it combines
    experts with).
    """
    fault.note = f"output times {1 + eps:g}"
    if in_op:
        return replace_forward(fault.module, partial(_combine_scaled, fault.module, eps))
    named_weights = fault.module.named_parameters(recurse=False)
    return change_values({
        weight: weight.detach() * (1 + eps) for name, weight in named_weights if name.startswith(OUTPUT_SIDE)
    })  # fmt: skip


def permute_experts(fault: PlantedFault, *, seed: int) -> Planting:
    """Every expert of a bank stands at another expert's index: a loader that got the order wrong."""
    n_experts = fault.module.num_experts
    ring = torch.randperm(n_experts, generator=torch.Generator().manual_seed(seed))
    order = torch.empty_like(ring)
    order[ring] = ring.roll(1)  # one cycle through all of them: none stays where it was
    return change_values({
        weight: weight.detach()[order.to(weight.device)]
        for weight in fault.module.parameters(recurse=False) if len(weight) == n_experts
    })  # fmt: skip


def draw_head(fault: PlantedFault, *, seed: int) -> Planting:
    """The output head has weights as drawn at construction; an embedding that was tied to it keeps its values."""
    head, draw = fault.module, torch.Generator().manual_seed(seed)
    std = getattr(fault.draft.config, "initializer_range", 0.02)
    fresh = nn.Parameter((std * torch.randn(head.weight.shape, generator=draw)).to(head.weight), requires_grad=False)
    return replaced(head, "_parameters", head._parameters | {"weight": fresh})


def _combine_scaled(bank: Module, eps: float, original: Any, *args: Any, **kwargs: Any) -> Tensor:
    """A bank's output is linear in the weights that combine its experts: scaling those scales the output."""
    given = name_arguments(bank, args, kwargs)
    name, weights = [*given.items()][2]  # of (states, indices, weights)
    scale = torch.full_like(weights, 1 + eps)  # of the weights' type
    return original(**given | {name: weights * scale})


# --- of the key/value cache: rows in the wrong slots, too many or too few, or that others wrote -----------------------
# They change the transformers cache that the draft is called with, where attention reads it (`use_cache`).


def swap_slots(fault: PlantedFault, *, a: int, b: int) -> Planting:
    """Positions `a` and `b` of one layer's cache are in each other's slots, from when `b` is written.

    Attention does not care for the order of rows it sees: tokens that see both are right, and only those from `a` to
    before `b` are wrong, when one forward writes both. Where a sliding window forgets slot `a` and not yet `b`, tokens
    are wrong again.
    """
    fault.tokens = ((a, b),)
    if window := getattr(fault.module, "sliding_window", None):
        fault.tokens += ((max(a + window, b), b + window),)

    def swap(rows: Rows, first: int, past: int, end: int) -> None:
        if first <= a and past <= b < end:
            for values in rows:
                values[..., [a - first, b - first], :] = values[..., [b - first, a - first], :]
            fault.struck.append(b)

    return replace_forward(fault.module, partial(_tampering, fault.module, swap))


def overwrite_row(fault: PlantedFault, *, position: int, after: int | None) -> Planting:
    """Somebody else writes one row of the cache that this step's slots do not cover: a dummy batch with a stale table.

    It strikes once, before attention of the first forward that starts at `after` or later (None: right after
    `position`): the row then holds the key and value of the new token. A sliding window must not have
    forgotten the row.
    """
    start = position + 1 if after is None else after
    fault.tokens = ((start, None),)

    def write(rows: Rows, first: int, past: int, end: int) -> None:
        if past >= start and not fault.struck:
            for values in rows:
                values[..., position - first, :] = values[..., past - first, :]
            fault.struck.append(past)

    return replace_forward(fault.module, partial(_tampering, fault.module, write))


def _tampering(attention: Module, tamper: Tamper, original: Any, *args: Any, **kwargs: Any) -> Any:
    """An attention forward whose cache is tampered with between being written and being read."""
    cache = name_arguments(attention, args, kwargs)["past_key_values"]
    update = cache.update

    def tampered(keys: Tensor, values: Tensor, layer: int, *more, **options) -> Rows:
        rows = update(keys, values, layer, *more, **options)
        end, n_rows = cache.get_seq_length(layer), rows[0].shape[-2]
        # in place: what a cache of growing tensors hands out is what it keeps, so the fault stays in it
        with torch.no_grad():
            tamper(rows, end - n_rows, end - keys.shape[-2], end)
        return rows

    with replaced(cache, "update", tampered):
        return original(*args, **kwargs)


def crop_wrongly(fault: PlantedFault, *, rows: int) -> Planting:
    """After a rejection (a cropped cache) the cache is `rows` rows too long, or too short where that is negative.

    Positions go on as they should.
    """
    model = fault.draft.base_model  # without its head: called with the cache in any case
    last, before, states = None, 0, []  # after the last forward: the cache, its length, each layer's keys and values

    def run(original, *args, **kwargs):
        nonlocal last, before, states
        given = name_arguments(model, args, kwargs)
        cache = given.get("past_key_values")
        length = 0 if cache is None else cache.get_seq_length()
        if cache is last and before - length >= max(rows, 1) and length >= max(1, 1 - rows):
            # the engine goes on from the position it believes in, though the cache would now say another one
            given |= {"position_ids": positions_fed(given)}
            for layer, kept in zip(cache.layers, states, strict=True):
                _restore(layer, kept, before, length + rows)
            fault.struck.append(length)
        out = original(**given)
        last = getattr(out, "past_key_values", None)
        if last is not None:  # growing caches make new tensors: keeping the old costs no copy
            before, states = last.get_seq_length(), [(layer.keys, layer.values) for layer in last.layers]
        return out

    return replace_forward(model, run)


def _restore(layer: Any, rows: Rows, before: int, length: int) -> None:
    """Give a layer, once of `before` positions, its `rows` up to `length`, which a window must not have forgotten."""
    first, start = before - rows[0].shape[-2], 0
    if window := getattr(layer, "sliding_window", None):
        start, layer.cumulative_length = max(0, length - window + 1), length
    layer.keys, layer.values = (values[..., start - first : length - first, :] for values in rows)


# --- of what goes in and comes out: positions, fed tokens, the order of a sum ---------------------------------------


def scale_positions(fault: PlantedFault, *, start: int, factor: float) -> Planting:
    """Positions from `start` on are rotated as if the context were scaled by `factor`; cached keys before are not."""
    return _change_positions(fault, lambda positions: torch.where(positions < start, positions, positions / factor))


def shift_positions(fault: PlantedFault, *, offset: int) -> Planting:
    """Control: all positions are `offset` higher. RoPE is relative, so what attention makes is off by rounding only."""
    return _change_positions(fault, lambda positions: positions + offset)


def feed_dummies(fault: PlantedFault, *, start: int, token: int) -> Planting:
    """From position `start` on the draft is fed `token` in place of its input, as past a wrong maximal length."""

    def feed(model: Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        given = name_arguments(model, args, kwargs)
        return (), given | {"input_ids": torch.where(positions_fed(given) < start, given["input_ids"], token)}

    # before all other hooks: whoever watches the model sees what it was really fed
    return fault.draft.register_forward_pre_hook(feed, with_kwargs=True, prepend=True)


def sum_in_parts(fault: PlantedFault) -> Planting:
    """Control: linear layers sum in parts, how many depends on the number of rows, as kernels do. Rounding only.

    In one layer, or in all of the model's.
    """
    numbered = ((layer_number(path), module) for path, module in find_modules(fault.draft))
    return replace_forwards({
        module: partial(_in_parts, module) for number, module in numbered
        if isinstance(module, nn.Linear) and number is not None and fault.layer in (None, number)
    })  # fmt: skip


def _in_parts(linear: nn.Linear, original: Any, states: Tensor) -> Tensor:
    n_parts = 4 if states.numel() // states.shape[-1] <= 4 else 2
    parts = zip(states.chunk(n_parts, -1), linear.weight.chunk(n_parts, -1), strict=True)
    total = sum(functional.linear(*part) for part in parts)
    return total if linear.bias is None else total + linear.bias


def _change_positions(fault: PlantedFault, change: Callable[[Tensor], Tensor]) -> Planting:
    """All rotary embeddings of the draft see `change(positions)`."""

    def run(rotary, original, *args, **kwargs):
        given = name_arguments(rotary, args, kwargs)
        name, positions = rotary_positions(given)
        return original(**given | {name: change(positions)})

    return replace_forwards({rotary: partial(run, rotary) for _, rotary in find(fault.draft)["rotary"]})


TRANSFORMS = {
    transform.__name__: transform for transform in (
        resolve_by_position, share_buffer, read_foreign_choice, read_past_the_end, scale_experts, permute_experts,
        draw_head, swap_slots, overwrite_row, crop_wrongly, scale_positions, shift_positions, feed_dummies,
        sum_in_parts,
    )
}  # fmt: skip
"""The functions that plant faults, by their names in `faults.toml`."""


def _fault(row: dict[str, Any]) -> Fault:
    options = {name: None if value == "none" else value for name, value in row["options"].items()}
    return Fault(**row | {"transform": TRANSFORMS[row["transform"]], "options": options})


FAULTS = {name: _fault(row) for name, row in read_toml(Path(__file__).with_name("faults.toml")).items()}
"""All faults by name."""


def deploy_fault(fault: str, *, layer: int | None = None) -> Deploy:
    """The planted fault of that name as a service, in `layer` (None: by default). InputError where there is no such."""
    require_known("fault", fault, FAULTS)
    if layer is None:
        return FAULTS[fault]
    if "layer" not in FAULTS[fault].options:
        raise InputError(f"the fault {fault} is in no one layer: leave layer {layer} out")
    return partial(FAULTS[fault], layer=layer)


class RecordedFault:
    """A planted fault as a service that notes each entry: `entered` has the fault as it was."""

    def __init__(self, name: str, **options: Any) -> None:
        self.name, self.entered, self._options = name, [], options

    @contextmanager
    def __call__(self, draft: Module, neighbour: Module | None) -> Iterator[PlantedFault]:
        with FAULTS[self.name](draft, neighbour, **self._options) as planted:
            self.entered.append(planted)
            yield planted

    def acted(self) -> PlantedFault:
        """The fault as it was when it first acted, or at all. Raises InputError where it waited in vain."""
        fault = max(self.entered, key=lambda fault: (bool(fault.struck), fault.first is not None))
        if FAULTS[self.name].waits and not fault.struck:
            raise InputError(f"{self.name} never acted: choose a script in which what it waits for happens")
        return fault
