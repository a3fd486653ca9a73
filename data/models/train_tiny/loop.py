"""The training loop: one recipe in, one checkpoint out, resumable to the bit.

Until the learning rate begins to fall nothing depends on the number of steps, so a run may be made
longer or shorter after the fact and is still exactly the run that asked for that number from the
start.
"""

import json
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel, Qwen3_5ForCausalLM

from specnb.errors import EngineError, InputError, NonFiniteLogits

from . import shapes
from .data import Data, batch, write_text
from .recipe import Recipe

CHECKPOINT_FILE = "checkpoint.pt"
LOG_FILE = "log.jsonl"
HELD_OUT_WINDOWS = 16
"""Windows of held-out text behind each logged loss."""


def new_model(name: str, seed: int) -> PreTrainedModel:
    """Untrained weights, float32, reproducible; the global generator of torch is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3_5ForCausalLM(shapes.config(name))
        for layer in model.model.layers:
            if hasattr(layer, "linear_attn"):
                _start_with_memory(layer.linear_attn)
    return model


@torch.no_grad()
def _start_with_memory(layer: nn.Module) -> None:
    """Spread step sizes over 0.001..0.1 as Mamba-2 does.

    With the library's 1.3 every head would start out forgetting nearly all at each token, and a
    short training does not undo that.
    """
    layer.A_log.uniform_(1, 16).log_()
    dt = torch.exp(torch.empty_like(layer.dt_bias).uniform_(-6.9, -2.3))
    layer.dt_bias.copy_(dt + torch.log(-torch.expm1(-dt)))  # inverse of softplus


def train(
    recipe: Recipe,
    data: Data,
    folder: Path,
    *,
    start: PreTrainedModel | None = None,
    teacher: PreTrainedModel | None = None,
    device: str = "cpu",
    save_every: int = 100,
    on_step: Callable[[int, float], None] = lambda step, loss: None,
) -> PreTrainedModel:
    """Train to `recipe.steps` from `folder`'s checkpoint, if none from `start` or new weights.

    With a `teacher` the loss is KL(teacher's row || own row) at every position, in nats; without,
    cross-entropy. Every `save_every` steps the checkpoint and the line of the log (step, tokens,
    losses, seconds) are written. NonFiniteLogits names step, window and position of the first bad
    row; EngineError a gradient that is not finite.
    """
    if recipe.distilled is not (teacher is not None):
        raise InputError(
            f"the recipe says distilled={recipe.distilled}, "
            f"but a teacher was {'' if teacher else 'not '}given"
        )
    model = (start or new_model(recipe.name, recipe.seed)).to(device).train().requires_grad_(True)
    optimizer = _optimizer(model, recipe)
    corpus = data.facts["digest"]
    step, log = _resume(folder, recipe, corpus, model, optimizer)
    since = time.perf_counter()
    losses = []
    while step < recipe.steps:
        windows = _windows(data.train, recipe, step, device)
        loss = _loss(model, teacher, windows, recipe, step)
        _update(model, optimizer, loss, recipe, step)
        step += 1
        losses.append(loss.item())
        on_step(step, losses[-1])
        if step % save_every == 0 or step == recipe.steps:
            now = time.perf_counter()
            log.append(
                {
                    "step": step,
                    "tokens": step * recipe.batch_size * recipe.length,
                    "lr": recipe.lr(step - 1),
                    "loss": sum(losses) / len(losses),
                    "held_out_loss": held_out_loss(model, data, recipe.length),
                    "seconds": now - since + (log[-1]["seconds"] if log else 0.0),
                }
            )
            _save(
                folder,
                {"recipe": asdict(recipe), "corpus": corpus, "step": step, "log": log},
                model,
                optimizer,
            )
            since = time.perf_counter()
            losses = []
    return model.eval()


@torch.no_grad()
def held_out_loss(
    model: PreTrainedModel, data: Data, length: int, windows: int = HELD_OUT_WINDOWS
) -> float:
    """Cross-entropy in nats a token, float32, on windows spread evenly over the held-out stream."""
    was_training, total = model.training, 0.0
    model.eval()
    count = min(windows, (len(data.held_out) - 1) // length)
    if count < 1:
        raise InputError(
            f"the held-out stream has {len(data.held_out)} tokens, less than a window of {length}"
        )
    stride = (len(data.held_out) - 1) // count
    for i in range(count):
        ids = torch.from_numpy(
            data.held_out[i * stride : i * stride + length + 1].astype("int64")
        ).to(model.device)
        logits = model(ids[None, :-1], use_cache=False).logits[0].float()
        total += F.cross_entropy(logits, ids[1:]).item()
    model.train(was_training)
    return total / count


def _windows(ids: Any, recipe: Recipe, step: int, device: str) -> Tensor:
    size = {"batch_size": recipe.batch_size, "length": recipe.length}
    return torch.from_numpy(batch(ids, step=step, seed=recipe.seed, **size)).to(device)


def _loss(
    model: PreTrainedModel,
    teacher: PreTrainedModel | None,
    windows: Tensor,
    recipe: Recipe,
    step: int,
) -> Tensor:
    """Mean over all positions; products in bfloat16 if the recipe says so, the loss in float32."""
    with torch.autocast(windows.device.type, torch.bfloat16, enabled=recipe.bf16):
        logits = model(windows[:, :-1], use_cache=False).logits
        with torch.no_grad():
            rows = None if teacher is None else teacher(windows[:, :-1], use_cache=False).logits
    logits = logits.float().flatten(0, 1)
    if rows is None:
        loss = F.cross_entropy(logits, windows[:, 1:].flatten())
    else:
        wanted = rows.float().flatten(0, 1).log_softmax(-1)
        loss = F.kl_div(logits.log_softmax(-1), wanted, reduction="batchmean", log_target=True)
    if not loss.isfinite():
        _say_where(
            logits if rows is None or rows.isfinite().all() else rows.flatten(0, 1), recipe, step
        )
    return loss


def _say_where(logits: Tensor, recipe: Recipe, step: int) -> None:
    bad = (~logits.isfinite().all(-1)).nonzero()
    window, position = divmod(int(bad[0]), recipe.length) if len(bad) else (None, None)
    raise NonFiniteLogits(
        f"training {recipe.name}: the loss of step {step} is not finite, "
        f"first at window {window}, position {position}; "
        "the last checkpoint is whole: lower peak_lr or clip"
    )


def _update(
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    loss: Tensor,
    recipe: Recipe,
    step: int,
) -> None:
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
    if not norm.isfinite():
        bad = next(
            name
            for name, p in model.named_parameters()
            if p.grad is not None and not p.grad.isfinite().all()
        )
        raise EngineError(
            f"training {recipe.name}: the gradient of {bad} at step {step} is not finite: "
            "lower peak_lr"
        )
    for group in optimizer.param_groups:
        group["lr"] = recipe.lr(step)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def _optimizer(model: PreTrainedModel, recipe: Recipe) -> torch.optim.Optimizer:
    """AdamW; only matrices decay, not gains, step sizes and convolutions."""
    matrices = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    groups = [
        {"params": matrices, "weight_decay": recipe.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=recipe.peak_lr, betas=(0.9, 0.95), fused=True)


def _save(
    folder: Path, place: dict[str, Any], model: PreTrainedModel, optimizer: torch.optim.Optimizer
) -> None:
    """Log and weights in one file, replaced in one go; the readable log is a copy."""
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / f".{CHECKPOINT_FILE}.part"
    torch.save(place | {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, part)
    part.replace(folder / CHECKPOINT_FILE)
    write_text(folder / LOG_FILE, "".join(json.dumps(line) + "\n" for line in place["log"]))


def read_checkpoint(folder: Path) -> dict[str, Any] | None:
    """What `train` saved last: recipe, corpus, step, log, model, optimizer; None if nothing.

    InputError if it is unreadable.
    """
    file = folder / CHECKPOINT_FILE
    if not file.exists():
        return None
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        raise InputError(
            f"{file} cannot be read ({error}): remove it to train from the start"
        ) from error


def trained(folder: Path) -> PreTrainedModel:
    """The float32 model of `folder`'s checkpoint, for reading only. InputError if there is none."""
    saved = read_checkpoint(folder)
    if saved is None:
        raise InputError(f"no checkpoint in {folder}: train that stage first")
    model = Qwen3_5ForCausalLM(shapes.config(saved["recipe"]["name"]))
    model.load_state_dict(saved["model"])
    return model.eval().requires_grad_(False)


def _resume(
    folder: Path,
    recipe: Recipe,
    corpus: str,
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
) -> tuple[int, list[dict]]:
    saved = read_checkpoint(folder)
    if saved is None:
        return 0, []
    before = Recipe(**saved["recipe"])
    step = saved["step"]
    if replace(before, steps=recipe.steps) != recipe:
        raise InputError(
            f"{folder} holds a run with another recipe ({before}), asked is {recipe}: "
            "use another folder"
        )
    if saved["corpus"] != corpus:
        raise InputError(
            f"{folder} was trained on another corpus "
            f"(sha256 {saved['corpus'][:12]}, now {corpus[:12]}): "
            "packages of other versions make another; use another folder"
        )
    if before.steps != recipe.steps and step > min(before.decay_start, recipe.decay_start):
        raise InputError(
            f"{folder} is at step {step} of {before.steps}, where the rate already falls: "
            f"{recipe.steps} steps in all would be another run; "
            "keep the number or use another folder"
        )
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    return step, saved["log"]
