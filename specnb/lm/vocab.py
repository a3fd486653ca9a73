"""Vocabulary: what each token id means, as bytes, and which ids are special.

Knows nothing about how text becomes tokens (the models' `encode` does that) and nothing about logits.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest

from specnb.errors import VocabularyMismatch


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
    def digest(self) -> str:
        """sha256 over all pieces in order: equal digests mean that every id has the same text."""
        h = hashlib.sha256()
        for piece in self.pieces:
            h.update(len(piece).to_bytes(4, "little"))
            h.update(piece)
        return h.hexdigest()

    def piece(self, token: int) -> bytes:
        """Text bytes of one id as they appear in output: b"" for control tokens."""
        return b"" if token in self.special else self.pieces[token]

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        return b"".join(self.piece(token) for token in ids)

    def raw_bytes(self, ids: Iterable[int]) -> bytes:
        """As `decode_bytes`, with control tokens in their place: the turns of a chat show."""
        return b"".join(self.pieces[token] for token in ids)

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids`; bytes that are no valid UTF-8 (a cut character) become U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")


def first_difference(target: Vocabulary, draft: Vocabulary) -> int | None:
    """Smallest id whose piece differs (a missing id differs from any), or None when all are equal."""
    if target.digest == draft.digest:
        return None
    pairs = zip_longest(target.pieces, draft.pieces)
    return next(i for i, (a, b) in enumerate(pairs) if a != b)


def require_same(target: Vocabulary, draft: Vocabulary, *, names: Sequence[str] = ("target", "draft")) -> None:
    """Refuse a pair whose ids do not all mean the same text.

    Drafted ids are verified as ids, so one shifted id would silently turn acceptance to zero, and two ids swapped
    would be verified against the wrong rows.

    Raises VocabularyMismatch naming the first differing id and both pieces.
    """
    at = first_difference(target, draft)
    if at is None:
        return
    show = [repr(v.pieces[at]) if at < v.size else "no such id" for v in (target, draft)]
    raise VocabularyMismatch(
        f"{names[0]} and {names[1]} disagree on what token id {at} means: {show[0]} against {show[1]} "
        f"({target.size} and {draft.size} ids, {target.kind} and {draft.kind}). "
        "Use a drafter with the target's tokenizer, a requantised copy of the target (--drafter self), "
        "or --drafter lookup, which needs no draft model; load_drafter translates where tokens are shared."
    )
