"""A trace: what one run of a set-up left, as two tables and arrays. Reading it needs no torch.

A folder holds `tensors.parquet`, `params.parquet`, `arrays.safetensors` and `facts.json`, written last and with the
digests of the others, so files that do not belong together are noticed.
"""

import hashlib
import io
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from specnb.divergence.tracing.sketch import TENSOR_K, TOKEN_K
from specnb.errors import InputError
from specnb.lm.bounded_json import read_bytes, read_json
from specnb.store import write_atomic

if TYPE_CHECKING:
    import pyarrow as pa

VERSION = 1
MAX_ROWS = 2_000_000
MAX_BYTES = 1 << 32
FACT_BYTES = 1 << 26
FACT_VALUES = 1 << 21

ROLES = ("in", "out", "state")

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

_ARRAY = re.compile(r"(0|[1-9][0-9]{0,11})\.(sketch|tokens|token_l2|full)")
_FILES = ("tensors.parquet", "params.parquet", "arrays.safetensors")


@dataclass(frozen=True)
class Trace:
    """`facts` (JSON), the tables of TENSOR_COLUMNS and PARAM_COLUMNS, and arrays by f"{row}.{what}".

    Arrays: `sketch` float32 (64,), `tokens` float32 (n_tokens, 16), `token_l2` float32 (n_tokens,), and `full`, the
    tensor itself, where it was asked for (bfloat16 as float32, which is exact).
    """

    facts: dict[str, Any]
    tensors: pd.DataFrame
    params: pd.DataFrame
    arrays: dict[str, np.ndarray]

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
        from safetensors.numpy import save

        folder = Path(folder)
        data = {
            "tensors.parquet": _to_parquet(self.tensors, TENSOR_COLUMNS, "tensors"),
            "params.parquet": _to_parquet(self.params, PARAM_COLUMNS, "params"),
            "arrays.safetensors": save({key: np.ascontiguousarray(value) for key, value in self.arrays.items()}),
        }
        sealed = {
            "version": VERSION,
            "sha256": {name: hashlib.sha256(value).hexdigest() for name, value in data.items()},
        }
        try:
            facts = json.dumps({"trace": sealed, "facts": self.facts}, allow_nan=False).encode()
        except (TypeError, ValueError) as error:
            raise InputError(f"the facts of a trace are stored as JSON, and these cannot be ({error})") from error
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
        data = {}
        for name in _FILES:
            data[name] = read_bytes(folder / name, MAX_BYTES)
            if hashlib.sha256(data[name]).hexdigest() != sealed.node("sha256").text(name):
                raise InputError(f"{folder / name} is not the file that facts.json was written with: capture it again")
        tensors = _from_parquet(data["tensors.parquet"], TENSOR_COLUMNS, folder / "tensors.parquet")
        params = _from_parquet(data["params.parquet"], PARAM_COLUMNS, folder / "params.parquet")
        _check_tensors(tensors, folder / "tensors.parquet")
        arrays = _arrays(data["arrays.safetensors"], tensors, folder / "arrays.safetensors")
        return cls(dict(root.node("facts").values), tensors, params, arrays)


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
    values = {name: frame[name].tolist() for name in columns}
    buffer = io.BytesIO()
    try:
        pq.write_table(pa.Table.from_pydict(values, schema=_schema(columns)), buffer)
    except (pa.ArrowException, TypeError, OverflowError) as error:
        raise InputError(f"the table {what} of a trace cannot be stored: {error}") from error
    return buffer.getvalue()


def _from_parquet(data: bytes, columns: Mapping[str, str], path: Path) -> pd.DataFrame:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(io.BytesIO(data))
        groups = range(file.metadata.num_row_groups)
        if (
            file.metadata.num_rows > MAX_ROWS
            or sum(file.metadata.row_group(i).total_byte_size for i in groups) > MAX_BYTES
        ):
            raise InputError(
                f"{path} has {file.metadata.num_rows} rows, more than a trace may have: capture fewer steps"
            )
        found = file.schema_arrow
        for field in _schema(columns):
            if field.name not in found.names or found.field(field.name).type != field.type:
                raise InputError(f"{path} has no column {field.name!r} of type {field.type}: it is no table of a trace")
        read = file.read(columns=list(columns)).to_pydict()
    except (pa.ArrowException, OSError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{path} is no parquet file that can be read ({error}): capture it again") from error
    for name, kind in columns.items():
        if any(value is None for value in read[name]):
            raise InputError(f"{path}: column {name!r} has an empty place: capture it again")
        if kind == "ints":
            read[name] = [tuple(value) for value in read[name]]
    return table([dict(zip(read, row, strict=True)) for row in zip(*read.values(), strict=True)], columns)


def _check_tensors(tensors: pd.DataFrame, path: Path) -> None:
    if not tensors["row"].is_unique or (tensors["row"] < 0).any():
        raise InputError(f"{path}: the keys in `row` are not unique and at least 0: capture it again")
    if strange := set(tensors["role"]) - set(ROLES):
        raise InputError(f"{path}: role {min(strange)!r}: it must be one of {', '.join(ROLES)}; capture it again")
    for row, shape, axis in zip(tensors["row"], tensors["shape"], tensors["token_axis"], strict=True):
        if any(size is None or size < 0 for size in shape) or not -1 <= axis < max(len(shape), 1):
            raise InputError(f"{path}: row {row} has shape {shape} and token_axis {axis}: capture it again")


def _arrays(data: bytes, tensors: pd.DataFrame, path: Path) -> dict[str, np.ndarray]:
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        arrays = load(data)
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise InputError(f"{path} is no safetensors file of numpy arrays ({error}): capture it again") from error
    shapes = dict(zip(tensors["row"], tensors["shape"], strict=True))
    for key, value in arrays.items():
        named = _ARRAY.fullmatch(key)
        if not named or int(named[1]) not in shapes:
            raise InputError(f"{path}: the array {key[:80]!r} belongs to no row of tensors.parquet: capture it again")
        if not _fits(named[2], value, shapes[int(named[1])], arrays.get(f"{named[1]}.token_l2")):
            raise InputError(
                f"{path}: {key} has shape {value.shape} and type {value.dtype}, or is not finite: capture it again"
            )
    return arrays


def _fits(what: str, value: np.ndarray, shape: tuple[int, ...], token_l2: np.ndarray | None) -> bool:
    if what == "full":
        return value.shape == shape
    if value.dtype != np.float32 or not np.isfinite(value).all():
        return False
    if what == "sketch":
        return value.shape == (TENSOR_K,)
    if what == "tokens":
        return token_l2 is not None and value.shape == (*token_l2.shape, TOKEN_K)
    return value.ndim == 1
