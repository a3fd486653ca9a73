"""What a verdict is worth: the same draft model behind several vocabularies, run with one target.

The measurement behind notebook 03. Overlap is what can be known before; acceptance is what comes of it.
"""

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

from specnb.compat.foreign import Family, speaking
from specnb.compat.read import describe
from specnb.decode.generate import generate
from specnb.draft.base import Drafter
from specnb.draft.load import fitted
from specnb.draft.model import ModelDrafter
from specnb.lm.base import LanguageModel
from specnb.lm.load import load
from specnb.measure.experiment import Progress, models_of, record_of, saving_failures, silent
from specnb.params import CompatibilityParams
from specnb.prompts import Prompt, prompts
from specnb.records import Generation, RunRecord

EXPERIMENT = "03_compatibility"
OWN = "its own"


def run(params: CompatibilityParams, *, progress: Progress = silent) -> RunRecord:
    """Generate every prompt plainly, then with the draft model in its own vocabulary and behind each family's.

    `measurements["trial"]` has a row for each vocabulary: how its tokens were translated, what was shared before, and
    what was accepted. Raises what `specnb.load`, `read.describe` and `generate` raise; what was made before is saved.
    """
    started = datetime.now(UTC)
    chosen = [p for category in params.categories for p in prompts(category, limit=params.prompts_per_category)]
    families = [Family(describe(name)) for name in params.families]
    target = load(params.target)
    draft: LanguageModel | None = None
    made: list[Generation] = []
    measured: dict[str, Any] = {"trial": []}

    def recorded(error: BaseException | None = None) -> RunRecord:
        models = models_of(target, [ModelDrafter(draft)] if draft else [])
        return record_of(EXPERIMENT, params, chosen, target, models, started, made, measured, error=error)

    try:
        with saving_failures(made, recorded):
            draft = load(params.draft_model)
            total = len(chosen) * (1 + len(params.families) + 1)
            made.extend(_runs(params, target, None, "plainly", chosen, 0, total, progress))
            for at, (name, drafter) in enumerate(_drafters(target, draft, families), start=1):
                made.extend(_runs(params, target, drafter, name, chosen, at * len(chosen), total, progress))
                measured["trial"].append(_row(name, drafter, made[-len(chosen) :], made[: len(chosen)]))
            return recorded()
    finally:
        if draft is not None:
            draft.close()
        target.close()


def _drafters(target: LanguageModel, draft: LanguageModel, families: Sequence[Family]) -> Iterator[tuple[str, Drafter]]:
    yield OWN, fitted(draft, target)
    for family in families:
        yield family.name, fitted(speaking(draft, family), target)


def _runs(
    params: CompatibilityParams,
    target: LanguageModel,
    drafter: Drafter | None,
    name: str,
    chosen: Sequence[Prompt],
    done: int,
    total: int,
    progress: Progress,
) -> Iterator[Generation]:
    drafting = {"drafter": drafter, "k": params.k} if drafter else {}
    for at, prompt in enumerate(chosen):
        progress(done + at, total, f"{prompt.id}, {name}")
        yield generate(
            target, prompt, temperature=params.temperature, max_new_tokens=params.max_new_tokens, seed=params.seed,
            **drafting,
        )  # fmt: skip


def _row(name: str, drafter: Drafter, made: Sequence[Generation], plain: Sequence[Generation]) -> dict[str, Any]:
    """Counts over all prompts; `same_text` of greedy runs only (None above temperature 0)."""
    translation = getattr(drafter, "translation", None)
    overlap = translation.overlap if translation else None
    drafted, accepted = sum(g.total_draft_tokens for g in made), sum(g.accepted_tokens for g in made)
    rounds = sum(len(g.rounds) for g in made)
    greedy = all(g.temperature == 0 for g in made)
    return {
        "vocabulary": name,
        "translated": translation.how if translation else "not needed",
        "pieces_shared": overlap.of_target if overlap else 1.0,
        "text_shared": overlap.target_uses if overlap else 1.0,
        "drafted": drafted,
        "accepted": accepted,
        "acceptance_rate": accepted / drafted if drafted else None,
        "tau": sum(len(g.token_ids) for g in made) / rounds if rounds else None,
        "same_text": all(g.token_ids == p.token_ids for g, p in zip(made, plain, strict=True)) if greedy else None,
    }
