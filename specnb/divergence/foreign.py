"""Is another engine's greedy text the target's own? Its tokens are fed through plain decoding, position by position.

A token that is not its row's likeliest is a fork; its margin is how much likelier the likeliest one is. Tokens are fed
whatever the target would have said, so one fork does not lead to others. Engines add in different orders, so tokens
that are nearly tied may change places without a fault. How close that is must be measured without any drafter, or a
fault would excuse itself: `other`, the same weights in the type or engine that wrote the texts, computes the same rows
in blocks. What an engine writes plainly is the `control` of what it writes with drafts: forks in both are its own, and
where drafts make forks more frequent, that is a fault, however close the tokens. Where a text ends is not judged.
(llama.cpp #25618, antirez/ds4 #756, vLLM RFC #54506)
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
from pydantic import BaseModel, ConfigDict

from specnb.decode.generate import prompt_ids
from specnb.draft.spelling import CONTEXT, encode_exact
from specnb.errors import InputError
from specnb.io import json_lines, validated
from specnb.lm.base import LanguageModel
from specnb.lm.vocab import require_same
from specnb.measure.bench import NORMAL, wilson
from specnb.measure.experiment import Progress, silent
from specnb.measure.fork import ROUNDING, force

WIDTH = 5
"""Tokens of the blocks that noise is measured with."""
QUANTILE = 0.999
"""Quantile of the noise of all rows; twice that is the largest margin of a near-tie."""
EXIT_CODES = {"identical": 0, "near ties": 0, "inconclusive": 125, "hard": 1}
"""By verdict, the worst last."""


class ForeignText(BaseModel):
    """A prompt and the output after it, each as token ids or, less exactly, as text, which is encoded again.

    `source` names what wrote it, `control` the source that is the same engine without drafts.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str = ""
    source: str = ""
    control: str = ""
    prompt: str | tuple[int, ...]
    output: str | tuple[int, ...]


class SourceVerdict(NamedTuple):
    """A source's verdict: `new` forks are not in its control; `margin` is the largest, `first` names the first fork."""

    source: str
    verdict: str
    texts: int
    tokens: int
    forks: int
    new: int | None
    margin: float
    first: str


class ForeignAudit(NamedTuple):
    """A verdict on each source; `limit`, in logits, is the largest margin of a near-tie, None where it is not known."""

    sources: list[SourceVerdict]
    limit: float | None
    line: str

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[max((source.verdict for source in self.sources), key=[*EXIT_CODES].index)]

    def document(self) -> dict[str, Any]:
        return self._asdict() | {"sources": [source._asdict() for source in self.sources]}


def read_texts(path: Path) -> list[ForeignText]:
    """Read a JSONL file, a `ForeignText` per line. Raises InputError.

    One without an id is named after the first line with its prompt, so that a source is compared with its control.
    """
    texts, first = [], {}
    for number, value in json_lines(path):
        text = validated(ForeignText, value, f"{path}:{number}")
        name = text.id or f"line {first.setdefault(text.prompt, number)}"
        texts.append(text.model_copy(update={"id": name}))
    if not texts:
        raise InputError(f"{path}: no texts in it; write one JSON object with prompt and output per line")
    return texts


