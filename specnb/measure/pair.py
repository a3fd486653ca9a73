"""One prompt, decoded speculatively and plainly: the speeds, and why greedy texts diverge, by rounding or by a fault.

A forward pass over n tokens adds in another order than n single steps, so logits differ by rounding (the width noise).
Where the two best tokens are closer than that, either may win. Any other divergence is a fault, and so is noise beyond
the rounding of the model's type: a wrong pass over several tokens must not excuse itself.
"""

from collections.abc import Callable, Iterator, Sequence
from math import isnan
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import BaseModel, Field

from specnb.decode.costaware import break_even
from specnb.decode.generate import PromptLike, TextStream, checked_settings, generate
from specnb.decode.router import Arm, Router
from specnb.draft.base import Drafter
from specnb.draft.load import HEADS, check_drafter, load_drafter, open_pair
from specnb.draft.model import n_common
from specnb.errors import InputError, require_known
from specnb.lm.base import LanguageModel
from specnb.machine import Neighbours, steady_threads
from specnb.measure.baseline import Baseline, time_baseline
from specnb.measure.cost import Cost, crosses_engines, verify_costs
from specnb.measure.experiment import Progress, silent
from specnb.measure.policies import CONTROLLERS, MOST
from specnb.records import REPEAT, Generation, Summary

if TYPE_CHECKING:
    from specnb.measure.replay import ReplayStep

ROUNDING = {True: 1e-3, False: 0.1}
"""Most noise that rounding explains, as a share of a row's range (largest minus median logit): float32, coarser.
Measured on SmolLM2-135M: 1e-5 in float32, up to 0.03 in bfloat16 and with 4-bit weights."""

WARM_UP_TOKENS = 4
FEWEST_STEPS = 5
"""Single steps whose median is T(1), where no baseline was timed."""
TRAINED = (HEADS, "hydra", "jump", "eagle")
"""Trained drafters: chains, or trees."""
OPTIONS = {"heads_checkpoint": (HEADS, "jump"), "tree": TRAINED, "self_type": ("self",), "arms": ("auto",)}
"""Which drafters an option is for."""


class TextFork(BaseModel, frozen=True):
    """The first position where two token sequences differ, and how close the two candidates were there.

    `margin` is the distance of their logits in single steps. `noise` is the largest difference between passes over
    several tokens and single steps in the two best logits of a row up to there, `noise_share` its share of the row's
    range. `near_tie`: margin <= 2 * noise, and the noise is small enough to be rounding.
    """

    position: int
    token_ids: tuple[int, int]
    margin: float
    noise: float
    noise_share: float
    near_tie: bool

    def __str__(self) -> str:
        verdict = "a near-tie and no error" if self.near_tie else "an error"
        return (
            f"The text diverges from plain decoding at token {self.position}: the two best logits differ by "
            f"{self.margin:.2g}, and passes over several tokens move logits by up to {self.noise:.2g} "
            f"({100 * self.noise_share:.2g} % of their range). This is {verdict}."
        )


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


