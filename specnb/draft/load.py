"""From what a user asks for to a drafter that fits the target, or to the reason why there is none."""

from functools import partial
from typing import Any, NamedTuple

from specnb.draft.base import Drafter
from specnb.draft.fit import Fit, Way, fit
from specnb.draft.lookup import LookupDrafter
from specnb.draft.model import ModelDrafter
from specnb.draft.selfdraft import requantised_copy
from specnb.draft.token_map import TokenMap, Tokens
from specnb.draft.translate import StringMatch, TokenIntersection, Translation
from specnb.errors import FetchError, InputError, LoadError, VocabularyMismatch
from specnb.lm.base import LanguageModel
from specnb.lm.load import load
from specnb.lm.vocab import require_same
from specnb.registry import DRAFTERS, resolve

TRANSLATE = ("auto", "tokens", "strings", "refuse")
FORCED = {"tokens": Way.TOKENS, "strings": Way.STRINGS}


class LoadedDrafter(NamedTuple):
    """A drafter, or None and the reason (`fallback`) why generation goes on with the target alone."""

    drafter: Drafter | None
    fallback: str | None = None

    @property
    def translation(self) -> Translation | None:
        """How a draft model of another vocabulary gets to the target's, and how much the two share."""
        return getattr(self.drafter, "translation", None)


def model_drafter(
    name: str, target: LanguageModel, *, translate: str = "auto", **options: Any
) -> ModelDrafter | StringMatch:
    """Open the draft model `name` and fit it to the target's vocabulary before the first token.

    `translate`: see `load_drafter`. Raises VocabularyMismatch, InputError, FetchError, LoadError, MemoryShortError.
    """
    if translate not in TRANSLATE:
        raise InputError(f"unknown translation {translate!r}; known: {', '.join(TRANSLATE)}")
    model = load(name, **options)
    try:
        if model.caps.rewind == "none":
            raise InputError(f"{model.name} cannot draft: {model.caps.rewind_reason}")
        return fitted(model, target, translate)
    except BaseException:
        model.close()
        raise


def fitted(model: LanguageModel, target: LanguageModel, translate: str = "auto") -> ModelDrafter | StringMatch:
    """An opened draft model as a drafter for `target`, translated where it must be; `translate`: see `load_drafter`.

    The way is that of `draft.fit`, which `compat.check` asks too. Raises VocabularyMismatch where translation is
    refused, or there is no way.
    """
    if translate == "refuse":
        require_same(target.vocab, model.vocab, names=(target.name, model.name))
    ours, theirs = Tokens(target), Tokens(model)
    found = fit(ours, theirs)
    if found.way is Way.SAME:
        return ModelDrafter(model)
    way = FORCED.get(translate, found.way)
    if way is Way.NONE:
        raise _no_way(model, target, found)
    pairs = TokenMap(ours, theirs)
    if way is Way.STRINGS:
        return StringMatch(model, target, pairs)
    return ModelDrafter(TokenIntersection(model, target, pairs))


def _no_way(model: LanguageModel, target: LanguageModel, found: Fit) -> VocabularyMismatch:
    return VocabularyMismatch(
        f"{model.name} ({model.vocab.kind}) cannot draft for {target.name} ({target.vocab.kind}): {found.overlap}, and "
        "its text cannot be spelled in the target's tokens. Use a drafter with the target's tokenizer, a requantised "
        "copy of the target (--drafter self), or --drafter lookup, which needs no draft model"
    )


def self_drafter(target: LanguageModel, *, type_name: str = "q4_0", **options: Any) -> ModelDrafter | StringMatch:
    return model_drafter(requantised_copy(target.name, type_name), target, **options)


def lookup_drafter(_target: LanguageModel, *, translate: str = "auto", **options: Any) -> LookupDrafter:
    return LookupDrafter(**options)


def load_drafter(
    what: str, target: LanguageModel, *, strict: bool = False, translate: str = "auto", **options: Any
) -> LoadedDrafter:
    """A drafter for `target`: one of `registry.DRAFTERS`, or the name of a draft model.

    A draft model that cannot be fetched or loaded, or does not fit the memory, is no reason to lose the generation:
    the result then has no drafter and says why, unless `strict`. A wrong name or option, or a vocabulary that cannot
    be translated, is a mistake, and always raises; so are heads that do not fit ("medusa", whose options are those of
    `medusa.drafter.heads_drafter`).

    `translate` says what happens to a draft model with another vocabulary: "tokens" drafts with the shared pieces
    (`TokenIntersection`), "strings" spells its text in the target's tokens (`StringMatch`), "refuse" raises
    VocabularyMismatch. "auto" takes tokens where the target mostly uses shared ones, else strings (`draft.fit`);
    where the ids that both have mean the same, rows are sliced, and nothing is lost.
    """
    try:
        make = resolve(DRAFTERS[what]) if what in DRAFTERS else partial(model_drafter, what)
        return LoadedDrafter(make(target, translate=translate, **options))
    except (LoadError, FetchError) as error:
        if strict:
            raise
        return LoadedDrafter(None, f"{type(error).__name__}: {error}")
