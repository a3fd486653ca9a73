"""Decode one prompt speculatively and plainly, and compare speeds and texts."""

from collections.abc import Callable, Mapping, Sequence
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
from specnb.measure.auto import measure_cost, route_between
from specnb.measure.baseline import Baseline, time_baseline
from specnb.measure.cost import crosses_engines
from specnb.measure.experiment import Progress, silent
from specnb.measure.fork import TextFork, fork_of
from specnb.measure.policies import CONTROLLERS, MOST
from specnb.records import REPEAT, Generation, Summary

WARM_UP_TOKENS = 4
FEWEST_STEPS = 5
"""Smallest number of single steps whose median is T(1), if no baseline was timed."""
TRAINED = (HEADS, "hydra", "jump", "eagle")
"""Trained drafters, which propose chains or trees."""
OPTIONS = {
    "heads_checkpoint": (HEADS, "jump"),
    "tree": TRAINED,
    "arms": ("auto",),
}
"""The drafters that accept each option."""


def share_options(
    drafters: Sequence[str | None], options: Mapping[str, Any]
) -> dict[str | None, dict[str, Any]]:
    """Return the options that each drafter accepts. Raises InputError for one that none accepts."""
    for name in options:
        require_known("option of a drafter", name, OPTIONS)
        if set(OPTIONS[name]).isdisjoint(drafters):
            raise InputError(
                f"{name} is an option of the drafter {' or '.join(OPTIONS[name])}, "
                f"got {', '.join(filter(None, drafters)) or 'no drafter'}"
            )
    return {
        drafter: {name: value for name, value in options.items() if drafter in OPTIONS[name]}
        for drafter in drafters
    }


class PairSummary(Baseline, Summary):
    """The summary of a generation, and its comparison with plain decoding (None without it).

    `estimated_speedup` is computed from single steps during or after the run.
    `speedup` is over plain decoding in the same engine, one run each (use a sweep for an interval);
    `over_fastest` is over the fastest plain decoding of the same weights. `fork` is set if greedy
    tokens differ.
    """

    speedup: float | None = None
    over_fastest: float | None = None
    identical: bool | None = None  # tokens equal the baseline's
    fork: TextFork | None = None
    busy: bool | None = None  # other processes disturbed the run and its speeds
    notes: tuple[str, ...] = ()  # caveats, such as fewer draft tokens than requested


class PairRun(BaseModel, frozen=True):
    """A generation, its baseline if requested, and the comparison."""

    generation: Generation
    baseline: Generation | None = None
    summary: PairSummary
    vocab_size: int = Field(exclude=True)  # the target's; not part of the document

    @property
    def conclusion(self) -> str:
        """The speedup in one sentence, over the baseline if that was measured; "" if unknown."""
        summary = self.summary
        drafted = self.generation.total_draft_tokens
        if not (speed := summary.over_fastest or summary.estimated_speedup):
            return ""
        over = "plain decoding in the same engine, estimated from single steps"
        if summary.over_fastest:
            over = f"the fastest plain decoding ({summary.baseline_engine}), measured on this text"
        accepted = ""
        if drafted:
            accepted = f"; {summary.accepted_tokens} of {drafted} draft tokens were accepted"
        busy = (
            " The machine was busy: measure again before you use this number."
            if summary.busy
            else ""
        )
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
    """Load the models, generate after a warm-up, and compare with plain decoding.

    Args:
        target_name: a model name, as for `specnb.load`.
        drafter_name: a draft model, a name of `registry.DRAFTERS`, or None for plain decoding.
        prompt: text, token ids, messages or a `Prompt`.
        with_baseline: whether to decode plainly as well.
        strict: whether to raise errors of the drafter instead of decoding plainly.
        controller: name of one of CONTROLLERS, which chooses at most `k` draft tokens. Without
            `controller` and `k`, a router chooses K by costs that are measured first.
        on_text: called with the pieces of a `TextStream`, unless there are stop strings, which may
            remove text.
        settings: settings of `specnb.generate`, and options of drafters (OPTIONS).

    Raises InputError for invalid settings before a model is loaded.
    """
    options = _take_options(drafter_name, controller, settings)
    k = settings.get("k")
    most = MOST if k is None else k
    _, limits, _ = checked_settings(**settings)
    if controller is not None:
        require_known("controller", controller, CONTROLLERS)
        if drafter_name is None:
            raise InputError(f"--controller {controller} needs a drafter: add one")
    for name in filter(None, (target_name, drafter_name)):  # before progress is reported
        check_drafter(name, target_name, **options)
    progress(0, 3, f"loading {target_name}, {drafter_name or 'no drafter'}")
    with (
        open_pair(target_name, drafter_name, strict=strict, **options) as (
            target,
            drafter,
            fallback,
        ),
        steady_threads(target, drafter and drafter.model),
    ):
        # 1. Choose K: fixed, by a controller, or by a router.
        progress(1, 3, "measuring the costs of drafting")
        cost = (
            measure_cost(target, drafter, most) if controller == "cost-aware" and drafter else None
        )
        drafting = settings | {"strict": strict}
        if controller and drafter:
            drafting["k"] = CONTROLLERS[controller](cost, most)
        elif (
            drafter
            and k is None
            and not (drafter.target or drafter.tree_nodes or drafter.chooses_k)
        ):
            drafter = route_between(target, [drafter])
        # 2. Warm up.
        warm_up = {"max_new_tokens": WARM_UP_TOKENS}
        generate(target, prompt, drafter=drafter, **drafting | warm_up)
        if with_baseline:
            generate(target, prompt, **settings | warm_up)
        # 3. Decode plainly, then with the drafter.
        neighbours = Neighbours()
        progress(2, 3, "measuring plain decoding" if with_baseline else "generating")
        baseline = generate(target, prompt, **settings) if with_baseline else None
        show = _shown_rounds(target, on_text) if on_text and not limits.stop_strings else None
        generation = generate(target, prompt, drafter=drafter, on_round=show, **drafting)
        busy = neighbours.during(target.caps, filter(None, (baseline, generation))).busy
        generation = generation.model_copy(update={"fallback": fallback or generation.fallback})
        # 4. Compare.
        plain = baseline and baseline.tokens_per_s
        step_s = 1 / plain if plain else _step_s(target, generation)
        compared = _compare(target, baseline, generation) if baseline else {}
        fork = compared.get("fork")
        notes = _notes(target, drafter, generation, k=None if controller else k, fork=fork)
        fields = generation.summary(step_s).model_dump() | compared
        summary = PairSummary(**fields, notes=notes, busy=busy)
        return PairRun(
            generation=generation, baseline=baseline, summary=summary, vocab_size=target.vocab.size
        )


