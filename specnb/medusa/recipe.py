"""Recipes: everything that trained heads depend on besides the data and the weights they start from."""

import math
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from specnb.errors import InputError


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
    bf16: bool = True

    def __post_init__(self) -> None:
        scales = self.clip, self.head_weight, self.embedding_rate
        if min(self.steps, self.batch_size) < 1 or self.warmup < 0 or min(scales) <= 0:
            raise InputError(
                f"a recipe needs steps, batch_size, clip, head_weight and embedding_rate above 0, got {self}"
            )
        if not 0 < self.eta_min <= self.peak_lr:
            raise InputError(
                f"eta_min {self.eta_min} must be above 0, or the last steps train nothing, and at most peak_lr"
            )
        if not 0 <= self.teacher <= 1:
            raise InputError(f"teacher is a share of the loss, 0 to 1, got {self.teacher}")

    def lr(self, step: int) -> float:
        """The rate of a step, counted from 0: above zero at the first, peak_lr after warm-up, eta_min at the last."""
        if step < self.warmup:
            return self.peak_lr * (step + 1) / self.warmup
        done = (step - self.warmup) / max(1, self.steps - 1 - self.warmup)
        return self.eta_min + (self.peak_lr - self.eta_min) * (1 + math.cos(math.pi * min(1.0, done))) / 2


PRESETS = MappingProxyType(
    {
        "report": Recipe(30_000, batch_size=4096, peak_lr=3e-4),
        "reference": Recipe(30_000, batch_size=4096, peak_lr=1e-3),
        "cpu": Recipe(2500, batch_size=1024, peak_lr=2e-3, warmup=100, embedding_rate=8.0),
        "minute": Recipe(60, batch_size=512, peak_lr=2e-3, warmup=5, embedding_rate=8.0),
    }
)
"""`report` is the Medusa note's, `reference` the same at the rate of the original repository; both are for a GPU.
`cpu` takes about an hour on two cores, `minute` is for looking on."""


def recipe(preset: str, **changed: Any) -> Recipe:
    """A preset; what is not None in `changed` takes the place of its values. Raises InputError: no such preset."""
    if preset not in PRESETS:
        raise InputError(f"no preset {preset!r}: there are {', '.join(PRESETS)}")
    made = {key: value for key, value in changed.items() if value is not None}
    if "steps" in made and "warmup" not in made:  # a short run with a long warm-up would never reach its rate
        made["warmup"] = min(PRESETS[preset].warmup, made["steps"] // 10)
    return replace(PRESETS[preset], **made)
