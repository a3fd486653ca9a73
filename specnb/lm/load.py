"""From the name a user writes to an opened model.

smollm2-135m                        zoo, in llama.cpp as shipped
smollm2-135m:f16                    zoo, requantised here
smollm2-135m?backend=hf&dtype=bfloat16   zoo, dequantised into torch (dtype=auto: as the hardware has it)
model.gguf   model.gguf?backend=hf  a file, in llama.cpp or in torch
./folder     hf:ORG/NAME            transformers
hf:ORG/NAME-GGUF:Q4_K_M             a GGUF on a hub by its type, or hf:ORG/NAME/FILE.gguf, in llama.cpp
./folder?backend=llama&weights=f16  converted to a GGUF here (families of lm/gguf), in llama.cpp
tiny-hybrid                         a model that comes with the checkout (a folder in data/models)
"""

import inspect
import os
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, urlencode

from pydantic import create_model

from specnb.errors import FetchError, InputError, MemoryShortError, require_known
from specnb.fetch import HUB_GGUF, from_hub, gguf_parts, size_of
from specnb.io import read_json, validated
from specnb.lm import zoo
from specnb.lm.base import LanguageModel
from specnb.lm.zoo import expanded
from specnb.machine import auto_dtype, require_memory
from specnb.registry import DRAFTERS, resolve

ENGINES = {"llama": "specnb.lm.gguf.model:GgufModel", "hf": "specnb.lm.hf.model:HfModel"}
"""By backend; imported when they are asked for, so that each works without the other."""
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


def parse(name: str, **options: Any) -> ModelSpec:
    """Split `NAME?option=value&…`; keyword options win over those in the name. Touches no file but to see folders.

    Raises InputError for unknown backends and for names that are neither zoo, file, folder nor hub id.
    """
    source, _, query = str(name).partition("?")
    try:
        options = dict(parse_qsl(query, keep_blank_values=True, strict_parsing=True) if query else ()) | options
    except ValueError as error:
        raise InputError(f"cannot read the options {query!r} of {name!r}; write NAME?backend=hf&n_ctx=512") from error
    where = _where(source)
    usual = "hf" if where == "hf" else "llama"
    backend = (asked := options.pop("backend", None)) or usual
    require_known("backend", backend, ENGINES)
    if backend == "llama" and where == "hf" and source.startswith("hf:"):
        raise InputError(f"{name!r} is on a hub, and llama.cpp opens GGUFs: name a type of it, {source}:Q4_K_M")
    if backend == "hf" and options.get("dtype") == "auto":
        options["dtype"] = auto_dtype(options.get("device", "cpu"))
    extra = ({"backend": backend} if asked else {}) | options
    text = f"{source}?{urlencode(extra)}" if extra else source
    return ModelSpec(text, where, source if where == "hub" else source.removeprefix("hf:"), backend, options)


def _where(source: str) -> str:
    if zoo.is_zoo_name(source):
        return "zoo"
    if HUB_GGUF.fullmatch(source):
        return "hub"
    if source.endswith(".gguf"):
        return "gguf"
    if source.startswith("hf:") or source in zoo.embedded_names():
        return "hf"
    if source and os.path.isdir(expanded(source)):  # noqa: PTH112 - False for a name too long, too
        return "hf"
    if source and os.path.isfile(expanded(source)):  # noqa: PTH113 - as above
        raise InputError(f"{source} is a file, but no .gguf: give a .gguf file, or the folder of a transformers model")
    if "/" in source or "\\" in source:
        on_hub = re.fullmatch(r"[\w-][\w.-]*/[\w.:-]+", source)
        hint = f"did you mean hf:{source}?" if on_hub else "a file ends in .gguf, a model on a hub is hf:ORG/NAME"
        raise InputError(f"no such folder: {source}: {hint}")
    zoo.parse(source)  # raises with the names that are close
    return "zoo"


def checked_name(name: str) -> ModelSpec:
    """Parse, and refuse what `load` would before it reads weights: an option, a file that is not there."""
    spec = parse(name)
    if spec.where == "gguf" and not expanded(spec.source).is_file():
        raise InputError(f"no such model file: {spec.source}")
    typed_options(spec)
    return spec


