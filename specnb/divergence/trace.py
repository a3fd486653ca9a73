"""A trace: what one run of a set-up left, as two tables and arrays. Reading it needs no torch.

A folder holds `tensors.parquet`, `params.parquet`, `arrays.safetensors` and, written last, the facts in `trace.json`.
Modules have the same path whichever wrappers of one model a run goes through (`canonical`); whoever reads a trace
applies `rename_all` alone. An `Alignment` is a trace in the order of its text.
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

TENSOR_COLUMNS = ("step", "module", "kind", "call", "order", "role", "name", "shape", "dtype", "digest",
                  "holder", "holder_call")  # fmt: skip
"""One row for each tensor seen. `order` counts events of the run: a module's inputs come before its outputs, inner
modules between them. `holder` is the module inside which it ran, and `holder_call` that one's call; -1: in none."""

PARAM_COLUMNS = ("step", "module", "call", "owner", "owner_path", "digest", "dtype")
"""One row for each parameter that an operation read while a module ran."""
OWN, NEIGHBOUR, UNKNOWN = "draft", "neighbour", "?"
"""Owners of parameters: the two models of a set-up, and whoever else has one."""


class Key(NamedTuple):
    """One tensor of a module's call."""

    module: str
    call: int
    role: str
    name: str


@dataclass(frozen=True)
class ModuleTrace:
    """`facts` (JSON), the tables of TENSOR_COLUMNS and PARAM_COLUMNS, and arrays by digest.

    An array is the tensor as it was (bfloat16 as float32, exactly), and is there once, however many modules handed it
    on.
    """

    facts: dict[str, Any]
    tensors: pd.DataFrame
    params: pd.DataFrame
    arrays: dict[str, np.ndarray]

    def rows(self, **where: object) -> pd.DataFrame:
        """The rows of `tensors` with these values, e.g. `rows(module="layers.0.mlp", role="out")`."""
        return self.tensors[np.logical_and.reduce([self.tensors[name] == value for name, value in where.items()])]

    def save(self, folder: Path) -> Path:
        """Write the trace into `folder`, and return that."""
        write_atomic(folder / TENSORS, self.tensors.to_parquet())
        write_atomic(folder / PARAMS, self.params.to_parquet())
        write_atomic(folder / ARRAYS, safetensors.save(self.arrays))
        write_atomic(folder / FACTS, json.dumps({"format": FORMAT, "facts": self.facts}).encode())
        return folder

    @classmethod
    def load(cls, folder: Path) -> "ModuleTrace":
        """The trace that `save` wrote. InputError for one with a file missing or damaged, or of another format."""
        facts = read_facts(folder)
        with reading(folder):
            tensors, params = (pd.read_parquet(folder / name) for name in (TENSORS, PARAMS))
            arrays = safetensors.load_file(folder / ARRAYS)
        return cls(facts, tensors.assign(shape=tensors["shape"].map(tuple)), params, arrays)


def read_facts(folder: Path) -> dict[str, Any]:
    """The `facts` of a trace in a folder. Raises InputError."""
    content = read_json(folder / FACTS)
    if content.get("format") != FORMAT:
        raise InputError(f"{folder} is of format {content.get('format')}, expected {FORMAT}: capture it again")
    return content["facts"]


def canonical(paths: Iterable[str]) -> dict[str, str]:
    """`canonical_name` of all modules of one model; those that would have one name in common keep theirs."""
    short = {path: canonical_name(path) for path in paths}
    shared = Counter(short.values())
    return {path: path if shared[name] > 1 else name for path, name in short.items()}


def canonical_name(path: str) -> str:
    """A path without leading `model.` or `draft_model.`."""
    return re.sub(r"^((model|draft_model)\.)+", "", path)


def rename_all(names: Iterable[str], rename: Mapping[str, str]) -> dict[str, str]:
    """Each name with the expressions of `rename` replaced. InputError for a wrong one, and where two become one."""
    after = {name: name for name in names}
    for pattern, by in rename.items():
        try:
            after = {name: re.sub(pattern, by, new) for name, new in after.items()}
        except (re.error, IndexError) as error:
            raise InputError(f"rename {pattern!r} to {by!r} does not work ({error}): give re.sub's two") from error
    if len({*after.values()}) < len(after):
        raise InputError(f"`rename` {dict(rename)} makes one name of two: keep them apart")
    return after


# --- one offset of all positions --------------------------------------------------------------------------------------

TURNED_ALIKE = 3e-2
"""The most that turns of angles may be apart: bfloat16 rounds each of four cosines and sines by up to 2**-9."""


