"""A trace: what one run of a set-up left, as two tables and arrays. Reading it needs no torch.

A folder holds `tensors.safetensors` and, written last, `events.jsonl`: a line of facts, then a row of a table a line.
Modules have the same path whichever wrappers of one model a run goes through (`canonical`); whoever reads a trace
applies `rename_all` alone.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from specnb.errors import InputError
from specnb.io import reading, write_atomic

FORMAT = 6
DIGEST = "xxh3-128"
"""How digests are made: those of two algorithms cannot be compared."""
TOKEN_K = 16
"""Numbers in the sketch of a token."""
EVENTS, ARRAYS = "events.jsonl", "tensors.safetensors"

TENSOR_COLUMNS: dict[str, str] = {
    "row": "int64", "step": "int64", "module": "str", "kind": "str", "call": "int64", "order": "int64", "role": "str",
    "name": "str", "shape": "ints", "dtype": "str", "digest": "str", "token_axis": "int64", "first_position": "int64",
    "holder": "str", "holder_call": "int64",
}  # fmt: skip
"""One row for each tensor seen. `order` counts events of the run: a module's inputs come before its outputs, inner
modules between them. `holder` is the module inside which it ran, and `holder_call` that one's call; -1: in none."""

PARAM_COLUMNS: dict[str, str] = {
    "step": "int64", "module": "str", "call": "int64", "owner": "str", "owner_path": "str", "object_id": "int64",
    "digest": "str", "dtype": "str",
}  # fmt: skip
"""One row for each parameter that an operation read while a module ran; `owner` is "?" where no known model has it."""


class Key(NamedTuple):
    """One tensor of a module's call."""

    module: str
    call: int
    role: str
    name: str


@dataclass(frozen=True)
class ModuleTrace:
    """`facts` (JSON), the tables of TENSOR_COLUMNS and PARAM_COLUMNS, and arrays by f"{row}.{what}".

    Arrays: `tokens` float32 (n_tokens, 16), `token_l2` float32 (n_tokens,), and `full`, the tensor itself, of
    routers, rotary embeddings and where it was asked for (bfloat16 as float32, exactly). What has no tokens is told by
    its digest.
    """

    facts: dict[str, Any]
    tensors: pd.DataFrame
    params: pd.DataFrame
    arrays: dict[str, np.ndarray]

    def rows(self, **where: object) -> pd.DataFrame:
        """The rows of `tensors` with these values, e.g. `rows(module="layers.0.mlp", role="out")`."""
        return self.tensors[np.logical_and.reduce([self.tensors[name] == value for name, value in where.items()])]

    def array(self, row: int, part: str) -> np.ndarray | None:
        """The array `part` of a row, None where it has none (a tensor without tokens, or not kept in full)."""
        return self.arrays.get(f"{row}.{part}")

    def save(self, folder: Path) -> Path:
        """Write the trace into `folder`, and return that."""
        from safetensors.numpy import save

        tables = self.tensors, self.params
        header = {"format": FORMAT, "digest": DIGEST, "rows": [len(frame) for frame in tables], "facts": self.facts}
        lines = [json.dumps(header, allow_nan=False)]
        for frame in tables:
            lines += map(json.dumps, zip(*(frame[name].tolist() for name in frame), strict=True))
        stored = save({name: np.asarray(value, order="C") for name, value in _packed(self.arrays).items()})
        write_atomic(Path(folder) / ARRAYS, stored)
        write_atomic(Path(folder) / EVENTS, "\n".join([*lines, ""]).encode())
        return Path(folder)

    @classmethod
    def load(cls, folder: Path) -> "ModuleTrace":
        """The trace that `save` wrote. InputError names the file that is missing, damaged, or of another format."""
        from safetensors.numpy import load_file

        header, events, stored = read_facts(folder), Path(folder) / EVENTS, Path(folder) / ARRAYS
        with reading(events):
            lines, middle = events.read_text("utf-8").splitlines()[1:], header["rows"][0]
            rows = [json.loads(line) for line in lines]
            tensors, params = make_table(rows[:middle], TENSOR_COLUMNS), make_table(rows[middle:], PARAM_COLUMNS)
            tensors["shape"] = tensors["shape"].map(tuple)
        with reading(stored):
            arrays = _unpacked(load_file(stored))
        return cls(header["facts"], tensors, params, arrays)


