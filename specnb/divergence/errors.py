"""One table of errors, wherever they come from: which module is wrong by itself, where first, and what follows.

`setups` fills it, a row for each tensor and token: it gives a pristine copy the very inputs of the run, so no error
travels, and what is `wrong` is above its floor. `offline`, which subtracts another trace, names the same nodes. How far
apart tensors are, and what counts as different, is here, too: more than sound runs show, or rounding to the dtype. No
torch.
"""

import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import pandas as pd

TIMES_FLOOR = 3.0
"""An error is wrong from so many times the largest one between sound runs on."""
ROUNDING = {"float64": 1e-15, "float32": 1e-6, "float16": 2**-11, "bfloat16": 2**-8}
"""Relative L2 error that sums in another order may always have, whether or not the sound runs showed it."""
GROWN = 100.0
"""Times the floor that errors may grow to on their way with no module wrong by itself; beyond it somebody must be."""
LARGE = 0.1
"""Relative error from which on nothing is put down to growth, whatever the floor: a tenth is no rounding."""
CARRIES = 4.0
"""How many times larger a sound module may make the relative error of what it is given (softmax, cancelling sums)."""
DIRECTED = 0.5
"""Share of an error that lies along the output itself, from which it is a scale; of rounding it is next to nothing."""
ONE_FACTOR, ONE_FACTOR_OF_RUNS = 0.2, 0.3
"""The most that tokens of one factor may be off (`one_factor`), as a share of its distance from 1 and from 0: in a
replay, where no error travels, and between two runs, where errors of before are in it."""
UNRELATED, UNRELATED_GAIN = 0.9, 0.35
"""Tensors are unrelated from this median relative error on (sqrt(2) where they are of one size), up to this gain."""

EXIT = {"SOUND": 0, "PRECISION_ONLY": 0, "DIVERGENT": 1, "INCONCLUSIVE": 125}
"""Exit codes by verdict; 125 is what `git bisect run` skips."""

HEAT = (-1.0, 8.0)
"""Range of a heat map, log10 of error over floor."""

TENSOR = ["at", "call", "role", "name"]
"""The columns that identify a tensor."""


class Node(NamedTuple):
    """A tensor that is wrong by itself: the `module` that made it, `at` which module it was seen, at which tokens.

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
    """Return a readable name of a node's module."""
    return node.module or ("the model's inputs" if node.role == "in" and not node.at else "the model itself")


def noise_floors(sound: Iterable[pd.DataFrame], dtype: str) -> pd.Series:
    """The largest error of each tensor in sound runs, by TENSOR, and at least what rounding to `dtype` may do."""
    return pd.concat(sound).groupby(TENSOR)["error"].max().clip(lower=ROUNDING[dtype]).rename("floor")


def judge_errors(errors: pd.DataFrame, floor: pd.Series, feeds: np.ndarray) -> pd.DataFrame:
    """A replay's errors with what each row is judged by; `feeds` are those of the positions, `(tokens,)`.

    A tensor without a floor of its own has the least of all.
    """
    judged = errors.join(floor, on=TENSOR).assign(feed=feeds[errors["position"]])
    judged["floor"] = judged["floor"].fillna(floor.min())
    judged["ratio"] = judged["error"] / judged["floor"]
    judged["wrong"] = judged["ratio"] > TIMES_FLOOR
    return judged


def locate(errors: pd.DataFrame) -> pd.DataFrame:
    """The rows that are wrong by themselves, the first in time first: its `module` is the first divergence."""
    wrong = errors[errors["wrong"]]
    return wrong.sort_values(["feed", "order", "position"], kind="stable").reset_index(drop=True)


def nodes(wrong: pd.DataFrame) -> pd.DataFrame:
    """A row for each tensor of these rows, in their order: the fields of Node, and all of its worst token's columns."""
    columns = ["module", *TENSOR]
    groups = wrong.groupby(columns, sort=False)
    tokens = groups["position"].agg(first_token="min", last_token="max", n_tokens="nunique")
    return wrong.loc[groups["error"].idxmax()].join(tokens, on=columns).reset_index(drop=True)


