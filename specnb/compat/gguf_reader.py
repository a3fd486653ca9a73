"""The key-values and the tensor list of a GGUF file: never a tensor, so a first shard cut after its header will do.

Versions 2 and 3, little endian. Format: ggml/docs/gguf.md.
"""

import mmap
import struct
from collections.abc import Container, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from specnb.errors import InputError

STRING, ARRAY, BOOL = 8, 9, 7
SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
"""struct's code of each GGUF value type of fixed width."""
LENGTH = struct.Struct("<Q")

AGAIN = "the file is damaged or incomplete: fetch or convert it again"

Value = int | float | bool | str | list[bytes] | np.ndarray


class Tensor(NamedTuple):
    """Name, shape (fastest dimension first) and ggml's type number; where the data lies is not read."""

    name: str
    shape: tuple[int, ...]
    type: int


@dataclass(frozen=True)
class Header:
    """What a GGUF says before its tensors: every scalar and string, and the arrays that were asked for."""

    path: Path
    values: Mapping[str, Value]
    tensors: tuple[Tensor, ...]

    def get(self, key: str, kind: type, default: Any = None) -> Any:
        """Return the value of `key`, `default` where it is not stated. Raises InputError for another type."""
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise self.fault(key, value, f"expected {getattr(kind, '__name__', kind)}")
        return value

    def fault(self, key: str, value: object, why: str) -> InputError:
        """The error that names the file, the key, its value, what is wrong with it and the remedy."""
        shown = repr(value) if isinstance(value, str | bytes | int | float | None) else type(value).__name__
        return InputError(f"{self.path}: {key} is {shown[:80]}: {why}; {AGAIN}")


def read_header(path: Path, arrays: Container[str]) -> Header:
    """The header of the file at `path`, with the arrays whose keys are in `arrays`.

    Raises InputError, naming file, offset and value, for whatever is no sound header.
    """
    if not path.is_file():
        raise InputError(f"no such model file: {path}")
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _parse(_Cursor(path, data), arrays)
    except (OSError, ValueError) as error:  # mmap: an empty file
        if isinstance(error, InputError):
            raise
        raise InputError(f"cannot read {path}: {error}") from error


def _parse(at: "_Cursor", arrays: Container[str]) -> Header:
    magic = at.take(4)
    if magic != b"GGUF":
        raise InputError(f"{at.path} is not a GGUF file: it starts with {magic!r} instead of b'GGUF'")
    version = at.number("<I")
    if version not in (2, 3):
        raise InputError(
            f"{at.path} is GGUF version {version:#x} (big endian from 0x10000 on); 2 and 3 in little endian are read: "
            "convert it again"
        )
    n_tensors, n_keys = at.count("tensors"), at.count("keys")
    values: dict[str, Value] = {}
    for _ in range(n_keys):
        key = at.text()
        if key in values:
            raise at.error(f"has the key {key!r} a second time")
        value = _value(at, key)
        if key in arrays or not isinstance(value, list | np.ndarray):
            values[key] = value
    return Header(at.path, values, tuple(_tensor(at) for _ in range(n_tensors)))


def _value(at: "_Cursor", key: str) -> Value:
    kind = at.number("<I")
    if kind == STRING:
        return at.text()
    is_array = kind == ARRAY
    if is_array:
        kind, n = at.number("<I"), at.count(f"entries of {key!r}")
        if kind == STRING:
            return [at.string() for _ in range(n)]
    if kind not in SCALARS:
        raise at.error(f"gives {key!r} the unknown value type {kind}")
    code = SCALARS[kind]
    return np.frombuffer(at.take(n * struct.calcsize(code)), dtype=code) if is_array else at.number(code)


def _tensor(at: "_Cursor") -> Tensor:
    name, n_dims = at.text(), at.number("<I")
    shape = struct.unpack(f"<{n_dims}Q", at.take(8 * n_dims))
    kind = at.number("<I")
    at.number("<Q")  # where its data starts
    return Tensor(name, shape, kind)


class _Cursor:
    """A position in a file."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self._data, self._at = path, data, 0

    def error(self, what: str) -> InputError:
        return InputError(f"{self.path} {what} (byte {self._at}): {AGAIN}")

    def take(self, n: int) -> bytes:
        start, end = self._at, self._at + n
        if end > len(self._data):
            raise self.error(f"ends inside its header: {n} bytes are announced, {len(self._data) - start} are left")
        self._at = end
        return self._data[start:end]

    def number(self, code: str) -> int | float | bool:
        return struct.unpack(code, self.take(struct.calcsize(code)))[0]

    def count(self, what: str) -> int:
        n = self.number("<Q")
        if n > len(self._data):
            raise self.error(f"announces {n} {what} in {len(self._data)} bytes")
        return n

    def string(self) -> bytes:
        return self.take(LENGTH.unpack(self.take(8))[0])

    def text(self) -> str:
        return self.string().decode("utf-8", errors="replace")
