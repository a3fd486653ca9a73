"""The training loop of heads: recipe, loss, steps, checkpoints. The backbone is frozen, and never run here.

A run that was killed goes on and ends with the same bits.
"""

import hashlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specnb.errors import EngineError, InputError, NonFiniteLogits
from specnb.medusa.data import NO_LABEL, Batch, Examples
from specnb.medusa.nets import Heads

CHECKPOINT_FILE = "checkpoint.pt"
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


def objective(heads: Heads, recipe: Recipe, batch: Batch) -> tuple[Tensor, Measured]:
    """Return the loss of a batch, and what is measured without gradients.

    The loss is the sum over heads of head_weight^k times (1 - teacher) hard + teacher soft, in nats: hard is the
    cross-entropy with the backbone's greedy token, soft the divergence KL(backbone's row || head's row) over the draft
    vocabulary. With a teacher the batch has `later`.
    """
    total, measured = torch.zeros((), device=batch.hidden.device), []
    for i, logits in enumerate(_rows(heads, batch)):
        rows, labels = logits.float().log_softmax(-1), batch.labels[:, i]
        drafted, there = labels >= 0, (labels != NO_LABEL).sum().clamp(min=1)
        targets = labels.masked_fill(~drafted, NO_LABEL)
        hard = F.nll_loss(rows, targets, ignore_index=NO_LABEL, reduction="sum") / drafted.sum().clamp(min=1)
        loss = hard
        if recipe.teacher:
            with torch.no_grad():
                later = batch.later[:, i].to(heads.shared_lm_head.dtype)
                teacher = F.linear(heads.normed(heads.as_input(later)), heads.shared_lm_head).float().log_softmax(-1)
            apart = F.kl_div(rows, teacher, reduction="none", log_target=True).sum(-1)
            soft = (apart * (labels != NO_LABEL)).sum() / there
            loss = (1 - recipe.teacher) * hard + recipe.teacher * soft
        total = total + recipe.head_weight**i * loss
        top = _hits(rows.detach(), labels).sum(0) / there
        measured.append(torch.stack([hard.detach(), top[0], top.sum()]))
    return total, Measured(*torch.stack(measured, dim=1))


@torch.no_grad()
def rank_shares(heads: Heads, examples: Batch) -> Tensor:
    """Share of a head's labels that are the r-th best token of its row, `(n_heads, TOP)`: by these trees grow."""
    batch = _on_device(examples, heads)
    there = (batch.labels != NO_LABEL).sum(0).clamp(min=1)
    hits = [_hits(logits, batch.labels[:, i]).sum(0) for i, logits in enumerate(_rows(heads, batch))]
    return torch.stack(hits) / there[:, None]


def _rows(heads: Heads, batch: Batch) -> Iterator[Tensor]:
    """Logits `(batch, draft_size)` of each head."""
    normed = heads.normed(heads.as_input(batch.hidden.to(heads.shared_lm_head.dtype)))
    for i in range(heads.config.n_heads):
        yield heads.logits(i, heads.features(i, normed, batch.ids))


def _hits(rows: Tensor, labels: Tensor) -> Tensor:
    """Whether a label is the best, second best, … token of its row, `(batch, TOP)`; one that is none never is."""
    best = rows.topk(min(TOP, rows.shape[-1]), dim=-1).indices
    return (best == labels[:, None]) & (labels >= 0)[:, None]


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
    save_every: int = 100,
    on_start: Callable[[float, int], None] = lambda seconds, left: None,
    on_step: Callable[[Report], None] = lambda report: None,
) -> list[dict[str, Any]]:
    """Train `heads` in place to `recipe.steps`, from `folder`'s checkpoint if there is one; returns the log.

    Weights are float32 while they are trained. A checkpoint is gone on with only where `data` (the digest of the
    text), recipe, config and token map are the same. `on_start` gets the seconds of a step, measured before the first,
    and the steps that are left. A line of the log has step, examples, lr, the weighted loss, seconds, and what
    `evaluate` returns; every `save_every` steps it and the checkpoint are written.

    Raises InputError (another run in the folder), NonFiniteLogits, EngineError (a gradient that is not finite).
    """
    heads.float()
    try:
        optimizer = torch.optim.AdamW(heads.parameters(), lr=recipe.peak_lr, weight_decay=recipe.weight_decay)
        token_map = b"" if heads.token_map is None else heads.token_map.cpu().numpy().tobytes()
        run = {
            "recipe": asdict(recipe), "heads": heads.config.model_dump(), "data": data,
            "token_map": hashlib.sha256(token_map).hexdigest(),
        }  # fmt: skip
        step, log = _resume(folder, run, heads, optimizer)
        if step < recipe.steps:
            on_start(_seconds_of_a_step(heads, recipe, examples, step), recipe.steps - step)
        since = time.perf_counter()
        while step < recipe.steps:
            report = _step(heads, recipe, optimizer, examples, step)
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
    _, losses = _measured(heads, recipe, held_out.spread(HELD_OUT, later=recipe.teacher > 0))
    return {name: [round(float(x), 5) for x in values] for name, values in losses._asdict().items()}


