"""The training loop of heads: recipe, loss, steps, checkpoints. The backbone is frozen, and never run here.

A run that was killed goes on and ends with the same bits.
"""

import hashlib
import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specnb.errors import EngineError, InputError, NonFiniteLogits
from specnb.io import write_atomic
from specnb.medusa.data import NO_LABEL, Batch, Examples
from specnb.medusa.nets import OUTSIDE, Heads

CHECKPOINT_FILE, LOG_FILE = "checkpoint.pt", "log.jsonl"
HELD_OUT = 4096
"""Held-out examples behind each logged accuracy."""
TOP = 5


@dataclass(frozen=True)
class Recipe:
    """`steps` of AdamW on `batch_size` positions each; the rate rises for `warmup` steps and falls along a cosine.

    `head_weight` to the power of k is the weight of head k's loss (Cai et al. 2401.10774, section 2.2.1). `teacher`
    is the share of the loss that compares with the backbone's own probabilities instead of its greedy token
    (soft targets; Hydra's teacher loss, Ankner et al. 2402.05109). What of Hydra's weights is applied to embeddings
    is moved at `embedding_rate` times the rate: AdamW moves every weight about as far, whatever it is applied to, and
    embeddings may be much smaller than normed hidden states (SmolLM2-135M: 0.1 against 1.1 in the median dimension).
    """

    steps: int
    batch_size: int = 2048
    peak_lr: float = 1e-3
    warmup: int = 500
    eta_min: float = 1e-5
    weight_decay: float = 0.0
    clip: float = 1.0
    head_weight: float = 0.8
    teacher: float = 0.0
    embedding_rate: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        positive = min(self.steps, self.batch_size, self.eta_min, self.embedding_rate) > 0
        if not positive or not 0 <= self.teacher <= 1 or self.eta_min > self.peak_lr:
            raise InputError(
                f"a recipe has positive numbers, a teacher from 0 to 1, and a rate of at least eta_min, got {self}"
            )

    def lr(self, step: int) -> float:
        """The rate of a step, counted from 0: above zero at the first, peak_lr after warm-up, eta_min at the last."""
        if step < self.warmup:
            return self.peak_lr * (step + 1) / self.warmup
        done = (step - self.warmup) / max(1, self.steps - 1 - self.warmup)
        return self.eta_min + (self.peak_lr - self.eta_min) * (1 + math.cos(math.pi * min(1.0, done))) / 2


PRESETS = {
    "report": Recipe(30_000, batch_size=4096, peak_lr=3e-4),
    "reference": Recipe(30_000, batch_size=4096, peak_lr=1e-3),
    "cpu": Recipe(2500, batch_size=1024, peak_lr=2e-3, warmup=100, embedding_rate=8.0),
    "minute": Recipe(60, batch_size=512, peak_lr=2e-3, warmup=5, embedding_rate=8.0),
}
"""`report` is the Medusa note's, `reference` the same at the rate of the original repository; both are for a GPU.
`cpu` takes about an hour on two cores, `minute` is for looking on."""


