"""Resolve a model name to the file or folder that an engine opens; download or requantize it once.

smollm2-135m                        zoo (zoo.toml), in llama.cpp as shipped
smollm2-135m:f16                    zoo, requantized on this machine
smollm2-135m?backend=hf             zoo, in torch; 4-bit files in int4 if fastest (dtype=auto)
smollm2-135m?backend=hf&dtype=bfloat16   zoo, dequantized, in torch
model.gguf   model.gguf?backend=hf  a file, in llama.cpp or in torch
./folder     hf:ORG/NAME            transformers
hf:ORG/NAME-GGUF:Q4_K_M             a GGUF on a hub, by type, or hf:ORG/NAME/FILE.gguf, in llama.cpp
./folder?backend=llama&weights=f32  folder.f16.gguf next to it, or a float32 copy, in llama.cpp
tiny-hybrid                         a model in the checkout (a folder in data/models, and its GGUF)

Requantizing does not undo the rounding of the shipped file: `:f16` and the model in torch have the
weights of the Q4_1 file, not the original training weights.
"""

import inspect
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, urlencode

from pydantic import create_model

from specnb.errors import InputError, did_you_mean, require_known
from specnb.fetch import HUB_GGUF, PinnedFile, fetch_pinned, from_hub, gguf_parts, hub_folder
from specnb.io import (
    cache_dir,
    file_digest,
    make_once,
    project_dir,
    read_json,
    read_toml,
    size_of,
    validated,
)
from specnb.machine import auto_dtype
from specnb.registry import DRAFTERS, ENGINES, resolve

WIDE = ("f32", "f16", "bf16")
"""Types of copies with dequantized weights."""
WIDTHS = {"float32": 4, "f32": 4}
"""Bytes per value; all other types have 2."""


class ModelSpec(NamedTuple):
    """A parsed model name: its kind of source, its engine and its options.

    `where` is `zoo`, `gguf`, `hub` (a GGUF) or `hf` (transformers). `text` includes the keyword
    options; `dtype=auto` is resolved.
    """

    text: str
    where: str
    source: str
    backend: str
    options: Mapping[str, Any]

    @property
    def engine(self) -> type:
        """The class that opens the model, imported on use: each engine works without the other."""
        return resolve(ENGINES[self.backend])

    @property
    def keeps_blocks(self) -> bool:
        """Whether the engine uses the blocks of a GGUF directly, without dequantizing them."""
        return self.backend == "llama" or self.options.get("dtype") == "int4"


def parse(name: str, **options: Any) -> ModelSpec:
    """Split `NAME?option=value&…`; keyword options override those in the name. Opens no model.

    Raises InputError for unknown backends, and for names that are not a zoo name, file, folder or
    hub id.
    """
    source, _, query = str(name).partition("?")
    try:
        options = dict(parse_qsl(query, keep_blank_values=True, strict_parsing=True)) | options
    except ValueError as error:
        raise InputError(
            f"cannot read the options {query!r} of {name!r}; write NAME?backend=hf&n_ctx=512"
        ) from error
    where = _where(source)
    chosen = options.pop("backend", None)
    backend = chosen or ("hf" if where == "hf" else "llama")
    require_known("backend", backend, ENGINES)
    if backend == "llama" and where == "hf" and source.startswith("hf:"):
        raise InputError(
            f"{name!r} is on a hub, expected a GGUF for llama.cpp: add the file type, "
            f"{source}:Q4_K_M"
        )
    keys = list(options)
    if backend == "hf":
        four_bits = is_four_bits(source, where)
        if options.get("dtype", "auto" if four_bits else None) == "auto":
            options["dtype"] = choose_dtype(options.get("device", "cpu"), four_bits=four_bits)
    extra = ({"backend": backend} if chosen else {}) | {key: options[key] for key in keys}
    text = f"{source}?{urlencode(extra)}" if extra else source
    if where != "hub":
        source = source.removeprefix("hf:")
    return ModelSpec(text, where, source, backend, options)


