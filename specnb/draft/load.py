"""From what a user asks for to a drafter that fits the target, or to the reason why there is none."""

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from specnb.draft.base import Drafter
from specnb.errors import FetchError, InputError, LoadError, did_you_mean
from specnb.lm.base import LanguageModel
from specnb.registry import DRAFTERS, MODEL_DRAFTER, resolve

if TYPE_CHECKING:
    from specnb.draft.translate import Translation


class LoadedDrafter(NamedTuple):
    """A drafter, or None and the reason (`fallback`) why generation goes on with the target alone."""

    drafter: Drafter | None
    fallback: str | None = None

    @property
    def translation(self) -> "Translation | None":
        """How a draft model of another vocabulary gets to the target's, and how much the two share."""
        return getattr(self.drafter, "translation", None)


def load_drafter(
    name: str, target: LanguageModel, *, strict: bool = False, translate: str = "auto", **options: Any
) -> LoadedDrafter:
    """Open a drafter for `target`: one of `registry.DRAFTERS`, or the name of a draft model.

    A draft model that cannot be fetched or loaded, or does not fit the memory, is no reason to lose the generation:
    the result then has no drafter and says why, unless `strict`. A wrong name or option, or a vocabulary that cannot
    be translated, is a mistake, and always raises; so are heads that do not fit ("medusa", whose options are those of
    `medusa.drafter.heads_drafter`).

    `translate` says what happens to a draft model with another vocabulary: "tokens" drafts with the shared pieces
    (`TokenIntersection`), "strings" spells its text in the target's tokens (`StringMatch`), "refuse" raises
    VocabularyMismatch. "auto" takes tokens where the target mostly uses shared ones, else strings (`token_map.fit`);
    where the ids that both have mean the same, rows are sliced, and nothing is lost.
    """
    try:
        make = resolve(DRAFTERS[name]) if name in DRAFTERS else partial(resolve(MODEL_DRAFTER), name)
        return LoadedDrafter(make(target, translate=translate, **options))
    except (LoadError, FetchError) as error:
        if strict:
            raise
        return LoadedDrafter(None, f"{type(error).__name__}: {error}")
    except InputError as error:
        near = did_you_mean(name, list(DRAFTERS)) if name not in DRAFTERS else ""
        if near:
            raise InputError(f"{error}; of the drafters {near.strip()}") from error
        raise
