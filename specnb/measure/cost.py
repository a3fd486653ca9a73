"""Costs: T(n), the seconds of one target forward pass over n new tokens, and c = T_draft(1) / T_target(1).

A round costs k draft steps and T(k + 1), a plain step T(1): where T(n)/T(1) rises steeply, speculation hardly pays.
"""

from collections.abc import Collection, Sequence
from functools import cached_property
from math import inf
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
from pydantic import BaseModel

from specnb.decode.costaware import break_even
from specnb.draft.base import Drafter
from specnb.errors import InputError
from specnb.lm.base import LanguageModel
from specnb.machine import Neighbours

WIDTHS = (1, 2, 3, 5, 9, 17)
STAIRCASE = ("int4",)
"""Types whose kernel computes rows in blocks, so that T(n) rises in steps: every width up to the last of WIDTHS is
measured."""
EDGES = (1, 2, 4, 5, 8, 9, 16, 17)
"""Widths around the steps of four: those of a quick measurement, and those that a sentence names."""
CONTEXT = 256
"""Tokens in the state when forwards are timed, where the models hold them."""
THIS_MACHINE = "this machine"
NOISE = 0.95
"""T(n)/T(1) below which a measurement is noise: a pass over more tokens does not take less time."""

CURVE_REPEATS = {"quick": 3, "normal": 7, "full": 7}
"""Timed forwards of each width, by the budget of a notebook."""

QUICK_CONTEXT, QUICK_S = 64, 1.5
"""The same, and seconds after which no more repeats begin, where a rough answer is wanted soon."""

NAMED = {"memory-bound server": (1.08, 0.05), "laptop, compute-bound": (3.8, 0.30), "96-core EPYC": (1.16, 0.027)}
"""Machines to compare with: T(8)/T(1), and c of a typical small draft model. Illustrations but the last, whose sum
follows from published speeds (`data/report`); its parts follow from file sizes."""


def widths_of(model: LanguageModel, *, quick: bool = False) -> tuple[int, ...]:
    """Return the widths at which T(n) of `model` is measured by default."""
    if model.caps.dtype not in STAIRCASE:
        return WIDTHS
    return EDGES if quick else tuple(range(1, WIDTHS[-1] + 1))


class CostCurve(BaseModel, frozen=True, extra="forbid"):
    """Median seconds of a forward for each measured width, after `context` tokens; every repeat in `samples_s`."""

    model: str
    context: int
    widths: tuple[int, ...]
    samples_s: tuple[tuple[float, ...], ...]
    busy: bool | None = None  # other processes disturbed it; None: not known

    @cached_property
    def median_s(self) -> tuple[float, ...]:
        return tuple(float(np.median(s)) for s in self.samples_s)

    def seconds(self, n: float) -> float:
        """T(n), linear between measured widths and beyond the last one (by its last slope); T(0) = 0."""
        widths, medians = self.widths, self.median_s
        if n == 0:
            return 0.0  # the first round without drafts: the prefill has done its forward
        if n > widths[-1] and len(widths) > 1:
            slope = (medians[-1] - medians[-2]) / (widths[-1] - widths[-2])
            return medians[-1] + max(0.0, slope) * (n - widths[-1])
        return float(np.interp(n, widths, medians))

    def ratio(self, n: float) -> float:
        """The verify cost T(n)/T(1)."""
        return self.seconds(n) / self.seconds(1)

    def describe(self, c: float, *, across: bool) -> str:
        """Return a sentence on what a round costs: `c` of a draft step, measured `across` engines or not, and T(n)."""
        widths = self.widths if len(self.widths) <= len(EDGES) else EDGES
        ratios = {n: self.ratio(n) for n in widths[1:] if n <= self.widths[-1]}
        passes = ", ".join(f"T({n})/T(1) = {ratio:.2f}" for n, ratio in ratios.items())
        engines = " (measured in another engine)" if across else ""
        sentence = f"One draft step takes c = {c:.2f} plain decoding steps{engines}. Forward passes: {passes}"
        if min(ratios.values(), default=1) < NOISE:
            sentence += ". A ratio below 1 is timing noise of a busy machine: measure again when it is idle"
        return sentence