def _where(source: str) -> str:
    """Return the kind of source of a model name (see `ModelSpec`)."""
    if is_zoo_name(source):
        find_entry(source)  # checks the type
        return "zoo"
    if HUB_GGUF.fullmatch(source):
        return "hub"
    if source.endswith(".gguf"):
        return "gguf"
    path = expand_home(source.removeprefix("hf:"))
    on_hub = re.fullmatch(r"hf:[\w-][\w.-]*(/[\w.-]+)?", source)
    if on_hub or source in embedded_names() or (source and os.path.isdir(path)):  # noqa: PTH112
        return "hf"
    if os.path.isfile(path):  # noqa: PTH113 - Path.is_file raises if the name is too long
        raise InputError(
            f"got the file {source}, expected a .gguf file or the folder of a transformers model"
        )
    if "/" in source or "\\" in source:
        hint = "a file name ends in .gguf, a model on a hub is named hf:ORG/NAME"
        if re.fullmatch(r"[\w-][\w.-]*/[\w.:-]+", source):
            hint = f"did you mean hf:{source}?"
        raise InputError(f"no such folder: {source}: {hint}")
    raise _unknown(source)


def _unknown(name: str) -> InputError:
    """Return the error for an unknown model, with similar names and the list of all names."""
    names = [*ENTRIES, *embedded_names(), *DRAFTERS]
    similar = did_you_mean(name.lower().partition(":")[0], names)
    return InputError(f"unknown model in {name!r}: {similar}choose from {', '.join(names)}")


def choose_dtype(device: str, *, four_bits: bool) -> str:
    """Return torch's type for `dtype=auto`: int4 for 4-bit files if fastest, else `auto_dtype`.

    On a CPU, the first call runs a benchmark of half a second (`lm.hf.int4.is_fastest`).
    """
    wide = auto_dtype(device)
    if device == "cpu" and four_bits:
        from specnb.lm.hf.int4 import is_fastest

        return "int4" if is_fastest(wide) else wide
    return wide


def is_four_bits(source: str, where: str) -> bool:
    """Return whether a name refers to a 4-bit GGUF, by its type in the zoo or in the file name.

    >>> is_four_bits("smollm2-135m", "zoo")
    True
    >>> is_four_bits("m-Q4_K_M.gguf", "gguf"), is_four_bits("m.F16.gguf", "gguf")
    (True, False)
    """
    kind = source
    if where == "zoo":
        entry, copy = find_entry(source)
        kind = copy or entry.shipped_type
    return (
        where != "hf" and re.search(r"(?<![a-z0-9])q4_[01k]", Path(kind).name.lower()) is not None
    )


def typed_options(spec: ModelSpec) -> dict[str, Any]:
    """Convert the options, which are strings in a name, to the parameter types of `engine.open`.

    Raises InputError for an unknown option, and for a value out of range.
    """
    parameters = inspect.signature(spec.engine.open).parameters.values()
    fields = {
        p.name: (p.annotation, p.default)
        for p in parameters
        if p.kind is p.KEYWORD_ONLY and p.name != "name"
    }
    options = dict(spec.options)
    if spec.backend == "llama":  # these are options of `local_file`, not of the engine
        options.pop({"hf": "weights", "hub": "revision"}.get(spec.where, ""), None)
    for key in options:
        require_known(f"option of {spec.text}", key, ("backend", *fields))
    return validated(create_model("Options", **fields), options, spec.text).model_dump(
        exclude_unset=True
    )


def expand_home(path: str | Path) -> Path:
    """Return `path` with ~ expanded, except the ~ of an unknown user."""
    return Path(os.path.expanduser(path))  # noqa: PTH111 - Path.expanduser raises for it


# ---- the zoo


@dataclass(frozen=True, kw_only=True)
class ZooEntry(PinnedFile):
    """One model of zoo.toml, which documents the fields."""

    name: str
    shipped_type: str
    parameters: int
    derived_bytes: Mapping[str, int] = field(default_factory=dict)

    def n_bytes(self, kind: str | None) -> int:
        """Return the size of the copy of this type, or of the shipped file for None."""
        return self.member_bytes if kind is None else self.derived_bytes[kind]

    def file(self, kind: str | None) -> Path:
        """Return the path of the copy of this type, or of the shipped file for None."""
        if self.revision and kind is None:
            return hub_folder(self.source.removeprefix("hf:"), self.revision) / self.member
        name = Path(self.member).name if kind is None else f"{self.name}.{kind.upper()}.gguf"
        return cache_dir() / "zoo" / self.name / name


