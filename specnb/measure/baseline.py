"""The baseline: the fastest plain decoding of the same weights on this machine, in any engine.

The shipped files of the zoo have 4 or 8 bits per weight. Their 16- and 32-bit forms, in llama.cpp
and in torch, have the same values (in 16 bits, rounded once more). Plain decoding of the shipped
file is therefore a baseline for all forms.
"""

from collections.abc import Sequence
from contextlib import ExitStack, closing
from math import log
from typing import TYPE_CHECKING, Self

import numpy as np
from pydantic import BaseModel, Field

from specnb.decode.generate import PromptLike, generate
from specnb.errors import InputError, MemoryShortError, SpecnbError
from specnb.lm.base import LanguageModel
from specnb.lm.files import parse, weights_bytes, without_wide_type
from specnb.lm.load import load
from specnb.measure.intervals import FEWEST, interval, rate_ratio

if TYPE_CHECKING:
    import pandas as pd

TOKENS = 24
"""Number of timed tokens per prompt."""
AGREES = 0.03
"""Largest relative difference of two plain decoding speeds that are taken to be equal."""
MOST_BYTES = 1 << 30
"""Models with larger weights are not dequantized in torch for the comparison."""


class Baseline(BaseModel, frozen=True):
    """Plain decoding speed of a target's weights: in the fastest engine, and in the opened one.

    `baseline_engine` is the fastest engine and dtype; `baseline_note` says why another engine was
    not timed. `share_error` is the half-width of the 95 % interval of log(share), over timings; 0
    for fewer than FEWEST timings. `live_tokens_per_s` is the speed of the experiment's own plain
    runs in the opened engine; it is computed from its generations, so records do not have it. Older
    records have no baseline: their share is 1.
    """

    baseline_engine: str | None = None
    baseline_tokens_per_s: float | None = None
    plain_tokens_per_s: float | None = None
    live_tokens_per_s: float | None = Field(default=None, exclude=True)
    share_error: float = 0.0
    baseline_note: str | None = None

    @property
    def share(self) -> float:
        """Plain decoding speed of the target over that of the baseline, at most 1.

        A speedup over plain decoding in the target's engine, multiplied by it, is the speedup over
        the baseline.
        """
        if not self.baseline_engine:
            return 1.0
        return self.plain_tokens_per_s / self.baseline_tokens_per_s

    def over(self, table: "pd.DataFrame") -> "pd.DataFrame":
        """Add over_fastest, over_fastest_low and over_fastest_high to a table of speedups.

        They are the columns speedup, low and high over the baseline. The interval includes the
        uncertainty of `share`: the half-widths add in squares, on the logarithmic scale.
        """
        speedup = table["speedup"].astype(float)
        below, above = (
            np.exp(np.hypot(np.log(table[end].astype(float) / speedup), self.share_error))
            for end in ("low", "high")
        )
        over = speedup * self.share
        return table.assign(
            over_fastest=over, over_fastest_low=over / below, over_fastest_high=over * above
        )

    def __str__(self) -> str:
        if not self.baseline_engine:
            return "The fastest plain decoding of these weights was not measured."
        line = f"Fastest plain decoding of these weights: {self.baseline_engine}, "
        line += f"{self.baseline_tokens_per_s:.1f} tokens/s"
        if self.share < 1:
            line += f"; this target: {self.plain_tokens_per_s:.1f} tokens/s"
        return " ".join(filter(None, [f"{line}.", self.drift, self.baseline_note]))

    @property
    def drift(self) -> str:
        """A warning if the experiment's own plain runs had another speed, or an empty string.

        Then `speedup` and `share` were measured in different states of the machine.
        """
        plain = round(self.plain_tokens_per_s, 1)  # as printed
        live = round(self.live_tokens_per_s or plain, 1)
        change = live / plain - 1
        if abs(change) <= AGREES:
            return ""
        return (
            f"The experiment's own plain runs had {live:.1f} tokens/s, {abs(change):.0%} "
            f"{'more' if change > 0 else 'less'}. If only this target changed, ratios "
            f"to the fastest are {abs(plain / live - 1):.0%} too {'low' if change > 0 else 'high'}."
        )


