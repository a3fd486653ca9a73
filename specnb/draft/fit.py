"""The decision how a draft model's tokens become the target's: one, for the verdict and for the drafter."""

from enum import StrEnum
from typing import NamedTuple

from specnb.draft.token_map import Overlap, Tokens, ids_agree, overlap
from specnb.lm.vocab import first_difference

CANNOT_SPELL = frozenset({"wpm", "wordpiece", "none"})
"""Kinds of tokenizers whose pieces do not spell the text back: blanks and case are lost (WordPiece, by llama.cpp's name
and by transformers'), or there is no tokenizer."""

ENOUGH_SHARED = 0.8
"""Share of the tokens the target uses in an ordinary text from which on shared tokens draft better than strings.

The temperature is not known when a drafter is chosen. Above 0 drafts are best drawn, which only shared tokens can be;
strings pay where the target uses many tokens that the draft lacks. Tokens a round, shared tokens against strings, with
a draft of SmolLM2-135M behind other vocabularies (K = 4, four prompts, 24 to 32 tokens): at temperature 0.8 2.51
against 1.94 where 95 % is shared, 2.13 against 1.94 at 87 %, 1.71 against 1.78 at 77 %; greedy 2.78 against 2.72,
2.56 against 2.56, 2.04 against 2.23.
"""


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
    overlap: Overlap


def fit(target: Tokens, draft: Tokens) -> Fit:
    """The way that loses least.

    Ids that mean the same need no translation, whatever their tokenizers are. Else both must be able to spell text;
    shared tokens are taken where the target mostly uses these (ENOUGH_SHARED, or no tokenizer that could write an
    ordinary text to count in), strings where it does not, or where not a piece is shared but both can write it.
    """
    common = overlap(target, draft)
    if first_difference(target.vocab, draft.vocab) is None:
        return Fit(Way.SAME, common)
    if common.shared and ids_agree(target, draft):
        return Fit(Way.SLICING, common)
    return Fit(_translated(target, draft, common), common)


def _translated(target: Tokens, draft: Tokens, common: Overlap) -> Way:
    if {target.vocab.kind, draft.vocab.kind} & CANNOT_SPELL:
        return Way.NONE
    if not common.shared:
        return Way.NONE if None in (common.target_uses, common.draft_uses) else Way.STRINGS
    few = common.target_uses is not None and common.target_uses < ENOUGH_SHARED
    return Way.STRINGS if few else Way.TOKENS
