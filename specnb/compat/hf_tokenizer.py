"""tokenizer.json as a table: the bytes of each id, the added tokens, the rules in short, and a real encoder.

The file is read as JSON; only `encode` asks the `tokenizers` library to open it. Format: the library's own.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from specnb.compat import pieces as spell
from specnb.compat.description import Merges
from specnb.errors import InputError, SpecnbError
from specnb.io import read_json

MAX_TOKENIZER_BYTES = 128 << 20
MAX_ID = 4_000_000


@dataclass(frozen=True)
class Tokenizer:
    """What a tokenizer.json says. `pieces` covers ids 0..n-1; an id that it skips has b""."""

    path: Path
    kind: str
    pre: str
    normalizer: str | None
    pieces: tuple[bytes, ...]
    added: Mapping[str, int]
    special: frozenset[int]
    vocab: Mapping[str, int]
    merges: Merges | None
    prefix: tuple[str, ...]
    suffix: tuple[str, ...]

    def id_of(self, text: str) -> int | None:
        return self.added.get(text, self.vocab.get(text))


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Make one InputError, which names the file, of an object of another form than expected."""
    try:
        yield
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        if isinstance(error, SpecnbError):
            raise
        raise InputError(
            f"{path} does not have the expected form ({type(error).__name__}: {str(error)[:200]}): correct it, "
            "or fetch it again"
        ) from error


def read_tokenizer(path: Path) -> Tokenizer:
    """Raises InputError for ids that are negative, huge or used twice, and for whatever is not of its type."""
    root = read_json(path, MAX_TOKENIZER_BYTES)
    with reading(path):
        model = root["model"]
        vocab = _vocab(path, model["vocab"])
        added, special = _added(path, root.get("added_tokens") or [], vocab)
        prefix, suffix = _template(root.get("post_processor") or {})
        return Tokenizer(
            path=path,
            kind=_kind(model),
            pre=((root.get("pre_tokenizer") or {}).get("type") or "").lower(),
            normalizer=_rules(root.get("normalizer")),
            pieces=_pieces(root, vocab, added),
            added=added,
            special=special,
            vocab=vocab,
            merges=_merges(model.get("merges")),
            prefix=prefix,
            suffix=suffix,
        )


def _kind(model: dict) -> str:
    """The kind by llama.cpp's names, so that sources can be compared; BPE with bytes as pieces is its "spm"."""
    named = (model.get("type") or "unknown").lower()
    if named == "bpe" and model.get("byte_fallback") is True:
        return "spm"
    return {"wordpiece": "wpm", "unigram": "ugm"}.get(named, named)


def encoder(path: Path) -> Callable[[str], list[int]]:
    """The tokenizer's own `encode`, opened at the first call: special tokens are neither added nor looked for."""
    opened: list[Any] = []

    def encode(text: str) -> list[int]:
        from tokenizers import Tokenizer as Library

        try:
            if not opened:
                library = Library.from_file(str(path))
                library.encode_special_tokens = True  # <|im_end|> in a text is ten characters, not one token
                opened.append(library)
            return opened[0].encode(text, add_special_tokens=False).ids
        except BaseException as error:
            # a panic of the library derives from BaseException
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            raise InputError(f"the tokenizers library cannot use {path}: {str(error)[:200]}") from error

    return encode


def _vocab(path: Path, stored: Any) -> dict[str, int]:
    """Piece -> id. A Unigram model lists [piece, score] in order of id."""
    pairs = [(entry[0], i) for i, entry in enumerate(stored)] if isinstance(stored, list) else list(stored.items())
    _require_ids(path, "model.vocab", pairs)
    return dict(pairs)


def _require_ids(path: Path, where: str, pairs: Sequence[tuple[str, int]]) -> None:
    """Raises InputError unless each text has one id in range, and each id one text."""
    for text, i in pairs:
        if type(i) is not int or not 0 <= i < MAX_ID:
            raise InputError(f"{path}: {where}[{text[:40]!r}] is {i!r}, expected an id from 0 to {MAX_ID - 1}")
    for column in zip(*pairs, strict=True):
        if len(set(column)) < len(column):
            twice = Counter(column).most_common(1)[0][0]
            raise InputError(f"{path}: {where} has {twice!r} a second time: correct the file or fetch it again")


