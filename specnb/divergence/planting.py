"""What planted faults share: their description, how a module is changed, and how it is undone.

A fault is a context manager. It changes what a module computes, never what the module looks like from outside: the
module's own `forward` is replaced on the instance, so hooks see the inputs and the output of the faulty op as they
would see those of a real one.
"""

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from specnb.divergence.parts import find
from specnb.errors import InputError

Deploy = Callable[[nn.Module, nn.Module | None], AbstractContextManager[object]]
"""What puts a draft into service beside a neighbour (None: alone) for the time of a block: what is under suspicion."""

ALL = ((0, None),)
"""The token range of a fault that reaches every token."""


@dataclass(frozen=True)
class Fault:
    """A fault as it was planted, and what an investigation must say of it.

    `first` is the canonical path of the module that must be found first ("" is the model itself: it was fed other
    inputs), None where nothing structural may be found: a benign change, or a fault that needs a neighbour and has
    none. `tokens` are half-open ranges of logical positions, (start, None) to the end; a start that depends on what is
    run is a lower bound. A fault that `waits` acts only when something happens, and then notes the first position in
    `struck`, each time. `issues` are upstream threads where this happened.
    """

    cause: str
    first: str | None
    tokens: tuple[tuple[int, int | None], ...]
    note: str
    issues: tuple[str, ...] = ()
    waits: bool = False
    struck: list[int] = field(default_factory=list, compare=False)


@contextmanager
def replaced(owner: object, name: str, value: object) -> Iterator[None]:
    """The attribute `name` of this one instance is `value` inside, and what it was before afterwards."""
    attributes = vars(owner)
    before = attributes.get(name, attributes)  # the dict itself: no value that an attribute can have
    attributes[name] = value
    try:
        yield
    finally:
        if before is attributes:
            attributes.pop(name, None)
        else:
            attributes[name] = before


Around = Callable[..., Any]
"""`around(original, *args, **kwargs)`: what runs in a forward's place."""


@contextmanager
def forward_replaced(module: nn.Module, around: Around) -> Iterator[None]:
    """`module` runs `around(original, …)` inside its hooks. The signature stays: captures name arguments by it."""
    original = module.forward

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    with replaced(module, "forward", forward):
        yield


@contextmanager
def values_changed(new: Mapping[nn.Parameter, torch.Tensor]) -> Iterator[None]:
    """Each parameter holds the new values inside, in its own memory, and the very same bits as before afterwards."""
    with torch.no_grad():
        before = {parameter: parameter.detach().clone() for parameter in new}
    try:
        _write(new)
        yield
    finally:
        _write(before)


def arguments(original: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> inspect.BoundArguments:
    """The arguments of a call by their names, however the caller passed them."""
    return inspect.signature(original).bind(*args, **kwargs)


def positions_fed(bound: inspect.BoundArguments) -> torch.Tensor:
    """Logical positions (1 or batch, length) of what a model is called with: as given, else on from its cache."""
    given = bound.arguments.get("position_ids")
    if given is not None:
        return given
    cache, ids = (bound.arguments.get(name) for name in ("past_key_values", "input_ids"))
    ids = bound.arguments.get("inputs_embeds") if ids is None else ids
    if ids is None:
        raise InputError(f"a model was called without `input_ids` or `inputs_embeds`: {', '.join(bound.arguments)}")
    past = 0 if cache is None else cache.get_seq_length()
    return torch.arange(past, past + ids.shape[1], device=ids.device)[None]


class Clock:
    """Which logical positions the rows of the running forward have: read where the rotary embedding is called."""

    def __init__(self, model: nn.Module) -> None:
        self._rotary = find(model).rotary()[1]
        self._positions: torch.Tensor | None = None

    @contextmanager
    def running(self) -> Iterator["Clock"]:
        """Listen inside."""
        handle = self._rotary.register_forward_pre_hook(self._hear, with_kwargs=True)
        try:
            yield self
        finally:
            handle.remove()

    def rows(self, n_rows: int) -> torch.Tensor:
        """Positions (n_rows,) of rows that are flattened over batch and length; one row of positions serves a batch."""
        if self._positions is None or n_rows % self._positions.numel():
            raise InputError(f"{n_rows} rows have no positions: the model's rotary embedding was not called for them")
        return self._positions.repeat(n_rows // self._positions.numel())

    def _hear(self, rotary: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._positions = positions_argument(arguments(rotary.forward, args, kwargs))[1].flatten()


def with_argument(
    original: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], name: str, value: object
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The call with one argument replaced or added, all others passed the way the caller passed them.

    Decorated forwards look into keywords, so what was given as one has to stay one.
    """
    place = list(inspect.signature(original).parameters).index(name)
    if place < len(args):
        return (*args[:place], value, *args[place + 1 :]), dict(kwargs)
    return args, {**kwargs, name: value}


def positions_argument(bound: inspect.BoundArguments) -> tuple[str, torch.Tensor]:
    """Name and value of the integer tensor among a rotary embedding's arguments. InputError where there is none."""
    for name, value in bound.arguments.items():
        if isinstance(value, torch.Tensor) and not value.is_floating_point():
            return name, value
    raise InputError(f"a rotary embedding was called without integer positions: it got {', '.join(bound.arguments)}")


def _write(values: Mapping[nn.Parameter, torch.Tensor]) -> None:
    with torch.no_grad():
        for parameter, value in values.items():
            parameter.copy_(value)