ENTRIES = {
    name: ZooEntry(name=name, **facts)
    for name, facts in read_toml(Path(__file__).with_name("zoo.toml")).items()
}


def is_zoo_name(text: str) -> bool:
    """Return whether `text` names a zoo model; `find_entry` checks a type after the colon."""
    return text.partition(":")[0].lower() in ENTRIES


def find_entry(name: str) -> tuple[ZooEntry, str | None]:
    """Return the entry of a zoo name and the type of the copy (None: the shipped file).

    Raises InputError for an unknown name or type.
    """
    base, colon, kind = name.lower().partition(":")
    if base not in ENTRIES:
        raise _unknown(name)
    entry = ENTRIES[base]
    if colon:
        require_known(f"type of {entry.name}", kind, (*entry.derived_bytes, entry.shipped_type))
    return entry, kind if kind in entry.derived_bytes else None


def without_wide_type(name: str) -> str:
    """Return the name of the smallest file with these weights: the shipped one for WIDE types."""
    entry, kind = find_entry(name)
    return entry.name if kind in (None, *WIDE) else f"{entry.name}:{kind}"


def weights_origin(name: str) -> str | None:
    """Return the origin of a model's weights; None if unknown."""
    source = name.partition("?")[0]
    if not is_zoo_name(source):
        rounded = "dtype=int4" in name and not source.endswith(".gguf")
        return "rounded to 4 bits in groups of 32, lm_head to 8 bits" if rounded else None
    entry, kind = find_entry(source)
    if kind:
        return f"of the shipped {entry.shipped_type} file, as {kind}"
    return f"of the shipped {entry.shipped_type} file"


def zoo_file(name: str) -> Path:
    """Return the local GGUF file of a zoo name; download and requantize it if it is missing.

    Raises InputError (unknown name), FetchError (no network, wrong digest, disk full or not
    writable).
    """
    entry, kind = find_entry(name)
    if kind is None:
        return fetch_pinned(entry, entry.file(None))
    return make_once(
        entry.file(kind),
        lambda dest: _requantize(zoo_file(entry.name), kind, dest),
        n_bytes=entry.n_bytes(kind),
    )


def _requantize(source: Path, kind: str, dest: Path) -> None:
    from specnb.lm.gguf import binding  # torch models do not need llama.cpp

    binding.requantize(source, dest, kind)


# ---- models in the checkout


def embedded_root() -> Path:
    """Return the folder of the embedded models. Raises InputError if the checkout is missing."""
    return project_dir() / "data" / "models"


def embedded_names() -> tuple[str, ...]:
    """Return the names of all embedded models."""
    return tuple(sorted(config.parent.name for config in embedded_root().glob("*/config.json")))


def local_folder(name: str) -> Path:
    """Return the folder of an embedded model, or the path `name`, which need not exist."""
    return embedded_root() / name if name in embedded_names() else expand_home(name)


def find_file(source: str) -> Path:
    """Return the path of a file. Raises InputError if it does not exist."""
    if not (file := expand_home(source)).is_file():
        raise InputError(f"no such model file: {source}")
    return file


# ---- files for the engines


def prepare(spec: ModelSpec) -> Path:
    """Return the path for the engine: a GGUF, or for torch a folder or hub id."""
    if (file := local_file(spec)) is None:
        return local_folder(spec.source)
    if spec.keeps_blocks:
        return file
    from specnb.lm.hf.files import dequantize_once

    return dequantize_once(file)


def local_file(spec: ModelSpec) -> Path | None:
    """Return the GGUF of a name, downloaded or requantized if needed; None for other models.

    Raises as `zoo_file`, `from_hub`, `find_file` and `folder_gguf` do.
    """
    match spec.where:
        case "gguf":
            return find_file(spec.source)
        case "hf" if spec.backend == "llama":
            return folder_gguf(local_folder(spec.source), spec.options.get("weights", "f16"))
        case "hub":
            return from_hub(spec.source, spec.options.get("revision", "main"))
        case "zoo":
            return zoo_file(spec.source)
    return None