def local_file(spec: ModelSpec) -> Path | None:
    """The GGUF behind a name, fetched, derived or converted if need be; None for models that transformers opens."""
    if spec.where == "zoo":
        return zoo.path(spec.source)
    if spec.where == "hub":
        return from_hub(spec.source, spec.options.get("revision", "main"))
    if spec.where == "hf" and spec.backend == "llama":
        from specnb.lm.gguf.convert import converted

        return converted(zoo.local_folder(spec.source), spec.options.get("weights", "f16"))
    return expanded(spec.source) if spec.where == "gguf" else None


def room_for_both(target: str, draft: str | None, *, strict: bool = False) -> tuple[str | None, str | None]:
    """The name of the draft model, or None and the reason where it does not fit into memory beside the target.

    Asked before either is loaded, for the file pages of an open model look as if they were free. Counted are weights
    and a margin on the devices that the names give; a state is checked when its model is opened. Drafters that are no
    models pass. With `strict` MemoryShortError is raised instead.
    """
    if draft is None or draft in DRAFTERS:
        return draft, None
    weights: Counter[str] = Counter()
    try:
        for spec in (parse(target), parse(draft)):
            if not int(spec.options.get("gpu_layers", 0)):  # what part llama.cpp puts where is for it to know
                weights[spec.options.get("device", "cpu")] += weights_bytes(spec)
        for device, both in weights.items():
            require_memory(both, name=f"{draft} beside {target}", device=device)
    except MemoryShortError as error:
        if strict:
            raise
        return None, f"{type(error).__name__}: {error}"
    except (FetchError, InputError, ValueError):  # for `load` to say
        pass
    return draft, None


def weights_bytes(spec: ModelSpec) -> int:
    """Bytes of a model's weights once it is opened, as its name and files tell; 0 for a model on a hub.

    A GGUF opened in torch counts as its file, though it may become larger.
    """
    if spec.where in ("gguf", "hub"):
        return sum(map(size_of, gguf_parts(local_file(spec))))
    given = ("dtype", "float32") if spec.backend == "hf" else ("weights", "f16")
    width = WIDTHS.get(spec.options.get(*given), 2)
    if spec.where == "zoo":
        entry, kind = zoo.parse(spec.source)
        return entry.n_bytes(kind) if spec.backend == "llama" else entry.parameters * width
    folder = zoo.local_folder(spec.source)
    stored = sum(size_of(file) for file in folder.glob("*.safetensors"))
    if not stored:
        return 0
    config = read_json(folder / "config.json")
    return stored * width // WIDTHS.get(config.get("dtype", config.get("torch_dtype")), 2)


def load(name_or_path: str | Path, **options: Any) -> LanguageModel:
    """Open a model by name (see the module's text); `options` go to the engine's `open`.

    Raises InputError (name, option), FetchError (zoo file not to be had), LoadError, MemoryShortError.

    >>> model = load("tiny-hybrid-draft", n_ctx=64)
    >>> model.forward(model.encode("def f")).shape == (len(model.encode("def f")), model.vocab.size)
    True
    """
    spec = parse(str(name_or_path), **options)
    source = local_file(spec) or zoo.local_folder(spec.source)
    return resolve(ENGINES[spec.backend]).open(source, name=spec.text, **typed_options(spec))


def typed_options(spec: ModelSpec) -> dict[str, Any]:
    """The options with the types that the engine's `open` states; values from a name arrive as text."""
    parameters = inspect.signature(resolve(ENGINES[spec.backend]).open).parameters.values()
    fields = {p.name: (type(p.default), p.default) for p in parameters if p.kind is p.KEYWORD_ONLY and p.name != "name"}
    # of the conversion or of the hub, not of the engine
    other = {"hf": "weights", "hub": "revision"}.get(spec.where) if spec.backend == "llama" else None
    options = {  # of True and False no engine knows more than their names
        key: str(value).lower() if isinstance(value, bool) else value
        for key, value in spec.options.items()
        if key != other
    }
    for key in options:
        require_known(f"option of {spec.text}", key, ("backend", *fields))
    return validated(create_model("Options", **fields), options, spec.text).model_dump(exclude_unset=True)
