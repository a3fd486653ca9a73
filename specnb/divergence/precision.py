"""Rounding to a coarser type than the draft's: another build, kernels in half precision, autocast. No structural fault.

A fault sits somewhere and has a direction. Rounding is everywhere that modules of a kind are, and has none: the gain
stays at 1 while the error is that of the type.
"""

import pandas as pd

from specnb.divergence.ladder import ROUNDING, TIMES_FLOOR
from specnb.divergence.trace import Trace

DIRECTED = 0.5
"""Share of an error that lies along the output itself, from which it is a scale; of rounding it is next to nothing."""


def coarser(wrong: pd.DataFrame, trace: Trace, dtype: str) -> str:
    """The type, coarser than `dtype`, to which all that is wrong was rounded; "" where that does not explain it."""
    if wrong.empty:
        return ""
    for name in sorted(ROUNDING, key=ROUNDING.__getitem__):
        if ROUNDING[name] > ROUNDING[dtype] and wrong["error"].max() <= TIMES_FLOOR * ROUNDING[name]:
            return name if _everywhere(wrong, trace) and _undirected(wrong) else ""
    return ""


def _everywhere(wrong: pd.DataFrame, trace: Trace) -> bool:
    """Whether all modules of the kinds that are wrong are, and there is more than one of them."""
    kinds = trace.tensors.drop_duplicates("module").set_index("module")["kind"]
    where = {*wrong["module"]}
    same_kind = {*kinds.index[kinds.isin({kinds.get(module) for module in where})]}
    return same_kind == where and len(where) > 1


def _undirected(wrong: pd.DataFrame) -> bool:
    by_module = wrong.assign(along=(wrong["gain"] - 1).abs()).groupby("module")
    along, error = by_module["along"].median(), by_module["error"].median()
    return bool((along < DIRECTED * error).all()) and not wrong["discrete"].any()
