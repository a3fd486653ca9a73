"""What is no fault though it is above its floor: ties between experts, and what a precise run shows to be rounding."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from specnb.divergence import ladder
from specnb.divergence.align import Key
from specnb.divergence.offline.errors import Apart, logit_noise
from specnb.divergence.offline.walk import Event


class Doubt(NamedTuple):
    """Other experts were chosen at `position` (and `count` tokens), with an unknown margin."""

    module: str
    position: int
    count: int


class Precise(NamedTuple):
    """A precise run against the reference and against the candidate."""

    reference: Apart
    candidate: Apart


class Excuses:
    """Called by the walk with each tensor that seems wrong by itself; says where it is not.

    `ties` and `rounded` count tokens excused by their margin, or as usual in sound runs, and by the precise run;
    `doubts` are choices whose margin cannot be known from sketches.
    """

    def __init__(self, apart: Apart, sound: Sequence[Apart], precise: Precise | None) -> None:
        self._apart, self._sound, self._precise = apart, sound, precise
        self.ties, self.rounded = 0, 0
        self._behind = np.zeros((len(apart.where.ours), len(apart.where.positions)), bool)
        self.doubts: list[Doubt] = []

    def __call__(self, event: Event, key: Key, own: np.ndarray) -> np.ndarray:
        rounded = own & self.no_worse(key)
        self.rounded += int(rounded.sum())
        left = own & ~rounded
        logits = self.logits(event, key)
        if logits is None or not left.any():
            return rounded
        return rounded | self._routing(key, logits, left)

    def no_worse(self, key: Key) -> np.ndarray:
        """(sequences, positions): no further from the precise run than the reference is; nowhere without one."""
        errors = self._apart.errors[key]
        if self._precise is None:
            return np.zeros(errors.shape, bool)
        pairs = (
            (self._precise.candidate, self._apart.where.theirs),
            (self._precise.reference, self._apart.where.ours),
        )
        if any(key not in one.errors for one, _ in pairs):
            return np.zeros(errors.shape, bool)
        places = (self._apart.where.positions, errors.shape)
        candidate, reference = (_onto(one, one.errors[key], sequences, *places) for one, sequences in pairs)
        behind = [_onto(one, one.flipped[key], sequences, *places) == 1 for one, sequences in pairs]
        discrete, least = key in self._apart.discrete, self._apart.limit(key)
        return ladder.no_worse(candidate, reference, discrete=discrete, least=least, behind=behind[0] | behind[1])

    def logits(self, event: Event, key: Key) -> Key | None:
        """What a module's integers were chosen from: its output with more values a token. None: this is no choice."""
        if key.role != "out" or key not in self._apart.discrete:
            return None
        shapes = self._apart.features
        wider = [one for one in event.keys if one in self._apart.errors and one not in self._apart.discrete
                 and shapes[one] > shapes[key]]  # fmt: skip
        return max(wider, key=shapes.__getitem__, default=None)

    def _routing(self, key: Key, logits: Key, own: np.ndarray) -> np.ndarray:
        """Excuse ties; where only sketches are there, excuse what is usual in sound runs and doubt what noise could do,
        but no other choice from the same bits."""
        values, chosen = self._apart.pair(logits), self._apart.pair(key)
        if all(one.full is not None for one in (*values, *chosen)):
            noise = logit_noise(self._sound, logits)
            rows = values[0].full[own].astype(np.float64)
            if noise is None:
                noise = ladder.TIMES_FLOOR * self._apart.limit(logits) * float(np.abs(rows).max(initial=0))
            near = ladder.margins(rows, *(one.full[own].astype(np.int64) for one in chosen)) <= 2 * noise
            excused = np.zeros(own.shape, bool)
            excused[own] = near
            return self._tied(excused)
        error = self._apart.errors[logits]
        cascade = own & (error > 0) & self._behind  # one tie leads to others
        own = own & ~cascade
        doubtful = own & (error > 0)
        n, largest = int(doubtful.sum()), float(np.nanmax(error[own], initial=0))
        tokens = int((~np.isnan(error)).sum())
        usual = max((np.nansum(one.unflipped(key)) for one in self._sound if key in one.errors), default=0)
        if 0 < n <= ladder.TIMES_FLOOR * usual:
            return self._tied(doubtful | cascade)
        if not n or n > ladder.chance_flips(tokens, self._apart.features[logits], largest):
            return self._tied(cascade)
        first = int(self._apart.where.positions[doubtful.any(0)][0])
        self.doubts.append(Doubt(key.module, first, n))
        return doubtful | self._tied(cascade)

    def _tied(self, cells: np.ndarray) -> np.ndarray:
        self.ties += int(cells.sum())
        self._behind |= np.logical_or.accumulate(cells, axis=1)
        return cells


def _onto(
    one: Apart, values: np.ndarray, sequences: list[int], positions: np.ndarray, shape: tuple[int, ...]
) -> np.ndarray:
    """Values of another comparison at these sequences of its second trace and positions; NaN where it has none."""
    found = np.full(shape, np.nan)
    _, ours, theirs = np.intersect1d(positions, one.where.positions, return_indices=True)
    for i, sequence in enumerate(sequences):
        if sequence in one.where.theirs:
            found[i, ours] = values[one.where.theirs.index(sequence), theirs]
    return found
