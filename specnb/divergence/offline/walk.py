"""A walk through the modules in the order they ran: which tensor is off by itself, and which only hands an error on.

A module's output is made from what it was given and from all that ran inside it. What a module is given is the very
tensor that another one made, where the reference's digests say so; else the code of the module that holds it made it,
from what that was given and from all that ran in it before. Attention sees the past, so a position has its past's
errors behind it, too.

A different choice at a tie is legitimate, but outputs after it are not comparable with the reference. A fault after it
would not be noticed, so errors after such a choice are measured by those of sound runs after theirs.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from specnb.divergence import tolerances
from specnb.divergence.align import Alignment, index_of
from specnb.divergence.errors import JUDGED, table
from specnb.divergence.offline.difference import Difference
from specnb.divergence.tolerances import TIMES_FLOOR
from specnb.divergence.trace import Key

FEWEST = 3
"""Positions that must agree before one offset is believed: so many, and half of those there are."""
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
        order: dict[Key, int] = {}
        with_bits: dict[str, list[Key]] = defaultdict(list)
        same_as: dict[Key, Key] = {}
        for _, step in sorted(steps.items(), key=lambda item: (-len(item[1]), item[0])):
            start = min(row.order for row in step.values())
            for key, row in sorted(step.items(), key=lambda item: item[1].order):
                if key in order:
                    continue
                order[key] = row.order - start
                if key.role != "state":
                    earlier = [item for item in with_bits[row.digest] if order[item] < order[key]]
                    same_as |= {key: max(earlier, key=order.__getitem__)} if earlier else {}
                    with_bits[row.digest].append(key)
        return cls(tuple(_events(order)), same_as)

    @property
    def outermost(self) -> set[Key]:
        """What came out of the outermost module; of a graph that is no tree, out of the last one."""
        last = [event for event in self.events if not event.given and event.holders == (OUTSIDE,)]
        return {key for event in last if event.at == last[-1].at for key in event.keys}

    @property
    def modules(self) -> list[str]:
        """The modules in the order they are entered."""
        return list(dict.fromkeys(event.at[0] for event in self.events))


def _events(order: Mapping[Key, int]) -> Iterator[Event]:
    spans: dict[Call, tuple[int, int]] = {}
    together: dict[tuple[int, str, Call], list[Key]] = {}
    for key, at in order.items():
        call = key[:2]
        start, end = spans.get(call, (at, at))
        spans[call] = (min(start, at), max(end, at))
        if key.role != "state":
            together.setdefault((at, key.role, call), []).append(key)
    open_calls: list[Call] = []
    for (at, _, call), keys in sorted(together.items(), key=lambda item: (item[0][0], -spans[item[0][2]][1])):
        open_calls = [each for each in open_calls if spans[each][1] > at]
        holders = tuple(each for each in reversed(open_calls) if each != call and spans[each][0] < at)
        yield Event(at, call, tuple(keys), (*holders, OUTSIDE))
        if call not in open_calls and spans[call][1] > at:
            open_calls.append(call)


class Floors(NamedTuple):
    """The largest error of each tensor in sound runs: `before` any other choice, and `behind` one."""

    before: dict[Key, float]
    behind: dict[Key, float]


def floors(sound: Sequence[Difference], least: dict[Key, float]) -> Floors:
    """The largest error of each tensor in sound pairs, and at least what `least` says.

    Behind a token that got other experts a sound run is as far off as a wrong one: what is seen there is a floor only
    for what is behind such a token, too.
    """
    before, behind = dict(least), dict(least)
    for key in least:
        for pair in (pair for pair in sound if key in pair.errors and key not in pair.discrete):
            unflipped = np.where(pair.flipped[key], np.nan, pair.errors[key])
            before[key] = float(np.fmax.reduce(unflipped, initial=before[key]))
            behind[key] = max(before[key], float(np.fmax.reduce(pair.errors[key], initial=behind[key])))
    return Floors(before, behind)


@dataclass(frozen=True)
class Finding:
    """What the walk says of one tensor, each (positions,): `wrong` by itself; `beyond` its floor;
    `given`, the largest error of what it was made from. `error` is 0 where nothing was compared."""

    event: Event
    error: np.ndarray
    wrong: np.ndarray
    beyond: np.ndarray
    given: np.ndarray


Excuse = Callable[[Event, Key, np.ndarray], np.ndarray]
"""`excuse(event, key, wrong)`: where in `wrong` there is nothing structural after all."""


def walk(
    plan: Plan, errors: Mapping[Key, np.ndarray], floor: Mapping[Key, float], excuse: Excuse
) -> dict[Key, Finding]:
    """Findings by key, in the order of the run, of all that was compared."""
    findings: dict[Key, Finding] = {}
    shape = next(iter(errors.values())).shape if errors else (0,)
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
            if wrong.any():
                wrong &= ~excuse(event, key, wrong)
            error = np.nan_to_num(errors[key], posinf=np.inf)
            parts[key] = Finding(event, error, wrong, error > TIMES_FLOOR * floor[key], given)
        findings |= parts
        for call in (*event.holders, event.at) if event.given else event.holders:
            for part in parts.values():
                scopes[call].add(part)
    return findings


class _Scope:
    """The largest error so far, at each position or before it, of what was seen inside a call.

    `odd`: something was no number. That reaches tokens before it, too: attention gives a later one the
    weight 0, and 0 times NaN is NaN.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.error, self.beyond, self.odd = np.zeros(shape), np.zeros(shape, bool), False

    def add(self, part: Finding) -> None:
        self.error = np.maximum(self.error, np.maximum.accumulate(part.error))
        self.beyond = self.beyond | np.logical_or.accumulate(part.beyond)
        self.odd = self.odd or bool(np.isinf(part.error).any())


