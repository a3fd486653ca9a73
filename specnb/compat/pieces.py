"""From a tokenizer's written pieces to the bytes they stand for.

Three spellings: the 256 letters that byte-level BPE writes for bytes (GPT-2's), sentencepiece's marks (U+2581 for a
space, <0x0A> for a byte), and RWKV's backslashes.
"""

import re
from types import MappingProxyType

SPACE_MARK = "\u2581"
BYTE_PIECE = re.compile("<0x([0-9A-Fa-f]{2})>")
RWKV_ESCAPE = re.compile(rb"\\(?:x([0-9A-Fa-f]{2})|(.))", re.DOTALL)
RWKV_LETTERS = {b"t": b"\t", b"n": b"\n", b"r": b"\r"}


def _alphabet() -> dict[str, int]:
    """Printable Latin-1 letters stand for themselves, the other bytes for U+0100 and on, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


ALPHABET = MappingProxyType(_alphabet())
"""The letter of byte-level BPE and its byte."""

_TO_LATIN1 = {c: chr(ALPHABET[chr(c)]) if chr(c) in ALPHABET else "\uffff" for c in range(0x144)}


def byte_level(text: str) -> bytes | None:
    """The bytes of a byte-level piece; None if a character of it stands for no byte."""
    try:
        return text.translate(_TO_LATIN1).encode("latin-1")
    except UnicodeEncodeError:
        return None


def marked(text: str) -> bytes:
    """A sentencepiece piece with its spaces."""
    return text.replace(SPACE_MARK, " ").encode()


def fallback_byte(text: str) -> bytes | None:
    """The byte of <0x0A>; None for another text."""
    found = BYTE_PIECE.fullmatch(text)
    return bytes([int(found[1], 16)]) if found else None


def rwkv(text: str) -> bytes:
    """A piece of RWKV's vocabulary with its escapes resolved."""

    def resolve(found: re.Match[bytes]) -> bytes:
        return bytes([int(found[1], 16)]) if found[1] else RWKV_LETTERS.get(found[2], found[2])

    return RWKV_ESCAPE.sub(resolve, text.encode())
