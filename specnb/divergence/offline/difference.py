"""Two aligned traces: the same module, call, tensor and logical position, and how far they are apart. No torch.

Errors are exact where both kept all values, and told from the sketches of the tokens elsewhere.
"""

from typing import NamedTuple

import numpy as np

from specnb.divergence.align import UNKNOWN, Alignment, Values, index_of
from specnb.divergence.tolerances import gains, relative_l2, rounding
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
        return rounding([*(values.dtype for values in self.pairs[key]), *models])

    def gains(self, key: Key) -> tuple[np.ndarray, np.ndarray]:
        """Measure the gain of the tokens (positions,) and its standard error; integers have none."""
        a, b = self.pairs[key]
        exact = a.full is not None and b.full is not None
        value, error = gains(a.full, b.full) if exact else gains(a.sketch, b.sketch)
        return np.where(a.discrete, np.nan, value), np.where(exact, 0.0, error)

    def _compare(self, key: Key) -> np.ndarray:
        a, b = self.pairs[key]
        absent = (a.bits == "") | (b.bits == "")
        same = (a.bits == b.bits) & ~absent
        if same.any() and (same | absent).all():
            self.equal.add(key)
        exact = a.full is not None and b.full is not None
        x, y = (a.full, b.full) if exact else (a.sketch, b.sketch)
        # sums of integers are exact in a sketch, so another sum is another tensor
        error = (x != y).any(-1).astype(float) if a.discrete else relative_l2(x, y, None if exact else a.size)
        error = np.where(same, 0.0, error)
        error[absent] = np.nan
        return error
