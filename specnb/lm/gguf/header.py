"""The header of a GGUF file: its key-values and the list of its tensors, read one by one (format: ggml/docs/gguf.md).

A first part that was cut after its header will do; versions 2 and 3, little endian. `gguf.GGUFReader` takes 10 s and
490 MB more for 150,000 tokens, where this takes 0.2 s and 20 MB, and it refuses a file whose tensors are cut off.
"""

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from specnb.errors import InputError

STRING, ARRAY = 8, 9
SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
"""struct's code of each GGUF value type of fixed width."""

AGAIN = "the file is damaged or incomplete: fetch or convert it again"


@dataclass(frozen=True)
class Header:
    """Everything that a GGUF states before its tensors. `packed` holds each key with its value as in the file.

    `shapes` are those of the tensors by name, the fastest dimension first; `places` their types and first bytes.
    """

    path: Path
    values: dict[str, Any]
    packed: dict[str, bytes]
    shapes: dict[str, tuple[int, ...]]
    places: dict[str, tuple[int, int]]

    def tensor(self, name: str) -> np.ndarray:
        """Read a tensor as float32, the slowest dimension first."""
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize, quant_shape_to_byte_shape

        number, start = self.places[name]
        kind = GGMLQuantizationType(number)
        shape = quant_shape_to_byte_shape(self.shapes[name][::-1], kind)
        return dequantize(np.fromfile(self.path, np.uint8, math.prod(shape), offset=start).reshape(shape), kind)

    def get(self, key: str, kind: type, default: Any = None) -> Any:
        """Return the value of `key`, `default` where it is not stated. Raises InputError for another type."""
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise self.fault(key, value, f"expected {getattr(kind, '__name__', kind)}")
        return value

    def fault(self, key: str, value: object, why: str) -> InputError:
        """Return the error that names the file, the key, its value, what is wrong with it and the remedy."""
        text = repr(value) if isinstance(value, str | bytes | int | float | None) else type(value).__name__
        return InputError(f"{self.path}: {key} is {text[:80]}: {why}; {AGAIN}")


def read_header(path: Path) -> Header:
    """Return the header of a file. Raises InputError, naming file, offset and value, for one that is not sound."""
    if not path.is_file():
        raise InputError(f"no such model file: {path}")
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _parse(path, data)
    except InputError:
        raise
    except (OSError, ValueError) as error:  # mmap: an empty file
        raise InputError(f"cannot read {path}: {error}") from error


def _parse(path: Path, data: mmap.mmap) -> Header:
    cursor = _Cursor(path, data)
    magic = cursor.take(4)
    if magic != b"GGUF":
        raise InputError(f"{path} is not a GGUF file: it starts with {magic!r} instead of b'GGUF'")
    version = cursor.number("<I")
    if version not in (2, 3):
        raise InputError(f"{path} is GGUF version {version:#x}, expected 2 or 3 (little endian): convert it again")
    n_tensors, n_keys = cursor.number("<Q"), cursor.number("<Q")
    values: dict[str, Any] = {}
    packed: dict[str, bytes] = {}
    for _ in range(n_keys):
        start, key = cursor.place, cursor.text()
        if key in values:
            raise cursor.error(f"has the key {key!r} a second time")
        values[key] = _value(cursor, key)
        packed[key] = data[start : cursor.place]
    shapes: dict[str, tuple[int, ...]] = {}
    places: dict[str, tuple[int, int]] = {}
    for _ in range(n_tensors):
        name, n_dims = cursor.text(), cursor.number("<I")
        shapes[name] = struct.unpack(f"<{n_dims}Q", cursor.take(8 * n_dims))
        places[name] = struct.unpack("<IQ", cursor.take(4 + 8))
    alignment = values.get("general.alignment", 32)
    start = -(-cursor.place // alignment) * alignment
    return Header(path, values, packed, shapes, {name: (kind, start + n) for name, (kind, n) in places.items()})


def _value(cursor: "_Cursor", key: str) -> Any:
    """A number, text or bool; of arrays a list of bytes, or a numpy array."""
    kind = cursor.number("<I")
    if kind == STRING:
        return cursor.text()
    n = None
    if kind == ARRAY:
        kind, n = cursor.number("<I"), cursor.number("<Q")
        if kind == STRING:
            return [cursor.string() for _ in range(n)]
    if kind not in SCALARS:
        raise cursor.error(f"gives {key!r} the unknown value type {kind}")
    code = SCALARS[kind]
    return cursor.number(code) if n is None else np.frombuffer(cursor.take(n * struct.calcsize(code)), dtype=code)


class _Cursor:
    """A position in a file; nothing is taken that is not there, whatever lengths are announced."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.place, self._data = path, 0, data

    def error(self, fault: str) -> InputError:
        return InputError(f"{self.path} {fault} (byte {self.place}): {AGAIN}")

    def take(self, n: int) -> bytes:
        start, end = self.place, self.place + n
        if end > len(self._data):
            raise self.error(f"ends inside its header: {n} bytes are announced, {len(self._data) - start} are left")
        self.place = end
        return self._data[start:end]

    def number(self, code: str) -> int | float | bool:
        return struct.unpack(code, self.take(struct.calcsize(code)))[0]

    def string(self) -> bytes:
        return self.take(self.number("<Q"))

    def text(self) -> str:
        return self.string().decode("utf-8", errors="replace")