def read_facts(folder: Path) -> dict[str, Any]:
    """The first line of a trace in a folder: its `facts`, and what they are stored as. Raises InputError."""
    path = Path(folder) / EVENTS
    with reading(path), path.open(encoding="utf-8") as file:
        header = json.loads(file.readline())
        kind = header["format"], header["digest"]
    if kind != (FORMAT, DIGEST):
        raise InputError(f"{path} is of {kind}; this specnb reads {(FORMAT, DIGEST)}: capture it again")
    return header


def make_table(rows: list[Any], columns: Mapping[str, str]) -> pd.DataFrame:
    """Rows, by name or in the order of the columns, as a table with exactly these columns and types."""
    kinds = {"str": "object", "ints": "object"}
    frame = pd.DataFrame(rows, columns=list(columns), dtype=object)  # pandas would make text another type, and back
    return frame.astype({name: kinds.get(kind, kind) for name, kind in columns.items()})


def _packed(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The arrays as they are stored: what every row has lies end to end, for a header cannot name a million of them."""
    rows = sorted(int(key.removesuffix(".tokens")) for key in arrays if key.endswith(".tokens"))
    tokens, norms = ([arrays[f"{row}.{part}"] for row in rows] for part in ("tokens", "token_l2"))
    return {key: value for key, value in arrays.items() if key.endswith(".full")} | {
        "rows": np.array(rows, np.int64),
        "counts": np.array([*map(len, norms)], np.int64),
        "tokens": np.concatenate([np.zeros((0, TOKEN_K), np.float32), *tokens]),
        "token_l2": np.concatenate([np.zeros(0, np.float32), *norms]),
    }


def _unpacked(stored: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Undo `_packed`; parts of one array are views of it."""
    packed = {name: stored.pop(name) for name in ("tokens", "token_l2")}
    rows, ends = stored.pop("rows").tolist(), stored.pop("counts").cumsum().tolist()
    for row, start, end in zip(rows, [0, *ends], ends, strict=False):
        stored |= {f"{row}.{name}": values[start:end] for name, values in packed.items()}
    return stored


PREFIX = re.compile(r"^(?:(?:model|draft_model)\.)+")


def canonical(paths: Iterable[str]) -> dict[str, str]:
    """`canonical_name` of all modules of one model; those that would have one name in common keep theirs."""
    short = {path: canonical_name(path) for path in paths}
    shared = Counter(short.values())
    return {path: path if shared[name] > 1 else name for path, name in short.items()}


def canonical_name(path: str, rename: Mapping[str, str] | None = None) -> str:
    """A path without leading `model.` or `draft_model.`, then `rename`d. Raises InputError for a wrong expression."""
    return _renamed(PREFIX.sub("", path), rename)


def rename_all(names: Iterable[str], rename: Mapping[str, str] | None) -> dict[str, str]:
    """Each name with the expressions of `rename` replaced. InputError where two names become one."""
    names_after = {name: _renamed(name, rename) for name in names}
    back: dict[str, str] = {}
    for name, new in names_after.items():
        if back.setdefault(new, name) != name:
            raise InputError(f"`rename` makes {new!r} of {back[new]!r} and of {name!r}: keep them apart")
    return names_after


def _renamed(name: str, rename: Mapping[str, str] | None) -> str:
    for pattern, by in (rename or {}).items():
        try:
            name = re.sub(pattern, by, name)
        except (re.error, IndexError, TypeError) as error:
            raise InputError(f"rename {pattern!r} to {by!r} does not work ({error}): give re.sub's two") from error
    return name
