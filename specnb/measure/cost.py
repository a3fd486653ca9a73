"""Costs: T(n), seconds of a target forward pass over n tokens, and c = T_draft(1) / T_target(1).

A round with k draft tokens takes k draft steps and T(k + 1); a plain step takes T(1). The steeper
T(n)/T(1) rises, the less speculation pays.
"""

from collections.abc import Collection, Sequence
from functools import cached_property, partial
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
from pydantic import BaseModel

from specnb.decode.costaware import break_even
from specnb.draft.base import Drafter
from specnb.errors import InputError
from specnb.lm.base import LanguageModel
from specnb.lm.tree import COMMITTED, Tree
from specnb.machine import Neighbours

WIDTHS = (1, 2, 3, 5, 9, 17)
STAIRCASE = ("int4",)
"""Dtypes whose kernel computes rows in blocks, so that T(n) is a step function. For these, every
width up to the last of WIDTHS is measured."""
EDGES = (1, 2, 4, 5, 8, 9, 16, 17)
"""Widths at the steps of that function, for quick measurements and descriptions."""
CONTEXT = 256
"""Tokens in the state when forward passes are timed, if the contexts of the models allow it."""
THIS_MACHINE = "this machine"

CURVE_REPEATS = {"quick": 3, "normal": 7, "full": 7}
"""Number of timed forward passes of each width, by the budget of a notebook."""

QUICK_CONTEXT = 64
"""Tokens in the state in quick measurements."""
QUICK_S = 1.5
"""Seconds after which quick measurements start no more repeats."""

NAMED = {
    "memory-bound server": (1.08, 0.05),
    "laptop, compute-bound": (3.8, 0.30),
    "96-core EPYC": (1.16, 0.027),
}
"""Machines to compare with: T(8)/T(1), and c of a typical small draft model. The first two are
illustrations. For the last, the total cost of a draft token is derived from published speeds
(`data/report`), and its split from file sizes."""


def widths_of(model: LanguageModel, *, quick: bool = False) -> tuple[int, ...]:
    """Return the default widths at which T(n) of `model` is measured."""
    if model.caps.dtype not in STAIRCASE:
        return WIDTHS
    return EDGES if quick else tuple(range(1, WIDTHS[-1] + 1))


class CostCurve(BaseModel, frozen=True, extra="forbid"):
    """Seconds of forward passes over `widths` tokens, after `context` tokens.

    `samples_s[i]` contains every repeat of `widths[i]`, and `median_s[i]` is their median.
    """

    model: str
    context: int
    widths: tuple[int, ...]
    samples_s: tuple[tuple[float, ...], ...]
    busy: bool | None = None  # whether other processes disturbed it; None: unknown

    @cached_property
    def median_s(self) -> tuple[float, ...]:
        return tuple(float(np.median(s)) for s in self.samples_s)

    def seconds(self, n: float) -> float:
        """Return T(n), interpolated linearly, or extrapolated with the last slope. T(0) = 0."""
        widths = self.widths
        medians = self.median_s
        if n == 0:
            return 0.0  # the first round without drafts needs no pass after the prefill
        if n > widths[-1] and len(widths) > 1:
            slope = (medians[-1] - medians[-2]) / (widths[-1] - widths[-2])
            return medians[-1] + max(0.0, slope) * (n - widths[-1])
        return float(np.interp(n, widths, medians))

    def ratio(self, n: float) -> float:
        """Return T(n)/T(1)."""
        return self.seconds(n) / self.seconds(1)

    def describe(self, c: float, *, across: bool) -> str:
        """Return sentences with `c`, which may be measured `across` engines, and T(n)/T(1)."""
        widths = self.widths if len(self.widths) <= len(EDGES) else EDGES
        passes = ", ".join(
            f"T({n})/T(1) = {self.ratio(n):.2f}" for n in widths[1:] if n <= self.widths[-1]
        )
        engines = " (measured in another engine)" if across else ""
        return (
            f"One draft step takes c = {c:.2f} plain decoding steps{engines}. "
            f"Forward passes: {passes}"
        )


