"""The baseline: the fastest plain decoding of the same weights on this machine, in any engine.

The shipped files of the zoo have 4 or 8 bits per weight. Their 16- and 32-bit forms, in llama.cpp
and in torch, have the same values (in 16 bits, rounded once more). Plain decoding of the shipped
file is therefore a baseline for all forms.
"""

from collections.abc import Sequence
from contextlib import ExitStack, closing
from math import log
from typing import TYPE_CHECKING

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
    not timed. `share_error` is the half-width of the 95 % interval of log(share), over prompts; 0
    for fewer than FEWEST prompts. `live_tokens_per_s` is the speed of plain decoding in the opened
    engine during the experiment, which began after the baseline was timed; it is computed from the
    experiment's generations, so records do not have it. Older records have no baseline: their share
    is 1.
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
            line += f"; in the engine of the target: {self.plain_tokens_per_s:.1f} tokens/s"
        return " ".join(filter(None, [f"{line}.", self.drift, self.baseline_note]))

    @property
    def drift(self) -> str:
        """A warning if plain decoding had another speed during the experiment, or an empty string.

        Then `over_fastest` compares different states of the machine.
        """
        live = self.live_tokens_per_s or self.plain_tokens_per_s
        change = round(live, 1) / round(self.plain_tokens_per_s, 1) - 1  # of the printed speeds
        if abs(change) <= AGREES:
            return ""
        return (
            f"During the experiment, plain decoding had {live:.1f} tokens/s, {abs(change):.0%} "
            f"{'more' if change > 0 else 'less'}. If this did not affect both engines equally, "
            "over_fastest is off by up to as much, beyond its interval."
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


def time_baseline(target: LanguageModel, prompts: Sequence[PromptLike]) -> Baseline:
    """Time plain decoding of TOKENS tokens per prompt, interleaving a target and its rivals.

    The first prompt also serves as warm-up. Rivals that cannot be opened in addition to the target
    are not timed. Resets the target.
    """
    models = [target]
    notes = []
    with ExitStack() as opened:
        for name in find_rivals(target.name):
            spec = parse(name)
            try:
                if not spec.keeps_blocks and weights_bytes(spec) > MOST_BYTES:
                    raise MemoryShortError("it is too large to be dequantized for a comparison")
                models.append(opened.enter_context(closing(load(name))))
            except SpecnbError as error:
                notes.append(f"{name} was not timed: {error}")
        rounds = [
            [generate(model, prompt, max_new_tokens=TOKENS, ignore_eog=True) for model in models]
            for prompt in (prompts[0], *prompts)
        ]
        del rounds[0]  # warm-up
        # (prompts, models, 2)
        counts = np.array([[(g.n_decoded, g.decode_s) for g in runs] for runs in rounds])
        totals = counts.sum(axis=0)
        rates = totals[:, 0] / totals[:, 1]
        fastest = int(rates.argmax())
        return Baseline(
            baseline_engine=f"{models[fastest].caps.engine} {models[fastest].caps.dtype}",
            baseline_tokens_per_s=rates[fastest],
            plain_tokens_per_s=rates[0],
            share_error=_share_error(counts[:, [0, fastest]]) if fastest else 0.0,
            baseline_note="; ".join(notes) or None,
        )


def _share_error(counts: np.ndarray) -> float:
    """Return `Baseline.share_error` for tokens and seconds of both runs, `(prompts, 2, 2)`."""
    if len(counts) < FEWEST:
        return 0.0
    share = interval(counts.reshape(-1, 4), rate_ratio)
    return log(share.high / share.value)
