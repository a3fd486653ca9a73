"""From the name a user writes to the file or folder that an engine opens: fetched or requantised once.

smollm2-135m                        zoo (zoo.toml), in llama.cpp as shipped
smollm2-135m:f16                    zoo, requantised here
smollm2-135m?backend=hf             zoo, in torch; a 4-bit file with int4 products where they are fastest (dtype=auto)
smollm2-135m?backend=hf&dtype=bfloat16   zoo, dequantized into torch
model.gguf   model.gguf?backend=hf  a file, in llama.cpp or in torch
./folder     hf:ORG/NAME            transformers
hf:ORG/NAME-GGUF:Q4_K_M             a GGUF on a hub by its type, or hf:ORG/NAME/FILE.gguf, in llama.cpp
./folder?backend=llama&weights=f32  the GGUF next to the folder, folder.f16.gguf, or its float32 copy, in llama.cpp
tiny-hybrid                         a model that comes with the checkout (a folder in data/models, and its GGUF)

Weights that the zoo's shipped file rounded stay rounded: `:f16` holds what Q4_1 holds, not the original training
weights, and so does the model in torch.
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
from specnb.io import cache_dir, file_digest, make_once, project_dir, read_json, read_toml, size_of, validated
from specnb.lm.gguf import binding
from specnb.machine import auto_dtype
from specnb.registry import DRAFTERS, ENGINES, resolve

WIDE = ("f32", "f16", "bf16")
"""Types of copies that hold the shipped weights, dequantised."""
WIDTHS = {"float32": 4, "f32": 4}
"""Bytes of a value; two in the other types."""


class ModelSpec(NamedTuple):
    """A parsed model name: where it is (`zoo`, `gguf`, `hub` or `hf`), which engine opens it, and the engine's options.

    `text` is the name with all options that were given, however they were given; `dtype=auto` is resolved.
    """

    text: str
    where: str
    source: str
    backend: str
    options: Mapping[str, Any]

    @property
    def engine(self) -> type:
        """The class that opens it; imported when it is asked for, so that each engine works without the other."""
        return resolve(ENGINES[self.backend])

    @property
    def keeps_blocks(self) -> bool:
        """Whether the engine opens a GGUF as it is, without dequantizing it."""
        return self.backend == "llama" or self.options.get("dtype") == "int4"


def parse(name: str, **options: Any) -> ModelSpec:
    """Split `NAME?option=value&…`; keyword options win over those in the name. Opens no model.

    Raises InputError for unknown backends and for names that are neither zoo, file, folder nor hub id.
    """
    source, _, query = str(name).partition("?")
    try:
        options = dict(parse_qsl(query, keep_blank_values=True, strict_parsing=True)) | options
    except ValueError as error:
        raise InputError(f"cannot read the options {query!r} of {name!r}; write NAME?backend=hf&n_ctx=512") from error
    where, chosen = _where(source), options.pop("backend", None)
    backend = chosen or ("hf" if where == "hf" else "llama")
    require_known("backend", backend, ENGINES)
    if backend == "llama" and where == "hf" and source.startswith("hf:"):
        raise InputError(f"{name!r} is on a hub, and llama.cpp opens GGUFs: name a type of it, {source}:Q4_K_M")
    keys = list(options)
    if backend == "hf":
        four_bits = is_four_bits(source, where)
        if options.get("dtype", "auto" if four_bits else None) == "auto":
            options["dtype"] = choose_dtype(options.get("device", "cpu"), four_bits=four_bits)
    extra = ({"backend": backend} if chosen else {}) | {key: options[key] for key in keys}
    text = f"{source}?{urlencode(extra)}" if extra else source
    return ModelSpec(text, where, source if where == "hub" else source.removeprefix("hf:"), backend, options)


def _where(source: str) -> str:
    path = expand_home(source.removeprefix("hf:"))
    if not is_zoo_name(source):
        if HUB_GGUF.fullmatch(source):
            return "hub"
        if source.endswith(".gguf"):
            return "gguf"
        on_hub = re.fullmatch(r"hf:[\w-][\w.-]*(/[\w.-]+)?", source)
        if on_hub or source in embedded_names() or (source and os.path.isdir(path)):  # noqa: PTH112
            return "hf"
        if os.path.isfile(path):  # noqa: PTH113 - False for a name too long, too
            raise InputError(f"{source} is a file, but no .gguf: give one, or the folder of a transformers model")
        if "/" in source or "\\" in source:
            bare = re.fullmatch(r"[\w-][\w.-]*/[\w.:-]+", source)
            hint = f"did you mean hf:{source}?" if bare else "a file ends in .gguf, a model on a hub is hf:ORG/NAME"
            raise InputError(f"no such folder: {source}: {hint}")
    find_entry(source)  # raises with the names that are close
    return "zoo"


def choose_dtype(device: str, *, four_bits: bool) -> str:
    """Return the type that `dtype=auto` stands for in torch.

    That is int4 for a 4-bit file if this CPU multiplies it fastest, else `auto_dtype`. The first
    time on a CPU, `lm.hf.int4.is_fastest` measures that for half a second.
    """
    wide = auto_dtype(device)
    if device == "cpu" and four_bits:
        from specnb.lm.hf.int4 import is_fastest

        return "int4" if is_fastest(wide) else wide
    return wide


def is_four_bits(source: str, where: str) -> bool:
    """Tell whether a name means a GGUF of 4 bits a weight: by the type in the zoo, or in the file's name.

    >>> is_four_bits("smollm2-135m", "zoo"), is_four_bits("m-Q4_K_M.gguf", "gguf"), is_four_bits("m.F16.gguf", "gguf")
    (True, True, False)
    """
    kind = source
    if where == "zoo":
        entry, copy = find_entry(source)
        kind = copy or entry.shipped_type
    return where != "hf" and re.search(r"(?<![a-z0-9])q4_[01k]", Path(kind).name.lower()) is not None


def typed_options(spec: ModelSpec) -> dict[str, Any]:
    """Return the options as the engine's `open` annotates them; values from a name arrive as text.

    Raises InputError for an option that it has not, and for a value out of range.
    """
    parameters = inspect.signature(spec.engine.open).parameters.values()
    fields = {p.name: (p.annotation, p.default) for p in parameters if p.kind is p.KEYWORD_ONLY and p.name != "name"}
    # read by `local_file`, not by the engine
    other = {"hf": "weights", "hub": "revision"}.get(spec.where) if spec.backend == "llama" else None
    options = {key: value for key, value in spec.options.items() if key != other}
    for key in options:
        require_known(f"option of {spec.text}", key, ("backend", *fields))
    return validated(create_model("Options", **fields), options, spec.text).model_dump(exclude_unset=True)


def expand_home(path: str | Path) -> Path:
    """Return `path` with the home folder for ~; that of an unknown user stays as it is."""
    return Path(os.path.expanduser(path))  # noqa: PTH111 - Path.expanduser raises for it


# ---- the zoo


@dataclass(frozen=True, kw_only=True)
class ZooEntry(PinnedFile):
    """One model of zoo.toml, whose head says what the fields mean."""

    name: str
    shipped_type: str
    parameters: int
    derived_bytes: Mapping[str, int] = field(default_factory=dict)
    kl: Mapping[str, str] = field(default_factory=dict)
    vocabulary: str = "smollm2"

    def n_bytes(self, kind: str | None) -> int:
        """Return the size of the copy of this type, None for the file as shipped."""
        return self.member_bytes if kind is None else self.derived_bytes[kind]

    def file(self, kind: str | None) -> Path:
        """Return where the copy of this type lies or will lie, None for the file as shipped."""
        if self.revision and kind is None:
            return hub_folder(self.source.removeprefix("hf:"), self.revision) / self.member
        name = Path(self.member).name if kind is None else f"{self.name}.{kind.upper()}.gguf"
        return cache_dir() / "zoo" / self.name / name


ENTRIES = {
    name: ZooEntry(name=name, **facts) for name, facts in read_toml(Path(__file__).with_name("zoo.toml")).items()
}


def is_zoo_name(text: str) -> bool:
    """Tell whether `text` names a model of the zoo; the type after a colon is for `find_entry` to judge."""
    return text.partition(":")[0].lower() in ENTRIES


def find_entry(name: str) -> tuple[ZooEntry, str | None]:
    """Return the entry and the type of the copy, None for the file as shipped (also when its type is spelled out).

    Raises InputError with the nearest names and the whole list.
    """
    base, colon, kind = name.lower().partition(":")
    if base not in ENTRIES:
        names = [*ENTRIES, *embedded_names(), *DRAFTERS]
        raise InputError(f"unknown model in {name!r}: {did_you_mean(base, names)}there are {', '.join(names)}")
    entry = ENTRIES[base]
    if colon:
        require_known(f"type of {entry.name}", kind, (*entry.derived_bytes, entry.shipped_type))
    return entry, kind if kind in entry.derived_bytes else None


def without_wide_type(name: str) -> str:
    """Return the name of the fewest bits that hold a copy's weights: that of the shipped file for types of WIDE."""
    entry, kind = find_entry(name)
    return entry.name if kind in (None, *WIDE) else f"{entry.name}:{kind}"


