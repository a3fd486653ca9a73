"""How far two traces are apart, tensor by tensor and position by position: exactly where both kept all values, from the
sketches of the tokens elsewhere."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

from specnb.divergence import ladder, sketch
from specnb.divergence.align import Laid, Row, Together, Values, together
from specnb.divergence.trace import Key


@dataclass(frozen=True)
class Apart:
    """`errors[key]` (sequences, positions): relative L2, or 1 where an integer differs; NaN where not compared.

    `equal` are keys whose every compared token is from rows of equal digests; `left_out` and `reshaped` those that
    could not be compared (no token axis or a shape that changes; another shape in each trace).
    """

    reference: Laid
    candidate: Laid
    where: Together
    errors: dict[Key, np.ndarray] = field(default_factory=dict)
    dtypes: dict[Key, tuple[str, str]] = field(default_factory=dict)
    features: dict[Key, int] = field(default_factory=dict)
    discrete: set[Key] = field(default_factory=set)
    equal: set[Key] = field(default_factory=set)
    left_out: list[Key] = field(default_factory=list)
    reshaped: list[Key] = field(default_factory=list)

    @classmethod
    def of(cls, reference: Laid, candidate: Laid, where: Together | None = None) -> "Apart":
        """All tensors that both have, except states, whose rows may be in any slot."""
        apart = cls(reference, candidate, where or together(reference, candidate))
        for key in (key for key in reference.rows if key.role != "state" and key in candidate.rows):
            apart._compare(key)
        return apart

    def pair(self, key: Key) -> tuple[Values, Values] | None:
        """The two tensors at the shared positions, their sequences in pairs."""
        where = self.where
        both = [text.values(key, where.positions) for text in (self.reference, self.candidate)]
        if None in both:
            return None
        return tuple(
            Values(v.sketch[s], v.size[s], v.row, v.features, v.dtype, None if v.full is None else v.full[s])
            for v, s in zip(both, (where.reference, where.candidate), strict=True)
        )

    def limit(self, key: Key) -> float:
        """What rounding does to this tensor; a wide one may have been made of narrow ones."""
        return ladder.rounding([*self.dtypes[key], self.reference.dtype, self.candidate.dtype])

    @cached_property
    def flipped(self) -> dict[Key, np.ndarray]:
        """(sequences, positions) of each tensor, in the order of the run: where integers that were made before it, the
        chosen experts say, differ at the position or before it. A sound run is as far off there as a wrong one."""
        shares, flips = {}, None
        for key, error in self.errors.items():
            flips = np.zeros(error.shape, bool) if flips is None else flips
            shares[key] = flips
            if key in self.discrete:
                flips = flips | np.logical_or.accumulate(error > 0, axis=1)
        return shares

    def unflipped(self, key: Key) -> np.ndarray:
        """The errors of a tensor, NaN behind flips."""
        return np.where(self.flipped[key], np.nan, self.errors[key])

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
        absent = (a.row < 0) | (b.row < 0)
        if same.any() and (same | absent).all():
            self.equal.add(key)
        error = np.where(same, 0.0, _error(a, b))
        if a.full is None or b.full is None:
            error[self._not_finite(a, b, error, key)] = np.inf
        error[:, absent] = np.nan
        self.errors[key] = error

    def _same_bits(self, a: Values, b: Values) -> np.ndarray:
        """(positions,): both are from rows of one digest that begin at the same position."""
        reference, candidate = self.reference.row_of, self.candidate.row_of
        if self.where.reference != self.where.candidate or self.reference.batch != self.candidate.batch:
            return np.zeros(len(a.row), bool)
        known = {
            (i, j): i >= 0 <= j
            and (reference[i].digest, reference[i].first) == (candidate[j].digest, candidate[j].first)
            for i, j in {*zip(a.row.tolist(), b.row.tolist(), strict=True)}
        }
        return np.array([known[pair] for pair in zip(a.row.tolist(), b.row.tolist(), strict=True)], bool)

    def _not_finite(self, a: Values, b: Values, error: np.ndarray, key: Key) -> np.ndarray:
        """Tokens of which only one trace has NaN or infinities, which sketches count as 0.

        What is known is how many a row has. Those of its tokens that differ have them; where none does, those that are
        0 in both sketches; else the one that differs most. That much is said only of rows that were compared as a
        whole, against rows that have none.
        """
        odd = np.zeros(error.shape, bool)
        for x, y, reference, candidate in (
            (a, b, self.reference, self.candidate),
            (b, a, self.candidate, self.reference),
        ):
            rows = [reference.row_of[i] for i in np.unique(x.row[x.row >= 0]).tolist()]
            for row in (row for row in rows if row.odd):
                at = np.flatnonzero((x.row == row.row) & (y.row >= 0))
                sound = np.array([candidate.row_of[j].odd == 0 for j in y.row[at].tolist()], bool)
                if not sound.any():
                    continue
                seen = error[:, at] > ladder.TIMES_FLOOR * self.limit(key)
                if not seen.any() and sound.all() and self._whole(reference, row, len(at)):
                    blank = (x.size[:, at] == 0) & (y.size[:, at] == 0)
                    seen = blank if blank.any() else error[:, at] == error[:, at].max()
                odd[:, at] |= seen & sound
        return odd

    def _whole(self, values: Laid, row: Row, n: int) -> bool:
        """Whether all of a row's values are among `n` compared tokens."""
        length = row.shape[row.axis] if values.batch == 1 else values.steps[row.step]["length"]
        return n == length and len(self.where.reference) == values.batch


