"""How far logged rows are trusted: by how much their type may have moved an entry, an edge, or a zero."""

from typing import NamedTuple

import numpy as np

ROUNDING = 1e-6
"""What rows that were computed in float32 may be off by, relative, whatever they are kept in."""
SUM_ROUNDING = 1e-3
"""By how much the sum of a row may miss 1: float32, summed over a vocabulary, or the roundings of float16."""
VAGUE = 0.1
"""Share of cumulated weights within which a random number may pick any token, up to which the replay is a check."""


class Rounding(NamedTuple):
    """Within it a decision is not judged.

    `entry`: what an entry may be off by, relative; `least`: the smallest number that is told from 0; `edge`: what
    cumulated weights may be off by, as a share of their sum. `half`: rows in float16. There a zero says nothing, for a
    large vocabulary holds some mass in entries below 3e-8, and two entries may be equal by rounding alone: checks
    without random numbers need a clear difference, and a row with one token may have had others. bfloat16 that was
    converted to float32 cannot be told from it, nor float16 that was converted, and both are too coarse: take the
    softmax of the logits in float32.
    """

    entry: float
    least: float
    edge: float
    half: bool

    def of_entry(self, value: float) -> float:
        """What an entry of about `value` may be off by."""
        return self.entry * value + self.least

    def of_edge(self, edges: np.ndarray) -> float:
        """What each of the cumulated weights `edges (vocab,)` may be off by; those of a residual miss twice a row's."""
        of_entries = 2 * (self.entry + len(edges) * self.least) if self.half else 0.0
        return self.edge * float(edges[-1]) + of_entries

    def tells(self, edges: np.ndarray) -> bool:
        """Whether a random number and the cumulated weights `edges (vocab,)` say, up to VAGUE, which token is picked.

        In half precision a residual of little mass may be all rounding: then no token would be a flaw.
        """
        return 2 * self.of_edge(edges) < VAGUE * float(edges[-1])


def rounding_of(*rows: object) -> Rounding:
    """Of a decision over rows `(vocab,)` of these types, the coarsest of which counts; None is a point mass, exact."""
    given = [np.asarray(row) for row in rows if row is not None]
    if any(row.dtype == np.float16 for row in given):
        kind = np.finfo(np.float16)
        # p and q are each off by half an eps; what was computed in half precision as well is off by more than that
        return Rounding(4 * float(kind.eps), float(kind.smallest_subnormal), SUM_ROUNDING, half=True)
    # an engine that keeps float32 also cumulates in it, over a vocabulary
    return Rounding(ROUNDING, 0.0, SUM_ROUNDING if any(map(_of_float32, given)) else ROUNDING, half=False)


def _of_float32(row: np.ndarray) -> bool:
    """Whether the values are of float32, or coarser, whatever they were logged in: a list of Python's, or float64."""
    with np.errstate(over="ignore"):
        return row.dtype != np.float64 or bool((row.astype(np.float32) == row).all())
