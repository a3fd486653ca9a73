"""Recipes: all that a training stage's result depends on, except data and starting weights."""

from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from specnb.errors import InputError

from . import shapes

DECAY_SHARE = 0.2


@dataclass(frozen=True)
class Recipe:
    """One stage.

    The learning rate rises, stays, and falls in a straight line over the last fifth (warm-up,
    stable, decay; Hu et al. 2024, arXiv 2404.06395). `bf16` are the matrix products; `distilled`
    takes the target's rows for what is to be learned, in place of the text's next token.
    """

    name: str
    steps: int
    batch_size: int = 4
    length: int = 512
    peak_lr: float = 1.5e-3
    warmup: int = 100
    weight_decay: float = 0.1
    clip: float = 1.0
    seed: int = 0
    bf16: bool = True
    distilled: bool = False

    def __post_init__(self) -> None:
        if min(self.steps, self.batch_size, self.length) < 1 or self.peak_lr <= 0 or self.clip <= 0:
            raise InputError(
                f"a recipe needs steps, batch_size, length, peak_lr and clip above 0, got {self}"
            )

    @property
    def decay_start(self) -> int:
        """The first step whose rate depends on the number of steps."""
        return self.steps - int(DECAY_SHARE * self.steps)

    def lr(self, step: int) -> float:
        """The learning rate of a step, counted from 0."""
        rising = min(1.0, (step + 1) / self.warmup) if self.warmup else 1.0
        falling = min(1.0, (self.steps - step) / (self.steps - self.decay_start + 1))
        return self.peak_lr * rising * falling


PRESETS = MappingProxyType(
    {
        "cpu": {
            "target": Recipe(shapes.TARGET, 3600, batch_size=4, peak_lr=1.5e-3),
            "draft": Recipe(shapes.DRAFT, 1500, batch_size=4, peak_lr=3e-3),
            "distil": Recipe(
                shapes.DRAFT, 1500, batch_size=4, peak_lr=2e-3, distilled=True, seed=1
            ),
        },
        "full": {
            "target": Recipe(shapes.TARGET, 12_000, batch_size=32, peak_lr=3e-3, warmup=300),
            "draft": Recipe(shapes.DRAFT, 4000, batch_size=32, peak_lr=4e-3, warmup=300),
            "distil": Recipe(
                shapes.DRAFT, 12_000, batch_size=32, peak_lr=3e-3, distilled=True, seed=1
            ),
        },
    }
)
"""Recipes by stage: `cpu` takes about an hour and a half on one core, `full` is for one GPU."""


def recipe(preset: str, stage: str, **changed: Any) -> Recipe:
    """The recipe of a stage; what is not None in `changed` takes the place of the preset's.

    InputError if there is no such recipe.
    """
    if preset not in PRESETS or stage not in PRESETS[preset]:
        raise InputError(
            f"no recipe {preset!r}/{stage!r}: "
            f"presets are {', '.join(PRESETS)}, stages target, draft, distil"
        )
    return replace(
        PRESETS[preset][stage],
        **{key: value for key, value in changed.items() if value is not None},
    )


def command(stage: str, training: Recipe) -> str:
    """What to type to get this recipe; compares with each preset. InputError if none fits."""
    for preset in PRESETS:
        if (
            recipe(preset, stage, steps=training.steps, seed=training.seed, bf16=training.bf16)
            == training
        ):
            flags = (
                f"--preset {preset} --stage {stage} --steps {training.steps} --seed {training.seed}"
            )
            return (
                f"python -m data.models.train_tiny {flags}{'' if training.bf16 else ' --no-bf16'}"
            )
    raise InputError(f"{training} belongs to no preset: it was not made by train_tiny")
