"""Train a `JumpNet`: batches of text, roll-outs along them, the loss, and the initial maps."""

from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from specnb.lm.hf.hidden import pre_norm_states
from specnb.medusa import data
from specnb.medusa.jump import JumpNet, unit
from specnb.medusa.recipe import Batches, Figures, Lesson, Recipe, hits_by_rank, round_figures

SINK = 4
"""First tokens of a row, the attention sink, are skipped: their states are far larger."""
STRIDE = 4
"""Distance between the starts of two rounds, in tokens."""
HELD_OUT_ROWS, FIRST_ROWS = 48, 64
"""Number of rows for held-out metrics, and for the initial maps."""


class JumpBatch(NamedTuple):
    """Rows for training, and the positions where rounds start in them.

    `states (B, T, layers + 1, D)`, the last of them the input of the target's final norm;
    `tokens (B, T)`; `own (B, T)` as in `data.TextRows`; `starts (S,)`.
    """

    states: Tensor
    tokens: Tensor
    own: Tensor
    starts: Tensor


class RowBatches(Batches):
    """The rows of a split, with a round of `n_steps` draft tokens at every STRIDE-th position."""

    def __init__(self, folder: Path, split: str, net: JumpNet, n_steps: int) -> None:
        self.rows = data.read(folder, split)
        self.n_items, self.positions = self.rows.tokens.shape
        self._n_steps = n_steps
        n_layers = len(net.target.get_decoder().layers)
        places = [*data.tapped_layers(n_layers), n_layers - 1]
        wanted = [*map(places.index, net.config.layers), len(places) - 1]
        layers, self._places = np.unique(wanted, return_inverse=True)
        self._states = data.read_states(folder, split, layers)

    def batch(self, chosen: Tensor) -> JumpBatch:
        """Return the rows `chosen`. The first index sets the offset of the rounds."""
        tokens, own = (torch.from_numpy(part[chosen.numpy()]) for part in self.rows)
        starts = torch.arange(
            SINK + int(chosen[0]) % STRIDE, self.positions - self._n_steps - 1, STRIDE
        )
        return JumpBatch(self._states[chosen][:, :, self._places], tokens.long(), own, starts)


def roll_out_loss(
    net: JumpNet, recipe: Recipe, batch: JumpBatch, *, whole: bool = False
) -> tuple[Tensor, Figures]:
    """Return the loss of a batch, and metrics of each step, where the next token is marked `own`.

    A step's loss mixes LK, -log sum min(p, q), over the draft vocabulary (2602.23881), with KL(p ||
    q), and adds the squared error between its output and the target's state there (both `unit`).
    Matrix products are in bfloat16 unless the lm_head is float32.

    `accepted` is the acceptance rate sum min(p, q) of each step. `rank_shares (n_steps, TOP)` are
    the shares where the target's best token is the r-th best of the step, `top1` where it is the
    best. `tau` and `greedy_tau` are the expected tokens per round of `n_steps` draft tokens,
    sampled or greedy. With `whole`, p covers the entire vocabulary, and the loss has no meaning.
    """
    n = batch.tokens.shape[1]
    lm_head = net.shared_lm_head
    states = batch.states[:, :, :-1].float()
    final = batch.states[:, :, -1].to(lm_head.dtype)
    log_p_along, best_along = _target_rows(net, final, whole)
    drawn = F.pad(batch.own[:, 1:], (0, 1))  # whether the next token is marked `own`
    losses = []
    accepted_shares = []
    rank_shares = []
    rounds = []
    n_steps = min(recipe.roll_out, net.config.n_heads)
    with torch.autocast(
        lm_head.device.type, torch.bfloat16, enabled=lm_head.dtype != torch.float32
    ):
        for j, g in enumerate(net.roll_out(states, batch.tokens, batch.starts, n_steps), 1):
            places = torch.arange(1, n) if j == 1 else batch.starts + j
            # 1. The block's outputs where the next token is marked `own`: g[row, place].
            row, place = drawn[:, places].nonzero(as_tuple=True)
            n_drawn = max(1, len(row))
            of_target = row, places[place]
            output = g[row, place].float()
            log_p = log_p_along[of_target]
            log_q = net.logits(output).float().log_softmax(-1)
            # 2. The loss: KL and LK of the distributions, and the distance of the states.
            accepted = torch.minimum(log_p, log_q).exp().sum(-1)
            divergence = F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1)
            loss = divergence.lerp(-accepted.clamp(min=1e-4).log(), recipe.lk)
            loss = loss + (unit(output) - unit(final[of_target].float())).square().mean(-1)
            losses.append(recipe.head_weight ** (j - 1) * loss.sum() / n_drawn)
            # 3. Metrics, and acceptance rates of the rounds `(2, B, S)`, sampled and greedy.
            hits = hits_by_rank(log_q, best_along[of_target]).float()
            rates = torch.zeros(2, *g.shape[:2])
            rates[:, row, place] = torch.stack([accepted.detach(), hits[:, 0]])
            accepted_shares.append(accepted.detach().sum() / n_drawn)
            rank_shares.append(hits.sum(0) / n_drawn)
            rounds.append(rates if j > 1 else rates[:, :, batch.starts])
    begun = drawn[:, batch.starts + 1]
    taus = 1 + (torch.stack(rounds).cumprod(0).sum(0) * begun).sum((1, 2)) / begun.sum().clamp(
        min=1
    )
    ranks = torch.stack(rank_shares)
    return torch.stack(losses).sum(), round_figures(
        accepted=torch.stack(accepted_shares),
        top1=ranks[:, 0],
        rank_shares=ranks,
        tau=taus[0],
        greedy_tau=taus[1],
    )


