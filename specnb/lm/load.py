"""From a parsed name to an opened model, and what can be refused before weights are read."""

from collections import Counter
from pathlib import Path
from typing import Any

from specnb.errors import FetchError, InputError, MemoryShortError
from specnb.lm.base import LanguageModel
from specnb.lm.files import find_file, parse, prepare, typed_options, weights_bytes
from specnb.machine import require_memory
from specnb.registry import DRAFTERS


def load(name_or_path: str | Path, **options: Any) -> LanguageModel:
    """Open a model by name (see `lm.files`); `options` go to the engine's `open`.

    Raises InputError (name, option), FetchError (zoo file not to be had), LoadError, MemoryShortError.

    >>> model = load("tiny-hybrid-draft", n_ctx=64)
    >>> model.forward(model.encode("def f")).shape == (len(model.encode("def f")), model.vocab.size)
    True
    """
    spec = parse(str(name_or_path), **options)
    return spec.engine.open(prepare(spec), name=spec.text, **typed_options(spec))


def checked_name(name: str) -> None:
    """Parse, and refuse what `load` would before it reads weights: an option, a file that is not there."""
    spec = parse(name)
    if spec.where == "gguf":
        find_file(spec.source)
    typed_options(spec)


def room_for_both(target: str, draft: str, *, strict: bool = False) -> tuple[str | None, str | None]:
    """Return the name of the draft model, or None and the reason where it does not fit into memory beside the target.

    Asked before either is loaded, for the file pages of an open model look as if they were free. Counted are weights
    and a margin on the devices that the names give; a state is checked when its model is opened. Drafters that are no
    models pass. With `strict` MemoryShortError is raised instead.
    """
    if draft in DRAFTERS:
        return draft, None
    weights = Counter()
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
