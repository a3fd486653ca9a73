"""Planted faults: bugs that really happened, put into any eager torch model for the time of a `with` block.

    with FAULTS["positional_registry"](draft, target) as fault:
        ...  # run the draft; an investigation must name fault.cause and fault.first
    # every bit of both models is what it was

A fault of a neighbour does nothing without a target: `first` is None then. `split_k` and `uniform_offset` are controls:
they change numbers and must not be called structural. Faults of the key/value cache are in `faults.cache`; faults of
sampling are in `lossless`.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import Module, functional

from specnb.divergence.faults.cache import foreign_writer, kv_slot_swap, overtrimmed, untrimmed
from specnb.divergence.faults.planting import (
    ALL,
    Around,
    Call,
    Deploy,
    Fault,
    arguments,
    forward_replaced,
    positions_fed,
    replaced,
    rotary_positions,
    values_changed,
    with_argument,
)
from specnb.divergence.parts import Named, find, layer_number, named, output_head
from specnb.errors import InputError, require_known

OUTPUT_SIDE = ("down_proj", "w2")
"""How names of the parameters begin that make an expert's output."""

# --- of a neighbour: its experts, its buffer, its routing, its memory -----------------------------------------------


@contextmanager
def positional_registry(
    draft: Module, target: Module | None = None, *, layer: int | None = None, in_custom_op: bool = False
) -> Iterator[Fault]:
    """The draft's i-th bank of experts runs with the parameters of the i-th bank that was registered in the process.

    The target is loaded first, so its banks come first in the list; routing stays the draft's. `layer`: only that
    layer's op resolves by position; None for all, as vLLM 0.15.0 did. `in_custom_op`: in a custom operation, as there:
    torch is shown the activations only. InputError where a foreign bank does not fit.
    """
    first_bank, banks = find(draft).bank(layer), find(draft).banks
    chosen = banks if layer is None else (first_bank,)
    registry = (*(find(target).banks if target is not None else ()), *banks)
    foreign = [(bank, other) for bank, other in zip(banks, registry, strict=False) if bank in chosen and bank != other]
    first = foreign[0][0][0] if foreign else None
    note = f"the op resolved the target's {foreign[0][1][0]}" if foreign else "alone: every bank resolves itself"
    with ExitStack() as planted:
        for bank, other in foreign:
            _check_fits(bank, other)
            run = planted.enter_context(_operation(_run_as(other[1]))) if in_custom_op else _run_as(other[1])
            planted.enter_context(forward_replaced(bank[1], run))
        yield Fault("IDENTITY", first, ALL, note, ("vllm#33497", "vllm#32805", "vllm#33624"))


def shared_buffer(
    draft: Module, target: Module | None = None, *, layer: int = 0, token: int | None = None
) -> AbstractContextManager[Fault]:
    """Both models' experts of a layer write to one buffer, and the target's rows are there when the draft reads.

    `token`: the logical position of the one row that is stale; None for every row the target wrote. Nothing happens
    until the target has run.
    """
    path, bank = find(draft).bank(layer)
    note = "the target's last output of this layer stands in the draft's rows"
    tokens = ALL if token is None else ((token, token + 1),)
    fault = Fault("STATE", target and path, tokens, note, waits=True)

    def stale(out: Tensor, left: Tensor, rows_of: Callable[[int], Tensor]) -> Tensor:
        out, positions = out.clone(), rows_of(len(out))[: len(left)]
        rows = torch.arange(len(positions)) if token is None else (positions == token).nonzero().flatten()
        out[rows] = left[rows].to(out)
        fault.struck.extend(positions[rows][:1].tolist())
        return out

    return _left_behind(draft, bank, target and find(target).bank(layer)[1], stale, fault)


