"""Train heads: `specnb heads train --kind medusa --preset cpu`. The backbone is frozen, and never run by the loop.

Stages, each of which goes on where it was stopped: text by the backbone, its hidden states, the heads, and the export
to a folder that `specnb generate --drafter medusa --heads-checkpoint FOLDER` opens. A run that was killed goes on and
ends with the same bits.
"""

import hashlib
import json
import math
import shlex
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
import typer
from pydantic import ValidationError
from torch import Tensor, nn
from tqdm import tqdm

from specnb import script
from specnb.errors import EngineError, InputError, NonFiniteLogits
from specnb.io import write_atomic
from specnb.lm.base import LanguageModel
from specnb.lm.hf import attention as hf_attention
from specnb.lm.load import load
from specnb.medusa import checkpoint, data
from specnb.medusa.data import NO_LABEL, SPLITS, Batch, Examples
from specnb.medusa.nets import OUTSIDE, Backbone, Heads, HeadsConfig, network, new_heads
from specnb.medusa.text import Writing
from specnb.medusa.tree import RANKS
from specnb.paths import cache_dir

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
        best = heads.logits(i, heads.features(i, heads.normed(states), batch.ids)).topk(RANKS, dim=-1).indices
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


# --- the stages of `specnb heads train` ---

TARGET = "smollm2-135m?backend=hf&dtype=bfloat16&exact=False"
"""Row-wise attention (`exact`) is for one sequence, and batches of text are written here."""
HELD_OUT_BATCHES = 2
PLACES = frozenset({"stage", "work", "out", "shard", "save_every"})
"""Options that say where and how far, not what heads come out."""
_bar = partial(tqdm, unit_scale=True, mininterval=2)


