"""Short trainings that a reader can watch: a little text by the backbone, and heads that learn from it.

Short of what heads need by a factor of hundreds: they show how training goes, not what it can reach.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import pandas as pd
import torch

from specnb.errors import SpecnbError
from specnb.lm.load import load
from specnb.measure.experiment import Progress, silent
from specnb.medusa import data, hidden, train_loop
from specnb.medusa.backbone import Backbone
from specnb.medusa.examples import Examples
from specnb.medusa.heads import Heads
from specnb.medusa.recipe import Recipe
from specnb.medusa.stream import Writing

PACKAGES = ("rich", "transformers")
"""Whose texts the seeds are made from: the smallest with code and prose on both sides of the split, read in seconds."""
KILLED_AFTER, KILL_STEPS, KILL_BATCH = 2, 4, 32
"""Of the run that is killed and goes on: as short as can be, with steps of the optimizer on both sides."""


class Watch:
    """Who looks on: told the seconds of a step before the first one, then every step. This one looks away."""

    def starts(self, run: str, steps: int, seconds_a_step: float) -> None:
        """Training `run` is about to begin."""

    def step(self, run: str, report: train_loop.Report) -> None:
        """A step was made; the figures are those of its batch, unweighted by head."""


def write_text(
    target: str,
    folder: Path,
    *,
    rows: int,
    length: int,
    dtype: str,
    seed: int = 0,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Have the backbone write `rows` rows of `length` tokens to learn from, and as many held out; with their states.

    Returns what came of it: tokens, how many are the backbone's own choice, seconds. Raises InputError where the
    target writes no such rows.
    """
    made = Writing(
        length=length, batch_size=rows, longest_seed=length // 3, longest_answer=length // 2,
        longest_request=max(1, length // 4), seed=seed,
    )  # fmt: skip
    began, total, done = perf_counter(), 2 * len(data.SPLITS) * rows * length, 0

    def on_tokens(n: int) -> None:
        nonlocal done
        done = min(total, done + n)
        progress(done, total, "text by the backbone, and its states")

    # row-wise exact attention is for one sequence, and this is a batch
    writer = load(target, backend="hf", dtype=dtype, exact=False)
    try:
        digest = Backbone.of(writer.network).digest
        batches = dict.fromkeys(data.SPLITS, 1)
        data.write(
            writer, writer.network, folder, batches=batches, made=made, backbone=digest, packages=PACKAGES,
            on_tokens=on_tokens,
        )  # fmt: skip
        hidden.compute(writer.network, folder, backbone=digest, on_tokens=on_tokens)
    finally:
        writer.close()
    text = {split: data.read(folder, split) for split in data.SPLITS}
    return {
        **{f"{split}_tokens": one.tokens.size for split, one in text.items()},
        **{f"{split}_own": one.n_own for split, one in text.items()},
        "seconds": perf_counter() - began,
    }


def sets(folder: Path, heads: Heads) -> dict[str, Examples]:
    """The examples of each split for these heads."""
    return {split: Examples.of(folder, split, data.read(folder, split), heads) for split in data.SPLITS}


@dataclass(frozen=True)
class Practised:
    """A short training: its log, `before` and the last line's accuracies, and what was foretold of its time."""

    run: str
    log: list[dict[str, Any]]
    before: dict[str, list[float]]
    told_s: float
    took_s: float

    def rows(self) -> list[dict[str, Any]]:
        """A row for each head: held-out top-1 and top-5 before and after, told and taken seconds."""
        after = self.log[-1]
        return [
            {
                "run": self.run, "head": head, "steps": after["step"], "told_s": self.told_s, "took_s": self.took_s,
                "top1_before": self.before["top1"][head], "top1": after["top1"][head],
                "top5_before": self.before["top5"][head], "top5": after["top5"][head],
            }
            for head in range(len(after["top1"]))
        ]  # fmt: skip


def practise(
    run: str, heads: Heads, recipe: Recipe, text: Path, folder: Path, *, watch: Watch | None = None, save_every: int = 0
) -> Practised:
    """Train `heads` in place by the loop that trained the shipped ones; `save_every` 0 logs the last step only."""
    watch, told = watch or Watch(), 0.0
    of = sets(text, heads)
    heads.float()
    before = train_loop.evaluate(heads, recipe, of["held_out"])

    def on_start(seconds: float, left: int) -> None:
        nonlocal told
        told = seconds * left
        watch.starts(run, recipe.steps, seconds)

    began = perf_counter()
    log = train_loop.train(
        heads, recipe, of["train"], of["held_out"], folder, data=data.read(text, "train").digest(),
        save_every=save_every or recipe.steps, on_start=on_start, on_step=lambda report: watch.step(run, report),
    )  # fmt: skip
    return Practised(run, log, before, told, perf_counter() - began)


class _Killed(SpecnbError):
    """Thrown into the training that is to go on later."""


def survives_a_kill(make: Callable[[], Heads], text: Path, folder: Path, *, seed: int = 0) -> pd.DataFrame:
    """Train twice, once killed after KILLED_AFTER steps and gone on with; whether the weights are the same.

    One row for each tensor of the heads: name, values, `differing` values (bitwise), and whether it was `trained` at
    all, for two trainings that change nothing agree as well.
    """
    recipe = Recipe(KILL_STEPS, batch_size=KILL_BATCH, warmup=1, seed=seed)

    def kill(report: train_loop.Report) -> None:
        if report.step > KILLED_AFTER:
            raise _Killed("as planned")

    def train(where: str, **options: Any) -> dict[str, torch.Tensor]:
        heads = make()
        of = sets(text, heads)
        train_loop.train(
            heads, recipe, of["train"], of["held_out"], folder / where, data="kill", save_every=1, **options
        )
        return train_loop.read_checkpoint(folder / where)["heads"]  # float32: afterwards heads are rounded

    whole = train("whole")
    with suppress(_Killed):
        train("killed", on_step=kill)
    again = train("killed")
    start = {name: tensor for name, tensor in make().float().state_dict().items() if tensor.is_floating_point()}
    return pd.DataFrame([_compared(name, whole[name], again[name], start[name]) for name in start])


def _compared(name: str, whole: torch.Tensor, again: torch.Tensor, start: torch.Tensor) -> Mapping[str, Any]:
    differing = int((whole != again).sum())
    return {"tensor": name, "values": whole.numel(), "differing": differing, "trained": bool((whole != start).any())}
