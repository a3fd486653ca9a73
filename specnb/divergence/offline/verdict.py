"""The verdict where no module is wrong by itself: what is left once all that has an excuse is taken away.

Other experts at a tie are no fault, and yet what is made from them has nothing to do with the reference any more. There
a fault would not be noticed, so errors behind such a choice are measured by what sound runs show behind theirs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from specnb.divergence import ladder
from specnb.divergence.align import Values
from specnb.divergence.ladder import Verdict
from specnb.divergence.offline.errors import Apart, Floors, logit_noise
from specnb.divergence.offline.walk import Event, Finding, Plan
from specnb.divergence.trace import Key


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
        self._behind = np.zeros((len(apart.where.reference), len(apart.where.positions)), bool)
        self.doubts: list[Doubt] = []

    def __call__(self, event: Event, key: Key, wrong: np.ndarray) -> np.ndarray:
        rounded = wrong & self.no_worse(key)
        self.rounded += int(rounded.sum())
        left = wrong & ~rounded
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
            (self._precise.candidate, self._apart.where.candidate),
            (self._precise.reference, self._apart.where.reference),
        )
        if any(key not in item.errors for item, _ in pairs):
            return np.zeros(errors.shape, bool)
        places = (self._apart.where.positions, errors.shape)
        candidate, reference = (_onto(item, item.errors[key], sequences, *places) for item, sequences in pairs)
        behind = [_onto(item, item.flipped[key], sequences, *places) == 1 for item, sequences in pairs]
        discrete, least = key in self._apart.discrete, self._apart.limit(key)
        return ladder.no_worse(candidate, reference, discrete=discrete, least=least, behind=behind[0] | behind[1])

    def logits(self, event: Event, key: Key) -> Key | None:
        """What a module's integers were chosen from: its output with more values a token. None: this is no choice."""
        if key.role != "out" or key not in self._apart.discrete:
            return None
        shapes = self._apart.features
        wider = [item for item in event.keys if item in self._apart.errors and item not in self._apart.discrete
                 and shapes[item] > shapes[key]]  # fmt: skip
        return max(wider, key=shapes.__getitem__, default=None)

    def _routing(self, key: Key, logits: Key, wrong: np.ndarray) -> np.ndarray:
        """Excuse ties; where only sketches are there, excuse what is usual in sound runs and doubt what noise could do,
        but no other choice from the same bits."""
        values, chosen = self._apart.pair(logits), self._apart.pair(key)
        if all(item.full is not None for item in (*values, *chosen)):
            noise = logit_noise(self._sound, logits)
            rows = values[0].full[wrong].astype(np.float64)
            if noise is None:
                noise = ladder.TIMES_FLOOR * self._apart.limit(logits) * float(np.abs(rows).max(initial=0))
            near = ladder.margins(rows, *(item.full[wrong].astype(np.int64) for item in chosen)) <= 2 * noise
            excused = np.zeros(wrong.shape, bool)
            excused[wrong] = near
            return self._tied(excused)
        error = self._apart.errors[logits]
        cascade = wrong & (error > 0) & self._behind  # one tie leads to others
        wrong = wrong & ~cascade
        doubtful = wrong & (error > 0)
        n, largest = int(doubtful.sum()), float(np.nanmax(error[wrong], initial=0))
        tokens = int((~np.isnan(error)).sum())
        usual = max((np.nansum(item.unflipped(key)) for item in self._sound if key in item.errors), default=0)
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
    apart: Apart, values: np.ndarray, sequences: list[int], positions: np.ndarray, shape: tuple[int, ...]
) -> np.ndarray:
    """Values of another comparison at these sequences of its second trace and positions; NaN where it has none."""
    placed = np.full(shape, np.nan)
    _, reference, candidate = np.intersect1d(positions, apart.where.positions, return_indices=True)
    for i, sequence in enumerate(sequences):
        if sequence in apart.where.candidate:
            placed[i, reference] = values[apart.where.candidate.index(sequence), candidate]
    return placed


Reasoned = tuple[Verdict, str]


@dataclass(frozen=True)
class Left:
    """Errors above three floors that nothing excuses: the largest one, and the largest as a multiple of its floor,
    before any other choice; and the first position of such a `choice` if one is behind it."""

    error: float = 0.0
    grown: float = 0.0
    choice: int | None = None

    @classmethod
    def of(
        cls, apart: Apart, findings: Mapping[Key, Finding], floor: Floors, excuses: Excuses, excused: set[Key]
    ) -> "Left":
        """From findings in the order of the run. Integers count as choices only: an error of 1 is none of theirs."""
        error, grown = 0.0, 0.0
        flips = np.zeros((len(apart.where.reference), len(apart.where.positions)), bool)
        for key, part in findings.items():
            if key in apart.discrete:
                if excuses.logits(part.event, key) is not None:
                    flips = flips | np.logical_or.accumulate(part.error > 0, axis=1)
                continue
            usual = np.where(flips, floor.behind[key], floor.before[key])
            cells = part.error > ladder.TIMES_FLOOR * usual
            if key in excused or not cells.any():
                continue
            cells &= ~excuses.no_worse(key)
            if (cells & flips).any():
                return cls(error, grown, int(apart.where.positions[flips.any(0)][0]))
            worst = float(part.error[cells].max(initial=0))
            error, grown = max(error, worst), max(grown, worst / floor.before[key])
        return cls(error, grown)


