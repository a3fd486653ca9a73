"""The trace of one captured run: two tables and arrays. Reading it needs no torch.

A folder contains `tensors.parquet`, `params.parquet`, `arrays.safetensors` and, written last,
`trace.json` with the facts. The path of a module does not depend on wrappers of the model
(`canonical`); readers only apply `rename_all`. An `Alignment` orders a trace by token position.
"""

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from safetensors import numpy as safetensors

from specnb.errors import InputError
from specnb.io import read_json, reading, write_atomic

FORMAT = 7
FACTS = "trace.json"
TENSORS, PARAMS, ARRAYS = "tensors.parquet", "params.parquet", "arrays.safetensors"

TENSOR_COLUMNS = (
    "step",
    "module",
    "kind",
    "call",
    "order",
    "role",
    "name",
    "shape",
    "dtype",
    "digest",
    "holder",
    "holder_call",
)
"""One row per captured tensor.

`order` counts the events of a run: the inputs of a module, its inner modules, then its outputs.
`holder` is the containing module and `holder_call` the index of its call, -1 if there is none.
"""

PARAM_COLUMNS = ("step", "module", "call", "owner", "owner_path", "digest", "dtype")
"""One row per parameter that an operation read while a module ran."""
OWN, NEIGHBOR, UNKNOWN = "draft", "neighbour", "?"  # as in stored traces and notebooks
"""Owners of parameters: the draft, its neighbor, or neither."""


class Key(NamedTuple):
    """One tensor of a module call; `role` is "in", "out" or "state"."""

    module: str
    call: int
    role: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}:{self.role}:{self.name}" + (f"#{self.call}" if self.call else "")


@dataclass(frozen=True)
class ModuleTrace:
    """Facts (JSON values), the tables of TENSOR_COLUMNS and PARAM_COLUMNS, and arrays by digest.

    An array has the values of a tensor (bfloat16 becomes float32, exactly). It is stored once, even
    if several modules pass it on.
    """

    facts: dict[str, Any]
    tensors: pd.DataFrame
    params: pd.DataFrame
    arrays: dict[str, np.ndarray]

    def rows(self, **where: object) -> pd.DataFrame:
        """Return the rows with these values, e.g. `rows(module="layers.0.mlp", role="out")`."""
        return self.tensors[
            np.logical_and.reduce([self.tensors[name] == value for name, value in where.items()])
        ]

    def save(self, folder: Path) -> Path:
        """Write the trace to `folder`; return the folder."""
        write_atomic(folder / TENSORS, self.tensors.to_parquet())
        write_atomic(folder / PARAMS, self.params.to_parquet())
        write_atomic(folder / ARRAYS, safetensors.save(self.arrays))
        write_atomic(folder / FACTS, json.dumps({"format": FORMAT, "facts": self.facts}).encode())
        return folder

    @classmethod
    def load(cls, folder: Path) -> "ModuleTrace":
        """Read a trace. Raises InputError for a missing or damaged file, or another format."""
        facts = read_facts(folder)
        with reading(folder):
            tensors, params = (pd.read_parquet(folder / name) for name in (TENSORS, PARAMS))
            arrays = safetensors.load_file(folder / ARRAYS)
        return cls(facts, tensors.assign(shape=tensors["shape"].map(tuple)), params, arrays)


def read_facts(folder: Path) -> dict[str, Any]:
    """Read the facts of a trace folder. Raises InputError as `ModuleTrace.load`."""
    content = read_json(folder / FACTS)
    if content.get("format") != FORMAT:
        raise InputError(
            f"{folder}: got format {content.get('format')}, expected {FORMAT}: capture it again"
        )
    return content["facts"]


def canonical(paths: Iterable[str]) -> dict[str, str]:
    """Map each path to its `canonical_name`, or to itself if names would collide."""
    short = {path: canonical_name(path) for path in paths}
    shared = Counter(short.values())
    return {path: path if shared[name] > 1 else name for path, name in short.items()}


