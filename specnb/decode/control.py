"""How many tokens to draft in the next round, decided while generating.

A controller chooses a draft length before a round and may end drafting within it. It never looks at the target's
verdict on the block in hand: a rule that did would change the distribution of what is generated. Controllers know
nothing of models, so the same object runs live (`loop.speculative`) and along a recording (`measure.replay`).
"""

from collections import deque
from numbers import Integral
from typing import NamedTuple

import numpy as np

from specnb.decode.sampling import Chooser, Sampling
from specnb.draft.base import Picker
from specnb.errors import require_number


class Belief(NamedTuple):
    """What a drafter's row says about itself: softmax of the raw logits over the full vocabulary, temperature 1.

    `top` is its largest probability, `entropy` its entropy in nats.
    """

    top: float
    entropy: float

    @classmethod
    def of(cls, logits: np.ndarray) -> "Belief":
        shifted = logits.astype(np.float64) - logits.max()
        weights = np.exp(shifted)
        total = weights.sum()
        # -sum p log p with p = w / total; a logit of -inf has weight 0 and adds nothing
        weighted = np.multiply(weights, shifted, where=weights > 0, out=np.zeros_like(weights)).sum() / total
        return cls(float(1.0 / total), float(np.log(total) - weighted))


class RoundOutcome(NamedTuple):
    """A finished round: `n_accepted` of `k` drafts were kept, and `text` was committed."""

    k: int
    n_accepted: int
    text: bytes


class Controller:
    """The interface, with answers that leave everything as it is. `k_max` bounds every draft length."""

    name = "controller"
    k_max = 0
    reads_drafts = False
    """Whether `goes_on` and `worth_copying` want to be asked; a belief costs a softmax over the vocabulary a draft."""

    def start(self, prompt: bytes) -> None:
        """A new generation begins; forget the last one."""

    def draft_length(self) -> int:
        """K of the next round, 0 to `k_max`."""
        return self.k_max

    def goes_on(self, position: int, belief: Belief) -> bool:
        """Whether the token drafted from this row, at 0-based `position` of the block, is to be verified.

        False drops it and ends drafting.
        """
        return True

    def enough(self, position: int) -> bool:
        """Whether drafting ends behind the token at `position`, before the drafter computes another row."""
        return False

    def worth_copying(self, support: int, k: int) -> int:
        """How many of `k` copied tokens to verify that followed a match of `support` tokens (lookup)."""
        return k

    def update(self, outcome: RoundOutcome) -> None:
        """A round has ended."""


class FixedK(Controller):
    """Always K."""

    def __init__(self, k: int) -> None:
        require_number("k", k, Integral, 0)
        self.k_max = k
        self.name = f"fixed K={k}"


class RollingAcceptance(Controller):
    """The controller of the field report (its section 4), to the letter: K follows the mean rate of recent rounds.

    Starts at 12, within 4 to 24; over the last 128 rounds' rates a mean above 0.80 adds 4, below 0.60 takes 4 away.
    A round without drafts counts as rate 0, and what was learned is kept from one generation to the next.
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
    """Draft while the drafter is sure: its largest probability, over the full vocabulary, is at least `p_min`.

    `cumulative` multiplies the probabilities along the block instead: the estimated chance that all of it is kept.
    """

    reads_drafts = True

    def __init__(self, k_max: int, p_min: float = 0.75, *, cumulative: bool = False) -> None:
        self.k_max, self._p_min, self._cumulative = k_max, p_min, cumulative
        self.name = f"{'cumulative ' * cumulative}confidence >= {p_min:g}, K <= {k_max}"
        self._sure = 1.0

    def goes_on(self, position, belief):
        before = self._sure if self._cumulative and position else 1.0
        self._sure = before * belief.top
        return self._sure >= self._p_min


class EntropyStop(Controller):
    """AdaEDL (2410.18351): draft while 1 - sqrt(gamma * H) >= `threshold`, a lower bound of the acceptance.

    H is the entropy of the drafter's row in nats. The paper moves the threshold with the acceptance: after each round
    the running rate alpha = beta1 alpha + (1 - beta1) rate is compared with `aim`; below it the threshold rises by
    `step`, above it falls, smoothed with beta2.
    """

    reads_drafts = True
    aim, step, beta1, beta2 = 0.9, 0.01, 0.5, 0.9

    def __init__(self, k_max: int, *, gamma: float = 0.2, threshold: float = 0.4) -> None:
        self.k_max = k_max
        self.name = f"entropy (AdaEDL), K <= {k_max}"
        self._gamma, self._first = gamma, threshold
        self.start(b"")

    def start(self, prompt):
        self._threshold, self._rate = self._first, self.aim

    def goes_on(self, position, belief):
        return 1.0 - np.sqrt(self._gamma * belief.entropy) >= self._threshold

    def update(self, outcome):
        if not outcome.k:
            return
        rate = outcome.n_accepted / outcome.k
        self._rate = self.beta1 * self._rate + (1 - self.beta1) * rate
        moved = self._threshold + (self.step if self._rate < self.aim else -self.step)
        self._threshold = self.beta2 * self._threshold + (1 - self.beta2) * moved


class StoppingPicker(Picker):
    """Picks for a drafter until the controller has seen enough of its rows in this round."""

    def __init__(self, chooser: Picker, control: Controller) -> None:
        self.control, self._chooser, self._position = control, chooser, 0
        self.enough = False

    def pick(self, logits):
        picked = self._chooser.pick(logits)  # first, so that a row that is not finite is refused
        return picked if picked and self._goes_on(logits) else None

    def best(self, logits):
        token = self._chooser.best(logits)
        return token if token is not None and self._goes_on(logits) else None

    def _goes_on(self, logits: np.ndarray) -> bool:
        if not self.control.goes_on(self._position, Belief.of(logits)):
            return False
        self.enough = self.control.enough(self._position)
        self._position += 1
        return True

    def copies(self, support, k):
        return self.control.worth_copying(support, k)


class WatchingPicker(Chooser):
    """Takes the best token of each row, and all copies; notes `beliefs` of rows, and `support`, a match's length."""

    def __init__(self) -> None:
        super().__init__(Sampling())
        self.beliefs: list[Belief] = []
        self.support = 0

    def pick(self, logits):
        self.beliefs.append(Belief.of(logits))
        return super().pick(logits)

    def copies(self, support, k):
        self.support = support
        return k
