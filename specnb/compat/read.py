"""From the name a user writes to a description, without opening a model.

smollm2-135m  smollm2-135m:q8_0     zoo (fetched where it is not there yet)
qwen2.5  qwen3-0.6b                 shelf: a vocabulary of data/vocab, or published facts of a model
model.gguf  hf:ORG/NAME:Q4_K_M      its header
./folder  hf:ORG/NAME?revision=x    config.json, tokenizer.json and the other small files
tiny-hybrid                         the same, of a model that comes with the checkout
tokenizer.json  x.tiktoken          a tokenizer alone
"""

import base64
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple
from urllib.parse import parse_qsl

from specnb.compat import folder, gguf, shelf
from specnb.compat.description import HUB, Description
from specnb.errors import InputError
from specnb.fetch import HUB_GGUF, from_hub
from specnb.io import read_bytes
from specnb.lm import zoo
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
    reader = next((reader for reader in READERS if reader.fits(text)), None)
    if reader is None:
        raise InputError(
            f"{str(name)!r} is nothing that describes a tokenizer: give a zoo name ({', '.join(zoo.ENTRIES)}), a name "
            f"of the shelf ({', '.join(shelf.names())}), a .gguf file, a folder with config.json, hf:ORG/NAME, a "
            "tokenizer.json or a *.tiktoken file that exists"
        )
    return text, reader


MAX_TIKTOKEN_BYTES = 128 << 20


def tiktoken(path: Path) -> Description:
    """Pieces of a *.tiktoken file, one "base64 rank" a line, the rank being the id.

    Special tokens are not in it (they are code), so bos, eos and `encode` are None. Raises InputError for lines that
    are none of these, for ids out of range, and for ids used twice.
    """
    lines = [line.split() for line in read_bytes(path, MAX_TIKTOKEN_BYTES).splitlines() if line.strip()]
    try:
        pieces = {int(rank): base64.b64decode(word, validate=True) for word, rank in lines}
    except ValueError as error:
        raise InputError(f"{path} holds a line that is not BASE64 ID ({error}): fetch it again") from error
    if len(pieces) < len(lines) or not lines or min(pieces) < 0 or max(pieces) >= folder.MAX_ID:
        raise InputError(f"{path}: got {len(lines)} ids, expected some, each once, from 0 to {folder.MAX_ID - 1}")
    size = 1 + max(pieces)
    vocab = Vocabulary(tuple(pieces.get(i, b"") for i in range(size)), kind="bpe", pre="tiktoken")
    return Description(name=path.stem, source=str(path), vocab=vocab, n_tokens=size, vocab_size=size)


def _ends(suffix: str) -> Callable[[str], bool]:
    return lambda name: name.lower().endswith(suffix)


READERS = (
    # a copy of another type is not made for its header's sake: that of the file as shipped says the same
    Reader(zoo.is_zoo_name, lambda name: gguf.describe(zoo.path(zoo.parse(name)[0].name)), opens=True),
    Reader(HUB_GGUF.fullmatch, lambda *at, **of: gguf.describe(from_hub(*at, **of)), opens=True, takes=("revision",)),
    Reader(lambda name: name.startswith(HUB), folder.describe, opens=True, takes=("revision",)),
    Reader(_ends(".gguf"), lambda name: gguf.describe(zoo.expanded(name)), opens=True),
    Reader(_ends(".tiktoken"), lambda name: tiktoken(zoo.expanded(name))),
    Reader(_ends(".json"), lambda name: folder.describe(zoo.expanded(name))),
    Reader(lambda name: name.lower() in shelf.names(), shelf.describe),
    Reader(
        lambda name: zoo.local_folder(name).is_dir(), lambda name: folder.describe(zoo.local_folder(name)), opens=True
    ),
)
"""Tried in order; the first that fits reads."""
