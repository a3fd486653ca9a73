"""Which positions of two traces can be compared: those at which both runs were fed the same tokens."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from specnb.divergence.align import UNKNOWN, Laid

NEAR = 8
"""By how many positions texts are shifted to see whether they are the same one."""


class Fork(NamedTuple):
    """The first position at which two runs were fed other tokens, the `last`, and how many are `differing`.

    `shift`: the candidate's text is the reference's from there on, that many positions later (None: it is not).
    `repeated`: the candidate was fed one and the same token from there on.
    """

    position: int
    reference: int
    candidate: int
    differing: int
    last: int
    shift: int | None
    repeated: bool


class Drift(NamedTuple):
    """A step of the candidate that, by the reference's count, starts at another position than it was run with."""

    step: int
    position: int
    counted: int


@dataclass(frozen=True)
class Together:
    """Where two traces can be compared: `positions`, and pairs of sequences that were fed the same there.

    `strangers`: how many sequences that should have found their like, for the smaller batch has them, did not.
    """

    positions: np.ndarray
    ours: list[int]
    theirs: list[int]
    fork: Fork | None
    strangers: int = 0


def together(reference: Laid, candidate: Laid) -> Together:
    """Pair sequences by their tokens, and take the positions that both traces hold.

    Where no sequence has the same tokens all along, the two that agree longest are compared up to where they part.
    """
    shared = np.intersect1d(reference.positions, candidate.positions)
    ours, theirs = (one.tokens[:, np.isin(one.positions, shared)] for one in (reference, candidate))
    pairs, free = [], list(range(len(theirs)))
    for i, text in enumerate(ours):
        alike = np.flatnonzero(~_differs(text, theirs[free]).any(1))
        if len(alike):
            pairs.append((i, free.pop(alike[0])))
    if pairs or not len(shared):
        strangers = min(len(ours), len(theirs)) - len(pairs)
        return Together(shared, [i for i, _ in pairs], [j for _, j in pairs], None, strangers)
    where = {(i, int(j)): int(at) for i, a in enumerate(ours) for j, at in enumerate(_differs(a, theirs).argmax(1))}
    i, j = max(where, key=lambda pair: (where[pair], pair[0] == pair[1]))
    differs = np.flatnonzero(_differs(ours[i], theirs[j]))
    at, rest = int(differs[0]), theirs[j, int(differs[0]) :]
    fork = Fork(
        position=int(shared[at]),
        reference=int(ours[i, at]),
        candidate=int(theirs[j, at]),
        differing=len(differs),
        last=int(shared[differs[-1]]),
        shift=_shift(ours[i], theirs[j], at),
        repeated=len(rest) > 2 and len(set(rest.tolist())) == 1,
    )
    return Together(shared[:at], [i], [j], fork)


def counted_alike(reference: Laid, candidate: Laid) -> tuple[Laid, Drift | None]:
    """The candidate with the reference's count of positions, where both were fed the same steps; else as it is.

    A run that forgot too much or too little of its state goes on at other positions than it was meant to: these are
    what is wrong, not where its tokens belong.
    """
    ours, theirs = ([one.steps[number] for number in sorted(one.steps)] for one in (reference, candidate))
    known = all(len(step["token_ids"]) == step["batch"] * step["length"] for step in ours)
    if not known or [_fed(step) for step in ours] != [_fed(step) for step in theirs]:
        return candidate, None
    pairs = [(theirs[i]["step"], ours[i]["first_position"], theirs[i]["first_position"]) for i in range(len(ours))]
    drift = next((Drift(*one) for one in pairs if one[1] != one[2]), None)
    if drift is None:
        return candidate, None
    return Laid(candidate.trace, candidate.rename, {number: first for number, first, _ in pairs}), drift


def _fed(step: Mapping[str, Any]) -> tuple[Any, ...]:
    return step["batch"], step["length"], tuple(step["token_ids"])


def _differs(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return (a != b) & (a != UNKNOWN) & (b != UNKNOWN)


def _shift(ours: np.ndarray, theirs: np.ndarray, at: int) -> int | None:
    """By how much the candidate's text is late from the fork on, where at least three tokens say so."""
    for by in (shift for size in range(1, NEAR + 1) for shift in (size, -size)):
        start, end = max(at, by), len(theirs) + min(by, 0)
        b, a = theirs[start:end], ours[start - by : end - by]
        if len(b) >= 3 and len(a) == len(b) and not _differs(a, b).any():
            return by
    return None
