"""Is another engine's greedy text the target's own? Its tokens are fed through plain decoding, position by position.

A token that is not its row's likeliest is a fork; its margin is how much likelier the likeliest one is. Tokens are fed
whatever the target would have said, so that one fork does not lead to others. Engines add in different orders, so
tokens that are nearly tied may turn out otherwise without a fault. How close that is must be measured without any
drafter, or a fault would excuse itself: the same rows are computed once more, in blocks, by the target or by another
type or engine of the same weights (`other`). What an engine writes plainly is the control: audit it beside.
(llama.cpp #25618, antirez/ds4 #756, vLLM RFC #54506)
"""

from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from pydantic import BaseModel, ConfigDict

from specnb.decode.generate import prompt_ids
from specnb.divergence.errors import EXIT
from specnb.errors import InputError
from specnb.io import json_lines, validated
from specnb.lm.base import LanguageModel
from specnb.measure.experiment import Progress, silent
from specnb.measure.pair import ROUNDING, force

WIDTH = 5
"""Tokens of the blocks that noise is measured with."""
QUANTILE = 0.999
"""Of the noise of all rows: what counts as a near-tie is at most twice as far from the likeliest."""
EXIT_CODES = {"identical": EXIT["SOUND"], "near ties": EXIT["SOUND"], "hard": EXIT["DIVERGENT"],
              "inconclusive": EXIT["INCONCLUSIVE"]}  # fmt: skip


class ForeignText(BaseModel):
    """A prompt and what was written after it, each as text or, surer, as token ids; and by what, in words."""

    model_config = ConfigDict(frozen=True)

    id: str = ""
    source: str = ""
    prompt: str | tuple[int, ...]
    output: str | tuple[int, ...]


class SourceVerdict(NamedTuple):
    """What was found of one source: `margin` is its largest, in logits; `first` says where the first fork is."""

    source: str
    verdict: str
    texts: int
    tokens: int
    forks: int
    margin: float
    first: str


class ForeignAudit(NamedTuple):
    """A verdict on each source; `noise`, in logits, is what rounding moves, and `noise_share` its share of a range."""

    sources: tuple[SourceVerdict, ...]
    noise: float
    noise_share: float

    @property
    def exit_code(self) -> int:
        return max((EXIT_CODES[source.verdict] for source in self.sources), key=[0, 125, 1].index)

    def document(self) -> dict[str, Any]:
        return self._asdict() | {"sources": [source._asdict() for source in self.sources]}


def read_texts(path: Path) -> tuple[ForeignText, ...]:
    """Read a JSONL file, a `ForeignText` a line. Raises InputError with the file, the line and the reason."""
    texts = tuple(validated(ForeignText, value, f"{path}:{number}") for number, value in json_lines(path))
    if not texts:
        raise InputError(f"{path}: no texts in it; write one JSON object with prompt and output a line")
    return texts


def audit_texts(
    target: LanguageModel, texts: Sequence[ForeignText], other: LanguageModel | None = None, *,
    max_tokens: int | None = None, progress: Progress = silent,
) -> ForeignAudit:  # fmt: skip
    """Judge greedy texts, of each the first `max_tokens`, source by source: identical, near ties, hard, inconclusive.

    Inconclusive is said of every source where noise is larger than rounding of the models' types can be
    (`measure.pair.ROUNDING`). A text without tokens is left out: its first one was the end. Raises InputError for a
    text that does not fit in the target's context.
    """
    forced, force_once = [], cache(partial(force, target, width=WIDTH, other=other))  # texts are often equal
    for number, text in enumerate(texts):
        progress(number, len(texts), f"{text.source} {text.id}".strip())
        prompt, output = prompt_ids(target, text.prompt), text.output
        ids = tuple(target.encode(output, special=False) if isinstance(output, str) else output)[:max_tokens]
        if not prompt or len(prompt) + len(ids) > target.caps.n_ctx:
            size, most = f"a prompt of {len(prompt)} tokens, {len(ids)} after it", target.caps.n_ctx
            raise InputError(f"text {text.id!r}: got {size}, expected 1 to {most} together: cut it, or raise n_ctx")
        if ids:
            forced.append((text, *force_once(prompt, ids)))
    if not forced:
        raise InputError("got no token after any prompt, expected one at least")
    noise, share = (float(np.quantile(np.concatenate(values), QUANTILE)) for values in [*zip(*forced, strict=True)][2:])
    coarsest = target.caps.lossless_dtype and (other is None or other.caps.lossless_dtype)
    sources = dict.fromkeys(text.source for text, *_ in forced)
    limit = 2 * noise if share <= ROUNDING[coarsest] else None
    verdicts = (_judge(source, [f for f in forced if f[0].source == source], limit) for source in sources)
    return ForeignAudit(tuple(verdicts), noise, share)


def _judge(source: str, forced: Sequence[tuple[Any, ...]], limit: float | None) -> SourceVerdict:
    """Count forks; `limit` is the largest margin of a near-tie, None where noise is no rounding."""
    margins = np.concatenate([margins for _, margins, *_ in forced])
    forks = [(text.id, index) for text, margins, *_ in forced for index in np.flatnonzero(margins)]
    verdict = "identical" if not forks else "inconclusive" if limit is None else "near ties"
    if limit is not None and margins.max() > limit:
        verdict = "hard"
    first = "{} token {}".format(*forks[0]).strip() if forks else ""
    return SourceVerdict(source, verdict, len(forced), len(margins), len(forks), float(margins.max()), first)
