"""What counts as different: the floor that sound runs show, or rounding to the dtype; margins of chosen experts."""

from collections.abc import Callable, Iterable

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
ONE_FACTOR, ONE_FACTOR_SKETCHED = 0.2, 0.4
"""How far off tokens of one factor may be (`one_factor`): in a replay gains are exact, and no error travels; between
two traces a gain told from 16 numbers is off by itself, and errors of before are in it."""
UNRELATED, COSINE = 0.9, 0.35
"""Tensors are unrelated from this median relative error on (sqrt(2) where they are of one size), up to this cosine,
told from 16 numbers of each token."""


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


def one_factor(
    gain: np.ndarray, error: np.ndarray, *, limit: float, spread: Callable[[np.ndarray], np.ndarray] = np.max,
    rest: np.ndarray | None = None,
) -> float | None:  # fmt: skip
    """The one factor by which tokens are too large; None where it is not one, or none at all.

    Of each token `gain` and relative L2 `error`. `limit`: how far off the tokens may be, as a share of the factor's
    distance from 1 and from 0; `spread` says how far their gains are from the middle one. `rest` is the error that is
    left once the factor is out, where it does not follow from the two.
    """
    middle = float(np.median(gain))
    if rest is None:  # by Pythagoras: error^2 = (gain - 1)^2 + rest^2
        rest = np.sqrt(np.clip(error**2 - (gain - 1) ** 2, 0, None))
    off = max(float(spread(np.abs(gain - middle))), float(np.median(rest)))
    # of an output that is small and has nothing to do with the right one all gains are near 0, too
    return middle if off < limit * min(abs(middle - 1), middle) else None


def margins(logits: np.ndarray, chosen: np.ndarray, instead: np.ndarray) -> np.ndarray:
    """Measure how far apart the logits `(n, experts)` of `chosen` and `instead`, both `(n, k)`, are.

    inf where an index is no expert. A sound run can choose otherwise only where this is at most twice its noise.
    """
    known = ((chosen >= 0) & (chosen < logits.shape[-1]) & (instead >= 0) & (instead < logits.shape[-1])).all(-1)
    top = logits.shape[-1] - 1
    chosen_logits, other_logits = (
        np.take_along_axis(logits, np.clip(which, 0, top), -1) for which in (chosen, instead)
    )
    return np.where(known, np.abs(chosen_logits - other_logits).max(-1), np.inf)
