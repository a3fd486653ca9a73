"""The key-values and the tensor list of a GGUF file, read within bounds: never a tensor, never more than is there.

Versions 2 and 3, little endian. Every length is compared with the bytes left in the file and with a limit before
anything is allocated, so a hostile file costs one error. Format: ggml/docs/gguf.md.
"""

import os
import struct
from collections.abc import Container, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from specnb.errors import InputError

MAX_HEADER_BYTES = 64 << 20
"""Of all that is read; arrays of numbers that nobody asked for are stepped over and do not count."""
MAX_ITEMS = 2_000_000
"""Entries of one array that is read: no tokenizer has as many."""
MAX_KEYS = 65_536
MAX_TENSORS = 262_144
MAX_NAME_BYTES = 65_535
MAX_DIMS = 4

BLOCK = 1 << 20
STRING, ARRAY, BOOL = 8, 9, 7
SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<B", 10: "<Q", 11: "<q", 12: "<d"}
"""struct's code of each GGUF value type of fixed width."""

AGAIN = "the file is damaged or incomplete: fetch or convert it again"

Value = int | float | bool | bytes | list[bytes] | np.ndarray


class Tensor(NamedTuple):
    """Name, shape (fastest dimension first) and ggml's type number; where the data lies is not read."""

    name: str
    shape: tuple[int, ...]
    type: int


@dataclass(frozen=True)
class Header:
    """What a GGUF says before its tensors.

    `values` holds every scalar and string, and the arrays that were asked for; strings are bytes as stored.
    """

    path: Path
    version: int
    values: Mapping[str, Value]
    tensors: tuple[Tensor, ...]


