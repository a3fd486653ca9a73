"""A walk through the modules in the order they ran: which tensor is off by itself, and which only hands an error on.

A module's output is made from what it was given and from all that ran inside it. What a module is given is the very
tensor that another one made, where the reference's digests say so; else the code of the module that holds it made it,
from what that was given and from all that ran in it before. Attention sees the past, so a position has its past's
errors behind it, too.

A different choice at a tie is legitimate, but outputs after it are not comparable with the reference. A fault after it
would not be noticed, so errors after such a choice are measured by those of sound runs after theirs.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from specnb.divergence import tolerances
from specnb.divergence.align import Alignment, index_of
from specnb.divergence.errors import JUDGED, join_tensors
from specnb.divergence.offline.difference import Difference
from specnb.divergence.tolerances import TIMES_FLOOR, gains, one_turn
from specnb.divergence.trace import Key, rotary_outputs

Call = tuple[str, int]
OUTSIDE: Call = ("", -1)
"""Who holds what no captured module holds."""


class Event(NamedTuple):
    """Tensors seen at once: what a call was given, or gave. `holders` enclose it, the innermost first."""

    order: int
    at: Call
    keys: tuple[Key, ...]
    holders: tuple[Call, ...]

    @property
    def given(self) -> bool:
        return self.keys[0].role == "in"

    @property
    def maker(self) -> str:
        """The module whose code made the tensors; what comes from outside is put down to the one that got it."""
        return self.at[0] if not self.given or self.holders[0] == OUTSIDE else self.holders[0][0]


@dataclass(frozen=True)
class Plan:
    """The events of one forward of the reference, and `same_as[key]`: the last earlier tensor of the same bits."""

    events: tuple[Event, ...]
    same_as: dict[Key, Key]

    @classmethod
    def of(cls, reference: Alignment) -> "Plan":
        """From the step that shows most tensors; what only others show is put where those had it."""
        steps: dict[int, dict[Key, Any]] = defaultdict(dict)
        for key, rows in reference.rows.items():
            for row in rows:
                steps[row.step][key] = row
        first_rows: dict[Key, Any] = {}
        order: dict[Key, int] = {}
        with_bits: dict[str, list[Key]] = defaultdict(list)
        same_as: dict[Key, Key] = {}
        for _, step in sorted(steps.items(), key=lambda item: (-len(item[1]), item[0])):
            start = min(row.order for row in step.values())
            for key, row in sorted(step.items(), key=lambda item: item[1].order):
                if key not in first_rows and key.role != "state":
                    first_rows[key], order[key] = row, row.order - start
                    earlier = [item for item in with_bits[row.digest] if order[item] < order[key]]
                    same_as |= {key: max(earlier, key=order.__getitem__)} if earlier else {}
                    with_bits[row.digest].append(key)
        return cls(tuple(_events(first_rows, order)), same_as)


def _events(rows: Mapping[Key, Any], order: Mapping[Key, int]) -> Iterator[Event]:
    together: dict[tuple[int, str, Call], list[Key]] = defaultdict(list)
    for key in rows:
        together[order[key], key.role, key[:2]].append(key)
    holder_of = {key[:2]: (row.holder, row.holder_call) for key, row in rows.items()}
    for (place, _, call), keys in sorted(together.items()):
        holders = [holder_of[call]]
        while holders[-1] != OUTSIDE:
            holders.append(holder_of.get(holders[-1], OUTSIDE))
        yield Event(place, call, tuple(keys), tuple(holders))


def pair_floors(sound: Sequence[Difference], least: dict[Key, float]) -> tuple[dict[Key, float], dict[Key, float]]:
    """The largest error of each tensor in sound pairs, and at least what `least` says: before any other choice, and
    after one.

    After a token that got other experts, as integers that were made before it tell, a sound run is as far off as a
    wrong one: what is seen there is a floor only for what is after such a token, too.
    """
    before, after = dict(least), dict(least)
    for pair in sound:
        for key, error in pair.errors.items():
            if key in least and key not in pair.discrete:
                before[key] = float(np.fmax.reduce(np.where(pair.flipped[key], np.nan, error), initial=before[key]))
                after[key] = float(np.fmax.reduce(error, initial=after[key]))
    return before, after


class Tracked(NamedTuple):
    """One tensor after the walk, each (positions,): `wrong` by itself; `beyond` its floor;
    `given`, the largest error of what it was made from. `error` is 0 where nothing was compared.

    `choice`: integers that were chosen by scores beside them; those that differ and are not wrong differ at a tie.
    """

    event: Event
    error: np.ndarray
    wrong: np.ndarray
    beyond: np.ndarray
    given: np.ndarray
    choice: bool


def walk_traces(plan: Plan, difference: Difference, floor: Mapping[Key, float]) -> dict[Key, Tracked]:
    """Findings by key, in the order of the run, of all that was compared."""
    findings: dict[Key, Tracked] = {}
    errors, shape = difference.errors, difference.positions.shape
    scopes: dict[Call, _Scope] = defaultdict(lambda: _Scope(shape))
    for event in plan.events:
        scope = scopes[event.holders[0] if event.given else event.at]
        parts = {}
        for key in (key for key in event.keys if key in errors):
            source = findings.get(plan.same_as.get(key)) if event.given else None
            given, given_wrong = (source.error, source.beyond) if source else (scope.error, scope.beyond)
            wrong = tolerances.wrong_by_itself(errors[key], floor[key], given, given_wrong)
            if scope.odd:
                wrong &= ~np.isinf(errors[key])
            scores = _scores_of(key, event, difference)
            if scores is not None and wrong.any():
                rows = (values[wrong] for values in (difference.pairs[scores][0], *difference.pairs[key]))
                wrong[wrong] = tolerances.margins(*rows) > TIMES_FLOOR * floor[scores]
            error = np.nan_to_num(errors[key], posinf=np.inf)
            beyond = error > TIMES_FLOOR * floor[key]
            parts[key] = Tracked(event, error, wrong, beyond, given, scores is not None)
        findings |= parts
        for call in (*event.holders, event.at) if event.given else event.holders:
            for part in parts.values():
                scopes[call].add(part)
    return findings


def _scores_of(key: Key, event: Event, difference: Difference) -> Key | None:
    """Find what a module's integers were chosen from: its output with more values a token. None: this is no choice."""
    if key.role != "out" or key not in difference.discrete:
        return None
    features = {item: difference.pairs[item][0].shape[1] for item in event.keys if item in difference.pairs}
    wider = [item for item in features if item not in difference.discrete and features[item] > features[key]]
    return max(wider, key=features.__getitem__, default=None)


