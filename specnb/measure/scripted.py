"""A drafter whose acceptance is known beforehand: for measuring what rounds cost, not how good drafts are.

It draws the same drafts for whatever verifies them, so that ways of verifying and going back can be compared in pairs.
llama.cpp's `--spec-synth-rates` does the same in its benchmarks.
"""

from collections.abc import Sequence

import numpy as np

from specnb.draft.base import Picker, Proposal
from specnb.errors import InputError


class ScriptedDrafter:
    """Drafts the target's own continuation `truth`, each token right with probability `rate` until one is wrong.

    A wrong token is the next id in the vocabulary, and so are all behind it. `truth` must reach as far as the
    generation goes; where it ends, no more is drafted. Raises InputError for a rate outside 0 to 1.
    """

    vocab = None

    def __init__(self, truth: Sequence[int], rate: float, *, vocab_size: int, seed: int = 0) -> None:
        if not 0 <= rate <= 1:
            raise InputError(f"a rate of acceptance is 0 to 1, got {rate}")
        self.name = f"scripted, {rate:.0%} right"
        self._truth, self._rate, self._vocab_size, self._seed = truth, rate, vocab_size, seed
        self._prompt, self._draws = 0, np.random.default_rng(seed)

    def start(self, tokens: Sequence[int]) -> None:
        self._prompt = len(tokens)
        self._draws = np.random.default_rng(self._seed)

    def propose(self, tokens: Sequence[int], k: int, rng: Picker) -> Proposal:
        at = len(tokens) - self._prompt
        right = np.cumprod(self._draws.random(k) < self._rate)
        ahead = self._truth[at : at + k]
        return Proposal(tuple(t if ok else (t + 1) % self._vocab_size for t, ok in zip(ahead, right, strict=False)))

    def commit(self, tokens: Sequence[int]) -> None:
        """Nothing to keep in step: where the text stands is read from its length."""

    def close(self) -> None:
        """Nothing was opened."""