class Cost(NamedTuple):
    """Costs of rounds on the machine `name`: T(n) of the target, and c = T_draft(1) / T_target(1).

    `of_target` means that c is a fixed share of the target's step, equal on any machine (trained
    heads; 0 for lookup).
    """

    curve: CostCurve
    c: float = 0.0
    of_target: bool = False
    name: str = THIS_MACHINE

    @classmethod
    def straight(cls, name: str, at8: float, c: float = 0.0) -> "Cost":
        """Return the costs of a machine with linear T(n): T(1) = 1 and T(8) = `at8`."""
        widths = (*WIDTHS, 25, 65)
        samples = tuple((1.0 + (at8 - 1.0) * (n - 1) / 7,) for n in widths)
        curve = CostCurve(model=name, context=0, widths=widths, samples_s=samples)
        return cls(curve, c, name=name)

    @property
    def step_s(self) -> float:
        """T(1)."""
        return self.curve.seconds(1)

    def ratios(self, k_max: int) -> tuple[float, ...]:
        """Return T(n)/T(1) for n = 0 to k_max + 1."""
        return tuple(self.curve.ratio(n) for n in range(k_max + 2))

    def break_even(self, k_max: int = 16) -> float:
        """Return the acceptance rate, equal at all positions, above which a K pays; NaN if none.

        Leviathan et al. 2211.17192, equation 1.
        """
        return break_even([self.round_s(k + 1, k) / self.step_s for k in range(1, k_max + 1)])

    def rate_needed(self, k: int, share: float = 1.0) -> float:
        """Return the acceptance rate above which K = `k` pays; a rate above 1 means never.

        A round commits 1 + k * rate tokens. `share` is the speed of plain decoding over that of the
        baseline.
        """
        return (self.round_s(k + 1, k) / self.step_s / share - 1) / k

    def round_s(self, width: int, steps: int) -> float:
        """Return the seconds of a round: a pass over `width` tokens and `steps` draft steps."""
        return self.curve.seconds(width) + steps * self.c * self.step_s


def verify_curve(
    model: LanguageModel,
    *,
    widths: Sequence[int] | None = None,
    context: int = CONTEXT,
    repeats: int = 7,
) -> CostCurve:
    """Measure T(n) of `model`. Widths are interleaved in random order, so that drift affects all.

    `widths` are `widths_of(model)` by default. Two warm-up passes per width are not counted. Resets
    the model. Raises InputError if a width or the context exceeds the model's limits.

    >>> from specnb.lm import toy
    >>> curve = verify_curve(toy.markov(8), widths=(1, 5), context=4)
    >>> curve.widths, curve.seconds(5) > 0
    ((1, 5), True)
    """
    return time_passes(model, (), widths or widths_of(model), context, repeats)[0]