def audit_texts(
    target: LanguageModel, texts: Sequence[ForeignText], other: LanguageModel | None = None, *,
    max_tokens: int | None = None, progress: Progress = silent,
) -> ForeignAudit:  # fmt: skip
    """Judge greedy texts, of each the first `max_tokens`, source by source.

    "identical": no fork. "near ties": all are closer than twice the noise, and no more frequent than in the control.
    "inconclusive": noise is not known, because the target's blocks have the bits of its single steps and there is no
    `other`; or it is more than rounding can be (`measure.fork.ROUNDING`). "hard": all else, and margins that no type's
    rounding explains. Raises InputError for a text that does not fit, VocabularyMismatch.
    """
    models = [target, other or target]
    require_same(*(model.vocab for model in models), names=[model.name for model in models])
    room = min(model.caps.n_ctx for model in models) + 1  # the last token is not fed
    keys = [_encode(target, text, room, max_tokens) for text in texts]
    fed, tables = {}, []  # texts are often equal
    for number, (text, key) in enumerate(zip(texts, keys, strict=True)):
        progress(number, len(texts), f"{text.source} {text.id}".strip())
        prompt, ids = key
        if not ids:
            continue
        if key not in fed:
            rows, noise, ranges = force(target, prompt, [(token,) for token in ids], width=WIDTH, other=other)
            margins = [row.max() - row[0] for row in rows]
            columns = {"position": range(len(ids)), "token": ids, "margin": margins, "noise": noise, "range": ranges}
            fed[key] = pd.DataFrame(columns)
        tables.append(fed[key].assign(id=text.id, source=text.source))
    if not fed:
        raise InputError("got no token after any prompt, expected one at least")
    every, rows = pd.concat(fed.values()), pd.concat(tables)
    noise, share = every["noise"].quantile(QUANTILE), (every["noise"] / every["range"]).quantile(QUANTILE)
    is_rounding = 0 < share <= ROUNDING[all(model.caps.lossless_dtype for model in models)]
    line = f"rounding moves logits by {noise:.2g}, {share:.2g} of a row's range"
    if not is_rounding:
        line += f": {'too much' if share else 'unknown'}; give --other, the weights as their engine computes them"
    controls = {text.source: text.control for text in texts}
    limit = 2 * noise if is_rounding else None
    verdicts = [_judge(source, control, rows, limit) for source, control in controls.items()]
    return ForeignAudit(verdicts, limit, line)


def _encode(
    target: LanguageModel, text: ForeignText, room: int, max_tokens: int | None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the ids of the prompt and of the output, which continues it. Raises InputError."""
    prompt, ids = prompt_ids(target, text.prompt), text.output
    if isinstance(ids, str):
        ids = encode_exact(target, target.vocab.raw_bytes(prompt[-CONTEXT:]), ids.encode(errors="surrogatepass"))
        if ids is None:
            raise InputError(f"text {text.id!r}: {target.name} cannot spell {text.output!r:.80}; give token ids")
    ids = ids[:max_tokens]
    if not prompt or len(prompt) + len(ids) > room or not set(prompt + ids) <= set(range(target.vocab.size)):
        got = f"{len(prompt)} + {len(ids)} ids: {prompt + ids!s:.150}"
        raise InputError(f"text {text.id!r}: got {got}; expected 1 to {room} (n_ctx), below {target.vocab.size}")
    return prompt, ids


def _judge(source: str, control: str, rows: pd.DataFrame, limit: float | None) -> SourceVerdict:
    """Judge a source's rows, a row a token; `limit` is the largest margin of a near-tie, None where it is not known."""
    rows, plain = rows[rows["source"] == source], rows[rows["source"] == control]
    forks, plain_forks = rows[rows["margin"] > 0], plain[plain["margin"] > 0]
    new, frequent = None, False
    if len(plain) and len(rows):
        same = plain_forks[["id", "position", "token"]].drop_duplicates()
        new = len(forks) - len(forks.merge(same))
        low, _ = wilson(len(forks) / len(rows), len(rows), NORMAL)
        _, high = wilson(len(plain_forks) / len(plain), len(plain), NORMAL)
        frequent = low > high
    shares = forks["margin"] / forks["range"]
    explained = shares.le(ROUNDING[False]).all() if limit is None else forks["margin"].le(limit).all()
    verdict = "hard" if frequent or not explained else "inconclusive" if limit is None else "near ties"
    if forks.empty:
        verdict = "identical"
    first = "{id} token {position}".format(**forks.iloc[0]) if len(forks) else ""
    margin = max([0.0, *forks["margin"]])
    return SourceVerdict(source, verdict, rows["id"].nunique(), len(rows), len(forks), new, margin, first)
