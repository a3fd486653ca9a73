"""Train heads: examples of a text, loss, checkpoints, export.

`specnb heads train --kind medusa --preset cpu` runs all stages. Every stage resumes where it was
stopped, and a resumed run ends with bit-identical weights. The backbone is frozen: it generates the
text with its hidden states once (`data`), and does not run during the training.
"""

import io
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from specnb.errors import EngineError, InputError, require_known
from specnb.io import read_json, read_toml, reading, validated, write_atomic
from specnb.lm.base import LanguageModel
from specnb.measure.experiment import Progress
from specnb.medusa import data
from specnb.medusa.data import SPLITS, TextRows, Writing
from specnb.medusa.jump import KINDS, JumpConfig, JumpNet, new_jump, read_layers
from specnb.medusa.nets import Heads, HeadsConfig, backbone_of, draft_ids, new_heads

# --- examples: a hidden state, and the tokens that heads must predict from it ---

NO_LABEL = -100


class ExampleBatch(NamedTuple):
    """A batch of examples: hidden states, and the tokens after them.

    `hidden (batch, hidden)`; the next tokens `ids` and the draft ids `labels`, both `(batch,
    n_heads)`; and `later (batch, n_heads, hidden)`, the states that predict the labels.
    """

    hidden: Tensor
    ids: Tensor
    labels: Tensor
    later: Tensor


