"""Rounding to a coarser type than the draft's: another build, kernels in half precision, autocast. No structural fault.

A fault sits somewhere and has a direction. Rounding is everywhere that modules of a kind are, and has none: the gain
stays at 1 while the error is that of the type. How large that is, a sound copy of the draft in that type shows: tensor
by tensor, and in the logits, for errors that are small each may still add up to what rounding never does. Where that
copy gives the very logits, nothing needs to be weighed: `same_bits_in`.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
from torch import nn

from specnb.divergence.ladder import ROUNDING, TIMES_FLOOR
from specnb.divergence.local import WHICH
from specnb.divergence.pair import copy_of
from specnb.divergence.script import Script, run
from specnb.divergence.trace import Trace
from specnb.errors import InputError

DIRECTED = 0.5
"""Share of an error that lies along the output itself, from which it is a scale; of rounding it is next to nothing."""


class Rounded(NamedTuple):
    """A sound run of the draft in a coarser type: `errors` by WHICH, the largest of each tensor, and of the logits."""

    errors: pd.Series
    logits_off: float


def coarser(
    wrong: pd.DataFrame,
    logits_off: float,
    trace: Trace,
    dtype: str,
    *,
    rounded: Callable[[str], Rounded],
    held: Callable[[str], bool],
) -> str:
    """The type, coarser than `dtype`, whose rounding all that is wrong is no larger than; "" where there is none.

    `logits_off` is the error of the logits; `rounded` runs a sound copy in the type of a name, and `held` says whether
    that type has all the logits that were given.
    """
    if wrong.empty or not _undirected(wrong):
        return ""
    types = _coarser_than(dtype)
    if _of_logits(wrong):
        return next((name for name in types if wrong["error"].max() <= ROUNDING[name] and held(name)), "")
    for name in types if _everywhere(wrong, trace) else ():
        if wrong["error"].max() <= TIMES_FLOOR * ROUNDING[name]:
            sound = rounded(name)
            if not math.isfinite(sound.logits_off):
                continue  # it overflows in this type, which says nothing
            usual = wrong.join(sound.errors.rename("usual"), on=list(WHICH))["usual"]
            usual = usual.where(np.isfinite(usual), 0.0)
            if (wrong["error"] <= TIMES_FLOOR * usual).all() and logits_off <= TIMES_FLOOR * sound.logits_off:
                return name
    return ""


def same_bits_in(model: nn.Module, script: Script, logits: Sequence[torch.Tensor], dtype: str) -> str:
    """The type, coarser than `dtype`, in which the sound `model` gives these very logits of each feed; "" for none.

    Experts chosen at a near tie, and modules that autocast leaves alone, are then as here, which no error's size tells.
    """
    for name in _coarser_than(dtype):
        if held_by(logits, name):  # else they were not made in this type, and nothing needs to be run
            ways = _in_type(model, getattr(torch, name))
            if any(_gives(sound, under, script, logits) for sound, under in ways):
                return name
    return ""


def _in_type(model: nn.Module, dtype: torch.dtype) -> Iterator[tuple[nn.Module, AbstractContextManager[object]]]:
    """The ways to run a model in a type: under autocast, with parameters of it, with buffers as well.

    Loading makes only parameters of it: buffers of angles stay as they are.
    """
    yield model, torch.autocast(next(model.parameters()).device.type, dtype=dtype)
    loaded = copy_of(model)
    for parameter in loaded.parameters():
        parameter.data = parameter.data.to(dtype)
    yield loaded, nullcontext()
    yield loaded.to(dtype), nullcontext()


def _gives(
    model: nn.Module, under: AbstractContextManager[object], script: Script, logits: Sequence[torch.Tensor]
) -> bool:
    """Whether a model gives these logits, in its first feed and then in all."""
    vocab = logits[0].shape[-1]
    try:
        with under:
            return all(
                same_logits(comparable(run(model, text), vocab), logits[: len(text.feeds)])
                for text in (Script(script.feeds[:1]), script)
            )
    except RuntimeError:  # not every operation is there for every type
        return False


def _coarser_than(dtype: str) -> list[str]:
    return [name for name in sorted(ROUNDING, key=ROUNDING.__getitem__) if ROUNDING[name] > ROUNDING[dtype]]


def _everywhere(wrong: pd.DataFrame, trace: Trace) -> bool:
    """Whether all modules of the kinds that are wrong are, and there is more than one of them."""
    kinds = trace.tensors.drop_duplicates("module").set_index("module")["kind"]
    where = {*wrong["module"]}
    same_kind = {*kinds.index[kinds.isin({kinds.get(module) for module in where})]}
    return same_kind == where and len(where) > 1


def _of_logits(wrong: pd.DataFrame) -> bool:
    """Whether only what the model gives at last is rounded, as services do with logits. A head that rounds is a module
    like any other."""
    return {*wrong["at"]} == {""} and {*wrong["role"]} == {"out"}


def _undirected(wrong: pd.DataFrame) -> bool:
    by_module = wrong.assign(along=(wrong["gain"] - 1).abs()).groupby("module")
    along, error = by_module["along"].median(), by_module["error"].median()
    return bool((along < DIRECTED * error).all()) and not wrong["discrete"].any()


def comparable(logits: Iterable[torch.Tensor], vocab: int) -> tuple[torch.Tensor, ...]:
    """Those of each feed, `(tokens, vocab)`, in the CPU's memory.

    Raises InputError for logits of another form, or of another vocabulary.
    """
    rows = tuple(row.cpu() for row in logits)
    if odd := [tuple(row.shape) for row in rows if row.ndim != 2 or not len(row)]:
        raise InputError(
            f"in service the draft gives a sequence logits of the shape {odd[0]}: let the service give (sequences, "
            "tokens, vocabulary), of the last token at least"
        )
    if other := {row.shape[-1] for row in rows} - {vocab}:
        raise InputError(
            f"in service the draft gives logits of {min(other)} tokens, as it was loaded of {vocab}: let the service "
            "give those of the draft's own vocabulary"
        )
    return rows


def held_by(logits: Iterable[torch.Tensor], dtype: str) -> bool:
    """Whether all are numbers that a type of this name has, as they are once they were rounded to it."""
    return all(torch.equal(row, row.to(getattr(torch, dtype)).to(row.dtype)) for row in logits)


def text_logits(logits: Sequence[torch.Tensor], script: Script) -> dict[int, torch.Tensor]:
    """The logits `(vocab,)` of the text's positions, from those of each feed: of all its tokens or the last."""
    rows = {}
    for position, number in enumerate(script.last_feeds.tolist()):
        behind = script.starts[number] + len(script.feeds[number].ids) - position
        if behind <= len(logits[number]):
            rows[position] = logits[number][-behind]
    return rows


def off(logits: Mapping[int, torch.Tensor], sound: Mapping[int, torch.Tensor]) -> float:
    """The largest relative L2 error of the logits of a position that both have, 0 where there is none; infinite where
    one is no number."""
    both = [position for position in sound if position in logits]
    if not both:
        return 0.0
    sound_rows, rows = (torch.stack([run[position] for position in both]).double() for run in (sound, logits))
    error = float(((rows - sound_rows).norm(dim=-1) / sound_rows.norm(dim=-1)).max())
    return error if error == error else float("inf")


def same_logits(logits: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> bool:
    """Whether the logits of each feed, or of its last tokens where a service gives no others, are the same numbers."""
    last = ((a[-len(b) :], b[-len(a) :]) for a, b in zip(logits, other, strict=True))
    return all(torch.allclose(a.double(), b.double(), rtol=0, atol=0, equal_nan=True) for a, b in last)
