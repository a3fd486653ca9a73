"""From the name a user writes to a description, without opening a model.

smollm2-135m  smollm2-135m:q8_0     zoo (fetched where it is not there yet)
qwen2.5  qwen3-0.6b                 shelf: a vocabulary of data/vocab, or published facts of a model
model.gguf                          its header
./folder  hf:ORG/NAME?revision=x    config.json, tokenizer.json and the other small files
tiny-hybrid                         the same, of a model that comes with the checkout
tokenizer.json  x.tiktoken          a tokenizer alone
"""

import base64
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple
from urllib.parse import parse_qsl

from specnb.compat import folder, gguf, shelf
from specnb.compat.description import HUB, Description
from specnb.errors import InputError
from specnb.io import read_bytes
from specnb.lm import embedded, zoo
from specnb.lm.vocab import Vocabulary


class Reader(NamedTuple):
    """One kind of source: whether a name is of this kind, how it is read, and whether weights are there to be run.

    `takes` are the options behind "?" that say what is read; the others are for engines.
    """

    fits: Callable[[str], bool]
    read: Callable[..., Description]
    opens: bool = False
    takes: tuple[str, ...] = ()


def describe(name: str | Path) -> Description:
    """The description of a model or a tokenizer by name; its `name` is the one given.

    Options after "?" are left out, but for the `revision` of a model on the hub. Raises InputError for what is no
    known source or not sound, FetchError for what cannot be fetched.
    """
    text, reader = _reader(name)
    given = dict(parse_qsl(str(name).partition("?")[2]))
    return replace(reader.read(text, **{key: given[key] for key in reader.takes if key in given}), name=str(name))


def opens(name: str | Path) -> bool:
    """Whether `specnb.load` opens what this names; else it describes a tokenizer alone. Raises as `describe`."""
    return _reader(name)[1].opens


def _reader(name: str | Path) -> tuple[str, Reader]:
    text = str(name).partition("?")[0]
    for reader in READERS:
        if reader.fits(text):
            return text, reader
    raise InputError(
        f"{str(name)!r} is nothing that describes a tokenizer: give a zoo name ({', '.join(zoo.ENTRIES)}), a name of "
        f"the shelf ({', '.join(shelf.names())}), a .gguf file, a folder with config.json, hf:ORG/NAME, a "
        "tokenizer.json or a *.tiktoken file that exists"
    )


def _path(name: str) -> Path:
    return Path(name).expanduser()


def _is_folder(name: str) -> bool:
    with suppress(OSError, RuntimeError, ValueError):  # too long, ~ of an unknown user, a NUL in it
        return _path(name).is_dir()
    return False


def _of_zoo(name: str) -> Description:
    """A copy of another type is not made for its header's sake: but for the type it is that of the file as shipped."""
    entry, kind = zoo.parse(name)
    described = gguf.describe(zoo.path(entry.name))
    return described if kind is None else replace(described, quantisation=kind)


MAX_TIKTOKEN_BYTES = 128 << 20


def tiktoken(path: Path) -> Description:
    """Pieces of a *.tiktoken file, one "base64 rank" a line, the rank being the id.

    Special tokens are not in it (they are code), so bos, eos and `encode` are None. Raises InputError naming the line
    for text that is not base64, ids out of range, and ids used twice.
    """
    pieces: dict[int, bytes] = {}
    for number, line in enumerate(read_bytes(path, MAX_TIKTOKEN_BYTES).splitlines(), start=1):
        if not line.strip():
            continue
        try:
            word, rank = line.split()
            piece, i = base64.b64decode(word, validate=True), int(rank)
            if not 0 <= i < folder.MAX_ID or i in pieces:
                raise ValueError(f"the id {i} is used before, or not below {folder.MAX_ID}")
        except ValueError as error:
            raise InputError(f"{path}: line {number} is {line[:60]!r}, expected BASE64 ID ({error})") from error
        pieces[i] = piece
    if not pieces:
        raise InputError(f"{path} holds no token: it is no tiktoken file, or empty")
    size = 1 + max(pieces)
    vocab = Vocabulary(tuple(pieces.get(i, b"") for i in range(size)), kind="bpe", pre="tiktoken")
    return Description(name=path.stem, source=str(path), vocab=vocab, n_tokens=size, vocab_size=size)


READERS = (
    Reader(zoo.is_zoo_name, _of_zoo, opens=True),
    Reader(lambda name: name in embedded.names(), lambda name: folder.describe(embedded.folder(name)), opens=True),
    Reader(lambda name: name.startswith(HUB), folder.describe, opens=True, takes=("revision",)),
    Reader(lambda name: name.lower().endswith(".gguf"), lambda name: gguf.describe(_path(name)), opens=True),
    Reader(lambda name: name.lower().endswith(".tiktoken"), lambda name: tiktoken(_path(name))),
    Reader(lambda name: name.lower().endswith(".json"), lambda name: folder.describe(_path(name))),
    Reader(lambda name: name.lower() in shelf.names(), shelf.describe),
    Reader(_is_folder, lambda name: folder.describe(_path(name)), opens=True),
)
"""Tried in order; the first that fits reads."""
