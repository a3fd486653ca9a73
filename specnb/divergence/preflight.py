"""What takes seconds and explains most zero acceptances, before any tensor is traced.

Each check says what it saw, also where all is well, and `skipped` with the reason where it had nothing to look at. A
file that cannot be read fails its own check, and no other.
"""

from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

from specnb.divergence.checks import config, weights
from specnb.divergence.checks import drafter as drafting
from specnb.divergence.checks.config import Finding
from specnb.draft.base import Drafter, model_of
from specnb.draft.model import ModelDrafter
from specnb.errors import InputError, SpecnbError
from specnb.lm.base import LanguageModel
from specnb.lm.preflight import probe_ids
from specnb.measure import curve as training_curve
from specnb.measure.curve import Curve

GENERATION = "generation_config.json"
PROMPT = 8
"""Tokens that the drafter's checks feed."""
NO_FOLDER, NO_NETWORK = "no folder of the draft was given", "no opened torch model of it was given"
Check = tuple[str, str, Callable[[], Finding]]
"""Its name, why it cannot be made ("" where it can), and what makes it."""


def preflight(
    draft: Drafter | LanguageModel | None = None,
    target: LanguageModel | None = None,
    *,
    draft_folder: Path | None = None,
    target_folder: Path | None = None,
    training: Path | None = None,
    k: int = 4,
) -> list[Finding]:
    """All checks that what is given allows, in seconds; `checks.config.table` ranks them.

    Folders are those of transformers models (config.json, generation_config.json, safetensors): they are compared with
    the opened models, and with each other. `training` is the checkpoint that a training log came with. The models'
    states are empty afterwards. What a check finds wrong is a Finding.
    """
    if k < 1:
        raise InputError(f"k is {k}: drafts of at least 1 token are checked")
    drafter = ModelDrafter(draft) if isinstance(draft, LanguageModel) else draft
    model = model_of(drafter) if drafter else None
    networks = [getattr(model_or_none, "network", None) for model_or_none in (model, target)]
    checks = [
        _guarded(name, check) if not lack else Finding(name, "skipped", lack)
        for name, lack, check in (
            *_of_files(*networks, draft_folder, target_folder),
            *_of_drafter(drafter, model, target, k),
            ("learning rate", "", lambda: learning_rate(training_curve.read(training) if training else None)),
        )
    ]
    for model_or_none in (model, target):
        if model_or_none is not None:
            model_or_none.reset()
    return checks


def learning_rate(curve: Curve | None) -> Finding:
    """Whether a draft was trained to the end: a rate that died while the loss still fell wasted the steps behind it."""
    check = "learning rate"
    if curve is None:
        return Finding(check, "skipped", "there is no training log")
    verdict = ("fail" if curve.falling else "warn") if curve.dead else "ok"
    remedy = "train again with a schedule that is as long as the run, and a last rate above zero"
    return Finding(check, verdict, str(curve), remedy if curve.dead else "")


def _guarded(name: str, check: Callable[[], Finding]) -> Finding:
    """What cannot be read, or breaks down, is a finding of this check: the others are still made."""
    try:
        return check()
    except SpecnbError as error:
        return Finding(name, "fail", str(error), "see the message")
    except Exception as error:  # a drafter or a model that is under suspicion may raise anything
        return Finding(name, "fail", f"{type(error).__name__}: {error}", "mend what raises this first")


def _of_files(draft: Any, target: Any, draft_folder: Path | None, its: Path | None) -> Iterator[Check]:
    """The checks of weights and configs; `draft` and `target` are torch modules, or None."""

    @cache
    def stored() -> dict[str, weights.Stored]:
        return weights.headers(draft_folder) if draft_folder else {}

    def both(name: str) -> list[config.Config | None]:
        return [config.read_config(folder, name) if folder else None for folder in (draft_folder, its)]

    def quantised() -> Finding:
        opened = None if draft is None else weights.opened_quantisation(draft)
        return config.quantisation(*both("config.json"), {n: t.dtype for n, t in stored().items()}, opened)

    no_folder, no_network = "" if draft_folder else NO_FOLDER, NO_NETWORK if draft is None else ""
    no_two = "it needs both opened torch models, and the draft's folder"
    yield "load report", no_folder or no_network, lambda: weights.load_report(stored(), draft)
    yield "tied head", no_network, lambda: weights.tied_head(draft, stored())
    yield (
        "shared head",
        no_two if no_folder or no_network or target is None else "",
        lambda: weights.shared_head(draft, target, stored()),
    )
    yield "d2t", no_folder, lambda: weights.token_map(draft_folder, stored())
    yield "rope", "", lambda: config.rope(*both("config.json"))
    yield "quantisation", "", quantised
    no_two = "" if draft_folder and its else "it needs the folders of draft and target"
    yield "sampling defaults", no_two, lambda: config.sampling_defaults(*both(GENERATION))


def _of_drafter(
    drafter: Drafter | None, model: LanguageModel | None, target: LanguageModel | None, k: int
) -> Iterator[Check]:
    """The checks of drafting, and of the caches of the draft `model` and the target."""
    size = min(
        (model_or_none.vocab.size for model_or_none in (model, target) if model_or_none is not None), default=PROMPT
    )
    ids = tuple(probe_ids(size, PROMPT))
    no_drafter = "" if drafter else "no drafter was given"
    yield "purity", no_drafter, lambda: drafting.purity(drafter, ids, k)
    yield "recurrence", no_drafter, lambda: drafting.recurrence(drafter, ids, k)
    for whose, model_or_none in (("draft", model), ("target", target)):
        name, lack = f"cache after rejection ({whose})", "no opened model was given" if model_or_none is None else ""
        yield name, lack, partial(drafting.cache_after_rejection, model_or_none, ids, k, check=name)
