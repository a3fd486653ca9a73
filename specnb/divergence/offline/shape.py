"""What an error looks like, in one sentence: a factor, other operands, one token, rows of a cache that were moved."""

import numpy as np

from specnb.divergence import ladder
from specnb.divergence.align import Key
from specnb.divergence.offline.errors import Apart, gains
from specnb.divergence.offline.texts import Fork
from specnb.divergence.offline.walk import Finding

ONE_FACTOR = 0.4
"""How far off tokens of one factor may be (`ladder.one_factor`): wide, for a gain told from 16 numbers is off by
itself, and errors of before are in it."""
UNRELATED = 0.9
"""Least median relative error of unrelated tensors, which is sqrt(2) where they are of one size."""
COSINE = 0.35
"""Up to which their median cosine is near 0, told from 16 numbers of each token."""
ROWS_NAMED = 4
ROWS_TRIED = 256
"""Moved rows of a cache of which is looked for where they come from."""


def shape(apart: Apart, key: Key, part: Finding) -> str:
    """One sentence about where `part.own` is and what the tensor is like there."""
    places = _where(apart, key, part.own)
    error = part.error[part.own]
    moved = _moved_rows(apart, part.event.maker)
    if np.isinf(error).any():
        return f"NaN, infinities or zeros where the other run has none, {places}"
    if moved:
        return f"{places}; {moved}"
    if key in apart.discrete:
        return f"other integers, {places}"
    factor, cosine = _alike(apart, key, part)
    if factor is not None:
        return f"{factor:.4g} times what it should be at every such token: a scale; {places}"
    if float(np.median(error)) > UNRELATED and abs(cosine) < COSINE:
        return f"it has nothing to do with what it should be (cosine {cosine:.2f}): other operands; {places}"
    return places


def _alike(apart: Apart, key: Key, part: Finding) -> tuple[float | None, float]:
    """The one factor by which the tensor is too large, None where there is none, and the median cosine."""
    a, b = apart.pair(key)
    gain = gains(a, b, part.own)
    # a sketch's gain is as far off as the rest lets it be
    rest = None if a.full is not None else gain.error * np.sqrt(a.sketch.shape[-1])
    factor = ladder.one_factor(gain.value, part.error[part.own], limit=ONE_FACTOR, spread=np.median, rest=rest)
    with np.errstate(divide="ignore", invalid="ignore"):
        cosine = float(np.nanmedian(gain.value * a.size[part.own] / b.size[part.own]))
    return factor, cosine


def fork_shape(fork: Fork | None) -> str:
    """One sentence about runs that were fed other tokens; "" where there is nothing to say."""
    if fork is None or not fork.repeated:
        return ""
    return f"from position {fork.position} on the candidate is fed token {fork.candidate} only, as past a wrong length"


def _where(apart: Apart, key: Key, own: np.ndarray) -> str:
    """Which tokens, among those of this tensor that were compared."""
    compared = np.flatnonzero((~np.isnan(apart.errors[key])).any(0))
    hit = np.flatnonzero(own.any(0))
    positions = apart.where.positions
    first, last = int(positions[hit[0]]), int(positions[hit[-1]])
    if len(hit) == len(compared):
        return "at every token"
    if len(hit) == 1:
        return f"at one token, position {first}: a row that was not written, or by somebody else"
    if hit[0] == compared[0]:
        return f"at the first tokens, up to position {last}"
    kind = "from position {} on" if hit[-1] == compared[-1] else "between positions {} and {}"
    return f"at {len(hit)} tokens {kind.format(first, last)}"


def _moved_rows(apart: Apart, module: str) -> str:
    """Which rows of the module's cache hold what the reference has at another position."""
    positions = apart.where.positions
    ours, theirs = (one.states(module, "keys", positions) for one in (apart.ours, apart.theirs))
    if ours is None or theirs is None or apart.where.ours[:1] != [0] or apart.where.theirs[:1] != [0]:
        return ""
    size = np.linalg.norm(ours, axis=-1)
    tolerance = 10 * ladder.TIMES_FLOOR * ladder.rounding([apart.ours.dtype])

    def far(theirs: np.ndarray) -> np.ndarray:
        with np.errstate(divide="ignore", invalid="ignore"):
            away = np.linalg.norm(theirs - ours, axis=-1) / size
        return np.where(np.isnan(away), np.inf, away)

    here = far(theirs)
    others = np.flatnonzero((here > tolerance) & np.isfinite(here))[:ROWS_TRIED]
    from_where = {int(i): far(theirs[i]) for i in others}
    moved = {i: int(away.argmin()) for i, away in from_where.items() if away.min() < tolerance}
    said = [f"position {positions[i]} holds that of {positions[j]}" for i, j in moved.items()][:ROWS_NAMED]
    more = f" and {len(moved) - ROWS_NAMED} more" if len(moved) > ROWS_NAMED else ""
    return f"in its cache the row of {', that of '.join(said)}{more}" if said else ""
