"""The arrays of a trace in one safetensors file: what every row has lies end to end, not as an entry of its own.

The header of such a file is limited to 100 MB, which the rows of an ordinary generation would fill. Entries: `tokens`
float32 (n, 16) and `token_l2` float32 (n,), of all rows one after the other; `rows` int64 (m,), rising, whose they are,
and `counts` int64 (m,), how many each has; and `{row}.full` for each tensor that was kept itself.
"""

import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from specnb.divergence.tracing.sketch import TOKEN_K
from specnb.errors import InputError

ROW_DIGITS = 12
_FULL = re.compile(rf"(0|[1-9][0-9]{{0,{ROW_DIGITS - 1}}})\.full")
_PACKED = {
    "tokens": (np.float32, (TOKEN_K,)),
    "token_l2": (np.float32, ()),
    "rows": (np.int64, ()),
    "counts": (np.int64, ()),
}
"""Type of each packed entry, and its shape behind the first axis."""


def to_bytes(arrays: Mapping[str, np.ndarray], limit: int) -> bytes:
    """The file for arrays by f"{row}.{what}". InputError for a key or an array that a trace has not, for more than
    `limit` bytes, and for what safetensors cannot hold."""
    from safetensors import SafetensorError
    from safetensors.numpy import save

    if (size := sum(value.nbytes for value in arrays.values())) > limit:
        raise InputError(
            f"the arrays of this trace have {size} bytes, more than {limit}: keep fewer tensors in full, "
            "or capture fewer steps"
        )
    stored = _pack(arrays)
    try:
        return save({name: np.asarray(value, order="C") for name, value in stored.items()})
    except (SafetensorError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise InputError(
            f"the arrays of this trace cannot be stored as safetensors ({error}): keep fewer tensors in full"
        ) from error


def from_bytes(data: bytes, shapes: Mapping[int, tuple[int, ...]], path: Path) -> dict[str, np.ndarray]:
    """The arrays that `to_bytes` stored, as views of the packed ones; `shapes`: of the tensor behind each row.

    InputError, with the `path`, for what is no such file or does not belong to these rows.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        stored = load(data)
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise InputError(f"{path} is no safetensors file of numpy arrays ({error}): capture it again") from error
    packed = {name: stored.pop(name, None) for name in _PACKED}
    _check_packed(packed, shapes, path)
    arrays: dict[str, np.ndarray] = {}
    tokens, norms, start = packed["tokens"], packed["token_l2"], 0
    for row, count in zip(packed["rows"].tolist(), packed["counts"].tolist(), strict=True):
        arrays[f"{row}.tokens"], arrays[f"{row}.token_l2"] = tokens[start : start + count], norms[start : start + count]
        start += count
    for key, value in stored.items():
        named = _FULL.fullmatch(key)
        if not named or int(named[1]) not in shapes:
            raise InputError(f"{path}: the array {key[:80]!r} belongs to no row of tensors.parquet: capture it again")
        if value.shape != shapes[int(named[1])]:
            raise InputError(
                f"{path}: {key} has shape {value.shape}, its row {shapes[int(named[1])]}: capture it again"
            )
        arrays[key] = value
    return arrays


def _pack(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    found: dict[str, dict[int, np.ndarray]] = {"tokens": {}, "token_l2": {}, "full": {}}
    for key, value in arrays.items():
        row, _, what = key.partition(".")
        if what not in found or not row.isdecimal() or len(row) > ROW_DIGITS or str(int(row)) != row:
            raise InputError(f"the array {key!r} has no place in a trace: name it ROW.tokens, ROW.token_l2 or ROW.full")
        found[what][int(row)] = value
    tokens, norms, full = found.values()
    if alone := tokens.keys() ^ norms.keys():
        raise InputError(f"row {min(alone)} of the trace has only one of tokens and token_l2: give both or none")
    rows = sorted(tokens)
    counts = [norms[row].size for row in rows]
    for row, count in zip(rows, counts, strict=True):
        _check_row(row, tokens[row], norms[row], count)
    stored = {f"{row}.full": value for row, value in full.items()}
    stored["tokens"] = np.concatenate([tokens[row] for row in rows] or [np.zeros((0, TOKEN_K), np.float32)])
    stored["token_l2"] = np.concatenate([norms[row] for row in rows] or [np.zeros(0, np.float32)])
    return stored | {"rows": np.array(rows, np.int64), "counts": np.array(counts, np.int64)}


def _check_row(row: int, tokens: np.ndarray, norms: np.ndarray, count: int) -> None:
    if tokens.shape != (count, TOKEN_K) or norms.ndim != 1 or not tokens.dtype == norms.dtype == np.float32:
        raise InputError(
            f"row {row} of the trace has tokens {tokens.dtype} {tokens.shape} and token_l2 {norms.dtype} "
            f"{norms.shape}: give float32 (n, {TOKEN_K}) and float32 (n,)"
        )


def _check_packed(packed: Mapping[str, np.ndarray | None], shapes: Mapping[int, tuple[int, ...]], path: Path) -> None:
    for name, (dtype, rest) in _PACKED.items():
        value = packed[name]
        if value is None or value.dtype != dtype or value.ndim != 1 + len(rest) or value.shape[1:] != rest:
            found = "missing" if value is None else f"{value.dtype} of shape {value.shape}"
            raise InputError(
                f"{path}: `{name}` is {found}: it must be {np.dtype(dtype)} {('n', *rest)}; capture it again"
            )
    rows, counts, n = packed["rows"], packed["counts"], len(packed["tokens"])
    if len(counts) != len(rows) or len(packed["token_l2"]) != n:
        lengths = {name: len(value) for name, value in packed.items()}
        raise InputError(f"{path}: the lengths do not belong together ({lengths}): capture it again")
    if (rows[1:] <= rows[:-1]).any():
        raise InputError(f"{path}: `rows` does not rise, or has a row twice: capture it again")
    if strange := [row for row in rows.tolist() if row not in shapes]:
        raise InputError(f"{path}: `rows` has {strange[0]}, which is no row of tensors.parquet: capture it again")
    # each of them first: a sum of huge counts may overflow to the right number
    if ((counts < 0) | (counts > n)).any() or counts.sum() != n:
        raise InputError(f"{path}: `counts` does not add up to the {n} tokens that are there: capture it again")
    if not np.isfinite(packed["tokens"]).all() or not np.isfinite(packed["token_l2"]).all():
        raise InputError(f"{path}: `tokens` or `token_l2` is not finite: capture it again")