def foreign_routing(draft: Module, target: Module | None = None, *, layer: int = 0) -> AbstractContextManager[Fault]:
    """Chosen experts are kept in one place for both models, keyed by layer: the draft reads what the target chose.

    The rows that both have get the target's choice (modulo the draft's number of experts); weights stay the draft's.
    Nothing happens until the target has run.
    """
    path, router = find(draft).router(layer)
    note, issues = "experts are those the target chose in its layer of the same number", ("vllm#48622", "sglang#26980")
    fault = Fault("ROUTING", target and path, ALL, note, issues, waits=True)
    n_experts = find(draft).bank(layer)[1].num_experts

    def chosen(out: Any, left: Any, rows_of: Callable[[int], Tensor]) -> Any:
        of_target = next(part for part in left if not part.is_floating_point()) % n_experts
        fault.struck.extend(rows_of(len(out[0]))[:1].tolist())
        return type(out)(part if part.is_floating_point() else _first_rows(part, of_target) for part in out)

    return _left_behind(draft, router, target and find(target).router(layer)[1], chosen, fault)


@contextmanager
def _left_behind(
    draft: Module, module: Module, other: Module | None, read: Callable[..., Any], fault: Fault
) -> Iterator[Fault]:
    """Once the target's module, if any, has run, the draft's gives what `read` makes of both outputs and positions."""
    left: list[Any] = []

    def of_target(original: Any, *args: Any, **kwargs: Any) -> Any:
        left[:] = [original(*args, **kwargs)]
        return left[0]

    def of_draft(original: Any, *args: Any, **kwargs: Any) -> Any:
        out = original(*args, **kwargs)
        return read(out, left[0], rows_of) if left else out

    at_the_target = nullcontext() if other is None else forward_replaced(other, of_target)
    with _positions_heard(draft) as rows_of, at_the_target, forward_replaced(module, of_draft):
        yield fault


@contextmanager
def neighbour_read(
    draft: Module, target: Module | None = None, *, layer: int = 0, strength: float = 0.1
) -> Iterator[Fault]:
    """A bank reads its output scales past its own end: each feature is off by the bytes another model has there.

    A feature is multiplied by 1 + strength * byte / 255. The bytes are the target's first expert weights, as they are
    at that moment. They are read as memory, not as a parameter: an unmasked load has no operand that names its owner.
    """
    path, module = find(draft).bank(layer)
    note = "scales are read past the end of the bank, from memory that belongs to whatever is there"
    issues = ("triton#10772", "vllm#47303")
    if target is None:
        yield Fault("STATE", None, ALL, note, issues)
        return
    weight = next(iter(find(target).bank(layer)[1].parameters(recurse=False)))
    # numpy reads past torch's dispatcher, as the stray load does: nothing that watches operands sees whose memory it is
    memory = weight.detach().cpu().contiguous().view(torch.uint8).flatten().numpy()

    def stray(original: Any, *args: Any, **kwargs: Any) -> Tensor:
        out = original(*args, **kwargs)
        read = torch.from_numpy(np.resize(memory, out.shape[-1])).float()
        return (out * (1 + strength / 255 * read.to(out.device)).to(out.dtype)) if read.any() else out

    with forward_replaced(module, stray):
        yield Fault("STATE", path, ALL, note, issues)