def find_turned(module: str, pairs: Mapping[Key, tuple[np.ndarray, np.ndarray]]) -> list[Key]:
    """Return what a rotary module gives, if two runs' angles differ by the same turn at every token, else nothing.

    Such a turn is one offset of all positions.

    `pairs` are tensors `(tokens, …)` of the two runs. Angles are cosines and sines, or both in one complex tensor.
    """
    keys = [key for name in ("out", "out.1") if (key := Key(module, 0, "out", name)) in pairs]
    if len({angles.shape for key in keys for angles in pairs[key]}) != 1:
        return []
    runs = zip(*(pairs[key] for key in keys), strict=True)
    phases = [angles[0] if len(angles) == 1 else angles[0].astype(float) + 1j * angles[1] for angles in runs]
    if not len(phases[0]) or not all(map(np.iscomplexobj, phases)):
        return []
    turn = phases[1] * phases[0].conj() / np.abs(phases[0]) ** 2
    # of length 1, too: longer cosines and sines would scale every product of a query and a key
    off = max(np.abs(turn - turn[:1]).max(), np.abs(np.abs(turn) - 1).max())
    return keys if off < TURNED_ALIKE < np.abs(turn[:1] - 1).max() else []


# --- a trace in the order of its text: steps of one token, blocks and what was taken back come out alike --------------
# Steps may be cut otherwise (a prefill against steps of one token), and cache slots may lie elsewhere: that is not
# compared. A step that starts at position p forgets all that was fed from p on, so what was fed last counts.

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
        return self.values.reshape(len(self.values), -1)

    @property
    def discrete(self) -> bool:
        return self.values.dtype.kind in "iub"


class Alignment:
    """A trace in the order of its text.

    `firsts`: where steps start, in place of what the run itself thought. `positions` (n,) are those in the state at the
    end, `last_step` (n,) in which step each was fed, `tokens` (n,).
    """

    def __init__(
        self, trace: ModuleTrace, rename: Mapping[str, str] | None = None, firsts: Sequence[int] | None = None
    ) -> None:
        self.trace, self.rename = trace, rename or {}
        self.names = rename_all(trace.tensors["module"].unique(), self.rename)
        """The paths of modules, by those that the capture wrote."""
        self.steps = trace.facts["steps"]
        if firsts:
            self.steps = [step | {"first_position": first} for step, first in zip(self.steps, firsts, strict=True)]
        state = _state(self.steps)
        self.positions = np.array([*state], np.int64)
        self.last_step, self.tokens = np.array([*state.values()], np.int64).reshape(-1, 2).T

    @cached_property
    def rows(self) -> dict[Key, list[Any]]:
        """The rows of each key, in the order of the run: those of `trace.tensors`, except states."""
        rows = self.trace.tensors[self.trace.tensors["role"] != "state"]
        rows = rows.assign(module=rows["module"].map(self.names), holder=rows["holder"].map(self.names))
        by_key = defaultdict(list)
        for row in rows.itertuples(index=False):
            by_key[Key(row.module, row.call, row.role, row.name)].append(row)
        return by_key

    @cached_property
    def whole(self) -> dict[Key, Whole]:
        """The tensors that have tokens: not those without a token axis, or of shapes that differ (masks)."""
        return {key: whole for key, rows in self.rows.items() if (whole := self._whole(rows)) is not None}

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
            last = np.append(self.last_step, -1)[places] == row.step
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
        axes = (axis for axis in range(start, n) if all(shape[axis] == length for shape, length in lengths))
        # of a prompt a head may be given the last token only
        last_only = n in (2, 3) and all({*row.shape[:-1]} == {1} for row in rows)
        return next(axes, n - 2 if last_only else None)


def _state(steps: Sequence[Mapping[str, Any]]) -> dict[int, tuple[int, int]]:
    """Return the last step and the token of each position that is in the state at the end, in order."""
    state = {}
    for number, step in enumerate(steps):
        first, n = step["first_position"], step["length"]
        while n and state and next(reversed(state)) >= first:  # only the last ones are taken back
            state.popitem()
        ids = step["token_ids"] or [UNKNOWN_ID] * n  # not known where a model is given embeddings
        state |= {first + i: (number, ids[i]) for i in range(n)}
    return state


def index_of(values: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Find the place of each wanted value in a sorted array; -1 where it is not."""
    places = np.searchsorted(values, wanted)
    return np.where(np.append(values, -1)[places] == wanted, places, -1)
