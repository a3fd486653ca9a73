"""Open a drafter by name for a target, or give the reason why there is none."""

from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from specnb.draft.base import Drafter
from specnb.errors import FetchError, InputError, LoadError
from specnb.lm.base import LanguageModel
from specnb.lm.files import parse
from specnb.lm.load import checked_name, load
from specnb.registry import CHECKS, DRAFT_MODEL, DRAFTERS, resolve

HEADS = "medusa"
"""The drafter that loads a checkpoint of trained heads."""


class LoadedDrafter(NamedTuple):
    """A drafter, or None and the reason (`fallback`) why the target decodes without one."""

    drafter: Drafter | None
    fallback: str | None = None


def check_drafter(name: str, target: str, **options: Any) -> None:
    """Check the name and options of a drafter before a model is opened. Raises InputError."""
    if name in CHECKS:
        resolve(CHECKS[name])(target, **options)
    elif name not in DRAFTERS:
        checked_name(name)


def load_drafter(
    name: str, target: LanguageModel, *, strict: bool = False, **options: Any
) -> LoadedDrafter:
    """Open a drafter for `target`: a name in `registry.DRAFTERS`, or a draft model.

    A draft model runs in the target's engine by default (`join_engine`). If a drafter cannot be
    fetched or loaded, the result contains the reason instead; with `strict`, the error is raised.
    InputError and VocabularyMismatch are always raised.

    A draft model with another vocabulary drafts the pieces that both vocabularies have
    (`TokenIntersection`). If ids in both mean the same, its rows are sliced without loss.

    >>> from specnb.lm import toy
    >>> load_drafter("lookup", toy.cyclic(5), n_max=3).drafter.name
    'lookup(n=1..3,x4)'
    """
    try:
        if name in DRAFTERS:
            return LoadedDrafter(resolve(DRAFTERS[name])(target, **options))
        draft = join_engine(name, target.name)
        return LoadedDrafter(resolve(DRAFT_MODEL)(draft, target, **options))
    except (LoadError, FetchError) as error:
        if strict:
            raise
        return LoadedDrafter(None, f"{type(error).__name__}: {error}")


def join_engine(draft: str, target: str) -> str:
    """Add the engine, dtype and device of a torch target to the name of a draft model.

    A name with its own engine is returned unchanged. An int4 draft model is opened as `coarse` (see
    `HfModel.open`): its steps cost less, and verification keeps the output lossless.

    >>> join_engine("smollm2-135m:q4_0", "smollm2-135m?backend=hf&dtype=bfloat16")
    'smollm2-135m:q4_0?backend=hf&dtype=bfloat16'
    """
    try:
        spec = parse(draft)
        target_spec = parse(target)
    except InputError:  # not a model name, or a target in memory
        return draft
    if target_spec.backend == "llama" or spec.where == "hf" or "backend=" in draft:
        return draft
    shared = {
        key: target_spec.options[key] for key in ("dtype", "device") if key in target_spec.options
    }
    joined = parse(draft, **({"backend": "hf"} | shared | spec.options))
    if joined.options.get("dtype") == "int4":
        joined = parse(joined.text, **({"coarse": "true"} | joined.options))
    return joined.text


@contextmanager
def open_pair(
    target: LanguageModel | str | Path,
    drafter: Drafter | LanguageModel | str | None,
    *,
    strict: bool = False,
    **options: Any,
) -> Iterator[tuple[LanguageModel, Drafter | LanguageModel | None, str | None]]:
    """Open a target and a drafter by name, and close them afterwards.

    Yields target, drafter, and the reason if there is no drafter. Invalid names and options raise
    before a model is loaded, if possible. `strict` and `options` are those of `load_drafter`.
    """
    fallback = None
    with ExitStack() as opened:
        if isinstance(target, str | Path):
            name = str(target)
            checked_name(name)
            if isinstance(drafter, str):
                check_drafter(drafter, name, **options)
            target = opened.enter_context(closing(load(name)))
        if isinstance(drafter, str):
            drafter, fallback = load_drafter(drafter, target, strict=strict, **options)
            if drafter is not None:
                opened.enter_context(closing(drafter))
        yield target, drafter, fallback
