"""The cost-aware controller: it chooses K by measured costs and recent acceptance rates."""

from collections.abc import Sequence

import numpy as np

from specnb.decode.control import Controller, RoundOutcome

TRY = 3
"""Number of rounds in a trial of drafting, made while plain decoding seems faster."""
LOSS = 0.01
"""Largest share of the time that trials may lose."""
PRIOR = 0.7
"""Prior acceptance rate of a draft token."""
WEIGHT = 2.0
"""Weight of a prior, in draft tokens."""
FADE = 1.0 - 1.0 / 60
"""Decay per round: estimates average about 60 rounds."""

TOP_EDGES = (0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.97)
TOP_PRIOR = (0.53, 0.58, 0.64, 0.71, 0.79, 0.86, 0.93, 0.97, 0.99)
"""Prior acceptance rates by the drafter's largest probability: halfway between it and 1.

Sampled draft tokens are accepted more often than this probability, greedy ones about as often.
"""

MATCH_EDGES = (1, 2, 3, 5, 8, 12, 20)
MATCH_PRIOR = (0.14, 0.36, 0.63, 0.79, 0.95, 0.96, 0.98, 0.99)
"""Prior acceptance rates by match length (1, 2, 3, 4-5, 6-8, ... tokens).

They were fitted on half of the shipped trace."""


class CostAware(Controller):
    """Drafts while a draft token is expected to save more time than it costs.

    A round with K draft tokens takes verify_s[K + 1] + K draft_s seconds. The expected number of
    committed tokens is 1 + sum_{j<=K} prod_{i<=j} alpha_i (Leviathan et al. 2211.17192, with a
    measured cost curve instead of T(K + 1) = T(1), and one alpha per position). How K is chosen
    depends on the drafter. `rate` is the tokens per second of recent drafting rounds.

    * Prompt lookup: acceptance rates are learned by match length, which grows by 1 with each
      accepted token. n tokens are verified, where n maximizes the expected number of accepted
      tokens minus rate * (T(n + 1) - T(1)).
    * Draft model or trained heads: acceptance rates are learned by the row's largest probability.
      Let P be the probability that a token is reached and accepted. The token is verified if P pays
      for the wider forward pass (P >= rate * slope of T). Another token is drafted if P times the
      alpha of the next position also pays for the draft step.
    * Any other drafter: K maximizes the expected rate.

    Estimates decay toward optimistic priors, because nothing is learned from tokens that are not
    drafted. If plain decoding is faster, K is 0. Drafting is tried again for TRY rounds after
    `patience` tokens, or later if a trial lost time, so that trials lose at most the share LOSS of
    the time. Estimates carry over from one generation to the next.
    """

    name = "cost-aware"
    reads_drafts = True

    def __init__(
        self,
        verify_s: Sequence[float] | np.ndarray,
        draft_s: float = 0.0,
        *,
        patience: int = 16,
        expected: Sequence[float] = (),
    ) -> None:
        """Set the costs.

        `verify_s[n]` is T(n), the time of a target forward pass over n tokens, 0 <= n <= k_max + 1.
        `draft_s` is the time of one draft step. Both are in seconds, or both in plain steps.
        `expected` are the prior acceptance rates by position, by default PRIOR.
        """
        self.k_max = len(verify_s) - 2
        self._verify = np.asarray(verify_s, dtype=float)
        self.draft_s = draft_s
        self._patience = patience
        self._positions = Positions(self.k_max, expected)
        self.remeasure()
        self._calibration = Calibration(TOP_EDGES, TOP_PRIOR)
        self._copied = Calibration(MATCH_EDGES, MATCH_PRIOR)
        # tokens and seconds of recent drafting rounds
        self._recent = np.array([1 + PRIOR, self._verify[1]]) * WEIGHT
        self._plain = 0  # tokens since drafting stopped
        self._trying = 0  # remaining rounds of a trial
        self._lost = 0.0  # time lost by the last trial, in plain steps
        self._rate = 0.0
        self.start(b"")

    def remeasure(self) -> None:
        """Recompute `_slope` after a router has corrected `verify_s`.

        `_slope[n]` is the smallest time per additional token of extending a forward pass over n
        tokens to any wider one, at least 0. Index 0 is unused.
        """
        t = self._verify
        self._slope = np.zeros(len(t))
        for n in range(1, len(t) - 1):
            wider = np.arange(n + 1, len(t))
            self._slope[n] = max(0.0, ((t[wider] - t[n]) / (wider - n)).min())

    def seed_rate(self) -> None:
        """Set the recent rate to the one that the prior acceptance rates predict."""
        self._recent[0] = self._positions.rates(self._verify, self.draft_s).max() * self._recent[1]

    def start(self, prompt):
        """Start a generation: keep the estimates, and detect again what the drafter reports."""
        self._copying = False
        self._steps = 0
        self._reached = 1.0
        # calibration bins of this round's draft tokens; None if the drafter reports nothing
        self._bins: list[int] | None = None

    def draft_length(self):
        if self._copying:
            self._bins = []
            return self.k_max
        plain = 1.0 / self._verify[1]
        rates = self._positions.rates(self._verify, self.draft_s)
        if self._bins is None:
            best = int(np.argmax(rates))
            self._rate = float(rates.max())
        else:
            self._bins = []
            best, self._rate = (
                (self.k_max, self.recent_rate) if self.recent_rate > plain else (0, plain)
            )
        self._steps = 0
        self._reached = 1.0
        if best:
            self._plain = 0
            self._trying = 0
            self._lost = 0.0
            return best
        if self._trying == 0 and self._plain >= max(self._patience, self._lost / LOSS):
            self._trying = TRY
            self._lost = 0.0
        if self._trying == 0 or not self.k_max:
            return 0
        self._trying -= 1
        self._plain = 0
        return 1 + int(np.argmax(rates[1:]))

    def goes_on(self, position, confidence):
        self._bins = self._bins or []
        self._steps += 1
        at = self._calibration.bin(confidence)
        self._reached *= self._calibration.chance(at)
        if self._reached < self._rate * self._slope[position + 1]:
            self._calibration.forget(at)
            return False
        self._bins.append(at)
        return True

    def worth_copying(self, support, k):
        self._copying = True
        bins = [self._copied.bin(support + j) for j in range(min(k, self.k_max))]
        if not bins:
            return 0
        reached = np.cumprod([*map(self._copied.chance, bins)])
        rate = max(self.recent_rate, 1.0 / self._verify[1])
        rise = self._verify[1 : len(bins) + 2] - self._verify[1]
        best = int(np.argmax(np.concatenate([[0.0], np.cumsum(reached)]) - rate * rise))
        self._bins = bins[:best]
        if not best:
            self._copied.forget(bins[0])
        return best

    def enough(self, position):
        if position + 2 >= len(self._slope):
            return True
        expected = self._reached * self._positions.alpha[min(position + 1, self.k_max - 1)]
        return expected < self._rate * (self.draft_s + self._slope[position + 2])

    def update(self, outcome):
        self._plain += outcome.n_accepted + 1
        self._positions.learn(outcome)
        if self._bins is not None:
            (self._copied if self._copying else self._calibration).learn(
                self._bins, outcome.n_accepted
            )
        if outcome.k or self._steps or self._copying:
            seconds = self._verify[outcome.k + 1] + self.draft_s * max(self._steps, outcome.k)
            self._recent = self._recent * FADE + (outcome.n_accepted + 1, seconds)
            self._lost += seconds / self._verify[1] - (outcome.n_accepted + 1)
        # A router may report a round for which it asked for no draft length: nothing was drafted.
        self._steps = 0
        if self._bins:
            self._bins = []

    @property
    def recent_rate(self) -> float:
        """Tokens per second of recent drafting rounds."""
        return float(self._recent[0] / self._recent[1])


