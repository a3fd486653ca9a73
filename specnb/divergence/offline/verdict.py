"""The verdict where no module is wrong by itself: what is left once all that has an excuse is taken away.

Other experts at a tie are no fault, and yet what is made from them has nothing to do with the reference any more. There
a fault would not be noticed, so errors behind such a choice are measured by what sound runs show behind theirs.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from specnb.divergence import ladder
from specnb.divergence.align import Key
from specnb.divergence.ladder import Verdict
from specnb.divergence.offline.errors import Apart, Floors
from specnb.divergence.offline.excuses import Excuses
from specnb.divergence.offline.walk import Finding, Plan

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
        cls, apart: Apart, found: Mapping[Key, Finding], floor: Floors, excuses: Excuses, excused: set[Key]
    ) -> "Left":
        """From findings in the order of the run. Integers count as choices only: an error of 1 is none of theirs."""
        error, grown = 0.0, 0.0
        flips = np.zeros((len(apart.where.ours), len(apart.where.positions)), bool)
        for key, part in found.items():
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
    found: Mapping[Key, Finding],
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
    idlers = {key for key, part in found.items() if part.own.any() and part.event.maker in idle}
    left = Left.of(apart, found, floor, excuses, plan.with_copies(idlers))
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
        one = excuses.doubts[0]
        return (
            f"{one.module} made another choice at position {one.position}, which may be a tie (unknown margin): "
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
