"""What heads did in served rounds, and whether it is what they are right about offline: alpha, and round by round."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch

from specnb.lm.base import LanguageModel
from specnb.measure.stats import Interval
from specnb.medusa.accuracy import Scores, alpha_table, score, share_interval, trace
from specnb.medusa.heads import Heads
from specnb.records import Generation

NEAR_TIE = 1e-4
"""A first choice that leads by less than this share of its logit may differ between two float32 forwards."""
HALF_TIES = 4
"""The same in units of a 16-bit type's spacing: state and logit are each rounded once, on both sides."""
HALF_UNEXPLAINED = 0.01
"""Share of rounds that may differ otherwise in 16-bit types, where a state may differ in many of its digits."""


def served_counts(generation: Generation) -> np.ndarray:
    """Of the rounds of one greedy generation: `(positions, 2)`, drafts kept and drafts tested by position.

    Of a tree the drafts at one depth are one position.
    """
    counts = np.zeros((max((r.n_tested for r in generation.rounds), default=0), 2))
    for r in generation.rounds:
        counts[: r.n_accepted, 0] += 1
        counts[: r.n_tested, 1] += 1
    return counts


def served_alpha(generations: Sequence[Generation], *, level: float = 0.95) -> pd.DataFrame:
    """`heads.alpha_table` of the rounds of greedy generations."""
    return alpha_table([served_counts(one) for one in generations], level)


class Compared(NamedTuple):
    """Rounds that drafted; how many of them accepted otherwise than scored, at near-ties and `apart` from any.

    `right` counts the rounds whose first draft is offline the right token.
    """

    rounds: int = 0
    near_ties: int = 0
    apart: int = 0
    right: int = 0


class Served(NamedTuple):
    """Chains against the scores of their texts; `alpha_1` and `offline` are of the same rounds, one paired with one.

    `identical` of the chains are the plain texts.
    """

    compared: Compared
    alpha_1: Interval
    offline: Interval
    identical: int

    @property
    def agree(self) -> bool:
        """Whether the interval of alpha_1 holds the offline accuracy; one of too few prompts excludes nothing."""
        return not (self.alpha_1.low > self.offline.value or self.alpha_1.high < self.offline.value)


def near_tie(target: LanguageModel, heads: Heads) -> float:
    """The lead of a first choice, as a share of its logit, below which two forwards may choose differently."""
    return NEAR_TIE if target.caps.lossless_dtype else HALF_TIES * torch.finfo(heads.shared_lm_head.dtype).eps


def allowed_apart(target: LanguageModel, rounds: int) -> float:
    """Rounds that may accept otherwise than scored although the choice was clear."""
    return 0 if target.caps.lossless_dtype else HALF_UNEXPLAINED * rounds


def compare(
    target: LanguageModel,
    heads: Heads,
    plain: Sequence[Generation],
    chains: Sequence[Generation],
    scores: Sequence[Scores],
) -> Served:
    """Hold the rounds of greedy chains against `scores` along the plain texts of the same prompts.

    Where rounding made the chain's text another than the plain one, the chain's own text is scored.
    """
    found = []
    for alone, chain, scored in zip(plain, chains, scores, strict=True):
        own = scored if chain.token_ids == alone.token_ids else score(heads, trace(target, chain))
        found.append(compare_rounds(chain, own, near_tie(target, heads)))
    first = [counts[0] for one in chains if len(counts := served_counts(one))]
    return Served(
        Compared(*map(sum, zip(*found, strict=True))),
        share_interval(first),
        share_interval([(one.right, one.rounds) for one in found]),
        sum(a.token_ids == b.token_ids for a, b in zip(plain, chains, strict=True)),
    )


def compare_rounds(chain: Generation, scored: Scores, ties: float) -> Compared:
    """Each round of a greedy chain must accept what the heads are offline right about.

    A round behind j + 1 tokens is row j of the scores, so rounds are compared one by one and nothing is estimated.
    """
    rounds = near = apart = right = done = 0
    for r in chain.rounds:
        row, done = done - 1, done + len(r.committed_ids)
        if not r.k:
            continue
        rank = scored.rank[row, : r.k]
        expected = int(np.logical_and.accumulate(rank == 0).sum())  # behind the end of the text no rank is 0
        rounds, right = rounds + 1, right + int(rank[0] == 0)
        if expected != r.n_accepted:
            tie = scored.margin[row, min(expected, r.n_accepted)] <= ties
            near, apart = near + int(tie), apart + int(not tie)
    return Compared(rounds, near, apart, right)
