"""How far apart tensors are, and what counts as different: more than sound runs show, or rounding to the dtype."""

import math
from collections.abc import Iterable, Sequence

import numpy as np

TIMES_FLOOR = 3.0
"""How far above the largest error between sound runs an error must be."""
ROUNDING = {"float64": 1e-15, "float32": 1e-6, "float16": 2**-11, "bfloat16": 2**-8}
"""Relative L2 error that sums in another order may always have, whether or not the sound runs showed it."""
GROWN = 100.0
"""Times the floor that errors may grow to on their way with no module wrong by itself; beyond it somebody must be."""
LARGE = 0.1
"""Relative error from which on nothing is put down to growth, whatever the floor: a tenth is no rounding."""
CARRIES = 4.0
"""How many times larger a sound module may make the relative error of what it is given (softmax, cancelling sums)."""
TURNED_ALIKE = 3e-2
"""How far turns of angles may be apart: bfloat16 rounds each of four cosines and sines by up to 2**-9."""
DIRECTED = 0.5
"""Share of an error that lies along the output itself, from which it is a scale; of rounding it is next to nothing."""
ONE_FACTOR, ONE_FACTOR_OF_RUNS = 0.2, 0.3
"""The most that tokens of one factor may be off (`one_factor`), as a share of its distance from 1 and from 0: in a
replay, where no error travels, and between two runs, where errors of before are in it."""
UNRELATED, UNRELATED_GAIN = 0.9, 0.35
"""Tensors are unrelated from this median relative error on (sqrt(2) where they are of one size), up to this gain."""


def rounding(dtypes: Iterable[str]) -> float:
    """The rounding of the coarsest of these dtypes that are known; float32 where none is."""
    return max((ROUNDING[name] for name in dtypes if name in ROUNDING), default=ROUNDING["float32"])


def wrong_by_itself(error: np.ndarray, floor: float, given: np.ndarray, given_wrong: np.ndarray) -> np.ndarray:
    """Mark errors above their floor where what the tensor was made from is not, and that are no growth of that.

    `error`, and `given`, the largest error of what it was made from, are of the same shape; `given_wrong` says where
    that is above its own floor. In runs that compute freely errors travel, so the floor alone would blame everybody
    behind the first one. NaN (not compared) is not wrong.
    """
    return (error > TIMES_FLOOR * floor) & ~given_wrong & (error > TIMES_FLOOR * CARRIES * given)


def one_factor(gain: np.ndarray, error: np.ndarray, limit: float = ONE_FACTOR) -> float | None:
    """The one factor by which tokens of these gains and relative L2 errors are too large; None where it is not one."""
    middle = float(np.median(gain))
    rest = np.sqrt(np.clip(error**2 - (gain - 1) ** 2, 0, None))  # by Pythagoras: error^2 = (gain - 1)^2 + rest^2
    off = max(float(np.max(np.abs(gain - middle))), float(np.median(rest)))
    # of an output that is small and has nothing to do with the right one all gains are near 0, too
    return middle if off < limit * min(abs(middle - 1), middle) else None


def flat(values: np.ndarray) -> np.ndarray:
    """Values `(tokens, …)` as `(tokens, features)` float64, both parts of complex ones."""
    if np.iscomplexobj(values):
        values = np.stack([np.real(values), np.imag(values)], -1)
    return values.reshape(len(values), math.prod(values.shape[1:])).astype(np.float64)


def relative_l2(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """||b - a|| / ||a|| of each token `(tokens,)`; 0 of two zeros, inf where only one is no number."""
    a, b = flat(a), flat(b)
    same = ~np.isfinite(a) & ((a == b) | (np.isnan(a) & np.isnan(b)))  # masks hold infinities
    a, b = np.where(same, 0.0, a), np.where(same, 0.0, b)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        off = np.linalg.norm(b - a, axis=1)
        error = np.where(off == 0, 0.0, off / np.linalg.norm(a, axis=1))
    return np.where(np.isnan(error), np.inf, error)


def gains(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """<a, b> / <a, a> of each token: 1.02 where b = 1.02 a; NaN where a is zero."""
    a, b = flat(a), flat(b)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        return (a * b).sum(1) / (a * a).sum(1)


def margins(scores: np.ndarray, chosen: np.ndarray, instead: np.ndarray, *, ordered: bool = True) -> np.ndarray:
    """By how much the `scores` `(n, experts)` of `chosen` and `instead`, both `(n, k)`, differ, relative to all.

    A near-tie is rounding; inf where an index is no expert. `ordered`: it counts which of them is first.
    """
    top, both = scores.shape[-1] - 1, np.stack([chosen, instead]).astype(np.int64)
    a, b = (np.take_along_axis(scores.astype(np.float64), which, -1) for which in both.clip(0, top))
    if not ordered:
        a, b = np.sort(a), np.sort(b)
    apart = np.linalg.norm(a - b, axis=-1) / np.linalg.norm(scores, axis=-1).clip(min=1e-30)
    inside = ((both >= 0) & (both <= top)).all((0, -1)) & ~np.isnan(apart)
    return np.where((chosen == instead).all(-1), 0.0, np.where(inside, apart, np.inf))


def one_turn(a: Sequence[np.ndarray], b: Sequence[np.ndarray]) -> bool:
    """Tell whether angles `(tokens, …)` are turned, and by the same ones at every token: by one offset of positions.

    `a` and `b` are what a rotary module gives in two runs: cosines and sines, or both as complex numbers.
    """
    if len(a) != len(b) or len({angles.shape for angles in (*a, *b)}) != 1 or not len(a[0]):
        return False
    phases = [angles[0] if len(angles) == 1 else angles[0].astype(float) + 1j * angles[1] for angles in (a, b)]
    if not all(map(np.iscomplexobj, phases)):
        return False
    turn = phases[1] * phases[0].conj() / np.abs(phases[0]) ** 2
    # of length 1, too: longer cosines and sines would scale every product of a query and a key
    off = max(np.abs(turn - turn[:1]).max(), np.abs(np.abs(turn) - 1).max())
    return bool(off < TURNED_ALIKE < np.abs(turn[:1] - 1).max())
