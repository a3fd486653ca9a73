"""Train a drafter: one loop for heads and jump drafters, checkpoints, and training metadata.

`specnb heads train --kind medusa --preset cpu` runs all stages. An interrupted stage resumes, and a
resumed run ends with bit-identical weights. The backbone is frozen: it generates the text with its
hidden states once (`data`), and does not run during training.
"""

import io
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from specnb.errors import EngineError, InputError
from specnb.io import read_json, reading, validated, write_atomic
from specnb.lm.base import LanguageModel
from specnb.measure.experiment import Progress
from specnb.medusa import data
from specnb.medusa.data import SPLITS, TextRows, Writing
from specnb.medusa.examples import heads_lesson
from specnb.medusa.jump import KINDS, JumpConfig, JumpNet, read_layers
from specnb.medusa.nets import Heads, HeadsConfig, backbone_of, new_heads, seeded
from specnb.medusa.recipe import Figures, Lesson, Recipe, in_float32
from specnb.medusa.rollouts import jump_lesson

Trainee = Heads | JumpNet
Log = list[Figures]
CHECKPOINT_FILE = "checkpoint.pt"


def lesson_of(net: Trainee, recipe: Recipe, text: Path) -> Lesson:
    """Return the training task of `net` on the text in a folder."""
    return (
        jump_lesson(net, recipe, text)
        if isinstance(net, JumpNet)
        else heads_lesson(net, recipe, text)
    )