class _Scope:
    """The largest error so far, at each position or before it, of what was seen inside a call.

    `odd`: something was no number. That reaches tokens before it, too: attention gives a later one the
    weight 0, and 0 times NaN is NaN.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.error, self.beyond, self.odd = np.zeros(shape), np.zeros(shape, bool), False

    def add(self, part: Tracked) -> None:
        self.error = np.maximum(self.error, np.maximum.accumulate(part.error))
        self.beyond = self.beyond | np.logical_or.accumulate(part.beyond)
        self.odd = self.odd or bool(np.isinf(part.error).any())


def error_table(difference: Difference, findings: Mapping[Key, Tracked], floor: Mapping[Key, float]) -> pd.DataFrame:
    """The error table of a comparison, as `judge_errors` makes that of a replay."""
    positions, tensors = difference.positions, []
    feeds = difference.candidate.last_step[index_of(difference.candidate.positions, positions)]
    for key, part in findings.items():
        labels = {
            "order": part.event.order, "module": part.event.maker, "call": key.call, "role": key.role,
            "name": key.name, "at": key.module, "floor": floor[key], "discrete": key in difference.discrete,
        }  # fmt: skip
        columns = {
            "position": positions, "feed": feeds, "error": part.error, "given": part.given,
            "ratio": part.error / floor[key], "gain": gains(*difference.pairs[key]), "wrong": part.wrong,
        }  # fmt: skip
        compared = ~np.isnan(difference.errors[key])
        tensors.append((labels, {name: values[compared] for name, values in columns.items()}))
    return join_tensors(tensors, JUDGED)


# --- what is off and no fault -----------------------------------------------------------------------------------------


def turned(difference: Difference, plan: Plan) -> set[Key]:
    """The tensors that differ by one offset of all positions only, and those that hand them on: attention sees the
    differences of positions."""
    given = {key for key in difference.discrete if key.role == "in" and "position" in key.name}
    angles: set[Key] = set()
    for module in {key.module for key in given}:
        keys = [key for key in rotary_outputs(module) if key in difference.pairs]
        angles |= {*keys} if one_turn(*([difference.pairs[key][run] for key in keys] for run in (0, 1))) else set()
    if not angles:
        return set()
    angles |= given
    for key, source in plan.same_as.items():
        angles |= {key} if source in angles else set()
    return angles & difference.errors.keys()


class Residual(NamedTuple):
    """Errors above three floors that nothing excuses: the largest one, and the largest as a multiple of its floor,
    before any other choice; and the first position of such a `choice` if one is after it."""

    error: float = 0.0
    grown: float = 0.0
    choice: int | None = None


def find_residual(
    difference: Difference,
    findings: Mapping[Key, Tracked],
    floor: Mapping[Key, float],
    floor_after: Mapping[Key, float],
) -> Residual:
    """Sum findings up, in the order of the run. Integers count as choices only: an error of 1 is none of theirs."""
    error, grown = 0.0, 0.0
    for key, part in findings.items():
        if key not in difference.discrete:
            flips = difference.flipped[key]
            cells = part.error > TIMES_FLOOR * np.where(flips, floor_after[key], floor[key])
            if (cells & flips).any():
                return Residual(error, grown, int(difference.positions[flips][0]))
            worst = float(part.error[cells].max(initial=0))
            error, grown = max(error, worst), max(grown, worst / floor[key])
    return Residual(error, grown)
