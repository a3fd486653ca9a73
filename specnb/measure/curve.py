"""What a training log tells of its schedule: whether the learning rate lived to the end, and the loss still fell."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from specnb.io import read_json

TRAINING_FILE = "training.json"
"""What a training leaves beside its weights: recipe, log (lines of step, lr, loss), accuracy."""
DEAD = 1e-3
"""Share of the highest rate below which a rate moves nothing that counts; the presets end at 1/30 and 1/100."""
DEAD_SHARE = 0.05
"""Share of the steps with a dead rate that is a fault. A cosine to exactly zero, which many use, has 2 % of them."""
FALL = 0.005
"""Relative fall of the loss from one quarter of the living steps to the next that is still worth training for."""


@dataclass(frozen=True)
class Curve:
    """`step`, `lr` and mean unweighted `loss` of each line of a training log, in order of the steps."""

    step: np.ndarray
    lr: np.ndarray
    loss: np.ndarray

    @classmethod
    def of(cls, log: Sequence[Mapping[str, Any]]) -> "Curve":
        """From lines with rising step, lr and loss (a number, or one a head)."""
        return cls(*np.array([(line["step"], line["lr"], np.mean(line["loss"])) for line in log], dtype=float).T)

    @property
    def dead_share(self) -> float:
        """Share of all steps at a rate below DEAD of the highest, behind that one: a warm-up may begin at 0."""
        widths, top = np.diff(self.step, prepend=0.0), int(self.lr.argmax())
        return float(widths[top:][self.lr[top:] <= DEAD * self.lr[top]].sum() / self.step[-1])

    @property
    def dead(self) -> bool:
        """Whether, behind the highest rate, it was dead for DEAD_SHARE of all steps, or zero before the last line."""
        return self.dead_share >= DEAD_SHARE or bool((self.lr[self.lr.argmax() : -1] == 0).any())

    @property
    def falling(self) -> bool:
        """Whether the loss still fell in the last quarter of the steps whose rate was alive."""
        alive = self.loss[: int(np.flatnonzero(self.lr > DEAD * self.lr.max())[-1]) + 1]
        quarter = max(1, len(alive) // 4)
        last, before = alive[-quarter:], alive[-2 * quarter : -quarter]
        return bool(len(before)) and float(last.mean()) < (1 - FALL) * float(before.mean())

    def __str__(self) -> str:
        highest, steps = f"{self.lr.max():.2g}", f"{self.step[-1]:.0f} steps"
        if not self.dead:
            return f"the learning rate, {highest} at its highest, was alive in all {steps}"
        loss = "still falling" if self.falling else "no longer falling"
        return f"{self.dead_share:.0%} of {steps} at under {DEAD:g} of the highest rate ({highest}), the loss {loss}"


def training_card(checkpoint: Path) -> dict[str, Any]:
    """The training.json of a checkpoint, a folder or a file in one; empty where there is none. Raises InputError."""
    card = (checkpoint if checkpoint.is_dir() else checkpoint.parent) / TRAINING_FILE
    return read_json(card) if card.exists() else {}


def read(checkpoint: Path) -> Curve | None:
    """The curve that came with a checkpoint, a folder or a file in one; None without one. Raises InputError."""
    log = training_card(checkpoint).get("log")
    return Curve.of(log) if log else None