@dataclass(frozen=True)
class Work:
    """The text, states and runs in `home` that one backbone's heads are trained with.

    `options` are fields of HeadsConfig, `preset` names what `recipe` was before it was changed, and `texts` is a file
    to learn instead of what the backbone writes. A method is a stage: it returns what there is now, for the reader.
    """

    home: Path
    target: LanguageModel
    backbone: Backbone
    options: Mapping[str, Any]
    preset: str
    recipe: Recipe
    batches: int
    shard: tuple[int, int]
    texts: Path | None
    start: str | None
    save_every: int
    command: str

    @property
    def text(self) -> Path:
        return self.home / "text"

    @property
    def run(self) -> Path:
        """The folder of the checkpoints of this recipe and these heads."""
        shape = "-".join(str(self.options[key]) for key in sorted(self.options) if self.options[key])
        return self.home / "runs" / f"{self.preset}-{shape}"

    def write_text(self) -> str:
        """Stage 1: the training text, written by the backbone or taken from `texts`."""
        backbone, writing = self.backbone.digest, Writing()
        if self.texts is not None:
            data.write_given(self.target, self.texts, self.text, backbone=backbone, length=writing.length)
        else:
            batches = {"held_out": HELD_OUT_BATCHES, "train": self.batches}
            n_mine = sum(len(range(self.shard[0], n, self.shard[1])) for n in batches.values())
            with _bar(desc="text", total=n_mine * writing.batch_size * writing.length, unit="tokens") as bar:
                data.write(
                    self.target, self.text, batches=batches, backbone=backbone, writing=writing, shard=self.shard,
                    on_tokens=bar.update,
                )  # fmt: skip
        rows = data.read(self.text, "train")
        return f"{rows.tokens.size:,} tokens, {rows.n_own:,} of them the backbone's own, in {self.text}"

    def compute_hidden(self) -> str:
        """Stage 2: the hidden states of all text that has none yet."""
        with _bar(desc="hidden states", unit="tokens") as bar:
            data.compute_states(self.target.network, self.text, backbone=self.backbone.digest, on_tokens=bar.update)
        return f"states of {len(data.files(self.text))} files in {self.text}"

    def train(self) -> str:
        """Stage 3: the heads, from their last checkpoint on."""
        rows, size = self._rows("train"), self.recipe.batch_size
        heads = self.new_heads(rows)
        examples, held_out = (Examples.of(self.text, split, heads) for split in SPLITS)
        with _bar(desc="heads", total=self.recipe.steps * size, unit="examples") as bar:

            def on_start(seconds: float, left: int) -> None:
                bar.set_description(f"heads: {size / seconds:,.0f} examples/s, {left * seconds / 60:.0f} min left")

            def on_step(report: Report) -> None:
                top1 = " ".join(f"{share:.2f}" for share in report.heads.top1.tolist())
                bar.set_postfix_str(f"loss {report.loss:.3f}, top-1 by head {top1}", refresh=False)
                bar.update(report.step * size - bar.n)

            last = train(
                heads, self.recipe, examples, held_out, self.run, data=rows.digest(), start=self.start or "",
                save_every=self.save_every, on_start=on_start, on_step=on_step,
            )[-1]  # fmt: skip
        return f"step {last['step']}: held-out top-1 by head {last['top1']}"

    def export(self, out: Path) -> str:
        """Stage 4: the trained heads as a checkpoint with the facts of their training, and their card."""
        saved, rows = read_checkpoint(self.run), {split: self._rows(split) for split in SPLITS}
        if saved is None:
            raise InputError(f"nothing was trained in {self.run}: run --stage heads first")
        if saved["run"]["data"] != rows["train"].digest():
            raise InputError(f"{self.text} holds other text than {self.run} was trained on: train again, or restore it")
        heads = self.new_heads(rows["train"])
        heads.load_state_dict(saved["heads"])
        held_out = Examples.of(self.text, "held_out", heads).spread(4 * HELD_OUT, later=False)
        text = data.facts(self.text) | {
            "digest": saved["run"]["data"],
            "tokens": {split: part.tokens.size for split, part in rows.items()},
            "own": {split: part.n_own for split, part in rows.items()},
            "coverage": round(data.coverage(rows["held_out"], heads.token_map), 5),
        }
        facts = {
            "heads": heads.config.model_dump(), "preset": self.preset, "start": self.start, "command": self.command,
            "recipe": saved["run"]["recipe"], "log": saved["log"], "text": text,
            "accuracy": [[round(share, 5) for share in row] for row in rank_shares(heads, held_out).tolist()],
            "parameters": heads.cost()["parameters"], "torch": torch.__version__.split("+")[0],
        }  # fmt: skip
        checkpoint.save(heads, out, facts=facts)
        write_atomic(out / "README.md", checkpoint.card(out.name, facts).encode())
        last = {"parameters": facts["parameters"], "coverage": text["coverage"]} | saved["log"][-1]
        return json.dumps(last, indent=1)

    def new_heads(self, rows: data.TextRows) -> Heads:
        """Untrained heads, or those of `start`. Raises InputError for options that make no heads, or not those."""
        if self.start:
            heads, _ = checkpoint.load_trained_heads(self.start, self.backbone)
            other = {key: value for key, value in self.options.items() if getattr(heads.config, key) != value}
            if other:
                actual = {key: getattr(heads.config, key) for key in other}
                raise InputError(f"{self.start} holds heads of {actual}, but {other} was asked for: ask for the same")
            return heads
        try:
            config = HeadsConfig(
                **self.options, hidden_size=self.backbone.hidden_size, vocab_size=self.backbone.vocab_size,
                backbone=self.backbone.digest, backbone_name=self.target.name,
            )  # fmt: skip
        except ValidationError as error:
            raise InputError(f"these options make no heads: {error}") from error
        token_map = data.most_frequent(rows, config.draft_vocab) if config.draft_vocab else None
        return new_heads(config, self.backbone, token_map, self.recipe.seed)

    def _rows(self, split: str) -> data.TextRows:
        """The text of a split. Raises InputError where it is another backbone's, or not as much as was asked for."""
        data.require_backbone(self.text, self.backbone.digest)
        n = len(data.files(self.text, "train"))
        if self.texts is None and n != self.batches:
            raise InputError(f"{self.text} holds {n} batches, {self.batches} were asked for: say --batches {n}")
        return data.read(self.text, split)


