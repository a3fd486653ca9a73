"""Services under suspicion, by name: the user's own, imported, or a planted fault, to see what the lab makes of one.

A service is `deploy(draft, neighbour)`, a context manager that puts the draft into service beside a neighbour (None:
alone). That it does not start is no finding about the draft, and is told as such.
"""

import contextlib
import importlib
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial, reduce, wraps
from pathlib import Path
from typing import Any

from torch import nn

from specnb.divergence.faults import FAULTS
from specnb.divergence.planting import Deploy, Fault
from specnb.errors import InputError, did_you_mean


def imported(name: str) -> Deploy:
    """The service `module:function`; modules of the current directory are found, too.

    Raises InputError for a name of another form, a module that cannot be imported, and what is no function in it; and
    when it is used, where it raises on entry or gives no context manager.
    """
    module_name, _, path = name.partition(":")
    if not all(part.isidentifier() for part in (*module_name.split("."), *path.split("."))):
        raise InputError(f"{name!r} names no function: write module:function, such as my_service:deploy")
    if (here := str(Path.cwd())) not in sys.path:  # a console script's first entry is its own folder
        sys.path.append(here)  # last: a file of the user's must not stand in for a library's module
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # a module of the user's may raise anything
        raise _failed(f"importing {module_name}", error) from error
    try:
        service = reduce(getattr, path.split("."), module)
    except AttributeError as error:
        near = did_you_mean(path, [known for known, value in vars(module).items() if callable(value)])
        raise InputError(f"there is no {path!r} in the module {module_name}: {near}{error}") from error
    if not callable(service):
        raise InputError(f"{name} is a {type(service).__name__}, not a function deploy(draft, neighbour)")

    @wraps(service)  # its signature tells whether features can be switched off
    def deployed(
        draft: nn.Module, neighbour: nn.Module | None, **without: frozenset[str]
    ) -> AbstractContextManager[None]:
        return _in_service(name, partial(service, **without), draft, neighbour)

    return deployed


def planted(fault: str, *, layer: int | None = None) -> Deploy:
    """The planted fault of that name as a service, in `layer` (None: where the fault is by default).

    Raises InputError for an unknown fault, and for a layer of one that has none.
    """
    if fault not in FAULTS:
        raise InputError(f"unknown fault {fault!r}; {did_you_mean(fault, list(FAULTS))}known: {', '.join(FAULTS)}")
    make = FAULTS[fault]
    if layer is None:
        return make
    if "layer" not in inspect.signature(make).parameters:
        raise InputError(f"the fault {fault} is in no one layer: leave layer {layer} out")
    return lambda draft, neighbour: make(draft, neighbour, layer=layer)


class Recorded:
    """A planted fault as a service that notes each entry: `entered` has the neighbour and the fault as it was."""

    def __init__(self, name: str, **options: Any) -> None:
        self.name, self.options = name, options
        self.entered: list[tuple[nn.Module | None, Fault]] = []

    @contextmanager
    def __call__(self, draft: nn.Module, neighbour: nn.Module | None) -> Iterator[Fault]:
        with FAULTS[self.name](draft, neighbour, **self.options) as fault:
            self.entered.append((neighbour, fault))
            yield fault

    def acted(self) -> Fault:
        """The fault as it was when it first acted, or at all. Raises InputError where it waited in vain."""
        faults = [fault for _, fault in self.entered]
        acting = [fault for fault in faults if fault.struck] or faults
        fault = next((fault for fault in acting if fault.first is not None), acting[0])
        if fault.waits and not fault.struck:
            raise InputError(f"{self.name} never acted: choose a script in which what it waits for happens")
        return fault


@contextmanager
def _in_service(
    name: str, service: Callable[..., Any], draft: nn.Module, neighbour: nn.Module | None
) -> Iterator[None]:
    with ExitStack() as running:
        try:
            context = service(draft, neighbour)
            if isinstance(context, AbstractContextManager):
                running.enter_context(context)
        except (Exception, SystemExit) as error:
            raise _failed(f"{name}(draft, {'neighbour' if neighbour is not None else None})", error) from error
        if not isinstance(context, AbstractContextManager):
            raise InputError(
                f"{name} gave a {type(context).__name__}, not a context manager: decorate a function that yields once "
                "with contextlib.contextmanager"
            )
        yield


def _failed(noun: str, error: BaseException) -> InputError:
    """The user's error in one line, with the innermost place that is none of the machinery's."""
    machinery = {__file__, importlib.__file__, contextlib.__file__}
    places = [
        f" ({Path(frame.filename).name}, line {frame.lineno})"
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename not in machinery and not frame.filename.startswith("<frozen")
    ]
    return InputError(f"{noun} raised {type(error).__name__}: {error}{places[-1] if places else ''}")
