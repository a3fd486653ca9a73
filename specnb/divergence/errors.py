"""The table of errors: which modules are wrong by themselves, and which one first. No torch.

`setups` fills the table, one row per tensor and token. It replays a pristine copy on the inputs of
the run, so errors do not propagate; an error far above its floor is `wrong`. `offline` compares two
traces and reports the same nodes. The error measures and the thresholds are here, too: the errors
of sound runs, or rounding to the dtype.
"""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd

TIMES_FLOOR = 3.0
"""An error above this multiple of its floor, the largest error of sound runs, is wrong."""
ROUNDING = {"float64": 1e-15, "float32": 1e-6, "float16": 2**-11, "bfloat16": 2**-8}
"""Relative L2 error that another summation order may cause, even if no sound run showed it."""
GROWN = 100.0
"""Multiple of the floor up to which errors may grow without any module being wrong by itself."""
LARGE = 0.1
"""Errors of this relative size or larger are never attributed to growth, whatever the floor."""
CARRIES = 4.0
"""Factor by which a sound module may amplify a relative error (softmax, cancellation)."""
ONE_FACTOR, ONE_FACTOR_OF_RUNS = 0.2, 0.3
"""Largest deviation from one factor (`one_factor`), relative to its distance from 1 and from 0.

The first applies to a replay, where errors do not propagate; the second applies to two runs, which
include earlier errors.
"""
UNRELATED, UNRELATED_GAIN = 0.9, 0.35
"""Minimum median error (sqrt(2) for equal norms) and maximum median gain of unrelated tensors."""

EXIT = {"SOUND": 0, "PRECISION_ONLY": 0, "DIVERGENT": 1, "INCONCLUSIVE": 125}
"""Exit codes by verdict; `git bisect run` skips a commit with 125."""

TENSOR = ["at", "call", "role", "name"]
"""The columns that identify a tensor."""
LABELS = ["order", "module", *TENSOR, "discrete"]
"""The columns with one value per tensor."""


class Node(NamedTuple):
    """A tensor that is wrong by itself: `module` computed it, and it was captured at module `at`.

    `error`, `ratio` and `gain` are those of its worst token.
    """

    module: str
    role: str
    name: str
    at: str
    first_token: int
    last_token: int
    n_tokens: int
    error: float
    floor: float
    ratio: float
    gain: float


def name_module(node: Node) -> str:
    """Return a readable name for the module of a node."""
    return node.module or (
        "the model's inputs" if node.role == "in" and not node.at else "the model itself"
    )


def expand_tokens(tensors: Sequence[tuple], **more: type) -> pd.DataFrame:
    """Return one row per token, from one row per tensor.

    A tensor has the values of LABELS, then arrays of positions, errors, gains and `more` columns.
    """
    types = {"position": int, "error": float, "gain": float, **more}
    table = pd.DataFrame(tensors, columns=[*LABELS, *types]).explode([*types], ignore_index=True)
    return table.astype({**types, "discrete": bool})


def noise_floors(sound: Iterable[pd.DataFrame], dtype: str) -> pd.Series:
    """Return the largest error of each tensor in sound runs; at least the rounding of `dtype`."""
    return (
        pd.concat(sound).groupby(TENSOR)["error"].max().clip(lower=ROUNDING[dtype]).rename("floor")
    )


def judge_errors(errors: pd.DataFrame, floor: pd.Series, feeds: np.ndarray) -> pd.DataFrame:
    """Add the columns floor, feed, ratio and wrong to the errors of a replay.

    `feeds` `(tokens,)` is the last feed of each token. A tensor without a floor gets the smallest.
    """
    judged = errors.join(floor, on=TENSOR).assign(feed=feeds[errors["position"]])
    judged["floor"] = judged["floor"].fillna(floor.min())
    judged["ratio"] = judged["error"] / judged["floor"]
    judged["wrong"] = judged["ratio"] > TIMES_FLOOR
    return judged


def locate(errors: pd.DataFrame) -> pd.DataFrame:
    """Return the wrong rows, earliest first: the `module` of the first is the first divergence."""
    wrong = errors[errors["wrong"]]
    return wrong.sort_values(["feed", "order", "position"], kind="stable").reset_index(drop=True)


