"""A trace: what one run of a set-up left, as two tables and arrays. Reading it needs no torch.

A folder holds `tensors.parquet`, `params.parquet`, `arrays.safetensors` and `facts.json`, written last and with the
digests of the others, so files that do not belong together are noticed.
"""

import hashlib
import io
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from specnb.divergence.tracing import packed
from specnb.divergence.tracing.bounded_parquet import read_table
from specnb.divergence.tracing.sketch import DIGEST
from specnb.errors import InputError
from specnb.io import write_atomic
from specnb.lm.bounded_json import read_bytes, read_json

if TYPE_CHECKING:
    import pyarrow as pa

VERSION = 2
MAX_ROWS = 2_000_000
MAX_BYTES = 1 << 32
TABLE_BYTES = 1 << 30
"""A table in memory: some 500 bytes for each of MAX_ROWS."""
FACT_BYTES = 1 << 26
FACT_VALUES = 1 << 21

ROLES = ("in", "out", "state")
TORCH = "torch"
"""The engine of traces whose facts name none."""

TENSOR_COLUMNS: dict[str, str] = {
    "row": "int64",
    "step": "int64",
    "module": "str",
    "kind": "str",
    "call": "int64",
    "order": "int64",
    "role": "str",
    "name": "str",
    "shape": "ints",
    "dtype": "str",
    "device": "str",
    "contiguous": "bool",
    "digest": "str",
    "mean": "float64",
    "std": "float64",
    "l1": "float64",
    "l2": "float64",
    "min": "float64",
    "max": "float64",
    "n_nan": "int64",
    "n_inf": "int64",
    "storage": "int64",
    "version": "int64",
    "token_axis": "int64",
    "first_position": "int64",
}
"""One row for each tensor seen. `order` counts events of the run: a module's inputs come before its outputs, inner
modules between them. `storage` and `version` tell buffers apart within this run only (version -1: unknown)."""

PARAM_COLUMNS: dict[str, str] = {
    "step": "int64",
    "module": "str",
    "call": "int64",
    "owner": "str",
    "owner_path": "str",
    "object_id": "int64",
    "digest": "str",
    "dtype": "str",
}
"""One row for each parameter that an operation read while a module ran; `owner` is "?" where no known model has it."""

_FILES = ("tensors.parquet", "params.parquet", "arrays.safetensors")


@dataclass(frozen=True)
class Trace:
    """`facts` (JSON), the tables of TENSOR_COLUMNS and PARAM_COLUMNS, and arrays by f"{row}.{what}".

    Arrays: `tokens` float32 (n_tokens, 16), `token_l2` float32 (n_tokens,), and `full`, the tensor itself, where it
    was asked for (bfloat16 as float32, which is exact). What has no tokens is told by its digest and statistics only.
    """

    facts: dict[str, Any]
    tensors: pd.DataFrame
    params: pd.DataFrame
    arrays: dict[str, np.ndarray]

    @property
    def engine(self) -> str:
        """What ran the model: only traces of one engine name the same things."""
        return self.facts.get("engine", TORCH)

    def rows(self, **where: object) -> pd.DataFrame:
        """The rows of `tensors` with these values, e.g. `rows(module="layers.0.mlp", role="out")`."""
        chosen = pd.Series(True, index=self.tensors.index)
        for column, value in where.items():
            if column not in self.tensors:
                raise InputError(f"no column {column!r} in the tensors of a trace: there are {', '.join(self.tensors)}")
            chosen &= self.tensors[column] == value
        return self.tensors[chosen]

    def array(self, row: int, what: str) -> np.ndarray | None:
        """The array `what` of a row, None where it has none (a tensor without tokens, or not kept in full)."""
        return self.arrays.get(f"{row}.{what}")

    def save(self, folder: Path) -> Path:
        """Write the trace into `folder` (made if missing) and return it. InputError for what cannot be stored."""
        folder = Path(folder)
        data = {
            "tensors.parquet": _to_parquet(self.tensors, TENSOR_COLUMNS, "tensors"),
            "params.parquet": _to_parquet(self.params, PARAM_COLUMNS, "params"),
            "arrays.safetensors": packed.to_bytes(self.arrays, MAX_BYTES),
        }
        sealed = {
            "version": VERSION,
            "digest": DIGEST,
            "sha256": {name: hashlib.sha256(value).hexdigest() for name, value in data.items()},
        }
        try:
            facts = json.dumps({"trace": sealed, "facts": self.facts}, allow_nan=False).encode()
        except (TypeError, ValueError) as error:
            raise InputError(f"the facts of a trace are stored as JSON, and these cannot be ({error})") from error
        if len(facts) > FACT_BYTES:
            raise InputError(
                f"the facts of a trace take {len(facts)} bytes, more than the {FACT_BYTES} that can be stored: "
                "capture fewer steps"
            )
        folder.mkdir(parents=True, exist_ok=True)
        for name, value in data.items():
            write_atomic(folder / name, value)
        write_atomic(folder / "facts.json", facts)
        return folder

    @classmethod
    def load(cls, folder: Path) -> "Trace":
        """The trace that `save` wrote. InputError names the file that is missing, damaged, or of another trace."""
        folder = Path(folder)
        root = read_json(folder / "facts.json", FACT_BYTES, FACT_VALUES)
        sealed = root.node("trace")
        if (version := sealed.count("version", 1 << 31)) != VERSION:
            raise InputError(
                f"{root.path} is a trace of version {version}; this specnb reads {VERSION}: capture it again"
            )
        if (digest := sealed.text("digest")) != DIGEST:
            raise InputError(
                f"{root.path}: the digests of this trace are made by {digest!r}, those of this specnb by {DIGEST!r}: "
                "they cannot be compared, capture it again"
            )
        data = {}
        for name in _FILES:
            data[name] = read_bytes(folder / name, MAX_BYTES)
            if hashlib.sha256(data[name]).hexdigest() != sealed.node("sha256").text(name):
                raise InputError(f"{folder / name} is not the file that facts.json was written with: capture it again")
        tensors = _from_parquet(data.pop("tensors.parquet"), TENSOR_COLUMNS, folder / "tensors.parquet")
        params = _from_parquet(data.pop("params.parquet"), PARAM_COLUMNS, folder / "params.parquet")
        _check_tensors(tensors, folder / "tensors.parquet")
        shapes = dict(zip(tensors["row"], tensors["shape"], strict=True))
        arrays = packed.from_bytes(data["arrays.safetensors"], shapes, folder / "arrays.safetensors")
        return cls(_checked(root.node("facts").values, folder / "facts.json"), tensors, params, arrays)


