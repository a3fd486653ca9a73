"""S7: the set-up that is wrong, with the features of the service off one at a time. Which of them does the fault need?

The service says what it can do without (compilation, graphs, a prefix cache, a fused kernel) and takes a set of these
names as `without`. Where no single one heals the draft and all together do, a set is looked for of which none may be
left out, as in delta debugging (Zeller and Hildebrandt 2002).
"""

import inspect
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import pandas as pd

from specnb.divergence.coverage import Coverage
from specnb.divergence.setups import Lab
from specnb.errors import InputError
from specnb.measure.experiment import Progress, silent

Service = Callable[..., AbstractContextManager[object]]
"""`service(draft, neighbour, without=frozenset())`: a `Deploy` that can leave features out."""

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
        failed = [f"{' and '.join(off)} ({said})" for off, said in self.runs[["off", "said"]].to_numpy() if said]
        ran = [off for off in self.runs[self.runs["said"] == ""]["off"] if off]
        tried = ", ".join(name for off in ran if len(off) == 1 for name in off) or "any that it runs without"
        together = " and without all of these" if any(len(off) > 1 for off in ran) else ""
        not_run = f"; it does not run without {', '.join(failed)}" if failed else ""
        return f"{self.setup} stays wrong without {tried}{together}: none of them alone is needed for it{not_run}"

    def facts(self) -> dict[str, Any]:
        """Plain values for JSON."""
        runs = self.runs.assign(off=[list(off) for off in self.runs["off"]]).to_dict("records")
        return {"setup": self.setup, "needed": list(self.needed), "together": self.together, "runs": runs}


def switched_off(
    lab: Lab, service: Service, features: Sequence[str], *, setup: str = "S3", progress: Progress = silent
) -> Features:
    """Run `setup`, which `service` makes wrong, without each of `features`; where none heals it, without several.

    A run heals where it was looked at whole and nothing is wrong. One more run than features, and up to as many and one
    again where none heals it alone. Raises InputError for no features, names given twice, and a service without a
    parameter `without`; one that does not run without a feature is told in the table.
    """
    names = checked(service, features)
    found = _Runs(lab, service, setup, len(names) + 1, progress)
    if found.healed(()):
        return Features(setup, found.table(), (), together=False)
    alone = tuple(name for name in names if found.healed({name}))
    able = [name for name in names if found.ran({name})]
    if alone or len(able) < 2 or not found.healed(able):
        return Features(setup, found.table(), alone, together=False)
    needed = set(able)
    for name in able:
        if len(needed) > 1 and found.healed(needed - {name}):
            needed.discard(name)
    return Features(setup, found.table(), tuple(name for name in able if name in needed), together=True)


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
            f"the service {getattr(service, '__name__', service)!s} cannot leave features out: give a `deploy` with a "
            "parameter `without`, the set of their names, as in deploy(draft, neighbour, without=frozenset())"
        )
    return names


class _Runs:
    """The runs that were made, none of them twice."""

    def __init__(self, lab: Lab, service: Service, setup: str, expected: int, progress: Progress) -> None:
        self._lab, self._service, self._setup = lab, service, setup
        self._expected, self._progress = expected, progress
        self._seen: dict[frozenset[str], tuple[bool | None, str, int, str]] = {}

    def healed(self, off: Collection[str]) -> bool:
        key = frozenset(off)
        if key not in self._seen:
            n, without = len(self._seen), f" without {', '.join(sorted(key))}" if key else " again"
            self._progress(n, max(self._expected, n + 1), f"{self._setup}{without}")
            self._seen[key] = self._run(key)
        return self._seen[key][0] is True

    def ran(self, off: Collection[str]) -> bool:
        """Whether the service ran without these."""
        self.healed(off)
        return self._seen[frozenset(off)][0] is not None

    def table(self) -> pd.DataFrame:
        rows = [(tuple(sorted(off)), *row) for off, row in self._seen.items()]
        return pd.DataFrame(rows, columns=list(COLUMNS)).astype({"clean": object})

    def _run(self, off: frozenset[str]) -> tuple[bool | None, str, int, str]:
        try:
            one = self._lab.run(self._setup, lambda *models: self._service(*models, without=off))
        except (Exception, SystemExit) as error:
            if not off:  # it ran before: what is wrong now is not that a feature is missing
                raise
            # a service may raise anything without what it needs; the other runs count
            return None, "", 0, str(error) if isinstance(error, InputError) else f"{type(error).__name__}: {error}"
        clean = one.clean and Coverage.of(one, self._lab.draft).complete
        return clean, next(iter(one.wrong["module"]), ""), one.wrong["position"].nunique(), ""
