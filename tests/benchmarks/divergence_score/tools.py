"""The manual methods, on the same runs: compare module outputs and name the first that differs.

The rules are those of the case's notes (mean and standard deviation), of msprobe (cosine), of
torch.testing (allclose), and the first bit that differs. Each compares the suspect run with a sound
one, forward pass by forward pass, and names the earliest module whose output differs, or the model
itself if its inputs do. None of them uses inputs of modules, other set-ups or noise floors.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import pandas as pd

from specnb.divergence.trace import Alignment

LAB = "lab"
"""The lab's own name among the tools."""
CLOSE = MappingProxyType({"float64": 1e-7, "float32": 1.3e-6, "float16": 1e-3, "bfloat16": 1.6e-2})
"""Relative tolerances of torch.testing.assert_close by dtype."""
CLOSE_ABSOLUTE = MappingProxyType(
    {"float64": 1e-7, "float32": 1e-5, "float16": 1e-5, "bfloat16": 1e-5}
)
SHARE = 0.01
"""The notes' threshold of mean and standard deviation."""
COSINE = 0.999
"""Tighter than the threshold of msprobe, 0.99."""


def differences(run: Alignment, sound: Alignment, dtype: str) -> pd.DataFrame:
    """Return a row for each forward pass and output that both runs have, in order of time.

    Columns: feed, order, module, `moved` (distance of the means, in standard deviations), `spread`
    (relative distance of the standard deviations), `cosine`, and `same` and `close`: the first
    position with other bits, and not within the tolerances (-1: none).
    """
    rows = []
    for order, (key, (theirs, *_)) in enumerate(run.whole.items()):
        ours = sound.whole[key].values if key in sound.whole else None
        fed = key.module == "" and key.role == "in"
        if not (key.role == "out" or fed) or ours is None or ours.shape != theirs.shape:
            continue
        for feed in np.unique(run.last_step):
            positions = np.flatnonzero(run.last_step == feed)
            measured = _measured(
                ours[positions].astype(float), theirs[positions].astype(float), positions, dtype
            )
            rows.append((feed, order, key.module, *measured))
    columns = [
        "feed",
        "order",
        "module",
        "moved",
        "spread",
        "cosine",
        "same",
        "close",
    ]
    return pd.DataFrame(rows, columns=columns).sort_values(["feed", "order"], ignore_index=True)


def _measured(
    ours: np.ndarray, theirs: np.ndarray, positions: np.ndarray, dtype: str
) -> tuple[float, ...]:
    std = ours.std()
    moved = _relative(theirs.mean() - ours.mean(), std)
    spread = _relative(theirs.std() - std, std)
    norms = np.linalg.norm(ours) * np.linalg.norm(theirs)
    cosine = float((ours * theirs).sum() / norms) if norms else float(np.array_equal(ours, theirs))
    same = (theirs == ours) | (np.isnan(theirs) & np.isnan(ours))
    close = np.isclose(theirs, ours, rtol=CLOSE[dtype], atol=CLOSE_ABSOLUTE[dtype])
    return moved, spread, cosine, _first_off(same, positions), _first_off(close, positions)


def _first_off(close: np.ndarray, positions: np.ndarray) -> int:
    far = np.flatnonzero(~close.reshape(len(close), -1).all(axis=1))
    return int(positions[far[0]]) if len(far) else -1


def _relative(difference: float, scale: float) -> float:
    return float(abs(difference) / scale) if scale else float("inf" if difference else 0)


Rule = Callable[[pd.DataFrame], pd.Series]
"""Marks the rows of `differences` that count as different."""


TELLS_TOKEN: Mapping[str, str] = MappingProxyType({"first other bit": "same", "allclose": "close"})
"""The rules that name a token, with the column of its position."""


RULES: Mapping[str, Rule] = MappingProxyType(
    # "not within", so that NaN counts as different
    {
        f"mean/std {SHARE:.1%}": lambda rows: ~(rows[["moved", "spread"]] <= SHARE).all(axis=1),
        f"cosine {COSINE}": lambda rows: ~(rows["cosine"] >= COSINE),
    }
    | {name: lambda rows, column=column: rows[column] >= 0 for name, column in TELLS_TOKEN.items()}
)
"""Tools by name."""


def pointed(tool: str, rows: pd.DataFrame) -> dict[str, Any]:
    """Return the module of the first output that counts as different by a rule of RULES, and its
    first position (-1 if the rule names no token); empty if none does."""
    found = rows[RULES[tool](rows)]
    if found.empty:
        return {}
    first = found.iloc[0]
    return {
        "module": first["module"],
        "position": int(first[TELLS_TOKEN[tool]]) if tool in TELLS_TOKEN else -1,
    }
