"""Bytes as the tokens of a model, exactly or not at all, and a text that grows, spelled anew only at its end.

Tokenizers do more than spell: they add a leading space, a BOS token, or clean up. Here their answer is used as far as
its pieces are the bytes that were asked for; the rest is spelled from the vocabulary, longest piece first.
"""

from codecs import getincrementaldecoder

from specnb.errors import InputError
from specnb.lm.base import LanguageModel

HEALED = 8
"""Tokens at the end of a spelling that may change when text is added: more than one word or number takes."""
CONTEXT = 16
"""Tokens before them that the tokenizer is shown."""


def encode_exact(model: LanguageModel, before: bytes, added: bytes) -> tuple[int, ...] | None:
    """The tokens of `added` as the model's tokenizer writes them behind `before`; None where it does not.

    `before` is only context. Without a token border between the two, `added` is tried by itself, then at the start of
    a line (sentencepiece puts a space before a text, but none there). None as well for bytes that are no text, and
    where a control token or an end of generation would come out: these are never made from text.
    """
    while before and before[0] & 0xC0 == 0x80:  # what is left of a character that was cut
        before = before[1:]
    for context in dict.fromkeys((before, b"", b"\n")):
        try:
            ids = model.encode((context + added).decode(), special=False)
        except (UnicodeDecodeError, InputError):  # half a character, or letters that the tokenizer does not know
            continue
        at, missing = len(ids), len(added)
        while missing > 0 and at > 0:
            at -= 1
            missing -= len(model.vocab.piece(ids[at]))
        last = tuple(ids[at:])
        if model.vocab.decode_bytes(last) == added and model.vocab.control.isdisjoint(last):
            return last
    return None


def whole_characters(text: bytes) -> bytes:
    """`text` without an unfinished character at its end."""
    decoder = getincrementaldecoder("utf-8")("ignore")
    decoder.decode(text)
    return text[: len(text) - len(decoder.getstate()[0])]


class Longest:
    """Spells any bytes from a vocabulary, the longest piece first; bytes that no piece begins with are left out."""

    def __init__(self, model: LanguageModel) -> None:
        pieces, control = reversed([*enumerate(model.vocab.pieces)]), model.vocab.control  # the lowest id stays
        self._ids = {piece: token for token, piece in pieces if piece and token not in control}
        self._reach = max(map(len, self._ids), default=0)

    def spell(self, text: bytes) -> list[int]:
        ids, at = [], 0
        while at < len(text):
            sizes = range(min(self._reach, len(text) - at), 0, -1)
            size = next((n for n in sizes if text[at : at + n] in self._ids), 0)
            if size:
                ids.append(self._ids[text[at : at + size]])
            at += size or 1
        return ids


class GrowingSpelling:
    """The tokens `ids` of a text that grows at its end, as `model`'s tokenizer writes the whole text.

    Only the last HEALED tokens are looked at again, so that a word whose halves came one after the other is spelled
    as a word, and adding costs the same at any length.
    """

    def __init__(self, model: LanguageModel) -> None:
        self._model, self._longest = model, Longest(model)
        self.ids: list[int] = []
        self._floor = 0  # text before this index is finished: a control token follows it

    def clear(self) -> None:
        self.ids.clear()
        self._floor = 0

    def add_control(self, token: int) -> None:
        """A token of the model that is no text: what comes before it and behind it is spelled by itself."""
        self.ids.append(token)
        self._floor = len(self.ids)

    def add(self, text: bytes) -> None:
        if not text:
            return
        decode = self._model.vocab.decode_bytes
        redo = max(self._floor, len(self.ids) - HEALED)
        before = decode(self.ids[max(self._floor, redo - CONTEXT) : redo])
        open_end = decode(self.ids[redo:])
        whole = whole_characters(open_end + text)
        if (healed := encode_exact(self._model, before, whole)) is not None:
            self.ids[redo:] = [*healed, *self._longest.spell((open_end + text)[len(whole) :])]
        else:
            self.ids += encode_exact(self._model, before + open_end, text) or self._longest.spell(text)
