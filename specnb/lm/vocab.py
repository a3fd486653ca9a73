"""Vocabulary: what each token id means, as bytes, and which ids are special; and how tokenizer.json writes bytes.

Knows nothing about how text becomes tokens (the models' `encode` does that) and nothing about logits.
"""

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
"""No vocabulary has as many ids: a larger number is damage."""
END_KEYS = ("bos_token_id", "eos_token_id")
ID_KEYS = (*END_KEYS, "pad_token_id", "pard_token", "ptd_token_id", "mask_token_id")
"""Keys of a config whose ids have a row of the embedding; the last three name mask tokens."""


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """The ids 0..size-1 of a model's logits and what they stand for.

    `pieces[i]` is the text of id i as bytes (a piece may be half a character); ids that no tokenizer produces
    (padding rows of the embedding) have the piece b"". `special` ids are control tokens: they have a piece, for
    comparison, but `decode` leaves them out. `eog` is the full end-of-generation set. `kind` and `pre` name the
    tokenizer family and its pre-tokenizer as far as the source states them.
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
        """Number of ids, padding included: the width of a row of logits."""
        return len(self.pieces)

    @cached_property
    def control(self) -> frozenset[int]:
        """Ids that are never made from text: control tokens and ends of generation."""
        return self.special | self.eog

    @cached_property
    def texts(self) -> frozenset[bytes]:
        """Every piece, to look one up."""
        return frozenset(self.pieces)

    def piece(self, token: int) -> bytes:
        """Text bytes of one id as they appear in output: b"" for control tokens."""
        return b"" if token in self.special else self.pieces[token]

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        return b"".join(map(self.piece, ids))

    def raw_bytes(self, ids: Iterable[int]) -> bytes:
        """As `decode_bytes`, with control tokens in their place: the turns of a chat show."""
        return b"".join(self.pieces[token] for token in ids)

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids`; bytes that are no valid UTF-8 (a cut character) become U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")


_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_OTHERS = (b for b in range(256) if b not in _PRINTABLE)
ALPHABET = {chr(b): b for b in _PRINTABLE} | {chr(0x100 + i): b for i, b in enumerate(_OTHERS)}
"""The letter of byte-level BPE (GPT-2's) and its byte: printable Latin-1 letters stand for themselves."""


def byte_level(piece: str) -> bytes:
    """Return the bytes of a byte-level piece; its text where a character of it stands for no byte."""
    return bytes(ALPHABET[c] for c in piece) if ALPHABET.keys() >= set(piece) else piece.encode()


def sentencepiece(piece: str) -> bytes:
    """Return the bytes of a piece in which U+2581 stands for a space and <0x0A> for a byte."""
    if re.fullmatch("<0x[0-9A-Fa-f]{2}>", piece):
        return bytes([int(piece[3:5], 16)])
    return piece.replace("\u2581", " ").encode()


def spell_pieces(tokenizer: dict[str, Any], names: Iterable[str | None], added: Container[int]) -> tuple[bytes, ...]:
    """Return the bytes of the ids of a tokenizer.json by their `names`, b"" for None; `added` stand for themselves."""
    steps = json.dumps([tokenizer.get("decoder"), tokenizer.get("pre_tokenizer")])
    spell = byte_level if '"ByteLevel"' in steps else sentencepiece
    return tuple(b"" if name is None else name.encode() if i in added else spell(name) for i, name in enumerate(names))


def kind_of(tokenizer: dict[str, Any]) -> str:
    """Return the kind of a tokenizer.json by llama.cpp's names; a BPE with bytes as pieces is its "spm"."""
    model = tokenizer.get("model", {})
    named = str(model.get("type") or "unknown").lower()
    if named == "bpe" and model.get("byte_fallback") is True:
        return "spm"
    return {"wordpiece": "wpm", "unigram": "ugm"}.get(named, named)


def ids_in(value: Any) -> list[int]:
    """Return the ids in a field of a config, one or a list. An id of -1 is none: so the first Llamas wrote padding."""
    return [i for i in (value if isinstance(value, list) else [value]) if isinstance(i, int) and i >= 0]


def require_rows(rows: int, file: object, stated: Mapping[str, Any]) -> None:
    """Raise InputError for an id of ID_KEYS in `stated`, the contents of `file`, without a row."""
    for key in ID_KEYS:
        if (last := max(ids_in(stated.get(key)), default=0)) >= rows:
            reason = f"{key} is {last}, but the embedding has {rows} rows (ids from 0)"
            raise InputError(f"{file}: {reason}: correct it, or resize the embedding")


def read_tokenizer(path: Path) -> dict[str, Any]:
    """Return a tokenizer.json. Raises InputError for ids that end the tokenizers library's process."""
    state = read_json(path)
    with reading(path):
        vocab = state["model"]["vocab"]  # of Unigram a list
        if isinstance(vocab, dict) and (last := max(vocab.values())) >= MAX_ID:
            raise ValueError(f"the largest id is {last}, expected less than {MAX_ID}")
    return state


@contextmanager
def tokenizing(subject: object) -> Iterator[None]:
    """Raise InputError that names `subject` where the tokenizers library refuses a text or panics.

    The panic of a library in Rust is no Exception, and its type cannot be imported.
    """
    try:
        yield
    except BaseException as error:
        if type(error).__name__ not in ("PanicException", "TypeError"):  # half a surrogate pair
            raise
        reason = f"{error!s:.200}; change the text, or repair tokenizer.json"
        raise InputError(f"{subject!r:.200} cannot be tokenized: {reason}") from error


def first_difference(target: Vocabulary, draft: Vocabulary) -> int | None:
    """Smallest id whose piece differs (a missing id differs from any), or None when all are equal."""
    pairs = zip_longest(target.pieces, draft.pieces)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), None)


def require_same(target: Vocabulary, draft: Vocabulary, names: Sequence[str]) -> None:
    """Raise VocabularyMismatch, naming the first id that means another text, unless all ids mean the same.

    Drafted ids are verified as ids, so one shifted id would silently turn acceptance to zero.
    """
    if (token := first_difference(target, draft)) is not None:
        texts = [repr(v.pieces[token]) if token < v.size else "no such id" for v in (target, draft)]
        differ = f"{' and '.join(names)} disagree on what token id {token} means: {texts[0]} against {texts[1]}"
        raise VocabularyMismatch(f"{differ}. {OTHER_DRAFTERS}")
