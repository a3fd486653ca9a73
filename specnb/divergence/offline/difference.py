"""Two aligned traces: the same module, call, tensor and logical position, and how far they are apart. No torch.

Errors are exact where both kept all values, and told from the sketches of the tokens elsewhere.
"""

from functools import cached_property
from typing import NamedTuple

import numpy as np

from specnb.divergence import tolerances
from specnb.divergence.align import UNKNOWN, Alignment, Values, index_of
from specnb.divergence.trace import Key


class Fork(NamedTuple):
    """The first position at which two runs were fed other tokens, the `last`, and how many are `differing`.

    `repeated`: the candidate was fed one and the same token from there on.
    """

    position: int
    reference: int
    candidate: int
    differing: int
    last: int
    repeated: bool


class Drift(NamedTuple):
    """A step of the candidate that, by the reference's count, starts at another position than it was run with."""

    step: int
    position: int
    counted: int


def compared_positions(reference: Alignment, candidate: Alignment) -> tuple[np.ndarray, Fork | None]:
    """The positions that both traces hold, up to the first at which they were fed other tokens."""
    shared = np.intersect1d(reference.positions, candidate.positions)
    a, b = (trace.tokens[np.isin(trace.positions, shared)] for trace in (reference, candidate))
    differs = np.flatnonzero((a != b) & (a != UNKNOWN) & (b != UNKNOWN))
    if not len(differs):
        return shared, None
    at, last = differs[[0, -1]].tolist()
    repeated = len(b) > at + 2 and bool((b[at:] == b[at]).all())
    return shared[:at], Fork(int(shared[at]), int(a[at]), int(b[at]), len(differs), int(shared[last]), repeated)


def counted_alike(reference: Alignment, candidate: Alignment) -> tuple[Alignment, Drift | None]:
    """The candidate with the reference's count of positions, where both were fed the same steps; else as it is.

    A run that forgot too much or too little of its state goes on at other positions than it was meant to: these are
    what is wrong, not where its tokens belong.
    """
    a, b = ([trace.steps[number] for number in sorted(trace.steps)] for trace in (reference, candidate))
    complete = all(len(step["token_ids"]) == step["length"] for step in a)
    if not complete or [x["token_ids"] for x in a] != [y["token_ids"] for y in b]:
        return candidate, None
    steps = [Drift(y["step"], x["first_position"], y["first_position"]) for x, y in zip(a, b, strict=True)]
    drift = next((step for step in steps if step.position != step.counted), None)
    firsts = {step.step: step.position for step in steps}
    return (candidate, None) if drift is None else (Alignment(candidate.trace, candidate.rename, firsts), drift)


# --- how far they are apart -------------------------------------------------------------------------------------------