def find_rivals(name: str) -> list[str]:
    """Return other model names with the weights of `name` that may decode faster.

    They are the GGUF file in llama.cpp, and in torch with dtype `auto`; for a target in torch, the
    latter only if `auto` is int4. A 16- or 32-bit form of a zoo model is replaced by the shipped
    file. Models in memory have no rivals.

    >>> find_rivals("smollm2-135m:q8_0?backend=hf&dtype=float32"), find_rivals("hf:ORG/NAME")
    (['smollm2-135m:q8_0'], [])
    """
    try:
        spec = parse(name)
    except InputError:  # a model in memory
        return []
    if spec.where == spec.backend == "hf":
        return []
    options = ("n_ctx", "threads", "revision")
    shared = {key: value for key, value in spec.options.items() if key in options}
    source = without_wide_type(spec.source) if spec.where == "zoo" else spec.source
    in_torch = parse(source, backend="hf", dtype="auto", **shared)
    if spec.where == "hf":
        return [in_torch.text]
    rivals = [parse(source, **shared)]
    if spec.backend != "hf" or in_torch.options["dtype"] == "int4":
        rivals.append(in_torch)
    return [rival.text for rival in rivals if rival._replace(text=spec.text) != spec]


class BaselineTimer:
    """Times plain decoding of a target and of its rivals, prompt by prompt.

    The speed of a machine changes within minutes, so `time` is called before and between the runs
    that the baseline judges; a prompt may be timed several times. A context manager: on exit it
    closes the rivals. Rivals that cannot be opened in addition to the target are not timed.

    >>> from specnb.lm import toy
    >>> with BaselineTimer(toy.markov(8, seed=1)) as timer:
    ...     for prompt in ([0], [1]):
    ...         timer.time(prompt)
    >>> timer.baseline().share  # a toy has no rivals
    1.0
    """

    def __init__(self, target: LanguageModel) -> None:
        self._models = [target]
        self._notes: list[str] = []
        self._counts: list[list[tuple[int, float]]] = []  # per prompt and model: tokens, seconds
        with ExitStack() as opened:
            for name in find_rivals(target.name):
                spec = parse(name)
                try:
                    if not spec.keeps_blocks and weights_bytes(spec) > MOST_BYTES:
                        raise MemoryShortError("it is too large to be dequantized for a comparison")
                    self._models.append(opened.enter_context(closing(load(name))))
                except SpecnbError as error:
                    self._notes.append(f"{name} was not timed: {error}")
            self._opened = opened.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self._opened.close()

    def time(self, prompt: PromptLike) -> None:
        """Decode TOKENS tokens with each model. Resets the target.

        The first prompt is decoded twice, once as warm-up.
        """
        for _ in range(1 if self._counts else 2):
            runs = [
                generate(model, prompt, max_new_tokens=TOKENS, ignore_eog=True)
                for model in self._models
            ]
        self._counts.append([(run.n_decoded, run.decode_s) for run in runs])

    def baseline(self) -> Baseline:
        """Return the speeds over all prompts timed so far."""
        counts = np.array(self._counts)  # (prompts, models, 2)
        totals = counts.sum(axis=0)
        rates = totals[:, 0] / totals[:, 1]
        fastest = int(rates.argmax())
        caps = self._models[fastest].caps
        return Baseline(
            baseline_engine=f"{caps.engine} {caps.dtype}",
            baseline_tokens_per_s=rates[fastest],
            plain_tokens_per_s=rates[0],
            share_error=_share_error(counts[:, [0, fastest]]) if fastest else 0.0,
            baseline_note="; ".join(self._notes) or None,
        )


def time_baseline(target: LanguageModel, prompts: Sequence[PromptLike]) -> Baseline:
    """Time plain decoding of `prompts` by a target and its rivals, interleaved."""
    with BaselineTimer(target) as timer:
        for prompt in prompts:
            timer.time(prompt)
        return timer.baseline()


def _share_error(counts: np.ndarray) -> float:
    """Return `Baseline.share_error` for tokens and seconds of both runs, `(timings, 2, 2)`."""
    if len(counts) < FEWEST:
        return 0.0
    share = interval(counts.reshape(-1, 4), rate_ratio)
    return log(share.high / share.value)
