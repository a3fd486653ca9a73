"""Sampling settings, and the choice of a token from a row of logits.

Probability rows are float64. A row that contains NaN or +inf, or no finite entry, raises
NonFiniteLogits. A logit of -inf means that the token is never chosen. Ties go to the lowest id.
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
    """Sampling settings. `temperature` 0 means greedy; `top_k` 0 and `top_p` 1 are off.

    `rule` is the acceptance rule of draft tokens: a name in `accept.RULES`, or an `accept.Rule`.
    `seed` seeds the random draws. Raises InputError for a value out of range.
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

        The row sums to 1. If greedy, it is a point mass at the argmax. Raises NonFiniteLogits.
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
            # the smallest set whose mass reaches top_p; it always contains the best token
            nucleus = (
                1 + int(np.searchsorted(mass, self.top_p * mass[-1]))
                if self.top_p < 1
                else len(order)
            )
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
    """Return the index of the largest logit, the lowest one of ties. Raises NonFiniteLogits.

    numpy's argmax returns the first NaN or else +inf, so checking its result detects every bad row.
    """
    best = int(np.argmax(logits))
    if not np.isfinite(logits[best]):
        raise NonFiniteLogits(f"the logits contain {logits[best]} (first at vocabulary id {best})")
    return best


class Draws:
    """The random draws of one generation, from an explicit generator.

    Every rule draws with `bernoulli` and `categorical`, so that a test can replace them and
    enumerate all outcomes. Both of them call `uniform`, so that draws can be recorded.
    """

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng

    def uniform(self) -> float:
        """Return a uniform random number in [0, 1)."""
        return self._rng.random()

    def bernoulli(self, probability: float) -> bool:
        """Return True with `probability`."""
        return bool(self.uniform() < probability)

    def categorical(self, weights: np.ndarray) -> int:
        """Return an index, drawn in proportion to `weights (n,)`, which need not sum to 1."""
        edges = np.cumsum(weights)
        index = int(np.searchsorted(edges, self.uniform() * edges[-1], side="right"))
        # rounding may give an index past the end: use the last entry with a nonzero weight
        return index if index < len(edges) else int(np.flatnonzero(weights)[-1])


class Chooser(Picker):
    """Picks tokens, for a drafter or for plain decoding (see `draft.base.Picker`).

    By default, `draws` are new and seeded by `sampling.seed`.
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

    def copies(self, _support, k):
        """Return `k`. Only controllers reduce it."""
        return k


class DraftChooser(Chooser):
    """Picks tokens for a drafter. A non-finite row ends drafting, and `failure` is its error.

    The draft tokens before that row remain, because dropping them would bias the output.
    """

    failure: NonFiniteLogits | None = None

    def pick(self, logits):
        try:
            return super().pick(logits)
        except NonFiniteLogits as error:
            self.failure = error
