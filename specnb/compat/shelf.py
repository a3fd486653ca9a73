"""The shelf: real vocabularies that ship with the project, and published facts of models that do not.

A name is a list of `data/vocab/` ("qwen2.5": a tokenizer) or an entry of `facts.toml` ("qwen2.5-0.5b-instruct": a
model, described by what its publisher states, with the pieces of its tokenizer's list). No weights, no network.

A list is a parquet file with a row for each id: `piece` (bytes; empty for padding), `special` (control token), `added`
(added to the trained vocabulary). What else is known of it stands as JSON in the footer. `data/vocab/build.py` makes
the lists.
"""

import json
import tomllib
from dataclasses import replace
from functools import cache
from itertools import compress
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from specnb.compat.description import HUB, Description, Merges, State
from specnb.errors import InputError, did_you_mean
from specnb.lm.vocab import Vocabulary
from specnb.paths import project_dir

META_KEY = b"specnb.vocab"
SUMS = "SHA256SUMS"
SPECIAL_IDS = ("bos", "eos", "pad", "eot")


class Facts(BaseModel):
    """What is published of one model.

    `source` names the documents. `from_memory` are the keys that none of them shows: a verdict that rests on one is no
    better than that. `defaults` are keys that the publisher leaves out and llama.cpp fills in, as for every GGUF.
    `tokenizer` is the list whose pieces are the model's; None where its licence keeps them from being shipped.
    `mask` are ids that only a modified draft model knows.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str
    source: str
    note: str = ""
    from_memory: tuple[str, ...] = ()
    defaults: tuple[str, ...] = ()
    tokenizer: str | None = None
    architecture: str | None = None
    vocab_size: int | None = None
    n_tokens: int | None = None
    bos: int | None = None
    eos: int | None = None
    pad: int | None = None
    eot: int | None = None
    eog: frozenset[int] | None = None
    add_bos: bool | None = None
    add_eos: bool | None = None
    mask: frozenset[int] = frozenset()
    n_ctx: int | None = None
    state: State | None = None


def folder() -> Path:
    """Where lists and facts lie."""
    return project_dir() / "data" / "vocab"


def names() -> list[str]:
    """Every name that `describe` knows: the lists first, then the models of facts.toml."""
    return [*_lists(), *_entries()]


def describe(name: str) -> Description:
    """The description of a list or of a model of facts.toml.

    A list's `source` is its file. A model's begins with "facts:", names the documents, and says which defaults are
    llama.cpp's; `from_memory` says what no document shows. `hub` names where a tokenizer that may not be shipped is to
    be had. Raises InputError for an unknown name.
    """
    name = name.lower()
    if name in _lists():
        return _list(name)
    entry = facts(name)
    defaults = f"; llama.cpp's default: {', '.join(entry.defaults)}" if entry.defaults else ""
    same = (*SPECIAL_IDS, "architecture", "vocab_size", "n_tokens", "add_bos", "add_eos", "mask", "from_memory")
    described = Description(
        name=name,
        source=f"facts: {entry.source}{defaults}",
        hub=None if entry.tokenizer else f"{HUB}{entry.model}",
        **{key: getattr(entry, key) for key in (*same, "n_ctx", "state")},
    )
    return described if entry.tokenizer is None else _with_pieces(described, entry, _list(entry.tokenizer))


def facts(name: str) -> Facts:
    """The entry of facts.toml. Raises InputError with the nearest names."""
    entries = _entries()
    if name.lower() not in entries:
        hint = did_you_mean(name.lower(), names())
        raise InputError(f"nothing on the shelf is called {name!r}: {hint}there are {', '.join(names())}")
    return entries[name.lower()]


def read_list(path: Path) -> tuple[Description, dict]:
    """The description in the list at `path`, and all that its footer states."""
    from pyarrow import parquet

    file = parquet.ParquetFile(path)
    pieces, special, added = (column.to_pylist() for column in file.read(use_threads=False).columns)
    stated = json.loads(file.metadata.metadata[META_KEY])
    ids = range(len(pieces))
    vocab = Vocabulary(
        pieces=tuple(pieces),
        eog=frozenset(stated["eog"]),
        special=frozenset(compress(ids, special)),
        **{key: stated[key] for key in ("kind", "pre", "bos", "eos", "add_bos", "chat_template")},
    )
    described = Description(
        source=str(path),
        vocab=vocab,
        vocab_size=vocab.size,
        added=frozenset(compress(ids, added)),
        merges=Merges(**stated["merges"]) if stated["merges"] else None,
        **{key: stated[key] for key in (*SPECIAL_IDS, "name", "n_tokens", "add_bos", "add_eos", "normalizer")},
    )
    return described, stated


def _list(name: str) -> Description:
    return read_list(folder() / f"{name}.parquet")[0]


def _with_pieces(described: Description, entry: Facts, tokenizer: Description) -> Description:
    """The list's pieces, padded to the model's row of logits, with the model's own ids."""
    n, size = tokenizer.n_tokens, entry.vocab_size or tokenizer.vocab_size
    vocab = replace(
        tokenizer.vocab,
        pieces=tokenizer.vocab.pieces[:n] + (b"",) * (size - n),
        bos=entry.bos,
        eos=entry.eos,
        eog=tokenizer.vocab.eog if entry.eog is None else entry.eog,
        add_bos=tokenizer.vocab.add_bos if entry.add_bos is None else entry.add_bos,
        chat_template=None,  # it is the model's, not the tokenizer family's
    )
    family = {key: getattr(tokenizer, key) for key in ("added", "normalizer", "merges")}
    return replace(described, vocab=vocab, n_tokens=n, vocab_size=size, **family)


@cache
def _lists() -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in folder().glob("*.parquet")))


@cache
def _entries() -> dict[str, Facts]:
    entries = tomllib.loads((folder() / "facts.toml").read_text(encoding="utf-8"))
    return {name: Facts.model_validate(entry) for name, entry in entries.items()}