def canonical_name(path: str) -> str:
    """Return a path without its leading `model.` and `draft_model.` parts."""
    return re.sub(r"^((model|draft_model)\.)+", "", path)


def rename_all(names: Iterable[str], rename: Mapping[str, str]) -> dict[str, str]:
    """Apply the regular expressions of `rename`. Raises InputError for errors and collisions."""
    after = {name: name for name in names}
    for pattern, by in rename.items():
        try:
            after = {name: re.sub(pattern, by, new) for name, new in after.items()}
        except (re.error, IndexError) as error:
            raise InputError(
                f"got rename {pattern!r} to {by!r}, expected arguments of re.sub: {error}"
            ) from error
    if len({*after.values()}) < len(after):
        raise InputError(
            f"rename {dict(rename)} gives two modules the same name: make them distinct"
        )
    return after


# --- a constant offset of all positions -----------------------------------------------------------

TURNED_ALIKE = 3e-2
"""Tolerance for equal rotations: bfloat16 rounds four cosines and sines by up to 2**-9 each."""


def find_offset(pairs: Mapping[Key, tuple[np.ndarray, np.ndarray]]) -> set[Key]:
    """Return keys of rotary outputs and position inputs if all positions differ by a constant.

    The angles of a rotary module then differ by the same rotation at all tokens. `pairs` has the
    tensors `(tokens, …)` of two runs.
    """
    given = {
        key
        for key, (a, _) in pairs.items()
        if key.role == "in" and "position" in key.name and a.dtype.kind in "iu"
    }
    modules = {key.module for key in given}
    angles = defaultdict(list)
    for key in pairs:
        if key.module in modules and key.role == "out" and key.name in ("out", "out.1"):
            angles[key.module, key.call].append(key)
    turned = {
        key
        for keys in angles.values()
        if _turned_alike([pairs[key] for key in keys])
        for key in keys
    }
    return turned | given if turned else set()


def _turned_alike(outputs: Sequence[tuple[np.ndarray, np.ndarray]]) -> bool:
    """Return whether angles, as cosines and sines or complex, differ by one rotation."""
    if len({values.shape for pair in outputs for values in pair}) != 1:
        return False
    runs = zip(*outputs, strict=True)
    phases = [
        angles[0] if len(angles) == 1 else angles[0].astype(float) + 1j * angles[1]
        for angles in runs
    ]
    if not len(phases[0]) or not all(map(np.iscomplexobj, phases)):
        return False
    turn = phases[1] * phases[0].conj() / np.abs(phases[0]) ** 2
    # The rotation must have modulus 1: scaled cosines and sines would scale the attention scores.
    off = max(np.abs(turn - turn[:1]).max(), np.abs(np.abs(turn) - 1).max())
    return off < TURNED_ALIKE < np.abs(turn[:1] - 1).max()


# --- a trace in token order, whatever its steps ---------------------------------------------------
# Two runs may split the text into different steps (one prefill, or single tokens) and use different
# cache slots; neither is compared. A step that starts at position p discards everything from p on,
# so the last forward pass over a position counts.

UNKNOWN_ID = -1
"""The id of a token that was not recorded."""


class Whole(NamedTuple):
    """A tensor at all positions: `values` `(tokens, …)`; `axis`: the original token axis.

    `gaps`: indices of tokens for which nothing was computed (zero in `values`). `dtype`: that of
    the first row.
    """

    values: np.ndarray
    axis: int
    gaps: np.ndarray
    dtype: str

    @property
    def features(self) -> np.ndarray:
        """`values` as `(tokens, features)`."""
        return self.values.reshape(len(self.values), -1)

    @property
    def discrete(self) -> bool:
        return self.values.dtype.kind in "iub"


