"""Positions that are all one number off: seen by every comparison of angles, and of no consequence.

Attention sees differences of positions only (Su et al. 2104.09864), so another base of the positions, as another KV
layout may bring, changes rounding and nothing else. What must hold is that every angle is turned alike.
"""

from collections.abc import Sequence

import numpy as np
import pandas as pd

from specnb.divergence.align import Key
from specnb.divergence.along import Along

TURNED_ALIKE = 3e-2
"""How far turns may be apart: bfloat16 rounds each of four cosines and sines by up to 2**-9."""


def explained(errors: pd.DataFrame, along: Along, sound: Along, rotaries: Sequence[str]) -> pd.Series:
    """Which rows of `local_errors` one offset of all positions explains; none where there is no such offset.

    `rotaries` are the rotary modules: cosines first, sines second in what they give, or both as complex numbers. A
    model without any has learned positions, where an offset is an error.
    """
    if not rotaries or not all(one_offset(along, sound, path) for path in rotaries):
        return pd.Series(False, index=errors.index)
    return errors["module"].isin(rotaries) | (errors["discrete"] & errors["name"].str.contains("position"))


def one_offset(along: Along, sound: Along, module: str) -> bool:
    """Whether the rows of a rotary module are turned, and by the same angles at every position."""
    turned = [_phases(one, module) for one in (along, sound)]
    if any(one is None for one in turned):
        return False
    theirs, ours = turned
    if theirs.shape != ours.shape:  # angles of more or fewer features
        return False
    turn = theirs * ours.conj() / np.abs(ours) ** 2
    # of length 1, too: longer cosines and sines would scale every product of a query and a key
    off = max(np.abs(turn - turn[:1]).max(), np.abs(np.abs(turn) - 1).max())
    return bool(off < TURNED_ALIKE < np.abs(turn[:1] - 1).max())


def _phases(along: Along, module: str) -> np.ndarray | None:
    whole = along.values.get(Key(module, 0, "out", "out"))
    if whole is not None and np.iscomplexobj(whole):
        return whole
    cos, sin = (along.values.get(Key(module, 0, "out", name)) for name in ("out", "out.1"))
    return None if cos is None or sin is None or cos.shape != sin.shape else cos.astype(float) + 1j * sin
