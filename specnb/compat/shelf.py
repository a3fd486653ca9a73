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
from typing import Any

from specnb.compat.description import HUB, Description, Merges, State
from specnb.io import project_dir
from specnb.lm.vocab import Vocabulary

META_KEY = b"specnb.vocab"
SPECIAL_IDS = ("bos", "eos", "pad", "eot")
SAME_KEYS = (*SPECIAL_IDS, "architecture", "vocab_size", "n_tokens", "add_bos", "add_eos", "n_ctx", "licence")
"""Keys of facts.toml that are fields of a description."""


def folder() -> Path:
    """Where lists and facts lie."""
    return project_dir() / "data" / "vocab"


@cache
def facts() -> dict[str, dict[str, Any]]:
    """The models of facts.toml, which says at its top what its keys are."""
    return tomllib.loads((folder() / "facts.toml").read_text(encoding="utf-8"))


@cache
def lists() -> tuple[str, ...]:
    """The names of the lists."""
    return tuple(sorted(path.stem for path in folder().glob("*.parquet")))


def names() -> list[str]:
    """Every name that `describe` knows: the lists first, then the models of facts.toml."""
    return [*lists(), *facts()]


def describe(name: str) -> Description:
    """The description of a list or of a model of facts.toml, one of `names`.

    A list's `source` is its file. A model's begins with "facts:", names the documents, and says which defaults are
    llama.cpp's; `from_memory` says what no document shows. It has the pieces of its list, padded to its row of logits;
    `hub` names where a tokenizer that may not be shipped is to be had.
    """
    name = name.lower()
    if name in lists():
        return read_list(folder() / f"{name}.parquet")[0]
    entry = facts()[name]
    defaults = f"; llama.cpp's default: {', '.join(entry['defaults'])}" if "defaults" in entry else ""
    described = Description(
        name=name,
        source=f"facts: {entry['source']}{defaults}",
        hub=None if "tokenizer" in entry else f"{HUB}{entry['model']}",
        state=State(entry["state"]),
        mask=frozenset(entry.get("mask", ())),
        from_memory=tuple(entry.get("from_memory", ())),
        **{key: entry[key] for key in SAME_KEYS if key in entry},
    )
    if "tokenizer" not in entry:
        return described
    family = describe(entry["tokenizer"])
    vocab, n = family.vocab, family.n_tokens
    pieces = vocab.pieces[:n] + (b"",) * (described.vocab_size - n)
    ids = {"bos": described.bos, "eos": described.eos, "eog": frozenset(entry.get("eog", vocab.eog))}
    # the chat template is the model's, not the tokenizer family's
    vocab = replace(vocab, pieces=pieces, add_bos=described.add_bos, chat_template=None, **ids)
    return replace(described, vocab=vocab, n_tokens=n, added=family.added, merges=family.merges)


@cache
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
        **{key: stated[key] for key in (*SPECIAL_IDS, "name", "n_tokens", "add_bos", "add_eos")},
    )
    return described, stated
