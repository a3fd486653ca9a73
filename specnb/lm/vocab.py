"""Vocabulary: the bytes of each token id, the special ids, and the encodings of tokenizer.json.

To tokenize text, use `LanguageModel.encode`.
"""

import codecs
import json
import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest
from pathlib import Path
from typing import Any

from specnb.errors import OTHER_DRAFTERS, InputError, VocabularyMismatch
from specnb.io import read_json, reading

MAX_ID = 4_000_000
"""Exclusive upper bound on token ids; a file with a larger id is damaged."""
END_KEYS = ("bos_token_id", "eos_token_id")
ID_KEYS = (*END_KEYS, "pad_token_id", "pard_token", "ptd_token_id", "mask_token_id")
"""Config keys whose ids must have an embedding row; the last three are mask tokens."""


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """The ids 0..size-1 of a model's logits and their bytes.

    `pieces[i]` is the text of id i as bytes (possibly part of a character); ids that the tokenizer
    never returns (padding rows of the embedding) have the piece b"". `special` ids are control
    tokens: they have a piece, for comparison, but `decode` omits them. `eog` is the full set of
    end-of-generation ids. `kind` and `pre` name the tokenizer family and its pre-tokenizer if the
    source names them.
    """

    pieces: tuple[bytes, ...]
    kind: str = "unknown"
    pre: str = ""
    bos: int | None = None
    eos: int | None = None
    eog: frozenset[int] = frozenset()
    special: frozenset[int] = frozenset()
    add_bos: bool = False
    chat_template: str | None = None

    @property
    def size(self) -> int:
        """Number of ids, including padding: the width of a row of logits."""
        return len(self.pieces)

    @cached_property
    def control(self) -> frozenset[int]:
        """Ids that encoding text never returns: control and end-of-generation tokens."""
        return self.special | self.eog

    @cached_property
    def texts(self) -> frozenset[bytes]:
        """The set of all pieces."""
        return frozenset(self.pieces)

    def piece(self, token: int) -> bytes:
        """Return the bytes of one id in decoded text: b"" for control tokens."""
        return b"" if token in self.special else self.pieces[token]

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """Return the bytes of `ids`, without control tokens."""
        return b"".join(map(self.piece, ids))

    def raw_bytes(self, ids: Iterable[int]) -> bytes:
        """Return the bytes of `ids`, including control tokens, such as chat markers."""
        return b"".join(self.pieces[token] for token in ids)

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of `ids`; invalid UTF-8 (part of a character) becomes U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")


_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_OTHERS = (b for b in range(256) if b not in _PRINTABLE)
ALPHABET = {chr(b): b for b in _PRINTABLE} | {chr(0x100 + i): b for i, b in enumerate(_OTHERS)}
"""Byte of each character in byte-level BPE (GPT-2); printable Latin-1 stands for itself."""
CODES = {ord(c): byte for c, byte in ALPHABET.items()}


def byte_level(piece: str) -> bytes:
    """Return the bytes of a byte-level piece; its UTF-8 if a character is not in ALPHABET."""
    try:
        return codecs.charmap_encode(piece, "strict", CODES)[0]
    except UnicodeEncodeError:
        return piece.encode()


def sentencepiece(piece: str) -> bytes:
    """Return the bytes of a piece in which U+2581 stands for a space and <0x0A> for a byte."""
    if re.fullmatch("<0x[0-9A-Fa-f]{2}>", piece):
        return bytes([int(piece[3:5], 16)])
    return piece.replace("\u2581", " ").encode()


def spell_pieces(
    tokenizer: dict[str, Any], names: Iterable[str | None], added: Container[int]
) -> tuple[bytes, ...]:
    """Return the bytes of all ids of a tokenizer.json; `names[i]` is the token string of id i.

    None becomes b"". The names of the ids in `added` (added tokens) are plain text.
    """
    steps = json.dumps([tokenizer.get("decoder"), tokenizer.get("pre_tokenizer")])
    spell = byte_level if '"ByteLevel"' in steps else sentencepiece
    pieces = []
    for i, name in enumerate(names):
        if name is None:
            pieces.append(b"")
        else:
            pieces.append(name.encode() if i in added else spell(name))
    return tuple(pieces)


def kind_of(tokenizer: dict[str, Any]) -> str:
    """Return the kind of a tokenizer.json in llama.cpp's terms; BPE with byte fallback is "spm"."""
    model = tokenizer.get("model", {})
    kind = str(model.get("type") or "unknown").lower()
    if kind == "bpe" and model.get("byte_fallback") is True:
        return "spm"
    return {"wordpiece": "wpm", "unigram": "ugm"}.get(kind, kind)


def ids_in(value: Any) -> list[int]:
    """Return the ids in a config field, an int or a list, without -1 (early Llamas: no padding)."""
    values = value if isinstance(value, list) else [value]
    return [i for i in values if isinstance(i, int) and i >= 0]


def require_rows(rows: int, file: object, stated: Mapping[str, Any]) -> None:
    """Raise InputError if an id under ID_KEYS in `stated`, the contents of `file`, has no row."""
    for key in ID_KEYS:
        if (last := max(ids_in(stated.get(key)), default=0)) >= rows:
            raise InputError(
                f"{file}: {key} is {last}, but the embedding has {rows} rows (ids from 0): "
                "correct it, or resize the embedding"
            )


def read_tokenizer(path: Path) -> dict[str, Any]:
    """Read a tokenizer.json. Raises InputError for ids on which the tokenizers library aborts."""
    state = read_json(path)
    with reading(path):
        vocab = state["model"]["vocab"]  # a list for Unigram
        if isinstance(vocab, dict) and (last := max(vocab.values())) >= MAX_ID:
            raise ValueError(f"the largest id is {last}, expected less than {MAX_ID}")
    return state


@contextmanager
def tokenizing(subject: object) -> Iterator[None]:
    """Convert errors and panics of the tokenizers library to an InputError for `subject`.

    A Rust panic is not an Exception, and its type cannot be imported.
    """
    try:
        yield
    except BaseException as error:
        # TypeError: a lone surrogate
        if type(error).__name__ not in ("PanicException", "TypeError"):
            raise
        raise InputError(
            f"{subject!r:.200} cannot be tokenized: {error!s:.200}; change the text, or repair "
            "tokenizer.json"
        ) from error


def first_difference(target: Vocabulary, draft: Vocabulary) -> int | None:
    """Return the smallest id with different pieces (or missing in one vocabulary), or None."""
    pairs = zip_longest(target.pieces, draft.pieces)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), None)


def require_same(target: Vocabulary, draft: Vocabulary, names: Sequence[str]) -> None:
    """Raise VocabularyMismatch, naming the first id that differs, unless all pieces are equal.

    Draft tokens are verified by id: shifted ids would silently reduce the acceptance rate to zero.
    """
    if (token := first_difference(target, draft)) is not None:
        texts = [repr(v.pieces[token]) if token < v.size else "no such id" for v in (target, draft)]
        raise VocabularyMismatch(
            f"{' and '.join(names)} map token id {token} to different texts, "
            f"{' and '.join(texts)}. {OTHER_DRAFTERS}"
        )
