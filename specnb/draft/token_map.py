"""Which ids of two vocabularies mean the same text.

A piece is matched by its bytes: text with text, a control token only with a control token of the same text, padding
(b"") with nothing. The pairs are sorted by id, so that both sides of a copy from one row into another are in the same
order. (transformers 5.23 prunes the draft's output in the order of a hash map and scatters it in the order of ids: q is
then not what was drawn from, and the output no longer the target's.)
"""

from collections.abc import Container
from typing import NamedTuple

import numpy as np

from specnb.draft.spelling import written
from specnb.lm.base import LanguageModel
from specnb.lm.vocab import Vocabulary

SAMPLE = """The first reading was taken in the morning, before the wind had turned; "we waited," she wrote, "for hours."
def mean(values: list[float]) -> float:
    if not values:
        raise ValueError("no values")
    return sum(values) / len(values)

{"name": "probe", "count": 12, "tags": ["a", "b"], "nested": {"ok": true}}
How do I sort a list of numbers? Use `sorted(numbers, reverse=True)`. That's it, isn't it?
"""


class Overlap(NamedTuple):
    """`shared` pieces of `target_pieces` and `draft_pieces` (padding not counted).

    Pieces are not used equally often, so `target_uses` and `draft_uses` say more: the share of the tokens of an
    ordinary text, as the target's (the draft's) tokenizer writes it, that the other has too; None without a tokenizer
    that can write it.
    """

    shared: int
    target_pieces: int
    draft_pieces: int
    target_uses: float | None = None
    draft_uses: float | None = None

    @property
    def of_target(self) -> float:
        return self.shared / max(1, self.target_pieces)

    @property
    def of_draft(self) -> float:
        return self.shared / max(1, self.draft_pieces)

    def __str__(self) -> str:
        told = f"{self.shared} pieces shared: {self.of_target:.1%} of the target's, {self.of_draft:.1%} of the draft's"
        if self.target_uses is None or self.draft_uses is None:
            return told
        return f"{told}; of the tokens of an ordinary text {self.target_uses:.0%} and {self.draft_uses:.0%}"


class TokenMap:
    """Pairs of ids with equal pieces: `target_ids[i]` means what `draft_ids[i]` means, ascending in `draft_ids`."""

    def __init__(self, target: LanguageModel, draft: LanguageModel) -> None:
        self._target, self._draft = target.vocab, draft.vocab
        ours, theirs = _ids_by_piece(target), _ids_by_piece(draft)
        pairs = sorted((theirs[piece], ours[piece]) for piece in theirs.keys() & ours.keys())
        if pairs and same_up_to_padding(self._target, self._draft):  # repeated pieces too mean what they mean there
            pairs = [(i, i) for i, piece in enumerate(min(self._target.pieces, self._draft.pieces, key=len)) if piece]
        self.draft_ids = np.array([d for d, _ in pairs], dtype=np.intp)
        self.target_ids = np.array([t for _, t in pairs], dtype=np.intp)
        self._draft_of = {t: d for d, t in pairs}
        uses = _share(target, self._draft_of), _share(draft, set(self._draft_of.values()))
        self.overlap = Overlap(len(pairs), _pieces(self._target), _pieces(self._draft), *uses)

    def draft_of(self, token: int) -> int | None:
        """The draft's id of a target's token; for a control token without its like, one of the same role or None."""
        if token in self._draft_of:
            return self._draft_of[token]
        if token == self._target.bos:
            return self._draft.bos if token in self._target.special else None
        return self._draft.eos if token in self._target.control else None


def same_up_to_padding(target: Vocabulary, draft: Vocabulary) -> bool:
    """Whether the vocabularies differ only in how many ids without a text follow the last one that has one."""
    short, long = sorted((target.pieces, draft.pieces), key=len)
    return long[: len(short)] == short and not any(long[len(short) :])


def _pieces(vocab: Vocabulary) -> int:
    return sum(map(bool, vocab.pieces))


def _share(model: LanguageModel, shared: Container[int]) -> float | None:
    ids = written(model, b"", SAMPLE.encode())
    return sum(token in shared for token in ids) / len(ids) if ids else None


def _ids_by_piece(model: LanguageModel) -> dict[tuple[bytes, bool], int]:
    """The id of every piece (and whether it is a control token).

    Of ids with the same piece it is the one that the model's tokenizer writes, for that is the one the model knows
    (sentencepiece has `a` as a letter and, earlier, as a byte that is never written); else the smallest.
    """
    vocab, special = model.vocab, model.vocab.control
    if vocab.kind == "none":  # without a tokenizer the pieces only name the ids
        return {}
    found: dict[tuple[bytes, bool], int] = {}
    repeated: set[tuple[bytes, bool]] = set()
    for token, piece in enumerate(vocab.pieces):
        key = (piece, token in special)
        if piece and found.setdefault(key, token) != token:
            repeated.add(key)
    for key in repeated:
        ids = None if key[1] else written(model, b"", key[0])
        if ids and len(ids) == 1:
            found[key] = ids[0]
    return found


def columns(ids: np.ndarray) -> np.ndarray | slice:
    """`ids` as an index; a slice where they follow one another, which copies ten times faster."""
    if len(ids) and ids[-1] - ids[0] == len(ids) - 1 and bool((np.diff(ids) == 1).all()):
        return slice(int(ids[0]), int(ids[-1]) + 1)
    return ids