def verdict(
    apart: Apart,
    plan: Plan,
    findings: Mapping[Key, Finding],
    floor: Floors,
    excuses: Excuses,
    idle: set[str],
    calibrated: bool,
) -> Reasoned:
    """And one sentence that says why. `idle`: modules that differ while nothing depends on it; `calibrated`: the floors
    are from sound runs."""
    known = _incomparable(apart, plan, excuses)
    if known is not None:
        return "INCONCLUSIVE", known
    if len(apart.equal) == len(apart.errors):
        return "SOUND", "every tensor that was compared is equal in every bit"
    idlers = {key for key, part in findings.items() if part.wrong.any() and part.event.maker in idle}
    left = Left.of(apart, findings, floor, excuses, plan.with_copies(idlers))
    unknown = _unknown(left, calibrated)
    if unknown is not None:
        return "INCONCLUSIVE", unknown
    if idle:
        return "PRECISION_ONLY", f"{', '.join(sorted(idle))} differs, but nothing that is made from it does"
    if excuses.ties or excuses.rounded:
        return "PRECISION_ONLY", (
            f"{excuses.ties} choices are ties or usual in sound runs, and {excuses.rounded} tokens are no further "
            "from the precise run than the reference's are"
        )
    if left.grown:
        return "PRECISION_ONLY", "errors grow on their way, and no module is wrong by itself"
    if calibrated:
        return "SOUND", "no error is above what the sound runs show"
    return "PRECISION_ONLY", "no error is above what rounding does"


def _incomparable(apart: Apart, plan: Plan, excuses: Excuses) -> str | None:
    """Why too little was compared for a verdict, None where enough was."""
    where = apart.where
    if where.fork is not None:
        before = "before it nothing is wrong" if len(where.positions) else "nothing comes before it"
        return f"{before}: feed both runs the same tokens (teacher-force them) and capture again"
    if not len(where.positions) or not apart.errors:
        return "the traces share no position or no tensor with tokens: capture the same text in both"
    if where.strangers:
        return f"{where.strangers} sequences of the batch were fed other tokens: compare them alone"
    if excuses.doubts:
        item = excuses.doubts[0]
        return (
            f"{item.module} made another choice at position {item.position}, which may be a tie (unknown margin): "
            "capture both runs again with it in full (`around()`; `specnb divergence compare` prints the commands)"
        )
    final = plan.outermost
    seen = [key for key in final if key in apart.errors and not np.isnan(apart.errors[key]).all()]
    if not seen or not final.isdisjoint(apart.reshaped):
        return "what came out of the model itself was not compared, or has another shape: capture the same model whole"
    return None


def _unknown(left: Left, calibrated: bool) -> str | None:
    """Why errors that no module is to blame for may be a fault all the same, None where they are rounding."""
    if left.choice is not None:
        return (
            f"from position {left.choice} on another expert was chosen, and nothing behind it can be judged: give "
            "`sound` traces that choose otherwise, too, or compare another text"
        )
    if left.grown <= ladder.GROWN and left.error < ladder.LARGE:
        return None
    if calibrated:
        return (
            f"errors grow to {left.error:.2g}, {left.grown:.2g} times what the sound runs show, and no module is wrong "
            "by itself: look at the first of them in full, or give more `sound` traces of the same text"
        )
    return (
        f"errors grow to {left.error:.2g}, {left.grown:.2g} times rounding, and no module is wrong by itself: give "
        "`sound` traces of the same text in blocks (`specnb divergence capture … --width 5`) to tell what is usual"
    )


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
    keys = {key for key in outs if _differs(apart, key) and _late(apart, key) is not None}
    if not keys:
        return set()
    keys |= {key for key in given if _differs(apart, key) and _one_step(*apart.pair(key))}
    return plan.with_copies(keys) & apart.errors.keys()


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
    for late in [item for item in lates if 0 < abs(item) <= most][:TRIED]:
        reference, candidate = (
            (a.sketch[:, late:], b.sketch[:, : n - late]) if late > 0 else (a.sketch[:, :late], b.sketch[:, -late:])
        )
        if _alike(reference, candidate, near).all():
            return late
    return None


def _alike(reference: np.ndarray, candidate: np.ndarray, near: float) -> np.ndarray:
    """(sequences, positions) of sketches."""
    return np.linalg.norm(candidate - reference, axis=-1) <= near * np.linalg.norm(reference, axis=-1)


def _one_step(a: Values, b: Values) -> bool:
    """Integers that differ by the same amount everywhere."""
    apart = b.sketch.astype(np.float64) - a.sketch
    return bool((apart == apart[:1, :1]).all())
