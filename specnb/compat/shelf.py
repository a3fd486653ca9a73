"""The shelf: real vocabularies that ship with the project, and published facts of models that do not.

A name is a list of `data/vocab/` ("qwen2.5": a tokenizer) or an entry of `facts.toml` ("qwen2.5-0.5b-instruct": a
model, described by what its publisher states, with the pieces of its tokenizer's list). No weights, no network.
"""

import hashlib
import tomllib
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, model_validator

from specnb.compat import vocab_list
from specnb.compat.description import HUB, Description, Rope, State
from specnb.compat.vocab_list import MAX_FILE_BYTES, REMEDY, ShelfName, TokenId
from specnb.errors import InputError, did_you_mean
from specnb.lm.bounded_json import read_bytes
from specnb.paths import project_dir
from specnb.prompts import validated

MAX_TEXT_BYTES = 1 << 20
SUMS = "SHA256SUMS"

Size = Annotated[int, Field(ge=1, lt=vocab_list.MAX_IDS, strict=True)]


class RopeFacts(BaseModel):
    """`Rope`, as an entry states it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    base: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    dims: Size | None = None
    scaling: str | None = None


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
    tokenizer: ShelfName | None = None
    architecture: str | None = None
    vocab_size: Size | None = None
    n_tokens: Size | None = None
    bos: TokenId | None = None
    eos: TokenId | None = None
    pad: TokenId | None = None
    eot: TokenId | None = None
    eog: frozenset[TokenId] | None = None
    add_bos: bool | None = None
    add_eos: bool | None = None
    mask: frozenset[TokenId] = frozenset()
    n_ctx: Annotated[int, Field(ge=1, strict=True)] | None = None
    rope: RopeFacts | None = None
    state: State | None = None

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> "Facts":
        unknown = [key for key in (*self.from_memory, *self.defaults) if key not in self.model_fields_set]
        if unknown:
            raise ValueError(f"from_memory or defaults names {unknown[0]!r}, which the entry does not state")
        size = self.vocab_size if self.vocab_size is not None else vocab_list.MAX_IDS
        ids = [self.bos, self.eos, self.pad, self.eot, *(self.eog or ()), *self.mask]
        too_large = [i for i in ids if i is not None and i >= size]
        if too_large or (self.n_tokens or 0) > size:
            raise ValueError(f"{too_large[0] if too_large else self.n_tokens} is more than the vocab_size {size}")
        return self


def names(folder: Path | None = None) -> list[str]:
    """Every name that `describe` knows: the lists first, then the models of facts.toml. Raises InputError."""
    base = _folder(folder)
    return [*sorted(_sums(base)), *_entries(base)]


def describe(name: str, folder: Path | None = None) -> Description:
    """The description of a list or of a model of facts.toml; `folder` (default `data/vocab`) holds both.

    A list's `source` is its file. A model's begins with "facts:", names the documents, and says which defaults are
    llama.cpp's; `from_memory` says what no document shows. `hub` names where a tokenizer that may not be shipped is to
    be had. Raises InputError for an unknown name and for a file that is broken,
    or not the one of SHA256SUMS.
    """
    base = _folder(folder)
    sums = _sums(base)
    name = name.lower()
    if name in sums:
        return _list(base, name, sums[name])
    entry = facts(name, base)
    defaults = f"; llama.cpp's default: {', '.join(entry.defaults)}" if entry.defaults else ""
    described = Description(
        name=name,
        source=f"facts: {entry.source}{defaults}",
        architecture=entry.architecture,
        vocab_size=entry.vocab_size,
        n_tokens=entry.n_tokens,
        bos=entry.bos,
        eos=entry.eos,
        pad=entry.pad,
        eot=entry.eot,
        add_bos=entry.add_bos,
        add_eos=entry.add_eos,
        mask=entry.mask,
        hub=None if entry.tokenizer else f"{HUB}{entry.model}",
        from_memory=entry.from_memory,
        n_ctx=entry.n_ctx,
        rope=None if entry.rope is None else Rope(**entry.rope.model_dump()),
        state=entry.state,
    )
    if entry.tokenizer is None:
        return described
    if entry.tokenizer not in sums:
        raise InputError(f"{base / 'facts.toml'}: [{name}] takes the list {entry.tokenizer!r}; there is none; {REMEDY}")
    return _with_pieces(described, entry, _list(base, entry.tokenizer, sums[entry.tokenizer]))


def facts(name: str, folder: Path | None = None) -> Facts:
    """The entry of facts.toml. Raises InputError with the nearest names."""
    base = _folder(folder)
    entries = _entries(base)
    if name.lower() not in entries:
        known = [*sorted(_sums(base)), *entries]
        hint = did_you_mean(name.lower(), known)
        raise InputError(f"nothing on the shelf is called {name!r}: {hint}there are {', '.join(known)}")
    return entries[name.lower()]


def _with_pieces(described: Description, entry: Facts, tokenizer: Description) -> Description:
    """The list's pieces, cut or padded to the model's row of logits, with the model's own ids."""
    n, size = tokenizer.n_tokens, entry.vocab_size or tokenizer.vocab_size
    if size < n or entry.n_tokens not in (None, n):
        raise InputError(
            f"facts.toml: [{described.name}] states {entry.n_tokens or size} ids, its list {tokenizer.name} has {n} "
            "tokens: correct the entry"
        )
    vocab = replace(
        tokenizer.vocab,
        pieces=tokenizer.vocab.pieces[:n] + (b"",) * (size - n),
        bos=entry.bos,
        eos=entry.eos,
        eog=tokenizer.vocab.eog if entry.eog is None else entry.eog,
        add_bos=tokenizer.vocab.add_bos if entry.add_bos is None else entry.add_bos,
        chat_template=None,  # it is the model's, not the tokenizer family's
    )
    return replace(
        described,
        vocab=vocab,
        n_tokens=n,
        vocab_size=size,
        added=tokenizer.added,
        normalizer=tokenizer.normalizer,
        merges=tokenizer.merges,
    )


