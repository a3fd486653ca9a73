"""Choose how many tokens to draft in the next round, while generating.

A controller chooses a draft length before a round and may end drafting within it. It never sees the
target's verdict on the current block: a rule that did would change the output distribution.
Controllers do not depend on models, so the same object runs live (`loop.speculative`) and along a
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
    """Return the largest probability of softmax over raw logits `(vocab,)`: the drafter's confidence.

    >>> round(top_probability(np.log(np.array([0.5, 0.25, 0.25]))), 6)
    0.5
    """
    shifted = logits.astype(np.float64) - logits.max()
    return float(1.0 / np.exp(shifted).sum())


class RoundOutcome(NamedTuple):
    """A finished round: `n_accepted` of `k` draft tokens were accepted, and `text` was committed."""

    k: int
    n_accepted: int
    text: bytes


class Controller:
    """The interface; the defaults change nothing. `k_max` bounds every draft length."""

    name = "controller"
    k_max = 0
    reads_drafts = False
    """Whether `goes_on` and `worth_copying` are called. A confidence costs a softmax over the vocabulary per draft."""

    def start(self, prompt: bytes) -> None:
        """Start a new generation."""

    def draft_length(self) -> int:
        """Return K of the next round, 0 to `k_max`."""
        return self.k_max

    def goes_on(self, position: int, confidence: float) -> bool:
        """Return whether to verify the token drafted at 0-based `position` of the block.

        `confidence` is the largest probability of its row. False drops the token and ends drafting.
        """
        return True

    def enough(self, position: int) -> bool:
        """Return whether to end drafting after the token at `position`, before another row is computed."""
        return False

    def worth_copying(self, support: int, k: int) -> int:
        """Return how many of `k` tokens copied after a match of `support` tokens to verify (lookup)."""
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
    """The controller of the field report (its section 4): K follows the mean acceptance of recent rounds.

    Starts at 12 and stays within 4 and 24. If the mean rate of the last 128 rounds is above 0.80 it
    adds 4, below 0.60 it subtracts 4. A round without drafts counts as rate 0. The rates carry over
    from one generation to the next.
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
    """Draft while the drafter's largest probability, over the full vocabulary, is at least `p_min`."""

    reads_drafts = True

    def __init__(self, k_max: int, p_min: float = 0.75) -> None:
        self.k_max = k_max
        self.name = f"confidence >= {p_min:g}, K <= {k_max}"
        self._p_min = p_min

    def goes_on(self, position, confidence):
        return confidence >= self._p_min


class StoppingPicker(Picker):
    """Picks for a drafter until the controller ends drafting in this round."""

    def __init__(self, chooser: Picker, control: Controller) -> None:
        self.control = control
        self.enough = False
        self._chooser = chooser
        self._position = 0

    def pick(self, logits):
        picked = self._chooser.pick(logits)  # first, so that a row that is not finite is refused
        return picked if picked and self._goes_on(logits) else None

    def best(self, logits):
        token = self._chooser.best(logits)
        return token if token is not None and self._goes_on(logits) else None

    def _goes_on(self, logits: np.ndarray) -> bool:
        if not self.control.goes_on(self._position, top_probability(logits)):
            return False
        self.enough = self.control.enough(self._position)
        self._position += 1
        return True

    def copies(self, support, k):
        return self.control.worth_copying(support, k)


class WatchingPicker(Chooser):
    """Picks greedily and takes all copies; records the `beliefs` of rows and the `support` of a match.

    `beliefs` are the rows' largest probabilities, `support` is the length of the match in tokens.
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
