"""One prompt, decoded speculatively and plainly: the speeds, and a comparison of the texts."""

from collections.abc import Callable, Mapping
from statistics import median
from time import perf_counter
from typing import Any

from pydantic import BaseModel, Field

from specnb.decode.generate import PromptLike, TextStream, checked_settings, generate
from specnb.decode.router import Router
from specnb.draft.base import Drafter
from specnb.draft.load import HEADS, check_drafter, open_pair
from specnb.errors import InputError, require_known
from specnb.lm.base import LanguageModel
from specnb.machine import Neighbours, steady_threads
from specnb.measure.auto import judge_drafts, measure_cost, route_between
from specnb.measure.baseline import Baseline, time_baseline
from specnb.measure.cost import crosses_engines
from specnb.measure.experiment import Progress, silent
from specnb.measure.fork import TextFork, fork_of
from specnb.measure.policies import CONTROLLERS, MOST
from specnb.records import REPEAT, Generation, Summary

WARM_UP_TOKENS = 4
FEWEST_STEPS = 5
"""Single steps whose median is T(1), where no baseline was timed."""
TRAINED = (HEADS, "hydra", "redrafter", "jump", "eagle")
"""Trained drafters: chains, or trees."""
OPTIONS = {"heads_checkpoint": (HEADS, "jump"), "tree": TRAINED, "self_type": ("self",), "arms": ("auto",)}
"""Which drafters an option is for."""


