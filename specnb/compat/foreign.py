"""A model that is at hand behind the vocabulary of a family whose weights are not.

The draft reads and writes the family's tokens: its text is spelled in them, its rows are those over the pieces that
both have. So it drafts like a model of that family of known quality, and what a translation costs can be measured.
"""

from specnb.compat.description import Description
from specnb.draft.spelling import Longest
from specnb.draft.translate import TokenIntersection
from specnb.errors import InputError
from specnb.lm.base import LanguageModel
from specnb.lm.vocab import Vocabulary


class Family:
    """A description as the reader and writer of its tokens; without its own tokenizer, longest piece first."""

    def __init__(self, described: Description) -> None:
        if described.vocab is None:
            raise InputError(f"the pieces of {described.name} are not at hand: take a name of data/vocab, or a file")
        self.name: str = described.name
        self.vocab: Vocabulary = described.vocab
        self._encode = described.encode
        self._longest = Longest(self)

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Control tokens are not recognised in the text."""
        return self._longest.spell(text.encode()) if self._encode is None else self._encode(text)


def speaking(model: LanguageModel, described: Description) -> TokenIntersection:
    """`model` behind the vocabulary of `described`; closing it closes `model`.

    Raises InputError for a description without pieces, VocabularyMismatch when not one piece is shared.
    """
    return TokenIntersection(model, Family(described))