def _measured(heads: Heads, recipe: Recipe, batch: Batch) -> tuple[Tensor, Measured]:
    """`objective`, with matrix products in bfloat16 unless the backbone is float32; losses are float32."""
    lm_head = heads.shared_lm_head
    with torch.autocast(lm_head.device.type, torch.bfloat16, enabled=lm_head.dtype != torch.float32):
        return objective(heads, recipe, _on_device(batch, heads))


def _loss(heads: Heads, recipe: Recipe, examples: Examples, step: int) -> tuple[Tensor, Measured]:
    batch = examples.at_step(step, batch_size=recipe.batch_size, seed=recipe.seed, later=recipe.teacher > 0)
    return _measured(heads, recipe, batch)


def _seconds_of_a_step(heads: Heads, recipe: Recipe, examples: Examples, step: int) -> float:
    """Of a forward and backward without a step, so that the time left is known before the first."""
    _loss(heads, recipe, examples, step)
    began = time.perf_counter()
    _loss(heads, recipe, examples, step)[0].backward()
    heads.zero_grad(set_to_none=True)
    return time.perf_counter() - began


def _step(heads: Heads, recipe: Recipe, optimizer: torch.optim.Optimizer, examples: Examples, step: int) -> Report:
    loss, measured = _loss(heads, recipe, examples, step)
    if not loss.isfinite():
        raise NonFiniteLogits(
            f"the loss of step {step} is {float(loss.detach())}: lower peak_lr ({recipe.peak_lr}) or clip; "
            "the last checkpoint is whole"
        )
    loss.backward()
    if not nn.utils.clip_grad_norm_(heads.parameters(), recipe.clip).isfinite():
        raise EngineError(f"the gradient of step {step} is not finite: lower peak_lr ({recipe.peak_lr})")
    for group in optimizer.param_groups:
        group["lr"] = recipe.lr(step)
    faster = [] if recipe.embedding_rate == 1 else heads.on_embeddings
    before = [weight.clone() for weight in faster]
    optimizer.step()
    with torch.no_grad():
        for weight, old in zip(faster, before, strict=True):  # embedding_rate times as far as the others
            weight.copy_(torch.lerp(old, weight, recipe.embedding_rate))
    optimizer.zero_grad(set_to_none=True)
    return Report(step + 1, float(loss.detach()), measured)


def _on_device(batch: Batch, heads: Heads) -> Batch:
    return Batch(*(None if part is None else part.to(heads.shared_lm_head.device) for part in batch))


def _save(folder: Path, place: dict[str, Any], heads: Heads, optimizer: torch.optim.Optimizer) -> None:
    """Write log and weights in one file, replaced in one go."""
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / f".{CHECKPOINT_FILE}.part"
    torch.save(place | {"heads": heads.state_dict(), "optimizer": optimizer.state_dict()}, part)
    part.replace(folder / CHECKPOINT_FILE)


def _resume(
    folder: Path, run: dict[str, Any], heads: Heads, optimizer: torch.optim.Optimizer
) -> tuple[int, list[dict[str, Any]]]:
    """Steps that are done, and their log; weights and optimizer are put where they were."""
    file = folder / CHECKPOINT_FILE
    if not file.exists():
        return 0, []
    saved = torch.load(file, map_location="cpu", weights_only=True)
    if other := [
        f"{key} was {saved['run'][key]!s:.200}, is {run[key]!s:.200}" for key in run if saved["run"][key] != run[key]
    ]:
        raise InputError(f"{folder} holds another run: {'; '.join(other)}. Use another folder")
    heads.load_state_dict(saved["heads"])
    optimizer.load_state_dict(saved["optimizer"])
    return saved["step"], saved["log"]
