"""Planted faults: bugs that really happened, in an eager torch model inside a `with` block.

    with FAULTS["positional_registry"](draft, target) as planted:
        ...  # run the draft; an investigation must name planted.cause and planted.first
    # both models are restored bit for bit

A fault that involves a neighbor does nothing without a target: `first` is then None. `split_k` and
`uniform_offset` are controls: they change numbers, but an investigation must name no module. The
scoring grid (`tests/benchmarks/divergence_score`) plants eleven more. Sampling faults are in
`specnb.chapters.lossless`.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

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
"""Prefixes of the parameters that produce an expert's output."""
Rows = tuple[Tensor, Tensor]
"""Keys and values, each (batch, heads, rows, head size)."""

Tamper = Callable[[Rows, int, int, int], None]
"""`tamper(rows, first, past, end)` changes positions [first, end) in place; [past, end) are new."""

# --- faults that involve a neighbor: experts, buffers, routing ------------------------------------


def resolve_by_position(fault: PlantedFault) -> Planting:
    """Run the draft's i-th bank of experts with the parameters of the i-th registered bank.

    The target is loaded first, so its banks come first; routing remains the draft's. With a layer,
    only that layer's bank is resolved by position; otherwise all are, as in vLLM 0.15.0.
    """
    return replace_forwards({bank: run_as(other) for bank, other in banks_by_position(fault)})


def banks_by_position(fault: PlantedFault) -> list[tuple[Module, Module]]:
    """Return each of the draft's banks in the fault's layers, and the bank at its position."""
    banks = find(fault.draft)["bank"]
    registered = find(fault.target)["bank"] + banks
    return [
        (bank, other)
        for (path, bank), (_, other) in zip(banks, registered, strict=False)
        if fault.layer in (None, layer_number(path))
    ]


def run_as(other: Module) -> Around:
    """Return a function that runs another module's forward on the inputs, without its hooks."""
    return lambda original, *args, **kwargs: type(other).forward(other, *args, **kwargs)


