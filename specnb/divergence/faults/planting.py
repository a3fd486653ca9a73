"""What planted faults share: their description, how a module is changed, and how it is undone.

A fault is a context manager. It changes what a module computes, never what the module looks like from outside: the
module's own `forward` is replaced on the instance, so hooks see the inputs and the output of the faulty op as they
would see those of a real one.
"""

import pkgutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial, wraps
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Module

from specnb.divergence.capture import replaced
from specnb.divergence.parts import part_of
from specnb.errors import InputError

Deploy = Callable[[Module, Module | None], AbstractContextManager[object]]
"""What puts a draft into service beside a neighbour (None: alone) for the time of a block: what is under suspicion."""
Around = Callable[..., Any]
"""`around(original, *args, **kwargs)`: what runs in a forward's place."""


@dataclass
class PlantedFault:
    """A fault as it was planted, and what an investigation must say of it.

    It sits in a `module` of the draft, and in the `other` of the target's where one is needed.

    `first` is the canonical path of the module that must be found first ("" is the model itself: it was fed other
    inputs), None where nothing structural may be found: a benign change, or a fault that needs a neighbour and has
    none. `tokens` are half-open ranges of logical positions, (start, None) to the end; a start that depends on what is
    run is a lower bound. A fault that waits for something notes in `struck` the first position each time it acts.
    """

    draft: Module
    target: Module | None
    layer: int | None
    module: Module
    other: Module | None
    cause: str
    first: str | None
    note: str
    tokens: tuple[tuple[int, int | None], ...]
    struck: list[int] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class Fault:
    """A kind of fault: `transform(planted, **options)` plants it in a part of a model ("": in the model itself).

    `says` what it is, with options in braces. One `beside` a neighbour does nothing without; one that `waits` acts only
    when something happens. All options but `layer` are the transform's.
    """

    cause: str
    part: str
    transform: Callable[..., AbstractContextManager[object]]
    says: str
    issues: tuple[str, ...]
    options: dict[str, Any]
    beside: bool = False
    waits: bool = False

    @contextmanager
    def __call__(self, draft: Module, target: Module | None = None, **chosen: Any) -> Iterator[PlantedFault]:
        """Plant the fault for the time of a block. Raises InputError where the draft has no such part."""
        options = self.options | chosen
        layer = options.pop("layer", None)
        path, module = part_of(draft, self.part, layer)
        other = part_of(target, self.part, layer)[1] if self.beside and target is not None else None
        alone = self.beside and other is None
        first, note = None if alone or self.cause == "PRECISION_ONLY" else path, self.says.format(**options)
        tokens = ((options.get("start", 0), None),)
        planted = PlantedFault(draft, target, layer, module, other, self.cause, first, note, tokens)
        with nullcontext() if alone else self.transform(planted, **options):
            yield planted


def replace_forward(module: Module, around: Around) -> AbstractContextManager[object]:
    """`module` runs `around(original, …)` inside its hooks."""
    return replaced(module, "forward", wraps(module.forward)(partial(around, module.forward)))


@contextmanager
def replace_forwards(arounds: Mapping[Module, Around]) -> Iterator[None]:
    """Each of these modules runs its `around(original, …)`."""
    with ExitStack() as until:
        for module, around in arounds.items():
            until.enter_context(replace_forward(module, around))
        yield


@contextmanager
def change_values(new: Mapping[nn.Parameter, Tensor]) -> Iterator[None]:
    """Each parameter holds the new values inside, in its own memory, and the very same bits as before afterwards."""
    before = {parameter: parameter.detach().clone() for parameter in new}
    try:
        for parameter, value in new.items():
            parameter.detach().copy_(value)  # torch counts it: digests are taken again
        yield
    finally:
        for parameter, value in before.items():
            parameter.detach().copy_(value)


def positions_fed(given: Mapping[str, Any]) -> Tensor:
    """Logical positions (1 or batch, length) of what a model is called with: as given, else on from its cache."""
    if given.get("position_ids") is not None:
        return given["position_ids"]
    cache, ids = given.get("past_key_values"), given["input_ids"]
    past = 0 if cache is None else cache.get_seq_length()
    return torch.arange(past, past + ids.shape[1], device=ids.device)[None]


def rotary_positions(given: Mapping[str, Any]) -> tuple[str, Tensor]:
    """Name and value of the integer tensor among a rotary embedding's arguments."""
    return next(item for item in given.items() if isinstance(item[1], Tensor) and not item[1].is_floating_point())


# --- a service of the user's, by its name -----------------------------------------------------------------------------


def import_service(name: str) -> Deploy:
    """The service `module:function`; modules of the current directory are found, too. InputError where it is none."""
    if (here := str(Path.cwd())) not in sys.path:  # a console script's first entry is its own folder
        sys.path.append(here)  # last: a file of the user's must not stand in for a library's module
    try:
        return pkgutil.resolve_name(name)
    except (Exception, SystemExit) as error:  # whatever a module of the user's raises
        raise InputError(f"importing {name} raised {type(error).__name__}: {error}") from error
