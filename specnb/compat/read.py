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
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qsl

import psutil

from specnb.compat import folder, gguf, shelf
from specnb.compat.check import check
from specnb.compat.description import HUB, Description, State
from specnb.errors import FetchError, InputError, LoadError, did_you_mean
from specnb.fetch import HUB_GGUF, from_hub
from specnb.io import read_bytes, read_json
from specnb.lm import zoo
from specnb.lm.load import load, parse, weights_bytes
from specnb.lm.vocab import Vocabulary
from specnb.registry import resolve


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


def sheet(name: str) -> dict[str, Any]:
    """The facts of a model: what it is, what opens here and how that goes back, and what can draft for it.

    Opens the model where there are weights. Raises as `describe`; a model that does not open says why in `opens`.
    """
    described, base = describe(name), name.partition("?")[0].lower()
    rows = zoo.status()
    licences = {row.name: row.licence for row in rows}
    stated = {key: getattr(described, key) for key in ("source", "architecture", "state", "n_layers", "vocab_size")}
    facts = {"model": name, **stated, "licence": described.licence or licences.get(base)}
    facts |= {"tokenizer": described.vocab and described.vocab.kind, "trained_n_ctx": described.n_ctx}
    if not opens(name):
        return facts | {"opens": "no: it is a tokenizer, or facts, without weights"}
    spec, crops = parse(name), described.state is State.ATTENTION
    engine = "gguf" if spec.backend == "llama" else "hf"
    facts["size_bytes"] = weights_bytes(spec)
    facts["strategies"] = ["crop"] if crops else list(resolve(f"specnb.lm.{engine}.model:PREFERRED"))
    here = {row.name for row in rows if row.present}  # a list of drafts is no reason to fetch gigabytes
    others = [other for other in (*zoo.ENTRIES, *zoo.embedded_names()) if other != base and other in here]
    facts["drafts"] = [f"{other}: {check(described, describe(other)).verdict}" for other in others]
    heads = {p.parent.name: read_json(p, 1 << 20) for p in zoo.embedded_root().parent.glob("heads/*/config.json")}
    facts["heads"] = [head for head, card in heads.items() if card["backbone_name"].partition("?")[0] == base]
    before = psutil.Process().memory_info().rss
    try:
        with closing(load(name)) as model:
            caps = model.caps
            for key in ("engine", "device", "dtype", "n_ctx", "max_width", "rewind", "rewind_reason", "trees"):
                facts[key] = getattr(caps, key)
            return facts | {"opens": "yes", "memory_bytes": psutil.Process().memory_info().rss - before}
    except (InputError, LoadError, FetchError) as error:
        return facts | {"opens": f"no: {error}"}


def _reader(name: str | Path) -> tuple[str, Reader]:
    text = str(name).partition("?")[0]
    reader = next((reader for reader in READERS if reader.fits(text)), None)
    if reader is None:
        known = [*zoo.ENTRIES, *zoo.embedded_names(), *shelf.names()]
        near = "it is a file of another kind; " if zoo.expanded(text).is_file() else did_you_mean(text, known)
        near = near or f"there are {', '.join(known)}; "
        raise InputError(
            f"{str(name)!r} is nothing that describes a tokenizer: {near}or give a .gguf file, a folder with "
            "config.json, hf:ORG/NAME, a tokenizer.json or a *.tiktoken file that exists"
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