def _list(base: Path, name: str, sha256: str) -> Description:
    path = base / f"{name}.parquet"
    data = read_bytes(path, MAX_FILE_BYTES)
    found = hashlib.sha256(data).hexdigest()
    if found != sha256:
        raise InputError(f"{path}: sha256 {found}, {SUMS} says {sha256}; {REMEDY}")
    described, stated = vocab_list.read(path, data)
    if stated.name != name:
        raise InputError(f"{path}: it is the list {stated.name!r}; {REMEDY}")
    return described


def _folder(folder: Path | None) -> Path:
    return project_dir() / "data" / "vocab" if folder is None else Path(folder)


def _sums(base: Path) -> dict[str, str]:
    """The lists' names and sha256, from the file that `sha256sum -c` reads too."""
    path = base / SUMS
    lines = read_bytes(path, MAX_TEXT_BYTES).decode("utf-8", errors="replace").splitlines()
    found = {}
    for number, line in enumerate(lines, start=1):
        digest, _, file = line.partition("  ")
        name = file.removesuffix(".parquet")
        if len(digest) != 64 or name == file or Path(name).name != name or name in found:
            raise InputError(f"{path}:{number}: {line[:80]!r} is not a sha256, two spaces and NAME.parquet; {REMEDY}")
        found[name] = digest
    return found


def _entries(base: Path) -> dict[str, Facts]:
    path = base / "facts.toml"
    return dict(_parsed(path, read_bytes(path, MAX_TEXT_BYTES)))


@lru_cache(maxsize=4)
def _parsed(path: Path, data: bytes) -> tuple[tuple[str, Facts], ...]:
    try:
        entries = tomllib.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not valid TOML: {error}; {REMEDY}") from error
    return tuple((name, validated(Facts, entry, f"{path}: [{name}]")) for name, entry in entries.items())
