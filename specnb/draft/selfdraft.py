"""A coarser copy of the target as its own drafter: same tokenizer by construction, no training, no download."""

from pathlib import Path
from typing import Any

from specnb.draft.model import ModelDrafter
from specnb.draft.translate import StringMatch, model_drafter
from specnb.errors import InputError
from specnb.io import file_digest
from specnb.lm import zoo
from specnb.lm.base import LanguageModel
from specnb.lm.gguf import binding
from specnb.lm.load import ModelSpec, local_file, parse
from specnb.lm.zoo import made_once
from specnb.paths import cache_dir


def self_drafter(target: LanguageModel, *, type_name: str = "q4_0", **options: Any) -> ModelDrafter | StringMatch:
    return model_drafter(requantised_copy(target.name, type_name), target, **options)


def requantised_copy(target: str, type_name: str = "q4_0") -> str:
    """Name of a copy of `target` with weights of `type_name` (see `lm.gguf.binding.FILE_TYPES`), made if need be.

    Raises InputError when the target is no GGUF (its weights cannot be requantised here) or the type is unknown,
    LoadError or FetchError when the copy cannot be made or written.
    """
    spec = parse(target)
    if type_name not in binding.FILE_TYPES:
        raise InputError(f"unknown weight type {type_name!r}; known: {', '.join(binding.FILE_TYPES)}")
    if spec.where == "hf" and spec.backend != "llama":
        raise InputError(
            f"{target!r} is a transformers model and cannot be requantised here: give a .gguf target, "
            "or a smaller model with --draft, or --drafter lookup"
        )
    if spec.where == "zoo":
        return f"{zoo.parse(spec.source)[0].name}:{type_name}"
    return str(_requantised_file(spec, type_name))


def _requantised_file(spec: ModelSpec, type_name: str) -> Path:
    source = local_file(spec)
    dest = cache_dir() / "requantised" / f"{source.stem}-{file_digest(source)[:16]}.{type_name}.gguf"
    return made_once(
        dest, lambda partial: binding.requantize(source, partial, type_name), n_bytes=source.stat().st_size
    )
