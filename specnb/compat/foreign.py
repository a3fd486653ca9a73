"""A model that is at hand behind the vocabulary of a family whose weights are not.

The draft writes the family's tokens, and only those: its rows are those over the pieces that both have. So a model of
known quality drafts with what the family can say, and what a translation then costs can be measured. It is a bound: a
model of that family cuts its texts in the family's way, and thinks in other pieces.
"""

from dataclasses import replace
from functools import cached_property

from specnb.compat.description import Description
from specnb.draft.spelling import Longest
from specnb.draft.token_map import Tokens
from specnb.draft.translate import TokenIntersection
from specnb.errors import InputError, SpecnbError
from specnb.lm.base import LanguageModel
from specnb.lm.vocab import Vocabulary


class Family:
    """A description as the reader and writer of its tokens; without its own tokenizer, longest piece first.

    Raises InputError for a description without pieces.
    """

    def __init__(self, described: Description) -> None:
        if described.vocab is None:
            raise InputError(f"the pieces of {described.name} are not at hand: take a name of data/vocab, or a file")
        self.name: str = described.name
        self.vocab: Vocabulary = described.vocab
        self._encode = described.encode

    @cached_property
    def _longest(self) -> Longest:
        return Longest(self)

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Control tokens are not recognised in the text."""
        return self._longest.spell(text.encode()) if self._encode is None else self._encode(text)


def speaking(model: LanguageModel, family: Family) -> TokenIntersection:
    """`model` behind the vocabulary of `family`; closing it closes `model`.

    Raises VocabularyMismatch when not one piece is shared.
    """
    made = TokenIntersection(model, family)
    made.name = f"{model.name} as {family.name}"
    return made


def tokens_of(described: Description) -> Tokens | None:
    """A description's tokens, to be compared with others'; None where only facts are published.

    A tokenizer that cannot be opened is done without, as where there is none.
    """
    if described.vocab is None:
        return None
    tokens = Tokens(Family(described))
    try:
        tokens.sample  # noqa: B018 - opens the tokenizer
    except SpecnbError:
        return Tokens(Family(replace(described, encode=None)))
    return tokens
