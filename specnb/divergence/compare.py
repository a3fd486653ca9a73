"""Two traces that were written anywhere, compared without torch: which module parts first, at which token, how.

    comparison = compare(Trace.load("alone"), Trace.load("beside-120b"))
    comparison.verdict, comparison.line, comparison.first

Both runs must have been fed the same tokens. Where they were not, only what comes before the first other token is
compared, for from there on the two compute different things; a draft that goes wrong picks other tokens, so the fault
is often found before them. One request at a time: what a flat engine packs into one step is not taken apart.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from specnb.divergence.align import Drift, Fork, Laid, Together, counted_alike
from specnb.divergence.ladder import HEAT, LARGE, Node, Verdict, named, rounding_unknown
from specnb.divergence.offline import tables
from specnb.divergence.offline.errors import Apart, floors
from specnb.divergence.offline.tables import Overlap, fork_shape, reads, shape
from specnb.divergence.offline.verdict import Doubt, Excuses, Precise, turned
from specnb.divergence.offline.verdict import verdict as judged
from specnb.divergence.offline.walk import Plan, harmless, walk
from specnb.divergence.trace import Key, Trace
from specnb.errors import InputError
from specnb.io import plain


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

    def around(self) -> str:
        """A regular expression for `capture(full=…)`: the first module, or the doubtful one, and one on either side.

        Raises InputError where there is nothing to look at closer.
        """
        modules = list(self.paths)
        chosen = [self.first.module, self.first.at] if self.minimal else [doubt.module for doubt in self.doubts[:1]]
        if not chosen:
            raise InputError(f"there is no module to look at closer: the verdict is {self.verdict}, {self.reason}")
        places = [modules.index(name) for name in chosen]
        near = {name for at in places for name in modules[max(at - 1, 0) : at + 2]}
        wanted = {path for name in near for path in self.paths[name]}
        return f"^(?:{'|'.join(re.escape(path) for path in sorted(wanted))})$"

    def document(self) -> dict[str, Any]:
        """All of it as JSON values."""
        facts = {
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
        return plain(facts, nan=None)

    def _where(self) -> str:
        node = self.minimal[0]
        if node.at == node.module and node.role == "out":
            place = f"its {node.name}"
        else:
            place = f"{node.at}'s {node.name}" if node.at else node.name
        message = (
            f"first at {named(node)}, position {node.first_token} ({node.n_tokens} tokens): {place} is off by "
            f"{node.error:.2g}, floor {node.floor:.1g}"
        )
        read = self.reads[self.reads["module"] == node.module]
        foreign, changed = (read[read["says"] == says]["read"].tolist() for says in ("foreign", "changed"))
        if foreign:
            message += f"; its inputs agree, and it read {foreign[0]}, which is not the draft's own"
        elif changed:
            message += f"; its inputs agree, and {changed[0]} as read has other values"
        return message


def drift_line(drift: Drift) -> str:
    """That the candidate counts positions otherwise, and from which step on."""
    return f"from step {drift.step} on the candidate counts position {drift.position} as {drift.counted}"


def fork_line(fork: Fork) -> str:
    """That two runs were not fed the same tokens, and from where on."""
    message = (
        f"the runs were not fed the same tokens: at position {fork.position} the reference has {fork.reference}, the "
        f"candidate {fork.candidate}"
    )
    if fork.shift is not None:
        later = "later" if fork.shift > 0 else "earlier"
        message += f" (from there on it has the reference's tokens {abs(fork.shift)} positions {later})"
    return message


def compare(
    reference: Trace,
    candidate: Trace,
    *,
    sound: Sequence[Trace | tuple[Trace, Trace]] = (),
    precise: Trace | None = None,
    rename: Mapping[str, str] | None = None,
) -> Comparison:
    """Where `candidate` parts from `reference`, traces of one draft fed the same tokens.

    `sound`: runs of the same text that are known to be right, each against the reference or as a pair: their largest
    errors are the floors; without any, rounding to the dtype is. `precise`: a float32 run of the same draft; an error
    against it no larger than three times the reference's own is rounding. `rename`: regular expressions and what
    replaces them in the module paths of all traces.

    Raises InputError for traces in which nothing can be compared: empty, without a module in common, or of two engines
    without `rename`; and for a sound run of another text, or one that ends before what is compared does.
    """
    reference_text, candidate_text = _laid(reference, "reference", rename), _laid(candidate, "candidate", rename)
    _check_comparable(reference_text, candidate_text)
    candidate_text, drift = counted_alike(reference_text, candidate_text)
    apart = Apart.of(reference_text, candidate_text)
    pairs = [_pair(pair, reference_text, rename, apart.where) for pair in sound]
    usual = floors(pairs, {key: apart.limit(key) for key in apart.errors})
    floor = usual.before
    exact = None if precise is None else _laid(precise, "precise", rename)
    third = None if exact is None else Precise(Apart.of(exact, reference_text), Apart.of(exact, candidate_text))
    plan, excuses = Plan.of(reference_text), Excuses(apart, pairs, third)
    offset = turned(apart, plan)
    findings = walk(plan, apart.errors | {key: _rounded(apart, key) for key in offset}, floor, excuses)
    idle = harmless(plan, findings, floor) | {key.module for key in offset if key.role == "out"}
    wrong_parts = {key: part for key, part in findings.items() if part.wrong.any() and part.event.maker not in idle}
    minimal = tables.minimal(apart, wrong_parts, floor)
    doubt = "" if pairs else _uncalibrated(minimal, reference_text, candidate_text)
    minimal = [] if doubt else minimal
    ratios = tables.ratios(apart, plan, findings, floor)
    table = reads(reference_text, candidate_text)
    if doubt:
        verdict, reason = "INCONCLUSIVE", doubt
    elif minimal:
        verdict, reason = "DIVERGENT", ""
    else:
        verdict, reason = judged(apart, plan, findings, usual, excuses, idle, calibrated=bool(pairs))
    foreign = table.loc[table["says"] == "foreign", ["module", "read"]].to_numpy().tolist()
    if foreign and not minimal:
        reason += f"; yet {foreign[0][0]} read {foreign[0][1]}, which is not the draft's own"
    return Comparison(
        verdict=verdict,
        reason=reason,
        minimal=tuple(node for node, _ in minimal),
        likely=shape(apart, minimal[0][1], wrong_parts[minimal[0][1]]) if minimal else fork_shape(apart.where.fork),
        nodes=tables.nodes(apart, findings, wrong_parts, floor),
        reads=table,
        coverage=tables.overlap(apart),
        fork=apart.where.fork,
        drift=drift,
        doubts=tuple(excuses.doubts),
        ratios=ratios,
        paths={module: _paths(module, reference_text, candidate_text) for module in plan.modules},
    )


def _laid(trace: Trace, role: str, rename: Mapping[str, str] | None) -> Laid:
    if trace.tensors.empty:
        raise InputError(f"the {role} trace shows no tensor: was the model run inside the `capture` block?")
    return Laid(trace, rename)


def _uncalibrated(minimal: Sequence[tuple[Node, Key]], *traces: Laid) -> str:
    """Why what was found may be rounding all the same; "" where it may not."""
    types = {trace.dtype for trace in traces}
    if not minimal or minimal[0][0].error > LARGE or not any(map(rounding_unknown, types)):
        return ""
    node = minimal[0][0]
    return (
        f"{named(node)} is off by {node.error:.2g}, and nothing is known of the rounding of "
        f"{' and '.join(sorted(types))}: capture the reference's text in blocks (`specnb divergence capture … --width "
        "5`) and give it as `sound`"
    )


def _check_comparable(reference_text: Laid, candidate_text: Laid) -> None:
    """Nodes of llama.cpp's graph and modules of torch are other things, also where two share a name."""
    engine, other = (laid.trace.engine for laid in (reference_text, candidate_text))
    if engine != other and not reference_text.rename:
        raise InputError(
            f"one trace is of {engine}, the other of {other}: what they name is not the same; compare runs of one "
            "engine, or say with `rename` (`--rename OLD=NEW`) what is"
        )
    a, b = set(reference_text.names.values()), set(candidate_text.names.values())
    if not a & b:
        raise InputError(
            f"the traces have no module in common: the reference has e.g. {max(a)!r}, the candidate {max(b)!r}; "
            "give `rename` (`--rename OLD=NEW`), regular expressions that make the paths alike"
        )


