"""S7: the set-up that is wrong, with the features of the service off one at a time. Which of them does the fault need?

The service says what it can do without (compilation, graphs, a prefix cache, a fused kernel) and takes a set of these
names as `without`. Where no single one heals the draft and all together do, the smallest such set is looked for, as in
delta debugging (Zeller and Hildebrandt 2002).
"""

import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import pandas as pd

from specnb.divergence.setups import Deploy, Lab, Outcome
from specnb.errors import InputError
from specnb.measure.experiment import Progress, silent

Service = Callable[..., AbstractContextManager[object]]
"""`service(draft, neighbour, without=frozenset())`: a `Deploy` that can leave features out."""

COLUMNS = ("off", "clean", "first", "tokens")
"""Of the table of runs: the names that were off, whether that healed it, the module that is wrong first ("" for
none), and at how many tokens something is."""


@dataclass(frozen=True)
class Features:
    """What came of S7 in the set-up `setup`: `runs` with COLUMNS, one row a run; `needed`: the names without any one of
    which all is well, else the smallest set found that has to be off together (`together`), else none."""

    setup: str
    runs: pd.DataFrame
    needed: tuple[str, ...]
    together: bool

    @property
    def line(self) -> str:
        """The finding in a sentence."""
        names = " and ".join(self.needed) if self.together else " or ".join(self.needed)
        if not self.needed:
            tried = ", ".join(dict.fromkeys(name for off in self.runs["off"] for name in off))
            return f"{self.setup} stays wrong without {tried}: it is none of these features"
        return f"{self.setup} is clean without {names}, and wrong with all features on"

    def facts(self) -> dict[str, Any]:
        """Plain values for JSON."""
        runs = self.runs.assign(off=[list(off) for off in self.runs["off"]]).to_dict("records")
        return {"setup": self.setup, "needed": list(self.needed), "together": self.together, "runs": runs}


def switched_off(
    lab: Lab, service: Service, features: Sequence[str], *, setup: str = "S3", progress: Progress = silent
) -> Features:
    """Run `setup`, which `service` makes wrong, without each of `features`; where none heals it, without several.

    `len(features)` runs, and up to as many and one again where none heals it alone. Raises InputError for no features,
    names given twice, and a service without a parameter `without`.
    """
    names = checked(service, features)
    found = _Runs(lab, service, setup, len(names), progress)
    alone = tuple(name for name in names if found.clean({name}))
    if alone or len(names) == 1 or not found.clean(names):
        return Features(setup, found.table(), alone, together=False)
    needed = set(names)
    for name in names:
        if len(needed) > 1 and found.clean(needed - {name}):
            needed.discard(name)
    return Features(setup, found.table(), tuple(name for name in names if name in needed), together=True)


def checked(service: Service, features: Sequence[str]) -> tuple[str, ...]:
    """The names of features. Raises InputError as `switched_off` does."""
    names = tuple(features)
    if isinstance(features, str) or not names or len({*names}) < len(names) or not all(names):
        raise InputError(f"features {features!r}: give the names of one or more, each once, as ['graphs', 'compile']")
    try:
        parameters = inspect.signature(service).parameters.values()
    except (TypeError, ValueError):  # a callable of C that does not tell
        parameters = ()
    if not any(one.name == "without" or one.kind is one.VAR_KEYWORD for one in parameters):
        raise InputError(
            f"the service {getattr(service, '__name__', service)!s} cannot leave features out: give it a parameter "
            "`without`, the set of their names, as in deploy(draft, neighbour, without=frozenset())"
        )
    return names


class _Runs:
    """The runs that were made, none of them twice."""

    def __init__(self, lab: Lab, service: Service, setup: str, expected: int, progress: Progress) -> None:
        self._lab, self._service, self._setup = lab, service, setup
        self._expected, self._progress = expected, progress
        self._seen: dict[frozenset[str], Outcome] = {}

    def clean(self, off: Sequence[str] | set[str]) -> bool:
        key = frozenset(off)
        if key not in self._seen:
            n = len(self._seen)
            self._progress(n, max(self._expected, n + 1), f"{self._setup} without {', '.join(sorted(key))}")
            self._seen[key] = self._lab.run(self._setup, _without(self._service, key))
        return self._seen[key].clean

    def table(self) -> pd.DataFrame:
        rows = [
            (tuple(sorted(off)), one.clean, next(iter(one.wrong["module"]), ""), one.wrong["position"].nunique())
            for off, one in self._seen.items()
        ]
        return pd.DataFrame(rows, columns=list(COLUMNS))


def _without(service: Service, off: frozenset[str]) -> Deploy:
    return lambda draft, neighbour: service(draft, neighbour, without=off)