@torch.no_grad()
def _target_rows(net: JumpNet, final: Tensor, whole: bool) -> tuple[Tensor, Tensor]:
    """Return the target's log probabilities `(B, T, draft_vocab)` and its best draft id `(B, T)`.

    The probabilities are normalized over the draft vocabulary; with `whole`, over all tokens. The
    draft id is then OUTSIDE if the best token is not in the draft vocabulary.
    """
    normed = net.target_norm(final)  # (B, T, D)
    if not whole:
        log_p = F.linear(normed, net.shared_lm_head).float().log_softmax(-1)
        return log_p, log_p.argmax(-1)
    lm_head = net.target.get_output_embeddings().weight.to(normed.dtype)
    ids = net.draft_ids()
    rows = []
    best = []
    for states in normed:  # one row at a time, to fit in memory
        log_p = F.linear(states, lm_head).float().log_softmax(-1)
        rows.append(log_p[:, net.token_map])
        best.append(ids[log_p.argmax(-1)])
    return torch.stack(rows), torch.stack(best)


@torch.no_grad()
def fit_maps(net: JumpNet, tokens: Tensor, damping: float = 1e-2) -> None:
    """Fit the maps before a copied layer, if any, by least squares, on rows `tokens (B, T)`.

    They map the states at t and the embedding of token t + 1 to the layer's input at t + 1.
    Positions are weighted so that this input has unit size. The map of the block's own output is
    fitted on the output of the target's layer.
    """
    copied = net.config.copied
    if copied is None:
        return
    # 1. Accumulate x^T x and x^T y, for x = [states, own, token] and y the layer's input at t + 1.
    xx = torch.zeros(1)
    xy = torch.zeros(1)
    for ids in tokens.long().split(8):
        with pre_norm_states(net.target) as final:
            h = [
                *net.target(
                    input_ids=ids, output_hidden_states=True, logits_to_keep=1
                ).hidden_states[:-1]
            ]
        h.append(final[0])
        entered = h[copied][:, SINK + 1 :]
        read = [unit(h[1 + layer][:, SINK:-1]) for layer in (*net.config.layers, copied)]
        x = torch.cat([*read, unit(net.embeddings[ids[:, SINK + 1 :]])], -1)
        size = entered.square().mean(-1, keepdim=True).rsqrt()
        x, y = ((part * size).flatten(0, 1).float() for part in (x, entered))
        xx = xx + x.T @ x
        xy = xy + x.T @ y
    # 2. Ridge regression on [own, token], then on [states, token], which sets the final token map.
    D = net.config.hidden_size
    states, own, token = torch.arange(len(xx)).tensor_split([len(xx) - 2 * D, len(xx) - D])
    for linear, read in ((net.from_own, own), (net.from_states, states)):
        used = torch.cat([read, token])
        part = xx[used][:, used]
        ridge = damping * part.diagonal().mean() * torch.eye(len(part))
        W = torch.linalg.solve(part + ridge, xy[used])
        linear.weight.copy_(W[:-D].T)
        net.from_token.weight.copy_(W[-D:].T)


def jump_lesson(net: JumpNet, recipe: Recipe, text: Path) -> Lesson:
    """Return the training task of `net` on the text in a folder; `prepare` fits the maps."""
    rows, held_out = (RowBatches(text, split, net, recipe.roll_out) for split in data.SPLITS)
    judged = partial(roll_out_loss, net, recipe, held_out.spread(HELD_OUT_ROWS), whole=True)
    first_rows = torch.from_numpy(rows.rows.tokens[:FIRST_ROWS])
    return Lesson(rows, roll_out_loss, judged, partial(fit_maps, net, first_rows))