@contextmanager
def _positions_heard(model: Module) -> Iterator[Callable[[int], Tensor]]:
    """Yield a function: logical positions (n_rows,) of flattened rows, as the rotary embedding was last called with."""
    positions = torch.empty(0)

    def hear(rotary: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal positions
        positions = rotary_positions(arguments(rotary.forward, args, kwargs))[1].flatten().cpu()

    with find(model).rotary()[1].register_forward_pre_hook(hear, with_kwargs=True):
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


@contextmanager
def expert_scale(
    draft: Module, target: Module | None = None, *, layer: int = 0, eps: float = 0.02, in_op: bool = False
) -> Iterator[Fault]:
    """The output of one bank of experts is (1 + eps) times what it should be: a wrong quantisation scale.

    The wrong scale is in the parameters, or with `in_op` in what the op makes of right ones (the weights it combines
    experts with).
    """
    path, module = find(draft).bank(layer)
    weights = [weight for name, weight in module.named_parameters(recurse=False) if name.startswith(OUTPUT_SIDE)]
    if in_op:
        planted = forward_replaced(module, partial(_combine_scaled, eps))
    elif weights:
        planted = values_changed({weight: weight.detach() * (1 + eps) for weight in weights})
    else:
        raise InputError(f"{path} has no parameter named {' or '.join(OUTPUT_SIDE)}…: use in_op=True")
    with planted:
        yield Fault("WEIGHTS", path, ALL, f"output times {1 + eps:g}", ("sglang#39087", "sglang#22823"))


@contextmanager
def experts_permuted(draft: Module, target: Module | None = None, *, layer: int = 0, seed: int = 0) -> Iterator[Fault]:
    """Every expert of a bank stands at another expert's index: a loader that got the order wrong."""
    path, module = find(draft).bank(layer)
    ring = torch.randperm(module.num_experts, generator=torch.Generator().manual_seed(seed))
    order = torch.empty_like(ring)
    order[ring] = ring.roll(1)  # one cycle through all of them: none stays where it was
    weights = [weight for weight in module.parameters(recurse=False) if len(weight) == module.num_experts]
    with values_changed({weight: weight.detach()[order.to(weight.device)] for weight in weights}):
        yield Fault("WEIGHTS", path, ALL, "the experts of this bank are in another order")


@contextmanager
def random_head(draft: Module, target: Module | None = None, *, seed: int = 0) -> Iterator[Fault]:
    """The output head has weights as drawn at construction; an embedding that was tied to it keeps its values."""
    path, head = output_head(draft)
    draw = torch.Generator().manual_seed(seed)
    std = getattr(getattr(draft, "config", None), "initializer_range", 0.02)
    fresh = nn.Parameter((std * torch.randn(head.weight.shape, generator=draw)).to(head.weight), requires_grad=False)
    note, issues = "the head's weights are those of a new layer", ("vllm#46435", "sglang#27829", "speculators#1131")
    with replaced(head, "_parameters", head._parameters | {"weight": fresh}):
        yield Fault("HEAD", path, ALL, note, issues)


def _combine_scaled(eps: float, original: Any, *args: Any, **kwargs: Any) -> Tensor:
    """A bank's output is linear in the weights that combine its experts: scaling those scales the output."""
    name, weights = list(arguments(original, args, kwargs).items())[2]  # of (states, indices, weights)
    combined = weights * torch.full_like(weights, 1 + eps)  # of the weights' type, as a scale is
    args, kwargs = with_argument(original, args, kwargs, name, combined)
    return original(*args, **kwargs)


# --- of what goes in and comes out: positions, fed tokens, the order of a sum ---------------------------------------


@contextmanager
def rope_mismatch(
    draft: Module, target: Module | None = None, *, start: int = 8, factor: float = 4.0
) -> Iterator[Fault]:
    """Positions from `start` on are rotated as if the context were scaled by `factor`; cached keys before are not."""
    note = f"positions from {start} on are divided by {factor:g} before they are rotated"
    path = find(draft).rotary()[0]
    fault = Fault("POSITION", path, ((start, None),), note, ("vllm#58080", "vllm#57941"))
    with _positions_changed(draft, lambda positions: torch.where(positions < start, positions, positions / factor)):
        yield fault


@contextmanager
def uniform_offset(draft: Module, target: Module | None = None, *, offset: int = 1) -> Iterator[Fault]:
    """Control: all positions are `offset` higher. RoPE is relative, so what attention makes is off by rounding only."""
    fault = Fault("PRECISION_ONLY", None, ALL, f"every position is {offset} higher: no fault at all")
    with _positions_changed(draft, lambda positions: positions + offset):
        yield fault


@contextmanager
def dummy_tokens(draft: Module, target: Module | None = None, *, start: int = 8, token: int = 0) -> Iterator[Fault]:
    """From position `start` on the draft is fed `token` in place of its input, as past a wrong maximal length."""

    def feed(model: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        given = arguments(model.forward, args, kwargs)
        fed = torch.where(positions_fed(given) < start, given["input_ids"], token)
        return with_argument(model.forward, args, kwargs, "input_ids", fed)

    # before all other hooks: whoever watches the model sees what it was really fed
    with draft.register_forward_pre_hook(feed, with_kwargs=True, prepend=True):
        note = f"from position {start} on token {token} is fed"
        yield Fault("INPUT", "", ((start, None),), note, ("vllm#58080",))


@contextmanager
def split_k(draft: Module, target: Module | None = None, *, layer: int | None = None) -> Iterator[Fault]:
    """Control: linear layers sum in parts, how many depends on the number of rows, as kernels do. Rounding only.

    `layer`: only the linear layers in it, None for all in the model's layers. InputError where there is none.
    """
    numbered = [(layer_number(path), module) for path, module in named(draft) if isinstance(module, nn.Linear)]
    modules = [module for at, module in numbered if at is not None and layer in (None, at)]
    if not modules:
        raise InputError(f"layer {layer!r} has no linear layer")
    note = "sums over features are made in parts, whose number depends on the number of rows"
    with ExitStack() as planted:
        for module in modules:
            planted.enter_context(forward_replaced(module, partial(_in_parts, module)))
        yield Fault("PRECISION_ONLY", None, ALL, note, ("vllm#54506", "llama.cpp#23335"))


def _in_parts(linear: nn.Linear, original: Any, states: Tensor) -> Tensor:
    n_parts = 4 if states.numel() // states.shape[-1] <= 4 else 2
    parts = zip(states.chunk(n_parts, -1), linear.weight.chunk(n_parts, -1), strict=True)
    total = sum(functional.linear(*part) for part in parts)
    return total if linear.bias is None else total + linear.bias


@contextmanager
def _positions_changed(draft: Module, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """All rotary embeddings of the draft see `change(positions)`."""

    def run(original: Any, *args: Any, **kwargs: Any) -> Any:
        name, positions = rotary_positions(arguments(original, args, kwargs))
        args, kwargs = with_argument(original, args, kwargs, name, change(positions))
        return original(*args, **kwargs)

    find(draft).rotary()
    with ExitStack() as planted:
        for _, rotary in find(draft).rotaries:
            planted.enter_context(forward_replaced(rotary, run))
        yield


FAULTS: Mapping[str, Callable[..., AbstractContextManager[Fault]]] = {
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
"""All faults by name; options of a fault are those of its function."""


def planted(fault: str, *, layer: int | None = None) -> Deploy:
    """The planted fault of that name as a service, in `layer` (None: by default). InputError where there is no such."""
    require_known("fault", fault, FAULTS)
    if layer is None:
        return FAULTS[fault]
    if "layer" not in inspect.signature(FAULTS[fault]).parameters:
        raise InputError(f"the fault {fault} is in no one layer: leave layer {layer} out")
    return partial(FAULTS[fault], layer=layer)


class RecordedFault:
    """A planted fault as a service that notes each entry: `entered` has the neighbour and the fault as it was."""

    def __init__(self, name: str, **options: Any) -> None:
        self.name, self.options = name, options
        self.entered: list[tuple[Module | None, Fault]] = []

    @contextmanager
    def __call__(self, draft: Module, neighbour: Module | None) -> Iterator[Fault]:
        with FAULTS[self.name](draft, neighbour, **self.options) as fault:
            self.entered.append((neighbour, fault))
            yield fault

    def acted(self) -> Fault:
        """The fault as it was when it first acted, or at all. Raises InputError where it waited in vain."""
        planted = (fault for _, fault in self.entered)
        fault = max(planted, key=lambda fault: (bool(fault.struck), fault.first is not None))
        if fault.waits and not fault.struck:
            raise InputError(f"{self.name} never acted: choose a script in which what it waits for happens")
        return fault
