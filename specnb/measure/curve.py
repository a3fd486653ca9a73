"""What a training log tells of its schedule: whether the learning rate lived to the end, and the loss still fell."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from specnb.errors import InputError
from specnb.io import read_json

TRAINING_FILE = "training.json"
"""What a training leaves beside its weights: recipe, log (lines of step, lr, loss), accuracy."""
MAX_BYTES = 32 << 20
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
        """From lines with step, lr and loss (a number, or one a head). Raises InputError for what is no such log."""
        try:
            rows = [(float(line["step"]), float(line["lr"]), float(np.mean(line["loss"]))) for line in log]
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"a training log has step, lr and loss in every line: {error!r:.80}") from error
        data = np.asarray(rows, dtype=float).reshape(-1, 3)
        sound = len(data) and np.isfinite(data).all() and (data >= 0).all() and data[:, 1].max() > 0
        if not sound or not (np.diff(data[:, 0], prepend=0.0) > 0).all():
            raise InputError("a training log has rising steps, finite losses, and rates of which some are above 0")
        return cls(*data.T)

    @property
    def dead_share(self) -> float:
        """Share of all steps that were made at a rate below DEAD of the highest, behind that highest one."""
        widths = np.diff(self.step, prepend=0.0)
        return float(widths[self._behind_highest & (self.lr <= DEAD * self.lr.max())].sum() / self.step[-1])

    @property
    def dead(self) -> bool:
        """Whether, behind the highest rate, it was dead for DEAD_SHARE of all steps, or zero before the last line."""
        zero = self._behind_highest & (self.lr == 0)
        return self.dead_share >= DEAD_SHARE or bool(zero[:-1].any())

    @property
    def _behind_highest(self) -> np.ndarray:
        """The lines behind that of the highest rate: what comes before is a warm-up, which may begin at 0."""
        return np.arange(len(self.lr)) > int(self.lr.argmax())

    @property
    def falling(self) -> bool:
        """Whether the loss still fell in the last quarter of the steps whose rate was alive."""
        alive = self.loss[: max(1, int((self.lr > DEAD * self.lr.max()).nonzero()[0][-1]) + 1)]
        quarter = max(1, len(alive) // 4)
        last, before = alive[-quarter:].mean(), alive[-2 * quarter : -quarter]
        return bool(len(before)) and float(last) < (1 - FALL) * float(before.mean())

    def __str__(self) -> str:
        if not self.dead:
            return f"the learning rate, {self.lr.max():.2g} at its highest, was alive in all {self.step[-1]:.0f} steps"
        state = "still falling" if self.falling else "no longer falling"
        return (
            f"{self.dead_share:.0%} of {self.step[-1]:.0f} steps were made at less than a thousandth of the highest "
            f"learning rate ({self.lr.max():.2g}), with the loss {state} when it died"
        )


def training_card(checkpoint: Path) -> dict[str, Any]:
    """The training.json of a checkpoint, a folder or a file in one; empty where there is none. Raises InputError."""
    card = (checkpoint if checkpoint.is_dir() else checkpoint.parent) / TRAINING_FILE
    return read_json(card, MAX_BYTES) if card.exists() else {}


def read(checkpoint: Path) -> Curve | None:
    """The curve that came with a checkpoint, a folder or a file in one; None without one. Raises InputError."""
    log = training_card(checkpoint).get("log")
    try:
        return Curve.of(log) if log else None
    except InputError as error:
        raise InputError(f"{TRAINING_FILE} of {checkpoint}: {error}") from error