class Alignment:
    """A trace in token order.

    `firsts`: start positions of the steps, to replace those that the run assumed. `text`: tokens in
    the final state, to replace those that the run was fed. `positions`, `tokens` and `last_step`,
    in which a position was fed last, are (n,) for the final state.
    """

    def __init__(
        self,
        trace: ModuleTrace,
        rename: Mapping[str, str] | None = None,
        firsts: Sequence[int] | None = None,
        text: Sequence[int] | None = None,
    ) -> None:
        self.trace = trace
        self.rename = rename or {}
        self.names = rename_all(trace.tensors["module"].unique(), self.rename)
        """Renamed paths of modules, by captured path."""
        self.steps = trace.facts["steps"]
        if firsts:
            self.steps = [
                step | {"first_position": first}
                for step, first in zip(self.steps, firsts, strict=True)
            ]
        state = _state(self.steps)
        self.positions = np.array([*state], np.int64)
        self.last_step, self.tokens = np.array([*state.values()], np.int64).reshape(-1, 2).T
        if text is not None:  # drop the last rollback's tokens
            self.positions = self.positions[: len(text)]
            self.last_step = self.last_step[: len(text)]
            self.tokens = np.array(text)

    @cached_property
    def rows(self) -> dict[Key, list[Any]]:
        """The rows of `trace.tensors` by key, in run order, without states."""
        rows = self.trace.tensors[self.trace.tensors["role"] != "state"]
        rows = rows.assign(
            module=rows["module"].map(self.names), holder=rows["holder"].map(self.names)
        )
        by_key = defaultdict(list)
        for row in rows.itertuples(index=False):
            by_key[Key(row.module, row.call, row.role, row.name)].append(row)
        return by_key

    @cached_property
    def whole(self) -> dict[Key, Whole]:
        """The tensors with a token axis and the same other axes in all steps (excludes masks)."""
        return {
            key: whole
            for key, rows in self.rows.items()
            if (whole := self._whole(rows)) is not None
        }

    def _whole(self, rows: list[Any]) -> Whole | None:
        if (axis := self._token_axis(rows)) is None:
            return None
        parts = [np.moveaxis(self.trace.arrays[row.digest], axis, 0) for row in rows]
        if len({part.shape[1:] for part in parts}) > 1:
            return None
        n = len(self.positions)
        values = np.zeros((n, *parts[0].shape[1:]), np.result_type(*parts))
        missing = np.ones(n, bool)
        for row, part in zip(rows, parts, strict=True):
            step = self.steps[row.step]  # a tensor may have only the step's last tokens
            places = index_of(
                self.positions, step["first_position"] + np.arange(-len(part), 0) + step["length"]
            )
            last = np.append(self.last_step, -1)[places] == row.step
            values[places[last]], missing[places[last]] = part[last], False
        return (
            None if missing.all() else Whole(values, axis, np.flatnonzero(missing), rows[0].dtype)
        )

    def _token_axis(self, rows: list[Any]) -> int | None:
        """Return the first axis after the batch that is as long as the step, in every step.

        None if there is none. If every step has as many tokens as heads, it is the outer axis.
        """
        n = len(rows[0].shape)
        if {len(row.shape) for row in rows} != {n}:
            return None
        start = int(n > 1 and all(row.shape[0] == 1 for row in rows))
        lengths = [(row.shape, self.steps[row.step]["length"]) for row in rows]
        axes = (
            axis
            for axis in range(start, n)
            if all(shape[axis] == length for shape, length in lengths)
        )
        # An output head may get only the last token of a prompt.
        last_only = n in (2, 3) and all({*row.shape[:-1]} == {1} for row in rows)
        return next(axes, n - 2 if last_only else None)


def _state(steps: Sequence[Mapping[str, Any]]) -> dict[int, tuple[int, int]]:
    """Return the last step and the token of each position in the final state, in order."""
    state = {}
    for number, step in enumerate(steps):
        first = step["first_position"]
        n = step["length"]
        while n and state and next(reversed(state)) >= first:  # rolled back
            state.popitem()
        ids = step["token_ids"] or [UNKNOWN_ID] * n  # unknown if the model is fed embeddings
        state |= {first + i: (number, ids[i]) for i in range(n)}
    return state


def index_of(values: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Return the index of each wanted value in a sorted array; -1 if it is absent."""
    places = np.searchsorted(values, wanted)
    return np.where(np.append(values, -1)[places] == wanted, places, -1)
