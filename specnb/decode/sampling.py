"""Sampling settings, and the choice of a token from a row of logits: temperature, top-k, top-p and random draws.

Probability rows are float64. A row with NaN or +inf, or without a finite entry, raises an error. An
entry of -inf means that the token is never chosen. Ties go to the lowest id.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from numbers import Integral, Real
from typing import Any

import numpy as np

from specnb.draft.base import Picker
from specnb.errors import InputError, NonFiniteLogits, require_number


@dataclass(frozen=True)
class Sampling:
    """The settings that, with the models, determine the output; `temperature` 0 means greedy.

    Temperature, top-k and top-p turn logits into the distribution to sample from. `rule` verifies
    drafts: a name in `accept.RULES`, or such a callable. `seed` seeds the random draws.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    rule: str | Callable[..., Any] = "token"
    seed: int = 0

    def __post_init__(self) -> None:
        require_number("temperature", self.temperature, Real, 0, 100)
        require_number("top_k", self.top_k, Integral, 0)
        require_number("top_p", self.top_p, Real, 0, 1)
        require_number("seed", self.seed, Integral, 0)
        if not self.top_p:
            raise InputError(f"top_p must be above 0 and at most 1 (off), got {self.top_p}")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def probabilities(self, logits: np.ndarray) -> np.ndarray:
        """Return the float64 row `(vocab,)` to sample from: temperature, then top-k, then top-p.

        The row sums to 1. If greedy it is the point mass on the argmax. Raises NonFiniteLogits.
        """
        best = argmax(logits)
        if self.greedy:
            row = np.zeros(len(logits))
            row[best] = 1.0
            return row
        row = logits.astype(np.float64)
        row -= row[best]
        row /= self.temperature
        np.exp(row, out=row)
        if self.top_p < 1 or 0 < self.top_k < len(row):
            # rank by logits, not by the row, because exp maps close logits to 1.0
            order = np.argsort(-logits, kind="stable")[: self.top_k or None]
            mass = np.cumsum(row[order])
            # the smallest set whose mass reaches top_p, which always holds the best token
            nucleus = 1 + int(np.searchsorted(mass, self.top_p * mass[-1])) if self.top_p < 1 else len(order)
            kept = np.zeros_like(row)
            kept[order[:nucleus]] = row[order[:nucleus]]
            row = kept
        return row / row.sum()


class ProbRows:
    """Probability rows of logits `(n, vocab)`, each computed on first use."""

    def __init__(self, logits: np.ndarray, sampling: Sampling) -> None:
        self._row = cache(lambda index: sampling.probabilities(logits[index]))

    def __getitem__(self, index: int) -> np.ndarray:
        return self._row(index)


def argmax(logits: np.ndarray) -> int:
    """Return the index of the largest logit, the lowest among equals. Raises NonFiniteLogits.

    numpy's argmax stops at the first NaN and at +inf, so checking the winner finds every bad row.
    """
    best = int(np.argmax(logits))
    if not np.isfinite(logits[best]):
        raise NonFiniteLogits(f"the row of logits has {logits[best]} at token {best} as its largest entry")
    return best


class Draws:
    """The random draws of one generation, from an explicit generator.

    Every rule draws through `bernoulli` and `categorical`, so that a test can replace them and
    enumerate all outcomes. These two draw through `uniform`, so that draws can be recorded.
    """

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng

    def uniform(self) -> float:
        """Return a number from [0, 1)."""
        return self._rng.random()

    def bernoulli(self, probability: float) -> bool:
        """Return True with `probability`."""
        return bool(self.uniform() < probability)

    def categorical(self, weights: np.ndarray) -> int:
        """Return an index with probability proportional to `weights (n,)`, which need not sum to 1."""
        edges = np.cumsum(weights)
        index = int(np.searchsorted(edges, self.uniform() * edges[-1], side="right"))
        # rounding may point past the last entry: use the last one with weight
        return index if index < len(edges) else int(np.flatnonzero(weights)[-1])


class Chooser(Picker):
    """Picks tokens for a drafter or for plain decoding, with settings and draws (see `draft.base.Picker`).

    Without `draws`, new ones start from the settings' seed.
    """

    enough = False

    def __init__(self, sampling: Sampling, draws: Draws | None = None) -> None:
        self.sampling = sampling
        self.draws = draws or Draws(np.random.default_rng(sampling.seed))

    def pick(self, logits):
        """Return a token and the float64 row it was drawn from; the row is None if greedy."""
        if self.sampling.greedy:
            return argmax(logits), None
        row = self.sampling.probabilities(logits)
        return self.draws.categorical(row), row

    def best(self, logits):
        """Return the likeliest token. Raises NonFiniteLogits."""
        return argmax(logits)

    def copies(self, _support, k):
        """Return `k`: only a controller proposes fewer."""
        return k


class DraftChooser(Chooser):
    """Picks for a drafter. A row that is not finite ends drafting, and `failure` is the error.

    The drafts before that row stay, because dropping them would bias the output.
    """

    failure: NonFiniteLogits | None = None

    def pick(self, logits):
        try:
            return super().pick(logits)
        except NonFiniteLogits as error:
            self.failure = error