def relative_l2(a: np.ndarray, b: np.ndarray, norm: np.ndarray) -> np.ndarray:
    """||b - a|| / ||a|| of the tensors behind the sketches `(..., k)`, with the exact `norm` ||a||; 0 of two zeros.

    The standard error is the value / sqrt(2 k). Values below 3e-7 are rounding of the sketches: whether two tensors are
    equal is told by their digests.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        top = np.linalg.norm(b.astype(np.float64) - a, axis=-1)
        return np.where(top == 0, 0.0, top / norm)


def gain(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """<a, b> / <a, a> of the tensors behind the sketches `(..., k)`: 1.02 where b = 1.02 a; NaN where a is zero.

    And its standard error, ||b - gain a|| / ||a|| / sqrt(k): 0 of a pure scale.
    """
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        square = (a * a).sum(-1)
        value = (a * b).sum(-1) / square
        rest = np.linalg.norm(b - value[..., None] * a, axis=-1)
        return value, rest / np.sqrt(square * a.shape[-1])


class Difference:
    """`errors[key]` (positions,): relative L2, or 1 where an integer differs; NaN where not compared.

    Of all tensors that both traces have, except states, whose rows may be in any slot; `pairs[key]` are the two.
    `equal` are keys whose every compared token is from rows of equal digests; `left_out` and `reshaped` those that
    could not be compared (no token axis or a shape that changes; another shape in each trace).
    """

    def __init__(self, reference: Alignment, candidate: Alignment) -> None:
        self.reference, self.candidate = reference, candidate
        self.positions, self.fork = compared_positions(reference, candidate)
        self.errors: dict[Key, np.ndarray] = {}
        self.pairs: dict[Key, tuple[Values, Values]] = {}
        self.equal: set[Key] = set()
        self.left_out: list[Key] = []
        self.reshaped: list[Key] = []
        places = [index_of(trace.positions, self.positions) for trace in (reference, candidate)]
        for key in reference.rows:
            if key.role != "state" and key in candidate.rows:
                a, b = (trace.values(key) for trace in (reference, candidate))
                if a is None or b is None:
                    self.left_out.append(key)
                elif a.features != b.features or a.discrete != b.discrete:
                    self.reshaped.append(key)
                else:
                    self.pairs[key] = a.pick(places[0]), b.pick(places[1])
                    self.errors[key] = self._compare(key)
        self.discrete = {key for key, (a, _) in self.pairs.items() if a.discrete}

    def limit(self, key: Key) -> float:
        """Return what rounding does to this tensor; a wide one may have been made of narrow ones."""
        models = (str(aligned.trace.facts.get("dtype")) for aligned in (self.reference, self.candidate))
        return tolerances.rounding([*(values.dtype for values in self.pairs[key]), *models])

    @cached_property
    def flipped(self) -> dict[Key, np.ndarray]:
        """(positions,) of each tensor, in the order of the run: where integers that were made before it, the chosen
        experts say, differ at the position or before it. A sound run is as far off there as a wrong one."""
        shares, flips = {}, np.zeros(len(self.positions), bool)
        for key, error in self.errors.items():
            shares[key] = flips
            if key in self.discrete:
                flips = flips | np.logical_or.accumulate(error > 0)
        return shares

    def gains(self, key: Key, cells: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Measure the gain of the tokens in `cells` (positions,) and its standard error; integers have none."""
        a, b = self.pairs[key]
        if a.discrete:
            none = np.full(int(cells.sum()), np.nan)
            return none, none
        if a.full is None or b.full is None:
            return gain(a.sketch[cells], b.sketch[cells])
        value, _ = gain(a.full[cells], b.full[cells])
        return value, np.zeros(len(value))

    def _compare(self, key: Key) -> np.ndarray:
        a, b = self.pairs[key]
        absent = (a.bits == "") | (b.bits == "")
        same = (a.bits == b.bits) & ~absent
        if same.any() and (same | absent).all():
            self.equal.add(key)
        error = np.where(same, 0.0, _error(a, b))
        if a.full is None or b.full is None:
            error[_not_finite(a, b, ~absent, error > tolerances.TIMES_FLOOR * self.limit(key))] = np.inf
        error[absent] = np.nan
        return error


def _not_finite(a: Values, b: Values, both: np.ndarray, differ: np.ndarray) -> np.ndarray:
    """Tokens of which only one trace has NaN or infinities, which sketches count as 0.

    What is known is how many a row has. Those of its tokens that differ have them; where none does, those that are
    0 in both sketches; else all of them.
    """
    suspects = (a.odd != b.odd) & both
    blank = suspects & (a.size == 0) & (b.size == 0)
    return next((tokens for tokens in (suspects & differ, blank) if tokens.any()), suspects)


def _error(a: Values, b: Values) -> np.ndarray:
    exact = a.full is not None and b.full is not None
    if a.discrete:  # sums of integers are exact in a sketch, so another sum is another tensor
        x, y = (a.full, b.full) if exact else (a.sketch, b.sketch)
        return (x != y).any(-1).astype(float)
    if not exact:
        return relative_l2(a.sketch, b.sketch, a.size)
    x, y = (values.full.astype(np.float64) for values in (a, b))
    # NaN against NaN is 0, and an infinity against itself; any other pair with one of them is another value
    same = ~np.isfinite(x) & ((x == y) | (np.isnan(x) & np.isnan(y)))
    x, y = np.where(same, 0.0, x), np.where(same, 0.0, y)
    with np.errstate(invalid="ignore", over="ignore"):
        error = relative_l2(x, y, np.linalg.norm(x, axis=-1))
    return np.where(np.isnan(error), np.inf, error)
