"""What a verdict is worth: a draft run with its target, and one draft model behind several vocabularies for comparison.

The measurement behind notebook 03. Overlap, and what it predicts (`compat.predict`), can be known before; acceptance is
what comes of it.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from typing import Any, NamedTuple

from specnb.compat import predict
from specnb.compat.description import Family
from specnb.compat.read import describe, opens
from specnb.decode.generate import generate
from specnb.draft.base import Drafter
from specnb.draft.model import ModelDrafter
from specnb.draft.token_map import Way
from specnb.draft.translate import TokenIntersection, fitted
from specnb.lm.base import LanguageModel
from specnb.lm.load import load
from specnb.measure.experiment import Progress, models_of, record_of, saving_failures, silent
from specnb.params import CompatibilityParams
from specnb.prompts import Prompt, prompts
from specnb.records import Generation, RunRecord

EXPERIMENT = "03_compatibility"
UNCHANGED = "its own"
"""Name of the vocabulary that the draft model itself has."""


def speaking(model: LanguageModel, family: Family) -> TokenIntersection:
    """`model` behind the vocabulary of a family whose weights are not at hand; closing it closes `model`.

    Its rows are those over the pieces that both have, so a model of known quality drafts with what the family can say.
    It is a bound: a model of that family cuts its texts in the family's way, and thinks in other pieces. Raises
    VocabularyMismatch when not one piece is shared.
    """
    spoken = TokenIntersection(model, family)
    spoken.name = f"{model.name} as {family.name}"
    return spoken


class Candidate(NamedTuple):
    """A drafter to be tried. `reach` is the share of an ordinary text's tokens that it can put forward, if known.

    `stands_in` where the weights are those of `draft_model`, which speaks another vocabulary than its own.
    """

    name: str
    drafter: Drafter
    reach: float | None
    stands_in: bool = False


def run(params: CompatibilityParams, *, progress: Progress = silent) -> RunRecord:
    """Generate every prompt plainly, then with each draft: `draft_model` as it is, `draft`, and the `families`.

    `measurements["trial"]` has a row for each: how its tokens were translated, what was shared before, what that
    predicts, and what was accepted. Raises what `specnb.load`, `read.describe` and `generate` raise; what was generated
    before is saved.
    """
    started = datetime.now(UTC)
    chosen = [p for category in params.categories for p in prompts(category, limit=params.prompts_per_category)]
    names = [name for name in dict.fromkeys((params.draft, *params.families)) if name != params.draft_model]
    speakers = {name: Family(describe(name)) for name in names if not opens(name)}
    generations: list[Generation] = []
    measured: dict[str, Any] = {"trial": []}
    with ExitStack() as opened:

        def loaded(name: str) -> LanguageModel:
            model = load(name)
            opened.callback(model.close)
            return model

        target = loaded(params.target)
        models = [ModelDrafter(loaded(name)) for name in (params.draft_model, *(n for n in names if opens(n)))]

        def recorded(error: BaseException | None = None) -> RunRecord:
            used = models_of(target, models)
            return record_of(EXPERIMENT, params, chosen, target, used, started, generations, measured, error=error)

        with saving_failures(generations, recorded):
            total = len(chosen) * (2 + len(names))
            generations.extend(_runs(params, target, None, "plainly", chosen, 0, total, progress))
            quality: float | None = None
            for at, tried in enumerate(_candidates(target, [m.model for m in models], names, speakers), start=1):
                done = at * len(chosen)
                generations.extend(_runs(params, target, tried.drafter, tried.name, chosen, done, total, progress))
                latest = generations[-len(chosen) :]
                if at == 1 and _in_target_tokens(tried.drafter):  # so it tells how good this draft is
                    quality = predict.chance_of(latest)
                expected = quality if at == 1 or tried.stands_in else None  # of other weights nothing is known before
                measured["trial"].append(_row(tried, expected, params.k, latest, generations[: len(chosen)]))
            return recorded()


def _candidates(
    target: LanguageModel, models: Sequence[LanguageModel], names: Sequence[str], speakers: dict[str, Family]
) -> Iterator[Candidate]:
    first, *others = models
    yield _candidate(UNCHANGED, fitted(first, target))
    for name in names:
        if name in speakers:
            spoken = speaking(first, speakers[name])
            yield _candidate(name, fitted(spoken, target), spoken.translation.overlap.draft_uses, stands_in=True)
        else:
            yield _candidate(name, fitted(others.pop(0), target))


def _candidate(name: str, drafter: Drafter, spoken: float | None = 1.0, *, stands_in: bool = False) -> Candidate:
    """`spoken` is the share of its own tokens that a draft model has where it speaks another vocabulary.

    What it lacks there it cannot write as a string either. Where tokens are shared, it and what the target lacks are
    the same pieces.
    """
    translation = getattr(drafter, "translation", None)
    if translation is None:
        return Candidate(name, drafter, 1.0, stands_in)
    reach = spoken if translation.way is Way.STRINGS else translation.overlap.target_uses
    return Candidate(name, drafter, reach, stands_in)


def _in_target_tokens(drafter: Drafter) -> bool:
    """Whether a drafter writes the target's own tokens, none of them translated."""
    translation = getattr(drafter, "translation", None)
    return translation is None or translation.way is Way.SLICING


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


def _row(
    tried: Candidate, quality: float | None, k: int, drafted: Sequence[Generation], plain: Sequence[Generation]
) -> dict[str, Any]:
    """Counts over all prompts; `same_text` of greedy runs only (None above temperature 0).

    `predicted_*` from `reach` and `quality` alone (None where one is not known). `in_reach` is the share of the tokens
    that were generated in the end which could be drafted: no draft could make `tau` larger than `tau_bound`, which
    follows from it.
    """
    translation = getattr(tried.drafter, "translation", None)
    n_drafted, accepted = sum(g.total_draft_tokens for g in drafted), sum(g.accepted_tokens for g in drafted)
    rounds, tokens = sum(len(g.rounds) for g in drafted), [token for g in drafted for token in g.token_ids]
    can_draft = getattr(getattr(tried.drafter, "model", None), "can_draft", None)
    in_reach = sum(map(can_draft, tokens)) / len(tokens) if can_draft and tokens else 1.0
    expected = None if quality is None or tried.reach is None else predict.predict(tried.reach, k, quality)
    greedy = all(g.temperature == 0 for g in drafted)
    return {
        "vocabulary": tried.name,
        "translated": str(translation.way) if translation else "not needed",
        "pieces_shared": translation.overlap.of_target if translation else 1.0,
        "text_shared": tried.reach,
        "predicted_rate": expected and expected.acceptance_rate,
        "acceptance_rate": accepted / n_drafted if n_drafted else None,
        "drafted": n_drafted,
        "accepted": accepted,
        "predicted_tau": expected and expected.tau,
        "tau": len(tokens) / rounds if rounds else None,
        "in_reach": in_reach,
        "tau_bound": predict.bound(in_reach, k),
        "same_text": all(g.token_ids == p.token_ids for g, p in zip(drafted, plain, strict=True)) if greedy else None,
    }