def recipe(preset: str, **changed: Any) -> Recipe:
    """A preset; what is not None in `changed` takes the place of its values. Raises InputError: no such preset."""
    if preset not in PRESETS:
        raise InputError(f"no preset {preset!r}: there are {', '.join(PRESETS)}")
    values = {key: value for key, value in changed.items() if value is not None}
    if "steps" in values:  # a short run with a long warm-up would never reach its rate
        values = {"warmup": min(PRESETS[preset].warmup, values["steps"] // 10)} | values
    return replace(PRESETS[preset], **values)


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
        """Return (loss, Measured without gradients) of a `Batch`, which has `later` where there is a teacher."""
        heads, total, measured = self.heads, hidden.new_zeros((), dtype=torch.float32), []
        states = heads.as_input(hidden.to(heads.shared_lm_head.dtype))
        for i in range(heads.config.n_heads):
            logits = heads.logits(i, heads.features(i, heads.normed(states), ids)).float()
            rows = logits.log_softmax(-1)
            hard, top1, top5 = _hard(rows, labels[:, i])
            loss = hard
            if self.recipe.teacher:
                known = labels[:, i] != NO_LABEL
                apart = F.kl_div(rows, self._teacher_rows(later[:, i]), reduction="none", log_target=True).sum(-1)
                soft = (apart * known).sum() / known.sum().clamp(min=1)
                loss = (1 - self.recipe.teacher) * hard + self.recipe.teacher * soft
            total = total + self.recipe.head_weight**i * loss
            measured.append(torch.stack([hard.detach(), top1, top5]))
        return total, Measured(*torch.stack(measured, dim=1))

    @torch.no_grad()
    def _teacher_rows(self, later: Tensor) -> Tensor:
        """Log probabilities of the backbone in the states where it chose the labels, over the draft vocabulary."""
        heads = self.heads
        normed = heads.normed(heads.as_input(later.to(heads.shared_lm_head.dtype)))
        return F.linear(normed, heads.shared_lm_head).float().log_softmax(-1)


@torch.no_grad()
def rank_shares(heads: Heads, examples: Batch) -> Tensor:
    """Share of a head's labels that are the r-th best token of its row, `(n_heads, RANKS)`: by these trees grow."""
    batch = _on_device(examples, heads)
    states = heads.as_input(batch.hidden.to(heads.shared_lm_head.dtype))
    shares = []
    for i in range(heads.config.n_heads):
        labels = batch.labels[:, i]
        best = heads.logits(i, heads.features(i, heads.normed(states), batch.ids)).topk(TOP, dim=-1).indices
        hits = (best == labels[:, None]) & (labels >= 0)[:, None]
        shares.append(hits.sum(0) / (labels != NO_LABEL).sum().clamp(min=1))
    return torch.stack(shares)


def _hard(rows: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean cross-entropy over the labels that can be drafted; top-1 and top-5 over all that there are."""
    in_vocab = labels >= 0
    there = (labels != NO_LABEL).sum().clamp(min=1)
    loss = F.nll_loss(rows, labels.masked_fill(labels == OUTSIDE, NO_LABEL), ignore_index=NO_LABEL, reduction="sum")
    with torch.no_grad():
        best = rows.topk(min(TOP, rows.shape[-1]), dim=-1).indices
        hits = (best == labels[:, None]) & in_vocab[:, None]
    return loss / in_vocab.sum().clamp(min=1), hits[:, 0].sum() / there, hits.any(-1).sum() / there


class Report(NamedTuple):
    """A step: its number, its weighted loss, and the unweighted figures of each head on its batch."""

    step: int
    loss: float
    heads: Measured


def train(
    heads: Heads,
    recipe: Recipe,
    examples: Examples,
    held_out: Examples,
    folder: Path,
    *,
    data: str,
    start: str = "",
    save_every: int = 100,
    on_start: Callable[[float, int], None] = lambda seconds, left: None,
    on_step: Callable[[Report], None] = lambda report: None,
) -> list[dict[str, Any]]:
    """Train `heads` in place to `recipe.steps`, from `folder`'s checkpoint if there is one; returns the log.

    Weights are float32 while they are trained. A checkpoint is gone on with only where `data` (the digest of the text),
    `start` (which heads these were at first), recipe, config and token map are the same. `on_start` gets the seconds of
    a step, measured before the first, and the steps that are left. A line of the log has step, examples, lr, the
    weighted loss, seconds, and what `evaluate` returns; every `save_every` steps it and the checkpoint are written.

    Raises InputError (another run in the folder), NonFiniteLogits, EngineError (a gradient that is not finite).
    """
    heads.float()
    try:
        optimizer = torch.optim.AdamW(
            [p for p in heads.parameters() if p.requires_grad], lr=recipe.peak_lr, weight_decay=recipe.weight_decay
        )
        run = _identity(heads, recipe, data, start)
        step, log = _resume(folder, run, heads, optimizer)
        objective = Objective(heads, recipe)
        if step < recipe.steps:
            on_start(_seconds_of_a_step(objective, examples, step), recipe.steps - step)
        since = time.perf_counter()
        while step < recipe.steps:
            report = _step(objective, optimizer, examples, step)
            step += 1
            on_step(report)
            if step % save_every == 0 or step == recipe.steps:
                now = time.perf_counter()
                log.append(
                    {"step": step, "examples": step * recipe.batch_size, "lr": recipe.lr(step - 1), "loss": report.loss}
                    | evaluate(heads, recipe, held_out)
                    | {"seconds": now - since + (log[-1]["seconds"] if log else 0.0)}
                )  # fmt: skip
                _save(folder, {"run": run, "step": step, "log": log}, heads, optimizer)
                since = time.perf_counter()
    finally:
        heads.to(heads.shared_lm_head.dtype)
    return log


@torch.no_grad()
def evaluate(heads: Heads, recipe: Recipe, held_out: Examples) -> dict[str, list[float]]:
    """Return head_loss, top1 and top5 of each head, unweighted, on HELD_OUT examples spread evenly."""
    with _matmuls(heads):
        _, losses = Objective(heads, recipe)(*_on_device(held_out.spread(HELD_OUT, later=recipe.teacher > 0), heads))
    return {name: [round(float(x), 5) for x in values] for name, values in losses._asdict().items()}


def _loss(objective: Objective, examples: Examples, step: int) -> tuple[Tensor, Measured]:
    recipe, heads = objective.recipe, objective.heads
    batch = examples.at_step(step, batch_size=recipe.batch_size, seed=recipe.seed, later=recipe.teacher > 0)
    with _matmuls(heads):
        return objective(*_on_device(batch, heads))


def _seconds_of_a_step(objective: Objective, examples: Examples, step: int) -> float:
    """Of a forward and backward without a step, so that the time left is known before the first."""
    _loss(objective, examples, step)
    began = time.perf_counter()
    _loss(objective, examples, step)[0].backward()
    objective.zero_grad(set_to_none=True)
    return time.perf_counter() - began


def _step(objective: Objective, optimizer: torch.optim.Optimizer, examples: Examples, step: int) -> Report:
    recipe = objective.recipe
    loss, measured = _loss(objective, examples, step)
    if not loss.isfinite():
        raise NonFiniteLogits(
            f"the loss of step {step} is {float(loss.detach())}: lower peak_lr ({recipe.peak_lr}) or clip; "
            "the last checkpoint is whole"
        )
    loss.backward()
    norm = nn.utils.clip_grad_norm_(objective.parameters(), recipe.clip)
    if not norm.isfinite():
        raise EngineError(f"the gradient of step {step} is not finite: lower peak_lr ({recipe.peak_lr})")
    for group in optimizer.param_groups:
        group["lr"] = recipe.lr(step)
    faster = [] if recipe.embedding_rate == 1 else objective.heads.on_embeddings
    before = [weight.clone() for weight in faster]
    optimizer.step()
    with torch.no_grad():
        for weight, old in zip(faster, before, strict=True):  # embedding_rate times as far as the others
            weight.copy_(torch.lerp(old, weight, recipe.embedding_rate))
    optimizer.zero_grad(set_to_none=True)
    return Report(step + 1, float(loss.detach()), measured)


def _on_device(batch: Batch, heads: Heads) -> Batch:
    return Batch(*(None if part is None else part.to(heads.shared_lm_head.device) for part in batch))


def _matmuls(heads: Heads) -> torch.autocast:
    """Matrix products in bfloat16 unless the backbone is float32; losses are float32."""
    dtype, device = heads.shared_lm_head.dtype, heads.shared_lm_head.device.type
    return torch.autocast(device, torch.bfloat16, enabled=dtype != torch.float32)


def _save(folder: Path, place: dict[str, Any], heads: Heads, optimizer: torch.optim.Optimizer) -> None:
    """Write log and weights in one file, replaced in one go; the readable log is a copy."""
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / f".{CHECKPOINT_FILE}.part"
    torch.save(place | {"heads": heads.state_dict(), "optimizer": optimizer.state_dict()}, part)
    part.replace(folder / CHECKPOINT_FILE)
    write_atomic(folder / LOG_FILE, "".join(json.dumps(line) + "\n" for line in place["log"]).encode())


def read_checkpoint(folder: Path) -> dict[str, Any] | None:
    """Return what `train` saved last: run, step, log, heads, optimizer; None if nothing."""
    file = folder / CHECKPOINT_FILE
    return torch.load(file, map_location="cpu", weights_only=True) if file.exists() else None


def _identity(heads: Heads, recipe: Recipe, data: str, start: str) -> dict[str, Any]:
    """What makes a run this run and no other, in plain values."""
    token_map = b"" if heads.token_map is None else heads.token_map.cpu().numpy().tobytes()
    return {
        "recipe": asdict(recipe), "heads": heads.config.model_dump(), "data": data, "start": start,
        "token_map": hashlib.sha256(token_map).hexdigest(),
    }  # fmt: skip


def _resume(
    folder: Path, run: dict[str, Any], heads: Heads, optimizer: torch.optim.Optimizer
) -> tuple[int, list[dict[str, Any]]]:
    saved = read_checkpoint(folder)
    if saved is None:
        return 0, []
    if other := [
        f"{key} was {saved['run'][key]!s:.200}, is {run[key]!s:.200}" for key in run if saved["run"][key] != run[key]
    ]:
        raise InputError(f"{folder} holds another run: {'; '.join(other)}. Use another folder")
    heads.load_state_dict(saved["heads"])
    optimizer.load_state_dict(saved["optimizer"])
    return saved["step"], saved["log"]
