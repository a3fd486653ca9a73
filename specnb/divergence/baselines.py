"""What people do by hand, on the very runs the lab captured: compare what modules give of two runs, name the first.

The three rules are those of the case's own notes (mean and standard deviation), of msprobe (cosine) and of
torch.testing (allclose). Each compares the run under suspicion with a sound one, forward by forward, and names the
first module in time whose output differs. None of them sees inputs, other set-ups or floors. Needs numpy only.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import pandas as pd

from specnb.divergence.along import Along

CLOSE = MappingProxyType({"float64": 1e-7, "float32": 1.3e-6, "float16": 1e-3, "bfloat16": 1.6e-2})
"""Relative tolerances of torch.testing.assert_close by dtype."""
CLOSE_ABSOLUTE = MappingProxyType({"float64": 1e-7, "float32": 1e-5, "float16": 1e-5, "bfloat16": 1e-5})
SHARES = (0.001, 0.003, 0.01, 0.03, 0.1)
"""Thresholds of mean and standard deviation that are tried: the notes have 1 %, and it shall be no straw man."""
COSINES = (0.99, 0.999)
"""The threshold of msprobe, and a tighter one."""


class Pointed(NamedTuple):
    """What a rule names: a module and, where the rule tells tokens apart, the first position (else -1)."""

    module: str
    position: int


def differences(run: Along, sound: Along, last_feeds: np.ndarray, dtype: str) -> pd.DataFrame:
    """One row for each forward and output that both runs have, first in time first.

    `last_feeds` (tokens,): the forward in which the suspected run computed each position. Columns: feed, module,
    `moved` (distance of the means, in standard deviations), `spread` (relative distance of the standard deviations),
    `cosine`, and `position`, the first that is not close, -1 where all are.
    """
    rows = []
    for order, (key, theirs) in enumerate(run.values.items()):
        ours = sound.values.get(key)
        if key.role != "out" or ours is None or ours.shape != theirs.shape:
            continue
        for feed in np.unique(last_feeds):
            positions = np.flatnonzero(last_feeds == feed)
            measured = _measured(ours[positions].astype(float), theirs[positions].astype(float), positions, dtype)
            rows.append((feed, order, key.module, *measured))
    columns = ["feed", "order", "module", "moved", "spread", "cosine", "position"]
    return pd.DataFrame(rows, columns=columns).sort_values(["feed", "order"], ignore_index=True)


def _measured(ours: np.ndarray, theirs: np.ndarray, positions: np.ndarray, dtype: str) -> tuple[float, ...]:
    std = ours.std()
    moved, spread = _relative(theirs.mean() - ours.mean(), std), _relative(theirs.std() - std, std)
    norms = np.linalg.norm(ours) * np.linalg.norm(theirs)
    cosine = float((ours * theirs).sum() / norms) if norms else float(np.array_equal(ours, theirs))
    close = np.isclose(theirs, ours, rtol=CLOSE[dtype], atol=CLOSE_ABSOLUTE[dtype])
    far = np.flatnonzero(~close.reshape(len(close), -1).all(axis=1))
    return moved, spread, cosine, int(positions[far[0]]) if len(far) else -1


def _relative(difference: float, scale: float) -> float:
    return float(abs(difference) / scale) if scale else float("inf" if difference else 0)


Rule = Callable[[pd.DataFrame], pd.Series]
"""Which rows of `differences` it calls different."""


def _statistics(share: float) -> Rule:
    # said as "not within", so that NaN differs
    return lambda rows: ~((rows["moved"] <= share) & (rows["spread"] <= share))


def _cosine(least: float) -> Rule:
    return lambda rows: ~(rows["cosine"] >= least)


RULES: Mapping[str, Rule] = MappingProxyType(
    {f"mean/std {share:.1%}": _statistics(share) for share in SHARES}
    | {f"cosine {least}": _cosine(least) for least in COSINES}
    | {"allclose": lambda rows: rows["position"] >= 0}
)
"""Tools by name."""


def pointed(tool: str, rows: pd.DataFrame) -> Pointed | None:
    """The first output that a rule of RULES calls different; None where it finds none."""
    found = rows[RULES[tool](rows)]
    if found.empty:
        return None
    first = found.iloc[0]
    return Pointed(str(first["module"]), int(first["position"]) if tool == "allclose" else -1)
