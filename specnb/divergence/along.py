"""A trace put in the order of its text: what each module was given and gave at every position that was kept.

A position that was fed again counts as it was fed last. Steps of one token, blocks and a prefill of the same text come
out alike, so set-ups of other shapes can be compared.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pandas as pd

from specnb.divergence.align import Key
from specnb.divergence.script import Script
from specnb.divergence.trace import Trace
from specnb.errors import InputError


@dataclass(frozen=True)
class Along:
    """`values[key]`: `(tokens, …)`, the token axis first, and `axes[key]` where it was.

    `left_out` are keys without a token axis, or of shapes that differ between steps (masks): they are not compared.
    """

    text: tuple[int, ...]
    values: dict[Key, np.ndarray]
    axes: dict[Key, int]
    left_out: tuple[Key, ...]

    @classmethod
    def of(cls, trace: Trace, script: Script) -> "Along":
        """From a trace, with full tensors, of a run of `script`: its step i is feed i, whatever position it thought.

        Raises InputError where the trace has other steps, or holds no full tensors.
        """
        seen = [step["length"] for step in trace.facts["steps"]]
        if seen != [len(feed.ids) for feed in script.feeds]:
            raise InputError(f"the trace has {len(seen)} steps of {sum(seen)} tokens, the script other ones")
        values, axes, left_out = {}, {}, []
        for key, rows in _tensors(trace):
            merged = _merged(trace, rows, script)
            if merged is None:
                left_out.append(key)
                continue
            values[key], axes[key] = merged, int(rows["token_axis"].iloc[0])
        if not values:
            raise InputError('the trace holds no full tensors: capture with full="" (all modules)')
        return cls(script.text, values, axes, tuple(left_out))


def _tensors(trace: Trace) -> Iterator[tuple[Key, pd.DataFrame]]:
    known = trace.tensors[trace.tensors["role"] != "state"]
    for key, rows in known.groupby(["module", "call", "role", "name"], sort=False):
        yield Key(*key), rows


def _merged(trace: Trace, rows: pd.DataFrame, script: Script) -> np.ndarray | None:
    """The rows of each step at the positions fed last in it, in order; None where they do not fit together."""
    last, starts, parts, at = script.last_feeds, script.starts, [], []
    for row in rows.itertuples():
        full = trace.array(row.row, "full")
        if full is None or row.token_axis < 0:
            return None
        whole = np.moveaxis(full, row.token_axis, 0)
        positions = starts[row.step] + np.arange(len(whole))
        kept = positions < len(last)
        kept[kept] = last[positions[kept]] == row.step
        parts.append(whole[kept])
        at.append(positions[kept])
    if len({part.shape[1:] for part in parts}) > 1:
        return None
    merged = np.concatenate(parts)[np.argsort(np.concatenate(at), kind="stable")]
    return merged if len(merged) == len(last) else None
