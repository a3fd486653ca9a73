"""Training examples of heads (a hidden state, and tokens to predict from it), and their loss."""

from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from specnb.medusa import data
from specnb.medusa.nets import Heads
from specnb.medusa.recipe import Batches, Figures, Lesson, Recipe, hits_by_rank, round_figures

NO_LABEL = -100
HELD_OUT = 4096
"""Number of held-out examples per logged accuracy."""


class ExampleBatch(NamedTuple):
    """A batch of examples: hidden states, and the tokens after them.

    `hidden` is `(batch, hidden)`. `ids` and `labels`, `(batch, n_heads)`, are token t + 1 + i and
    the draft id of token t + 2 + i for head i. `later (batch, n_heads, hidden)` are the states that
    predict the labels.
    """

    hidden: Tensor
    ids: Tensor
    labels: Tensor
    later: Tensor


class Examples(Batches):
    """All examples of a split: one per position t whose token t + 2 is marked `own`.

    Heads take the hidden state of token t. The label of head i is token t + 2 + i, if all tokens
    from t + 2 to it are `own`. Hydra's head i reads tokens t + 1 … t + 1 + i.
    """

    def __init__(self, folder: Path, split: str, heads: Heads) -> None:
        """Read the text in `folder`, and its states before the final norm, for `heads`."""
        rows = data.read(folder, split)
        self._hidden = data.read_states(folder, split, [-1]).flatten(0, 2)
        self._tokens = torch.from_numpy(rows.tokens).long().flatten()
        n_heads = heads.config.n_heads
        # (rows, positions with all labels inside the row, n_heads)
        labeled = torch.from_numpy(rows.own)[:, 2:].unfold(1, n_heads, 1).cumprod(-1).bool()
        usable = labeled[..., 0]
        places = torch.arange(rows.tokens.size).view(rows.tokens.shape)
        self._labeled = labeled[usable]
        self._places = places[:, : labeled.shape[1]][usable]
        self._draft_id = heads.draft_ids()
        self.n_items = len(self._places)

    def batch(self, chosen: Tensor) -> ExampleBatch:
        positions = self._places[chosen]
        labeled = self._labeled[chosen]
        since = positions[:, None] + 1 + torch.arange(labeled.shape[1])
        labels = torch.where(labeled, self._draft_id[self._tokens[since + 1]], NO_LABEL)
        return ExampleBatch(
            self._hidden[positions], self._tokens[since], labels, self._hidden[since]
        )


def objective(heads: Heads, recipe: Recipe, batch: ExampleBatch) -> tuple[Tensor, Figures]:
    """Return the loss of a batch, and metrics of each head over its labeled examples.

    The loss is the sum over heads k of head_weight^k ((1 - teacher) hard + teacher soft), in nats.
    `hard` is the cross-entropy with labels in the draft vocabulary, `soft` is KL(backbone || head)
    over it. Matrix products are in bfloat16 unless the lm_head is float32 (`recipe.in_float32`).

    `head_loss` is `hard`. `rank_shares (n_heads, TOP)` are the shares of labels that are the r-th
    best token; `top1` and `top5` those among the 1 and 5 best.
    """
    lm_head = heads.shared_lm_head
    losses = []
    head_loss = []
    rank_shares = []
    batch = ExampleBatch(*(part.to(lm_head.device) for part in batch))
    with torch.autocast(
        lm_head.device.type, torch.bfloat16, enabled=lm_head.dtype != torch.float32
    ):
        normed = heads.norm(batch.hidden.to(lm_head.dtype))  # also for post_norm heads
        for i in range(heads.config.n_heads):
            rows = heads.logits(i, heads.features(i, normed, batch.ids)).float().log_softmax(-1)
            labels = batch.labels[:, i]
            drafted = labels >= 0
            n_labels = (labels != NO_LABEL).sum().clamp(min=1)
            hard = F.nll_loss(
                rows[drafted], labels[drafted], reduction="sum"
            ) / drafted.sum().clamp(min=1)
            loss = hard
            if recipe.teacher:
                later = heads.norm(batch.later[:, i].to(lm_head.dtype))
                teacher = F.linear(later, lm_head).float().log_softmax(-1)
                divergence = F.kl_div(rows, teacher, reduction="none", log_target=True).sum(-1)
                soft = (divergence * (labels != NO_LABEL)).sum() / n_labels
                loss = (1 - recipe.teacher) * hard + recipe.teacher * soft
            losses.append(recipe.head_weight**i * loss)
            head_loss.append(hard)
            rank_shares.append(hits_by_rank(rows, labels).sum(0) / n_labels)
    shares = torch.stack(rank_shares)
    return torch.stack(losses).sum(), round_figures(
        head_loss=torch.stack(head_loss), top1=shares[:, 0], top5=shares.sum(1), rank_shares=shares
    )


def heads_lesson(heads: Heads, recipe: Recipe, text: Path) -> Lesson:
    """Return the training task of heads on the text in a folder."""
    examples, held_out = (Examples(text, split, heads) for split in data.SPLITS)
    return Lesson(examples, objective, partial(objective, heads, recipe, held_out.spread(HELD_OUT)))
