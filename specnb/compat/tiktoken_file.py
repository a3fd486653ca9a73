"""A tiktoken file: one "base64 rank" a line, the rank being the id. It states pieces and nothing else."""

import base64
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
    seen: set[bytes] = set()
    for number, line in enumerate(read_bytes(path, MAX_BYTES).splitlines(), start=1):
        if not line.strip():
            continue
        try:
            word, rank = line.split()
            piece, i = base64.b64decode(word, validate=True), int(rank)
        except ValueError as error:
            raise InputError(f"{path}: line {number} is {line[:60]!r}, expected BASE64 ID ({error})") from error
        if not 0 <= i < MAX_ID or i in pieces or piece in seen:
            raise InputError(
                f"{path}: line {number} gives {piece[:40]!r} the id {i}: used before, or not below {MAX_ID}"
            )
        pieces[i] = piece
        seen.add(piece)
    return pieces
