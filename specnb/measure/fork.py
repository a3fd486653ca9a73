"""Why do greedy texts diverge: by rounding, or by a fault?

A forward pass over n tokens adds in another order than n single steps, so logits differ by rounding (the width noise).
Where the two best tokens are closer than that, either may win. Any other divergence is a fault, and so is noise beyond
the rounding of the model's type: a wrong pass over several tokens must not excuse itself.
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
"""Most noise that rounding explains, as a share of a row's range (largest minus median logit): float32, coarser.
Measured on SmolLM2-135M: 1e-5 in float32, up to 0.03 in bfloat16 and with 4-bit weights."""


class TextFork(BaseModel, frozen=True):
    """The first position where two token sequences differ, and how close the two candidates were there.

    `margin` is the distance of their logits in single steps. `noise` is the largest difference between passes over
    several tokens and single steps in the two best logits of a row up to there, `noise_share` its share of the row's
    range. `near_tie`: margin <= 2 * noise, and the noise is small enough to be rounding.
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
            f"The text diverges from plain decoding at token {self.position}: the two best logits differ by "
            f"{self.margin:.2g}, and passes over several tokens move logits by up to {self.noise:.2g} "
            f"({100 * self.noise_share:.2g} % of their range). This is {verdict}."
        )


def fork_of(target: LanguageModel, plain: Generation, drafted: Generation) -> TextFork | None:
    """The fork of a greedy generation from the plain one of the same prompt; None where one begins with the other."""
    return explain_fork(target, plain.prompt_ids, plain.token_ids, drafted.token_ids, width=drafted.k + 1)


def explain_fork(
    target: LanguageModel, prompt_ids: Sequence[int], a: Sequence[int], b: Sequence[int], *, width: int
) -> TextFork | None:
    """Measure margin and noise at the first fork of two generations after `prompt_ids`; None when there is none.

    Runs the target twice over the common tokens, in single steps and in blocks of `width`. Resets it.
    """
    if (at := n_common(a, b)) == min(len(a), len(b)):
        return None
    watched = [*((token,) for token in a[:at]), (a[at], b[at])]
    rows, moved, ranges = force(target, prompt_ids, watched, width=max(2, width))
    margin, noise, share = abs(float(rows[-1][0] - rows[-1][1])), float(moved.max()), float((moved / ranges).max())
    near_tie = margin <= 2 * noise and share <= ROUNDING[target.caps.lossless_dtype]
    return TextFork(
        position=at, token_ids=(a[at], b[at]), margin=margin, noise=noise, noise_share=share, near_tie=near_tie
    )


def force(
    target: LanguageModel, prompt_ids: Sequence[int], watched: Sequence[tuple[int, ...]], *, width: int,
    other: LanguageModel | None = None,
) -> tuple[list[np.ndarray], np.ndarray, np.ndarray]:  # fmt: skip
    """Feed the first of each of `watched` after a prompt, whatever the target would say: rows, noise and ranges.

    A row holds the logits, in single steps, of its watched tokens and of its two likeliest. Noise `(n,)` is how far
    blocks of `width` tokens (of `other`, where given) move the two likeliest; a row's range is its largest logit less
    its median, `(n,)`. Resets both models.
    """
    ids, likeliest, rows, ranges = [tokens[0] for tokens in watched[:-1]], [], [], []
    for row, tokens in zip(_rows(target, prompt_ids, ids, 1), watched, strict=True):
        likeliest.append(np.argpartition(row, -2)[-2:])
        rows.append(row[[*tokens, *likeliest[-1]]])
        ranges.append(max(1e-9, float(row.max() - np.median(row))))
    blocks = [row[best] for row, best in zip(_rows(other or target, prompt_ids, ids, width), likeliest, strict=True)]
    return rows, np.abs(np.array([row[-2:] for row in rows]) - blocks).max(axis=1), np.array(ranges)


def explain_draft(model: LanguageModel, live: Generation, replayed: "Sequence[ReplayStep]") -> TextFork | None:
    """The first token that `model` drafted otherwise live than in a replay, if there is one.

    Live it feeds two tokens at once after a fully accepted round, a replay feeds one; weights of few bits round these
    differently. None also where only the number of drafts differs: then a rule stopped elsewhere. Rounds are chains.
    """
    common = ()
    for live_round, step in zip(live.rounds, replayed, strict=False):
        if live_round.n_accepted != step.n_accepted:
            break
        common += live_round.committed_ids
    else:
        return None
    common += live_round.committed_ids[: min(live_round.n_accepted, step.n_accepted)]
    right = wrong = live.token_ids[len(common)]
    if step.n_accepted > live_round.n_accepted < live_round.k:
        wrong = live_round.draft_ids[live_round.n_accepted]
    elif live_round.n_accepted > step.n_accepted < step.drafted:
        *_, row = _rows(model, live.prompt_ids, common, 1)
        wrong = int(row.argmax())
    return explain_fork(model, live.prompt_ids, (*common, right), (*common, wrong), width=2)


def _rows(target: LanguageModel, prompt_ids: Sequence[int], ids: Sequence[int], width: int) -> Iterator[np.ndarray]:
    """Rows of logits after the prompt and after each of `ids`, from forwards of `width` tokens, as decoding has them.

    The last forward is filled up as far as fits. Else one token left over would be a single step both times, and
    show no noise at all.
    """
    target.reset()
    yield target.forward(prompt_ids, n_logits=1)[0]
    fill = min(-len(ids) % width, target.caps.n_ctx - target.n_past - len(ids))
    fed = [*ids, *ids[-1:] * fill]
    for start in range(0, len(fed), width):
        yield from target.forward(fed[start : start + width])[: len(ids) - start]
    target.reset()
