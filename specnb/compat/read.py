"""From the name a user writes to a description, without opening a model.

smollm2-135m  smollm2-135m:q8_0     zoo (fetched where it is not there yet)
qwen2.5  qwen3-0.6b                 shelf: a vocabulary of data/vocab, or published facts of a model
hermes-4-70b                        the same, and its small files on the hub, whose licence keeps them from the shelf
model.gguf  hf:ORG/NAME:Q4_K_M      its header
./folder  hf:ORG/NAME?revision=x    config.json, tokenizer.json and the other small files
tiny-hybrid                         the same, of a model that comes with the checkout
tokenizer.json  x.tiktoken          a tokenizer alone
"""

import base64
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import psutil

from specnb.compat import folder, gguf, shelf
from specnb.compat.check import check
from specnb.compat.description import HUB, MAX_ID, Description, State
from specnb.errors import FetchError, InputError, LoadError, did_you_mean
from specnb.fetch import HUB_GGUF, from_hub
from specnb.io import read_bytes, read_json, reading
from specnb.lm import files
from specnb.lm.files import parse, weights_bytes
from specnb.lm.load import load
from specnb.lm.vocab import Vocabulary
from specnb.registry import resolve


def describe(name: str | Path, *, fetch: bool = True) -> Description:
    """The description of a model or a tokenizer by name; its `name` is the one given.

    Options after "?" are left out, but for the `revision` of a model on the hub. Without `fetch` the shelf alone tells
    what names of the zoo and of the shelf are. Raises InputError for what is no known source or not sound, FetchError
    for what cannot be fetched.
    """
    text, _, query = str(name).partition("?")
    lower, revision = text.lower(), dict(parse_qsl(query)).get("revision", "main")
    if files.is_zoo_name(text):  # no copy of another type is made for its header's sake: the shipped one says the same
        entry, _ = files.find_entry(text)
        described = gguf.describe(files.zoo_file(entry.name)) if fetch else shelf.describe(entry.vocabulary)
    elif HUB_GGUF.fullmatch(text):
        described = gguf.describe(from_hub(text, revision))
    elif text.startswith(HUB):
        described = folder.describe(text, revision=revision)
    elif lower.endswith(".gguf"):
        described = gguf.describe(files.expand_home(text))
    elif lower.endswith(".tiktoken"):
        described = tiktoken(files.expand_home(text))
    elif lower.endswith(".json"):
        described = folder.describe(files.expand_home(text))
    elif lower in shelf.names():
        described = _of_shelf(text) if fetch else shelf.describe(text)
    elif files.local_folder(text).is_dir():
        described = folder.describe(files.local_folder(text))
    else:
        known = [*files.ENTRIES, *files.embedded_names(), *shelf.names()]
        near = did_you_mean(text, known) or f"there are {', '.join(known)}; "
        kinds = "a .gguf, .tiktoken or tokenizer.json file, a folder, or hf:ORG/NAME"
        raise InputError(f"{str(name)!r} describes no tokenizer: {near}or give {kinds}")
    return replace(described, name=str(name))


def _of_shelf(name: str) -> Description:
    """A name of the shelf; where its pieces may not be shipped, with what the small files on the hub state.

    Where the hub gives none the facts stand alone, and the verdict's finding says how to get them.
    """
    facts = shelf.describe(name)
    if facts.hub is None:
        return facts
    try:
        hub = folder.describe(facts.hub)
    except FetchError:
        return facts
    stated = {key: value for key, value in vars(hub).items() if value not in (None, frozenset(), ())}
    return replace(facts, **stated, from_memory=tuple(key for key in facts.from_memory if key not in stated))


def opens(name: str | Path) -> bool:
    """Whether what this names has weights for `specnb.load`; else it describes a tokenizer alone."""
    text = str(name).partition("?")[0].lower()
    return not text.endswith((".json", ".tiktoken")) and text not in shelf.names()


def status() -> list[files.ZooStatus]:
    """Every name of the zoo, of the checkout and of the shelf's facts; fetches nothing."""
    return files.status() + [
        files.ZooStatus(name, f"hf:{fact['model']}", fact.get("licence"), None, False, None, weights(name))
        for name, fact in shelf.facts().items()
    ]


def weights(name: str) -> int:
    """Bytes of a model's weights; their number, where facts are all there is."""
    fact = shelf.facts().get(name.lower())
    return int(fact["parameters"]) if fact else weights_bytes(parse(name))


def sheet(name: str) -> dict[str, Any]:
    """The facts of a model: what it is, what opens here and how that goes back, and what can draft for it.

    Opens the model where there are weights. Raises as `describe`; a model that does not open says why in `opens`.
    """
    described, base = describe(name), name.partition("?")[0].lower()
    rows = files.status()
    licences = {row.name: row.licence for row in rows}
    stated = {key: getattr(described, key) for key in ("source", "architecture", "state", "n_layers", "vocab_size")}
    facts = {"model": name, **stated, "licence": described.licence or licences.get(base)}
    facts |= {"tokenizer": described.vocab and described.vocab.kind, "trained_n_ctx": described.n_ctx}
    if not opens(name):
        return facts | {"opens": "no: it is a tokenizer, or facts, without weights"}
    spec, crops = parse(name), described.state is State.ATTENTION
    engine = "gguf" if spec.backend == "llama" else "hf"
    facts |= {"size_bytes": weights_bytes(spec), "weights": files.trace_weights(name)}
    facts["strategies"] = ["crop"] if crops else list(resolve(f"specnb.lm.{engine}.model:PREFERRED"))
    here = {row.name for row in rows if row.present}  # a list of drafts is no reason to fetch gigabytes
    others = [other for other in (*files.ENTRIES, *files.embedded_names()) if other != base and other in here]
    facts["drafts"] = [f"{other}: {check(described, describe(other)).verdict}" for other in others]
    heads = {p.parent.name: read_json(p) for p in files.embedded_root().parent.glob("heads/*/config.json")}
    facts["heads"] = [head for head, card in heads.items() if card["backbone_name"].partition("?")[0] == base]
    before = psutil.Process().memory_info().rss
    try:
        with closing(load(name)) as model:
            caps = model.caps
            shown = "engine device dtype n_ctx max_width rewind rewind_reason trees same_bits_up_to certificate"
            facts |= {key: getattr(caps, key) for key in shown.split()}
            return facts | {"opens": "yes", "memory_bytes": psutil.Process().memory_info().rss - before}
    except (InputError, LoadError, FetchError) as error:
        return facts | {"opens": f"no: {error}"}


def tiktoken(path: Path) -> Description:
    """Pieces of a *.tiktoken file, one "base64 rank" a line, the rank being the id.

    Special tokens are not in it (they are code), so bos, eos and `tokenizer` are None. Raises InputError for lines that
    are none of these, for ids out of range, and for ids used twice.
    """
    with reading(f"{path}: lines of BASE64 ID"):
        lines = [line.split() for line in read_bytes(path).splitlines() if line.strip()]
        pieces = {int(rank): base64.b64decode(word, validate=True) for word, rank in lines}
        size = 1 + max(pieces)
        if len(pieces) < len(lines) or min(pieces) < 0 or size > MAX_ID:
            raise ValueError(f"got {len(lines)} ids, expected each once, from 0 to {MAX_ID - 1}")
    vocab = Vocabulary(tuple(pieces.get(i, b"") for i in range(size)), kind="bpe")
    return Description(name=path.stem, source=str(path), vocab=vocab, n_tokens=size, vocab_size=size)
