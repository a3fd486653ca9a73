"""Train heads: `python -m specnb.medusa.train --kind medusa --preset cpu`.

Stages, each of which goes on where it was stopped: text by the backbone, its hidden states, the heads, and the export
to a folder that `specnb generate --drafter medusa --heads-checkpoint FOLDER` opens. Several GPUs:
`accelerate launch -m specnb.medusa.train --target '…&device=cuda' …`, after `--stage data` in as many shards.
"""

import json
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from accelerate import PartialState
from tqdm import tqdm

from specnb import script
from specnb.errors import InputError
from specnb.medusa.work import Work
from specnb.paths import cache_dir

TARGET = "smollm2-135m?backend=hf&dtype=bfloat16&exact=False"
"""Row-wise attention (`exact`) is for one sequence, and batches of text are written here."""


class Stage(StrEnum):
    """What one call does; `all` does the others in order."""

    ALL = "all"
    DATA = "data"
    HIDDEN = "hidden"
    HEADS = "heads"
    EXPORT = "export"


def default_work() -> Path:
    """Where text, states and checkpoints go unless told otherwise."""
    return cache_dir() / "medusa"


@contextmanager
def _bar(title: str, total: int, unit: str) -> Iterator[tqdm]:
    with tqdm(total=total or None, desc=title, unit=unit, unit_scale=True, mininterval=2) as bar:
        yield bar


def _trained(work: Work) -> str:
    steps, size = work.recipe.steps, work.recipe.batch_size
    with _bar("heads", steps * size, "examples") as bar:

        def on_start(seconds: float, left: int) -> None:
            bar.set_description(f"heads: {size / seconds:,.0f} examples/s, {left * seconds / 60:.0f} min left")

        def on_step(report: Any) -> None:
            top1 = " ".join(f"{share:.2f}" for share in report.heads.top1.tolist())
            bar.set_postfix_str(f"loss {report.loss:.3f}, top-1 by head {top1}", refresh=False)
            bar.update(report.step * size - bar.n)

        last = work.train(on_start=on_start, on_step=on_step)[-1]
    return f"step {last['step']}: held-out top-1 by head {last['top1']}"


def _counted(title: str, total: int, do: Callable[..., str]) -> Callable[[], str]:
    def run() -> str:
        with _bar(title, total, "tokens") as bar:
            return do(on_tokens=bar.update)

    return run


def stages(work: Work, out: Path) -> dict[Stage, Callable[[], str]]:
    """What each stage does; returns what there is now, for the reader."""
    return {
        Stage.DATA: _counted("text", work.tokens_to_write, work.write_text),
        Stage.HIDDEN: _counted("hidden states", 0, work.compute_hidden),
        Stage.HEADS: lambda: _trained(work),
        Stage.EXPORT: lambda: json.dumps(work.export(out), indent=1),
    }


def command(
    context: typer.Context,
    kind: Annotated[str, typer.Option(help="medusa | hydra")] = "medusa",
    preset: Annotated[str, typer.Option(help="report | reference (GPU), cpu, minute")] = "cpu",
    stage: Annotated[Stage, typer.Option(help="one stage, or all in order")] = Stage.ALL,
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
    home = work or default_work()
    processes = PartialState(cpu="device=cuda" not in target)  # before the model, which goes to this process's GPU
    with Work.open(
        target, home, heads=options, preset=preset, changed=changed, batches=batches, shard=_shard(shard),
        texts=texts, start=start, save_every=save_every, command=_typed(context),
    ) as made:  # fmt: skip
        todo = stages(made, out or home / f"{kind}-{preset}-export")
        for one in list(todo) if stage is Stage.ALL else [stage]:
            # files are written by one process while the others wait; heads are trained by all at once
            if one is Stage.HEADS or processes.is_main_process:
                told = todo[one]()
            processes.wait_for_everyone()
            if processes.is_main_process:
                typer.echo(f"{one}: {told}")


PLACES = frozenset({"stage", "work", "out", "shard", "save_every"})
"""Options that say where and how far, not what heads come out."""


def _typed(context: typer.Context) -> str:
    """The command that makes these heads from the beginning, in one go."""
    said = ["python -m specnb.medusa.train"]
    for option in context.command.params:
        value = context.params.get(option.name)
        if option.name not in PLACES and value is not None and value != option.default:
            said.append(f"{option.opts[0]} {shlex.quote(str(value))}")
    return " ".join(said)


def _shard(text: str) -> tuple[int, int]:
    first, _, of = text.partition("/")
    if not (first.isdecimal() and of.isdecimal() and int(first) < int(of)):
        raise InputError(f"--shard is i/n with i below n, for example 0/2, got {text!r}")
    return int(first), int(of)


def main() -> None:
    """Entry point."""
    script.run("medusa.train", command)


if __name__ == "__main__":
    main()
