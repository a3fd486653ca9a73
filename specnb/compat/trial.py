"""What a verdict is worth: a draft run with its target, and one draft model behind several vocabularies for comparison.

The measurement behind notebook 03. Overlap, and what it predicts (`check.predict`), can be known before; acceptance is
what comes of it.
"""

from collections.abc import Iterable
from typing import Any

from specnb.compat.check import predict, reach_of
from specnb.compat.description import Description
from specnb.compat.models import opens
from specnb.compat.read import describe
from specnb.draft.model import ModelDrafter
from specnb.draft.token_map import Translation
from specnb.draft.translate import TokenIntersection, fit_drafter
from specnb.errors import InputError
from specnb.lm.base import LanguageModel
from specnb.lm.load import load
from specnb.measure.cost import Cost, verify_costs
from specnb.measure.experiment import Experiment, Progress, prompts_of, silent
from specnb.params import CompatibilityParams
from specnb.records import Generation, RunRecord, pool_rounds

EXPERIMENT = "03_compatibility"
UNCHANGED = "its own"
"""Name of the vocabulary that the draft model itself has."""


def with_vocabulary(model: LanguageModel, family: Description) -> TokenIntersection:
    """Return `model` behind the vocabulary of a family whose weights are not at hand; closing it closes `model`.

    Its rows are those over the pieces that both have, so a model of known quality drafts with what the family can say.
    It is a bound: a model of that family cuts its texts in the family's way, and thinks in other pieces. Raises
    VocabularyMismatch when not one piece is shared.
    """
    spoken = TokenIntersection(model, family)
    spoken.name = f"{model.name} as {family.name}"
    return spoken


def run_trial(params: CompatibilityParams, *, progress: Progress = silent) -> RunRecord:
    """Generate every prompt plainly, then with each draft: `draft_model` as it is, `draft`, and the `families`.

    `measurements["trial"]` has a row for each: how its tokens were translated, what was shared before, what that
    predicts, what was accepted, and `rate_needed`, the accepted share from which on drafts pay here. `in_reach` is the
    share of the tokens that were generated in the end which could be drafted: no draft could make `tau` larger than
    `tau_bound`, which follows from it. `same_text` is None above temperature 0. Raises what
    `specnb.load`, `read.describe` and `generate` raise; what was generated before is saved.
    """
    study = Experiment(EXPERIMENT, params, prompts_of(params, params.categories))
    generations, rows = study.generations, []
    study.measured["trial"] = rows
    names = [name for name in dict.fromkeys((params.draft, *params.families)) if name != params.draft_model]
    families = {name: describe(name) for name in names if not opens(name)}
    if absent := [name for name, family in families.items() if family.vocab is None]:
        raise InputError(f"the pieces of {absent[0]} are not at hand: take a name of data/vocab, or a file")
    total = len(study.chosen) * (2 + len(names))

    def generate_all(name: str, **drafting: Any) -> list[Generation]:
        for prompt in study.chosen:
            progress(len(generations), total, f"{prompt.id}, {name}")
            generations.append(study.decode(prompt, temperature=params.temperature, **drafting))
        return generations[-len(study.chosen) :]

    with study:
        target = study.target = study.opened(load(params.target))
        with_weights = [params.draft_model, *(name for name in names if name not in families)]
        models = {name: study.opened(load(name)) for name in with_weights}
        study.drafters = list(map(ModelDrafter, models.values()))
        curve, c = verify_costs(target, study.drafters, params.k, quick=True)
        draft = models.pop(params.draft_model)
        plain, quality = generate_all("plainly"), None
        for name in (UNCHANGED, *names):
            model = with_vocabulary(draft, families[name]) if name in families else models.get(name, draft)
            drafter = fit_drafter(model, target)
            drafted, fit = generate_all(name, drafter=drafter, k=params.k), drafter.translation
            if name == UNCHANGED and (fit is None or fit.way is Translation.SLICING):
                quality = chance_of(drafted)  # in the target's own tokens it tells how good this draft is
            reach = reach_of(fit) if fit else 1.0
            predictable = None not in (quality, reach) and name not in models  # of other weights nothing is known
            expected = predict(reach, params.k, quality) if predictable else None
            needed = Cost(curve, c[models.get(name, draft).name]).rate_needed(params.k)
            tokens = [token for g in drafted for token in g.token_ids]
            can_draft = getattr(drafter.model, "can_draft", None)
            in_reach = sum(map(can_draft, tokens)) / len(tokens) if can_draft else 1.0
            same_text = all(g.token_ids == p.token_ids for g, p in zip(drafted, plain, strict=True))
            rows.append({
                "vocabulary": name,
                "text_shared": reach,
                "translated": str(fit.way) if fit else "not needed",
                "pieces_shared": fit.overlap.of_target if fit else 1.0,
                "predicted_rate": expected and expected.acceptance_rate,
                "predicted_tau": expected and expected.tau,
                **pool_rounds(drafted),
                "in_reach": in_reach,
                "tau_bound": bound(in_reach, params.k),
                "same_text": None if params.temperature else same_text,
                "rate_needed": needed,
            })  # fmt: skip
        return study.record()


def bound(reach: float, k: int) -> float:
    """The most tokens that a target call can commit on average, where a share `reach` of the text can be drafted.

    A token out of reach is never an accepted draft, so each takes a target call of its own.
    """
    return k + 1.0 if reach * (k + 1) >= k else 1 / (1 - reach)


def chance_of(generations: Iterable[Generation]) -> float | None:
    """The chance that a draft was kept given that those before it were, over all rounds; None without a draft.

    Drafts behind the first wrong one of a round were not judged, and do not count; in a tree a position counts once.
    """
    rounds = [r for generation in generations for r in generation.rounds]
    judged = sum(r.n_tested for r in rounds)
    return sum(r.n_accepted for r in rounds) / judged if judged else None