class Floors(NamedTuple):
    """The largest error of each tensor in sound runs: `before` any other choice, and `behind` one."""

    before: dict[Key, float]
    behind: dict[Key, float]


def floors(sound: Sequence[Apart], least: dict[Key, float]) -> Floors:
    """The largest error of each tensor in sound pairs, and at least what `least` says.

    Behind a token that got other experts a sound run is as far off as a wrong one: what is seen there is a floor only
    for what is behind such a token, too.
    """
    before, behind = dict(least), {}
    for key in least:
        aparts = [apart for apart in sound if key in apart.errors and key not in apart.discrete]
        before[key] = max(least[key], *(_largest(apart.unflipped(key)) for apart in aparts), 0.0)
        behind[key] = max(before[key], *(_largest(apart.errors[key]) for apart in aparts), 0.0)
    return Floors(before, behind)


def logit_noise(sound: Sequence[Apart], key: Key) -> float | None:
    """The largest absolute error of a tensor kept in full in sound pairs, before flips; None where none of them has
    it."""
    noise = []
    for apart in sound:
        pair = apart.pair(key) if key in apart.errors else None
        cells = ~np.isnan(apart.unflipped(key)) if pair is not None else np.zeros(0, bool)
        if cells.any() and pair[0].full is not None and pair[1].full is not None:
            noise.append(float(np.abs(pair[0].full[cells].astype(np.float64) - pair[1].full[cells]).max(initial=0)))
    return max(noise, default=None)


def _largest(errors: np.ndarray) -> float:
    return float(np.fmax.reduce(errors, axis=None, initial=0.0))


def gains(a: Values, b: Values, cells: np.ndarray) -> sketch.Estimate:
    """Of the tokens in `cells` (sequences, positions): gain and its standard error, one a token."""
    if a.full is not None and b.full is not None:
        x, y = (values.full[cells].astype(np.float64) for values in (a, b))
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
    raw = [values.full.astype(np.float64) for values in (a, b)]
    x, y = (np.where(np.isfinite(values), values, 0.0) for values in raw)
    top, below = np.linalg.norm(y - x, axis=-1), np.linalg.norm(x, axis=-1)
    # NaN against NaN is 0, and an infinity against itself; any other pair with one of them is another value
    odd = [np.where(np.isfinite(values), 0.0, values) for values in raw]
    other = ((odd[0] != odd[1]) & ~(np.isnan(odd[0]) & np.isnan(odd[1]))).any(-1)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        return np.where(other, np.inf, np.where(top == 0, 0.0, top / below))