def train(
    net: Trainee,
    recipe: Recipe,
    text: Path,
    folder: Path,
    *,
    save_every: int = 100,
    on_step: Callable = lambda *step: None,
) -> Log:
    """Train `net` in place on the text in a folder, and return the log.

    `folder` is that of the checkpoint. Weights are float32 during training. Every `save_every`
    steps and at the end, a checkpoint and a log entry are written: step, examples, lr, weighted
    loss, held-out metrics. `on_step` is called with step, weighted loss and metrics of the batch.

    Raises InputError if the checkpoint is of another text, recipe or config, or if there is too
    little text, and EngineError for a non-finite gradient.
    """
    lesson = lesson_of(net, recipe, text)
    file = folder / CHECKPOINT_FILE
    run = {"recipe": asdict(recipe), "heads": net.config.model_dump(mode="json")}
    run["data"] = data.read(text, "train").digest()
    start = 0
    log = []
    if not file.exists():
        lesson.prepare()
    with in_float32(net):
        # 1. Resume from the checkpoint, if there is one.
        optimizer = AdamW(net.parameters(), lr=recipe.peak_lr, weight_decay=recipe.weight_decay)
        if file.exists():
            saved = _read_checkpoint(file, run)
            net.load_state_dict(saved["heads"])
            optimizer.load_state_dict(saved["optimizer"])
            start = saved["step"]
            log = saved["log"]
        for step in range(start + 1, recipe.steps + 1):
            # 2. Update the weights.
            loss, figures = lesson.loss(net, recipe, lesson.batches.at_step(step - 1, recipe))
            _update(net, recipe, optimizer, loss, step - 1)
            on_step(step, loss.item(), figures)
            # 3. Evaluate on held-out text, and write a checkpoint.
            if step % save_every == 0 or step == recipe.steps:
                line = {
                    "step": step,
                    "examples": step * recipe.batch_size,
                    "lr": recipe.lr(step - 1),
                    "loss": loss.item(),
                }
                log.append(line | lesson.judge())
                states = {"heads": net.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save({"run": run, "step": step, "log": log} | states, packed := io.BytesIO())
                write_atomic(file, packed.getvalue())
    return log


def _read_checkpoint(file: Path, run: dict[str, Any]) -> dict[str, Any]:
    """Read the checkpoint of `run`. Raises InputError if it is of another run."""
    with reading(file):
        saved = torch.load(file, map_location="cpu", weights_only=True)
        other = [key for key in run if saved["run"][key] != run[key]]
    if other:
        raise InputError(
            f"{file.parent} has another run: {' and '.join(other)} differ. Use another folder"
        )
    return saved


def _update(net: Trainee, recipe: Recipe, optimizer: Optimizer, loss: Tensor, step: int) -> None:
    """Update the weights from the loss of a step (from 0). Raises EngineError."""
    loss.backward()
    if not nn.utils.clip_grad_norm_(net.parameters(), recipe.clip).isfinite():
        raise EngineError(
            f"the gradient of step {step} is not finite (loss {loss.item()}): "
            f"lower peak_lr ({recipe.peak_lr}); the last checkpoint is intact"
        )
    for group in optimizer.param_groups:
        group["lr"] = recipe.lr(step)
    weights, rate = net.scaled_rates
    before = [weight.clone() for weight in weights]
    optimizer.step()
    for weight, old in zip(weights, before, strict=True):
        weight.copy_(torch.lerp(old, weight, getattr(recipe, rate)))
    optimizer.zero_grad(set_to_none=True)


# --- creating a drafter for a model, and its training metadata ---


def config_for(model: LanguageModel, **options: Any) -> HeadsConfig | JumpConfig:
    """Return the config of a drafter. Raises InputError for `options` that do not fit the model."""
    backbone = backbone_of(model)
    if options["draft_vocab"] > backbone.vocab_size:
        raise InputError(
            f"got --draft-vocab {options['draft_vocab']}, "
            f"expected at most {backbone.vocab_size}, the vocabulary of {model.name}"
        )
    options |= {
        "hidden_size": backbone.hidden_size,
        "vocab_size": backbone.vocab_size,
        "backbone": backbone.digest,
        "backbone_name": model.name,
    }
    schema = HeadsConfig
    if options["kind"] in KINDS:
        schema = JumpConfig
        options |= read_layers(options["kind"], model)
    return validated(schema, options, f"a drafter for {model.name}")


def write_training_text(
    model: LanguageModel, text: Path, batches: int, progress: Progress
) -> TextRows:
    """Generate the batches of text that are missing in the folder, and return the train split."""
    splits = {"held_out": 2, "train": batches}
    data.write_splits(model, text, batches=splits, writing=Writing(), progress=progress)
    return data.read(text, "train")


def make_heads(model: Any, config: HeadsConfig | JumpConfig, rows: TextRows, seed: int) -> Trainee:
    """Return an untrained drafter. Its draft vocabulary has the most frequent tokens of `rows`."""
    token_map: Any = None
    if config.draft_vocab:
        token_map = data.most_frequent(rows, config.draft_vocab, config.vocab_size)
    if isinstance(config, HeadsConfig):
        return new_heads(config, backbone_of(model), token_map, seed)
    with seeded(seed):
        return JumpNet(config, model.network, token_map)


def training_facts(net: Trainee, recipe: Recipe, log: Log, text: Path) -> dict[str, Any]:
    """Return the training metadata, for training.json.

    `accuracy (heads, TOP)`, from which trees are chosen, is measured on held-out text.
    """
    rows = {split: data.read(text, split) for split in SPLITS}
    of_text = {
        "digest": rows["train"].digest(),
        "tokens": {split: part.tokens.size for split, part in rows.items()},
        "own": {split: part.n_own for split, part in rows.items()},
    }
    return {
        "recipe": asdict(recipe),
        "heads": net.config.model_dump(mode="json"),
        "log": log,
        "text": read_json(text / data.FACTS_FILE) | of_text,
        "parameters": sum(weight.numel() for weight in net.parameters()),
        "torch": torch.__version__.split("+")[0],
        "accuracy": log[-1]["rank_shares"],
    }


def card_of(facts: dict[str, Any]) -> str:
    """Return the Markdown card of a trained drafter, from its training metadata."""
    config = facts["heads"]
    text = facts["text"]
    recipe = facts["recipe"]
    last = facts["log"][-1]
    drafted = config["draft_vocab"] or config["vocab_size"]
    writer = f" (in {text['written_in']})" if "written_in" in text else ""
    shares = ", ".join(f"{share:.3f}" for share in last["top1"])
    tau = last.get("greedy_tau", 1 + np.cumprod(last["top1"]).sum())
    return f"""# `{config["kind"]}`, a drafter for `{config["backbone_name"]}`

{facts["parameters"] / 1e6:.2f} M trained parameters; the draft vocabulary has {drafted:,} tokens.

Accuracy of the most likely token on held-out text generated by the target: {shares}, \
by draft position.
Expected tokens per round in greedy decoding: {tau:.2f}.

Trained on {text["tokens"]["train"]:,} tokens of text, \
{text["own"]["train"]:,} of them generated by the target{writer}:
{recipe["steps"]:,} steps of {recipe["batch_size"]:,} positions, \
peak learning rate {recipe["peak_lr"]:g}.
The learning curve is in `training.json`.
"""
