"""Faults of the key/value cache: rows in the wrong slots, rows too many or too few, rows that others wrote.

They change the transformers cache that the draft is called with, where attention reads it, so they need one
(`use_cache`).
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from specnb.divergence.capture.tensors import name_arguments
from specnb.divergence.faults.planting import (
    Site,
    positions_fed,
    replace_forward,
    replaced,
)
from specnb.errors import InputError

Rows = tuple[Tensor, Tensor]
"""Keys and values, each (batch, heads, rows, head size)."""

Tamper = Callable[[Rows, int, int, int], None]
"""`tamper(rows, first, past, end)` changes rows of the positions first..end in place; past..end are new."""


def swap_slots(site: Site, *, a: int, b: int) -> AbstractContextManager[None]:
    """Positions `a` and `b` of one layer's cache are in each other's slots, from when `b` is written.

    Attention does not care for the order of rows it sees: tokens that see both are right, and only those from `a` to
    before `b` are wrong, when one forward writes both. Where a sliding window forgets slot `a` and not yet `b`, tokens
    are wrong again.
    """
    window = getattr(site.module, "sliding_window", None)
    site.planted.tokens = ((a, b), *([(max(a + window, b), b + window)] if window else []))

    def swap(rows: Rows, first: int, past: int, end: int) -> None:
        if first <= a and past <= b < end:
            for values in rows:
                values[..., [a - first, b - first], :] = values[..., [b - first, a - first], :]
            site.planted.struck.append(b)

    return replace_forward(site.module, partial(_tampering, site.module, swap))


def overwrite_row(site: Site, *, position: int, after: int | None) -> AbstractContextManager[None]:
    """Somebody else writes one row of the cache that this step's slots do not cover: a dummy batch with a stale table.

    It strikes once, before attention of the first forward that starts at `after` or later (None: right after
    `position`): the row then holds the key and value of the new token. A sliding window must not have
    forgotten the row.
    """
    after = position + 1 if after is None else after
    planted = site.planted
    planted.tokens = ((after, None),)

    def write(rows: Rows, first: int, past: int, end: int) -> None:
        if planted.struck or past < after:
            return
        for values in rows:
            values[..., position - first, :] = values[..., past - first, :]
        planted.struck.append(past)

    return replace_forward(site.module, partial(_tampering, site.module, write))


def _tampering(attention: Module, tamper: Tamper, original: Any, *args: Any, **kwargs: Any) -> Any:
    """An attention forward whose cache is tampered with between being written and being read."""
    cache = name_arguments(attention, args, kwargs).get("past_key_values")
    if cache is None:
        raise InputError("this fault is one of the cache: call the draft with a cache (use_cache=True)")
    update = cache.update

    def tampered(keys: Tensor, values: Tensor, layer: int, *more: Any, **options: Any) -> Rows:
        rows = update(keys, values, layer, *more, **options)
        end, n_rows = cache.get_seq_length(layer), rows[0].shape[-2]
        # in place: what a cache of growing tensors hands out is what it keeps, so the fault stays in it
        with torch.no_grad():
            tamper(rows, end - n_rows, end - keys.shape[-2], end)
        return rows

    with replaced(cache, "update", tampered):
        return original(*args, **kwargs)


def crop_wrongly(site: Site, *, rows: int) -> AbstractContextManager[None]:
    """After a rejection (a cropped cache) the cache is `rows` rows too long, or too short where that is negative.

    Positions go on as they should.
    """
    model = getattr(site.draft, "base_model", site.draft)  # without its head: called with the cache in any case
    last, before, states = None, 0, []  # after the last forward: the cache, its length, each layer's keys and values

    def run(original: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal last, before, states
        given = name_arguments(model, args, kwargs)
        cache = given.get("past_key_values")
        length = 0 if cache is None else cache.get_seq_length()
        if cache is not None and cache is last and before - length >= max(rows, 1) and length >= max(1, 1 - rows):
            # the engine goes on from the position it believes in, though the cache would now say another one
            given |= {"position_ids": positions_fed(given)}
            for layer, kept in zip(cache.layers, states, strict=True):
                _restore(layer, kept, before, length + rows)
            site.planted.struck.append(length)
        out = original(**given)
        last = getattr(out, "past_key_values", None)
        before = 0 if last is None else last.get_seq_length()
        # growing caches make new tensors: keeping the old costs no copy
        states = [] if last is None else [(layer.keys, layer.values) for layer in last.layers]
        return out

    return replace_forward(model, run)


def _restore(layer: Any, rows: Rows, before: int, length: int) -> None:
    """Give a layer, once of `before` positions, its `rows` up to `length`, which a window must not have forgotten."""
    first = before - rows[0].shape[-2]
    window = getattr(layer, "sliding_window", None)
    start = 0 if window is None else max(0, length - window + 1)
    layer.keys, layer.values = (values[..., start - first : length - first, :] for values in rows)
    if hasattr(layer, "cumulative_length"):
        layer.cumulative_length = length