def _pair(
    sound: Trace | tuple[Trace, Trace], reference_text: Laid, rename: Mapping[str, str] | None, judged: Together
) -> Apart:
    """A sound run beside another; it must show the rounding of all sequences and positions that are `judged`."""
    first, second = (reference_text, sound) if isinstance(sound, Trace) else sound
    laid = [each if isinstance(each, Laid) else _laid(each, "sound", rename) for each in (first, second)]
    apart = Apart.of(*laid)
    if not apart.errors or not len(apart.where.positions):
        raise InputError("a sound trace has nothing in common with the reference: give runs of the same text")
    whole = {*judged.reference} <= {*apart.where.reference} if isinstance(sound, Trace) else not apart.where.strangers
    if not whole or len(missing := np.setdiff1d(judged.positions, apart.where.positions)):
        missing_part = f"no position {missing[0]}" if whole else "not all sequences"
        raise InputError(
            f"a sound trace has {missing_part} of the text that is compared: its rounding would stand in for that of "
            "tokens it never saw; give runs of the same text"
        )
    return apart


def _rounded(apart: Apart, key: Key) -> np.ndarray:
    """What is left of a tensor that differs by an offset only: it was rounded elsewhere."""
    return np.where(np.isnan(apart.errors[key]), np.nan, apart.limit(key))


def _paths(module: str, *traces: Laid) -> tuple[str, ...]:
    """What a capture calls the module in either run."""
    return tuple(sorted({raw for trace in traces for raw, name in trace.names.items() if name == module}))