def heat_values(errors: pd.DataFrame) -> pd.DataFrame:
    """log10 of error over floor, modules in their order by positions, 0 at the floor, within HEAT.

    Of a module's tensors the largest counts.
    """
    places = [errors["module"], errors["position"]]
    with np.errstate(divide="ignore"):
        heat = np.log10(errors["ratio"]).fillna(0).clip(*HEAT).groupby(places).max()
    return heat.unstack().loc[errors["module"].unique()]


def give_verdict(
    located: bool, *, doubts: Iterable[str], excuses: Iterable[str], sound: str, rest: str
) -> tuple[str, str]:
    """The verdict, and a sentence that says why; "" where the first divergence does.

    Else the first of the `doubts` leaves it open, the first of the `excuses` says what differs and is no fault, `sound`
    that nothing does, and `rest` what is left to be said. All may be empty but the last; doubts are asked one by one.
    """
    if located:
        return "DIVERGENT", ""
    steps = ("INCONCLUSIVE", doubts), ("PRECISION_ONLY", excuses), ("SOUND", [sound]), ("PRECISION_ONLY", [rest])
    return next((name, reason) for name, reasons in steps for reason in reasons if reason)


# --- how far apart tensors are ----------------------------------------------------------------------------------------


def rounding(dtypes: Iterable[str]) -> float:
    """The rounding of the coarsest of these dtypes that are known; float32 where none is."""
    return max((ROUNDING[name] for name in dtypes if name in ROUNDING), default=ROUNDING["float32"])


def one_factor(gain: np.ndarray, error: np.ndarray, limit: float = ONE_FACTOR) -> float | None:
    """The one factor by which tokens of these gains and relative L2 errors are too large; None where it is not one."""
    middle = np.median(gain)
    rest = np.sqrt(np.clip(error**2 - (gain - 1) ** 2, 0, None))  # by Pythagoras: error^2 = (gain - 1)^2 + rest^2
    off = max(np.abs(gain - middle).max(), np.median(rest))
    # of an output that is small and has nothing to do with the right one all gains are near 0, too
    return middle if off < limit * min(abs(middle - 1), middle) else None


def flat(values: np.ndarray) -> np.ndarray:
    """Values `(tokens, …)` as `(tokens, features)` float64, both parts of complex ones."""
    if np.iscomplexobj(values):
        values = np.stack([np.real(values), np.imag(values)], -1)
    return values.reshape(len(values), math.prod(values.shape[1:])).astype(np.float64)


def relative_l2(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """||b - a|| / ||a|| of each token `(tokens,)`; 0 of two zeros, inf where only one is no number."""
    a, b = flat(a), flat(b)
    same = ~np.isfinite(a) & ((a == b) | (np.isnan(a) & np.isnan(b)))  # masks hold infinities
    a[same] = b[same] = 0.0
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        off = np.linalg.norm(b - a, axis=1)
        error = np.where(off == 0, 0.0, off / np.linalg.norm(a, axis=1))
    return np.where(np.isnan(error), np.inf, error)


def gains(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """<a, b> / <a, a> of each token: 1.02 where b = 1.02 a; NaN where a is zero."""
    a, b = flat(a), flat(b)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        return (a * b).sum(1) / (a * a).sum(1)


def margins(scores: np.ndarray, chosen: np.ndarray, instead: np.ndarray, *, ordered: bool = True) -> np.ndarray:
    """By how much the `scores` `(n, experts)` of `chosen` and `instead`, both `(n, k)`, differ, relative to all.

    A near-tie is rounding; inf where an index is no expert. `ordered`: it counts which of them is first.
    """
    both = np.stack([chosen, instead]).astype(np.int64)
    places = both.clip(0, scores.shape[-1] - 1)
    a, b = (np.take_along_axis(scores.astype(np.float64), place, -1) for place in places)
    if not ordered:
        a, b = np.sort(a), np.sort(b)
    apart = np.linalg.norm(a - b, axis=-1) / np.linalg.norm(scores, axis=-1).clip(min=1e-30)
    apart[(places != both).any((0, -1)) | np.isnan(apart)] = np.inf
    return np.where((chosen == instead).all(-1), 0.0, apart)