def command(
    context: typer.Context,
    kind: Annotated[str, typer.Option(help="medusa | hydra")] = "medusa",
    preset: Annotated[str, typer.Option(help="report | reference (GPU), cpu, minute")] = "cpu",
    stage: Annotated[
        Literal["all", "data", "hidden", "heads", "export"], typer.Option(help="one stage, or all in order")
    ] = "all",
    target: Annotated[str, typer.Option(help="the backbone, a torch model")] = TARGET,
    work: Annotated[Path | None, typer.Option(help="text, states and checkpoints [the cache]")] = None,
    out: Annotated[Path | None, typer.Option(help="folder of the heads [in --work]")] = None,
    texts: Annotated[Path | None, typer.Option(help="a .jsonl of texts to learn instead of the backbone's own")] = None,
    batches: Annotated[int, typer.Option(help="batches of 64 rows of text to write", min=1)] = 64,
    shard: Annotated[str, typer.Option(help="i/n: write every n-th batch from the i-th on")] = "0/1",
    start: Annotated[str | None, typer.Option(help="heads to start from: a folder or the name of shipped ones")] = None,
    n_heads: Annotated[int, typer.Option(min=1, max=16)] = 4,
    n_layers: Annotated[int, typer.Option(min=1, max=8)] = 1,
    norm: Annotated[str, typer.Option("--input", help="pre_norm | post_norm: the state heads are fed")] = "pre_norm",
    lm_head: Annotated[str, typer.Option(help="shared | low_rank | private")] = "shared",
    rank: Annotated[int, typer.Option(help="of low_rank", min=0)] = 0,
    draft_vocab: Annotated[int, typer.Option(help="most frequent tokens to draft from; 0: all", min=0)] = 8192,
    steps: Annotated[int | None, typer.Option(help="instead of the preset's")] = None,
    batch_size: Annotated[int | None, typer.Option(help="positions a step, instead of the preset's")] = None,
    learning_rate: Annotated[float | None, typer.Option(help="instead of the preset's")] = None,
    teacher: Annotated[float | None, typer.Option(help="share of the soft loss, instead of the preset's")] = None,
    embedding_rate: Annotated[
        float | None, typer.Option(help="of Hydra's weights on embeddings, in rates of the others [the preset's]")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="of weights and order [0]")] = None,
    save_every: Annotated[int, typer.Option(help="steps between checkpoints", min=1)] = 100,
) -> None:
    """Train heads for a frozen backbone. Stop it at any time: the same command goes on from the last checkpoint."""
    options = {"kind": kind, "n_heads": n_heads, "n_layers": n_layers, "input": norm, "lm_head": lm_head, "rank": rank,
               "draft_vocab": draft_vocab}  # fmt: skip
    changed = {"steps": steps, "batch_size": batch_size, "peak_lr": learning_rate, "teacher": teacher,
               "embedding_rate": embedding_rate, "seed": seed}  # fmt: skip
    home = work or cache_dir() / "medusa"
    training = recipe(preset, **changed)
    with closing(load(target)) as model:
        backbone = Backbone.of(network(model))
        if model.caps.details.get("attention") == hf_attention.NAME:
            raise InputError(f"{target!r} has row-wise attention, which takes no batches: add exact=False to it")
        job = Work(
            home, model, backbone, options, preset, training, batches=batches, shard=_shard(shard), texts=texts,
            start=start, save_every=save_every, command=_typed(context),
        )  # fmt: skip
        stages: dict[str, Callable[[], str]] = {
            "data": job.write_text,
            "hidden": job.compute_hidden,
            "heads": job.train,
            "export": lambda: job.export(out or home / f"{kind}-{preset}-export"),
        }
        for name in stages if stage == "all" else [stage]:
            typer.echo(f"{name}: {stages[name]()}")


def _typed(context: typer.Context) -> str:
    """The command that makes these heads from the beginning, in one go."""
    words = ["specnb heads train"]
    for option in context.command.params:
        value = context.params.get(option.name)
        if option.name not in PLACES and value is not None and value != option.default:
            words.append(f"{option.opts[0]} {shlex.quote(str(value))}")
    return " ".join(words)


def _shard(text: str) -> tuple[int, int]:
    first, _, of = text.partition("/")
    if not (first.isdecimal() and of.isdecimal() and int(first) < int(of)):
        raise InputError(f"--shard is i/n with i below n, for example 0/2, got {text!r}")
    return int(first), int(of)


if __name__ == "__main__":
    script.run("medusa.train", command)