def pop_options(drafter_name: str | None, settings: dict[str, Any]) -> dict[str, Any]:
    """Remove the options of drafters (OPTIONS) from `settings`, and return those that are not None.

    Raises InputError for an option of another drafter.
    """
    options = {name: value for name in OPTIONS if (value := settings.pop(name, None)) is not None}
    for name in options:
        if drafter_name not in OPTIONS[name]:
            drafters = " or ".join(OPTIONS[name])
            got = drafter_name or "no drafter"
            raise InputError(f"{name} is an option of the drafter {drafters}, got {got}")
    return options


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
    options = pop_options(drafter_name, settings)
    if drafter_name in TRAINED:
        options = {"tree": "chain" if controller else "auto"} | options
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
        progress(1, 3, "measuring the costs of drafting")
        cost, drafting, notes = None, settings | {"strict": strict}, []
        if drafter and crosses_engines(target, drafter):
            notes.append(f"{drafter.name} runs in another engine than its target, so c compares the engines, too.")
        if controller:
            cost = _cost(target, drafter, most) if controller == "cost-aware" else None
            drafting |= {"k": CONTROLLERS[controller](cost, most)}
        elif drafter and k is None and not (drafter.target or drafter.tree_nodes or drafter.chooses_k):
            drafter = route_between(target, [drafter])
        generate(target, prompt, drafter=drafter, **(drafting | {"max_new_tokens": WARM_UP_TOKENS}))
        if with_baseline:
            generate(target, prompt, **(settings | {"max_new_tokens": WARM_UP_TOKENS}))
        neighbours = Neighbours()
        progress(2, 3, "measuring plain decoding" if with_baseline else "generating")
        baseline = generate(target, prompt, **settings) if with_baseline else None
        stream = TextStream(target.vocab)
        streamed = on_text and not limits.stop_strings
        show = (lambda newest: [on_text(*piece) for piece in stream.pieces(newest)]) if streamed else None
        generation = generate(target, prompt, drafter=drafter, on_round=show, **drafting)
        busy = neighbours.during(target.caps, [g for g in (baseline, generation) if g]).busy
        fallback = fallback or generation.fallback
        generation = generation.model_copy(update={"fallback": fallback})
        step_s = 1 / baseline.tokens_per_s if baseline and baseline.tokens_per_s else _step_s(target, generation)
        compared = _compared(target, baseline, generation) if baseline else {}
        if drafter:
            notes += drafter.findings
        if fallback:
            notes.append(f"Drafting was off or ended early: {fallback}")
        if fork := compared.get("fork"):
            notes += [str(fork), target.caps.certificate]
        longest = max((r.k for r in generation.rounds), default=0)
        if drafter and not longest and k != 0 and not fallback and len(generation.token_ids) > 2:
            notes.append(_why_none(drafter))
        elif drafter and k is not None and not controller and longest < generation.k:
            notes.append(f"No round drafted more than {longest} tokens; K = {generation.k} was requested.")
        if longest and generation.loops:
            share = f"{100 * generation.repeated_share:.0f} % of its sequences of {REPEAT} tokens occurred before"
            notes.append(f"The text repeats itself ({share}), so more draft tokens are accepted than elsewhere.")
        if drafter and not (cost or drafter.tree_nodes or drafter.chooses_k):  # after the text, which need not wait
            cost = _cost(target, drafter, most)
        fields = generation.summary(step_s).model_dump() | compared | judge_drafts(drafter, generation, cost, busy=busy)
        summary = PairSummary(**fields, notes=notes, busy=busy)
        return PairRun(generation=generation, baseline=baseline, summary=summary, vocab_size=target.vocab.size)


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


def _cost(target: LanguageModel, drafter: Drafter, most: int) -> Cost:
    """Measure the cost of rounds of up to `most` draft tokens, in a second or two."""
    curve, c = verify_costs(target, [drafter], _widest(target, min(most, drafter.n_heads or most)), quick=True)
    return Cost(curve, c[drafter.name])