class Drawn:
    """Batches by step, a function of (seed, step). Subclasses have a length and a `batch` method."""

    positions = 1
    """Positions of the text per item."""

    def at_step(self: Any, step: int, recipe: "Recipe") -> Any:
        """Return the batch of a step, drawn without replacement.

        Raises InputError if there are too few items.
        """
        n = recipe.batch_size // self.positions
        if n > len(self):
            raise InputError(f"got {len(self)} examples, a batch takes {n}: write more text")
        drawn = np.random.default_rng([recipe.seed, step]).choice(len(self), n, replace=False)
        return self.batch(torch.from_numpy(drawn))

    def spread(self: Any, n: int) -> Any:
        """Return a batch of about `n` items at equal distances."""
        return self.batch(torch.arange(0, len(self), max(1, len(self) // n)))


class Examples(Drawn):
    """All examples of a split: one per position t whose token t + 2 the backbone generated.

    Heads take the hidden state of token t. The label of head i is token t + 2 + i, as long as the
    backbone generated all tokens from t + 2 to there; Hydra's head i reads tokens t + 1 … t + 1 +
    i.
    """

    def __init__(self, folder: Path, split: str, heads: Heads) -> None:
        """Read the text in `folder` and its states before the final norm, for these heads."""
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
        self._draft_id = draft_ids(heads)

    def __len__(self) -> int:
        return len(self._places)

    def batch(self, chosen: Tensor) -> ExampleBatch:
        """Return the examples with these numbers."""
        positions, labeled = self._places[chosen], self._labeled[chosen]
        since = positions[:, None] + 1 + torch.arange(labeled.shape[1])
        labels = torch.where(labeled, self._draft_id[self._tokens[since + 1]], NO_LABEL)
        return ExampleBatch(self._hidden[positions], self._tokens[since], labels, self._hidden[since])


# --- the recipe, and the loss of a batch ---


@dataclass(frozen=True)
class Recipe:
    """`steps` of AdamW on `batch_size` positions; linear warm-up, then a cosine to `eta_min`.

    `head_weight ** k` is the weight of head k's loss (Cai et al. 2401.10774, section 2.2.1).
    `teacher` is the share of the loss that compares with the backbone's probabilities instead of
    its token (Hydra's teacher loss, Ankner et al. 2402.05109). Hydra's weights on embeddings are
    moved at `embedding_rate` times the learning rate: AdamW moves all weights by about the same
    amount, and embeddings may be much smaller than normed hidden states (SmolLM2-135M: 0.1 and 1.1
    in the median dimension).

    Jump drafters are trained on roll-outs of `roll_out` steps, with a share `lk` of the LK loss.
    The copied block is moved at `copy_rate` times the learning rate.
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
    roll_out: int = 5
    lk: float = 0.5
    copy_rate: float = 0.5
    seed: int = 0

    def __post_init__(self) -> None:
        positive = min(self.steps, self.batch_size, self.eta_min, self.embedding_rate) > 0
        if not positive or not 0 <= self.teacher <= 1 or self.eta_min > self.peak_lr:
            expected = "positive numbers, a teacher from 0 to 1, eta_min at most peak_lr"
            raise InputError(f"got {self}, expected {expected}")

    def lr(self, step: int) -> float:
        """Return the learning rate of a step, from 0: peak_lr after warm-up, eta_min at the end."""
        if step < self.warmup:
            return self.peak_lr * (step + 1) / self.warmup
        done = (step - self.warmup) / max(1, self.steps - 1 - self.warmup)
        return self.eta_min + (self.peak_lr - self.eta_min) * (1 + math.cos(math.pi * min(1.0, done))) / 2


PRESETS, JUMP_PRESETS = (
    {name: Recipe(**values) for name, values in presets.items()}
    for presets in read_toml(Path(__file__).with_name("recipes.toml")).values()
)
"""Recipes of heads, and of a `JumpNet`."""
HELD_OUT = 4096
"""Held-out examples per logged accuracy."""
TOP = 5


def recipe(preset: str, kind: str = "medusa", **changed: Any) -> Recipe:
    """Return a preset with the values of `changed` that are not None. Raises InputError if unknown."""
    presets = JUMP_PRESETS if kind in KINDS else PRESETS
    require_known("preset", preset, presets)
    values = {key: value for key, value in changed.items() if value is not None}
    if "steps" in values:  # a short run would not get past a long warm-up
        values = {"warmup": min(presets[preset].warmup, values["steps"] // 10)} | values
    return replace(presets[preset], **values)


Figures = dict[str, Any]
"""Measurements of a batch, unweighted: numbers, and lists by head or step."""
Log = list[Figures]


def round_figures(**figures: Tensor) -> Figures:
    """Return figures rounded to five decimals, for a log."""
    return {name: figure.double().round(decimals=5).tolist() for name, figure in figures.items()}


def objective(heads: Heads, recipe: Recipe, batch: ExampleBatch) -> tuple[Tensor, Figures]:
    """Return the loss of a batch, and the figures of each head over its labeled examples.

    The loss is the sum over heads of head_weight^k ((1 - teacher) hard + teacher soft), in nats.
    Hard is the cross-entropy with the backbone's token; soft is KL(backbone || head) over the draft
    vocabulary. Matrix products are in bfloat16 unless the backbone is float32.

    `head_loss` is the cross-entropy over labels in the draft vocabulary. `rank_shares (n_heads,
    TOP)` is how often the label is the r-th best token, `top1` and `top5` how often it is among the
    best.
    """
    lm_head = heads.shared_lm_head
    losses, head_loss, rank_shares = [], [], []
    batch = ExampleBatch(*(part.to(lm_head.device) for part in batch))
    with torch.autocast(lm_head.device.type, torch.bfloat16, enabled=lm_head.dtype != torch.float32):
        normed = heads.norm(batch.hidden.to(lm_head.dtype))  # also for post_norm heads
        for i in range(heads.config.n_heads):
            rows = heads.logits(i, heads.features(i, normed, batch.ids)).float().log_softmax(-1)
            labels = batch.labels[:, i]
            drafted = labels >= 0
            n_labels = (labels != NO_LABEL).sum().clamp(min=1)
            hard = F.nll_loss(rows[drafted], labels[drafted], reduction="sum") / drafted.sum().clamp(min=1)
            loss = hard
            if recipe.teacher:
                later = heads.norm(batch.later[:, i].to(lm_head.dtype))
                teacher = F.linear(later, lm_head).float().log_softmax(-1)
                divergence = F.kl_div(rows, teacher, reduction="none", log_target=True).sum(-1)
                soft = (divergence * (labels != NO_LABEL)).sum() / n_labels
                loss = (1 - recipe.teacher) * hard + recipe.teacher * soft
            losses.append(recipe.head_weight**i * loss)
            best = rows.topk(min(TOP, rows.shape[-1])).indices
            hits = (best == labels[:, None]) & drafted[:, None]
            head_loss.append(hard)
            rank_shares.append(hits.sum(0) / n_labels)
    shares = torch.stack(rank_shares)
    return torch.stack(losses).sum(), round_figures(
        head_loss=torch.stack(head_loss), top1=shares[:, 0], top5=shares.sum(1), rank_shares=shares
    )


# --- the loop, and its checkpoints ---

Trainee = Heads | JumpNet
CHECKPOINT_FILE = "checkpoint.pt"


def train(heads: Heads, recipe: Recipe, text: Path, folder: Path, **options: Any) -> Log:
    """Train `heads` in place on the text in a folder. `options` and errors are those of `fit`."""
    examples, held_out = (Examples(text, split, heads) for split in SPLITS)

    def judge() -> tuple[Tensor, Figures]:
        return objective(heads, recipe, held_out.spread(HELD_OUT))

    return fit(heads, recipe, objective, examples, judge, text, folder, **options)


def fit(
    net: Trainee,
    recipe: Recipe,
    loss_of: Callable,
    drawn: Drawn,
    judge: Callable,
    text: Path,
    folder: Path,
    *,
    save_every: int = 100,
    on_step: Callable = lambda *step: None,
) -> Log:
    """Train `net` in place, from the checkpoint in `folder` if there is one, and return the log.

    `loss_of(net, recipe, batch)` returns loss and figures of a batch of `drawn`, `judge()` those of
    held-out text. Weights are float32 during the training. Every `save_every` steps a checkpoint is
    written, and a line of the log: step, examples, lr, weighted loss, held-out figures. `on_step`
    is called with step, weighted loss and the figures of the batch.

    Raises InputError if the folder's checkpoint has another text, recipe or config, and EngineError
    for a gradient that is not finite.
    """
    dtype = net.shared_lm_head.dtype
    net.float()
    try:
        optimizer = AdamW(net.parameters(), lr=recipe.peak_lr, weight_decay=recipe.weight_decay)
        run = {"recipe": asdict(recipe), "heads": net.config.model_dump(mode="json")}
        run["data"] = data.read(text, "train").digest()
        start, log, file = 0, [], folder / CHECKPOINT_FILE
        if file.exists():
            with reading(file):
                saved = torch.load(file, map_location="cpu", weights_only=True)
                if other := [key for key in run if saved["run"][key] != run[key]]:
                    raise InputError(f"{folder} holds another run: {' and '.join(other)} differ. Use another folder")
                net.load_state_dict(saved["heads"])
                optimizer.load_state_dict(saved["optimizer"])
            start, log = saved["step"], saved["log"]
        for step in range(start + 1, recipe.steps + 1):
            loss, figures = loss_of(net, recipe, drawn.at_step(step - 1, recipe))
            _update(net, recipe, optimizer, loss, step - 1)
            on_step(step, loss.item(), figures)
            if step % save_every == 0 or step == recipe.steps:
                line = {"step": step, "examples": step * recipe.batch_size, "lr": recipe.lr(step - 1)}
                with torch.no_grad():
                    _, judged = judge()
                log.append(line | {"loss": loss.item()} | judged)
                states = {"heads": net.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save({"run": run, "step": step, "log": log} | states, packed := io.BytesIO())
                write_atomic(file, packed.getvalue())
    finally:
        net.to(dtype)
    return log


def time_step(net: Trainee, recipe: Recipe, loss_of: Callable, drawn: Drawn) -> float:
    """Return the seconds of one forward and backward pass, to estimate the time of a training."""
    batch = drawn.at_step(0, recipe)
    loss_of(net, recipe, batch)
    start_s = time.perf_counter()
    loss_of(net, recipe, batch)[0].backward()
    net.zero_grad(set_to_none=True)
    return time.perf_counter() - start_s


def _update(net: Trainee, recipe: Recipe, optimizer: Optimizer, loss: Tensor, step: int) -> None:
    """Update the weights by the loss of a step, from 0."""
    loss.backward()
    if not nn.utils.clip_grad_norm_(net.parameters(), recipe.clip).isfinite():
        broken = f"the gradient of step {step} is not finite (loss {loss.item()})"
        raise EngineError(f"{broken}: lower peak_lr ({recipe.peak_lr}); the last checkpoint is intact")
    for group in optimizer.param_groups:
        group["lr"] = recipe.lr(step)
    weights, rate = net.scaled_rates
    before = [weight.clone() for weight in weights]
    optimizer.step()
    for weight, old in zip(weights, before, strict=True):
        weight.copy_(torch.lerp(old, weight, getattr(recipe, rate)))
    optimizer.zero_grad(set_to_none=True)


# --- from a model to heads and the facts beside their weights ---


def config_for(model: LanguageModel, **options: Any) -> HeadsConfig | JumpConfig:
    """Return the config of a drafter. Raises InputError for `options` that do not fit the model."""
    backbone, kind = backbone_of(model), options["kind"]
    where = f"a drafter for {model.name}"
    if options["draft_vocab"] > backbone.vocab_size:
        got = f"got --draft-vocab {options['draft_vocab']}"
        raise InputError(f"{got}, expected at most {backbone.vocab_size}, the vocabulary of {model.name}")
    options |= {"hidden_size": backbone.hidden_size, "vocab_size": backbone.vocab_size}
    options |= {"backbone": backbone.digest, "backbone_name": model.name}
    if kind in KINDS:
        return validated(JumpConfig, options | read_layers(kind, model), where)
    return validated(HeadsConfig, options, where)


def write_training_text(model: LanguageModel, text: Path, batches: int, progress: Progress) -> TextRows:
    """Generate the batches of text that the folder lacks, and return the training text."""
    splits = {"held_out": 2, "train": batches}
    data.write_splits(model, text, batches=splits, writing=Writing(), progress=progress)
    return data.read(text, "train")


def make_heads(model: LanguageModel, config: HeadsConfig | JumpConfig, rows: TextRows, seed: int) -> Trainee:
    """Return an untrained drafter. Its draft vocabulary is the most frequent tokens of `rows`."""
    token_map = data.most_frequent(rows, config.draft_vocab, config.vocab_size) if config.draft_vocab else None
    if isinstance(config, JumpConfig):
        return new_jump(config, model, token_map, seed)
    return new_heads(config, backbone_of(model), token_map, seed)


def training_facts(net: Trainee, recipe: Recipe, log: Log, text: Path) -> dict[str, Any]:
    """Return the facts of a training.

    Trees are chosen by `accuracy`, the accuracies on held-out text.
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
    """Return the card of a trained drafter, in Markdown, from the facts of its training."""
    config, text, recipe = facts["heads"], facts["text"], facts["recipe"]
    last = facts["log"][-1]
    shares = ", ".join(f"{share:.3f}" for share in last["top1"])
    tau = last.get("greedy_tau", 1 + np.cumprod(last["top1"]).sum())
    return f"""# `{config["kind"]}`, a drafter for `{config["backbone_name"]}`

{facts["parameters"] / 1e6:.2f} M parameters of its own; it drafts from {config["draft_vocab"]:,} tokens.

On held-out text that the target generated, the share of best tokens that are right is {shares}, by draft position.
A round yields {tau:.2f} tokens in greedy decoding.

Trained on {text["tokens"]["train"]:,} tokens of text, {text["own"]["train"]:,} of them generated by the target:
{recipe["steps"]:,} steps of {recipe["batch_size"]:,} positions, peak learning rate {recipe["peak_lr"]:g}.
The learning curve is in `training.json`.
"""