def _take_options(
    drafter: str | None, controller: str | None, settings: dict[str, Any]
) -> dict[str, Any]:
    """Remove `drafter`'s options from `settings` and return them. Raises InputError for others."""
    given = {name: value for name in OPTIONS if (value := settings.pop(name, None)) is not None}
    options = share_options([drafter], given)[drafter]
    if drafter in TRAINED:
        options = {"tree": "chain" if controller else "auto"} | options
    return options


def _shown_rounds(target: LanguageModel, on_text: Callable[[str, bool], object]) -> Callable:
    """Return a callback that passes the text pieces of each round to `on_text`."""
    stream = TextStream(target.vocab)

    def show(newest):
        for piece in stream.pieces(newest):
            on_text(*piece)

    return show


def _notes(
    target: LanguageModel,
    drafter: Drafter | None,
    generation: Generation,
    *,
    k: int | None,
    fork: TextFork | None,
) -> list[str]:
    """Return the caveats of a run; `k` is the requested draft length, if any."""
    notes = []
    longest = max((r.k for r in generation.rounds), default=0)
    if drafter and crosses_engines(target, drafter):
        notes.append(
            f"{drafter.name} runs in another engine than its target: c compares engines, too."
        )
    if drafter:
        notes += drafter.findings
    if generation.fallback:
        notes.append(f"Drafting was off or ended early: {generation.fallback}")
    if fork:
        notes += [str(fork), target.caps.certificate]
    if (
        drafter
        and not longest
        and k != 0
        and not generation.fallback
        and len(generation.token_ids) > 2
    ):
        notes.append(_explain_no_drafts(drafter))
    if longest and generation.loops:
        notes.append(
            f"The text repeats itself ({100 * generation.repeated_share:.0f} % of its sequences of "
            f"{REPEAT} tokens occurred before), so more draft tokens are accepted than elsewhere."
        )
    return notes


def _compare(target: LanguageModel, baseline: Generation, generation: Generation) -> dict[str, Any]:
    """Return the fields of a summary that need a baseline: `identical`, `fork`, both speedups."""
    fields = {"identical": generation.token_ids == baseline.token_ids}
    if not generation.temperature:
        fields["fork"] = fork_of(target, baseline, generation)
    speed = generation.tokens_per_s
    plain = baseline.tokens_per_s
    if speed and plain:
        fastest = time_baseline(target, [generation.prompt_ids] * 2)
        speedup = speed / plain
        fields |= fastest.model_dump() | {
            "speedup": speedup,
            "over_fastest": speedup * fastest.share,
        }
    return fields


def _step_s(target: LanguageModel, generation: Generation) -> float | None:
    """Return T(1) of a drafted generation: the median of its plain rounds and of later steps."""
    steps = [r.verify_s + r.other_s for r in generation.rounds if r.width == 1 and not r.k]
    while generation.drafter and len(steps) < FEWEST_STEPS and target.n_past < target.caps.n_ctx:
        start_s = perf_counter()
        target.forward(generation.token_ids[-1:] or generation.prompt_ids[-1:])
        steps.append(perf_counter() - start_s)
    return median(steps) if generation.drafter and steps else None


def _explain_no_drafts(drafter: Drafter) -> str:
    """Return the reason why no tokens were drafted."""
    drafters = [drafter]
    if isinstance(drafter, Router):
        drafters = [arm.drafter for arm in drafter.arms]
    if any(d.model or d.target for d in drafters):
        return "No tokens were drafted: on this machine drafting costs more than it can save."
    return f"No tokens were drafted: {drafter.name} found nothing to copy in this text."
