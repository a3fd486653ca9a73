"""Planted faults of the key/value cache: rows in the wrong slots, rows too many or too few, rows that others wrote.

Each is `fault(draft, target=None, *, …)`, a context manager that yields its `Fault`; none depends on the target. They
change the transformers cache that the draft is called with, where attention reads it, so they need one (`use_cache`).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from specnb.divergence.parts import find
from specnb.divergence.planting import (
    ALL,
    Fault,
    arguments,
    forward_replaced,
    positions_fed,
    replaced,
    with_argument,
)
from specnb.errors import InputError

Rows = tuple[torch.Tensor, torch.Tensor]
"""Keys and values, each (batch, heads, rows, head size)."""

Tamper = Callable[[Rows, int, int, int], None]
"""`tamper(rows, first, past, end)` changes rows of the positions first..end in place; past..end are new."""


@contextmanager
def kv_slot_swap(
    draft: nn.Module, target: nn.Module | None = None, *, layer: int = 0, a: int = 5, b: int = 9
) -> Iterator[Fault]:
    """Positions `a` and `b` of one layer's cache are in each other's slots, from when `b` is written.

    Attention does not care for the order of rows it sees: tokens that see both are right, and only those from `a` to
    before `b` are wrong, when one forward writes both. Where a sliding window forgets slot `a` and not yet `b`, tokens
    are wrong again.
    """
    if not 0 <= a < b:
        raise InputError(f"two positions a < b are swapped, not {a} and {b}")
    path, attention = find(draft).attention(layer)
    window = getattr(attention, "sliding_window", None)
    tokens = ((a, b), *([(max(a + window, b), b + window)] if window else []))
    fault = Fault("KV_SLOT", path, tokens, f"cache rows of positions {a} and {b} are swapped", waits=True)

    def swap(rows: Rows, first: int, past: int, end: int) -> None:
        if first <= a and past <= b < end:
            for values in rows:
                values[..., [a - first, b - first], :] = values[..., [b - first, a - first], :]
            fault.struck.append(b)

    with forward_replaced(attention, _tampering(swap)):
        yield fault


@contextmanager
def foreign_writer(
    draft: nn.Module, target: nn.Module | None = None, *, layer: int = 0, position: int = 2, after: int | None = None
) -> Iterator[Fault]:
    """Somebody else writes one row of the cache that this step's slots do not cover: a dummy batch with a stale table.

    It strikes once, before attention of the first forward that starts at `after` or later (None: right after
    `position`): the row then holds the key and value of the new token. InputError where a sliding window has already
    forgotten the row.
    """
    after = position + 1 if after is None else after
    if not 0 <= position < after:
        raise InputError(f"a row is overwritten after it was written: position {position}, after {after}")
    path, attention = find(draft).attention(layer)
    fault = Fault(
        "KV_SLOT",
        path,
        ((after, None),),
        f"the cache row of position {position} was written by a batch that does not own it",
        ("vllm#56734", "vllm#49757"),
        waits=True,
    )

    def write(rows: Rows, first: int, past: int, end: int) -> None:
        if fault.struck or past < after:
            return
        if position < first:
            raise InputError(f"{path} holds positions {first} to {end - 1}, not {position}: choose a later `position`")
        for values in rows:
            values[..., position - first, :] = values[..., past - first, :]
        fault.struck.append(past)

    with forward_replaced(attention, _tampering(write)):
        yield fault


@contextmanager
def untrimmed(draft: nn.Module, target: nn.Module | None = None, *, rows: int = 1) -> Iterator[Fault]:
    """After a rejection `rows` rejected rows stay in the cache; positions go on as they should.

    It strikes each time the draft is called with a cache that was cropped by at least `rows` since the last call.
    """
    note, issues = f"{rows} rejected rows were left in the cache", ("mlx-lm#1914", "vllm#9730")
    with _length_off(draft, rows, note, issues) as fault:
        yield fault


@contextmanager
def overtrimmed(draft: nn.Module, target: nn.Module | None = None, *, rows: int = 1) -> Iterator[Fault]:
    """As `untrimmed`, but after a rejection `rows` good rows too many are cut off."""
    note, issues = f"{rows} accepted rows were cut off with the rejected ones", ("mlxcel#994", "mlxcel#1002")
    with _length_off(draft, -rows, note, issues) as fault:
        yield fault


def _tampering(tamper: Tamper) -> Callable[..., Any]:
    """An attention forward whose cache is tampered with between being written and being read."""

    def run(original: Any, *args: Any, **kwargs: Any) -> Any:
        cache = _cache(original, args, kwargs)
        if cache is None:
            raise InputError("this fault is one of the cache: call the draft with a cache (use_cache=True)")
        update = cache.update

        def tampered(keys: torch.Tensor, values: torch.Tensor, layer: int, *more: Any, **options: Any) -> Rows:
            rows = update(keys, values, layer, *more, **options)
            end, n_rows = cache.get_seq_length(layer), rows[0].shape[-2]
            # in place: what a cache of growing tensors hands out is what it keeps, so the fault stays in it
            with torch.no_grad():
                tamper(rows, end - n_rows, end - keys.shape[-2], end)
            return rows

        with replaced(cache, "update", tampered):
            return original(*args, **kwargs)

    return run


@contextmanager
def _length_off(draft: nn.Module, off: int, note: str, issues: tuple[str, ...]) -> Iterator[Fault]:
    """The cache is `off` rows longer (or shorter) than was asked for, wherever it was cropped between two forwards."""
    if not off:
        raise InputError("at least one row stays or is cut, not 0")
    path, _ = next(iter(find(draft).attentions), None) or find(draft).attention(0)
    fault, seen = Fault("KV_SLOT", path, ALL, note, issues, waits=True), _Seen()

    def run(original: Any, *args: Any, **kwargs: Any) -> Any:
        bound = arguments(original, args, kwargs)
        cache = bound.arguments.get("past_key_values")
        length = 0 if cache is None else cache.get_seq_length()
        if seen.of(cache) and seen.length - length >= max(off, 1) and length >= max(1, 1 - off):
            # the engine goes on from the position it believes in, though the cache would now say another one
            args, kwargs = with_argument(original, args, kwargs, "position_ids", positions_fed(bound))
            seen.restore(length + off)
            fault.struck.append(length)
        out = original(*args, **kwargs)
        seen.keep(getattr(out, "past_key_values", None))
        return out

    # the model without its head: it is called with the cache, whether or not logits are asked for
    with forward_replaced(getattr(draft, "base_model", draft), run):
        yield fault


class _Seen:
    """The rows a cache held after the last forward. Growing caches make new tensors: keeping the old costs no copy."""

    def __init__(self) -> None:
        self.length = 0
        self._cache: Any = None
        self._rows: list[Rows] = []

    def of(self, cache: object) -> bool:
        return cache is not None and cache is self._cache

    def keep(self, cache: Any) -> None:
        self._cache = cache
        self.length = 0 if cache is None else cache.get_seq_length()
        self._rows = [] if cache is None else [(layer.keys, layer.values) for layer in cache.layers]

    def restore(self, length: int) -> None:
        """Give the cache the rows it had, up to `length`. InputError where a sliding window no longer holds them."""
        for layer, rows in zip(self._cache.layers, self._rows, strict=True):
            first = self.length - rows[0].shape[-2]
            window = getattr(layer, "sliding_window", None)
            start = 0 if window is None else max(0, length - window + 1)
            if start < first:
                raise InputError(
                    f"a sliding layer holds positions from {first} on, {start} is needed to go back to {length}: "
                    "let the cache record its past (activate_past_recording), or run fewer tokens"
                )
            layer.keys, layer.values = (values[..., start - first : length - first, :] for values in rows)
            if hasattr(layer, "cumulative_length"):
                layer.cumulative_length = length


def _cache(original: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    named = arguments(original, args, kwargs).arguments
    return named.get("past_key_values", named.get("kwargs", {}).get("past_key_values"))
