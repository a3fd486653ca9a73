"""Training recipes, and code shared by heads and jump drafters in training: batches, metrics."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from specnb.errors import InputError, require_known
from specnb.io import read_toml
from specnb.machine import auto_dtype
from specnb.medusa.jump import KINDS


@dataclass(frozen=True)
class Recipe:
    """`steps` of AdamW on `batch_size` positions; linear warm-up, then a cosine to `eta_min`.

    `clip` is the maximum gradient norm. `head_weight ** k` is the weight of head k's loss (Cai et
    al. 2401.10774, section 2.2.1). `teacher` is the share of the loss against the backbone's
    probabilities instead of its token (Hydra's teacher loss, Ankner et al. 2402.05109). Hydra's
    weights on embeddings use `embedding_rate` times the learning rate: AdamW updates all weights by
    about the same amount, and embeddings may be much smaller than normed hidden states
    (SmolLM2-135M: 0.1 and 1.1 in the median dimension).

    Jump drafters are trained on roll-outs of `roll_out` steps, with a share `lk` of the LK loss.
    The copied block uses `copy_rate` times the learning rate.
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
            raise InputError(
                f"got {self}, "
                "expected positive numbers, teacher from 0 to 1, eta_min at most peak_lr"
            )

    def lr(self, step: int) -> float:
        """Return the learning rate of a step, from 0: peak_lr after warm-up, eta_min at the end."""
        if step < self.warmup:
            return self.peak_lr * (step + 1) / self.warmup
        done = (step - self.warmup) / max(1, self.steps - 1 - self.warmup)
        return (
            self.eta_min
            + (self.peak_lr - self.eta_min) * (1 + math.cos(math.pi * min(1.0, done))) / 2
        )


PRESETS, JUMP_PRESETS = (
    {name: Recipe(**values) for name, values in presets.items()}
    for presets in read_toml(Path(__file__).with_name("recipes.toml")).values()
)
"""Recipes by name, for heads and for a `JumpNet`."""


def recipe_for(preset: str, kind: str = "medusa", **changed: Any) -> Recipe:
    """Return a preset with the values of `changed` that are not None. Raises InputError."""
    presets = JUMP_PRESETS if kind in KINDS else PRESETS
    require_known("preset", preset, presets)
    values = {key: value for key, value in changed.items() if value is not None}
    if "steps" in values:  # a short run would end within a long warm-up
        values = {"warmup": min(presets[preset].warmup, values["steps"] // 10)} | values
    return replace(presets[preset], **values)


TOP = 5
"""Number of best tokens that are compared with the label."""
Figures = dict[str, Any]
"""Unweighted metrics of a batch: numbers, and lists by head or roll-out step."""


def round_figures(**figures: Tensor) -> Figures:
    """Return metrics as Python numbers and lists, rounded to five decimals."""
    return {name: figure.double().round(decimals=5).tolist() for name, figure in figures.items()}


def hits_by_rank(logits: Tensor, labels: Tensor) -> Tensor:
    """Return whether the label is the r-th best token of `logits (n, draft_size)`: `(n, TOP)` bool.

    `labels (n,)` are draft ids; negative ones never match.
    """
    return logits.topk(min(TOP, logits.shape[-1])).indices == labels[:, None]


class Batches:
    """Batches by step, a function of (seed, step). Subclasses set `n_items` and define `batch`."""

    n_items: int
    positions = 1
    """Positions of the text per item."""

    def batch(self, chosen: Tensor) -> Any:
        """Return the batch of the items with the indices `chosen`."""
        raise NotImplementedError

    def at_step(self, step: int, recipe: Recipe) -> Any:
        """Return the batch of a step, drawn without replacement.

        Raises InputError if there are too few items.
        """
        n = recipe.batch_size // self.positions
        if n > self.n_items:
            raise InputError(
                f"got {self.n_items} examples, expected at least {n} for a batch: write more text"
            )
        drawn = np.random.default_rng([recipe.seed, step]).choice(self.n_items, n, replace=False)
        return self.batch(torch.from_numpy(drawn))

    def spread(self, n: int) -> Any:
        """Return a batch of `n` to 2n evenly spaced items, or all if fewer."""
        return self.batch(torch.arange(0, self.n_items, max(1, self.n_items // n)))


@contextmanager
def in_float32(net: Any) -> Iterator[None]:
    """Convert a drafter's weights to float32 inside the block, as for training.

    On devices without bfloat16 in hardware, the shared lm_head is also converted: losses then use
    float32 matrix products, otherwise bfloat16.
    """
    lm_head = net.shared_lm_head
    net.float()
    if auto_dtype(str(lm_head.device)) == "float32":
        net.shared_lm_head = lm_head.float()
    try:
        yield
    finally:
        net.shared_lm_head = lm_head
        net.to(lm_head.dtype)


class Lesson(NamedTuple):
    """A training task: batches of a text, their loss, and that of held-out text.

    `prepare` sets initial weights; it is not called when training resumes.
    """

    batches: Batches
    loss: Callable[[Any, Recipe, Any], tuple[Tensor, Figures]]
    held_out: Callable[[], tuple[Tensor, Figures]]
    prepare: Callable[[], None] = lambda: None

    @torch.no_grad()
    def judge(self) -> Figures:
        """Return the metrics on held-out text."""
        return self.held_out()[1]
