"""Offline accuracy and acceptance of heads, against known answers and against each other."""

import numpy as np
import pytest
import torch

from specnb.chapters.compatibility import chance_of
from specnb.decode.generate import generate
from specnb.errors import NonFiniteLogits
from specnb.medusa import accuracy
from specnb.medusa.accuracy import NO_LABEL, Scores, count_ranks, marginal, score, states_along
from tests.medusa import periodic
from tests.tiny_models import VOCAB

FIRST = VOCAB - 24
LAST = torch.arange(FIRST, VOCAB)


def test_a_token_outside_the_draft_vocabulary_is_a_miss(tiny):
    heads = periodic.random_heads(tiny, LAST)
    text = states_along(tiny, generate(tiny, [3, 4, 5], max_new_tokens=24, ignore_eog=True))
    scores = score(heads, text)
    for head in range(3):
        missing = text.ids[1 + head :].numpy() < FIRST
        assert missing.any()
        assert ((scores.rank[: len(missing), head] == len(LAST)) == missing).all()
    assert (scores.best >= FIRST).all()
    heads.heads[1].blocks[0].linear.bias[0] = float("nan")
    with pytest.raises(NonFiniteLogits, match="head 1"):
        score(heads, text)


def test_shares_of_ranks_by_hand():
    """Four positions of two heads; the second head has no label at the last one."""
    rank = np.array([[0, 0], [1, 0], [0, 2], [0, NO_LABEL]])
    shares = marginal(count_ranks([Scores(rank, np.zeros_like(rank))]))
    np.testing.assert_allclose(shares[:, :3], [[3 / 4, 1 / 4, 0], [2 / 3, 0, 1 / 3]])


def test_served_counts_by_hand():
    """A plain round, all accepted, one of three, none, and an end in the drafts, rejecting none."""
    text = periodic.text_of([(0, 0, 1), (3, 3, 4), (3, 1, 2), (3, 0, 1), (3, 2, 2)])
    assert accuracy.served_counts(text)[:4].tolist() == [[3, 4], [2, 3], [1, 1], [0, 0]]
    assert chance_of([text]) == 6 / 8, "untested draft tokens do not count"


@pytest.mark.parametrize(("share", "trials"), [(0.2, 8), (0.5, 30), (0.95, 2)])
def test_the_interval_of_a_share_covers_it_even_if_all_or_none_are_hits(share, trials):
    """Shares of five prompts vary around their mean. A percentile bootstrap covers 40 to 85 %."""
    rng = np.random.default_rng(3)
    held = 0
    for _ in range(500):
        n = np.maximum(1, rng.poisson(trials, 5))
        hits = rng.binomial(n, rng.beta(9 * share, 9 * (1 - share), 5))
        found = accuracy.share_interval(list(zip(hits, n, strict=True)))
        held += found.low <= share <= found.high and found.low < found.high
    assert held >= 0.93 * 500
    assert accuracy.share_interval([(2, 2)] * 5) == pytest.approx(
        (1.0, 10 / (10 + 2.776**2), 1.0), rel=1e-3
    )
