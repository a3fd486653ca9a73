"""What rounds tell without a tensor: which drafts were kept, what they look like, and where in the text they were made.

Counts only; what they may mean is `triage`'s. Works with numpy alone, on the rounds of any engine.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import sqrt
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
import pandas as pd

from specnb.records import Generation

LEVEL = 0.95


class Share(NamedTuple):
    """`hits` of `n`, with the Wilson interval (1927) at LEVEL; rate NaN and the interval 0..1 where n is 0.

    Trials count as independent. Drafts of one text are not quite, so that whoever decides keeps a distance.
    """

    hits: int
    n: int
    rate: float
    low: float
    high: float

    @classmethod
    def of(cls, hits: int, n: int, level: float = LEVEL) -> "Share":
        if not n:
            return cls(hits, n, float("nan"), 0.0, 1.0)
        z2 = NormalDist().inv_cdf((1 + level) / 2) ** 2
        rate, width = hits / n, 1 + z2 / n
        middle = (rate + z2 / (2 * n)) / width
        spread = sqrt(z2 * rate * (1 - rate) / n + z2 * z2 / (4 * n * n)) / width
        return cls(hits, n, rate, max(0.0, min(rate, middle - spread)), min(1.0, max(rate, middle + spread)))

    def __str__(self) -> str:
        return f"{self.hits} of {self.n}"


@dataclass(frozen=True)
class First:
    """The first draft of each round that put one to the test, an array entry a round, in order of generation and text.

    `kept`; `position` tokens in front of the round, the prompt's among them; `generation` its index; `category` of it.
    """

    kept: np.ndarray
    position: np.ndarray
    generation: np.ndarray
    category: np.ndarray

    def share(self, chosen: np.ndarray) -> Share:
        return Share.of(int(self.kept[chosen].sum()), int(chosen.sum()))


@dataclass(frozen=True)
class Profile:
    """The drafting rounds of some generations (those with k = 0 say nothing); shares are over their drafts."""

    generations: tuple[Generation, ...]

    @cached_property
    def rounds(self) -> tuple:
        return tuple(r for g in self.generations for r in g.rounds if r.k)

    @cached_property
    def alpha(self) -> tuple[Share, ...]:
        """alpha_k for k = 1, 2, …: P(draft k kept, given that the k - 1 before it were). Of a tree k is the depth."""
        depth = max((r.n_tested for r in self.rounds), default=0)
        tested, kept = (
            [sum(getattr(r, name) > k for r in self.rounds) for k in range(depth)]
            for name in ("n_tested", "n_accepted")
        )
        return tuple(map(Share.of, kept, tested))

    @cached_property
    def total(self) -> Share:
        """Accepted of drafted tokens."""
        return Share.of(sum(r.n_accepted for r in self.rounds), sum(r.k for r in self.rounds))

    @cached_property
    def tested(self) -> Share:
        """Drafts kept of those put to the test: 1 where nothing was ever rejected."""
        return Share.of(sum(r.n_accepted for r in self.rounds), sum(r.n_tested for r in self.rounds))

    @cached_property
    def first(self) -> First:
        rows = [
            (r.n_accepted > 0, at, index, g.category)
            for index, g in enumerate(self.generations)
            for at, _, r in _drafting(g)
            if r.n_tested
        ]
        kept, position, generation, category = zip(*rows, strict=True) if rows else ((), (), (), ())
        return First(
            np.array(kept, bool), np.array(position, int), np.array(generation, int), np.array(category, object)
        )

    @cached_property
    def repeats(self) -> Share:
        """Neighbouring drafts of a chain that are the same token: all of them where each was drawn from one input."""
        pairs = [pair for r in self.rounds if not r.parents for pair in pairwise(r.draft_ids)]
        return Share.of(sum(a == b for a, b in pairs), len(pairs))

    @cached_property
    def all_equal(self) -> Share:
        """Chains of at least two drafts in which d1 = d2 = … = dK."""
        chains = [r for r in self.rounds if not r.parents and len(r.draft_ids) > 1]
        return Share.of(sum(len(set(r.draft_ids)) == 1 for r in chains), len(chains))

    @cached_property
    def echoes(self) -> Share:
        """Rounds whose first draft is the newest token of the text once more."""
        pairs = [(newest, r.draft_ids[0]) for g in self.generations for _, newest, r in _drafting(g) if r.draft_ids]
        return Share.of(sum(a == b for a, b in pairs), len(pairs))

    @cached_property
    def text_repeats(self) -> Share:
        """Neighbouring tokens of the texts, prompts included, that are the same: what a right drafter repeats."""
        return Share.of(
            sum(a == b for text in self._texts for a, b in pairwise(text)),
            sum(max(0, len(text) - 1) for text in self._texts),
        )

    @cached_property
    def commonest(self) -> tuple[int, Share, Share]:
        """The token that is most often the first draft, its share of the first drafts, and of the texts' tokens."""
        counts = Counter(r.draft_ids[0] for r in self.rounds if r.draft_ids)
        if not counts:
            return -1, Share.of(0, 0), Share.of(0, 0)
        token, hits = counts.most_common(1)[0]
        tokens = [t for text in self._texts for t in text]
        return token, Share.of(hits, counts.total()), Share.of(tokens.count(token), len(tokens))

    @cached_property
    def beyond_drafted(self) -> Share:
        """Generated tokens whose id is above every drafted id: none by chance, where ids are drafted from all."""
        highest = max((t for r in self.rounds for t in r.draft_ids), default=-1)
        tokens = [t for g in self.generations if any(r.k for r in g.rounds) for t in g.token_ids]
        return Share.of(sum(t > highest for t in tokens), len(tokens))

    @cached_property
    def _texts(self) -> tuple[tuple[int, ...], ...]:
        return tuple((*g.prompt_ids, *g.token_ids) for g in self.generations if any(r.k for r in g.rounds))

    def table(self) -> pd.DataFrame:
        """alpha by position: position (1..), alpha, low, high, kept, tested."""
        rows = [(k, s.rate, s.low, s.high, s.hits, s.n) for k, s in enumerate(self.alpha, 1)]
        return pd.DataFrame(rows, columns=["position", "alpha", "low", "high", "kept", "tested"])


def _drafting(generation: Generation) -> Iterator[tuple]:
    """Of each drafting round: tokens in front of it, the newest of them, the round."""
    at = len(generation.prompt_ids)
    newest = generation.prompt_ids[-1] if generation.prompt_ids else -1
    for r in generation.rounds:
        if r.k:
            yield at, newest, r
        at += len(r.committed_ids)
        newest = r.committed_ids[-1] if r.committed_ids else newest
