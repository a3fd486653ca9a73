"""How far two traces are apart, tensor by tensor and position by position: exactly where both kept all values, from the
sketches of the tokens elsewhere."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from specnb.divergence import ladder, sketch
from specnb.divergence.align import Key, Laid, Values
from specnb.divergence.compare_texts import Together, together


@dataclass(frozen=True)
class Apart:
    """`errors[key]` (sequences, positions): relative L2, or 1 where an integer differs; NaN where not compared.

    `equal` are keys whose every compared token is from rows of equal digests; `left_out` and `reshaped` those that
    could not be compared (no token axis or a shape that changes; another shape in each trace).
    """

    ours: Laid
    theirs: Laid
    where: Together
    errors: dict[Key, np.ndarray] = field(default_factory=dict)
    dtypes: dict[Key, tuple[str, str]] = field(default_factory=dict)
    features: dict[Key, int] = field(default_factory=dict)
    discrete: set[Key] = field(default_factory=set)
    equal: set[Key] = field(default_factory=set)
    left_out: list[Key] = field(default_factory=list)
    reshaped: list[Key] = field(default_factory=list)

    @classmethod
    def of(cls, ours: Laid, theirs: Laid, where: Together | None = None) -> "Apart":
        """All tensors that both have, except states, whose rows may be in any slot."""
        found = cls(ours, theirs, where or together(ours, theirs))
        for key in (key for key in ours.rows if key.role != "state" and key in theirs.rows):
            found._compare(key)
        return found

    def pair(self, key: Key) -> tuple[Values, Values] | None:
        """The two tensors at the shared positions, their sequences in pairs."""
        where = self.where
        both = [one.values(key, where.positions) for one in (self.ours, self.theirs)]
        if None in both:
            return None
        return tuple(
            Values(v.sketch[s], v.size[s], v.row, v.features, v.dtype, None if v.full is None else v.full[s])
            for v, s in zip(both, (where.ours, where.theirs), strict=True)
        )

    def limit(self, key: Key) -> float:
        """What rounding does to this tensor; a wide one may have been made of narrow ones."""
        models = (one.trace.facts.get("dtype") for one in (self.ours, self.theirs))
        return ladder.rounding(name for name in (*self.dtypes[key], *models) if isinstance(name, str))

    def _compare(self, key: Key) -> None:
        pair = self.pair(key)
        if pair is None:
            self.left_out.append(key)
            return
        a, b = pair
        if a.features != b.features or a.discrete != b.discrete:
            self.reshaped.append(key)
            return
        self.dtypes[key], self.features[key] = (a.dtype, b.dtype), a.features
        if a.discrete:
            self.discrete.add(key)
        same = self._same_bits(a, b)
        if same.all():
            self.equal.add(key)
        error = np.where(same, 0.0, _error(a, b))
        error[self._not_finite(a, b, error, key)] = np.inf
        error[:, (a.row < 0) | (b.row < 0)] = np.nan
        self.errors[key] = error

    def _same_bits(self, a: Values, b: Values) -> np.ndarray:
        """(positions,): both are from rows of one digest that begin at the same position."""
        ours, theirs = self.ours.row_of, self.theirs.row_of
        if self.where.ours != self.where.theirs or self.ours.batch != self.theirs.batch:
            return np.zeros(len(a.row), bool)
        known = {
            (i, j): i >= 0 <= j and (ours[i].digest, ours[i].first) == (theirs[j].digest, theirs[j].first)
            for i, j in {*zip(a.row.tolist(), b.row.tolist(), strict=True)}
        }
        return np.array([known[pair] for pair in zip(a.row.tolist(), b.row.tolist(), strict=True)], bool)

    def _not_finite(self, a: Values, b: Values, error: np.ndarray, key: Key) -> np.ndarray:
        """Tokens that differ in rows of which only one has NaN or infinities: sketches count those as 0."""
        odd = np.array([i >= 0 <= j and (self.ours.row_of[i].odd > 0) != (self.theirs.row_of[j].odd > 0)
                        for i, j in zip(a.row.tolist(), b.row.tolist(), strict=True)], bool)  # fmt: skip
        return odd & (error > ladder.TIMES_FLOOR * self.limit(key))


def floors(sound: Sequence[Apart], least: dict[Key, float]) -> dict[Key, float]:
    """The largest error of each tensor in sound pairs, and at least what `least` says.

    Behind a token that got other experts a sound run is as far off as a wrong one: nothing there is taken for a floor.
    """
    found = dict(least)
    for apart in sound:
        flipped = np.full(len(apart.where.positions), False)
        for key, error in apart.errors.items():  # in the order of the run
            clean = error[:, ~flipped]
            if key in apart.discrete:
                flipped |= np.maximum.accumulate((error > 0).any(0))
            elif key in found and clean.size and not np.isnan(clean).all():
                found[key] = max(found[key], float(np.nanmax(clean)))
    return found


def logit_noise(sound: Sequence[Apart], key: Key) -> float | None:
    """The largest absolute error of a tensor kept in full in sound pairs; None where none of them has it."""
    found = []
    for apart in sound:
        pair = apart.pair(key) if key in apart.errors else None
        if pair is not None and pair[0].full is not None and pair[1].full is not None:
            found.append(float(np.abs(pair[0].full.astype(np.float64) - pair[1].full).max(initial=0)))
    return max(found, default=None)


def gains(a: Values, b: Values, cells: np.ndarray) -> sketch.Estimate:
    """Of the tokens in `cells` (sequences, positions): gain and its standard error, one a token."""
    if a.full is not None and b.full is not None:
        x, y = (one.full[cells].astype(np.float64) for one in (a, b))
        with np.errstate(divide="ignore", invalid="ignore"):
            value = (x * y).sum(-1) / (x * x).sum(-1)
        return sketch.Estimate(value, np.zeros(len(value)))
    return sketch.gain(a.sketch[cells], b.sketch[cells])


def _error(a: Values, b: Values) -> np.ndarray:
    if a.discrete:
        if a.full is not None and b.full is not None:
            return (a.full != b.full).any(-1).astype(float)
        # sums of integers are exact in a sketch, so another sum is another tensor
        return (a.sketch != b.sketch).any(-1).astype(float)
    if a.full is None or b.full is None:
        return sketch.relative_l2(a.sketch, b.sketch, norm=a.size).value
    x, y = (np.nan_to_num(one.full.astype(np.float64), posinf=0.0, neginf=0.0) for one in (a, b))
    top, below = np.linalg.norm(y - x, axis=-1), np.linalg.norm(x, axis=-1)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(top == 0, 0.0, top / below)
