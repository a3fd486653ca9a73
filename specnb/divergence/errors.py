"""One table of errors, wherever they come from: which module is wrong by itself, where first, and what follows.

Two sources fill it, a row for each tensor and token. `replay` gives a pristine copy the very inputs of the run, so no
error travels. `offline` subtracts another trace and follows errors on their way: `given` is the error of what a
tensor was made from. What is `wrong` is above its floor and no growth of that (`tolerances.wrong_by_itself`). No torch.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import pandas as pd

from specnb.divergence.tolerances import ROUNDING, wrong_by_itself

Verdict = Literal["DIVERGENT", "PRECISION_ONLY", "SOUND", "INCONCLUSIVE"]

EXIT: Mapping[str, int] = {"SOUND": 0, "PRECISION_ONLY": 0, "DIVERGENT": 1, "INCONCLUSIVE": 125}
"""Exit codes by verdict; 125 is what `git bisect run` skips."""

HEAT = (-1.0, 8.0)
"""Range of a heat map, log10 of error over floor."""

COLUMNS = ("order", "module", "call", "role", "name", "at", "position", "error", "gain", "discrete")
"""Of every table: `module` is who made the tensor, of an input the one that holds `at`, where it was seen; `error` is
relative L2, `gain` <a, b> / <a, a> of the sound tensor a and the run's b."""
JUDGED = (*COLUMNS, "feed", "floor", "ratio", "given", "wrong")
"""With `feed`, the forward in which the position was computed."""
TENSOR = ("at", "call", "role", "name")
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


def name_module(where: Any) -> str:
    """Return a readable name of the module of a Node, or of a row with `module`, `role` and `at`."""
    row = where if isinstance(where, pd.Series) else where._asdict()  # `at` of a Series is pandas' own
    return row["module"] or ("the model's inputs" if row["role"] == "in" and not row["at"] else "the model itself")


def join_tensors(
    tensors: Sequence[tuple[Mapping[str, Any], Mapping[str, np.ndarray]]], columns: Sequence[str] = COLUMNS
) -> pd.DataFrame:
    """All tensors, each the labels of its rows and its columns, in one frame: a frame for each costs far more."""
    if not tensors:
        return pd.DataFrame(columns=list(columns))
    lengths = [len(values["error"]) for _, values in tensors]
    labels = pd.DataFrame([labels for labels, _ in tensors]).loc[np.repeat(np.arange(len(tensors)), lengths)]
    values = {name: np.concatenate([values[name] for _, values in tensors]) for name in tensors[0][1]}
    return labels.reset_index(drop=True).assign(**values)[list(columns)]


def noise_floors(sound: Sequence[pd.DataFrame], dtype: str) -> pd.Series:
    """The largest error of each tensor in sound runs, by TENSOR, and at least what rounding to `dtype` may do."""
    together = pd.concat(sound, ignore_index=True)
    return together.groupby(list(TENSOR))["error"].max().clip(lower=ROUNDING[dtype]).rename("floor")


def judge_errors(errors: pd.DataFrame, floor: pd.Series, feeds: np.ndarray) -> pd.DataFrame:
    """A replay's errors with what each row is judged by; `feeds` are those of the positions, `(tokens,)`.

    A tensor without a floor of its own has the least of all.
    """
    judged = errors.join(floor, on=list(TENSOR)).assign(feed=feeds[errors["position"].to_numpy(int)], given=0.0)
    judged["floor"] = judged["floor"].fillna(floor.min())
    judged["ratio"] = judged["error"] / judged["floor"]
    judged["wrong"] = wrong_by_itself(judged["error"], judged["floor"], judged["given"], np.bool_(False))
    return judged


def locate(errors: pd.DataFrame) -> pd.DataFrame:
    """The rows that are wrong by themselves, the first in time first: its `module` is the first divergence."""
    wrong = errors[errors["wrong"].astype(bool)]
    return wrong.sort_values(["feed", "order", "position"], kind="stable").reset_index(drop=True)


def nodes(wrong: pd.DataFrame) -> pd.DataFrame:
    """A row for each tensor of these rows, in their order: the fields of Node, and all of its worst token's columns."""
    groups = wrong.groupby(["module", *TENSOR], sort=False)
    tokens = groups["position"].agg(first_token="min", last_token="max", n_tokens="nunique")
    return wrong.loc[groups["error"].idxmax()].join(tokens, on=["module", *TENSOR]).reset_index(drop=True)


def first_nodes(wrong: pd.DataFrame) -> list[Node]:
    """Pick the first wrong tensor of each module."""
    rows = nodes(wrong).drop_duplicates("module")
    return [Node(*row) for row in rows[list(Node._fields)].astype(object).itertuples(index=False)]


def heat_values(errors: pd.DataFrame) -> pd.DataFrame:
    """log10 of error over floor, modules in order of time by positions, 0 at the floor, within HEAT.

    Of a module's tensors the largest counts.
    """
    places = [errors["module"], errors["position"]]
    with np.errstate(divide="ignore"):
        heat = np.log10(errors["ratio"].astype(float)).fillna(0).clip(*HEAT).groupby(places).max()
    order = errors.groupby("module")["order"].min().sort_values().index
    return heat.unstack().loc[order]


def give_verdict(
    located: bool, *, doubts: Iterable[str], excuses: Iterable[str], sound: str, rest: str
) -> tuple[Verdict, str]:
    """The verdict, and a sentence that says why; "" where the first divergence does.

    Else the first of the `doubts` leaves it open, the first of the `excuses` says what differs and is no fault, `sound`
    that nothing does, and `rest` what is left to be said. All may be empty but the last; doubts are asked one by one.
    """
    if located:
        return "DIVERGENT", ""
    steps = ("INCONCLUSIVE", doubts), ("PRECISION_ONLY", excuses), ("SOUND", [sound]), ("PRECISION_ONLY", [rest])
    return next((name, reason) for name, reasons in steps for reason in reasons if reason)
