"""One prompt, speculatively and plainly, side by side: what `specnb generate` prints."""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from specnb.decode.generate import PromptLike, generate
from specnb.draft.load import load_drafter
from specnb.errors import InputError
from specnb.lm.base import LanguageModel
from specnb.lm.load import load, room_for_both
from specnb.measure.fork import Fork, explain_fork
from specnb.records import Generation, Summary

WARM_UP_TOKENS = 4
HEADS = "medusa"


class PairSummary(Summary):
    """The generation's summary, and how it compares with the baseline (None without one).

    `speedup` is the ratio of the tokens_per_s of one run each: for a measurement with an interval run a sweep.
    `fork` is given when greedy tokens differ: where, by how much, and whether it is a near-tie.
    """

    speedup: float | None = None
    identical: bool | None = Field(default=None, description="tokens equal the baseline's")
    fork: Fork | None = None
    notes: tuple[str, ...] = Field(default=(), description="of heads: what is doubtful, and which tree was chosen")


class Pair(BaseModel):
    """A generation, its baseline if one was asked for, and the comparison."""

    model_config = ConfigDict(frozen=True)

    generation: Generation
    baseline: Generation | None = None
    summary: PairSummary
    vocab_size: int = Field(exclude=True, description="of the target; no part of the document")


def run_pair(
    target_name: str,
    drafter_name: str | None,
    prompt: PromptLike,
    *,
    with_baseline: bool = False,
    strict: bool = False,
    translate: str = "auto",
    heads_checkpoint: str | None = None,
    tree: str | None = None,
    **settings: Any,
) -> Pair:
    """Load the models, generate (warm-up of 4 tokens first, uncounted), and compare with plain decoding.

    `translate` is that of `load_drafter`; `settings` are those of `specnb.generate`. `heads_checkpoint` and `tree` are
    for trained heads (`medusa.drafter`); a tree that is "auto", or not given, is chosen by what is measured first.
    Raises what that and `specnb.load` raise.
    """
    options = {"heads_checkpoint": heads_checkpoint, "tree": tree}
    options = {name: value for name, value in options.items() if value is not None}
    if options and drafter_name != HEADS:
        given = " and ".join("--" + name.replace("_", "-") for name in options)
        raise InputError(f"{given}: for trained heads; add --drafter {HEADS} (got {drafter_name or 'no drafter'})")
    if drafter_name == HEADS:
        options.setdefault("tree", "auto")
    drafter_name, fallback = room_for_both(target_name, drafter_name, strict=strict)
    target = load(target_name)
    drafter = None
    try:
        if drafter_name:
            drafter, fallback = load_drafter(drafter_name, target, strict=strict, translate=translate, **options)
        notes = getattr(drafter, "findings", ())
        for warm in (drafter, None) if with_baseline else (drafter,):
            generate(target, prompt, drafter=warm, **(settings | {"max_new_tokens": WARM_UP_TOKENS}))
        baseline = generate(target, prompt, **settings) if with_baseline else None
        generation = generate(target, prompt, drafter=drafter, **settings)
        generation = generation.model_copy(update={"fallback": fallback})
        summary = _summary(target, generation, baseline, settings).model_copy(update={"notes": notes})
        return Pair(generation=generation, baseline=baseline, summary=summary, vocab_size=target.vocab.size)
    finally:
        if drafter is not None:
            drafter.close()
        target.close()


def _summary(
    target: LanguageModel, generation: Generation, baseline: Generation | None, settings: Mapping[str, Any]
) -> PairSummary:
    if baseline is None:
        return PairSummary(**generation.summary().model_dump())
    plain = baseline.tokens_per_s
    identical = generation.token_ids == baseline.token_ids
    fork = None
    if not identical and generation.temperature == 0:
        fork = explain_fork(
            target, generation.prompt_ids, baseline.token_ids, generation.token_ids, width=generation.k + 1
        )
    return PairSummary(
        **generation.summary(1 / plain if plain else None).model_dump(),
        speedup=generation.tokens_per_s / plain if plain and generation.tokens_per_s else None,
        identical=identical,
        fork=fork,
    )
