"""Which ids of two vocabularies mean the same text, and so how a draft model's tokens become the target's (`fit`).

A piece is matched by its bytes: text with text, a control token only with a control token of the same text, padding
(b"") with nothing. The pairs are sorted by id, so that both sides of a copy from one row into another are in the same
order. (transformers 5.23 gathers in the order of a hash map and scatters in the order of ids: no longer lossless.)
"""

from collections.abc import Collection
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple, Protocol

import numpy as np

from specnb.draft.spelling import encode_exact
from specnb.lm.vocab import Vocabulary, first_difference

SAMPLE = """The first reading was taken in the morning, before the wind had turned; "we waited," she wrote, "for hours."
def mean(values: list[float]) -> float:
    if not values:
        raise ValueError("no values")
    return sum(values) / len(values)

{"name": "probe", "count": 12, "tags": ["a", "b"], "nested": {"ok": true}}
How do I sort a list of numbers? Use `sorted(numbers, reverse=True)`. That's it, isn't it?
"""


class Tokenizing(Protocol):
    """What reads and writes tokens: a LanguageModel, or the description of one (`compat.description.Description`)."""

    name: str
    vocab: Vocabulary

    def encode(self, text: str, *, special: bool = True) -> list[int]: ...


class Tokens:
    """The tokens of one model, prepared for comparison with those of many others."""

    def __init__(self, model: Tokenizing) -> None:
        self.vocab, self._model = model.vocab, model

    @cached_property
    def ids(self) -> dict[tuple[bytes, bool], int]:
        """The id of every piece (and whether it is a control token).

        Of ids with the same piece it is the one that the model's tokenizer writes, for that is the one the model knows
        (sentencepiece has `a` as a letter and, earlier, as a byte that is never written); else the smallest.
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
    def sample(self) -> tuple[int, ...] | None:
        """SAMPLE as the tokenizer writes it, None if it cannot."""
        return encode_exact(self._model, b"", SAMPLE.encode())

    @cached_property
    def by_id(self) -> tuple[bytes, ...]:
        """The pieces up to the last id that has a text."""
        return self.vocab.pieces[: max((i for i, piece in enumerate(self.vocab.pieces, 1) if piece), default=0)]

    def uses(self, known: Collection[tuple[bytes, bool]]) -> float | None:
        """The share of the sample's tokens whose pieces are `known`; None without a sample."""
        if not self.sample:
            return None
        keys = [(self.vocab.pieces[token], False) for token in self.sample]
        usual = (key in known for key, token in zip(keys, self.sample, strict=True) if self.ids.get(key) == token)
        return sum(usual) / len(keys)


class VocabularyOverlap(NamedTuple):
    """`shared` pieces of `target_pieces` and `draft_pieces` (padding not counted), under whatever id.

    `target_uses` and `draft_uses` say more: the share of the tokens of an ordinary text, as the target's (the draft's)
    tokenizer writes it, that the other has too; None without a tokenizer that can write it.
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
        text = f"{self.shared} pieces shared: {self.of_target:.1%} of the target's, {self.of_draft:.1%} of the draft's"
        if None not in self:
            text += f"; of the tokens of an ordinary text {self.target_uses:.0%} and {self.draft_uses:.0%}"
        return text


def overlap(target: Tokens, draft: Tokens) -> VocabularyOverlap:
    """What two models' tokens have in common."""
    if target.ids and draft.ids and ids_agree(target, draft):
        shared = sum(map(bool, min(target.by_id, draft.by_id, key=len)))
    else:
        shared = len(target.ids.keys() & draft.ids.keys())
    pieces = (sum(map(bool, tokens.vocab.pieces)) for tokens in (target, draft))
    return VocabularyOverlap(shared, *pieces, target.uses(draft.ids), draft.uses(target.ids))


def ids_agree(target: Tokens, draft: Tokens) -> bool:
    """Whether every id that both have means the same; one may have more of them, or more padding."""
    short, long = sorted((target.by_id, draft.by_id), key=len)
    return bool(short) and long[: len(short)] == short


class TokenMap:
    """Pairs of ids with equal pieces: `target_ids[i]` means what `draft_ids[i]` means, ascending in `draft_ids`.

    `is_slice` where every id that both have means the same, so that the pairs are those ids.
    """

    def __init__(self, target: Tokens, draft: Tokens) -> None:
        self._target, self._draft = target.vocab, draft.vocab
        self.overlap = overlap(target, draft)
        pairs = sorted((draft.ids[key], target.ids[key]) for key in target.ids.keys() & draft.ids.keys())
        self.is_slice = bool(pairs) and ids_agree(target, draft)
        if self.is_slice:  # repeated pieces too mean what they mean there
            pairs = [(i, i) for i, piece in enumerate(min(target.by_id, draft.by_id, key=len)) if piece]
        self.draft_ids, self.target_ids = np.array(pairs, dtype=np.intp).reshape(-1, 2).T.copy()
        self._draft_of = {t: d for d, t in pairs}

    def __contains__(self, token: int) -> bool:
        return token in self._draft_of

    def draft_of(self, token: int) -> int | None:
        """The draft's id of a target's token, or None: it is then read as the text it is written with.

        So are control tokens: a draft that lacks them still reads "<|im_start|>user" in letters. Only a BOS that the
        target puts before every text is the draft's BOS.
        """
        if token == self._target.bos and self._target.add_bos and token not in self._draft_of:
            return self._draft.bos
        return self._draft_of.get(token)


CANNOT_SPELL = frozenset({"wpm", "none"})
"""Kinds of tokenizers whose pieces do not spell the text back: WordPiece loses blanks and case."""

ENOUGH_SHARED = 0.8
"""Share of the tokens the target uses in an ordinary text from which on shared tokens draft better than strings.
Tokens a round of SmolLM2-135M behind other ids, K = 4: 2.13 against 1.94 at 87 %, 1.71 against 1.78 at 77 %."""


class Way(StrEnum):
    """How a draft's tokens become the target's."""

    SAME = "same ids"  # every id means the same, rows of logits are equally wide
    SLICING = "slicing"  # ids that both have mean the same; the others are masked
    TOKENS = "tokens"  # ids differ: drafts with the pieces that both have
    STRINGS = "strings"  # the draft's text is spelled in the target's tokens
    NONE = "no way"


class Fit(NamedTuple):
    """The way from a draft's tokens to its target's, and what the two have in common."""

    way: Way
    overlap: VocabularyOverlap

    def __str__(self) -> str:
        return f"{self.way} ({self.overlap})"


def fit(target: Tokens, draft: Tokens) -> Fit:
    """The way that loses least.

    Ids that mean the same need no translation, whatever their tokenizers are. Else both must be able to spell text:
    shared tokens are taken where the target mostly uses these (ENOUGH_SHARED) or where that is not known, else strings.
    """
    common = overlap(target, draft)
    if first_difference(target.vocab, draft.vocab) is None:
        return Fit(Way.SAME, common)
    if common.shared and ids_agree(target, draft):
        return Fit(Way.SLICING, common)
    unwritten = None in (common.target_uses, common.draft_uses)
    if {target.vocab.kind, draft.vocab.kind} & CANNOT_SPELL or (not common.shared and unwritten):
        return Fit(Way.NONE, common)
    few = common.target_uses is not None and common.target_uses < ENOUGH_SHARED
    return Fit(Way.STRINGS if few else Way.TOKENS, common)
