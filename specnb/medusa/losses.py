"""What heads are trained to lower, and what is told of them meanwhile: never the weighted loss under a head's name."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specnb.medusa.examples import NO_LABEL, OUTSIDE, Batch
from specnb.medusa.heads import Heads
from specnb.medusa.recipe import Recipe

TOP = 5
RANKS = 10
"""Best tokens of a row whose accuracies are kept: as many children as a tree's node may have."""


class Measured(NamedTuple):
    """Of each head `(n_heads,)`, unweighted, over the examples that have a label for it.

    `head_loss` is the cross-entropy in nats over labels that the draft vocabulary holds; `top1` and `top5` the shares
    of all labels that are the best, or among the best five, of its row.
    """

    head_loss: Tensor
    top1: Tensor
    top5: Tensor


class Objective(nn.Module):
    """The loss of a batch: sum over heads of head_weight^k times (1 - teacher) hard + teacher soft.

    Hard is the cross-entropy with the backbone's greedy token, soft the divergence KL(backbone's row || head's row)
    over the draft vocabulary, both in nats.
    """

    def __init__(self, heads: Heads, recipe: Recipe) -> None:
        super().__init__()
        self.heads, self.recipe = heads, recipe

    def forward(self, hidden: Tensor, ids: Tensor, labels: Tensor, later: Tensor | None) -> tuple[Tensor, Measured]:
        """A `Batch`, with `later` where there is a teacher; its states are those in front of the final norm.

        Returns (loss, Measured without gradients).
        """
        heads, total, measured = self.heads, hidden.new_zeros((), dtype=torch.float32), []
        states = heads.as_input(hidden.to(heads.shared_lm_head.dtype))
        for i in range(heads.config.n_heads):
            logits = heads.logits(i, heads.features(i, heads.normed(states), ids)).float()
            rows = logits.log_softmax(-1)
            hard, shares = _hard(rows, labels[:, i])
            loss = hard
            if self.recipe.teacher:
                known = labels[:, i] != NO_LABEL
                soft = _soft(rows, self._teacher_rows(later[:, i]), known)
                loss = (1 - self.recipe.teacher) * hard + self.recipe.teacher * soft
            total = total + self.recipe.head_weight**i * loss
            measured.append(torch.stack([hard.detach(), *shares]))
        return total, Measured(*torch.stack(measured, dim=1))

    @torch.no_grad()
    def _teacher_rows(self, later: Tensor) -> Tensor:
        """Log probabilities of the backbone in the states where it chose the labels, over the draft vocabulary."""
        heads = self.heads
        normed = heads.normed(heads.as_input(later.to(heads.shared_lm_head.dtype)))
        return F.linear(normed, heads.shared_lm_head).float().log_softmax(-1)


@torch.no_grad()
def rank_shares(heads: Heads, batch: Batch, ranks: int = RANKS) -> Tensor:
    """Share of a head's labels that are the r-th best token of its row, `(n_heads, ranks)`: by these trees grow."""
    states = heads.as_input(batch.hidden.to(heads.shared_lm_head.dtype))
    shares = []
    for i in range(heads.config.n_heads):
        labels = batch.labels[:, i]
        best = heads.logits(i, heads.features(i, heads.normed(states), batch.ids)).topk(ranks, dim=-1).indices
        hits = (best == labels[:, None]) & (labels >= 0)[:, None]
        shares.append(hits.sum(0) / (labels != NO_LABEL).sum().clamp(min=1))
    return torch.stack(shares)


def _hard(rows: Tensor, labels: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Mean cross-entropy over the labels that can be said; (top1, top5) over all that there are."""
    sayable = labels >= 0
    there = (labels != NO_LABEL).sum().clamp(min=1)
    loss = F.nll_loss(rows, labels.masked_fill(labels == OUTSIDE, NO_LABEL), ignore_index=NO_LABEL, reduction="sum")
    with torch.no_grad():
        best = rows.topk(min(TOP, rows.shape[-1]), dim=-1).indices
        hits = (best == labels[:, None]) & sayable[:, None]
        top1, top5 = hits[:, 0].sum() / there, hits.any(-1).sum() / there
    return loss / sayable.sum().clamp(min=1), (top1, top5)


def _soft(rows: Tensor, wanted: Tensor, known: Tensor) -> Tensor:
    """Mean KL(wanted || rows) over the examples that have a label."""
    divergence = F.kl_div(rows, wanted, reduction="none", log_target=True).sum(-1)
    return (divergence * known).sum() / known.sum().clamp(min=1)
