"""What comes out of a comparison of two traces, and how it is said."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from specnb.divergence.ladder import Verdict
from specnb.divergence.offline.excuses import Doubt
from specnb.divergence.offline.texts import Drift, Fork
from specnb.errors import InputError

HEAT = (-1.0, 8.0)
"""Range of a heat map, log10 of error over floor."""


class Node(NamedTuple):
    """A tensor that is wrong by itself: the `module` that made it, `at` which module it was seen, at which tokens.

    `error`, `ratio` and `gain` are those of its worst token.
    """

    module: str
    role: str
    name: str
    at: str
    first_token: int
    last_token: int
    n_tokens: int
    error: float
    floor: float
    ratio: float
    gain: float


@dataclass(frozen=True)
class Overlap:
    """What was compared, and what was not: tensors as "module:role:name"."""

    modules: int
    compared: int
    tensors: int
    equal: int
    tokens: int
    sequences: int
    only_reference: tuple[str, ...]
    only_candidate: tuple[str, ...]
    left_out: tuple[str, ...]
    reshaped: tuple[str, ...]
    parameters: bool

    def __str__(self) -> str:
        lost = len(self.only_reference) + len(self.only_candidate)
        params = "" if self.parameters else ", parameters not compared (captured without at_use)"
        return (
            f"{self.compared} of {self.modules} modules, {self.tensors} tensors ({self.equal} equal in every bit) at "
            f"{self.tokens} tokens; {lost} tensors in one trace only, {len(self.left_out)} without tokens, "
            f"{len(self.reshaped)} of other shapes{params}"
        )


@dataclass(frozen=True)
class Comparison:
    """What two traces say. `minimal`: every module that is wrong by itself where what it was made from is right, first
    in time first; a fault at tokens that another one has already spoilt is seen only once that one is mended.

    `reason` is one sentence for any verdict but DIVERGENT; `likely` one about the shape of the first error. `nodes`
    (`tables.COLUMNS`) are all tensors above their floor, `own` those wrong by themselves; `reads` the parameters
    that were not read alike; `fork` where the runs were fed other tokens, `drift` where the candidate counts positions
    otherwise.
    """

    verdict: Verdict
    reason: str
    minimal: tuple[Node, ...]
    likely: str
    nodes: pd.DataFrame
    reads: pd.DataFrame
    coverage: Overlap
    fork: Fork | None
    drift: Drift | None
    doubts: tuple[Doubt, ...]
    ratios: pd.DataFrame
    paths: Mapping[str, tuple[str, ...]]

    @property
    def first(self) -> Node | None:
        """The first module that is wrong by itself, None where none is; of runs fed other tokens the model itself."""
        if self.minimal or self.fork is None:
            return self.minimal[0] if self.minimal else None
        tokens = (self.fork.position, self.fork.last, self.fork.differing)
        return Node("", "in", "input_ids", "", *tokens, 1.0, 0.0, math.inf, math.nan)

    @property
    def line(self) -> str:
        """The verdict in one line; that the runs were not fed the same tokens comes first."""
        parts = [] if self.fork is None else [fork_line(self.fork)]
        parts += [] if self.drift is None else [drift_line(self.drift)]
        if self.minimal:
            also = ", ".join(named(node) for node in self.minimal[1:])
            parts += [self._where(), self.likely, f"also {also}" if also else ""]
        else:
            parts.append(self.reason)
        return f"{self.verdict}: {'; '.join(part for part in parts if part)}"

    def heat(self) -> pd.DataFrame:
        """log10(error / floor), index module in order of time, columns position: 0 at the floor, clipped to HEAT."""
        with np.errstate(divide="ignore"):
            return np.log10(self.ratios).clip(*HEAT)

    def around(self, n: int = 1) -> str:
        """A regular expression for `capture(full=…)`: the first module, or the doubtful one, and n on either side.

        Raises InputError where there is nothing to look at closer.
        """
        modules = list(self.paths)
        chosen = [self.first.module, self.first.at] if self.minimal else [one.module for one in self.doubts[:1]]
        if not chosen:
            raise InputError(f"there is no module to look at closer: the verdict is {self.verdict}, {self.reason}")
        if n < 0:
            raise InputError(f"neighbours on either side are counted from 0, not {n}")
        places = {at for name in chosen for i in [modules.index(name)] for at in range(i - n, i + n + 1)}
        wanted = {path for at in sorted(places) if 0 <= at < len(modules) for path in self.paths[modules[at]]}
        return f"^(?:{'|'.join(re.escape(path) for path in sorted(wanted))})$"

    def document(self) -> dict[str, Any]:
        """All of it as JSON values."""
        found = {
            "schema": 1,
            "verdict": self.verdict,
            "line": self.line,
            "reason": self.reason,
            "likely": self.likely,
            "first": None if self.first is None else self.first._asdict(),
            "minimal": [node._asdict() for node in self.minimal],
            "drift": None if self.drift is None else self.drift._asdict(),
            "fork": None if self.fork is None else self.fork._asdict(),
            "doubts": [doubt._asdict() for doubt in self.doubts],
            "coverage": vars(self.coverage) | {"says": str(self.coverage)},
            "nodes": self.nodes.to_dict("records"),
            "reads": self.reads.to_dict("records"),
        }
        return plain(found)

    def _where(self) -> str:
        node = self.minimal[0]
        if node.at == node.module and node.role == "out":
            what = f"its {node.name}"
        else:
            what = f"{node.at}'s {node.name}" if node.at else node.name
        said = (
            f"first at {named(node)}, position {node.first_token} ({node.n_tokens} tokens): {what} is off by "
            f"{node.error:.2g}, floor {node.floor:.1g}"
        )
        read = self.reads[self.reads["module"] == node.module]
        foreign, changed = (read[read["says"] == says]["read"].tolist() for says in ("foreign", "changed"))
        if foreign:
            said += f"; its inputs agree, and it read {foreign[0]}, which is not the draft's own"
        elif changed:
            said += f"; its inputs agree, and {changed[0]} as read has other values"
        return said


def named(where: Any) -> str:
    """What readers call the module of a Node, or of a row with `module`, `role` and `at`: the outermost has no path."""
    row = where if isinstance(where, pd.Series) else where._asdict()  # `at` of a Series is pandas' own
    return row["module"] or ("the model's inputs" if row["role"] == "in" and not row["at"] else "the model itself")


def drift_line(drift: Drift) -> str:
    """That the candidate counts positions otherwise, and from which step on."""
    return f"from step {drift.step} on the candidate counts position {drift.position} as {drift.counted}"


def fork_line(fork: Fork) -> str:
    """That two runs were not fed the same tokens, and from where on."""
    said = (
        f"the runs were not fed the same tokens: at position {fork.position} the reference has {fork.reference}, the "
        f"candidate {fork.candidate}"
    )
    if fork.shift is not None:
        later = "later" if fork.shift > 0 else "earlier"
        said += f" (from there on it has the reference's tokens {abs(fork.shift)} positions {later})"
    return said


def plain(value: Any) -> Any:
    """JSON values; what is not finite becomes null."""
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    if isinstance(value, np.generic):
        value = value.item()
    return None if value is pd.NA or (isinstance(value, float) and not math.isfinite(value)) else value