def nodes(wrong: pd.DataFrame) -> pd.DataFrame:
    """Return one row per wrong tensor, in order: fields of Node, and columns of its worst token."""
    columns = ["module", *TENSOR]
    groups = wrong.groupby(columns, sort=False)
    tokens = groups["position"].agg(first_token="min", last_token="max", n_tokens="nunique")
    return wrong.loc[groups["error"].idxmax()].join(tokens, on=columns).reset_index(drop=True)


def give_verdict(
    located: bool, *, doubts: Iterable[str], excuses: Iterable[str], sound: str, rest: str
) -> tuple[str, str]:
    """Return the verdict and its reason, "" if the first divergence is `located`.

    Otherwise the first nonempty reason decides: `doubts` (INCONCLUSIVE), `excuses` for harmless
    differences (PRECISION_ONLY), `sound` (SOUND), `rest` (PRECISION_ONLY). `doubts` are lazy.
    """
    if located:
        return "DIVERGENT", ""
    steps = (
        ("INCONCLUSIVE", doubts),
        ("PRECISION_ONLY", excuses),
        ("SOUND", [sound]),
        ("PRECISION_ONLY", [rest]),
    )
    return next((name, reason) for name, reasons in steps for reason in reasons if reason)


# --- measures of difference -----------------------------------------------------------------------


def rounding(dtypes: Iterable[str]) -> float:
    """Return the rounding error of the least precise dtype; float32's if none is in ROUNDING."""
    return max((ROUNDING[name] for name in dtypes if name in ROUNDING), default=ROUNDING["float32"])


def one_factor(gain: np.ndarray, error: np.ndarray, limit: float = ONE_FACTOR) -> float | None:
    """Return the single factor that explains these gains and relative L2 errors, or None."""
    middle = np.median(gain)
    # by Pythagoras: error^2 = (gain - 1)^2 + rest^2
    rest = np.sqrt(np.clip(error**2 - (gain - 1) ** 2, 0, None))
    off = max(np.abs(gain - middle).max(), np.median(rest))
    # All gains are also near 0 if the output is small and unrelated to the correct one.
    return middle if off < limit * min(abs(middle - 1), middle) else None


def flat(values: np.ndarray) -> np.ndarray:
    """Return values `(tokens, …)` as float64 `(tokens, features)`; a complex value becomes two."""
    if np.iscomplexobj(values):
        values = np.stack([np.real(values), np.imag(values)], -1)
    return values.reshape(len(values), math.prod(values.shape[1:])).astype(np.float64)


def relative_l2(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return ||b - a|| / ||a|| `(tokens,)`; 0 for two zeros, inf if only `a` is 0 or one is NaN."""
    a = flat(a)
    b = flat(b)
    same = ~np.isfinite(a) & ((a == b) | (np.isnan(a) & np.isnan(b)))  # masks contain infinities
    a[same] = b[same] = 0.0
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        off = np.linalg.norm(b - a, axis=1)
        error = np.where(off == 0, 0.0, off / np.linalg.norm(a, axis=1))
    return np.where(np.isnan(error), np.inf, error)


def gains(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return <a, b> / <a, a> of each token: 1.02 if b = 1.02 a; NaN if a is zero."""
    a = flat(a)
    b = flat(b)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        return (a * b).sum(1) / (a * a).sum(1)


def margins(
    scores: np.ndarray, chosen: np.ndarray, instead: np.ndarray, *, ordered: bool = True
) -> np.ndarray:
    """Return how far apart the scores of `chosen` and `instead` are `(n,)`, relative to all scores.

    `scores` is `(n, experts)`; the others are indices `(n, k)`. Rounding may decide near-ties. inf
    if an index is no expert. `ordered`: the order of the chosen experts matters.
    """
    both = np.stack([chosen, instead]).astype(np.int64)
    places = both.clip(0, scores.shape[-1] - 1)
    a, b = (np.take_along_axis(scores.astype(np.float64), place, -1) for place in places)
    if not ordered:
        a = np.sort(a)
        b = np.sort(b)
    apart = np.linalg.norm(a - b, axis=-1) / np.linalg.norm(scores, axis=-1).clip(min=1e-30)
    apart[(places != both).any((0, -1)) | np.isnan(apart)] = np.inf
    return np.where((chosen == instead).all(-1), 0.0, apart)
