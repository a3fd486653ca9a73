"""Run a random program once for each possible outcome of its draws, with the probability of each.

The program draws through `Draws` (bernoulli, categorical); each draw branches here. This enumerates
the shipped code itself, not a model of it.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable

import numpy as np


class Enumerating:
    """Draws of one branch: the scripted ones first, then always the first possible outcome.

    `others` are the scripts of the branches that leave this one after its script.
    """

    def __init__(self, script: list[int]) -> None:
        self.script, self.others = script, []
        self.taken: list[int] = []
        self.weight = 1.0

    def _decide(self, probabilities: list[float]) -> int:
        at = len(self.taken)
        if at < len(self.script):
            choice = self.script[at]
        else:
            choice, *others = (i for i, p in enumerate(probabilities) if p > 0.0)
            self.others += [[*self.taken, other] for other in others]
        self.taken.append(choice)
        self.weight *= probabilities[choice]
        return choice

    def bernoulli(self, probability: float) -> bool:
        return self._decide([1.0 - probability, probability]) == 1

    def categorical(self, weights: np.ndarray) -> int:
        return self._decide((np.asarray(weights) / np.sum(weights)).tolist())


def distribution(program: Callable[[Enumerating], Hashable]) -> dict[Hashable, float]:
    """Return the exact distribution of the results of `program(draws)`."""
    law: dict[Hashable, float] = defaultdict(float)
    scripts: list[list[int]] = [[]]
    while scripts:
        draws = Enumerating(scripts.pop())
        law[program(draws)] += draws.weight
        scripts += draws.others
    return dict(law)


def total_variation(a: dict[Hashable, float], b: dict[Hashable, float]) -> float:
    return 0.5 * sum(abs(a.get(x, 0.0) - b.get(x, 0.0)) for x in a.keys() | b.keys())
