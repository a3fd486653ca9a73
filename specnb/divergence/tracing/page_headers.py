"""The headers of a parquet file's pages: what a reader unpacks, whatever the file's footer says of itself.

A header is a struct in Thrift's compact protocol (format/src/main/thrift/parquet.thrift); pyarrow shows footers only.
"""

from collections.abc import Iterator
from typing import NamedTuple

DEEPEST = 4
"""Structs in one another: a page's, its kind's, its statistics'."""
UNPACKED, PACKED, VALUES = 2, 3, 1
"""Numbers of the fields: bytes of the page in memory and in the file; values, in the struct of the page's kind."""
KINDS = (5, 7, 8)
"""Fields of a data page, a dictionary, and a data page of the second version."""
FLAGS, BYTE, I32, INTEGERS, DOUBLE, TEXT, STRUCT = (1, 2), 3, 5, (4, 5, 6), 7, 8, 12
"""Types of fields. All numbers of a page are I32: arrow passes over a field of another type as if it were not there."""
MOST = (1 << 15) - 1
"""The largest number of a field; a larger one is cut to 16 bits by arrow, and is another field's."""
LONGEST = 10
"""Bytes of an integer."""


class Page(NamedTuple):
    """What a page says that it unpacks to."""

    n_bytes: int
    n_values: int


def pages(data: bytes, start: int, end: int) -> Iterator[Page]:
    """The pages of a column that lies from `start` to `end`. ValueError for what are none."""
    reader = _Reader(data, start, end)
    while reader.at < end:
        header = reader.struct()
        kinds = [header[kind] for kind in KINDS if isinstance(header.get(kind), dict)]
        counts = [header.get(UNPACKED), *(kind.get(VALUES) for kind in kinds)]
        if len(kinds) != 1 or not all(isinstance(one, int) and one >= 0 for one in counts):
            raise ValueError(f"a page with the header {header}")
        reader.skip(header.get(PACKED))
        yield Page(*counts)


class _Reader:
    """Thrift's compact protocol, without lists and maps, which no page header has."""

    def __init__(self, data: bytes, start: int, end: int) -> None:
        if not 0 <= start <= end <= len(data):
            raise ValueError(f"a column at {start} to {end} of {len(data)} bytes")
        self._data, self.at, self._end = data, start, end

    def struct(self, depth: int = 0) -> dict[int, object]:
        """Structs and 32-bit integers by the number of their field, others as None. ValueError for a number twice."""
        if depth == DEEPEST:
            raise ValueError(f"a page header with {depth} structs in one another")
        found: dict[int, object] = {}
        number = 0
        while head := self._byte():
            number = number + (head >> 4) if head >> 4 else self._integer()
            if number in found or not 0 < number <= MOST:
                raise ValueError(f"a page header with field {number} twice, or without such a number")
            found[number] = self._value(head & 15, depth)
        return found

    def skip(self, n_bytes: object) -> None:
        """Go on behind so many bytes."""
        if not isinstance(n_bytes, int) or not 0 <= n_bytes <= self._end - self.at:
            raise ValueError(f"{n_bytes} bytes of which {self._end - self.at} are there")
        self.at += n_bytes

    def _value(self, kind: int, depth: int) -> object:
        if kind in FLAGS:
            return None
        if kind in INTEGERS:
            number = self._integer()
            return number if kind == I32 else None
        if kind == STRUCT:
            return self.struct(depth + 1)
        if kind not in (BYTE, DOUBLE, TEXT):
            raise ValueError(f"a page header with a field of type {kind}")
        self.skip(self._varint() if kind == TEXT else {BYTE: 1, DOUBLE: 8}[kind])
        return None

    def _integer(self) -> int:
        coded = self._varint()
        return (coded >> 1) ^ -(coded & 1)

    def _varint(self) -> int:
        value = 0
        for i in range(LONGEST):
            byte = self._byte()
            value |= (byte & 127) << (7 * i)
            if byte < 128:
                return value
        raise ValueError(f"an integer of more than {LONGEST} bytes")

    def _byte(self) -> int:
        self.skip(1)
        return self._data[self.at - 1]