def share_buffer(fault: PlantedFault, *, token: int | None) -> Planting:
    """Let the experts of a layer of both models write to one buffer; the draft reads stale rows.

    `token`: the logical position of the only stale row, or None for every row that the target
    wrote. Nothing happens until the target has run.
    """
    if token is not None:
        fault.tokens = ((token, token + 1),)

    def stale(out: Tensor, left: Tensor, positions: Tensor) -> Tensor:
        out = out.clone()
        positions = positions.repeat(len(out) // len(positions))[: len(left)]
        rows = (
            torch.arange(len(positions))
            if token is None
            else (positions == token).nonzero().flatten()
        )
        out[rows] = left[rows].to(out)
        fault.struck.extend(positions[rows][:1].tolist())
        return out

    return _left_behind(fault, stale)


def read_foreign_choice(fault: PlantedFault) -> Planting:
    """Store the chosen experts of both models in one buffer: the draft reads the target's choice.

    Rows that both models have get the target's choice, modulo the draft's number of experts; the
    weights remain the draft's. Nothing happens until the target has run.
    """
    n_experts = part_of(fault.draft, "bank", fault.layer)[1].num_experts

    def chosen(out: Any, left: Any, positions: Tensor) -> Any:
        of_target = next(part for part in left if not part.is_floating_point()) % n_experts
        rows = min(len(out[0]), len(of_target))
        k = of_target.shape[-1]
        fault.struck.append(positions[0].item())
        new = [part.clone() for part in out]
        for part in new:
            if not part.is_floating_point():
                part[:rows, :k] = of_target[:rows, : part.shape[-1]]
        return type(out)(new)

    return _left_behind(fault, chosen)


@contextmanager
def _left_behind(fault: PlantedFault, read: Callable[..., Any]) -> Iterator[None]:
    """Replace the draft's output with `read(out, left, positions)` once the target has run.

    `left` is the target's last output. `positions` `(tokens,)` are those of the last call of the
    draft's rotary embedding.
    """
    left = []
    positions = torch.empty(0)

    def note_positions(rotary: Module, args: tuple, kwargs: dict) -> None:
        nonlocal positions
        positions = rotary_positions(name_arguments(rotary, args, kwargs))[1].flatten().cpu()

    def of_target(original, *args, **kwargs):
        left[:] = [original(*args, **kwargs)]
        return left[0]

    def of_draft(original, *args, **kwargs):
        out = original(*args, **kwargs)
        return read(out, left[0], positions) if left else out

    rotary = part_of(fault.draft, "rotary")[1]
    hooked = rotary.register_forward_pre_hook(note_positions, with_kwargs=True)
    with hooked, replace_forwards({fault.other: of_target, fault.module: of_draft}):
        yield


# --- faults of weights, KV cache and positions ----------------------------------------------------


def scale_experts(fault: PlantedFault, *, eps: float) -> Planting:
    """Multiply the output of one bank of experts by 1 + eps, in its parameters."""
    named_weights = fault.module.named_parameters(recurse=False)
    return change_values(
        {
            weight: weight.detach() * (1 + eps)
            for name, weight in named_weights
            if name.startswith(OUTPUT_SIDE)
        }
    )


def swap_slots(fault: PlantedFault, *, a: int, b: int) -> Planting:
    """Swap positions `a` and `b` of one layer's cache, as soon as `b` is written.

    Attention does not depend on the order of the rows that it sees. If one forward pass writes both
    rows, tokens that see both are right, and only those from `a` to `b` - 1 are wrong. While a
    sliding window covers slot `b` but no longer `a`, tokens are wrong again.
    """
    fault.tokens = ((a, b),)
    if window := getattr(fault.module, "sliding_window", None):
        fault.tokens += ((max(a + window, b), b + window),)

    def swap(rows: Rows, first: int, past: int, end: int) -> None:
        if first <= a and past <= b < end:
            for values in rows:
                values[..., [a - first, b - first], :] = values[..., [b - first, a - first], :]
            fault.struck.append(b)

    return tamper_with_cache(fault, swap)


def tamper_with_cache(fault: PlantedFault, tamper: Tamper) -> Planting:
    """Call `tamper` on the Transformers cache after attention writes and before it reads."""
    return replace_forward(fault.module, partial(_attend, fault.module, tamper))


def _attend(attention: Module, tamper: Tamper, original: Any, *args: Any, **kwargs: Any) -> Any:
    cache = name_arguments(attention, args, kwargs)["past_key_values"]
    update = cache.update

    def tampered(keys: Tensor, values: Tensor, layer: int, *more, **options) -> Rows:
        rows = update(keys, values, layer, *more, **options)
        end = cache.get_seq_length(layer)
        n_rows = rows[0].shape[-2]
        # In place: a growing cache returns the tensors that it stores, so the fault persists.
        with torch.no_grad():
            tamper(rows, end - n_rows, end - keys.shape[-2], end)
        return rows

    with replaced(cache, "update", tampered):
        return original(*args, **kwargs)


def scale_positions(fault: PlantedFault, *, start: int, factor: float) -> Planting:
    """Divide positions from `start` on by `factor` before the rotation; keep cached keys."""
    return _change_positions(
        fault, lambda positions: torch.where(positions < start, positions, positions / factor)
    )


# --- controls, which must not be named ------------------------------------------------------------


def shift_positions(fault: PlantedFault, *, offset: int) -> Planting:
    """Control: add `offset` to all positions. RoPE is relative: only rounding changes."""
    return _change_positions(fault, lambda positions: positions + offset)


def _change_positions(fault: PlantedFault, change: Callable[[Tensor], Tensor]) -> Planting:
    """Pass `change(positions)` to all rotary embeddings of the draft."""

    def run(rotary, original, *args, **kwargs):
        arguments = name_arguments(rotary, args, kwargs)
        name, positions = rotary_positions(arguments)
        return original(**arguments | {name: change(positions)})

    return replace_forwards(
        {rotary: partial(run, rotary) for _, rotary in find(fault.draft)["rotary"]}
    )


def sum_in_parts(fault: PlantedFault) -> Planting:
    """Control: let linear modules sum in parts. Only rounding changes, in one layer or in all.

    As in kernels, the number of parts depends on the number of rows.
    """
    numbered = ((layer_number(path), module) for path, module in find_modules(fault.draft))
    return replace_forwards(
        {
            module: partial(_in_parts, module)
            for number, module in numbered
            if isinstance(module, nn.Linear)
            and number is not None
            and fault.layer in (None, number)
        }
    )


def _in_parts(linear: nn.Linear, original: Any, states: Tensor) -> Tensor:
    n_parts = 4 if states.numel() // states.shape[-1] <= 4 else 2
    parts = zip(states.chunk(n_parts, -1), linear.weight.chunk(n_parts, -1), strict=True)
    total = sum(functional.linear(*part) for part in parts)
    return total if linear.bias is None else total + linear.bias


# --- the faults by name ---------------------------------------------------------------------------


def read_faults(path: Path, *transforms: Callable[..., Planting]) -> dict[str, Fault]:
    """Read faults by name from a TOML file, whose header describes the fields."""
    by_name = {transform.__name__: transform for transform in transforms}
    faults = {}
    for name, row in read_toml(path).items():
        options = {key: None if value == "none" else value for key, value in row["options"].items()}
        faults[name] = Fault(**row | {"transform": by_name[row["transform"]], "options": options})
    return faults


FAULTS: Mapping[str, Fault] = read_faults(
    Path(__file__).with_name("faults.toml"),
    resolve_by_position,
    share_buffer,
    read_foreign_choice,
    scale_experts,
    swap_slots,
    scale_positions,
    shift_positions,
    sum_in_parts,
)
"""Six faults and two controls, by name."""


def deploy_fault(name: str, *, layer: int | None = None) -> Deploy:
    """Return a planted fault as a service, in `layer` (None: the default).

    Raises InputError for an unknown name, and for a layer if the fault does not take one.
    """
    require_known("fault", name, FAULTS)
    if layer is None:
        return FAULTS[name]
    if "layer" not in FAULTS[name].options:
        raise InputError(f"the fault {name} does not take a layer: leave out layer {layer}")
    return partial(FAULTS[name], layer=layer)


class RecordedFault:
    """A fault as a service; `entered` has one `PlantedFault` per `with` block."""

    def __init__(self, fault: Fault, **options: Any) -> None:
        self.fault = fault
        self.entered = []
        self._options = options

    @contextmanager
    def __call__(self, draft: Module, neighbor: Module | None) -> Iterator[PlantedFault]:
        with self.fault(draft, neighbor, **self._options) as planted:
            self.entered.append(planted)
            yield planted

    def acted(self) -> PlantedFault:
        """Return the entry in which the fault first acted. Raises InputError if it never did."""
        planted = max(self.entered, key=lambda item: (bool(item.struck), item.first is not None))
        if self.fault.waits and not planted.struck:
            raise InputError(
                f"the fault ({planted.note}) never acted: choose a script in which it can"
            )
        return planted
