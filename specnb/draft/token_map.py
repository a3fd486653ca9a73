"""Compare two vocabularies: which ids have the same text, and how to translate between them.

Pieces match if their bytes are equal. A control token matches only a control token with the same
text; padding (b"") matches nothing. Pairs are sorted by id, so that gathering from one row and
scattering into the other use the same order. (transformers 5.23 gathers in the order of a hash map
and scatters in the order of ids, which is not lossless.)
"""

from collections.abc import Collection
from enum import StrEnum
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from specnb.draft.spelling import encode_exact
from specnb.lm.vocab import Vocabulary, first_difference

SAMPLE = """The first reading was taken in the morning, before the wind had turned; "we waited," \
she wrote, "for hours."
def mean(values: list[float]) -> float:
    if not values:
        raise ValueError("no values")
    return sum(values) / len(values)

{"name": "probe", "count": 12, "tags": ["a", "b"], "nested": {"ok": true}}
How do I sort a list of numbers? Use `sorted(numbers, reverse=True)`. That's it, isn't it?
"""


class Tokens:
    """The tokens of one model, prepared for comparison with those of other models.

    `model` is a LanguageModel, or a `compat.description.Description` of one.
    """

    def __init__(self, model: Any) -> None:
        self.vocab: Vocabulary = model.vocab
        self._model = model

    @cached_property
    def ids(self) -> dict[tuple[bytes, bool], int]:
        """Map (piece, whether it is a control token) to its id.

        If several ids have the same piece, the one that the tokenizer returns is used, because the
        model was trained with it; if it returns none, the lowest. (sentencepiece has `a` as a
        letter and, at a lower id, as a byte that it never returns.)
        """
        if self.vocab.kind == "none":  # without a tokenizer the pieces only name the ids
            return {}
        id_of = {}
        for token, piece in enumerate(self.vocab.pieces):
            control = token in self.vocab.control
            if piece and id_of.setdefault((piece, control), token) != token and not control:
                ids = encode_exact(self._model, b"", piece)
                if ids and len(ids) == 1:
                    id_of[piece, False] = ids[0]
        return id_of

    @cached_property
    def keys(self) -> frozenset[tuple[bytes, bool]]:
        """The keys of `ids`, as a set that stores their hashes: intersections are faster."""
        return frozenset(self.ids)

    @cached_property
    def n_pieces(self) -> int:
        """The number of pieces without padding."""
        return sum(map(bool, self.vocab.pieces))

    @cached_property
    def sample(self) -> tuple[int, ...] | None:
        """The token ids of SAMPLE; None if the tokenizer cannot encode it exactly."""
        return encode_exact(self._model, b"", SAMPLE.encode())

    @cached_property
    def by_id(self) -> tuple[bytes, ...]:
        """The pieces up to the last id that has text."""
        return self.vocab.pieces[
            : max((i for i, piece in enumerate(self.vocab.pieces, 1) if piece), default=0)
        ]

    def uses(self, pieces: Collection[tuple[bytes, bool]]) -> float | None:
        """Return the share of sample tokens with pieces in `pieces`; None without a sample."""
        if not self.sample:
            return None
        shared = 0
        for token in self.sample:
            key = (self.vocab.pieces[token], False)
            shared += self.ids.get(key) == token and key in pieces
        return shared / len(self.sample)


class VocabularyOverlap(NamedTuple):
    """Overlap of two vocabularies, in pieces without padding. Shared pieces may differ in id.

    `target_uses` is the share of the tokens of an ordinary text, encoded by the target's tokenizer,
    that the draft vocabulary also has; None if the tokenizer cannot encode it exactly. `draft_uses`
    is the same with target and draft model exchanged.
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
        text = (
            f"{self.shared} pieces shared: "
            f"{self.of_target:.1%} of the target's, {self.of_draft:.1%} of the draft's"
        )
        if None not in self:
            text += (
                "; of the tokens of an ordinary text "
                f"{self.target_uses:.0%} and {self.draft_uses:.0%}"
            )
        return text


def overlap(target: Tokens, draft: Tokens) -> VocabularyOverlap:
    """Return the overlap of two vocabularies."""
    if target.ids and draft.ids and ids_agree(target, draft):
        shared = sum(map(bool, min(target.by_id, draft.by_id, key=len)))
    else:
        shared = len(target.keys & draft.keys)
    uses = target.uses(draft.keys), draft.uses(target.keys)
    return VocabularyOverlap(shared, target.n_pieces, draft.n_pieces, *uses)


def ids_agree(target: Tokens, draft: Tokens) -> bool:
    """Return whether every id that both have means the same; one may have more ids or padding."""
    short, long = sorted((target.by_id, draft.by_id), key=len)
    return bool(short) and long[: len(short)] == short


class TokenMap:
    """Pairs of ids with equal pieces, `target_ids[i]` and `draft_ids[i]`, sorted by `draft_ids`.

    If every id that both have means the same, the pairs are these ids.
    """

    def __init__(self, target: Tokens, draft: Tokens) -> None:
        self._target = target.vocab
        self._draft = draft.vocab
        pairs = sorted((draft.ids[key], target.ids[key]) for key in target.keys & draft.keys)
        if pairs and ids_agree(target, draft):  # repeated pieces too
            pairs = [
                (i, i) for i, piece in enumerate(min(target.by_id, draft.by_id, key=len)) if piece
            ]
        self.draft_ids, self.target_ids = np.array(pairs, dtype=np.intp).reshape(-1, 2).T.copy()
        self._draft_of = {t: d for d, t in pairs}

    def __contains__(self, token: int) -> bool:
        return token in self._draft_of

    def draft_of(self, token: int) -> int | None:
        """Return the draft model's id for a token of the target, or None if it must be spelled.

        Control tokens that the draft model lacks are spelled, too: it reads "<|im_start|>" as
        ordinary text. If the target's tokenizer adds a BOS that is not shared, it maps to the draft
        model's BOS.
        """
        if token == self._target.bos and self._target.add_bos and token not in self._draft_of:
            return self._draft.bos
        return self._draft_of.get(token)


CANNOT_SPELL = frozenset({"wpm", "none"})
"""Kinds of tokenizers whose pieces do not reproduce the text: WordPiece loses spaces and case."""


class Translation(StrEnum):
    """How a draft model's tokens are translated to the target's."""

    SAME = "same ids"  # every id means the same, and rows of logits are equally wide
    SLICING = "slicing"  # ids that both have mean the same; the others are masked
    TOKENS = "tokens"  # ids differ: the draft model uses the pieces that both have
    NONE = "none"


class Fit(NamedTuple):
    """The translation of a draft model's tokens (`way`), and what the two vocabularies share."""

    way: Translation
    overlap: VocabularyOverlap

    def __str__(self) -> str:
        return f"{self.way} ({self.overlap})"


def choose_translation(target: Tokens, draft: Tokens) -> Fit:
    """Return the translation that loses the fewest tokens.

    If ids mean the same, the kinds of tokenizers do not matter. Otherwise both tokenizers must be
    able to spell text. At least one piece must be shared.
    """
    common = overlap(target, draft)
    if first_difference(target.vocab, draft.vocab) is None:
        return Fit(Translation.SAME, common)
    if not common.shared:
        return Fit(Translation.NONE, common)
    if ids_agree(target, draft):
        return Fit(Translation.SLICING, common)
    if {target.vocab.kind, draft.vocab.kind} & CANNOT_SPELL:
        return Fit(Translation.NONE, common)
    return Fit(Translation.TOKENS, common)
