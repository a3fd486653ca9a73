"""What a verdict is worth: a draft run with its target, and one draft model behind several vocabularies for comparison.

The measurement behind notebook 03. Overlap, and what it predicts (`compat.predict`), can be known before; acceptance is
what comes of it.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
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
from specnb.lm.busy import Neighbours
from specnb.lm.load import load
from specnb.measure.experiment import Progress, models_of, prompts_of, record_of, saving_failures, silent
from specnb.params import CompatibilityParams
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

    `alike` where the weights are those of `draft_model`, whatever vocabulary it speaks.
    """

    name: str
    drafter: Drafter
    reach: float | None
    alike: bool


def run(params: CompatibilityParams, *, progress: Progress = silent) -> RunRecord:
    """Generate every prompt plainly, then with each draft: `draft_model` as it is, `draft`, and the `families`.

    `measurements["trial"]` has a row for each: how its tokens were translated, what was shared before, what that
    predicts, and what was accepted. Raises what `specnb.load`, `read.describe` and `generate` raise; what was generated
    before is saved.
    """
    started, chosen = Neighbours(), prompts_of(params, params.categories)
    names = [name for name in dict.fromkeys((params.draft, *params.families)) if name != params.draft_model]
    speakers = {name: Family(describe(name)) for name in names if not opens(name)}
    settings = {"temperature": params.temperature, "max_new_tokens": params.max_new_tokens, "seed": params.seed}
    total = len(chosen) * (2 + len(names))
    generations: list[Generation] = []
    rows: list[dict[str, Any]] = []
    with ExitStack() as opened:

        def loaded(name: str) -> LanguageModel:
            model = load(name)
            opened.callback(model.close)
            return model

        target, draft = loaded(params.target), loaded(params.draft_model)
        others = {name: loaded(name) for name in names if name not in speakers}

        def recorded(error: BaseException | None = None) -> RunRecord:
            used = models_of(target, [ModelDrafter(model) for model in (draft, *others.values())])
            return record_of(
                EXPERIMENT, params, chosen, target, used, started, generations, {"trial": rows}, error=error
            )

        def generated(name: str, **drafting: Any) -> list[Generation]:
            for prompt in chosen:
                progress(len(generations), total, f"{prompt.id}, {name}")
                generations.append(generate(target, prompt, **settings, **drafting))
            return generations[-len(chosen) :]

        with saving_failures(generations, recorded):
            plain, quality = generated("plainly"), None
            for tried in _candidates(target, draft, names, others, speakers):
                drafted = generated(tried.name, drafter=tried.drafter, k=params.k)
                if tried.name == UNCHANGED and _in_target_tokens(tried.drafter):  # so it tells how good this draft is
                    quality = predict.chance_of(drafted)
                # of other weights nothing is known before
                rows.append(_row(tried, quality if tried.alike else None, params.k, drafted, plain))
            return recorded()


def _candidates(
    target: LanguageModel,
    draft: LanguageModel,
    names: Sequence[str],
    others: Mapping[str, LanguageModel],
    speakers: Mapping[str, Family],
) -> Iterator[Candidate]:
    yield _candidate(UNCHANGED, fitted(draft, target), alike=True)
    for name in names:
        if name in others:
            yield _candidate(name, fitted(others[name], target), alike=False)
        else:
            spoken = speaking(draft, speakers[name])
            yield _candidate(name, fitted(spoken, target), spoken.translation.overlap.draft_uses, alike=True)


def _candidate(name: str, drafter: Drafter, spoken: float | None = 1.0, *, alike: bool) -> Candidate:
    """`spoken` is the share of its own tokens that a draft model has where it speaks another vocabulary.

    What it lacks there it cannot write as a string either. Where tokens are shared, it and what the target lacks are
    the same pieces.
    """
    translation = getattr(drafter, "translation", None)
    if translation is None:
        return Candidate(name, drafter, 1.0, alike)
    reach = spoken if translation.way is Way.STRINGS else translation.overlap.target_uses
    return Candidate(name, drafter, reach, alike)


def _in_target_tokens(drafter: Drafter) -> bool:
    """Whether a drafter writes the target's own tokens, none of them translated."""
    translation = getattr(drafter, "translation", None)
    return translation is None or translation.way is Way.SLICING


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
