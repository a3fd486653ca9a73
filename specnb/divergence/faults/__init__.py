"""Planted faults: bugs that really happened, put into any eager torch model for the time of a `with` block.

    with FAULTS["positional_registry"](draft, target) as planted:
        ...  # run the draft; an investigation must name planted.cause and planted.first
    # every bit of both models is what it was

A fault of a neighbour does nothing without a target: `first` is None then. `split_k` and `uniform_offset` are controls:
they change numbers and must not be called structural. Faults of the key/value cache are in `faults.cache`; faults of
sampling are in `lossless`.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import Module, functional

from specnb.divergence.faults.cache import crop_wrongly, overwrite_row, swap_slots
from specnb.divergence.faults.planting import (
    Around,
    Call,
    Deploy,
    Fault,
    PlantedFault,
    Site,
    arguments,
    change_values,
    positions_fed,
    replace_forward,
    replaced,
    rotary_positions,
    with_argument,
)
from specnb.divergence.parts import Named, find, layer_number, named, part_of
from specnb.errors import InputError, require_known

Planting = AbstractContextManager[None]

OUTPUT_SIDE = ("down_proj", "w2")
"""How names of the parameters begin that make an expert's output."""

# --- of a neighbour: its experts, its buffer, its routing, its memory -----------------------------------------------


@contextmanager
def resolve_by_position(site: Site, *, in_custom_op: bool) -> Iterator[None]:
    """The draft's i-th bank of experts runs with the parameters of the i-th bank that was registered in the process.

    The target is loaded first, so its banks come first in the list; routing stays the draft's. In one layer only that
    layer's op resolves by position; in all as vLLM 0.15.0 did. `in_custom_op`: in a custom operation, as there: torch
    is shown the activations only. InputError where a foreign bank does not fit.
    """
    banks = find(site.draft).banks
    pairs = zip(banks, (*(find(site.target).banks if site.target is not None else ()), *banks), strict=False)
    foreign = [(bank, other) for bank, other in pairs
               if bank != other and (site.layer is None or bank[1] is site.module)]  # fmt: skip
    site.planted.first = None
    with ExitStack() as until:
        for bank, other in reversed(foreign):  # the first is named
            _check_fits(bank, other)
            site.planted.first, site.planted.note = bank[0], f"the op resolved the target's {other[0]}"
            run = until.enter_context(_operation(_run_as(other[1]))) if in_custom_op else _run_as(other[1])
            until.enter_context(replace_forward(bank[1], run))
        yield


def share_buffer(site: Site, *, token: int | None) -> Planting:
    """Both models' experts of a layer write to one buffer, and the target's rows are there when the draft reads.

    `token`: the logical position of the one row that is stale; None for every row the target wrote. Nothing happens
    until the target has run.
    """
    if token is not None:
        site.planted.tokens = ((token, token + 1),)

    def stale(out: Tensor, left: Tensor, rows_of: Callable[[int], Tensor]) -> Tensor:
        out, positions = out.clone(), rows_of(len(out))[: len(left)]
        rows = torch.arange(len(positions)) if token is None else (positions == token).nonzero().flatten()
        out[rows] = left[rows].to(out)
        site.planted.struck.extend(positions[rows][:1].tolist())
        return out

    return _left_behind(site, stale)


def read_foreign_choice(site: Site) -> Planting:
    """Chosen experts are kept in one place for both models, keyed by layer: the draft reads what the target chose.

    The rows that both have get the target's choice (modulo the draft's number of experts); weights stay the draft's.
    Nothing happens until the target has run.
    """
    n_experts = part_of(site.draft, "bank", site.layer)[1].num_experts

    def chosen(out: Any, left: Any, rows_of: Callable[[int], Tensor]) -> Any:
        of_target = next(part for part in left if not part.is_floating_point()) % n_experts
        site.planted.struck.extend(rows_of(len(out[0]))[:1].tolist())
        return type(out)(part if part.is_floating_point() else _first_rows(part, of_target) for part in out)

    return _left_behind(site, chosen)


@contextmanager
def _left_behind(site: Site, read: Callable[..., Any]) -> Iterator[None]:
    """Once the target's module, if any, has run, the draft's gives what `read` makes of both outputs and positions."""
    left: list[Any] = []

    def of_target(original: Any, *args: Any, **kwargs: Any) -> Any:
        left[:] = [original(*args, **kwargs)]
        return left[0]

    def of_draft(original: Any, *args: Any, **kwargs: Any) -> Any:
        out = original(*args, **kwargs)
        return read(out, left[0], rows_of) if left else out

    in_target = nullcontext() if site.other is None else replace_forward(site.other, of_target)
    with _follow_positions(site.draft) as rows_of, in_target, replace_forward(site.module, of_draft):
        yield


