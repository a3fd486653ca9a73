"""Run a random program once for every way its draws can fall, with the probability of each way.

The program takes its decisions through `Draws` (bernoulli, categorical); here each decision forks. So what is
enumerated is the shipped code itself, not a model of it.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable

import numpy as np

Choice = tuple[int, list[float]]


class Enumerating:
    """Takes the decisions of one branch: the scripted ones first, then always the first that has weight."""

    def __init__(self, script: list[int]) -> None:
        self.script = script
        self.taken: list[Choice] = []

    def _decide(self, probabilities: list[float]) -> int:
        at = len(self.taken)
        choice = self.script[at] if at < len(self.script) else _next_possible(probabilities, -1)
        self.taken.append((choice, probabilities))
        return choice

    def bernoulli(self, probability: float) -> bool:
        return self._decide([1.0 - probability, probability]) == 1

    def categorical(self, weights: np.ndarray) -> int:
        return self._decide((np.asarray(weights) / np.sum(weights)).tolist())


def _next_possible(probabilities: list[float], after: int) -> int | None:
    return next((i for i in range(after + 1, len(probabilities)) if probabilities[i] > 0.0), None)


def distribution(program: Callable[[Enumerating], Hashable]) -> dict[Hashable, float]:
    """Exact distribution of what `program(draws)` returns."""
    law: dict[Hashable, float] = defaultdict(float)
    script: list[int] | None = []
    while script is not None:
        draws = Enumerating(script)
        result = program(draws)
        law[result] += float(np.prod([p[c] for c, p in draws.taken]))
        script = _following(draws.taken)
    return dict(law)


def _following(taken: list[Choice]) -> list[int] | None:
    """The next branch in order: advance the last decision that has another possibility, drop what came after it."""
    for at in range(len(taken) - 1, -1, -1):
        choice, probabilities = taken[at]
        following = _next_possible(probabilities, choice)
        if following is not None:
            return [c for c, _ in taken[:at]] + [following]
    return None


def total_variation(a: dict[Hashable, float], b: dict[Hashable, float]) -> float:
    return 0.5 * sum(abs(a.get(x, 0.0) - b.get(x, 0.0)) for x in a.keys() | b.keys())
