"""Open a model by name, and check names and memory before any weights are read."""

from collections import Counter
from pathlib import Path
from typing import Any

from specnb.errors import FetchError, InputError, MemoryShortError
from specnb.lm.base import LanguageModel
from specnb.lm.files import find_file, parse, prepare, typed_options, weights_bytes
from specnb.machine import require_memory
from specnb.registry import DRAFTERS


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


def room_for_both(
    target: str, draft: str, *, strict: bool = False
) -> tuple[str | None, str | None]:
    """Return `(draft, None)`, or `(None, reason)` if target and draft do not both fit in memory.

    Call this before either is loaded: the mapped file pages of an open model count as free memory.
    It checks the weights plus a margin on each device; the state is checked when a model is opened.
    Drafters without a model always fit. With `strict`, raises MemoryShortError instead.
    """
    if draft in DRAFTERS:
        return draft, None
    weights = Counter()
    try:
        for spec in (parse(target), parse(draft)):
            if not int(spec.options.get("gpu_layers", 0)):  # llama.cpp places the layers itself
                weights[spec.options.get("device", "cpu")] += weights_bytes(spec)
        for device, n_bytes in weights.items():
            require_memory(n_bytes, name=f"{draft} with {target}", device=device)
    except MemoryShortError as error:
        if strict:
            raise
        return None, f"{type(error).__name__}: {error}"
    except (FetchError, InputError, ValueError):  # `load` reports it
        pass
    return draft, None
