"""Two aligned traces: the same module, call, tensor and logical position, and how far they are apart. No torch."""

from typing import NamedTuple

import numpy as np

from specnb.divergence.align import UNKNOWN_ID, Alignment, index_of
from specnb.divergence.tolerances import relative_l2, rounding
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
    differs = np.flatnonzero((a != b) & (a != UNKNOWN_ID) & (b != UNKNOWN_ID))
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

    `pairs[key]` are both tensors `(positions, features)`; `equal` those of which every value is the same; of
    `left_out` either has no tokens or shapes that differ between steps, `reshaped` are other numbers of features.
    """

    def __init__(self, reference: Alignment, candidate: Alignment) -> None:
        self.reference, self.candidate = reference, candidate
        self.positions, self.fork = compared_positions(reference, candidate)
        self.errors: dict[Key, np.ndarray] = {}
        self.pairs: dict[Key, tuple[np.ndarray, np.ndarray]] = {}
        self.discrete: set[Key] = set()
        self.flipped: dict[Key, np.ndarray] = {}
        """The places at other integers of a module, such as chosen experts, or behind them."""
        self._flips = np.zeros(len(self.positions), bool)
        self.left_out: list[Key] = []
        self.reshaped: list[Key] = []
        for key in reference.rows:
            if key.role != "state" and key in candidate.rows:
                self._compare(key)

    @property
    def equal(self) -> set[Key]:
        return {key for key, error in self.errors.items() if not (error > 0).any() and not np.isnan(error).all()}

    def limit(self, key: Key) -> float:
        """Return what rounding does to this tensor; a wide one may have been made of narrow ones."""
        runs = self.reference, self.candidate
        return rounding([*(run.whole[key].dtype for run in runs), *(str(run.trace.facts.get("dtype")) for run in runs)])

    def _compare(self, key: Key) -> None:
        runs = self.reference, self.candidate
        a, b = (run.whole.get(key) for run in runs)
        if a is None or b is None:
            self.left_out.append(key)
        elif a.features.shape[1] != b.features.shape[1] or a.discrete != b.discrete:
            self.reshaped.append(key)
        else:
            places = [index_of(run.positions, self.positions) for run in runs]
            x, y = (item.features[at] for item, at in zip((a, b), places, strict=True))
            error = (x != y).any(-1).astype(float) if a.discrete else relative_l2(x, y)
            for item, at in zip((a, b), places, strict=True):
                error[np.isin(at, item.gaps)] = np.nan
            self.errors[key], self.pairs[key] = error, (x, y)
            self.flipped[key] = self._flips
            if a.discrete:
                self.discrete.add(key)
                if key.role == "out":
                    self._flips = self._flips | np.logical_or.accumulate(error > 0)