def error_table(difference: Difference, findings: Mapping[Key, Finding], floor: Mapping[Key, float]) -> pd.DataFrame:
    """The error table of a comparison, as `errors.judged` makes that of a replay; gains of what is `beyond` only."""
    positions, tensors = difference.positions, []
    feeds = difference.candidate.last_step[index_of(difference.candidate.positions, positions)]
    for key, part in findings.items():
        compared = ~np.isnan(difference.errors[key])
        at = np.flatnonzero(compared)
        gains = np.full((2, *compared.shape), np.nan)
        if part.beyond.any():
            gains[:, part.beyond] = difference.gains(key, part.beyond)
        labels = {
            "order": part.event.order, "module": part.event.maker, "call": key.call, "role": key.role,
            "name": key.name, "at": key.module, "floor": floor[key], "discrete": key in difference.discrete,
        }  # fmt: skip
        columns = {
            "position": positions[at], "feed": feeds[at], "error": part.error[compared], "given": part.given[compared],
            "ratio": part.error[compared] / floor[key], "gain": gains[0][compared], "gain_error": gains[1][compared],
            "beyond": part.beyond[compared], "wrong": part.wrong[compared],
        }  # fmt: skip
        tensors.append((labels, columns))
    return table(tensors, (*JUDGED, "gain_error", "beyond"))


# --- what is off and no fault -----------------------------------------------------------------------------------------


def turned(difference: Difference, plan: Plan) -> set[Key]:
    """The tensors that differ by one offset of all positions only, and those that hand them on: attention sees the
    differences of positions."""
    given = {key for key in difference.discrete if key.role == "in" and "position" in key.name}
    rotaries = {key.module for key in given}
    angles = {key for key in difference.errors if key.role == "out" and key.module in rotaries}
    keys = {key for key in angles - difference.discrete if _is_late(difference, key)}
    if not keys:
        return set()
    for key in given:  # integers that differ by the same amount everywhere
        apart = np.subtract(*(item.sketch.astype(np.float64) for item in difference.pairs[key]))
        keys |= {key} if (apart == apart[:1]).all() else set()
    for key, source in plan.same_as.items():
        if source in keys:
            keys.add(key)
    return keys & difference.errors.keys()


def _is_late(difference: Difference, key: Key) -> bool:
    """Whether the candidate's tensor is that of the reference by some number of positions, the same for all."""
    a, b = difference.pairs[key]
    n, near = len(a.bits), TIMES_FLOOR * difference.limit(key)
    if (np.diff(difference.positions) != 1).any() or (a.bits == "").any() or (b.bits == "").any():
        return False
    if not (difference.errors[key] > near).all():
        return False  # another base of the cache turns every position
    return any(
        (np.linalg.norm(y[: n - late] - x[late:], axis=-1) <= near * np.linalg.norm(x[late:], axis=-1)).all()
        for late in range(1, min(n // 2, n - FEWEST) + 1)
        for x, y in ((a.sketch, b.sketch), (b.sketch, a.sketch))
    )


class Excuses:
    """Called by the walk with each tensor that seems wrong by itself; says where other experts are a tie.

    `ties` counts the tokens that were excused.
    """

    def __init__(self, difference: Difference, floor: Mapping[Key, float]) -> None:
        self._difference, self._floor, self.ties = difference, floor, 0

    def __call__(self, event: Event, key: Key, wrong: np.ndarray) -> np.ndarray:
        excused, logits = np.zeros(wrong.shape, bool), self.logits(event, key)
        if logits is not None:
            scores, chosen = self._difference.pairs[logits][0], self._difference.pairs[key]
            rows = scores.full[wrong].astype(np.float64)
            noise = TIMES_FLOOR * self._floor[logits] * float(np.abs(rows).max(initial=0))
            margins = tolerances.margins(rows, *(item.full[wrong].astype(np.int64) for item in chosen))
            excused[wrong] = margins <= 2 * noise
            self.ties += int(excused.sum())
        return excused

    def logits(self, event: Event, key: Key) -> Key | None:
        """What a module's integers were chosen from: its output with more values a token. None: this is no choice."""
        discrete = self._difference.discrete
        if key.role != "out" or key not in discrete:
            return None
        features = {item: values.features for item, (values, _) in self._difference.pairs.items() if item in event.keys}
        wider = [item for item in features if item not in discrete and features[item] > features[key]]
        return max(wider, key=features.__getitem__, default=None)


@dataclass(frozen=True)
class Residual:
    """Errors above three floors that nothing excuses: the largest one, and the largest as a multiple of its floor,
    before any other choice; and the first position of such a `choice` if one is behind it."""

    error: float = 0.0
    grown: float = 0.0
    choice: int | None = None

    @classmethod
    def of(cls, difference: Difference, findings: Mapping[Key, Finding], floor: Floors, excuses: Excuses) -> "Residual":
        """From findings in the order of the run. Integers count as choices only: an error of 1 is none of theirs."""
        error, grown = 0.0, 0.0
        flips = np.zeros(len(difference.positions), bool)
        for key, part in findings.items():
            if key in difference.discrete:
                if excuses.logits(part.event, key) is not None:
                    flips = flips | np.logical_or.accumulate(part.error > 0)
                continue
            usual = np.where(flips, floor.behind[key], floor.before[key])
            cells = part.error > TIMES_FLOOR * usual
            if not cells.any():
                continue
            if (cells & flips).any():
                return cls(error, grown, int(difference.positions[flips][0]))
            worst = float(part.error[cells].max(initial=0))
            error, grown = max(error, worst), max(grown, worst / floor.before[key])
        return cls(error, grown)
