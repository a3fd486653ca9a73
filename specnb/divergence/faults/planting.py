"""Descriptions of planted faults, and functions that change a module and restore it.

A fault is a context manager. It changes what a module computes, but not its interface: the
`forward` of the instance is replaced, so hooks see the inputs and outputs of the faulty operation
as they would for a real fault.
"""

import pkgutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial, wraps
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.nn import Module

from specnb.divergence.capture import replaced
from specnb.divergence.parts import part_of
from specnb.errors import InputError

Deploy = Callable[[Module, Module | None], AbstractContextManager[object]]
"""A service: runs a draft next to a neighbor (None: alone) inside a `with` block."""
Around = Callable[..., Any]
"""`around(original, *args, **kwargs)` runs instead of a module's forward."""


@dataclass
class PlantedFault:
    """A planted fault, and what an investigation must find.

    `module` of the draft has the fault; `other` is the target's part, if the fault needs a
    neighbor. `first` is the canonical path of the module that must be named first ("": the model
    itself, which was fed other inputs), or None if no module may be named: a control, or a fault
    without its neighbor. `tokens` are half-open ranges of wrong positions, (start, None) to the
    end; a start that depends on the run is a lower bound. Each time a fault that waits acts, it
    appends the first position to `struck`.
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
    """A kind of fault: `transform(planted, **options)` plants it in a part of a model.

    `part` "" is the model itself. `says` describes the fault, with options in braces. `beside`: it
    does nothing without a neighbor. `waits`: it acts only when something happens. All options
    except `layer` are those of the transform.
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
    def __call__(
        self, draft: Module, target: Module | None = None, **chosen: Any
    ) -> Iterator[PlantedFault]:
        """Plant the fault inside a block. Raises InputError if the draft has no such part."""
        options = self.options | chosen
        layer = options.pop("layer", None)
        path, module = part_of(draft, self.part, layer)
        other = part_of(target, self.part, layer)[1] if self.beside and target is not None else None
        alone = self.beside and other is None
        first = None if alone or self.cause == "PRECISION_ONLY" else path
        note = self.says.format(**options)
        tokens = ((options.get("start", 0), None),)
        planted = PlantedFault(draft, target, layer, module, other, self.cause, first, note, tokens)
        with nullcontext() if alone else self.transform(planted, **options):
            yield planted


def replace_forward(module: Module, around: Around) -> AbstractContextManager[object]:
    """Let `module` run `around(original, …)` inside its hooks."""
    return replaced(module, "forward", wraps(module.forward)(partial(around, module.forward)))


@contextmanager
def replace_forwards(arounds: Mapping[Module, Around]) -> Iterator[None]:
    """Let each of these modules run its `around(original, …)`."""
    with ExitStack() as until:
        for module, around in arounds.items():
            until.enter_context(replace_forward(module, around))
        yield


@contextmanager
def change_values(new: Mapping[nn.Parameter, Tensor]) -> Iterator[None]:
    """Write new values into parameters, in place; restore the same bits afterwards."""
    before = {parameter: parameter.detach().clone() for parameter in new}
    try:
        for parameter, value in new.items():
            parameter.detach().copy_(value)
        yield
    finally:
        for parameter, value in before.items():
            parameter.detach().copy_(value)


def rotary_positions(given: Mapping[str, Any]) -> tuple[str, Tensor]:
    """Return name and value of the first integer tensor among a rotary embedding's arguments."""
    return next(
        item
        for item in given.items()
        if isinstance(item[1], Tensor) and not item[1].is_floating_point()
    )


# --- a user's service, by name --------------------------------------------------------------------


def import_service(name: str) -> Deploy:
    """Import the service `module:function`, also from the current directory. Raises InputError."""
    if (here := str(Path.cwd())) not in sys.path:  # console scripts do not search it
        sys.path.append(here)  # last: a user's file must not shadow a library's module
    try:
        return pkgutil.resolve_name(name)
    except (Exception, SystemExit) as error:  # a user's module may raise anything
        raise InputError(f"importing {name} raised {type(error).__name__}: {error}") from error
