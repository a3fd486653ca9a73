"""Train heads from a command: `specnb heads train --kind medusa --preset cpu`.

Stages, each of which goes on where it was stopped: text by the backbone and its hidden states, the heads, and the
export to a folder that `specnb generate --drafter medusa --heads-checkpoint FOLDER` opens.
"""

import shlex
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from pydantic import ValidationError
from tqdm import tqdm

from specnb.errors import InputError
from specnb.io import cache_dir
from specnb.lm.base import LanguageModel
from specnb.lm.hf import attention as hf_attention
from specnb.lm.load import load
from specnb.medusa import checkpoint, data
from specnb.medusa.data import SPLITS, Examples
from specnb.medusa.nets import Backbone, Heads, HeadsConfig, network, new_heads
from specnb.medusa.text import Writing
from specnb.medusa.train import HELD_OUT, Recipe, Report, rank_shares, recipe, train

TARGET = "smollm2-135m?backend=hf&dtype=auto&exact=False"
HELD_OUT_BATCHES = 2
PLACES = frozenset({"work", "out"})
"""Options that say where, not what heads come out."""


def write_text(target: LanguageModel, folder: Path, batches: int, texts: Path | None) -> None:
    """The training text in `folder` with its states, written by the backbone or taken from `texts`."""
    writing = Writing()
    if texts is not None:
        data.write_given(target, texts, folder, length=writing.length)
        return
    splits = {"held_out": HELD_OUT_BATCHES, "train": batches}
    total = sum(splits.values()) * writing.batch_size * writing.length
    with tqdm(desc="text", total=total, unit="tokens", unit_scale=True, mininterval=2) as bar:
        data.write(target, folder, batches=splits, writing=writing, on_tokens=bar.update)
    if (n := len(data.files(folder, "train"))) != batches:
        raise InputError(f"{folder} holds {n} batches, {batches} were asked for: say --batches {n}")


def train_heads(heads: Heads, settings: Recipe, text: Path, run: Path) -> list[dict[str, Any]]:
    """Train in place, from the last checkpoint in `run` on; returns the log."""
    size = settings.batch_size
    examples, held_out = (Examples.of(text, split, heads) for split in SPLITS)
    with tqdm(desc="heads", total=settings.steps * size, unit="examples", unit_scale=True, mininterval=2) as bar:

        def on_start(seconds: float, left: int) -> None:
            bar.set_description(f"heads: {size / seconds:,.0f} examples/s, {left * seconds / 60:.0f} min left")

        def on_step(report: Report) -> None:
            top1 = " ".join(f"{share:.2f}" for share in report.heads.top1.tolist())
            bar.set_postfix_str(f"loss {report.loss:.3f}, top-1 by head {top1}", refresh=False)
            bar.update(report.step * size - bar.n)

        digest = data.read(text, "train").digest()
        return train(heads, settings, examples, held_out, run, data=digest, on_start=on_start, on_step=on_step)


def export(heads: Heads, log: list[dict[str, Any]], text: Path, out: Path, facts: dict[str, Any]) -> None:
    """Save trained heads with `facts` and those of their text, of the training, and of what they can draft."""
    rows = {split: data.read(text, split) for split in SPLITS}
    held_out = Examples.of(text, "held_out", heads).spread(4 * HELD_OUT, later=False)
    of_text = {
        "digest": rows["train"].digest(), "coverage": round(data.coverage(rows["held_out"], heads.token_map), 5),
        "tokens": {split: part.tokens.size for split, part in rows.items()},
        "own": {split: part.n_own for split, part in rows.items()},
    }  # fmt: skip
    facts |= {
        "heads": heads.config.model_dump(), "log": log, "text": data.facts(text) | of_text,
        "accuracy": [[round(share, 5) for share in row] for row in rank_shares(heads, held_out).tolist()],
        "parameters": heads.cost()["parameters"], "torch": torch.__version__.split("+")[0],
    }  # fmt: skip
    checkpoint.save(heads, out, facts=facts)


def command(
    context: typer.Context,
    kind: Annotated[str, typer.Option(help="medusa | hydra")] = "medusa",
    preset: Annotated[str, typer.Option(help="report | reference (GPU), cpu, minute")] = "cpu",
    target: Annotated[str, typer.Option(help="the backbone, a torch model")] = TARGET,
    work: Annotated[Path | None, typer.Option(help="text, states and checkpoints [the cache]")] = None,
    out: Annotated[Path | None, typer.Option(help="folder of the heads [in --work]")] = None,
    texts: Annotated[Path | None, typer.Option(help="a .jsonl of texts to learn instead of the backbone's own")] = None,
    batches: Annotated[int, typer.Option(help="batches of 64 rows of text to write", min=1)] = 64,
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
) -> None:
    """Train heads for a frozen backbone. Stop it at any time: the same command goes on from the last checkpoint."""
    options = {"kind": kind, "n_heads": n_heads, "n_layers": n_layers, "input": norm, "lm_head": lm_head, "rank": rank,
               "draft_vocab": draft_vocab}  # fmt: skip
    changed = {"steps": steps, "batch_size": batch_size, "peak_lr": learning_rate, "teacher": teacher,
               "embedding_rate": embedding_rate, "seed": seed}  # fmt: skip
    home, settings = work or cache_dir() / "medusa", recipe(preset, **changed)
    text, run = home / "text", "-".join([preset, *(str(options[key]) for key in sorted(options) if options[key])])
    with closing(load(target)) as model:
        backbone = Backbone.of(network(model))
        if model.caps.details.get("attention") == hf_attention.NAME:
            raise InputError(f"{target!r} has row-wise attention, which takes no batches: add exact=False to it")
        sizes = {"hidden_size": backbone.hidden_size, "vocab_size": backbone.vocab_size}
        try:
            config = HeadsConfig(**options, **sizes, backbone=backbone.digest, backbone_name=model.name)
        except ValidationError as error:
            raise InputError(f"these options make no heads: {error}") from error
        write_text(model, text, batches, texts)
        rows = data.read(text, "train")
        typer.echo(f"text: {rows.tokens.size:,} tokens, {rows.n_own:,} of them the backbone's own, in {text}")
        token_map = data.most_frequent(rows, draft_vocab) if draft_vocab else None
        heads = new_heads(config, backbone, token_map, settings.seed)
        log = train_heads(heads, settings, text, home / "runs" / run)
        typer.echo(f"heads: step {log[-1]['step']}: held-out top-1 by head {log[-1]['top1']}")
        out = out or home / f"{kind}-{preset}-export"
        export(heads, log, text, out, {"preset": preset, "command": _typed(context), "recipe": asdict(settings)})
        typer.echo(f"export: {out}")


def _typed(context: typer.Context) -> str:
    """The command that makes these heads from the beginning, in one go."""
    words = ["specnb heads train"]
    for option in context.command.params:
        value = context.params.get(option.name)
        if option.name not in PLACES and value is not None and value != option.default:
            words.append(f"{option.opts[0]} {shlex.quote(str(value))}")
    return " ".join(words)
