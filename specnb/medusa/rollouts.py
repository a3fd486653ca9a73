"""Train a `JumpNet`: rows of text, roll-outs along them, the loss, and the initial weights."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from specnb.lm.hf.hidden import pre_norm_states
from specnb.medusa import data
from specnb.medusa.data import SPLITS, tapped_layers
from specnb.medusa.jump import JumpNet, unit
from specnb.medusa.nets import draft_ids
from specnb.medusa.train import CHECKPOINT_FILE, TOP, Drawn, Figures, Log, Recipe, fit, round_figures

SINK = 4
"""First tokens of a row, the attention sink: their states are far larger than all others."""
STRIDE = 4
"""Positions from one start of a round to the next."""
HELD_OUT_ROWS, FIRST_ROWS = 48, 64
"""Number of rows per line of the log, and for the initial weights."""


class JumpBatch(NamedTuple):
    """Rows for training, and the positions where rounds start in them.

    `states (B, T, layers + 1, D)`, the last before the target's final norm; `tokens (B, T)`;
    `own (B, T)`, the tokens that the target generated; `starts (S,)`.
    """

    states: Tensor
    tokens: Tensor
    own: Tensor
    starts: Tensor


class RowBatches(Drawn):
    """The rows of a split, with a round of `n_steps` at every STRIDE-th position."""

    def __init__(self, folder: Path, split: str, net: JumpNet, n_steps: int) -> None:
        self.rows = data.read(folder, split)
        self._n_steps, self.positions = n_steps, self.rows.tokens.shape[1]
        n_layers = len(net.target.get_decoder().layers)
        places = [*tapped_layers(n_layers), n_layers - 1]
        wanted = [*map(places.index, net.config.layers), len(places) - 1]
        layers, self._places = np.unique(wanted, return_inverse=True)
        self._states = data.read_states(folder, split, layers)

    def __len__(self) -> int:
        return len(self.rows.tokens)

    def batch(self, chosen: Tensor) -> JumpBatch:
        """Return the rows with these numbers. The first number sets the offset of the rounds."""
        tokens, own = (torch.from_numpy(part[chosen.numpy()]) for part in (self.rows.tokens, self.rows.own))
        starts = torch.arange(SINK + int(chosen[0]) % STRIDE, self.positions - self._n_steps - 1, STRIDE)
        return JumpBatch(self._states[chosen][:, :, self._places], tokens.long(), own, starts)


def roll_out_loss(net: JumpNet, recipe: Recipe, batch: JumpBatch, *, whole: bool = False) -> tuple[Tensor, Figures]:
    """Return the loss of a batch, and figures of the steps at tokens that the target generated.

    A step's loss mixes LK, -log sum min(p, q), over the draft vocabulary (2602.23881), with KL(p ||
    q), and adds the squared error between its output and the target's next state. Matrix products
    are in bfloat16 unless the target is float32.

    `accepted` is the acceptance rate sum min(p, q) of each step. `rank_shares (n_steps, TOP)` is
    how often the target's best token is the r-th best of the step, `top1` how often it is the best.
    `tau` and `greedy_tau` are the tokens per round of `n_steps` drafts, by either. With `whole`,
    the figures compare with the target's rows over the whole vocabulary, and the loss has no
    meaning.
    """
    n, lm_head = batch.tokens.shape[1], net.shared_lm_head
    states, final = batch.states[:, :, :-1].float(), batch.states[:, :, -1].to(lm_head.dtype)
    p_along, entropy_along, best_along = _target_rows(net, final, whole)
    drawn = F.pad(batch.own[:, 1:], (0, 1))  # whether the target generated the next token
    losses, accepted_shares, rank_shares, rounds = [], [], [], []
    n_steps = min(recipe.roll_out, net.config.n_heads)
    with torch.autocast(lm_head.device.type, torch.bfloat16, enabled=lm_head.dtype != torch.float32):
        for j, g in enumerate(net.roll_out(states, batch.tokens, batch.starts, n_steps), 1):
            places = torch.arange(1, n) if j == 1 else batch.starts + j
            chosen = row, place = drawn[:, places].nonzero(as_tuple=True)
            output, of_target, n_drawn = g[chosen].float(), (row, places[place]), max(1, len(row))
            p, log_q = p_along[of_target], net.logits(output).float().log_softmax(-1)
            accepted = torch.minimum(p, log_q.exp()).sum(-1)
            divergence = -(p * log_q).sum(-1) - entropy_along[of_target]
            loss = divergence.lerp(-accepted.clamp(min=1e-4).log(), recipe.lk)
            loss = loss + (unit(output) - unit(final[of_target].float())).square().mean(-1)
            losses.append(recipe.head_weight ** (j - 1) * loss.sum() / n_drawn)
            best = log_q.topk(min(TOP, log_q.shape[1])).indices
            hits = (best == best_along[of_target][:, None]).float()
            rates = torch.zeros(2, *g.shape[:2])
            rates[:, row, place] = torch.stack([accepted.detach(), hits[:, 0]])
            accepted_shares.append(accepted.detach().sum() / n_drawn)
            rank_shares.append(hits.sum(0) / n_drawn)
            rounds.append(rates if j > 1 else rates[:, :, batch.starts])
    begun = drawn[:, batch.starts + 1]
    taus = 1 + (torch.stack(rounds).cumprod(0).sum(0) * begun).sum((1, 2)) / begun.sum().clamp(min=1)
    ranks = torch.stack(rank_shares)
    return torch.stack(losses).sum(), round_figures(
        accepted=torch.stack(accepted_shares), top1=ranks[:, 0], rank_shares=ranks, tau=taus[0], greedy_tau=taus[1]
    )


@torch.no_grad()
def _target_rows(net: JumpNet, final: Tensor, whole: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return the target's probabilities `(B, T, draft_vocab)`, their entropy, and the best draft id.

    The probabilities are normalized over the draft vocabulary; with `whole`, over all tokens. The
    best draft id is then OUTSIDE where the best token has none.
    """
    normed = net.target_norm(final)
    log_p = F.linear(normed, net.shared_lm_head).float().log_softmax(-1)
    p, best = log_p.exp(), log_p.argmax(-1)
    entropy = -(p * log_p).sum(-1)
    if whole:
        ids = draft_ids(net)
        for row, states in enumerate(normed):  # the logits of one row at a time fit in memory
            rows = F.linear(states, net.target.get_output_embeddings().weight).float().softmax(-1)
            p[row] = rows[:, net.token_map]
            best[row] = ids[rows.argmax(-1)]
    return p, entropy, best


