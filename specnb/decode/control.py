"""Controllers choose the draft length K of each round during generation.

A controller chooses K before a round, and may end drafting early within the round. It never sees
the target's verdict on the current round, because that would change the output distribution.
Controllers do not depend on models, so the same class runs live (`loop.speculative`) and along a
recording (`measure.replay`).
"""

from collections import deque
from numbers import Integral
from typing import NamedTuple

import numpy as np

from specnb.decode.sampling import Chooser, Sampling
from specnb.draft.base import Picker
from specnb.errors import require_number


def top_probability(logits: np.ndarray) -> float:
    """Return the largest softmax probability of raw logits `(vocab,)`: the drafter's confidence.

    >>> round(top_probability(np.log(np.array([0.5, 0.25, 0.25]))), 6)
    0.5
    """
    shifted = logits.astype(np.float64) - logits.max()
    return float(1.0 / np.exp(shifted).sum())


class RoundOutcome(NamedTuple):
    """A finished round: `n_accepted` of `k` draft tokens were accepted, `text` was committed."""

    k: int
    n_accepted: int
    text: bytes


class Controller:
    """Base class. By default, K is `k_max`, the largest draft length, in every round."""

    name = "controller"
    k_max = 0
    reads_drafts = False
    """True if `goes_on`, `enough` and `worth_copying` are called.

    The confidence for `goes_on` takes a softmax over the vocabulary per draft token."""

    def start(self, prompt: bytes) -> None:
        """Start a new generation; `prompt` is its text."""

    def draft_length(self) -> int:
        """Return K for the next round, 0 to `k_max`."""
        return self.k_max

    def goes_on(self, position: int, confidence: float) -> bool:
        """Return whether to verify the token drafted at `position` of the round, counted from 0.

        `confidence` is the largest probability of its row. False drops the token and ends drafting.
        """
        return True

    def enough(self, position: int) -> bool:
        """Return whether to end drafting after `position`, without computing another row."""
        return False

    def worth_copying(self, support: int, k: int) -> int:
        """Return how many of `k` copied tokens to verify after a match of `support` tokens."""
        return k

    def update(self, outcome: RoundOutcome) -> None:
        """Learn from a finished round."""


class FixedK(Controller):
    """The same K in every round."""

    def __init__(self, k: int) -> None:
        require_number("k", k, Integral, 0)
        self.k_max = k
        self.name = f"fixed K={k}"


class RollingAcceptance(Controller):
    """K follows the mean acceptance rate of recent rounds, as in section 4 of the field report.

    K starts at 12 and stays between 4 and 24. After each round, it rises by 4 if the mean rate of
    the last 128 rounds is above 0.80, and falls by 4 if it is below 0.60. A round without draft
    tokens counts as rate 0. K and the rates carry over from one generation to the next.
    """

    name = "rolling acceptance"
    k_max = 24
    k_min = 4

    def __init__(self) -> None:
        self._k = 12
        self._rates: deque[float] = deque(maxlen=128)

    def draft_length(self):
        return self._k

    def update(self, outcome):
        self._rates.append(outcome.n_accepted / outcome.k if outcome.k else 0.0)
        mean = sum(self._rates) / len(self._rates)
        step = 4 if mean > 0.80 else -4 if mean < 0.60 else 0
        self._k = max(self.k_min, min(self._k + step, self.k_max))


class ConfidenceStop(Controller):
    """Drafts up to `k_max` tokens, while the drafter's largest probability is at least `p_min`.

    The probability is that of a softmax over the full vocabulary, at temperature 1.
    """

    reads_drafts = True

    def __init__(self, k_max: int, p_min: float = 0.75) -> None:
        self.k_max = k_max
        self.name = f"confidence >= {p_min:g}, K <= {k_max}"
        self._p_min = p_min

    def goes_on(self, position, confidence):
        return confidence >= self._p_min


class StoppingPicker(Picker):
    """Picks tokens for a drafter until the controller ends drafting in this round."""

    def __init__(self, chooser: Picker, control: Controller) -> None:
        self.control = control
        self.enough = False
        self._chooser = chooser
        self._position = 0

    def pick(self, logits):
        picked = self._chooser.pick(logits)  # first, so that a non-finite row is detected
        if not (picked and self.control.goes_on(self._position, top_probability(logits))):
            return None
        self.enough = self.control.enough(self._position)
        self._position += 1
        return picked

    def copies(self, support, k):
        return self.control.worth_copying(support, k)


class WatchingPicker(Chooser):
    """Picks greedily, never ends drafting, and records what a controller would read.

    `beliefs` are the largest probabilities of the rows, `support` is the length of the match in
    tokens.
    """

    def __init__(self) -> None:
        super().__init__(Sampling())
        self.beliefs: list[float] = []
        self.support = 0

    def pick(self, logits):
        self.beliefs.append(top_probability(logits))
        return super().pick(logits)

    def copies(self, support, k):
        self.support = support
        return k
