"""The training loop of heads: one recipe in, one checkpoint out, resumable to the bit. The backbone is never run here.

Under `accelerate launch` every process takes its share of each batch, and gradients are averaged: the same run, but for
rounding and for shares that differ in how many labels they have.
"""

import hashlib
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from specnb import store
from specnb.errors import EngineError, InputError, NonFiniteLogits
from specnb.medusa.examples import Batch, Examples
from specnb.medusa.heads import Heads
from specnb.medusa.losses import Measured, Objective
from specnb.medusa.recipe import Recipe

CHECKPOINT_FILE = "checkpoint.pt"
LOG_FILE = "log.jsonl"
HELD_OUT = 4096
"""Held-out examples behind each logged accuracy."""


@dataclass(frozen=True)
class Report:
    """What a step tells: its number, its weighted loss, and the unweighted figures of each head on its batch."""

    step: int
    loss: float
    heads: Measured


OnStep = Callable[[Report], None]


def train(
    heads: Heads,
    recipe: Recipe,
    examples: Examples,
    held_out: Examples,
    folder: Path,
    *,
    data: str,
    start: str = "",
    accelerator: Accelerator | None = None,
    save_every: int = 100,
    on_start: Callable[[float, int], None] = lambda seconds, left: None,
    on_step: OnStep = lambda report: None,
) -> list[dict[str, Any]]:
    """Train `heads` in place to `recipe.steps`, from `folder`'s checkpoint if there is one; returns the log.

    Weights are float32 while they are trained, and of the backbone's type again afterwards.

    `data` is the digest of the text, and `start` says which heads these were at first: a checkpoint is gone on with
    only where both, the recipe, the heads' config and their token map are the same. `on_start` gets the seconds of
    a step, measured before the first, and the steps that are left. A line of the log has step, examples, lr, the
    weighted loss, and for each head, unweighted and on held-out text: head_loss, top1, top5; every `save_every` steps
    it and the checkpoint are written.

    Raises InputError (another run in the folder), NonFiniteLogits, EngineError (a gradient that is not
    finite); the last checkpoint is whole.
    """
    if not recipe.bf16 and heads.shared_lm_head.dtype != torch.float32:
        raise InputError(
            f"a float32 recipe needs a float32 backbone, not {heads.shared_lm_head.dtype}: load it as such"
        )
    accelerator = accelerator or Accelerator(cpu=heads.shared_lm_head.device.type == "cpu")
    heads.float().train()
    try:
        optimizer = torch.optim.AdamW(
            [p for p in heads.parameters() if p.requires_grad], lr=recipe.peak_lr, weight_decay=recipe.weight_decay
        )
        run = identity(heads, recipe, data, start)
        step, log = _resume(folder, run, heads, optimizer)
        # what heads borrow is where the backbone is, and so must they be
        objective, optimizer = accelerator.prepare(Objective(heads, recipe), optimizer, device_placement=[False, False])
        loop = _Loop(objective, optimizer, recipe, examples, accelerator)
        if step < recipe.steps:
            on_start(loop.seconds_of_a_step(step), recipe.steps - step)
        since = time.perf_counter()
        while step < recipe.steps:
            report = loop.step(step)
            step += 1
            on_step(report)
            if step % save_every == 0 or step == recipe.steps:
                now = time.perf_counter()
                log.append(
                    {"step": step, "examples": step * recipe.batch_size, "lr": recipe.lr(step - 1), "loss": report.loss}
                    | evaluate(heads, recipe, held_out)
                    | {"seconds": now - since + (log[-1]["seconds"] if log else 0.0)}
                )  # fmt: skip
                if accelerator.is_main_process:
                    _save(folder, {"run": run, "step": step, "log": log}, heads, optimizer)
                since = time.perf_counter()
    finally:
        heads.to(heads.shared_lm_head.dtype).eval()
    return log


@torch.no_grad()
def evaluate(heads: Heads, recipe: Recipe, held_out: Examples, n: int = HELD_OUT) -> dict[str, list[float]]:
    """head_loss, top1 and top5 of each head, unweighted, on `n` held-out examples spread evenly."""
    was_training = heads.training
    with _matmuls(recipe, heads):
        _, found = Objective(heads.eval(), recipe)(*on_device(held_out.spread(n, later=recipe.teacher > 0), heads))
    heads.train(was_training)
    return {name: [round(float(x), 5) for x in values] for name, values in found._asdict().items()}


