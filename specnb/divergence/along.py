"""A trace put in the order of its text: what each module was given and gave at every position that was kept.

A position that was fed again counts as it was fed last. Steps of one token, blocks and a prefill of the same text come
out alike, so set-ups of other shapes can be compared. Of logits a run may make those of each step's last token alone.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from specnb.divergence.align import Key
from specnb.divergence.script import Script
from specnb.divergence.trace import Trace
from specnb.errors import InputError


@dataclass(frozen=True)
class Along:
    """`values[key]`: `(tokens, …)`, the token axis first, and `axes[key]` where it was.

    `left_out` are keys without a token axis, of modules that some step did not run, or of shapes that differ between
    steps (masks): they are not compared. `gaps[key]`: positions of which nothing was made, with zeros in `values`; no
    entry where there are none.
    """

    text: tuple[int, ...]
    values: dict[Key, np.ndarray]
    axes: dict[Key, int]
    left_out: tuple[Key, ...]
    gaps: Mapping[Key, np.ndarray] = field(default_factory=dict)

    @classmethod
    def of(cls, trace: Trace, script: Script) -> "Along":
        """From a trace, with full tensors, of a run of `script`: its step i is feed i, whatever position it thought.

        Raises InputError where the trace has other steps, or holds no full tensors.
        """
        seen = [step["length"] for step in trace.facts["steps"]]
        if seen != [len(feed.ids) for feed in script.feeds]:
            raise InputError(f"the trace has {len(seen)} steps of {sum(seen)} tokens, the script other ones")
        values, axes, left_out, gaps = {}, {}, [], {}
        for key, rows in _tensors(trace).items():
            merged = _merged(trace, rows, script)
            if merged is None:
                left_out.append(key)
                continue
            values[key], axes[key], missing = merged
            if len(missing):
                gaps[key] = missing
        if not values:
            raise InputError('the trace holds no full tensors: capture with full="" (all modules)')
        return cls(script.text, values, axes, tuple(left_out), gaps)


class _Row(NamedTuple):
    """Where a tensor stands in the trace: its row, the step, its token axis."""

    row: int
    step: int
    axis: int


def _tensors(trace: Trace) -> dict[Key, list[_Row]]:
    """The rows of each tensor, in the order they were written; as lists, for a frame costs more than a few rows."""
    found: dict[Key, list[_Row]] = {}
    columns = ("module", "call", "role", "name", "row", "step", "token_axis")
    for module, call, role, name, *where in zip(*(trace.tensors[one].tolist() for one in columns), strict=True):
        if role != "state":
            found.setdefault(Key(module, call, role, name), []).append(_Row(*where))
    return found


def _merged(trace: Trace, rows: list[_Row], script: Script) -> tuple[np.ndarray, int, np.ndarray] | None:
    """The rows of each step at the positions fed last in it, their axis, and the positions without; None where they do
    not fit.

    Fewer tokens than a step was fed are its last ones.
    """
    last, parts, at = script.last_feeds, [], []
    if not {row.step for row in rows}.issuperset(last.tolist()):
        return None
    arrays = [trace.array(row.row, "full") for row in rows]
    if any(full is None for full in arrays):
        return None
    rows = _settled(rows, [full.shape for full in arrays])
    for row, full in zip(rows, arrays, strict=True):
        if row.axis < 0:
            return None
        whole = np.moveaxis(full, row.axis, 0)
        earlier = max(len(script.feeds[row.step].ids) - len(whole), 0)
        positions = script.starts[row.step] + earlier + np.arange(len(whole))
        kept = positions < len(last)
        kept[kept] = last[positions[kept]] == row.step
        parts.append(whole[kept])
        at.append(positions[kept])
    if len({part.shape[1:] for part in parts}) > 1:
        return None
    found, made = np.concatenate(parts), np.concatenate(at)
    merged = np.zeros((len(last), *found.shape[1:]), found.dtype)
    merged[made] = found
    missing = np.setdiff1d(np.arange(len(last)), made)
    once = len(made) + len(missing) == len(last)
    return (merged, rows[0].axis, missing) if once and len(made) else None


def _settled(rows: list[_Row], shapes: list[tuple[int, ...]]) -> list[_Row]:
    """In a step of as many tokens as heads one may have been taken for the other: the other steps tell."""
    if {len(shape) for shape in shapes} != {4} or len({row.axis for row in rows}) == 1:
        return rows
    axes = {row.axis for row, shape in zip(rows, shapes, strict=True) if shape[1] != shape[2]}
    axis = axes.pop() if len(axes) == 1 else -1
    return [row._replace(axis=axis) for row in rows]
