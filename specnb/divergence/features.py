"""Services under suspicion, by name; and S7: which features of a service does a fault need?

A service is `deploy(draft, neighbour)`, a context manager that puts the draft into service beside a neighbour (None:
alone). One that can leave features out (compilation, graphs, a fused kernel) takes their names as `without`. Where no
single one heals the draft and all together do, a set is looked for of which none may be left out, as in delta debugging
(Zeller and Hildebrandt 2002).
"""

import contextlib
import importlib
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import reduce, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from specnb.errors import InputError, did_you_mean

if TYPE_CHECKING:
    from torch import nn

Service = Callable[..., AbstractContextManager[object]]
"""`service(draft, neighbour, without=frozenset())`: a `Deploy` that can leave features out."""
Run = Callable[[frozenset[str]], tuple[bool, str, int]]
"""Run the set-up without these: clean (looked at whole, and nothing is wrong), the first wrong module, wrong tokens."""

COLUMNS = ("off", "clean", "first", "tokens", "said")
"""Of the table of runs: the names that were off, whether that healed it, the module that is wrong first ("" for none)
and at how many tokens something is; what the service said where it did not run (clean is then None)."""


@dataclass(frozen=True)
class Features:
    """What came of S7 in the set-up `setup`: `runs` with COLUMNS, one row a run, the first with all features on.

    `needed`: the names without any one of which all is well, or a set of which none may be left out for that
    (`together`), or nothing.
    """

    setup: str
    runs: pd.DataFrame
    needed: tuple[str, ...]
    together: bool

    @property
    def line(self) -> str:
        """The finding in a sentence."""
        if self.runs.iloc[0]["clean"]:
            return f"{self.setup} was clean when it was run again with all features on: the fault comes and goes"
        if self.needed:
            names = " and ".join(self.needed) if self.together else " or ".join(self.needed)
            return f"{self.setup} is clean without {names}, and wrong with all features on"
        failed = [f"{' and '.join(off)} ({text})" for off, text in self.runs[["off", "said"]].to_numpy() if text]
        not_run = f"; it does not run without {', '.join(failed)}" if failed else ""
        return f"{self.setup} stays wrong without any that it runs without{not_run}"

    def facts(self) -> dict[str, Any]:
        """Plain values for JSON."""
        runs = self.runs.assign(off=[list(off) for off in self.runs["off"]]).to_dict("records")
        return {"setup": self.setup, "needed": list(self.needed), "together": self.together, "runs": runs}


def switched_off(
    run: Run, features: Sequence[str], *, setup: str = "S3", progress: Callable[[int, int, str], None] = lambda *_: None
) -> Features:
    """Run a set-up that is wrong without each of `features`; where none heals it, without several.

    A service may raise anything without what it needs: the table has it.
    """
    seen: dict[frozenset[str], tuple[bool | None, str, int, str]] = {}

    def clean(*off: str) -> bool | None:
        """Whether it is clean without these; None where it does not run. No set is run twice."""
        if (key := frozenset(off)) not in seen:
            without = f" without {', '.join(sorted(key))}" if key else " again"
            progress(len(seen), max(len(features), len(seen)) + 1, f"{setup}{without}")
            try:
                seen[key] = (*run(key), "")
            except (Exception, SystemExit) as error:
                if not key:  # it ran before: what is wrong now is not that a feature is missing
                    raise
                text = str(error) if isinstance(error, InputError) else f"{type(error).__name__}: {error}"
                seen[key] = None, "", 0, text
        return seen[key][0]

    needed, together = set(), False
    if not clean():
        needed = {name for name in features if clean(name)}
        able = [name for name in features if clean(name) is not None]
        if not needed and len(able) > 1 and clean(*able):
            needed, together = {*able}, True
            for name in able:
                if len(needed) > 1 and clean(*needed - {name}):
                    needed.discard(name)
    rows = [(tuple(sorted(off)), *row) for off, row in seen.items()]
    runs = pd.DataFrame(rows, columns=list(COLUMNS)).astype({"clean": object})
    return Features(setup, runs, tuple(name for name in features if name in needed), together)


def checked(service: Service, features: Sequence[str]) -> tuple[str, ...]:
    """The names of features. Raises InputError for a service that cannot leave any out."""
    parameters = inspect.signature(service).parameters.values()
    if not any(parameter.name == "without" or parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        raise InputError(
            f"the service {getattr(service, '__name__', service)!s} cannot leave features out: give a `deploy` with a "
            "parameter `without`, the set of their names, as in deploy(draft, neighbour, without=frozenset())"
        )
    return tuple(dict.fromkeys(features))


def imported(name: str) -> Service:
    """The service `module:function`; modules of the current directory are found, too.

    Raises InputError for what cannot be imported or called, and on use where it raises on entry or is no context
    manager.
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
    service = reduce(lambda owner, part: getattr(owner, part, None), path.split("."), module)
    if not callable(service):
        near = did_you_mean(path, [known for known, value in vars(module).items() if callable(value)])
        raise InputError(f"{name} is no function deploy(draft, neighbour) but {service!r:.80}: {near}give one")

    @wraps(service)  # its signature tells whether features can be switched off
    @contextlib.contextmanager
    def deployed(draft: "nn.Module", neighbour: "nn.Module | None", **without: frozenset[str]) -> Iterator[None]:
        with contextlib.ExitStack() as running:
            try:
                context = service(draft, neighbour, **without)
                if not isinstance(context, AbstractContextManager):
                    raise InputError(
                        f"{name} gave a {type(context).__name__}, not a context manager: decorate a function that "
                        "yields once with contextlib.contextmanager"
                    )
                running.enter_context(context)
            except InputError:
                raise
            except (Exception, SystemExit) as error:
                raise _failed(f"{name}(draft, {'neighbour' if neighbour is not None else None})", error) from error
            yield

    return deployed


def _failed(noun: str, error: BaseException) -> InputError:
    """The user's error in one line, with the innermost place that is none of the machinery's."""
    machinery = {__file__, importlib.__file__, contextlib.__file__}
    places = [
        f" ({Path(frame.filename).name}, line {frame.lineno})"
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename not in machinery and not frame.filename.startswith("<frozen")
    ]
    return InputError(f"{noun} raised {type(error).__name__}: {error}{places[-1] if places else ''}")