def options_for(drafter: str | None, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of OPTIONS that this drafter takes."""
    return {name: value for name, value in options.items() if drafter in OPTIONS[name]}


class PairSummary(Baseline, Summary):
    """The generation's summary, and its comparison with the baseline (None without one).

    `estimated_speedup` is computed from single steps of the same run, or timed after it. `speedup_same_engine` is the
    ratio of one run each (for an interval run a sweep), `speedup` is over the fastest plain decoding of the same
    weights. `fork` is given when greedy tokens differ.
    """

    speedup: float | None = None
    speedup_same_engine: float | None = None
    identical: bool | None = None  # tokens equal the baseline's
    fork: TextFork | None = None
    busy: bool | None = None  # other processes disturbed the run, so its speeds are not representative
    alpha: float | None = None  # accepted draft tokens over tested ones
    break_even: float | None = None  # alpha from which drafting pays here, in this engine
    what_paid: str | None = None  # acceptance and costs of each drafter, where drafts are chains
    notes: tuple[str, ...] = ()  # caveats, such as fewer draft tokens than requested


class PairRun(BaseModel, frozen=True):
    """A generation, its baseline if one was asked for, and the comparison."""

    generation: Generation
    baseline: Generation | None = None
    summary: PairSummary
    vocab_size: int = Field(exclude=True)  # of the target; no part of the document

    @property
    def conclusion(self) -> str:
        """The speed in one sentence, over the baseline where it was measured; "" where nothing is known."""
        summary, drafted = self.summary, self.generation.total_draft_tokens
        if not (speed := summary.speedup or summary.estimated_speedup):
            return ""
        over = "plain decoding in the same engine, estimated from single steps"
        if summary.speedup:
            over = f"the fastest plain decoding ({summary.baseline_engine}), measured on this text"
        accepted = f"; {summary.accepted_tokens} of {drafted} draft tokens were accepted" if drafted else ""
        busy = " The machine was busy: measure again before you use this number." if summary.busy else ""
        return f"{speed:.2f} times as fast as {over}{accepted}.{busy}"


def run_pair(
    target_name: str,
    drafter_name: str | None,
    prompt: PromptLike,
    *,
    with_baseline: bool = False,
    strict: bool = False,
    controller: str | None = None,
    on_text: Callable[[str, bool], object] | None = None,
    progress: Progress = silent,
    **settings: Any,
) -> PairRun:
    """Load the models, generate (after a warm-up, uncounted), and compare with plain decoding.

    `settings` are those of `specnb.generate`, and options of drafters (OPTIONS): `heads_checkpoint` of medusa and jump,
    `tree` of all trained drafters, `self_type` of the drafter self. Without `k` and `controller` (of CONTROLLERS, with
    at most `k` draft tokens), a router chooses K by costs that are measured first. `on_text` gets the pieces of a
    `TextStream`, unless there are stop strings, which may cut them off. Wrong settings are refused before a model is
    loaded.
    """
    options = _take_options(drafter_name, controller, settings)
    k = settings.get("k")
    most = MOST if k is None else k
    _, limits, _ = checked_settings(**settings)
    if controller is not None:
        require_known("controller", controller, CONTROLLERS)
        if drafter_name is None:
            raise InputError(f"--controller {controller} chooses the number of drafts: add a drafter")
    for name in filter(None, (target_name, drafter_name)):  # wrong names are refused before progress begins
        check_drafter(name, target_name, **options)
    progress(0, 3, f"loading {target_name}, {drafter_name or 'no drafter'}")
    with (
        open_pair(target_name, drafter_name, strict=strict, **options) as (target, drafter, fallback),
        steady_threads(target, drafter and drafter.model),
    ):
        # 1. what chooses K: the caller, a controller, or a router
        progress(1, 3, "measuring the costs of drafting")
        cost = measure_cost(target, drafter, most) if controller == "cost-aware" and drafter else None
        drafting = settings | {"strict": strict}
        if controller and drafter:
            drafting["k"] = CONTROLLERS[controller](cost, most)
        elif drafter and k is None and not (drafter.target or drafter.tree_nodes or drafter.chooses_k):
            drafter = route_between(target, [drafter])
        # 2. warm-up, uncounted
        warm_up = {"max_new_tokens": WARM_UP_TOKENS}
        generate(target, prompt, drafter=drafter, **drafting | warm_up)
        if with_baseline:
            generate(target, prompt, **settings | warm_up)
        # 3. plain decoding, then the drafter
        neighbours = Neighbours()
        progress(2, 3, "measuring plain decoding" if with_baseline else "generating")
        baseline = generate(target, prompt, **settings) if with_baseline else None
        show = None if limits.stop_strings else _shown_rounds(target, on_text)
        generation = generate(target, prompt, drafter=drafter, on_round=show, **drafting)
        busy = neighbours.during(target.caps, [g for g in (baseline, generation) if g]).busy
        generation = generation.model_copy(update={"fallback": fallback or generation.fallback})
        # 4. comparison
        step_s = 1 / baseline.tokens_per_s if baseline and baseline.tokens_per_s else _step_s(target, generation)
        compared = _compared(target, baseline, generation) if baseline else {}
        notes = _notes(target, drafter, generation, k=None if controller else k, fork=compared.get("fork"))
        if drafter and not (cost or drafter.tree_nodes or drafter.chooses_k):  # after the text, which need not wait
            cost = measure_cost(target, drafter, most)
        judged = judge_drafts(drafter, generation, cost, busy=busy)
        fields = generation.summary(step_s).model_dump() | compared | judged
        summary = PairSummary(**fields, notes=notes, busy=busy)
        return PairRun(generation=generation, baseline=baseline, summary=summary, vocab_size=target.vocab.size)


def _take_options(drafter: str | None, controller: str | None, settings: dict[str, Any]) -> dict[str, Any]:
    """Take the options of drafters out of `settings`. Raises InputError for those of another drafter."""
    options = {name: settings.pop(name, None) for name in OPTIONS}
    options = {name: value for name, value in options.items() if value is not None}
    for name in options:
        if drafter not in OPTIONS[name]:
            drafters = " or ".join(OPTIONS[name])
            raise InputError(f"{name} is an option of --drafter {drafters}, got {drafter or 'no drafter'}")
    if drafter in TRAINED:
        options = {"tree": "chain" if controller else "auto"} | options
    return options


def _shown_rounds(target: LanguageModel, on_text: Callable[[str, bool], object] | None) -> Callable | None:
    """Return what gives the pieces of each round to `on_text`."""
    if on_text is None:
        return None
    stream = TextStream(target.vocab)

    def show(newest):
        for piece in stream.pieces(newest):
            on_text(*piece)

    return show


def _notes(
    target: LanguageModel, drafter: Drafter | None, generation: Generation, *, k: int | None, fork: TextFork | None
) -> list[str]:
    """Return the caveats of a run; `k` is the number of drafts that was asked for."""
    notes, longest = [], max((r.k for r in generation.rounds), default=0)
    if drafter and crosses_engines(target, drafter):
        notes.append(f"{drafter.name} runs in another engine than its target, so c compares the engines, too.")
    if drafter:
        notes += drafter.findings
    if generation.fallback:
        notes.append(f"Drafting was off or ended early: {generation.fallback}")
    if fork:
        notes += [str(fork), target.caps.certificate]
    if drafter and not longest and k != 0 and not generation.fallback and len(generation.token_ids) > 2:
        notes.append(_why_none(drafter))
    elif drafter and k is not None and longest < generation.k:
        notes.append(f"No round drafted more than {longest} tokens; K = {generation.k} was requested.")
    if longest and generation.loops:
        share = f"{100 * generation.repeated_share:.0f} % of its sequences of {REPEAT} tokens occurred before"
        notes.append(f"The text repeats itself ({share}), so more draft tokens are accepted than elsewhere.")
    return notes


def _compared(target: LanguageModel, baseline: Generation, generation: Generation) -> dict[str, Any]:
    """Return the fields of a summary that need a baseline: `identical`, `fork`, and both speed-ups."""
    fields = {"identical": generation.token_ids == baseline.token_ids}
    if not generation.temperature:
        fields["fork"] = fork_of(target, baseline, generation)
    speed, plain = generation.tokens_per_s, baseline.tokens_per_s
    if speed and plain:
        fastest = time_baseline(target, [generation.prompt_ids] * 2)
        fields |= fastest.model_dump()
        fields |= {"speedup": speed / plain * fastest.share, "speedup_same_engine": speed / plain}
    return fields


def _step_s(target: LanguageModel, generation: Generation) -> float | None:
    """Return T(1) of a drafted generation: the median of its rounds without drafts and of single steps after it."""
    steps = [r.verify_s + r.other_s for r in generation.rounds if r.width == 1 and not r.k]
    while generation.drafter and len(steps) < FEWEST_STEPS and target.n_past < target.caps.n_ctx:
        began = perf_counter()
        target.forward(generation.token_ids[-1:] or generation.prompt_ids[-1:])
        steps.append(perf_counter() - began)
    return median(steps) if generation.drafter and steps else None


def _why_none(drafter: Drafter) -> str:
    """Say why a drafter proposed nothing."""
    drafters = [arm.drafter for arm in drafter.arms] if isinstance(drafter, Router) else [drafter]
    if any(d.model or d.target for d in drafters):
        return "No tokens were drafted: on this machine drafting costs more than it can save."
    return "Prompt lookup found nothing to copy in this text."