def trace_weights(name: str) -> str | None:
    """Return where the weights of a model come from and how far rounding moves its logits; None where unknown."""
    source = name.partition("?")[0]
    if not is_zoo_name(source):
        rounded = "dtype=int4" in name and not source.endswith(".gguf")
        return "rounded to 4 bits in groups of 32, lm_head to 8 bits" if rounded else None
    entry, kind = find_entry(source)
    if kind:
        return f"of the shipped {entry.shipped_type} file, as {kind}"
    spec = parse(name)
    engine = spec.options.get("dtype") if spec.backend == "hf" else "llama.cpp"
    if "coarse" in spec.options:
        engine = "coarse int4"
    kl = f"; KL from its float32 form in {engine}: {entry.kl[engine]}" if engine in entry.kl else ""
    return f"of the shipped {entry.shipped_type} file{kl}"


def zoo_file(name: str) -> Path:
    """Return the local GGUF file of a zoo name, fetched and requantised first where it is not there.

    Raises InputError (unknown name), FetchError (no network, wrong digest, disk full or not writable).
    """
    entry, kind = find_entry(name)
    if kind is None:
        return fetch_pinned(entry, entry.file(None))

    def requantize(dest: Path) -> None:
        binding.requantize(zoo_file(entry.name), dest, kind)

    return make_once(entry.file(kind), requantize, n_bytes=entry.n_bytes(kind))