def table(rows: list[Mapping[str, Any]], columns: Mapping[str, str]) -> pd.DataFrame:
    """Rows as a table with exactly these columns and types; shapes are tuples."""
    kinds = {"str": "object", "ints": "object"}
    frame = pd.DataFrame(rows, columns=list(columns))
    return frame.astype({name: kinds.get(kind, kind) for name, kind in columns.items()})


def _schema(columns: Mapping[str, str]) -> "pa.Schema":
    import pyarrow as pa

    types = {"str": pa.string(), "ints": pa.list_(pa.int64()), "int64": pa.int64(), "float64": pa.float64()}
    types["bool"] = pa.bool_()
    return pa.schema([pa.field(name, types[kind], nullable=False) for name, kind in columns.items()])


def _to_parquet(frame: pd.DataFrame, columns: Mapping[str, str], what: str) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    if missing := [name for name in columns if name not in frame]:
        raise InputError(f"the table {what} of a trace has no column {missing[0]!r}: it needs {', '.join(columns)}")
    if len(frame) > MAX_ROWS:
        raise InputError(
            f"the table {what} of a trace has {len(frame)} rows, more than the {MAX_ROWS} that can be stored: "
            "capture fewer steps, or fewer modules"
        )
    values = {name: frame[name].tolist() for name in columns}
    buffer = io.BytesIO()
    try:
        pq.write_table(pa.Table.from_pydict(values, schema=_schema(columns)), buffer)
    except (pa.ArrowException, TypeError, OverflowError) as error:
        raise InputError(f"the table {what} of a trace cannot be stored: {error}") from error
    return buffer.getvalue()


def _from_parquet(data: bytes, columns: Mapping[str, str], path: Path) -> pd.DataFrame:
    read = read_table(data, path, _schema(columns), rows=MAX_ROWS, memory=TABLE_BYTES, again="capture it again")
    frame = {}
    for name, kind in columns.items():
        if kind in ("str", "ints"):
            values = read[name].to_pylist()
            frame[name] = pd.Series([tuple(value) for value in values] if kind == "ints" else values, dtype=object)
        else:
            frame[name] = read[name].to_numpy()
    return pd.DataFrame(frame)


def _checked(facts: Mapping[str, Any], path: Path) -> dict[str, Any]:
    for name in ("engine", "tag", "dtype"):
        if not isinstance(facts.get(name), str | None):
            raise InputError(f"{path}: {name} is {facts[name]!r:.80}, not a name: capture it again")
    return dict(facts)


def _check_tensors(tensors: pd.DataFrame, path: Path) -> None:
    if not tensors["row"].is_unique or (tensors["row"] < 0).any():
        raise InputError(f"{path}: the keys in `row` are not unique and at least 0: capture it again")
    if strange := set(tensors["role"]) - set(ROLES):
        raise InputError(f"{path}: role {min(strange)!r}: it must be one of {', '.join(ROLES)}; capture it again")
    for row, shape, axis in zip(tensors["row"], tensors["shape"], tensors["token_axis"], strict=True):
        if any(size is None or size < 0 for size in shape) or not -1 <= axis < max(len(shape), 1):
            raise InputError(f"{path}: row {row} has shape {shape} and token_axis {axis}: capture it again")