def read_past_the_end(site: Site, *, strength: float) -> Planting:
    """A bank reads its output scales past its own end: each feature is off by the bytes another model has there.

    A feature is multiplied by 1 + strength * byte / 255. The bytes are the target's first expert weights, as they are
    at that moment. They are read as memory, not as a parameter: an unmasked load has no operand that names its owner.
    """
    if site.other is None:
        return nullcontext()
    weight = next(iter(site.other.parameters(recurse=False)))
    # numpy reads past torch's dispatcher, as the stray load does: nothing that watches operands sees whose memory it is
    memory = weight.detach().cpu().contiguous().view(torch.uint8).flatten().numpy()

    def stray(original: Any, *args: Any, **kwargs: Any) -> Tensor:
        out = original(*args, **kwargs)
        read = torch.from_numpy(np.resize(memory, out.shape[-1])).float()
        return (out * (1 + strength / 255 * read.to(out.device)).to(out.dtype)) if read.any() else out

    return replace_forward(site.module, stray)


@contextmanager
def _follow_positions(model: Module) -> Iterator[Callable[[int], Tensor]]:
    """Yield a function: logical positions (n_rows,) of flattened rows, as the rotary embedding was last called with."""
    positions = torch.empty(0)

    def hear(rotary: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal positions
        positions = rotary_positions(arguments(rotary.forward, args, kwargs))[1].flatten().cpu()

    with part_of(model, "rotary")[1].register_forward_pre_hook(hear, with_kwargs=True):
        yield lambda n_rows: positions.repeat(n_rows // len(positions))


def _run_as(other: Module) -> Around:
    """Run another module's forward on the caller's inputs, without its hooks: an op got hold of it."""
    return lambda original, *args, **kwargs: type(other).forward(other, *args, **kwargs)


@contextmanager
def _operation(around: Around) -> Iterator[Around]:
    """The same behind a custom operation with a kernel in Python, as engines hide theirs from compilers."""
    names: list[str] = []

    def kernel(given: list[Tensor]) -> Tensor:
        return around(None, **dict(zip(names, given, strict=True)))

    def through(original: Any, *args: Any, **kwargs: Any) -> Any:
        given = arguments(original, args, kwargs)
        names[:] = given
        return getattr(torch.ops.specnb_planted, name)(list(given.values()))

    with torch.library._scoped_library("specnb_planted", "FRAGMENT") as library:
        name = f"experts_{id(kernel):x}"
        library.define(f"{name}(Tensor[] given) -> Tensor")
        library.impl(name, kernel, "CompositeExplicitAutograd")
        yield through


def _check_fits(part: Named, other: Named) -> None:
    """InputError unless the draft's routing and states fit the other bank: a real registry would crash instead."""
    shapes = [{name: (*weight.shape[1:], weight.dtype) for name, weight in bank.named_parameters()}
              for _, bank in (part, other)]  # fmt: skip
    if shapes[0] != shapes[1] or other[1].num_experts < part[1].num_experts:
        raise InputError(f"the bank of experts {other[0]} of the target does not fit {part[0]} of the draft")


def _first_rows(buffer: Tensor, other: Tensor) -> Tensor:
    """`buffer` (rows, k) with its first rows replaced by those of `other`, as far as both have them."""
    rows, k = min(len(buffer), len(other)), min(buffer.shape[-1], other.shape[-1])
    new = buffer.clone()
    new[:rows, :k] = other[:rows, :k]
    return new


# --- of weights: scaled experts, experts in another order, a head that was never loaded ---------------------------


def scale_experts(site: Site, *, eps: float, in_op: bool) -> Planting:
    """The output of one bank of experts is (1 + eps) times what it should be: a wrong quantisation scale.

    The wrong scale is in the parameters, or with `in_op` in what the op makes of right ones (the weights it combines
    experts with).
    """
    site.planted.note = f"output times {1 + eps:g}"
    if in_op:
        return replace_forward(site.module, partial(_combine_scaled, eps))
    named_weights = site.module.named_parameters(recurse=False)
    weights = [weight for name, weight in named_weights if name.startswith(OUTPUT_SIDE)]
    if not weights:
        raise InputError(f"{site.planted.first} has no parameter named {' or '.join(OUTPUT_SIDE)}…: use in_op=True")
    return change_values({weight: weight.detach() * (1 + eps) for weight in weights})


def permute_experts(site: Site, *, seed: int) -> Planting:
    """Every expert of a bank stands at another expert's index: a loader that got the order wrong."""
    n_experts = site.module.num_experts
    ring = torch.randperm(n_experts, generator=torch.Generator().manual_seed(seed))
    order = torch.empty_like(ring)
    order[ring] = ring.roll(1)  # one cycle through all of them: none stays where it was
    weights = [weight for weight in site.module.parameters(recurse=False) if len(weight) == n_experts]
    return change_values({weight: weight.detach()[order.to(weight.device)] for weight in weights})


def draw_head(site: Site, *, seed: int) -> Planting:
    """The output head has weights as drawn at construction; an embedding that was tied to it keeps its values."""
    head, draw = site.module, torch.Generator().manual_seed(seed)
    std = getattr(getattr(site.draft, "config", None), "initializer_range", 0.02)
    fresh = nn.Parameter((std * torch.randn(head.weight.shape, generator=draw)).to(head.weight), requires_grad=False)
    return replaced(head, "_parameters", head._parameters | {"weight": fresh})


def _combine_scaled(eps: float, original: Any, *args: Any, **kwargs: Any) -> Tensor:
    """A bank's output is linear in the weights that combine its experts: scaling those scales the output."""
    name, weights = list(arguments(original, args, kwargs).items())[2]  # of (states, indices, weights)
    combined = weights * torch.full_like(weights, 1 + eps)  # of the weights' type, as a scale is
    args, kwargs = with_argument(original, args, kwargs, name, combined)
    return original(*args, **kwargs)


# --- of what goes in and comes out: positions, fed tokens, the order of a sum ---------------------------------------


def scale_positions(site: Site, *, start: int, factor: float) -> Planting:
    """Positions from `start` on are rotated as if the context were scaled by `factor`; cached keys before are not."""
    return _change_positions(site, lambda positions: torch.where(positions < start, positions, positions / factor))


def shift_positions(site: Site, *, offset: int) -> Planting:
    """Control: all positions are `offset` higher. RoPE is relative, so what attention makes is off by rounding only."""
    return _change_positions(site, lambda positions: positions + offset)


def feed_dummies(site: Site, *, start: int, token: int) -> Planting:
    """From position `start` on the draft is fed `token` in place of its input, as past a wrong maximal length."""

    def feed(model: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        given = arguments(model.forward, args, kwargs)
        fed = torch.where(positions_fed(given) < start, given["input_ids"], token)
        return with_argument(model.forward, args, kwargs, "input_ids", fed)

    # before all other hooks: whoever watches the model sees what it was really fed
    return site.draft.register_forward_pre_hook(feed, with_kwargs=True, prepend=True)


@contextmanager
def sum_in_parts(site: Site) -> Iterator[None]:
    """Control: linear layers sum in parts, how many depends on the number of rows, as kernels do. Rounding only.

    In one layer, or in all of the model's. InputError where there is none.
    """
    numbered = [(layer_number(path), module) for path, module in named(site.draft) if isinstance(module, nn.Linear)]
    modules = [module for number, module in numbered if number is not None and site.layer in (None, number)]
    if not modules:
        raise InputError(f"layer {site.layer!r} has no linear layer")
    with ExitStack() as until:
        for module in modules:
            until.enter_context(replace_forward(module, partial(_in_parts, module)))
        yield


def _in_parts(linear: nn.Linear, original: Any, states: Tensor) -> Tensor:
    n_parts = 4 if states.numel() // states.shape[-1] <= 4 else 2
    parts = zip(states.chunk(n_parts, -1), linear.weight.chunk(n_parts, -1), strict=True)
    total = sum(functional.linear(*part) for part in parts)
    return total if linear.bias is None else total + linear.bias


@contextmanager
def _change_positions(site: Site, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """All rotary embeddings of the draft see `change(positions)`."""

    def run(original: Any, *args: Any, **kwargs: Any) -> Any:
        name, positions = rotary_positions(arguments(original, args, kwargs))
        args, kwargs = with_argument(original, args, kwargs, name, change(positions))
        return original(*args, **kwargs)

    with ExitStack() as until:
        for _, rotary in find(site.draft).rotaries:
            until.enter_context(replace_forward(rotary, run))
        yield


REGISTRY = Fault(
    "IDENTITY", "bank", resolve_by_position, "alone: every bank resolves itself",
    ("vllm#33497", "vllm#32805", "vllm#33624"), {"layer": None, "in_custom_op": False},
)  # fmt: skip
BUFFER = Fault("STATE", "bank", share_buffer, "the target's last output of this layer stands in the draft's rows", (),
               {"layer": 0, "token": None}, beside=True, waits=True)  # fmt: skip
SCALE = Fault("WEIGHTS", "bank", scale_experts, "", ("sglang#39087", "sglang#22823"),
              {"layer": 0, "eps": 0.02, "in_op": False})  # fmt: skip
OVERTRIMMED = Fault("KV_SLOT", "attention", partial(crop_wrongly, sign=-1),
                    "{rows} accepted rows were cut off with the rejected ones", ("mlxcel#994", "mlxcel#1002"),
                    {"rows": 1}, waits=True)  # fmt: skip
FAULTS: Mapping[str, Fault] = {
    "positional_registry": REGISTRY,
    "registry_in_op": REGISTRY.vary(in_custom_op=True),
    "shared_buffer": BUFFER,
    "stale_row": BUFFER.vary(token=12),
    "foreign_routing": Fault(
        "ROUTING", "router", read_foreign_choice, "experts are those the target chose in its layer of the same number",
        ("vllm#48622", "sglang#26980"), {"layer": 0}, beside=True, waits=True),
    "neighbour_read": Fault(
        "STATE", "bank", read_past_the_end,
        "scales are read past the end of the bank, from memory that belongs to whatever is there",
        ("triton#10772", "vllm#47303"), {"layer": 0, "strength": 0.1}, beside=True),
    "expert_scale": SCALE,
    "expert_scale_in_op": SCALE.vary(in_op=True),
    "experts_permuted": Fault(
        "WEIGHTS", "bank", permute_experts, "the experts of this bank are in another order", (),
        {"layer": 0, "seed": 0}),
    "kv_slot_swap": Fault(
        "KV_SLOT", "attention", swap_slots, "cache rows of positions {a} and {b} are swapped", (),
        {"layer": 0, "a": 5, "b": 9}, waits=True),
    "foreign_writer": Fault(
        "KV_SLOT", "attention", overwrite_row,
        "the cache row of position {position} was written by a batch that does not own it",
        ("vllm#56734", "vllm#49757"), {"layer": 0, "position": 2, "after": None}, waits=True),
    "untrimmed": Fault(
        "KV_SLOT", "attention", partial(crop_wrongly, sign=1), "{rows} rejected rows were left in the cache",
        ("mlx-lm#1914", "vllm#9730"), {"rows": 1}, waits=True),
    "overtrimmed": OVERTRIMMED,
    "overtrimmed_by_two": OVERTRIMMED.vary(rows=2),
    "rope_mismatch": Fault(
        "POSITION", "rotary", scale_positions,
        "positions from {start} on are divided by {factor:g} before they are rotated", ("vllm#58080", "vllm#57941"),
        {"start": 8, "factor": 4.0}),
    "dummy_tokens": Fault(
        "INPUT", "", feed_dummies, "from position {start} on token {token} is fed", ("vllm#58080",),
        {"start": 8, "token": 0}),
    "random_head": Fault(
        "HEAD", "head", draw_head, "the head's weights are those of a new layer",
        ("vllm#46435", "sglang#27829", "speculators#1131"), {"seed": 0}),
    "split_k": Fault(
        "PRECISION_ONLY", "", sum_in_parts,
        "sums over features are made in parts, whose number depends on the number of rows",
        ("vllm#54506", "llama.cpp#23335"), {"layer": None}),
    "uniform_offset": Fault(
        "PRECISION_ONLY", "rotary", shift_positions, "every position is {offset} higher: no fault at all", (),
        {"offset": 1}),
}  # fmt: skip
"""All faults by name."""


def deploy_fault(fault: str, *, layer: int | None = None) -> Deploy:
    """The planted fault of that name as a service, in `layer` (None: by default). InputError where there is no such."""
    require_known("fault", fault, FAULTS)
    if layer is None:
        return FAULTS[fault]
    if "layer" not in FAULTS[fault].options:
        raise InputError(f"the fault {fault} is in no one layer: leave layer {layer} out")
    return FAULTS[fault].vary(layer=layer)


class RecordedFault:
    """A planted fault as a service that notes each entry: `entered` has the neighbour and the fault as it was."""

    def __init__(self, name: str, **options: Any) -> None:
        self.name, self.entered = name, []
        self._fault = FAULTS[name].vary(**options)

    @contextmanager
    def __call__(self, draft: Module, neighbour: Module | None) -> Iterator[PlantedFault]:
        with self._fault(draft, neighbour) as planted:
            self.entered.append((neighbour, planted))
            yield planted

    def acted(self) -> PlantedFault:
        """The fault as it was when it first acted, or at all. Raises InputError where it waited in vain."""
        planted = (fault for _, fault in self.entered)
        fault = max(planted, key=lambda fault: (bool(fault.struck), fault.first is not None))
        if fault.waits and not fault.struck:
            raise InputError(f"{self.name} never acted: choose a script in which what it waits for happens")
        return fault
