"""Open a model by name, and check names before any weights are read."""

from pathlib import Path
from typing import Any

from specnb.lm.base import LanguageModel
from specnb.lm.files import find_file, parse, prepare, typed_options


def load(name_or_path: str | Path, **options: Any) -> LanguageModel:
    """Open a model by name (see `lm.files`); `options` are passed to the engine's `open`.

    Raises InputError (name, option), FetchError (the download failed), LoadError, MemoryShortError.

    >>> model = load("tiny-hybrid-draft", n_ctx=64)
    >>> model.forward(model.encode("def f")).shape == (len(model.encode("def f")), model.vocab.size)
    True
    """
    spec = parse(str(name_or_path), **options)
    return spec.engine.open(prepare(spec), name=spec.text, **typed_options(spec))


def checked_name(name: str) -> None:
    """Check a name as `load` does, and that a .gguf file exists, without reading weights."""
    spec = parse(name)
    if spec.where == "gguf":
        find_file(spec.source)
    typed_options(spec)
