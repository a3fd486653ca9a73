"""Positions that are all one number off in one of two runs: another base of the cache, and no error.

Attention sees differences of positions only (Su et al. 2104.09864). From sketches this is seen where the rotary module
gave, at every position, what the reference's gave a fixed number of positions later, and nowhere what it gave there.
"""

import numpy as np

from specnb.divergence import ladder
from specnb.divergence.align import Key, Values
from specnb.divergence.offline.errors import Apart
from specnb.divergence.offline.walk import Plan

NAMED = "position"
FEWEST = 3
"""Positions that must agree before one offset is believed: so many, and half of those there are."""
TRIED = 16
"""Offsets that the first positions suggest and that are tried, the smallest first."""


def turned(apart: Apart, plan: Plan) -> set[Key]:
    """The tensors that differ by one offset of all positions only, and those that hand them on."""
    given = [key for key in apart.discrete if key.role == "in" and NAMED in key.name]
    rotaries = {key.module for key in given}
    outs = [key for key in apart.errors if key.role == "out" and key.module in rotaries and key not in apart.discrete]
    found = {key for key in outs if _differs(apart, key) and _late(apart, key) is not None}
    if not found:
        return set()
    found |= {key for key in given if _differs(apart, key) and _one_step(*apart.pair(key))}
    return plan.with_copies(found) & apart.errors.keys()


def _differs(apart: Apart, key: Key) -> bool:
    return bool((apart.errors[key] > ladder.TIMES_FLOOR * apart.limit(key)).any())


def _late(apart: Apart, key: Key) -> int | None:
    """By how many positions the candidate's tensor is that of the reference, the same for all; None: it is not."""
    a, b = apart.pair(key)
    positions, near = apart.where.positions, ladder.TIMES_FLOOR * apart.limit(key)
    if (np.diff(positions) != 1).any() or (a.row < 0).any() or (b.row < 0).any():
        return None
    if not (apart.errors[key] > near).all():
        return None  # another base of the cache turns every position
    n = len(positions)
    most = min(n // 2, n - FEWEST)
    ahead, behind = (
        np.flatnonzero(_alike(x, y[:, :1], near).all(0)) for x, y in ((a.sketch, b.sketch), (b.sketch, a.sketch))
    )
    lates = sorted([*ahead.tolist(), *(-behind).tolist()], key=abs)
    for late in [one for one in lates if 0 < abs(one) <= most][:TRIED]:
        ours, theirs = (
            (a.sketch[:, late:], b.sketch[:, : n - late]) if late > 0 else (a.sketch[:, :late], b.sketch[:, -late:])
        )
        if _alike(ours, theirs, near).all():
            return late
    return None


def _alike(ours: np.ndarray, theirs: np.ndarray, near: float) -> np.ndarray:
    """(sequences, positions) of sketches."""
    return np.linalg.norm(theirs - ours, axis=-1) <= near * np.linalg.norm(ours, axis=-1)


def _one_step(a: Values, b: Values) -> bool:
    """Integers that differ by the same amount everywhere."""
    apart = b.sketch.astype(np.float64) - a.sketch
    return bool((apart == apart[:1, :1]).all())
