"""One vocabulary as one small file: parquet with a row for each id, and what is known of it as JSON in the footer.

Columns: `piece` (bytes; empty for padding), `special` (control token), `added` (added to the trained vocabulary).
"""

import io
import json
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from specnb.compat.description import Description, Merges
from specnb.errors import InputError
from specnb.lm.bounded_json import read_bytes
from specnb.lm.vocab import Vocabulary
from specnb.store import write_atomic

if TYPE_CHECKING:
    import pyarrow

MAX_FILE_BYTES = 8 * 1024 * 1024
MAX_PIECES_BYTES = 64 * 1024 * 1024
MAX_IDS = 1 << 20
META_KEY = b"specnb.vocab"
REMEDY = "take the file from the repository again, or make it with specnb.compat.shelf_build"

TokenId = Annotated[int, Field(ge=0, lt=MAX_IDS, strict=True)]
Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
ShelfName = Annotated[str, Field(pattern="^[a-z0-9][a-z0-9.-]{0,63}$")]


class ListFacts(BaseModel):
    """What a list states beside its pieces. `digest` is that of the pieces (`Vocabulary.digest`)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: ShelfName
    title: str
    model: str
    licence: str
    source: str
    source_sha256: Sha256
    digest: Sha256
    n_tokens: TokenId
    kind: str
    pre: str
    bos: TokenId | None
    eos: TokenId | None
    pad: TokenId | None
    eot: TokenId | None
    eog: tuple[TokenId, ...]
    add_bos: bool
    add_eos: bool
    normalizer: str | None
    merges: Merges | None
    chat_template: str | None

    @model_validator(mode="after")
    def _every_id_has_a_text(self) -> "ListFacts":
        ids = [i for i in (self.bos, self.eos, self.pad, self.eot, *self.eog) if i is not None]
        if ids and max(ids) >= self.n_tokens:
            raise ValueError(f"token {max(ids)} is named and there are {self.n_tokens} tokens")
        return self


def write(
    path: Path, described: Description, *, title: str, model: str, licence: str, source: str, sha256: str
) -> None:
    """Write `described` as the list `path.stem`, atomically; the same input gives the same bytes.

    `sha256` is that of the file which `source` names. Raises InputError for a description without a vocabulary.
    """
    import pyarrow as pa
    from pyarrow import parquet

    vocab = described.vocab
    if vocab is None or described.n_tokens is None:
        raise InputError(f"{described.name} states no vocabulary: a list needs the pieces")
    facts = ListFacts(
        name=path.stem,
        title=title,
        model=model,
        licence=licence,
        source=source,
        source_sha256=sha256,
        digest=vocab.digest,
        n_tokens=described.n_tokens,
        kind=vocab.kind,
        pre=vocab.pre,
        bos=described.bos,
        eos=described.eos,
        pad=described.pad,
        eot=described.eot,
        eog=tuple(sorted(vocab.eog)),
        add_bos=vocab.add_bos,
        add_eos=bool(described.add_eos),
        normalizer=described.normalizer,
        merges=described.merges,
        chat_template=vocab.chat_template,
    )
    ids = range(vocab.size)
    columns = [list(vocab.pieces), [i in vocab.special for i in ids], [i in described.added for i in ids]]
    table = pa.table(columns, schema=_schema())
    buffer = io.BytesIO()
    writer = parquet.ParquetWriter(
        buffer,
        table.schema,
        compression="zstd",
        compression_level=19,
        use_dictionary=False,
        column_encoding={"piece": "DELTA_LENGTH_BYTE_ARRAY", "special": "PLAIN", "added": "PLAIN"},
        write_statistics=False,
        store_schema=False,
        data_page_size=MAX_PIECES_BYTES,
    )
    with writer:
        writer.write_table(table, row_group_size=MAX_IDS)
        writer.add_key_value_metadata({META_KEY: facts.model_dump_json()})
    write_atomic(path, buffer.getvalue())


def read(path: Path, data: bytes | None = None) -> tuple[Description, ListFacts]:
    """The list in `path`, or in `data`, its bytes read before.

    Bounded by MAX_FILE_BYTES, MAX_IDS and MAX_PIECES_BYTES. Raises InputError, with file and reason, for a file that
    is too large or no such list, and for pieces that do not have the digest which the file states.
    """
    data = read_bytes(path, MAX_FILE_BYTES) if data is None else data
    try:
        columns, facts = _parse(data)
        vocab = _vocabulary(columns[0], columns[1], facts)
    except (ValueError, OSError, MemoryError, LookupError, TypeError) as error:  # pyarrow raises them all
        raise InputError(f"{path}: no usable vocabulary list: {_reason(error)}; {REMEDY}") from error
    described = Description(
        name=facts.name,
        source=str(path),
        vocab=vocab,
        n_tokens=facts.n_tokens,
        vocab_size=vocab.size,
        bos=facts.bos,
        eos=facts.eos,
        pad=facts.pad,
        eot=facts.eot,
        add_bos=facts.add_bos,
        add_eos=facts.add_eos,
        added=frozenset(compress(range(vocab.size), columns[2])),
        normalizer=facts.normalizer,
        merges=facts.merges,
    )
    return described, facts


def _schema() -> "pyarrow.Schema":
    import pyarrow as pa

    bit = pa.bool_()
    fields = (("piece", pa.binary()), ("special", bit), ("added", bit))
    return pa.schema([pa.field(name, kind, nullable=False) for name, kind in fields])


def _parse(data: bytes) -> tuple[list[list], ListFacts]:
    """The three columns and the facts; ValueError or one of pyarrow's errors for anything else."""
    import pyarrow as pa
    from pyarrow import parquet

    file = parquet.ParquetFile(pa.BufferReader(data), memory_map=False)
    schema, rows = file.schema_arrow, file.metadata.num_rows
    if not schema.equals(_schema(), check_metadata=False):
        raise ValueError(f"its columns are {', '.join(map(str, schema))[:200]}")
    facts = ListFacts.model_validate(json.loads((file.metadata.metadata or {})[META_KEY]))
    if not facts.n_tokens <= rows <= MAX_IDS:
        raise ValueError(f"{rows} rows for {facts.n_tokens} tokens, at most {MAX_IDS} are allowed")
    groups = [file.metadata.row_group(i) for i in range(file.num_row_groups)]
    chunks = [group.column(i) for group in groups for i in range(group.num_columns)]
    if sum(chunk.total_uncompressed_size for chunk in chunks) > MAX_PIECES_BYTES:
        raise ValueError(f"more than {MAX_PIECES_BYTES} bytes of pieces")
    if any("DICTIONARY" in encoding for chunk in chunks for encoding in chunk.encodings):
        raise ValueError("dictionary-encoded: a few bytes could stand for any number of pieces")
    return [column.to_pylist() for column in file.read(use_threads=False).columns], facts


def _vocabulary(pieces: list[bytes], special: list[bool], facts: ListFacts) -> Vocabulary:
    if any(pieces[facts.n_tokens :]):
        raise ValueError(f"a padding row behind the {facts.n_tokens} tokens has a text")
    vocab = Vocabulary(
        pieces=tuple(pieces),
        kind=facts.kind,
        pre=facts.pre,
        bos=facts.bos,
        eos=facts.eos,
        eog=frozenset(facts.eog),
        special=frozenset(compress(range(len(special)), special)),
        add_bos=facts.add_bos,
        chat_template=facts.chat_template,
    )
    if vocab.digest != facts.digest:
        raise ValueError(f"its pieces have the digest {vocab.digest}, stated is {facts.digest}")
    return vocab


def _reason(error: Exception) -> str:
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False, include_context=False)[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"[:300]
    return (str(error) or type(error).__name__).splitlines()[0][:300]
