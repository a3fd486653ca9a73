"""The baseline: the fastest plain decoding of the same weights on this machine, in any engine.

The shipped files of the zoo have 4 or 8 bits per weight. Their 16- and 32-bit forms, in llama.cpp
and in torch, have the same values (in 16 bits, rounded once more). Plain decoding of the shipped
file is therefore a baseline for all forms.
"""

from collections.abc import Sequence
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING

from pydantic import BaseModel

from specnb.decode.generate import PromptLike, generate
from specnb.errors import InputError, MemoryShortError, SpecnbError
from specnb.lm.base import LanguageModel
from specnb.lm.files import parse, weights_bytes, without_wide_type
from specnb.lm.load import load

if TYPE_CHECKING:
    import pandas as pd

TOKENS = 24
"""Number of timed tokens per prompt."""
MOST_BYTES = 1 << 30
"""Models with larger weights are not dequantized in torch for the comparison."""


class Baseline(BaseModel, frozen=True):
    """Plain decoding speed of a target's weights: in the fastest engine, and in the opened one.

    `baseline_engine` is the fastest engine and dtype; `baseline_note` says why another engine was
    not timed. Older records have no baseline: their speedups are over the same engine.
    """

    baseline_engine: str | None = None
    baseline_tokens_per_s: float | None = None
    plain_tokens_per_s: float | None = None
    baseline_note: str | None = None

    @property
    def share(self) -> float:
        """Plain decoding speed of the target over that of the baseline, at most 1.

        A speedup over the same engine, multiplied by it, is the speedup over the baseline.
        """
        if not self.baseline_engine:
            return 1.0
        return self.plain_tokens_per_s / self.baseline_tokens_per_s

    def over(self, table: "pd.DataFrame") -> "pd.DataFrame":
        """Convert a table of speedups over the same engine to speedups over the baseline.

        The column `speedup_same_engine` contains the former. The intervals do not include the
        uncertainty of `share`.
        """
        over_baseline = table[["speedup", "low", "high"]] * self.share
        return table.assign(speedup_same_engine=table["speedup"], **over_baseline)

    def __str__(self) -> str:
        rates = f"{self.baseline_tokens_per_s:.1f} tokens/s"
        rates += f", by the target as opened {self.plain_tokens_per_s:.1f}"
        return f"plain decoding, {self.baseline_engine}: {rates}. {self.baseline_note or ''}"


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
        rates = []
        for runs in zip(*rounds, strict=True):
            rates.append(sum(g.n_decoded for g in runs) / sum(g.decode_s for g in runs))
        engines = [f"{model.caps.engine} {model.caps.dtype}" for model in models]
        rate, engine = max(zip(rates, engines, strict=True))
        return Baseline(
            baseline_engine=engine,
            baseline_tokens_per_s=rate,
            plain_tokens_per_s=rates[0],
            baseline_note="; ".join(notes) or None,
        )
