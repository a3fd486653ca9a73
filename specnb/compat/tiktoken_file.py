"""A tiktoken file: one "base64 rank" a line, the rank being the id. It states pieces and nothing else."""

import base64
import binascii
from pathlib import Path

from specnb.compat.description import Description
from specnb.errors import InputError
from specnb.io import read_bytes
from specnb.lm.vocab import Vocabulary

MAX_BYTES = 128 << 20
MAX_ID = 4_000_000


def describe(path: Path | str) -> Description:
    """Pieces of a *.tiktoken file; special tokens are not in it (they are code), so bos, eos and `encode` are None.

    Raises InputError naming the line for text that is not base64, ids out of range, and ids or pieces used twice.
    """
    path = Path(path)
    pieces = _pieces(path)
    if not pieces:
        raise InputError(f"{path} holds no token: it is no tiktoken file, or empty")
    size = 1 + max(pieces)
    listed = tuple(pieces.get(i, b"") for i in range(size))
    return Description(
        name=path.stem,
        source=str(path),
        vocab=Vocabulary(pieces=listed, kind="bpe", pre="tiktoken"),
        n_tokens=size,
        vocab_size=size,
    )


def _pieces(path: Path) -> dict[int, bytes]:
    pieces: dict[int, bytes] = {}
    line_of: dict[bytes, int] = {}
    for number, line in enumerate(read_bytes(path, MAX_BYTES).splitlines(), start=1):
        if not line.strip():
            continue
        try:
            piece, i = _parse(line)
        except ValueError as error:
            shown = repr(line[:60])
            raise InputError(f"{path}: line {number} is {shown}: {error}; it must read BASE64 ID") from error
        if i in pieces or line_of.setdefault(piece, number) != number:
            raise InputError(f"{path}: line {number} gives {piece[:40]!r} the id {i}: one of them was used before")
        pieces[i] = piece
    return pieces


def _parse(line: bytes) -> tuple[bytes, int]:
    """One line. Raises ValueError."""
    words = line.split()
    if len(words) != 2:
        raise ValueError(f"it has {len(words)} words")
    if not words[1].isdigit() or len(words[1]) > 7 or int(words[1]) >= MAX_ID:
        raise ValueError(f"the id is no number below {MAX_ID}")
    try:
        return base64.b64decode(words[0], validate=True), int(words[1])
    except binascii.Error as error:
        raise ValueError(f"not base64 ({error})") from error
