"""The baseline: the fastest plain decoding of the same weights on this machine, whichever engine it is.

A shipped file of the zoo has 4 or 8 bits a weight. Its 16- and 32-bit forms, in llama.cpp and in torch, hold the same
values (16 bits round them once more), so that plain decoding of the shipped file is the baseline of all of them.
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
"""Length of a timed answer."""
MOST_BYTES = 1 << 30
"""Weights beyond which no model is dequantised into torch for the comparison's sake."""


class Baseline(BaseModel, frozen=True):
    """Plain decoding of a target's weights in tokens a second: the fastest, and that of the target as it was opened.

    `baseline_engine` is engine and type of the fastest. `baseline_note` says why another engine was not timed. Without
    an engine, as of a record from before it was asked, a speed-up is over the same engine.
    """

    baseline_engine: str | None = None
    baseline_tokens_per_s: float | None = None
    plain_tokens_per_s: float | None = None
    baseline_note: str | None = None

    @property
    def share(self) -> float:
        """Rate of the target over that of the baseline, 1 at most: it makes a speed-up one over the baseline."""
        return self.plain_tokens_per_s / self.baseline_tokens_per_s if self.baseline_engine else 1.0

    def over(self, table: "pd.DataFrame") -> "pd.DataFrame":
        """Return a table of speed-ups over the same engine as one over the baseline, the others beside it.

        The intervals do not count that the share was measured, too.
        """
        return table.assign(speedup_same_engine=table["speedup"], **table[["speedup", "low", "high"]] * self.share)

    def __str__(self) -> str:
        rates = f"{self.baseline_tokens_per_s:.1f} tokens/s, by the target as opened {self.plain_tokens_per_s:.1f}"
        return f"plain decoding, {self.baseline_engine}: {rates}. {self.baseline_note or ''}"


def find_rivals(name: str) -> list[str]:
    """Return the names under which the weights of `name` may decode faster.

    Those are the GGUF as llama.cpp opens it by default, and in torch in the type `auto`, if that is int4 or nothing
    but llama.cpp is left. Of a zoo's 16- or 32-bit form it is the shipped file. A model made in memory has no rival.

    >>> find_rivals("smollm2-135m:q8_0?backend=hf&dtype=float32"), find_rivals("hf:ORG/NAME")
    (['smollm2-135m:q8_0'], [])
    """
    try:
        spec = parse(name)
    except InputError:  # made in memory
        return []
    shared = {key: value for key, value in spec.options.items() if key in ("n_ctx", "threads", "revision")}
    if spec.where == "hf":
        return [parse(spec.source, backend="hf", dtype="auto", **shared).text] if spec.backend == "llama" else []
    source = without_wide_type(spec.source) if spec.where == "zoo" else spec.source
    rivals = [parse(source, **shared), parse(source, backend="hf", dtype="auto", **shared)]
    if spec.backend == "hf" and rivals[1].options["dtype"] != "int4":
        del rivals[1]
    return [rival.text for rival in rivals if rival[1:] != spec[1:]]


def time_baseline(target: LanguageModel, prompts: Sequence[PromptLike]) -> Baseline:
    """Time plain decoding of a target and of its rivals on each prompt in turn, TOKENS tokens each, after a warm-up.

    A rival that cannot be opened in addition to the target is not timed. Resets the target.
    """
    models, notes = [target], []
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
        rates = [sum(g.n_decoded for g in of) / sum(g.decode_s for g in of) for of in zip(*rounds[1:], strict=True)]
        engines = [f"{model.caps.engine} {model.caps.dtype}" for model in models]
        rate, engine = max(zip(rates, engines, strict=True))
        return Baseline(
            baseline_engine=engine,
            baseline_tokens_per_s=rate,
            plain_tokens_per_s=rates[0],
            baseline_note="; ".join(notes) or None,
        )
