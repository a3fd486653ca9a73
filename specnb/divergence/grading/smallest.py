"""How small a fault can be and still be found: the output of one bank of experts times 1 + eps, with right weights.

A scale is the fault that cosine does not see at all, and rounding hides it: what can be seen depends on the dtype.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import pandas as pd

from specnb.divergence.faults import FAULTS
from specnb.divergence.grading.grid import Subject

FAULT = "expert_scale_in_op"
EPS = (1e-1, 5e-2, 3e-2, 2e-2, 1e-2, 5e-3, 2e-3, 1e-3, 5e-4, 2e-4, 1e-4, 5e-5, 2e-5, 1e-5)
"""Sizes that are tried, from large to small, until one is missed."""


def scaled(subject: Subject, layer: int, eps: Sequence[float] = EPS) -> list[dict[str, Any]]:
    """A row for each size down to the first that the lab misses; `size` is eps, what the output is too large by.

    The draft runs alone: a scale needs no neighbour. Found is a structural difference that is put down to this bank.
    """
    rows: list[dict[str, Any]] = []
    for size in sorted(eps, reverse=True):
        service = partial(FAULTS[FAULT], layer=layer, eps=size)
        wrong = subject.lab.run("S0", service).wrong
        expected = f"layers.{layer}.mlp.experts"
        named = {} if wrong.empty else {"module": wrong["module"].iloc[0], "position": int(wrong["position"].iloc[0])}
        rows.append(
            subject.row("scale", FAULT, layer, size=size, structural=not wrong.empty, expected=expected, **named)
        )
        if rows[-1]["module"] != expected:
            break
    return rows


def smallest(rows: pd.DataFrame) -> pd.DataFrame:
    """By dtype, the smallest size that was found in all seeds and layers, as every larger one was; inf for none.

    Columns: dtype, scale (1 + eps), eps, subjects (seeds times layers).
    """
    found = rows[rows["module"] == rows["expected"]]
    each = rows.groupby(["dtype", "seed", "layer"]).size().index
    least = found.groupby(["dtype", "seed", "layer"])["size"].min().reindex(each, fill_value=float("inf"))
    table = least.groupby(level="dtype").agg(eps="max", subjects="size").reset_index()
    return table.assign(scale=1 + table["eps"])[["dtype", "scale", "eps", "subjects"]]