# ---- models of the checkout


def embedded_root() -> Path:
    """Return where the embedded models lie, one folder each. Raises InputError for the package without its checkout."""
    return project_dir() / "data" / "models"


def embedded_names() -> tuple[str, ...]:
    """Return every embedded model, as `specnb.load` takes it."""
    return tuple(sorted(config.parent.name for config in embedded_root().glob("*/config.json")))


def local_folder(name: str) -> Path:
    """Return the folder that a name means: of an embedded model, else the path itself, which need not be there."""
    return embedded_root() / name if name in embedded_names() else expand_home(name)


def find_file(source: str) -> Path:
    """Return the path of a file that must be there; InputError where it is not."""
    if not (file := expand_home(source)).is_file():
        raise InputError(f"no such model file: {source}")
    return file


# ---- what engines open


def prepare(spec: ModelSpec) -> Path:
    """Return what the engine opens: for llama.cpp a GGUF, for torch a folder or, as a path, a hub id."""
    if (file := local_file(spec)) is None:
        return local_folder(spec.source)
    if spec.keeps_blocks:
        return file
    from specnb.lm.hf.files import dequantise_once

    return dequantise_once(file)


def local_file(spec: ModelSpec) -> Path | None:
    """Return the GGUF of a name, fetched or derived if need be; None for a transformers model in torch.

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
    """Return the bytes of a model's weights once it is opened, as its name and files tell; 0 for a model on a hub.

    A GGUF opened in torch counts as its file, though it may become larger.
    """
    if spec.where in ("gguf", "hub"):
        return sum(map(size_of, gguf_parts(local_file(spec))))
    width = WIDTHS.get(spec.options.get(*(("dtype", "float32") if spec.backend == "hf" else ("weights", "f16"))), 2)
    if spec.where == "zoo":
        entry, kind = find_entry(spec.source)
        return entry.n_bytes(kind) if spec.keeps_blocks else entry.parameters * width
    folder = local_folder(spec.source)
    if not (stored := sum(map(size_of, folder.glob("*.safetensors")))):
        return 0
    config = read_json(folder / "config.json")
    return stored * width // WIDTHS.get(config.get("dtype", config.get("torch_dtype")), 2)


def name_copy(name: str, kind: str) -> str:
    """Return the name of a copy of a GGUF with weights of `kind` (`gguf.binding.FILE_TYPES`), made if need be.

    Raises LoadError or FetchError where no copy can be written.
    """
    spec = parse(name)
    if spec.where == "zoo" and (entry := find_entry(spec.source)[0]).derived_bytes:
        return f"{entry.name}:{kind}"
    return str(copy_once(local_file(spec), kind))


def copy_once(file: Path, kind: str) -> Path:
    """Return the cached copy of a GGUF with weights of `kind`. Raises LoadError or FetchError."""
    dest = cache_dir() / "requantised" / f"{file.stem}-{file_digest(file)[:16]}.{kind}.gguf"
    n_bytes = size_of(file) * WIDTHS.get(kind, 2) // 2  # float32 doubles a file in float16
    return make_once(dest, partial(binding.requantize, file, type_name=kind), n_bytes=n_bytes)


def folder_gguf(folder: Path, kind: str) -> Path:
    """Return the GGUF next to a transformers folder, NAME.f16.gguf, or its float32 copy.

    Raises InputError for a folder without one, and for a `kind` other than f16 and f32.
    """
    require_known("type of weights", kind, ("f16", "f32"))
    folder = folder.resolve()
    file = folder.with_name(f"{folder.name}.f16.gguf")
    if not file.is_file():
        tools = "llama.cpp's convert_hf_to_gguf.py, or in a checkout of specnb with python -m data.models.convert"
        raise InputError(f"got the folder {folder}, expected a GGUF for llama.cpp: convert it to {file} with {tools}")
    return file if kind == "f16" else copy_once(file, kind)


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
    """List every name of the zoo, copies included, and of the checkout; reads no model, fetches nothing."""
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
