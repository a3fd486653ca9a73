"""Two greedy runs that should be equal part ways: rounding, or a fault?

A forward of n tokens adds in another order than n forwards of one, so logits differ by rounding (the width noise).
Where the two best tokens are closer than that, either may win, and both are right. Anything else is a fault.
"""

from collections.abc import Sequence

import numpy as np
from pydantic import BaseModel, ConfigDict

from specnb.lm.base import LanguageModel


class Fork(BaseModel):
    """The first position where two token sequences differ, and how close the two candidates were there.

    `margin` is the distance of their logits in single steps, `noise` the largest difference between the logits of
    single steps and of blocks of `width` tokens on the way there. `near_tie`: margin <= 2 * noise.
    """

    model_config = ConfigDict(frozen=True)

    position: int
    token_ids: tuple[int, int]
    margin: float
    noise: float
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
    # the row that chose token `at` comes from feeding the token before it
    fed = [prompt_ids[-1], *a[:at]]
    single = _logits(target, prompt_ids, fed, 1)
    block = _logits(target, prompt_ids, fed, max(2, width))
    margin = abs(float(single[-1][a[at]]) - float(single[-1][b[at]]))
    noise = float(np.abs(single - block).max())
    return Fork(position=at, token_ids=(a[at], b[at]), margin=margin, noise=noise, near_tie=margin <= 2 * noise)


def _logits(target: LanguageModel, prompt_ids: Sequence[int], ids: Sequence[int], width: int) -> np.ndarray:
    target.reset()
    if len(prompt_ids) > 1:
        target.forward(prompt_ids[:-1], n_logits=0)
    rows = [target.forward(ids[i : i + width]) for i in range(0, len(ids), width)]
    target.reset()
    return np.concatenate(rows)
