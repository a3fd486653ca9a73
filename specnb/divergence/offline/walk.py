"""A walk through the modules in the order they ran: which tensor is off by itself, and which only hands an error on.

A module's output is made from what it was given and from all that ran inside it. What a module is given is the very
tensor that another one made, where the reference's digests say so; else the code of the module that holds it made it,
from what that was given and from all that ran in it before. Attention sees the past, so a position has its past's
errors behind it, too.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from specnb.divergence import ladder
from specnb.divergence.align import Laid
from specnb.divergence.trace import Key

HARMLESS = 1e-2
"""What is left of a difference behind the module that made it, at most, where nothing depends on it; and never more
than errors may grow to without a fault."""

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
    def of(cls, reference: Laid) -> "Plan":
        """From the step that shows most tensors; what only others show is put where those had it."""
        seen: dict[int, dict[Key, tuple[int, str]]] = {}
        for key, rows in reference.rows.items():
            for row in rows:
                seen.setdefault(row.step, {})[key] = (row.order, row.digest)
        order: dict[Key, int] = {}
        last_with: dict[str, list[Key]] = {}
        same_as: dict[Key, Key] = {}
        for step in sorted(seen, key=lambda step: (-len(seen[step]), step)):
            start = min(at for at, _ in seen[step].values())
            for key, (at, digest) in sorted(seen[step].items(), key=lambda item: item[1][0]):
                if key in order:
                    continue
                order[key] = at - start
                if key.role == "state":
                    continue
                known = last_with.setdefault(digest, [])
                earlier = [each for each in known if order[each] < order[key]]
                if earlier:
                    same_as[key] = max(earlier, key=order.__getitem__)
                known.append(key)
        return cls(tuple(_events(order)), same_as)

    def with_copies(self, keys: set[Key]) -> set[Key]:
        """These tensors, and those that hand them on."""
        findings = set(keys)
        for key, source in self.same_as.items():
            if source in findings:
                findings.add(key)
        return findings

    @property
    def outermost(self) -> set[Key]:
        """What came out of the outermost module; of a graph that is no tree, out of the last one."""
        last = [event for event in self.events if not event.given and event.holders == (OUTSIDE,)]
        return {key for event in last if event.at == last[-1].at for key in event.keys}

    @property
    def modules(self) -> list[str]:
        """The modules in the order they are entered."""
        return list(dict.fromkeys(event.at[0] for event in self.events))


@dataclass(frozen=True)
class Finding:
    """What the walk says of one tensor, each (sequences, positions): `wrong` by itself; `beyond` its floor;
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
    shape = next(iter(errors.values())).shape if errors else (0, 0)
    scopes: dict[Call, _Scope] = defaultdict(lambda: _Scope(shape))
    for event in plan.events:
        made_in = scopes[event.holders[0] if event.given else event.at]
        parts = {}
        for key in (key for key in event.keys if key in errors):
            beyond = errors[key] > ladder.TIMES_FLOOR * floor[key]
            source = findings.get(plan.same_as.get(key)) if event.given else None
            given, wrong = (source.error, source.beyond) if source else (made_in.error, made_in.wrong)
            wrong_here = ladder.wrong_by_itself(errors[key], floor[key], given, wrong)
            wrong_here &= ~(made_in.odd & np.isinf(errors[key]))
            if wrong_here.any():
                wrong_here = wrong_here & ~excuse(event, key, wrong_here)
            parts[key] = Finding(event, np.nan_to_num(errors[key], posinf=np.inf), wrong_here, beyond, given)
        findings |= parts
        for call in (*event.holders, event.at) if event.given else event.holders:
            for part in parts.values():
                scopes[call].add(part)
    return findings


def harmless(plan: Plan, findings: Mapping[Key, Finding], floor: Mapping[Key, float]) -> set[str]:
    """Modules that are wrong by themselves while nothing made from that is: nothing else is wrong at those positions
    or behind, up to the outermost module's output.

    Positions that are all turned by one more step are such a case: attention sees their differences only.
    """
    finals = {key for key, part in findings.items() if not part.event.given and part.event.holders == (OUTSIDE,)}
    return {
        maker
        for maker in {part.event.maker for part in findings.values() if part.wrong.any()}
        if finals and _dies_out(plan, findings, floor, maker, finals)
    }


def _dies_out(
    plan: Plan, findings: Mapping[Key, Finding], floor: Mapping[Key, float], maker: str, finals: set[Key]
) -> bool:
    wrong = {key for key, part in findings.items() if part.wrong.any() and part.event.maker == maker}
    same = plan.with_copies(wrong)
    if same & finals:
        return False
    start = min(findings[key].event.order for key in wrong)
    behind = np.logical_or.accumulate(np.any([findings[key].wrong for key in wrong], axis=0), axis=1)
    most = HARMLESS * min(1.0, max(float(findings[key].error[findings[key].wrong].max()) for key in wrong))
    later = [key for key, part in findings.items() if part.event.order > start and key not in same]
    left = {key: max(min(most, ladder.GROWN * floor[key]), ladder.TIMES_FLOOR * floor[key]) for key in later}
    return all((findings[key].error[behind] <= left[key]).all() for key in later)


class _Scope:
    """The largest error so far, at each position or before it, of what was seen inside a call.

    `odd` (sequences, 1): something was no number. That reaches tokens before it, too: attention gives a later one the
    weight 0, and 0 times NaN is NaN.
    """

    def __init__(self, shape: tuple[int, int]) -> None:
        self.error, self.wrong, self.odd = np.zeros(shape), np.zeros(shape, bool), np.zeros((shape[0], 1), bool)

    def add(self, part: Finding) -> None:
        self.error = np.maximum(self.error, np.maximum.accumulate(part.error, axis=1))
        self.wrong = self.wrong | np.logical_or.accumulate(part.beyond, axis=1)
        self.odd = self.odd | np.isinf(part.error).any(axis=1, keepdims=True)


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
        open_calls = [open_call for open_call in open_calls if spans[open_call][1] > at]
        holders = tuple(
            open_call for open_call in reversed(open_calls) if open_call != call and spans[open_call][0] < at
        )
        yield Event(at, call, tuple(keys), (*holders, OUTSIDE))
        if call not in open_calls and spans[call][1] > at:
            open_calls.append(call)
