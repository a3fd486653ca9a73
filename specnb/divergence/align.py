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

from specnb.divergence.trace import TOKEN_K, Key, ModuleTrace, rename_all

UNKNOWN = -1
"""The id of a token that was not written down."""


class Whole(NamedTuple):
    """A tensor that was kept in full: `values (tokens, …)`, the token axis first, and `axis` where it was.

    `gaps` are the positions of which nothing was made, with zeros in `values`.
    """

    values: np.ndarray
    axis: int
    gaps: np.ndarray


class Values(NamedTuple):
    """A tensor along the text: `sketch` (tokens, 16) and `size` its L2 norms (tokens,).

    `bits` (tokens,) are equal where the rows that tokens are from are equal bit for bit, "" where nothing was kept.
    `full` (tokens, features) only where all rows have it.
    """

    sketch: np.ndarray
    size: np.ndarray
    bits: np.ndarray
    features: int
    dtype: str
    full: np.ndarray | None

    def pick(self, places: np.ndarray) -> "Values":
        """The tokens at these places."""
        arrays = {name: getattr(self, name) for name in ("sketch", "size", "bits", "full")}
        return self._replace(**{name: array if array is None else array[places] for name, array in arrays.items()})

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
        self.steps, self._shifts = {}, {}
        for step in trace.facts["steps"]:
            number, first = step["step"], step["first_position"]
            start = (firsts or {}).get(number, first)
            self.steps[number], self._shifts[number] = step | {"first_position": start}, start - first
        state = sorted(_state(self.steps).items())
        self.positions = np.array([position for position, _ in state], np.int64)
        self.last_step = np.array([step for _, (step, _) in state], np.int64)
        self.tokens = np.array([token for _, (_, token) in state], np.int64)

    @cached_property
    def rows(self) -> dict[Key, list[Any]]:
        """The rows of each key, in the order of the run: those of `trace.tensors`, with `first`."""
        rows = self.trace.tensors.sort_values(["step", "order"], kind="stable")
        rows = rows.assign(
            module=rows["module"].map(self.names), holder=rows["holder"].map(self.names),
            first=rows["first_position"] + rows["step"].map(self._shifts),
        )  # fmt: skip
        by_key: dict[Key, list[Any]] = defaultdict(list)
        for row in rows.itertuples(index=False):
            by_key[Key(row.module, row.call, row.role, row.name)].append(row)
        return dict(by_key)

    @cached_property
    def whole(self) -> dict[Key, Whole]:
        """The tensors that were kept in full and have tokens, except states."""
        both = {key: self._whole(rows) for key, rows in self.rows.items() if key.role != "state"}
        return {key: whole for key, whole in both.items() if whole is not None}

    @property
    def left_out(self) -> list[Key]:
        """Keys not in `whole`: without a token axis, not kept, or of shapes that differ between steps (masks)."""
        return [key for key in self.rows if key.role != "state" and key not in self.whole]

    def values(self, key: Key) -> Values | None:
        """The tensor along the text; None where it has no tokens, or changes its shape (masks)."""
        n, rows, kinds = len(self.positions), self.rows[key], set()
        sketch, size, bits = np.zeros((n, TOKEN_K), np.float32), np.zeros(n, np.float32), np.full(n, "", object)
        axis = _token_axis(rows)
        for row in rows:
            tokens, norms = (self.trace.array(row.row, part) for part in ("tokens", "token_l2"))
            clear = row.token_axis == axis or math.prod(row.shape[1:3]) == 1
            # the last layer may go on with a step's last tokens only
            if not clear or tokens is None or not 0 < len(norms) == row.shape[axis] <= self.steps[row.step]["length"]:
                return None
            kinds.add((math.prod(row.shape) // len(norms), row.dtype))
            fed, places = self._places(row, len(norms))
            sketch[places], size[places] = tokens[fed], norms[fed]
            bits[places] = f"{row.digest} {row.first}"
        if len(kinds) != 1:
            return None
        [(features, dtype)] = kinds
        whole = self.whole.get(key)
        full = None if whole is None else whole.values.reshape(n, features)
        return Values(sketch, size, bits, features, dtype, full)

    def _whole(self, rows: list[Any]) -> Whole | None:
        fulls, axis = [self.trace.array(row.row, "full") for row in rows], _token_axis(rows)
        if axis < 0 or any(full is None for full in fulls) or len({full.ndim for full in fulls}) > 1:
            return None
        parts = [np.moveaxis(full, axis, 0) for full in fulls]
        if len({part.shape[1:] for part in parts}) > 1:
            return None
        n = len(self.positions)
        values, missing = np.zeros((n, *parts[0].shape[1:]), np.result_type(*parts)), np.ones(n, bool)
        for row, part in zip(rows, parts, strict=True):
            fed, places = self._places(row, len(part))
            values[places], missing[places] = part[fed], False
        return None if missing.all() else Whole(values, axis, np.flatnonzero(missing))

    def _places(self, row: Any, length: int) -> tuple[np.ndarray, np.ndarray]:
        """The tokens of a row that were fed last in its step, and their places in the text."""
        places = index_of(self.positions, row.first + np.arange(length))
        last = places >= 0
        last[last] = self.last_step[places[last]] == row.step
        return np.flatnonzero(last), places[last]


def _token_axis(rows: list[Any]) -> int:
    """The axis that counts tokens, -1 where there is none. Of as many tokens as heads one may have been taken for the
    other: other steps tell."""
    unclear = [math.prod(row.shape[1:3]) == 1 or (len(row.shape) == 4 and row.shape[1] == row.shape[2]) for row in rows]
    clear = {row.token_axis for row, either in zip(rows, unclear, strict=True) if not either}
    axes = clear or {row.token_axis for row in rows}
    return axes.pop() if len(axes) == 1 else -1


def _state(steps: Mapping[int, Mapping[str, Any]]) -> dict[int, tuple[int, int]]:
    """Return the last step and the token of each position that is in the state at the end."""
    state: dict[int, tuple[int, int]] = {}  # in the order of positions: only the last ones are taken back
    for number, step in sorted(steps.items()):
        first, ids = step["first_position"], step["token_ids"]
        while step["length"] and state and next(reversed(state)) >= first:
            state.popitem()
        for i in range(step["length"]):  # ids are not known where a model is given embeddings
            state[first + i] = (number, ids[i] if i < len(ids) else UNKNOWN)
    return state


def index_of(values: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Find the place of each wanted value in a sorted array; -1 where it is not."""
    places = np.searchsorted(values, wanted)
    return np.where(np.append(values, -1)[places] == wanted, places, -1)