@torch.no_grad()
def fit_maps(net: JumpNet, tokens: Tensor, damping: float = 1e-2) -> None:
    """Fit the maps before a copied layer by least squares, on rows `tokens (B, T)`.

    They map the states at t and the embedding of token t + 1 to the layer's input at t + 1, with
    each position scaled to unit size. The map of the block's own output is fitted on the output of
    the target's layer.
    """
    copied, layers, D = net.config.copied or 0, net.config.layers, net.config.hidden_size
    xx, xy = torch.zeros(1), torch.zeros(1)
    for ids in tokens.long().split(8):
        with pre_norm_states(net.target) as final:
            h = [*net.target(input_ids=ids, output_hidden_states=True, logits_to_keep=1).hidden_states[:-1]]
        h.append(final[0])
        entered = h[copied][:, SINK + 1 :]
        size = entered.square().mean(-1, keepdim=True).rsqrt()
        states = [h[1 + layer][:, SINK:-1] for layer in (*layers, copied)]
        x = torch.cat([*map(unit, states), unit(net.embeddings[ids[:, SINK + 1 :]])], -1)
        x, y = ((part * size).flatten(0, 1).float() for part in (x, entered))
        xx, xy = xx + x.T @ x, xy + x.T @ y
    n = len(layers) * D
    for places in (torch.arange(n, n + 2 * D), torch.tensor([*range(n), *range(n + D, n + 2 * D)])):
        part = xx[places][:, places]
        W = torch.linalg.solve(part + damping * part.diagonal().mean() * torch.eye(len(part)), xy[places])
        (net.from_states if places[0] == 0 else net.from_own).weight.copy_(W[:-D].T)
        net.from_token.weight.copy_(W[-D:].T)


def train_jump(net: JumpNet, recipe: Recipe, text: Path, folder: Path, **options: Any) -> Log:
    """Train `net` in place on the text in a folder, by roll-outs. `options` are those of `fit`."""
    rows, held_out = (RowBatches(text, split, net, recipe.roll_out) for split in SPLITS)
    if net.config.copied is not None and not (folder / CHECKPOINT_FILE).exists():
        fit_maps(net, torch.from_numpy(rows.rows.tokens[:FIRST_ROWS]))

    def judge() -> tuple[Tensor, Figures]:
        return roll_out_loss(net, recipe, held_out.spread(HELD_OUT_ROWS), whole=True)

    return fit(net, recipe, roll_out_loss, rows, judge, text, folder, **options)
