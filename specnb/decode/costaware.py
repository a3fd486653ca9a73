"""The draft length that is worth its time, from measured costs and what was accepted lately."""

from collections.abc import Sequence

import numpy as np

from specnb.decode.control import Belief, Controller, Outcome
from specnb.errors import InputError


class CostAware(Controller):
    """Chooses the K with the most expected committed tokens a second; 0 where speculation does not pay.

    A round with K drafts takes verify_s[K + 1] + K draft_s and commits 1 + sum_j prod_{i<=j} alpha_i tokens (Leviathan
    et al. 2211.17192, with a measured cost curve in place of T(K + 1) = T(1) and an alpha for each position). Rounds in
    which the drafter has nothing to propose cost a plain step whatever K is; how often that happens is part of the
    rate that is maximised.

    alpha_j is estimated from the rounds that reached draft j, older ones fading with a memory of `memory` rounds,
    drawn to the estimate of the position before it, and the first to `prior`. Where the draft model says how sure it
    is, the estimate is also kept by its largest probability, and drafting ends at the token that is not worth
    verifying. While K is 0 nothing is learned, so it is tried again after `patience` tokens, ever later while it fails.
    What was learned is kept from one generation to the next.
    """

    name = "cost-aware"
    reads_drafts = True

    def __init__(
        self,
        verify_s: Sequence[float],
        draft_s: float = 0.0,
        *,
        prior: float = 0.7,
        weight: float = 2.0,
        memory: float = 40.0,
        patience: int = 12,
    ) -> None:
        """`verify_s[n]` are seconds of a target forward of n tokens, n = 0 to k_max + 1; `draft_s` of a draft."""
        if len(verify_s) < 2 or any(not seconds > 0 for seconds in verify_s[1:]) or draft_s < 0:
            raise InputError(
                f"costs must be positive, T(1) first after T(0): got T = {list(verify_s)[:4]}, draft {draft_s}"
            )
        self.k_max = len(verify_s) - 2
        self._verify = np.asarray(verify_s, dtype=float)
        self._draft, self._prior, self._weight = draft_s, prior, weight
        self._fade, self._patience = 1.0 - 1.0 / memory, patience
        self._kept, self._tested = np.zeros(self.k_max), np.zeros(self.k_max)
        self._offers = np.array([weight, weight])  # rounds with drafts, rounds that asked for some
        self._sure = _Calibration(weight, self._fade)
        self._plain, self._wait = 0, patience
        self._asked = 0
        self._reached, self._rate = 1.0, 0.0
        self._cheapest = _cheapest_ahead(self._verify)

    def draft_length(self) -> int:
        alpha = self._alpha()
        tokens = np.concatenate([[0.0], np.cumsum(np.cumprod(alpha))])  # expected drafts kept, K = 0..k_max
        seconds = self._verify[1:] + self._draft * np.arange(self.k_max + 1)
        share = self._offers[0] / self._offers[1]
        rates = (1 + share * tokens) / ((1 - share) * seconds[0] + share * seconds)
        best = int(np.argmax(rates))
        self._rate = float(rates[best])
        if best == 0 and self._plain >= self._wait and self.k_max:
            best = 1 + int(np.argmax(rates[1:]))
        self._asked, self._reached = best, 1.0
        self._sure.begin()
        return best

    def goes_on(self, position: int, belief: Belief) -> bool:
        self._reached *= self._sure.chance(belief.top)
        worth = self._reached >= self._rate * self._cheapest[position + 1]
        if not worth:
            self._sure.drop()
        return worth

    def update(self, outcome: Outcome) -> None:
        n_tested = min(outcome.n_accepted + 1, outcome.k)
        if outcome.k:
            self._kept *= self._fade
            self._tested *= self._fade
            self._tested[:n_tested] += 1
            self._kept[: outcome.n_accepted] += 1
            self._sure.learn(outcome.n_accepted, n_tested)
        if self._asked:
            self._offers = self._offers * self._fade + (outcome.k > 0, 1.0)
        self._reconsider(outcome)

    def _reconsider(self, outcome: Outcome) -> None:
        """How long to decode plainly before drafting is tried again."""
        if outcome.k == 0:
            self._plain += 1
            return
        if self._plain >= self._wait:  # this was a try
            self._wait = self._patience if outcome.n_accepted == outcome.k else min(2 * self._wait, 16 * self._patience)
        self._plain = 0

    def _alpha(self) -> np.ndarray:
        """alpha_j for each position, each drawn to the one before it."""
        alpha, before = np.empty(self.k_max), self._prior
        for j in range(self.k_max):
            before = (self._kept[j] + self._weight * before) / (self._tested[j] + self._weight)
            alpha[j] = before
        return alpha


class _Calibration:
    """How often drafts were kept, by the draft model's largest probability."""

    EDGES = (0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.97)

    def __init__(self, weight: float, fade: float) -> None:
        middles = np.array([0.05, 0.15, 0.28, 0.43, 0.58, 0.73, 0.85, 0.94, 0.99])
        self._kept, self._tested = weight * middles, np.full(len(middles), weight)
        self._fade, self._bins = fade, []

    def begin(self) -> None:
        self._bins = []

    def chance(self, top: float) -> float:
        """The estimated chance that the draft from this row is kept."""
        self._bins.append(int(np.searchsorted(self.EDGES, top)))
        return float(self._kept[self._bins[-1]] / self._tested[self._bins[-1]])

    def drop(self) -> None:
        """The last row's draft is not verified."""
        self._bins.pop()

    def learn(self, n_accepted: int, n_tested: int) -> None:
        for j, at in enumerate(self._bins[:n_tested]):
            self._kept[at] = self._kept[at] * self._fade + (j < n_accepted)
            self._tested[at] = self._tested[at] * self._fade + 1.0


def _cheapest_ahead(verify_s: np.ndarray) -> np.ndarray:
    """For each n >= 1 the least seconds a token, over all longer blocks, to go on from n tokens; index 0 unused."""
    n = len(verify_s)
    ahead = [min(((verify_s[m] - verify_s[i]) / (m - i) for m in range(i + 1, n)), default=0.0) for i in range(1, n)]
    return np.maximum(0.0, np.array([0.0, *ahead]))