class _Loop:
    def __init__(
        self,
        objective: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        recipe: Recipe,
        examples: Examples,
        accelerator: Accelerator,
    ) -> None:
        self.objective, self.optimizer, self.recipe = objective, optimizer, recipe
        self.examples, self.accelerator = examples, accelerator
        self.heads: Heads = accelerator.unwrap_model(objective).heads

    def seconds_of_a_step(self, step: int) -> float:
        """Of a forward and backward without a step, so that the time left is known before the first."""
        self._loss(step)
        began = time.perf_counter()
        loss, _ = self._loss(step)
        self.accelerator.backward(loss)
        self.optimizer.zero_grad(set_to_none=True)
        return time.perf_counter() - began

    def step(self, step: int) -> Report:
        loss, measured = self._loss(step)
        if not loss.isfinite():
            raise NonFiniteLogits(
                f"the loss of step {step} is {float(loss.detach())}: lower peak_lr ({self.recipe.peak_lr}) or clip; "
                "the last checkpoint is whole"
            )
        self.accelerator.backward(loss)
        norm = self.accelerator.clip_grad_norm_(self.objective.parameters(), self.recipe.clip)
        if not norm.isfinite():
            raise EngineError(f"the gradient of step {step} is not finite: lower peak_lr ({self.recipe.peak_lr})")
        for group in self.optimizer.param_groups:
            group["lr"] = self.recipe.lr(step)
        with self._embeddings_faster():
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return Report(step + 1, float(loss.detach()), measured)

    @contextmanager
    def _embeddings_faster(self) -> Iterator[None]:
        """Every step inside the block goes `embedding_rate` times as far where weights are applied to embeddings.

        A rate for some columns of one weight, which optimizers do not have.
        """
        rate, weights = self.recipe.embedding_rate, [] if self.recipe.embedding_rate == 1 else self.heads.on_embeddings
        before = [weight.clone() for weight in weights]
        yield
        with torch.no_grad():
            for weight, old in zip(weights, before, strict=True):
                weight.copy_(torch.lerp(old, weight, rate))

    def _loss(self, step: int) -> tuple[Tensor, Measured]:
        recipe, rank, n = self.recipe, self.accelerator.process_index, self.accelerator.num_processes
        later = recipe.teacher > 0
        batch = self.examples.at_step(step, batch_size=recipe.batch_size, seed=recipe.seed, later=later)
        mine = Batch(*(None if part is None else part[rank::n] for part in batch))
        with _matmuls(self.recipe, self.heads):
            return self.objective(*on_device(mine, self.heads))


def on_device(batch: Batch, heads: Heads) -> Batch:
    """The batch where the heads are."""
    device = heads.shared_lm_head.device
    return Batch(*(None if part is None else part.to(device) for part in batch))


@contextmanager
def _matmuls(recipe: Recipe, heads: Heads) -> Iterator[None]:
    """Matrix products in bfloat16 where the recipe says so; losses are float32."""
    with torch.autocast(heads.shared_lm_head.device.type, torch.bfloat16, enabled=recipe.bf16):
        yield


def _save(folder: Path, place: dict[str, Any], heads: Heads, optimizer: torch.optim.Optimizer) -> None:
    """Log and weights in one file, replaced in one go; the readable log is a copy."""
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / f".{CHECKPOINT_FILE}.part"
    torch.save(place | {"heads": heads.state_dict(), "optimizer": optimizer.state_dict()}, part)
    part.replace(folder / CHECKPOINT_FILE)
    store.write_atomic(folder / LOG_FILE, "".join(json.dumps(line) + "\n" for line in place["log"]).encode())


def read_checkpoint(folder: Path) -> dict[str, Any] | None:
    """What `train` saved last: run, step, log, heads, optimizer; None if nothing. InputError: no such checkpoint."""
    file = folder / CHECKPOINT_FILE
    if not file.exists():
        return None
    try:
        saved = torch.load(file, map_location="cpu", weights_only=True)
        if not saved.keys() >= {"run", "step", "log", "heads", "optimizer"}:
            raise ValueError(f"it holds {', '.join(map(str, saved))}")
    except Exception as error:
        raise InputError(f"{file} is no checkpoint of heads ({error}): remove it to train from the start") from error
    return saved


def identity(heads: Heads, recipe: Recipe, data: str, start: str) -> dict[str, Any]:
    """What makes a run this run and no other, in plain values."""
    token_map = b"" if heads.token_map is None else heads.token_map.cpu().numpy().tobytes()
    return {
        "recipe": asdict(recipe),
        "heads": heads.config.model_dump(),
        "token_map": hashlib.sha256(token_map).hexdigest(),
        "data": data,
        "start": start,
    }


def _resume(
    folder: Path, run: dict[str, Any], heads: Heads, optimizer: torch.optim.Optimizer
) -> tuple[int, list[dict[str, Any]]]:
    saved = read_checkpoint(folder)
    if saved is None:
        return 0, []
    other = [key for key, value in run.items() if saved["run"].get(key) != value]
    if other:
        told = "; ".join(f"{key} was {str(saved['run'].get(key))[:200]}, is {str(run[key])[:200]}" for key in other)
        raise InputError(f"{folder} holds another run: {told}. Use another folder")
    heads.load_state_dict(saved["heads"])
    optimizer.load_state_dict(saved["optimizer"])
    return saved["step"], saved["log"]