def verify_costs(
    target: LanguageModel,
    drafters: Sequence[Drafter],
    k_max: int,
    *,
    repeats: int = 7,
    quick: bool = False,
) -> tuple[CostCurve, dict[str, float]]:
    """Measure the target's T(n) for n <= k_max + 1, and each drafter's c, T_draft(1) / T_target(1).

    Returns the curve, and c by the drafter's name. All models are interleaved, as in
    `verify_curve`, after CONTEXT tokens, or half the smallest context of the models if that is
    less. For trained heads, c is their time per position over T(1); for other drafters without a
    model it is 0. `quick` measurements start no repeat after QUICK_S, and use the fastest pass of
    each width, warm-up included. Raises InputError as `verify_curve`.
    """
    models = {d.name: d.model for d in drafters if d.model}
    half = min(model.caps.n_ctx // 2 for model in (target, *models.values()))
    context = min(QUICK_CONTEXT if quick else CONTEXT, half)
    widths = {1, *(n for n in widths_of(target, quick=quick) if n <= k_max), k_max + 1}
    curve, steps_s = time_passes(
        target, tuple(models.values()), widths, context, repeats, quick=quick
    )
    steps = {d.name: d.step_s() for d in drafters} | dict(zip(models, steps_s, strict=True))
    return curve, {name: step_s / curve.seconds(1) for name, step_s in steps.items()}


def crosses_engines(target: LanguageModel, drafter: Drafter) -> bool:
    """Return whether draft model and target run in different engines, so that c compares these."""
    return bool(drafter.model) and drafter.model.caps.engine != target.caps.engine


def time_passes(
    target: LanguageModel,
    drafts: Sequence[LanguageModel],
    widths: Collection[int],
    context: int,
    repeats: int,
    *,
    quick: bool = False,
    trees: bool = False,
) -> tuple[CostCurve, list[float]]:
    """Return the target's curve, and the median seconds of a step of each draft model.

    With `trees`, a pass over several tokens is one over a tree: a root and its children.
    """
    # 1. Check the limits of the models, and fill their states.
    widths = tuple(sorted(set(widths)))
    passes: list[tuple[Any, int]] = [(target, n) for n in widths] + [(draft, 1) for draft in drafts]
    for model, n in passes:
        n_ctx = model.caps.n_ctx
        if context < 1 or context + n > n_ctx or n > model.caps.max_width:
            raise InputError(
                f"{context} tokens and a forward pass over {n} "
                f"exceed the limits of {model.name} (context {n_ctx})"
            )
    models = (target, *drafts)
    rng = np.random.default_rng(0)
    vocab_size = min(model.vocab.size for model in models)
    ids = rng.integers(0, vocab_size, context + widths[-1]).tolist()
    for model in models:
        model.reset()
        model.forward(ids[:context], n_logits=0)
    # 2. Time the forward passes, in a new random order in each repeat; the first two are warm-up.
    neighbours = Neighbours()
    samples = [[] for _ in passes]
    started_s = perf_counter()
    for repeat in range(-2, repeats):
        if quick and samples[0] and perf_counter() - started_s > QUICK_S:
            break
        for index in rng.permutation(len(passes)).tolist():
            model, n = passes[index]
            fed = [ids[context : context + n]]
            run = model.forward
            undo = partial(model.rewind, n)
            if trees and n > 1:
                fed.append(Tree((COMMITTED, *[0] * (n - 1))))
                run = model.forward_tree
                undo = partial(model.keep_path, [])
            start_s = perf_counter()
            run(*fed)
            pass_s = perf_counter() - start_s
            undo()
            if repeat >= 0 or quick:
                samples[index].append(pass_s)
    # 3. Summarize.
    timings = [(n, s) for n, of_width in zip(widths, samples, strict=False) for s in of_width]
    busy = neighbours.contention(target.caps, timings).busy
    if quick:  # with few samples the fastest is best, because disturbances only add time
        samples = [[min(of_pass)] for of_pass in samples]
    for model in models:
        model.reset()
    timed = tuple(map(tuple, samples[: len(widths)]))
    curve = CostCurve(model=target.name, context=context, widths=widths, samples_s=timed, busy=busy)
    return curve, [float(np.median(s)) for s in samples[len(widths) :]]


def plain_rates(
    model: LanguageModel, *, n_prompt: int, n_gen: int, repeats: int
) -> list[dict[str, Any]]:
    """Measure tokens per second of prefill and of single steps from an empty state (llama-bench).

    Returns a row for each test: number of tokens (limited by the context), and mean, standard
    deviation and samples of `repeats` runs after a warm-up. Resets the model.
    """
    n_ctx = model.caps.n_ctx
    ids = np.random.default_rng(0).integers(0, model.vocab.size, n_ctx).tolist()
    rows = []
    for test, n, width in (("prefill", n_prompt, model.caps.max_width), ("generation", n_gen, 1)):
        n = min(n, n_ctx)
        samples = []
        for _ in range(1 + repeats):
            model.reset()
            start_s = perf_counter()
            for start in range(0, n, width):
                model.forward(ids[start : min(start + width, n)], n_logits=1)
            samples.append(n / (perf_counter() - start_s))
        del samples[0]  # warm-up
        row = {
            "test": test,
            "n_tokens": n,
            "tokens_per_s": float(np.mean(samples)),
            "std": float(np.std(samples, ddof=1)),
            "samples": samples,
        }
        rows.append(row)
    model.reset()
    return rows
