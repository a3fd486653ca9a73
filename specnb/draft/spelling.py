"""Encode bytes as tokens of a model.

Tokenizers do more than encode: they add a leading space or a BOS token, or normalize the text.
`encode_exact` uses their output only if its pieces are exactly the requested bytes. `GreedySpeller`
needs no tokenizer: it takes the longest matching piece, and skips bytes that start no piece.
"""

from specnb.errors import InputError
from specnb.lm.base import LanguageModel


def encode_exact(model: LanguageModel, before: bytes, added: bytes) -> tuple[int, ...] | None:
    """Return the ids that the model's tokenizer gives for `added` after `before`, or None.

    `before` is only context. If there is no token boundary between the two, `added` is encoded
    alone, then at the start of a line (sentencepiece prepends a space to a text, but not to a
    line). The result is None if `added` is not valid UTF-8, if the ids do not reproduce its bytes,
    or if they contain a control or end-of-generation token.
    """
    while before and before[0] & 0xC0 == 0x80:  # the rest of an incomplete character
        before = before[1:]
    for context in dict.fromkeys((before, b"", b"\n")):
        try:
            ids = model.encode((context + added).decode(), special=False)
        except (UnicodeDecodeError, InputError):  # an incomplete character, or one without a token
            continue
        start = len(ids)
        missing = len(added)
        while missing > 0 and start > 0:
            start -= 1
            missing -= len(model.vocab.piece(ids[start]))
        last = tuple(ids[start:])
        if model.vocab.decode_bytes(last) == added and model.vocab.control.isdisjoint(last):
            return last
    return None


class GreedySpeller:
    """Encodes any bytes with a vocabulary, longest piece first; skips bytes that start no piece."""

    def __init__(self, model: LanguageModel) -> None:
        control = model.vocab.control
        pieces = reversed([*enumerate(model.vocab.pieces)])  # the lowest id of equal pieces remains
        self._ids = {piece: token for token, piece in pieces if piece and token not in control}
        self._longest = max(map(len, self._ids), default=0)

    def spell(self, text: bytes) -> list[int]:
        """Return the ids of `text`."""
        ids = []
        start = 0
        while start < len(text):
            sizes = range(min(self._longest, len(text) - start), 0, -1)
            size = next((n for n in sizes if text[start : start + n] in self._ids), 0)
            if size:
                ids.append(self._ids[text[start : start + size]])
            start += size or 1
        return ids