def read_header(path: Path, arrays: Container[str]) -> Header:
    """The header of the file at `path`, with the arrays whose keys are in `arrays`; others are checked and skipped.

    Raises InputError, naming file, offset or key, value and remedy, for whatever is no sound header.
    """
    try:
        if not path.is_file():  # a pipe would be waited for
            raise InputError(f"no such model file: {path}")
        with path.open("rb") as file:
            return _parse(_Cursor(path, file), arrays)
    except (OSError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error


def _parse(at: "_Cursor", arrays: Container[str]) -> Header:
    magic = at.take(4)
    if magic != b"GGUF":
        raise InputError(f"{at.path} is not a GGUF file: it starts with {magic!r} instead of b'GGUF'")
    version = at.number("<I")
    if version and not version & 0xFFFF:
        raise InputError(f"{at.path} is big endian (version field {version:#010x}): convert it to little endian")
    if version not in (2, 3):
        raise InputError(f"{at.path} is GGUF version {version}; 2 and 3 are read: convert it again")
    n_tensors = at.count("tensors", MAX_TENSORS, least_bytes=24)
    n_keys = at.count("keys", MAX_KEYS, least_bytes=13)
    values: dict[str, Value | None] = {}
    for _ in range(n_keys):
        start = at.offset
        key = at.name()
        if key in values:
            raise at.error(f"has the key {key!r} a second time", start)
        values[key] = _value(at, key, key in arrays)
    tensors = tuple(_tensor(at) for _ in range(n_tensors))
    return Header(at.path, version, {k: v for k, v in values.items() if v is not None}, tensors)


def _value(at: "_Cursor", key: str, wanted: bool) -> Value | None:
    kind = at.number("<I")
    if kind == STRING:
        return at.string(f"the value of {key!r}")
    if kind == ARRAY:
        return _array(at, key, wanted)
    return _scalar(at, kind, key)


def _scalar(at: "_Cursor", kind: int, key: str) -> int | float | bool:
    if kind not in SCALARS:
        raise at.error(f"gives {key!r} the unknown value type {kind}")
    value = at.number(SCALARS[kind])
    if kind != BOOL:
        return value
    if value > 1:
        raise at.error(f"gives {key!r} the boolean {value}")
    return bool(value)


def _array(at: "_Cursor", key: str, wanted: bool) -> Value | None:
    """None for an array that was only skipped."""
    kind = at.number("<I")
    if kind == ARRAY:
        raise at.error(f"has an array of arrays under {key!r}, which no GGUF reader knows")
    if kind != STRING and kind not in SCALARS:
        raise at.error(f"has an array of the unknown type {kind} under {key!r}")
    width = 8 if kind == STRING else struct.calcsize(SCALARS[kind])
    limited = wanted or kind == STRING
    n = at.count(f"entries of {key!r}", MAX_ITEMS if limited else at.size, least_bytes=width)
    if kind == STRING:
        strings = at.strings(n, f"{key!r}", keep=wanted)
        return strings if wanted else None
    if wanted:
        return np.frombuffer(at.take(n * width), dtype=SCALARS[kind])
    at.skip(n * width)
    return None


def _tensor(at: "_Cursor") -> Tensor:
    name = at.name()
    n_dims = at.number("<I")
    if not 1 <= n_dims <= MAX_DIMS:
        raise at.error(f"gives the tensor {name!r} {n_dims} dimensions")
    shape = tuple(at.number("<Q") for _ in range(n_dims))
    if not all(0 < d < 2**48 for d in shape):
        raise at.error(f"gives the tensor {name!r} the shape {shape}")
    kind = at.number("<I")
    at.number("<Q")  # where its data starts
    return Tensor(name, shape, kind)


class _Cursor:
    """A position in a file of known size, over a window of at least what is being read."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path = path
        self.size = os.fstat(file.fileno()).st_size
        self._file = file
        self._window, self._base, self._at = b"", 0, 0
        self._read = 0

    @property
    def offset(self) -> int:
        return self._base + self._at

    def error(self, what: str, offset: int | None = None) -> InputError:
        return InputError(f"{self.path} {what} (byte {self.offset if offset is None else offset}): {AGAIN}")

    def need(self, n: int, what: str = "its header") -> None:
        """Have `n` more bytes in the window."""
        if self._at + n <= len(self._window):
            return
        if n > self.size - self.offset:
            raise self.error(f"ends inside {what}: {n} bytes are announced, {self.size - self.offset} are left")
        kept = self._window[self._at :]
        self._base, self._at = self.offset, 0
        missing = max(n - len(kept), min(BLOCK, self.size - self._base - len(kept)))
        if self._read + n - len(kept) > MAX_HEADER_BYTES:
            raise self.error(f"has a header of more than {MAX_HEADER_BYTES} bytes, {what} included")
        more = self._file.read(missing)
        self._read += len(more)
        self._window = kept + more
        if len(self._window) < n:
            raise self.error(f"ends inside {what}")

    def take(self, n: int, what: str = "its header") -> bytes:
        self.need(n, what)
        start, self._at = self._at, self._at + n
        return self._window[start : self._at]

    def skip(self, n: int) -> None:
        """Step over `n` bytes, which `count` has found to be there, without reading them."""
        here = self.offset + n
        if self._at + n <= len(self._window):
            self._at += n
        else:
            self._file.seek(here)
            self._window, self._base, self._at = b"", here, 0

    def number(self, code: str) -> int | float:
        return struct.unpack(code, self.take(struct.calcsize(code)))[0]

    def count(self, what: str, limit: int, *, least_bytes: int) -> int:
        """A number of things that take `least_bytes` each."""
        n = self.number("<Q")
        left = self.size - self.offset
        if n * least_bytes > left:
            raise self.error(f"announces {n} {what}, which {left} bytes cannot hold", self.offset - 8)
        if n > limit:
            raise self.error(f"announces {n} {what}; {limit} are the most that is read", self.offset - 8)
        return n

    def string(self, what: str) -> bytes:
        return self.take(self.number("<Q"), what)

    def name(self) -> str:
        start = self.offset
        n = self.number("<Q")
        if n > MAX_NAME_BYTES:
            raise self.error(f"has a name of {n} bytes; {MAX_NAME_BYTES} are the most", start)
        try:
            return self.take(n, "a name").decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.error("has a name that is not UTF-8", start) from error

    def strings(self, n: int, what: str, *, keep: bool) -> list[bytes]:
        """`n` strings in a row; the loop runs a million times for a large tokenizer, hence its plainness."""
        out: list[bytes] = []
        unpack = struct.Struct("<Q").unpack_from
        window, at = self._window, self._at
        for i in range(n):
            if at + 8 > len(window):
                self._at = at
                self.need(8, f"entry {i} of {what}")
                window, at = self._window, self._at
            (length,) = unpack(window, at)
            end = at + 8 + length
            if end > len(window):
                self._at = at
                self.need(8 + length, f"entry {i} of {what}")
                window, at = self._window, self._at
                end = at + 8 + length
            if keep:
                out.append(window[at + 8 : end])
            at = end
        self._at = at
        return out