class Cost(NamedTuple):
    """What rounds cost on a machine of this `name`: T(n) of the target, and c, T_draft(1) / T_target(1).

    `of_target`: c is a share of the target's own step (trained heads; 0 for a lookup), the same on any machine.
    """

    curve: CostCurve
    c: float = 0.0
    of_target: bool = False
    name: str = THIS_MACHINE

    @classmethod
    def straight(cls, name: str, at8: float, c: float = 0.0) -> "Cost":
        """On a machine whose forward costs 1 at width 1 and `at8` at width 8, on a straight line."""
        widths = (*WIDTHS, 25, 65)
        samples = tuple((1.0 + (at8 - 1.0) * (n - 1) / 7,) for n in widths)
        return cls(CostCurve(model=name, context=0, widths=widths, samples_s=samples), c, name=name)

    @property
    def step_s(self) -> float:
        """T(1)."""
        return self.curve.seconds(1)

    def ratios(self, k_max: int) -> tuple[float, ...]:
        """T(n)/T(1) for n = 0 to k_max + 1."""
        return tuple(self.curve.ratio(n) for n in range(k_max + 2))

    def break_even(self, share: float = 1.0, k_max: int = 16) -> float:
        """Return the acceptance, the same at each position, from which on some K pays; NaN where none does.

        `share` is the rate of plain decoding here over that of the baseline. Leviathan et al. 2211.17192, equation 1.
        """
        return break_even([self.round_s(k + 1, k) / self.step_s for k in range(1, k_max + 1)], share)

    def rate_needed(self, k: int, share: float = 1.0) -> float:
        """Return the accepted share of the drafted tokens from which on `k` drafts a round pay; above 1 for never.

        A round commits 1 + k rate tokens. `share` as of `break_even`.
        """
        return (self.round_s(k + 1, k) / self.step_s / share - 1) / k

    def round_s(self, width: int, steps: int) -> float:
        """Seconds of a round: one forward of `width` tokens, and `steps` of the drafter."""
        return self.curve.seconds(width) + steps * self.c * self.step_s


def verify_curve(
    model: LanguageModel,
    *,
    widths: Sequence[int] | None = None,
    context: int = CONTEXT,
    repeats: int = 7,
    limit_s: float = inf,
) -> CostCurve:
    """Measure T(n) of `model`, widths interleaved in random order so that drift of the machine hits all alike.

    `widths` are `widths_of(model)` by default. Two warm-up forwards a width are not counted, no repeat begins after
    `limit_s`. Resets the model. Raises InputError for what does not fit it.

    >>> from specnb.lm import toy
    >>> curve = verify_curve(toy.markov(8), widths=(1, 5), context=4)
    >>> curve.widths, curve.seconds(5) > 0
    ((1, 5), True)
    """
    return _measured(model, (), widths or widths_of(model), context, repeats, limit_s)[0]


