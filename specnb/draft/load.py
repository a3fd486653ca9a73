"""From what a user asks for to a drafter that fits the target, or to the reason why there is none."""

from collections.abc import Callable
from typing import Any, NamedTuple

from specnb.draft.base import Drafter
from specnb.draft.lookup import LookupDrafter
from specnb.draft.model import ModelDrafter
from specnb.draft.selfdraft import requantised_copy
from specnb.errors import FetchError, InputError, LoadError
from specnb.lm.base import LanguageModel
from specnb.lm.load import load
from specnb.lm.vocab import require_same


class LoadedDrafter(NamedTuple):
    """A drafter, or None and the reason (`fallback`) why generation goes on with the target alone."""

    drafter: Drafter | None
    fallback: str | None = None


def model_drafter(name: str, target: LanguageModel, **options: Any) -> ModelDrafter:
    """Open the draft model `name` and compare its vocabulary with the target's before the first token.

    Raises VocabularyMismatch, InputError, FetchError, LoadError, MemoryShortError.
    """
    model = load(name, **options)
    try:
        require_same(target.vocab, model.vocab, names=(target.name, model.name))
        if model.caps.rewind == "none":
            raise InputError(f"{model.name} cannot draft: {model.caps.rewind_reason}")
    except BaseException:
        model.close()
        raise
    return ModelDrafter(model)


def _self_drafter(target: LanguageModel, *, type_name: str = "q4_0", **options: Any) -> ModelDrafter:
    return model_drafter(requantised_copy(target.name, type_name), target, **options)


def _lookup_drafter(_target: LanguageModel, **options: Any) -> LookupDrafter:
    return LookupDrafter(**options)


KINDS: dict[str, Callable[..., Drafter]] = {"lookup": _lookup_drafter, "self": _self_drafter}
"""Drafters that need no model name; the command line's `--drafter`."""


def load_drafter(what: str, target: LanguageModel, *, strict: bool = False, **options: Any) -> LoadedDrafter:
    """A drafter for `target`: one of KINDS, or the name of a draft model.

    A draft model that cannot be fetched or loaded, or does not fit the memory, is no reason to lose the generation:
    the result then has no drafter and says why, unless `strict`. A wrong name, a wrong option or another vocabulary
    is a mistake, and always raises.
    """
    try:
        if what in KINDS:
            return LoadedDrafter(KINDS[what](target, **options))
        return LoadedDrafter(model_drafter(what, target, **options))
    except (LoadError, FetchError) as error:
        if strict:
            raise
        return LoadedDrafter(None, f"{type(error).__name__}: {error}")
