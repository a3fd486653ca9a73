"""Check whether another engine's greedy text is the target's own, by feeding it to the target.

A token that is not the most likely one of its row is a fork; its margin is the difference between
the two logits. The tokens are forced, so one fork does not cause others. Engines sum in different
orders, so nearly tied tokens may swap without a fault. What counts as nearly tied is measured
without a drafter, so a fault cannot excuse itself: `other`, the same weights in the dtype or engine
that wrote the texts, computes the same rows in blocks. An engine's text without drafts is the
`control` of its text with drafts. Forks in both are the engine's own. If drafts make forks more
frequent, that is a fault, however small the margins. Where a text ends is not judged. (llama.cpp
#25618, antirez/ds4 #756, vLLM RFC #54506)
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
from pydantic import BaseModel, ConfigDict

from specnb.decode.generate import prompt_ids
from specnb.draft.spelling import encode_exact
from specnb.errors import InputError
from specnb.io import json_lines, validated
from specnb.lm.base import LanguageModel
from specnb.lm.vocab import require_same
from specnb.measure.experiment import Progress, silent
from specnb.measure.fork import ROUNDING, force
from specnb.measure.intervals import NORMAL, wilson

CONTEXT = 16
"""Number of prompt tokens passed to the tokenizer as the context of an output."""
WIDTH = 5
"""Tokens per block for measuring noise."""
QUANTILE = 0.999
"""Quantile of the noise over all rows; twice its value is the largest margin of a near-tie."""
EXIT_CODES = {"identical": 0, "near ties": 0, "inconclusive": 125, "hard": 1}
"""Exit codes by verdict, the worst last."""


class ForeignText(BaseModel):
    """A prompt and its output, each as token ids or, less exactly, as text to encode.

    `source` names the engine and setting, `control` the source of the same engine without drafts.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str = ""
    source: str = ""
    control: str = ""
    prompt: str | tuple[int, ...]
    output: str | tuple[int, ...]


class SourceVerdict(NamedTuple):
    """The verdict on a source. `new`: number of forks not in its control. `margin`: the largest."""

    source: str
    verdict: str
    texts: int
    tokens: int
    forks: int
    new: int | None
    margin: float
    first: str


class ForeignAudit(NamedTuple):
    """One verdict per source; `limit`: largest margin of a near-tie, in logits, or None."""

    sources: list[SourceVerdict]
    limit: float | None
    line: str

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[max((source.verdict for source in self.sources), key=[*EXIT_CODES].index)]

    def document(self) -> dict[str, Any]:
        return self._asdict() | {"sources": [source._asdict() for source in self.sources]}


def read_texts(path: Path) -> list[ForeignText]:
    """Read a JSONL file, one `ForeignText` per line. Raises InputError.

    A text without an id is named after the first line with its prompt, so it matches its control.
    """
    texts, first = [], {}
    for number, value in json_lines(path):
        text = validated(ForeignText, value, f"{path}:{number}")
        name = text.id or f"line {first.setdefault(text.prompt, number)}"
        texts.append(text.model_copy(update={"id": name}))
    if not texts:
        raise InputError(
            f"{path}: got no texts, expected one JSON object with prompt and output per line"
        )
    return texts