def verify_costs(
    target: LanguageModel, drafters: Sequence[Drafter], k_max: int, *, repeats: int = 7, quick: bool = False
) -> tuple[CostCurve, dict[str, float]]:
    """The target's curve up to k_max + 1 tokens, and by its name each drafter's c: T_draft(1) / T_target(1).

    All are measured in turn, as `verify_curve` does, after CONTEXT tokens or half of what the smallest of the models
    holds. c is 0 for a drafter without a model; of trained heads it is their time a place ahead. `quick` ends soon, and
    takes the fastest forward of each width. Raises InputError when that does not fit a model.
    """
    models = {d.name: d.model for d in drafters if d.model}
    context = min(QUICK_CONTEXT if quick else CONTEXT, *(m.caps.n_ctx // 2 for m in (target, *models.values())))
    widths = {1, *(n for n in widths_of(target, quick=quick) if n <= k_max), k_max + 1}
    curve, steps_s = _measured(target, tuple(models.values()), widths, context, repeats, QUICK_S if quick else inf)
    steps = {d.name: d.step_s() for d in drafters} | dict(zip(models, steps_s, strict=True))
    return curve, {name: step_s / curve.seconds(1) for name, step_s in steps.items()}


def crosses_engines(target: LanguageModel, drafter: Drafter) -> bool:
    """Return whether a draft model runs in another engine than its target: c then compares the engines, too."""
    return bool(drafter.model) and drafter.model.caps.engine != target.caps.engine


def _measured(
    target: LanguageModel,
    drafts: Sequence[LanguageModel],
    widths: Collection[int],
    context: int,
    repeats: int,
    limit_s: float,
) -> tuple[CostCurve, list[float]]:
    """The target's curve, and the median seconds of a single step of each draft model, measured in turn with it."""
    widths = tuple(sorted(set(widths)))
    steps = [(target, n) for n in widths] + [(draft, 1) for draft in drafts]
    models, rng = (target, *drafts), np.random.default_rng(0)
    for model, n in steps:
        if context < 1 or context + n > model.caps.n_ctx or n > model.caps.max_width:
            raise InputError(f"{context} tokens and a forward of {n} do not fit {model.name} ({model.caps.n_ctx})")
    ids = rng.integers(0, min(model.vocab.size for model in models), context + widths[-1]).tolist()
    for model in models:
        model.reset()
        model.forward(ids[:context], n_logits=0)
    neighbours, samples, started = Neighbours(), [[] for _ in steps], perf_counter()
    for repeat in range(-2, repeats):
        if samples[0] and perf_counter() - started > limit_s:
            break
        for at in rng.permutation(len(steps)).tolist():
            model, n = steps[at]
            began = perf_counter()
            model.forward(ids[context : context + n])
            took = perf_counter() - began
            model.rewind(n)
            if repeat >= 0 or limit_s < inf:
                samples[at].append(took)
    forwards = [(n, s) for n, each in zip(widths, samples, strict=False) for s in each]
    busy = neighbours.contention(target.caps, forwards).busy
    if limit_s < inf:  # of few samples the fastest says most: whatever disturbs a forward makes it slower
        samples = [[min(each)] for each in samples]
    for model in models:
        model.reset()
    timed = tuple(map(tuple, samples[: len(widths)]))
    curve = CostCurve(model=target.name, context=context, widths=widths, samples_s=timed, busy=busy)
    return curve, [float(np.median(s)) for s in samples[len(widths) :]]


def plain_rates(
    model: LanguageModel, *, n_prompt: int = 512, n_gen: int = 128, repeats: int = 5
) -> list[dict[str, Any]]:
    """Tokens a second of prefill and of single steps, each from an empty state, as llama-bench measures them.

    One row a test: its number of tokens (cut to what the model holds), mean, standard deviation and samples of
    `repeats` runs; one run before them is not counted. Resets the model.
    """
    ids = np.random.default_rng(0).integers(0, model.vocab.size, model.caps.n_ctx).tolist()
    rows = []
    for test, wanted, width in (("prefill", n_prompt, model.caps.max_width), ("generation", n_gen, 1)):
        n, samples = min(wanted, model.caps.n_ctx), []
        for _ in range(1 + repeats):
            model.reset()
            began = perf_counter()
            for start in range(0, n, width):
                model.forward(ids[start : min(start + width, n)], n_logits=1)
            samples.append(n / (perf_counter() - began))
        del samples[0]
        rate, std = float(np.mean(samples)), float(np.std(samples, ddof=repeats > 1))
        rows.append({"test": test, "n_tokens": n, "tokens_per_s": rate, "std": std, "samples": samples})
    model.reset()
    return rows