class Positions:
    """Acceptance rates by position, and the share of rounds with draft tokens."""

    def __init__(self, k_max: int, expected: Sequence[float]) -> None:
        """Set the prior rates by position; the last of `expected` holds for all later positions."""
        self._kept = np.zeros(k_max)
        self._tested = np.zeros(k_max)
        self._offers = np.array([WEIGHT, WEIGHT])  # rounds with draft tokens, all rounds
        self._expected = np.pad(expected, (0, k_max), "edge")[:k_max] if len(expected) else None
        self.alpha = np.full(k_max, PRIOR) if self._expected is None else self._expected.copy()

    def learn(self, outcome: RoundOutcome) -> None:
        self._offers = self._offers * FADE + (outcome.k > 0, 1.0)
        if not outcome.k:
            return
        self._kept *= FADE
        self._tested *= FADE
        self._kept[: outcome.n_accepted] += 1
        self._tested[: min(outcome.n_accepted + 1, outcome.k)] += 1
        before = PRIOR
        for j, (kept, tested) in enumerate(zip(self._kept, self._tested, strict=True)):
            # without `expected`, the prior is the estimate of the previous position
            prior = before if self._expected is None else self._expected[j]
            self.alpha[j] = before = (kept + WEIGHT * prior) / (tested + WEIGHT)

    def rates(self, verify_s: np.ndarray, draft_s: float) -> np.ndarray:
        """Return the expected tokens per second for K = 0 to k_max, `(k_max + 1,)`."""
        tokens = np.concatenate([[0.0], np.cumsum(np.cumprod(self.alpha))])
        seconds = verify_s[1:] + draft_s * np.arange(len(tokens))
        share = self._offers[0] / self._offers[1]
        return (1 + share * tokens) / ((1 - share) * seconds[0] + share * seconds)


class Calibration:
    """Acceptance rates by a quantity known before verification: a probability or a match length."""

    def __init__(self, edges: Sequence[float], prior: Sequence[float]) -> None:
        self._edges = edges
        self._prior = prior
        self._kept = np.zeros(len(prior))
        self._tested = np.zeros(len(prior))

    def bin(self, value: float) -> int:
        return int(np.searchsorted(self._edges, value))

    def chance(self, at: int) -> float:
        return float((self._kept[at] + WEIGHT * self._prior[at]) / (self._tested[at] + WEIGHT))

    def learn(self, bins: Sequence[int], n_accepted: int) -> None:
        for j, at in enumerate(bins[: n_accepted + 1]):  # later ones were not tested
            self.forget(at)
            self._kept[at] += j < n_accepted
            self._tested[at] += 1.0

    def forget(self, at: int) -> None:
        """Decay a bin toward its prior, so that one whose tokens are dropped is tested again."""
        self._kept[at] *= FADE
        self._tested[at] *= FADE


def break_even(rounds: Sequence[float]) -> float:
    """Return the acceptance rate, equal at all positions, above which a K pays; NaN if none does.

    `rounds[k - 1]` is the cost of a round with k draft tokens, in plain steps. Leviathan et al.
    2211.17192, equation 1.

    >>> round(break_even([1.5, 2.0]), 1)
    0.5
    """
    alphas = np.linspace(0, 0.995, 200)[:, None]
    ks = np.arange(1, len(rounds) + 1)
    speeds = ((1 - alphas ** (ks + 1)) / (1 - alphas) / np.asarray(rounds)).max(axis=1)
    return float(alphas[np.argmax(speeds > 1), 0]) if speeds[-1] > 1 else float("nan")
