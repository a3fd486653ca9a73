"""What acceptance a verdict predicts, before anything is run, and the most that any draft could reach.

`reach` is the share of an ordinary text's tokens (as the target writes it) that the draft can put forward; `quality`
the chance that this draft is right about a token when it may write the target's own tokens. Then

    alpha = quality * reach,   tau = 1 + alpha + … + alpha^K,   acceptance = (tau - 1) / K        (Leviathan 2211.17192)

It assumes that tokens within reach are no easier to guess, that a draft is as good behind a token that it had to spell,
and that the text is an ordinary one. The second errs upwards: for SmolLM2-135M behind five families' tokens at K = 4,
greedy, the measured rate lies 0.00 to 0.11 below the predicted one on code and prose (notebook 03 prints both), and
0.08 to 0.17 below it on chats that edit.

The bound assumes nothing but `reach`: a token out of reach is never an accepted draft, so each takes a target call of
its own, and no call commits more than K + 1: tau <= min(K + 1, 1 / (1 - reach)).

`quality` comes from a run of the same draft in the target's vocabulary, or is 1, the best there can be.
"""

from collections.abc import Iterable
from typing import NamedTuple

from specnb.draft.token_map import Fit, Way
from specnb.records import Generation


class Prediction(NamedTuple):
    """`tau` tokens a target call; `acceptance_rate` is accepted / drafted, where K are drafted each time."""

    tau: float
    acceptance_rate: float


def reach_of(fit: Fit) -> float | None:
    """The share of an ordinary text's tokens that a draft can put forward; None where no tokenizer could count it.

    Strings reach every token: whatever text the draft writes is spelled in the target's tokens.
    """
    whole = {Way.SAME: 1.0, Way.STRINGS: 1.0, Way.NONE: 0.0}
    return whole.get(fit.way, fit.overlap.target_uses)


def predict(reach: float, k: int, quality: float = 1.0) -> Prediction:
    """The acceptance at draft length `k`, 1 or more; `reach` and `quality` are shares from 0 to 1."""
    alpha = reach * quality
    accepted = sum(alpha**j for j in range(1, k + 1))
    return Prediction(1 + accepted, accepted / k)


def bound(reach: float, k: int) -> float:
    """The most tokens that a target call can commit on average, where a share `reach` of the text can be drafted."""
    return k + 1.0 if reach * (k + 1) >= k else 1 / (1 - reach)


def chance_of(generations: Iterable[Generation]) -> float | None:
    """The chance that a draft was kept given that those before it were, over all rounds; None without a draft.

    Drafts behind the first wrong one of a round were not judged, and do not count; in a tree a position counts once.
    """
    rounds = [r for generation in generations for r in generation.rounds]
    judged = sum(r.n_tested for r in rounds)
    return sum(r.n_accepted for r in rounds) / judged if judged else None