def audit_texts(
    target: LanguageModel,
    texts: Sequence[ForeignText],
    other: LanguageModel | None = None,
    *,
    max_tokens: int | None = None,
    progress: Progress = silent,
) -> ForeignAudit:
    """Judge the first `max_tokens` of greedy texts, source by source.

    "identical": no fork. "near ties": all margins are at most twice the noise, and forks are no
    more frequent than in the control. "inconclusive": the noise is unknown, because the target's
    blocks are bit-identical to its single steps and there is no `other`, or it exceeds rounding
    (`measure.fork.ROUNDING`). "hard": everything else, such as margins that rounding explains in no
    dtype. Raises InputError for a text that does not fit the target, and VocabularyMismatch.
    """
    models = [target, other or target]
    require_same(*(model.vocab for model in models), names=[model.name for model in models])
    room = min(model.caps.n_ctx for model in models) + 1  # the last token is not fed
    keys = [_encode(target, text, room, max_tokens) for text in texts]
    # 1. Force each distinct prompt and output once: texts are often equal.
    forced = {}
    for number, (text, key) in enumerate(zip(texts, keys, strict=True)):
        progress(number, len(texts), f"{text.source} {text.id}".strip())
        prompt, ids = key
        if ids and key not in forced:
            rows, noise, ranges = force(
                target, prompt, [(token,) for token in ids], width=WIDTH, other=other
            )
            margins = [row.max() - row[0] for row in rows]
            columns = {
                "position": range(len(ids)),
                "token": ids,
                "margin": margins,
                "noise": noise,
                "range": ranges,
            }
            forced[key] = pd.DataFrame(columns)
    if not forced:
        raise InputError("got no output token in any text, expected at least one")
    # 2. How large are rounding errors?
    every = pd.concat(forced.values())
    noise = every["noise"].quantile(QUANTILE)
    share = (every["noise"] / every["range"]).quantile(QUANTILE)
    is_rounding = 0 < share <= ROUNDING[all(model.caps.lossless_dtype for model in models)]
    line = f"rounding moves logits by {noise:.2g}, {share:.2g} of a row's range"
    if not is_rounding:
        line += (
            f": {'too much' if share else 'unknown'}; "
            "give --other, the same weights in the engine's dtype"
        )
    limit = 2 * noise if is_rounding else None
    # 3. Judge each source.
    labeled = zip(texts, keys, strict=True)
    rows = pd.concat(
        forced[key].assign(id=text.id, source=text.source) for text, key in labeled if key in forced
    )
    controls = {text.source: text.control for text in texts}
    verdicts = [_judge(source, control, rows, limit) for source, control in controls.items()]
    return ForeignAudit(verdicts, limit, line)


def _encode(
    target: LanguageModel, text: ForeignText, room: int, max_tokens: int | None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the ids of the prompt and of the output that continues it. Raises InputError."""
    prompt = prompt_ids(target, text.prompt)
    ids = text.output
    if isinstance(ids, str):
        ids = encode_exact(
            target, target.vocab.raw_bytes(prompt[-CONTEXT:]), ids.encode(errors="surrogatepass")
        )
        if ids is None:
            raise InputError(
                f"text {text.id!r}: {target.name} cannot encode {text.output!r:.80}; give token ids"
            )
    ids = ids[:max_tokens]
    if (
        not prompt
        or len(prompt) + len(ids) > room
        or not set(prompt + ids) <= set(range(target.vocab.size))
    ):
        got = f"{len(prompt)} + {len(ids)} ids: {prompt + ids!s:.150}"
        raise InputError(
            f"text {text.id!r}: got {got}; expected 1 to {room} (n_ctx), below {target.vocab.size}"
        )
    return prompt, ids


def _judge(source: str, control: str, rows: pd.DataFrame, limit: float | None) -> SourceVerdict:
    """Judge a source's rows, one per token; `limit` as in `ForeignAudit`."""
    rows, plain = (rows[rows["source"] == name] for name in (source, control))
    forks, plain_forks = (part[part["margin"] > 0] for part in (rows, plain))
    # 1. Which forks occur only with drafts, and are forks more frequent with drafts?
    new, frequent = None, False
    if len(plain) and len(rows):
        same = plain_forks[["id", "position", "token"]].drop_duplicates()
        new = len(forks) - len(forks.merge(same))
        low, _ = wilson(len(forks) / len(rows), len(rows), NORMAL)
        _, high = wilson(len(plain_forks) / len(plain), len(plain), NORMAL)
        frequent = low > high
    # 2. Does rounding explain their margins?
    shares = forks["margin"] / forks["range"]
    explained = (
        shares.le(ROUNDING[False]).all() if limit is None else forks["margin"].le(limit).all()
    )
    if forks.empty:
        verdict = "identical"
    elif frequent or not explained:
        verdict = "hard"
    else:
        verdict = "inconclusive" if limit is None else "near ties"
    first = "{id} token {position}".format(**forks.iloc[0]) if len(forks) else ""
    margin = max([0.0, *forks["margin"]])
    return SourceVerdict(
        source, verdict, rows["id"].nunique(), len(rows), len(forks), new, margin, first
    )
