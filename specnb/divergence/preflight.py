"""What takes seconds and explains most zero acceptances, before any tensor is traced.

Each check says what it saw, also where all is well, and `skipped` with the reason where it had nothing to look at. A
file that cannot be read fails its own check, and no other.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from specnb.divergence.checks import config, weights
from specnb.divergence.checks import drafter as drafting
from specnb.divergence.checks.config import Finding, table
from specnb.draft.base import Drafter, model_of
from specnb.draft.model import ModelDrafter
from specnb.errors import InputError, SpecnbError
from specnb.lm.base import LanguageModel
from specnb.lm.preflight import probe_ids
from specnb.measure import curve as training_curve
from specnb.measure.curve import Curve

__all__ = ["Finding", "learning_rate", "preflight", "table"]

GENERATION = "generation_config.json"
PROMPT = 8
"""Tokens that the drafter's checks feed, where none are given."""
Check = tuple[str, Callable[[], Finding]]


def preflight(
    draft: Drafter | LanguageModel | None = None,
    target: LanguageModel | None = None,
    *,
    draft_folder: Path | str | None = None,
    target_folder: Path | str | None = None,
    curve: Curve | Path | None = None,
    prompt_ids: Sequence[int] | None = None,
    k: int = 4,
) -> list[Finding]:
    """All checks that what is given allows, in seconds; `table` ranks them.

    `draft` is a drafter or the draft model itself; folders are those of transformers models (config.json,
    generation_config.json, safetensors): they are compared with the opened models, and with each other. `curve` is a
    training log, or the checkpoint that it came with. The models' states are empty afterwards. Raises InputError for
    arguments that fit no check; what a check finds wrong is a Finding.
    """
    if k < 1:
        raise InputError(f"k is {k}: drafts of at least 1 token are checked")
    drafter = ModelDrafter(draft) if isinstance(draft, LanguageModel) else draft
    ids = _prompt(drafter, target, prompt_ids)
    found = [
        _guarded(name, check)
        for name, check in (
            *_of_files(_network(model_of(drafter) if drafter else None), _network(target), draft_folder, target_folder),
            *_of_drafter(drafter, target, ids, k),
            ("learning rate", partial(learning_rate, curve)),
        )
    ]
    for model in (model_of(drafter) if drafter else None, target):
        if model is not None:
            model.reset()
    return found


def learning_rate(curve: Curve | Path | None) -> Finding:
    """Whether a draft was trained to the end: a rate that died while the loss still fell wasted the steps behind it."""
    check = "learning rate"
    found = training_curve.read(Path(curve)) if isinstance(curve, Path | str) else curve
    if found is None:
        return Finding(check, "skipped", "there is no training log")
    verdict = ("fail" if found.falling else "warn") if found.dead else "ok"
    remedy = "train again with a schedule that is as long as the run, and a last rate above zero"
    return Finding(check, verdict, str(found), remedy if found.dead else "")


def _guarded(name: str, check: Callable[[], Finding]) -> Finding:
    """What cannot be read, or breaks down, is a finding of this check: the others are still made."""
    try:
        return check()
    except SpecnbError as error:
        return Finding(name, "fail", str(error), "see the message")
    except Exception as error:  # a drafter or a model that is under suspicion may raise anything
        return Finding(name, "fail", f"{type(error).__name__}: {error}", "mend what raises this first")


def _of_files(
    draft: Any, target: Any, draft_folder: Path | str | None, target_folder: Path | str | None
) -> Iterator[Check]:
    """The checks of weights and configs; `draft` and `target` are torch modules, or None."""
    own, its = (None if folder is None else Path(folder) for folder in (draft_folder, target_folder))

    def stored() -> dict[str, weights.Stored]:
        return weights.headers(own) if own else {}

    def read(folder: Path | None, name: str = "config.json") -> Any:
        return config.read_config(folder, name) if folder else None

    def quantised() -> Finding:
        opened = weights.opened_quantisation(draft) if draft is not None else None
        return config.quantisation(read(own), read(its), {n: t.dtype for n, t in stored().items()}, opened)

    no_files, no_model = "no folder of the draft was given", "no opened torch model of it was given"
    yield "load report", lambda: (
        weights.load_report(stored(), draft) if own and draft is not None
        else Finding("load report", "skipped", no_model if own else no_files)
    )  # fmt: skip
    yield "tied head", lambda: (
        weights.tied_head(draft, stored() if own else None) if draft is not None
        else Finding("tied head", "skipped", no_model)
    )  # fmt: skip
    yield "shared head", lambda: (
        weights.shared_head(draft, target, stored()) if own and draft is not None and target is not None
        else Finding("shared head", "skipped", "it needs both opened torch models, and the draft's folder")
    )  # fmt: skip
    yield "d2t", lambda: weights.token_map(own, stored()) if own else Finding("d2t", "skipped", no_files)
    yield "rope", lambda: config.rope(read(own), read(its))
    yield "quantisation", quantised
    yield "sampling defaults", lambda: (
        config.sampling_defaults(read(own, GENERATION), read(its, GENERATION)) if own and its
        else Finding("sampling defaults", "skipped", "it needs the folders of draft and target")
    )  # fmt: skip


def _of_drafter(drafter: Drafter | None, target: LanguageModel | None, ids: Sequence[int], k: int) -> Iterator[Check]:
    for name, check in (("purity", drafting.purity), ("recurrence", drafting.recurrence)):
        yield name, (
            partial(check, drafter, ids, k) if drafter
            else partial(Finding, name, "skipped", "no drafter was given")
        )  # fmt: skip
    model = model_of(drafter) if drafter else None
    for whose, one in (("draft", model), ("target", target)):
        name = f"cache after rejection ({whose})"
        yield name, (
            (lambda one=one, name=name: drafting.cache_after_rejection(one, ids, k)._replace(check=name))
            if one is not None else partial(Finding, name, "skipped", "no opened model was given")
        )  # fmt: skip


def _network(model: LanguageModel | None) -> Any:
    """The torch module behind a model; None for other engines."""
    return getattr(model, "network", None)


def _prompt(drafter: Drafter | None, target: LanguageModel | None, given: Sequence[int] | None) -> tuple[int, ...]:
    """Tokens to draft behind: those given, else some that every vocabulary has, as far as the context allows."""
    if given is not None:
        if not given:
            raise InputError("prompt_ids is empty: give at least one token id, or none at all")
        return tuple(given)
    models = [one for one in (model_of(drafter) if drafter else None, target) if one is not None]
    size = min((one.vocab.size for one in models), default=PROMPT)
    return tuple(probe_ids(size, PROMPT))