def weights_bytes(spec: ModelSpec) -> int:
    """Return the size in bytes of a model's weights after loading; 0 if unknown (a hub id).

    For a GGUF outside the zoo, returns the file size, although torch may use more memory. Downloads
    a GGUF on a hub.
    """
    if spec.where in ("gguf", "hub"):
        return sum(map(size_of, gguf_parts(local_file(spec))))
    option, default = ("dtype", "float32") if spec.backend == "hf" else ("weights", "f16")
    width = WIDTHS.get(spec.options.get(option, default), 2)
    if spec.where == "zoo":
        entry, kind = find_entry(spec.source)
        return entry.n_bytes(kind) if spec.keeps_blocks else entry.parameters * width
    folder = local_folder(spec.source)
    if not (stored := sum(map(size_of, folder.glob("*.safetensors")))):
        return 0
    config = read_json(folder / "config.json")
    return stored * width // WIDTHS.get(config.get("dtype", config.get("torch_dtype")), 2)


def name_copy(name: str) -> str:
    """Return the name of a copy of a GGUF with weights of the type q4_0.

    The copies that the zoo lists are created on loading, others now. Raises LoadError or FetchError
    if a copy cannot be written.
    """
    spec = parse(name)
    if spec.where == "zoo" and "q4_0" in (entry := find_entry(spec.source)[0]).derived_bytes:
        return f"{entry.name}:q4_0"
    return str(copy_once(local_file(spec), "q4_0"))


def copy_once(file: Path, kind: str) -> Path:
    """Return the cached copy of a GGUF with weights of `kind`. Raises LoadError or FetchError."""
    dest = cache_dir() / "requantised" / f"{file.stem}-{file_digest(file)[:16]}.{kind}.gguf"
    n_bytes = size_of(file) * WIDTHS.get(kind, 2) // 2  # float32 doubles a file in float16
    return make_once(dest, partial(_requantize, file, kind), n_bytes=n_bytes)


def folder_gguf(folder: Path, kind: str) -> Path:
    """Return the GGUF next to a transformers folder, NAME.f16.gguf, or its float32 copy.

    Raises InputError if the f16 file does not exist, or if `kind` is not f16 or f32.
    """
    require_known("type of weights", kind, ("f16", "f32"))
    folder = folder.resolve()
    file = folder.with_name(f"{folder.name}.f16.gguf")
    if not file.is_file():
        raise InputError(
            f"got the folder {folder}, expected a GGUF for llama.cpp: convert it to {file} with "
            "llama.cpp's convert_hf_to_gguf.py, or in a checkout with python -m "
            "data.models.convert"
        )
    return file if kind == "f16" else copy_once(file, kind)


# ---- list of models


@dataclass(frozen=True)
class ZooStatus:
    """A row of `specnb models`. `n_bytes` is the size on disk if `present`, else the expected size.

    For a model known only from published facts, `n_bytes` and `path` are None and `parameters` is
    set.
    """

    name: str
    source: str
    licence: str | None
    n_bytes: int | None
    present: bool
    path: Path | None
    parameters: int | None = None


def status() -> list[ZooStatus]:
    """List zoo models with their copies, and embedded models; open and download nothing."""
    rows = []
    for entry in ENTRIES.values():
        shipped = entry.file(None)
        size = entry.member_bytes
        present = size_of(shipped) == size
        rows.append(ZooStatus(entry.name, entry.source, entry.licence, size, present, shipped))
        for kind, n_bytes in entry.derived_bytes.items():
            file = entry.file(kind)
            name = f"{entry.name}:{kind}"
            source = f"{'de' if kind in WIDE else 're'}quantized from {entry.name}"
            size = size_of(file) or n_bytes
            rows.append(ZooStatus(name, source, entry.licence, size, file.is_file(), file))
    for name in embedded_names():
        folder = local_folder(name)
        size = sum(map(size_of, folder.iterdir()))
        rows.append(ZooStatus(name, "trained here, data/models", "Apache-2.0", size, True, folder))
    return rows
