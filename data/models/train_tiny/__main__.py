"""Train the embedded pair: `python -m data.models.train_tiny --preset cpu`.

Stages, each of which resumes: corpus and tokenizer, the target, the draft on plain text, the draft
on the target's rows (distillation: Hinton et al. 2015; for drafting: DistillSpec, Zhou et al.
2023), and the export to `data/models`.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from tqdm import tqdm

from specnb.errors import InputError
from specnb.io import cache_dir
from specnb.lm.files import embedded_root

from .data import open_data, prepare
from .recipe import Recipe, recipe


class Stage(StrEnum):
    """What one call does; `all` does the others in order."""

    ALL = "all"
    DATA = "data"
    TARGET = "target"
    DRAFT = "draft"
    DISTIL = "distil"
    EXPORT = "export"


def default_work() -> Path:
    """Where tokens and checkpoints go unless told otherwise."""
    return cache_dir() / "train_tiny"


def run_stage(
    stage: Stage, work: Path, out: Path, training: Recipe | None, *, device: str, save_every: int
) -> str:
    """One stage; returns what there is, for the reader. `training`: its recipe, if it trains."""
    if stage is Stage.DATA:
        data = prepare(work / "data")
        return (
            f"{data.train.size:,} training tokens, {data.held_out.size:,} held out, "
            f"in {work / 'data'}"
        )
    if stage is Stage.EXPORT:
        from .export import export

        return json.dumps(export(work, out), indent=1)
    from . import loop

    start = loop.trained(work / "draft") if stage is Stage.DISTIL else None
    teacher = loop.trained(work / "target").to(device) if stage is Stage.DISTIL else None
    with _bar(training.steps, stage) as on_step:
        loop.train(
            training,
            open_data(work / "data"),
            work / stage,
            start=start,
            teacher=teacher,
            device=device,
            save_every=save_every,
            on_step=on_step,
        )
    last = loop.read_checkpoint(work / stage)["log"][-1]
    return (
        f"{stage}: step {last['step']}, loss {last['loss']:.3f}, "
        f"held out {last['held_out_loss']:.3f} nats a token"
    )


@contextmanager
def _bar(steps: int, title: str) -> Iterator[Any]:
    with tqdm(total=steps, desc=title, unit="step", mininterval=5) as bar:

        def on_step(step: int, loss: float) -> None:
            bar.n = step
            bar.set_postfix(loss=f"{loss:.3f}", refresh=False)
            bar.update(0)

        yield on_step


def _check_device(device: str) -> None:
    if device == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise InputError("--device cuda, but torch sees no GPU here: take --device cpu")
    elif device != "cpu":
        raise InputError(f"--device is cpu or cuda, got {device!r}")


def command(
    preset: Annotated[str, typer.Option(help="cpu | full")] = "cpu",
    stage: Annotated[Stage, typer.Option(help="one stage, or all in order")] = Stage.ALL,
    work: Annotated[Path | None, typer.Option(help="tokens and checkpoints [the cache]")] = None,
    out: Annotated[
        Path | None, typer.Option(help="where the folders of the two models go [data/models]")
    ] = None,
    steps: Annotated[
        int | None, typer.Option(help="steps in all, instead of the preset's; needs --stage")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="of weights and order [0]")] = None,
    device: Annotated[str, typer.Option(help="cpu | cuda")] = "cpu",
    bf16: Annotated[bool, typer.Option(help="matrix products in bfloat16")] = True,
    save_every: Annotated[int, typer.Option(help="steps between checkpoints", min=1)] = 100,
) -> None:
    """Train the embedded pair of hybrids.

    Stop it at any time: the same command goes on from the last checkpoint.
    """
    if steps is not None and stage not in (Stage.TARGET, Stage.DRAFT, Stage.DISTIL):
        raise InputError(
            f"--steps {steps} needs --stage target, draft or distil: each has its own number"
        )
    _check_device(device)
    work = work or default_work()
    out = out or embedded_root()
    for each in list(Stage)[1:] if stage is Stage.ALL else [stage]:
        trains = each in (Stage.TARGET, Stage.DRAFT, Stage.DISTIL)
        training = recipe(preset, each, steps=steps, seed=seed, bf16=bf16) if trains else None
        typer.echo(run_stage(each, work, out, training, device=device, save_every=save_every))


if __name__ == "__main__":
    typer.run(command)