def _added(path: Path, tokens: list[dict], vocab: Mapping[str, int]) -> tuple[dict[str, int], frozenset[int]]:
    """Added tokens and those of them that are control tokens.

    The library numbers them itself, in order, and ignores the ids in the file: a text of the vocabulary keeps its id,
    others follow the last. The engines use the library, so its ids are the true ones; they differ only after a hole.
    """
    _require_ids(path, "added_tokens", [(token["content"], token["id"]) for token in tokens])
    added: dict[str, int] = {}
    last = len(vocab) - 1
    for token in tokens:
        added[token["content"]] = vocab.get(token["content"], last + 1)
        last = max(last, added[token["content"]])
    return added, frozenset(added[token["content"]] for token in tokens if token.get("special"))


def _pieces(root: dict, vocab: Mapping[str, int], added: Mapping[str, int]) -> tuple[bytes, ...]:
    to_bytes = _speller(root)
    pieces = [b""] * (1 + max(max(vocab.values()), max(added.values(), default=0)))
    for piece, i in vocab.items():
        pieces[i] = to_bytes(piece)
    for text, i in added.items():  # after the vocabulary: an added token is found by its text
        pieces[i] = text.encode()
    return tuple(pieces)


def _speller(root: dict) -> Callable[[str], bytes]:
    if "ByteLevel" in _types([root.get("decoder"), root.get("pre_tokenizer")]):
        return lambda piece: found if (found := spell.byte_level(piece)) is not None else piece.encode()
    return lambda piece: spell.fallback_byte(piece) or spell.marked(piece)


def _types(rule: object) -> list[str]:
    """Names of a rule and of those inside it, in order; without recursion, for it may be deep."""
    names, rest = [], [rule]
    while rest:
        part = rest.pop()
        if isinstance(part, dict):
            names += [part["type"]] if isinstance(part.get("type"), str) else []
            rest += reversed(part.values())
        elif isinstance(part, list):
            rest += reversed(part)
    return names


def _rules(rule: dict | None) -> str | None:
    """A normalizer in short: the names of its steps, a sequence left out."""
    return " ".join(name for name in _types(rule) if name != "Sequence") or None


def _merges(stored: list | None) -> Merges | None:
    """Either spelling of a rule, "left right" or ["left", "right"], gives the digest that a GGUF's rules give."""
    if stored is None:
        return None
    digest = hashlib.sha256()
    for merge in stored:
        if not isinstance(merge, str):
            left, right = merge
            # converters write a space inside a piece as U+0120
            merge = " ".join(part.replace(" ", "\u0120") for part in (left, right))
        digest.update(merge.encode("utf-8", "surrogatepass") + b"\n")
    return Merges(len(stored), digest.hexdigest())


def _template(processor: dict) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Texts of the special tokens that a single sequence gets before and after it."""
    steps = processor["processors"] if processor.get("type") == "Sequence" else [processor]
    found = [_AROUND[kind](step) for step in steps if (kind := step.get("type")) in _AROUND]
    return next((around for around in found if any(around)), ((), ()))


def _around_template(step: dict) -> tuple[tuple[str, ...], tuple[str, ...]]:
    before: list[str] = []
    after: list[str] = []
    side = before
    for part in step["single"]:
        if "Sequence" in part:
            side = after
        elif token := part.get("SpecialToken"):
            side.append(token["id"])
    return tuple(before), tuple(after)


def _around_bert(step: dict) -> tuple[tuple[str, ...], tuple[str, ...]]:
    before, after = (tuple(step.get(key, ())[:1]) for key in ("cls", "sep"))
    return before, after


_AROUND = MappingProxyType(
    {"TemplateProcessing": _around_template, "BertProcessing": _around_bert, "RobertaProcessing": _around_bert}
)
