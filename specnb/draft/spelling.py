"""Encode bytes as tokens of a model, exactly or not at all.

Tokenizers do more than encode: they add a leading space or a BOS token, or normalize the text.
`encode_exact` uses their output only as far as its pieces are the requested bytes. `GreedySpeller`
needs no tokenizer: it takes the longest piece of the vocabulary first.
"""

from specnb.errors import InputError
from specnb.lm.base import LanguageModel


def encode_exact(model: LanguageModel, before: bytes, added: bytes) -> tuple[int, ...] | None:
    """Return the tokens of `added` as the model's tokenizer writes them after `before`, or None.

    `before` is context only. If no token boundary lies between the two, `added` is encoded alone,
    then at the start of a line (sentencepiece prepends a space to a text, but not to a line).
    The result is None if `added` is not valid UTF-8, if the tokenizer does not reproduce its bytes,
    or if it contains a control token or an end of generation.
    """
    while before and before[0] & 0xC0 == 0x80:  # the rest of a character that was cut
        before = before[1:]
    for context in dict.fromkeys((before, b"", b"\n")):
        try:
            ids = model.encode((context + added).decode(), special=False)
        except (UnicodeDecodeError, InputError):  # half a character, or one that has no token
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
        pieces = reversed([*enumerate(model.vocab.pieces)])  # of equal pieces the lowest id remains
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
