"""Parquet files of unknown origin: counted before they are read, read in batches, and never beyond a stated limit.

A small file may unpack to far more than its footer says: what is in a dictionary is written once, so is what repeats.
"""

import io
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from specnb.divergence.tracing.page_headers import pages
from specnb.errors import InputError

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

BATCH = 1 << 14
"""Rows that are read at a time."""
PAGES = 1 << 16
"""Pages that a table may have: empty ones take no memory, and yet each is read."""
VALUE_BYTES = 8
"""What a value is counted as before it is read: a number's bytes."""
WRITER = "parquet-cpp-arrow"
"""What pyarrow calls itself in the files that it writes."""


def read_table(data: bytes, path: Path, schema: "pa.Schema", *, rows: int, memory: int, again: str) -> "pa.Table":
    """The columns of `schema`, with no empty place among them, and the file's own metadata.

    At most `rows` rows and `memory` bytes as they lie in arrow; a few times that is taken meanwhile. Raises InputError
    for more, for a column that is missing or of another type, and for what is no parquet of pyarrow's; `path` and
    `again`, how to make the file anew, are told.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    texts = [field.name for field in schema if field.type == pa.string()]
    try:
        with pq.ParquetFile(io.BytesIO(data)) as file:
            _check_columns(file.schema_arrow, schema, path)
            _check_counts(data, file.metadata, schema, path, rows, memory)
            n_rows, meta = file.metadata.num_rows, file.schema_arrow.metadata
        # texts stay in their dictionary until what they take outside of it is known
        with pq.ParquetFile(io.BytesIO(data), read_dictionary=texts, pre_buffer=False) as file:
            batches = list(_batches(file, schema, path, rows, memory))
        whole = pa.Table.from_batches(batches) if batches else schema.empty_table()
        whole.validate(full=True)  # texts that are no UTF-8
    except (pa.ArrowException, OSError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{path} is no parquet file that can be read ({error}): {again}") from error
    if whole.num_rows != n_rows:
        raise InputError(f"{path} says that it has {n_rows} rows, and {whole.num_rows} can be read: {again}")
    if empty := [name for name in whole.column_names if whole[name].null_count]:
        raise InputError(f"{path}: column {empty[0]!r} has an empty place: {again}")
    return whole.replace_schema_metadata(meta)


def _check_columns(found: "pa.Schema", schema: "pa.Schema", path: Path) -> None:
    for field in schema:
        if found.names.count(field.name) != 1 or found.field(field.name).type != field.type:
            raise InputError(f"{path} has no column {field.name!r} of type {field.type}: it is another table")


def _check_counts(
    data: bytes, meta: "pq.FileMetaData", schema: "pa.Schema", path: Path, rows: int, memory: int
) -> None:
    """Rows by the footer; values (those of lists, too), and bytes before dictionaries are resolved, by each page."""
    groups = [meta.row_group(i) for i in range(meta.num_row_groups)]
    _bounded([group.num_rows for group in groups], rows, "rows", path)
    if not (meta.created_by or "").startswith(WRITER):  # of older writers, arrow reads on behind the end of a column
        raise ValueError(f"written by {meta.created_by!r}, not by pyarrow")
    chunks = [group.column(i) for group in groups for i in range(group.num_columns)]
    chunks = [chunk for chunk in chunks if chunk.path_in_schema.partition(".")[0] in schema.names]
    # of a column without values arrow reads no page
    found = (page for chunk in chunks if chunk.num_values for page in pages(data, *_span(chunk)))
    n_bytes = n_values = 0
    for n_pages, page in enumerate(found, 1):
        n_bytes, n_values = n_bytes + page.n_bytes, n_values + page.n_values
        _bounded([n_pages], PAGES, "pages", path)
        _bounded([n_bytes], memory, "bytes", path)
        _bounded([VALUE_BYTES * n_values], memory, "bytes of values", path)


def _span(chunk: "pq.ColumnChunkMetaData") -> tuple[int, int]:
    """Where a column lies in the file, from its dictionary on."""
    start = chunk.data_page_offset
    if chunk.has_dictionary_page and 0 < chunk.dictionary_page_offset < start:
        start = chunk.dictionary_page_offset
    return start, start + chunk.total_compressed_size


def _bounded(counts: list[int], limit: int, what: str, path: Path) -> None:
    if min(counts, default=0) < 0 or sum(counts) > limit:
        raise InputError(f"{path} has {sum(counts)} {what}, more than the {limit} that such a table may have")


def _batches(
    file: "pq.ParquetFile", schema: "pa.Schema", path: Path, rows: int, memory: int
) -> "Iterator[pa.RecordBatch]":
    """Batches with texts resolved, each counted before it is: what a file says of itself need not be true."""
    import pyarrow as pa

    n_rows = n_bytes = 0
    for batch in file.iter_batches(BATCH, columns=schema.names, use_threads=False):
        columns = [batch.column(name) for name in schema.names]
        n_rows, n_bytes = n_rows + batch.num_rows, n_bytes + sum(map(_size, columns))
        _bounded([n_rows], rows, "rows", path)
        _bounded([n_bytes], memory, "bytes", path)
        plain = [one.dictionary_decode() if pa.types.is_dictionary(one.type) else one for one in columns]
        yield pa.RecordBatch.from_arrays(plain, names=schema.names)


def _size(column: "pa.Array") -> int:
    """Bytes that a column takes once its dictionary is resolved."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if not pa.types.is_dictionary(column.type):
        return column.nbytes
    lengths = pc.take(pc.binary_length(column.dictionary), column.indices)
    return column.indices.nbytes + (pc.sum(lengths).as_py() or 0)
