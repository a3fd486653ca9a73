"""A trace in the order of its text: steps of one token, blocks and what was taken back come out alike. No torch.

Steps may be cut otherwise (a prefill against steps of one token), and cache slots may lie elsewhere: that is not
compared. A step that starts at position p forgets all that was fed from p on, so what was fed last counts.
"""

import math
from collections import defaultdict
from collections.abc import Mapping
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from specnb.divergence.trace import Key, ModuleTrace, rename_all

UNKNOWN_ID = -1
"""The id of a token that was not written down."""


class Whole(NamedTuple):
    """A tensor along the text: `values (tokens, …)`, the token axis first, and `axis` where it was.

    `gaps` are the positions of which nothing was made, with zeros in `values`; `dtype` is that of the first row.
    """

    values: np.ndarray
    axis: int
    gaps: np.ndarray
    dtype: str

    @property
    def features(self) -> np.ndarray:
        """`values` as `(tokens, features)`."""
        return self.values.reshape(len(self.values), math.prod(self.values.shape[1:]))

    @property
    def discrete(self) -> bool:
        return not self.dtype.startswith(("float", "bfloat", "complex"))


class Alignment:
    """A trace in the order of its text.

    `firsts`: where steps start, by their number, in place of what the run itself thought. `positions` (n,) are those
    in the state at the end, `last_step` (n,) in which step each was fed, `tokens` (n,).
    """

    def __init__(
        self, trace: ModuleTrace, rename: Mapping[str, str] | None = None, firsts: Mapping[int, int] | None = None
    ) -> None:
        self.trace, self.rename = trace, dict(rename or {})
        self.names = rename_all(trace.tensors["module"].unique(), rename)
        """The paths of modules, by those that the capture wrote."""
        self.steps = {step["step"]: step for step in trace.facts["steps"]}
        for number, first in (firsts or {}).items():
            self.steps[number] = self.steps[number] | {"first_position": first}
        state = sorted(_state(self.steps).items())
        self.positions = np.array([position for position, _ in state], np.int64)
        self.last_step = np.array([step for _, (step, _) in state], np.int64)
        self.tokens = np.array([token for _, (_, token) in state], np.int64)

    @cached_property
    def rows(self) -> dict[Key, list[Any]]:
        """The rows of each key, in the order of the run: those of `trace.tensors`."""
        rows = self.trace.tensors.sort_values(["step", "order"], kind="stable")
        rows = rows.assign(module=rows["module"].map(self.names), holder=rows["holder"].map(self.names))
        by_key: dict[Key, list[Any]] = defaultdict(list)
        for row in rows.itertuples(index=False):
            by_key[Key(row.module, row.call, row.role, row.name)].append(row)
        return dict(by_key)

    @cached_property
    def whole(self) -> dict[Key, Whole]:
        """The tensors that have tokens, except states."""
        both = {key: self._whole(rows) for key, rows in self.rows.items() if key.role != "state"}
        return {key: whole for key, whole in both.items() if whole is not None}

    @property
    def left_out(self) -> list[Key]:
        """Keys not in `whole`: without a token axis, or of shapes that differ between steps (masks)."""
        return [key for key in self.rows if key.role != "state" and key not in self.whole]

    def _whole(self, rows: list[Any]) -> Whole | None:
        if (axis := self._token_axis(rows)) is None:
            return None
        parts = [np.moveaxis(self.trace.arrays[row.digest], axis, 0) for row in rows]
        if len({part.shape[1:] for part in parts}) > 1:
            return None
        n = len(self.positions)
        values, missing = np.zeros((n, *parts[0].shape[1:]), np.result_type(*parts)), np.ones(n, bool)
        for row, part in zip(rows, parts, strict=True):
            step = self.steps[row.step]  # fewer tokens than the step's are its last
            places = index_of(self.positions, step["first_position"] + np.arange(-len(part), 0) + step["length"])
            last = places >= 0
            last[last] = self.last_step[places[last]] == row.step
            values[places[last]], missing[places[last]] = part[last], False
        return None if missing.all() else Whole(values, axis, np.flatnonzero(missing), rows[0].dtype)

    def _token_axis(self, rows: list[Any]) -> int | None:
        """The axis that is as long as the step in each step, after that of the batch if any; None where there is none.

        Of as many tokens as heads in every step the outer one counts.
        """
        n = len(rows[0].shape)
        if {len(row.shape) for row in rows} != {n}:
            return None
        start = int(n > 1 and all(row.shape[0] == 1 for row in rows))
        lengths = [(row.shape, self.steps[row.step]["length"]) for row in rows]
        axes = [axis for axis in range(start, n) if all(shape[axis] == length for shape, length in lengths)]
        if axes:
            return axes[0]
        # of a prompt a head may be given the last token only
        return n - 2 if n in (2, 3) and all({*row.shape[:-1]} == {1} for row in rows) else None


def _state(steps: Mapping[int, Mapping[str, Any]]) -> dict[int, tuple[int, int]]:
    """Return the last step and the token of each position that is in the state at the end."""
    state: dict[int, tuple[int, int]] = {}  # in the order of positions: only the last ones are taken back
    for number, step in sorted(steps.items()):
        first, ids = step["first_position"], step["token_ids"]
        while step["length"] and state and next(reversed(state)) >= first:
            state.popitem()
        for i in range(step["length"]):  # ids are not known where a model is given embeddings
            state[first + i] = (number, ids[i] if i < len(ids) else UNKNOWN_ID)
    return state


def index_of(values: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Find the place of each wanted value in a sorted array; -1 where it is not."""
    places = np.searchsorted(values, wanted)
    return np.where(np.append(values, -1)[places] == wanted, places, -1)
