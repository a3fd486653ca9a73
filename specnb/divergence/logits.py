"""Logits of a run, feed by feed: which positions of the text they speak of, and whether two runs gave the same.

A service may give the logits of a feed's last tokens only, in another type, or on another device: none of these is a
fault of the draft.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch

from specnb.divergence.script import Script
from specnb.errors import InputError


def comparable(logits: Iterable[torch.Tensor], vocab: int) -> tuple[torch.Tensor, ...]:
    """Those of each feed, `(tokens, vocab)`, in the CPU's memory.

    Raises InputError for logits of another form, or of another vocabulary.
    """
    found = tuple(one.cpu() for one in logits)
    if odd := [tuple(one.shape) for one in found if one.ndim != 2 or not len(one)]:
        raise InputError(
            f"in service the draft gives a sequence logits of the shape {odd[0]}: let the service give (sequences, "
            "tokens, vocabulary), of the last token at least"
        )
    if other := {one.shape[-1] for one in found} - {vocab}:
        raise InputError(
            f"in service the draft gives logits of {min(other)} tokens, as it was loaded of {vocab}: let the service "
            "give those of the draft's own vocabulary"
        )
    return found


def held_by(logits: Iterable[torch.Tensor], dtype: str) -> bool:
    """Whether all are numbers that a type of this name has, as they are once they were rounded to it."""
    return all(torch.equal(one, one.to(getattr(torch, dtype)).to(one.dtype)) for one in logits)


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
    ours, theirs = (torch.stack([one[position] for position in both]).double() for one in (sound, logits))
    error = float(((theirs - ours).norm(dim=-1) / ours.norm(dim=-1)).max())
    return error if error == error else float("inf")


def same_logits(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> bool:
    """Whether the logits of each feed, or of its last tokens where a service gives no others, are the same numbers."""
    last = ((a[-len(b) :], b[-len(a) :]) for a, b in zip(one, other, strict=True))
    return all(torch.allclose(a.double(), b.double(), rtol=0, atol=0, equal_nan=True) for a, b in last)
