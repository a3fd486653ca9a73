"""Two greedy runs that should be equal part ways: rounding, or a fault?

A forward of n tokens adds in another order than n forwards of one, so logits differ by rounding (the width noise).
Where the two best tokens are closer than that, either may win, and both are right. Anything else is a fault, and a
block forward that is plainly wrong must not excuse itself with its own error: noise beyond what rounding can do in
the model's type is a fault too.
"""

from collections.abc import Iterator, Sequence

import numpy as np
from pydantic import BaseModel, ConfigDict

from specnb.lm.base import LanguageModel
from specnb.records import Generation

ROUNDING = {True: 1e-3, False: 0.1}
"""Most noise that rounding explains, as a share of a row's range (largest minus median logit): float32, coarser.
Measured on SmolLM2-135M: 1e-5 in float32, up to 0.03 in bfloat16 and with 4-bit weights."""


class Fork(BaseModel):
    """The first position where two token sequences differ, and how close the two candidates were there.

    `margin` is the distance of their logits in single steps; `noise` the largest difference that blocks of `width`
    tokens make to the two best logits of a row on the way there, and `noise_share` the same as a share of the row's
    range. `near_tie`: margin <= 2 * noise, and the noise is small enough to be rounding.
    """

    model_config = ConfigDict(frozen=True)

    position: int
    token_ids: tuple[int, int]
    margin: float
    noise: float
    noise_share: float
    near_tie: bool


def first_fork(a: Sequence[int], b: Sequence[int]) -> int | None:
    """First position where the sequences differ; None when one begins with the other."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)


def explain_fork(
    target: LanguageModel, prompt_ids: Sequence[int], a: Sequence[int], b: Sequence[int], *, width: int
) -> Fork | None:
    """Measure margin and noise at the first fork of two generations after `prompt_ids`; None when there is none.

    Runs the target twice over the common tokens, in single steps and in blocks of `width`. Resets it.
    """
    at = first_fork(a, b)
    if at is None:
        return None
    watched, single, ranges = [], [], []
    for row in _rows(target, prompt_ids, a[:at], 1):
        best = np.argpartition(row, -2)[-2:] if len(watched) < at else np.array([a[at], b[at]])
        watched.append(best)
        single.append(row[best])
        ranges.append(float(row.max() - np.median(row)))
    blocks = [row[ids] for row, ids in zip(_rows(target, prompt_ids, a[:at], max(2, width)), watched, strict=True)]
    differences = np.abs(np.array(single) - np.array(blocks)).max(axis=1)
    noise, share = float(differences.max()), float((differences / np.maximum(ranges, 1e-9)).max())
    margin = abs(float(single[-1][0] - single[-1][1]))
    near_tie = margin <= 2 * noise and share <= ROUNDING[target.caps.lossless_dtype]
    return Fork(position=at, token_ids=(a[at], b[at]), margin=margin, noise=noise, noise_share=share, near_tie=near_tie)


def explain_draft(model: LanguageModel, live: Generation, replayed: Sequence[tuple[int, int]]) -> Fork | None:
    """The first token that `model` drafted otherwise live than in a replay of (drafted, kept) a round, if there is one.

    Live it feeds two tokens at once after a fully accepted round, a replay feeds one; weights of few bits round these
    differently. None also where only the number of drafts differs: then a rule stopped elsewhere. Rounds are chains.
    """
    pairs = list(zip(live.rounds, replayed, strict=False))
    first = next((i for i, (live_round, (_, kept)) in enumerate(pairs) if live_round.n_accepted != kept), None)
    if first is None:
        return None
    live_round, (drafted, kept) = pairs[first]
    before = sum(earlier.n_accepted + 1 for earlier, _ in pairs[:first])
    common = live.token_ids[: before + min(live_round.n_accepted, kept)]
    right = live.token_ids[len(common)]
    if live_round.n_accepted < kept:
        wrong = (
            live_round.draft_ids[live_round.n_accepted] if live_round.n_accepted < len(live_round.draft_ids) else right
        )
    else:
        *_, row = _rows(model, live.prompt_ids, common, 1)
        wrong = int(row.argmax()) if kept < drafted else right
    return explain_fork(model, live.prompt_ids, (*common, right), (*common, wrong), width=2)


def _rows(target: LanguageModel, prompt_ids: Sequence[int], ids: Sequence[int], width: int) -> Iterator[np.ndarray]:
    """Rows of logits after the prompt and after each of `ids`, from forwards of `width` tokens, as decoding has them.

    The last forward is filled up as far as fits. Else one token left over would be a single step both times, and
    show no noise at all.
    """
    target.reset()
    yield target.forward(prompt_ids, n_logits=1)[0]
    if not ids:
        return target.reset()
    fill = min(-len(ids) % width, target.caps.n_ctx - target.n_past - len(ids))
    fed = [*ids, *[ids[-1]] * fill]
    for start in range(0, len(fed), width):
        yield from target.forward(fed[start : start + width])[: len(ids) - start]
    target.reset()