def _widest(target: LanguageModel, most: int) -> int:
    """Return the longest draft, up to `most`, whose cost can be measured."""
    return max(1, min(most, target.caps.max_width - 1, target.caps.n_ctx // 2 - 1))


def judge_drafts(
    drafter: Drafter | None, generation: Generation, cost: Cost | None, *, busy: bool = False
) -> dict[str, Any]:
    """Return `alpha`, `break_even` and `what_paid` of a summary, for chains whose costs were measured.

    A router knows its costs, of any other drafter `cost` gives them. On a `busy` machine the text has no break-even.
    """
    if isinstance(drafter, Router):
        arms = [(arm.drafter.name, arm.draft_s / drafter.verify_s[1], _needed(drafter, arm)) for arm in drafter.arms]
        rounds = drafter.choices
    elif drafter and cost:
        arms = [(drafter.name, cost.c, cost.break_even(k_max=cost.curve.widths[-1] - 1))]
        rounds = [(drafter.name, r.n_tested, r.n_accepted) for r in generation.rounds]
    else:
        return {}
    accounts = []
    for name, c, needed in arms:
        accepted = sum(n_accepted for arm, _, n_accepted in rounds if arm == name)
        tested = sum(min(n, n_accepted + 1) for arm, n, n_accepted in rounds if arm == name)
        alpha = accepted / tested if tested else None
        did = f"{accepted} of {tested} tested draft tokens were accepted" if tested else "no drafts"
        step = f"one draft step takes {c:.2f} plain decoding steps"
        accounts.append(f"{name}: {did}; {step}; {_say_needed(needed, busy)}.")
    judged = {"what_paid": " ".join(accounts)}
    return judged if len(arms) > 1 else judged | {"alpha": alpha, "break_even": None if isnan(needed) else needed}


def _why_none(drafter: Drafter) -> str:
    """Say why a drafter proposed nothing."""
    drafters = [arm.drafter for arm in drafter.arms] if isinstance(drafter, Router) else [drafter]
    if any(d.model or d.target for d in drafters):
        return "No tokens were drafted: on this machine drafting costs more than it can save."
    return "Prompt lookup found nothing to copy in this text."


def fork_of(target: LanguageModel, plain: Generation, drafted: Generation) -> TextFork | None:
    """The fork of a greedy generation from the plain one of the same prompt; None where one begins with the other."""
    return explain_fork(target, plain.prompt_ids, plain.token_ids, drafted.token_ids, width=drafted.k + 1)


def explain_fork(
    target: LanguageModel, prompt_ids: Sequence[int], a: Sequence[int], b: Sequence[int], *, width: int
) -> TextFork | None:
    """Measure margin and noise at the first fork of two generations after `prompt_ids`; None when there is none.

    Runs the target twice over the common tokens, in single steps and in blocks of `width`. Resets it.
    """
    if (at := n_common(a, b)) == min(len(a), len(b)):
        return None
    watched = [*((token,) for token in a[:at]), (a[at], b[at])]
    rows, moved, ranges = force(target, prompt_ids, watched, width=max(2, width))
    margin, noise, share = abs(float(rows[-1][0] - rows[-1][1])), float(moved.max()), float((moved / ranges).max())
    near_tie = margin <= 2 * noise and share <= ROUNDING[target.caps.lossless_dtype]
    return TextFork(
        position=at, token_ids=(a[at], b[at]), margin=margin, noise=noise, noise_share=share, near_tie=near_tie
    )


def force(
    target: LanguageModel, prompt_ids: Sequence[int], watched: Sequence[tuple[int, ...]], *, width: int,
    other: LanguageModel | None = None,
) -> tuple[list[np.ndarray], np.ndarray, np.ndarray]:  # fmt: skip
    """Feed the first of each of `watched` after a prompt, whatever the target would say: rows, noise and ranges.

    A row holds the logits, in single steps, of its watched tokens and of its two likeliest. Noise `(n,)` is how far
    blocks of `width` tokens (of `other`, where given) move the two likeliest; a row's range is its largest logit less
    its median, `(n,)`. Resets both models.
    """
    ids, likeliest, rows, ranges = [tokens[0] for tokens in watched[:-1]], [], [], []
    for row, tokens in zip(_rows(target, prompt_ids, ids, 1), watched, strict=True):
        likeliest.append(np.argpartition(row, -2)[-2:])
        rows.append(row[[*tokens, *likeliest[-1]]])
        ranges.append(max(1e-9, float(row.max() - np.median(row))))
    blocks = [row[best] for row, best in zip(_rows(other or target, prompt_ids, ids, width), likeliest, strict=True)]
    return rows, np.abs(np.array([row[-2:] for row in rows]) - blocks).max(axis=1), np.array(ranges)


def explain_draft(model: LanguageModel, live: Generation, replayed: "Sequence[ReplayStep]") -> TextFork | None:
    """The first token that `model` drafted otherwise live than in a replay, if there is one.

    Live it feeds two tokens at once after a fully accepted round, a replay feeds one; weights of few bits round these
    differently. None also where only the number of drafts differs: then a rule stopped elsewhere. Rounds are chains.
    """
    common = ()
    for live_round, step in zip(live.rounds, replayed, strict=False):
        if live_round.n_accepted != step.n_accepted:
            break
        common += live_round.committed_ids
    else:
        return None
    common += live_round.committed_ids[: min(live_round.n_accepted, step.n_accepted)]
    right = wrong = live.token_ids[len(common)]
    if step.n_accepted > live_round.n_accepted < live_round.k:
        wrong = live_round.draft_ids[live_round.n_accepted]
    elif live_round.n_accepted > step.n_accepted < step.drafted:
        *_, row = _rows(model, live.prompt_ids, common, 1)
        wrong = int(row.argmax())
    return explain_fork(model, live.prompt_ids, (*common, right), (*common, wrong), width=2)


def _rows(target: LanguageModel, prompt_ids: Sequence[int], ids: Sequence[int], width: int) -> Iterator[np.ndarray]:
    """Rows of logits after the prompt and after each of `ids`, from forwards of `width` tokens, as decoding has them.

    The last forward is filled up as far as fits. Else one token left over would be a single step both times, and
    show no noise at all.
    """
    target.reset()
    yield target.forward(prompt_ids, n_logits=1)[0]
    fill = min(-len(ids) % width, target.caps.n_ctx - target.n_past - len(ids))
    fed = [*ids, *ids[-1:] * fill]
    for start in range(0, len(fed), width):
        yield from target.forward(fed[start : start + width])[: len(ids) - start]
    target.reset()


# --- the drafter `auto`: copying, what was given, and what is shipped, routed by what they cost here ---

COPIER, SHIPPED = "suffix", ("jump", "hydra")
"""The drafter that is always an arm, and those of which the first that fits is one where none is named."""


def auto_drafter(target: LanguageModel, *, arms: str = "") -> Router:
    """Measure what `target` and its drafters cost (a second or two), and route between them.

    `arms` are names of further drafters or draft models, with commas between; without it the first of SHIPPED is taken
    that fits the target, and keeps enough by its card to pay here. Raises as `load_drafter` does.
    """
    drafters = []
    for name in (COPIER, *(arms.split(",") if arms else SHIPPED)):
        try:
            drafters.append(load_drafter(name, target, strict=True).drafter)
        except InputError:
            if arms:
                raise  # else it is not shipped for this target
        if not arms and len(drafters) > 1:
            break
    if trees := [drafter.name for drafter in drafters if drafter.tree_nodes]:
        raise InputError(f"{', '.join(trees)} drafts trees: the router takes chains")
    router = route_between(target, drafters)
    for arm in router.arms[1:] if not arms else ():
        of_card, needed = arm.drafter.expected, _needed(router, arm)
        if of_card and not of_card[0] > needed:
            arm.drafter.close()
            router = Router(router.arms[:1], router.verify_s)
            rate = f"the acceptance rate on its card, {100 * of_card[0]:.0f} %"
            router.findings = (f"{arm.drafter.name} was not used: at {rate}, it costs more than it saves here.",)
    return router


def route_between(target: LanguageModel, drafters: Sequence[Drafter]) -> Router:
    """Measure what rounds of up to MOST drafts cost, and return a router between opened `drafters`."""
    k_max = _widest(target, MOST)
    curve, c = verify_costs(target, drafters, k_max, quick=True)
    verify_s = [curve.seconds(n) for n in range(k_max + 2)]
    return Router([Arm(d, k_max, c[d.name] * verify_s[1]) for d in drafters], verify_s)


def _needed(router: Router, arm: Arm) -> float:
    """The acceptance from which on an arm pays; NaN for never."""
    k = np.arange(1, arm.k_max + 1)
    return break_even((router.verify_s[k + 1] + arm.draft_s * arm.steps(k)) / router.verify_s[1])


def _say_needed(acceptance: float, busy: bool) -> str:
    if busy or acceptance == 0:  # 0: passes over more tokens took less time
        return "no break-even is given, because the machine was busy"
    if isnan(acceptance):
        return "no acceptance rate would pay here"
    return f"drafting pays from an acceptance rate of {100 * acceptance:.0f} %"
