"""tokenizer.json as a table: the bytes of each id, the added tokens, the rules in short, and a real encoder.

The file is read as JSON; only `encode` asks the `tokenizers` library to open it. Format: the library's own.
"""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from specnb.compat import pieces as spell
from specnb.compat.description import Merges
from specnb.errors import InputError
from specnb.lm.bounded_json import Node, read_json

MAX_TOKENIZER_BYTES = 128 << 20
MAX_TOKENIZER_VALUES = 8_000_000
"""Three times what the largest known one holds (Gemma 4: 262,144 pieces, 514,906 merges of two)."""
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


def _kind(model: Node) -> str:
    """The kind by llama.cpp's names, so that sources can be compared; BPE with bytes as pieces is its "spm"."""
    named = (model.text("type") or "unknown").lower()
    if named == "bpe" and model.values.get("byte_fallback") is True:
        return "spm"
    return {"wordpiece": "wpm", "unigram": "ugm"}.get(named, named)


def read_tokenizer(path: Path) -> Tokenizer:
    """Raises InputError for ids that are negative, huge or used twice, and for whatever is not of its type."""
    root = read_json(path, MAX_TOKENIZER_BYTES, MAX_TOKENIZER_VALUES)
    model = root.node("model")
    if not model.values:
        raise root.fault("model", None, "a tokenizer.json names its model")
    vocab = _vocab(model)
    added, special = _added(root, vocab)
    prefix, suffix = _template(root.node("post_processor"))
    return Tokenizer(
        path=path,
        kind=_kind(model),
        pre=(root.node("pre_tokenizer").text("type") or "").lower(),
        normalizer=_rules(root.get("normalizer", dict, "an object")),
        pieces=_pieces(root, vocab, added),
        added=added,
        special=special,
        vocab=vocab,
        merges=_merges(model),
        prefix=prefix,
        suffix=suffix,
    )


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


def _vocab(model: Node) -> dict[str, int]:
    """Piece -> id. A Unigram model lists [piece, score] in order of id."""
    stored = model.values.get("vocab")
    if isinstance(stored, list):
        stored = _unigram(model, stored)
    if not isinstance(stored, dict) or not stored:
        raise model.fault("vocab", stored, "it must hold pieces and their ids")
    owner: dict[int, str] = {}
    for piece, i in stored.items():
        _check_id(model, f"vocab[{piece[:40]!r}]", i)
        if owner.setdefault(i, piece) != piece:
            raise model.fault(f"vocab[{piece[:40]!r}]", i, f"{owner[i][:40]!r} has this id too")
    return stored


def _unigram(model: Node, stored: list[Any]) -> dict[str, int]:
    pieces: dict[str, int] = {}
    for i, entry in enumerate(stored):
        if not isinstance(entry, list) or not entry or not isinstance(entry[0], str):
            raise model.fault(f"vocab[{i}]", entry, "it must be a piece and its score")
        if pieces.setdefault(entry[0], i) != i:
            raise model.fault(f"vocab[{i}]", entry[0], f"it is also piece {pieces[entry[0]]}")
    return pieces


def _added(root: Node, vocab: Mapping[str, int]) -> tuple[dict[str, int], frozenset[int]]:
    """Added tokens and those of them that are control tokens.

    The library numbers them itself, in order, and ignores the ids in the file: a text of the vocabulary keeps its id,
    others follow the last. The engines use the library, so its ids are the true ones; they differ only after a hole.
    """
    added: dict[str, int] = {}
    special: set[int] = set()
    stated: dict[int, str] = {}
    last = len(vocab) - 1
    for token in root.nodes("added_tokens"):
        i, text = token.values.get("id"), token.text("content")
        _check_id(token, "id", i)
        if not text:
            raise token.fault("content", text, "an added token has a text")
        if text in added or i in stated:
            raise token.fault("id", i, f"{stated.get(i, text)[:40]!r} is added a second time")
        stated[i] = text
        added[text] = vocab.get(text, last + 1)
        last = max(last, added[text])
        if token.flag("special"):
            special.add(added[text])
    return added, frozenset(special)


def _check_id(node: Node, key: str, i: object) -> None:
    if isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < MAX_ID:
        raise node.fault(key, i, f"an id is an integer from 0 to {MAX_ID - 1}")


def _pieces(root: Node, vocab: Mapping[str, int], added: Mapping[str, int]) -> tuple[bytes, ...]:
    to_bytes = _speller(root)
    pieces = [b""] * (1 + max(max(vocab.values()), max(added.values(), default=0)))
    try:
        for piece, i in vocab.items():
            pieces[i] = to_bytes(piece)
        for text, i in added.items():  # after the vocabulary: an added token is found by its text
            pieces[i] = text.encode()
    except UnicodeEncodeError as error:  # half of a surrogate pair, which JSON can spell
        raise root.fault("model.vocab", error.object[:40], "it is no text") from error
    return tuple(pieces)


def _speller(root: Node) -> Callable[[str], bytes]:
    if "ByteLevel" in _types([root.values.get("decoder"), root.values.get("pre_tokenizer")]):
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


def _merges(model: Node) -> Merges | None:
    """Either spelling of a rule, "left right" or ["left", "right"], gives the digest that a GGUF's rules give."""
    stored = model.get("merges", list, "a list of merge rules")
    if stored is None:
        return None
    digest = hashlib.sha256()
    for i, merge in enumerate(stored):
        pair = isinstance(merge, list) and len(merge) == 2 and all(isinstance(part, str) for part in merge)
        if not pair and not isinstance(merge, str):
            raise model.fault(f"merges[{i}]", merge, "it must be two pieces")
        # converters write a space inside a piece as U+0120
        line = " ".join(part.replace(" ", "\u0120") for part in merge) if pair else merge
        digest.update(line.encode("utf-8", "surrogatepass") + b"\n")
    return Merges(len(stored), digest.hexdigest())


def _template(processor: Node) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Texts of the special tokens that a single sequence gets before and after it."""
    steps = processor.nodes("processors") if processor.text("type") == "Sequence" else [processor]
    found = [_AROUND[kind](step) for step in steps if (kind := step.text("type")) in _AROUND]
    return next((around for around in found if any(around)), ((), ()))


def _around_template(step: Node) -> tuple[tuple[str, ...], tuple[str, ...]]:
    before: list[str] = []
    after: list[str] = []
    side = before
    for part in step.nodes("single"):
        if "Sequence" in part.values:
            side = after
        elif (token := part.node("SpecialToken").text("id")) is not None:
            side.append(token)
    return tuple(before), tuple(after)


def _around_bert(step: Node) -> tuple[tuple[str, ...], tuple[str, ...]]:
    ends = [step.get(key, list, "a token and its id") or [] for key in ("cls", "sep")]
    before, after = (tuple(text for text in end[:1] if isinstance(text, str)) for end in ends)
    return before, after


_AROUND = MappingProxyType(
    {"TemplateProcessing": _around_template, "BertProcessing": _around_bert, "RobertaProcessing": _around_bert}
)
