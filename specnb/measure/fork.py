"""Why greedy texts diverge: by rounding, or by a fault.

A forward pass over n tokens sums in a different order from n single steps, so logits differ
slightly by rounding (the noise). If the two best logits differ by less than that, either token may
be chosen. Any other divergence is a fault. Noise that exceeds the rounding of the model's dtype is
a fault, too; otherwise, a wrong pass over several tokens would count as noise.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
from pydantic import BaseModel

from specnb.draft.model import n_common
from specnb.lm.base import LanguageModel
from specnb.records import Generation

if TYPE_CHECKING:
    from specnb.measure.replay import ReplayStep

ROUNDING = {True: 1e-3, False: 0.1}
"""The largest noise that rounding explains, as a share of a row's range (largest minus median
logit), by whether the dtype is float32. On SmolLM2-135M, it is 1e-5 in float32, and at most 0.03 in
bfloat16 and with 4-bit weights."""


class TextFork(BaseModel, frozen=True):
    """The first position where two token sequences differ, and the logits of both tokens there.

    `margin` is the difference of the two logits in single steps. `noise` is the largest difference
    between passes over several tokens and single steps, in the two best logits of any row up to
    that position; `noise_share` is its largest share of a row's range. `near_tie` is True if the
    margin is at most 2 * noise and the noise is small enough to be rounding.
    """

    position: int
    token_ids: tuple[int, int]
    margin: float
    noise: float
    noise_share: float
    near_tie: bool

    def __str__(self) -> str:
        verdict = "a near-tie and no error" if self.near_tie else "an error"
        return (
            f"The text diverges from plain decoding at token {self.position}: "
            f"the two best logits differ by {self.margin:.2g}, "
            f"and passes over several tokens move logits by up to {self.noise:.2g} "
            f"({100 * self.noise_share:.2g} % of their range). This is {verdict}."
        )


def fork_of(target: LanguageModel, plain: Generation, drafted: Generation) -> TextFork | None:
    """Return where a greedy generation diverges from the plain one; None if one is a prefix."""
    width = drafted.k + 1
    return explain_fork(target, plain.prompt_ids, plain.token_ids, drafted.token_ids, width=width)


def explain_fork(
    target: LanguageModel,
    prompt_ids: Sequence[int],
    a: Sequence[int],
    b: Sequence[int],
    *,
    width: int,
) -> TextFork | None:
    """Measure margin and noise where two generations after `prompt_ids` diverge.

    Returns None if they do not diverge. Runs the target on the common tokens twice, in single steps
    and in passes over `width` tokens. Resets the target.
    """
    position = n_common(a, b)
    if position == min(len(a), len(b)):
        return None
    both = (a[position], b[position])
    watched = [*((token,) for token in a[:position]), both]
    rows, noises, ranges = force(target, prompt_ids, watched, width=max(2, width))
    margin = abs(float(rows[-1][0] - rows[-1][1]))
    noise = float(noises.max())
    share = float((noises / ranges).max())
    return TextFork(
        position=position,
        token_ids=both,
        margin=margin,
        noise=noise,
        noise_share=share,
        near_tie=margin <= 2 * noise and share <= ROUNDING[target.caps.lossless_dtype],
    )


def force(
    target: LanguageModel,
    prompt_ids: Sequence[int],
    watched: Sequence[tuple[int, ...]],
    *,
    width: int,
    other: LanguageModel | None = None,
) -> tuple[list[np.ndarray], np.ndarray, np.ndarray]:
    """Feed the first token of each item of `watched` after a prompt (teacher forcing).

    Returns rows, noise `(n,)` and ranges `(n,)`, one per item. A row contains the logits of the
    item's tokens, then of the two most likely tokens, in single steps. Noise is the largest change
    of these two logits in passes over `width` tokens (of `other`, if given). A range is the largest
    minus the median logit. Resets both models.
    """
    ids = [tokens[0] for tokens in watched[:-1]]
    top_two = []
    rows = []
    ranges = []
    for row, tokens in zip(_rows(target, prompt_ids, ids, 1), watched, strict=True):
        top_two.append(np.argpartition(row, -2)[-2:])
        rows.append(row[[*tokens, *top_two[-1]]])
        ranges.append(max(1e-9, float(row.max() - np.median(row))))
    wide_rows = _rows(other or target, prompt_ids, ids, width)
    wide = [row[best] for row, best in zip(wide_rows, top_two, strict=True)]
    single = np.array([row[-2:] for row in rows])
    return rows, np.abs(single - wide).max(axis=1), np.array(ranges)


def explain_draft(
    model: LanguageModel, live: Generation, replayed: "Sequence[ReplayStep]"
) -> TextFork | None:
    """Return the first token that `model` drafted differently live and in a replay, if any.

    After a fully accepted round, the live model processes two tokens in one pass, the replay one
    token; weights with few bits round these differently. Returns None also if only the number of
    draft tokens differs, because a controller stopped elsewhere. Rounds must be chains.
    """
    # 1. Find the first round that differs, and the tokens before the differing one.
    common = ()
    for live_round, step in zip(live.rounds, replayed, strict=False):
        if live_round.n_accepted != step.n_accepted:
            break
        common += live_round.committed_ids
    else:
        return None
    common += live_round.committed_ids[: min(live_round.n_accepted, step.n_accepted)]
    # 2. Find the rejected draft token: of the live round, or of the replay.
    accepted = rejected = live.token_ids[len(common)]
    if step.n_accepted > live_round.n_accepted < live_round.k:
        rejected = live_round.draft_ids[live_round.n_accepted]
    elif live_round.n_accepted > step.n_accepted < step.drafted:
        *_, row = _rows(model, live.prompt_ids, common, 1)
        rejected = int(row.argmax())
    return explain_fork(model, live.prompt_ids, (*common, accepted), (*common, rejected), width=2)


def _rows(
    target: LanguageModel, prompt_ids: Sequence[int], ids: Sequence[int], width: int
) -> Iterator[np.ndarray]:
    """Yield rows of logits after the prompt and each of `ids`, from passes over `width` tokens.

    The last pass is padded if the context allows it. Otherwise, a single remaining token would be a
    single step in both cases, without noise.
    """
    target.reset()
    yield target.forward(prompt_ids, n_logits=1)[0]
    fill = min(-len(ids) % width, target.caps.n_ctx - target.n_past - len(ids))
    fed = [*ids, *ids[-1:] * fill]
    for start in range(0, len(fed), width):
        yield from target.forward(fed[start : start + width])[: len(ids) - start]
    target.reset()
