"""Train heads from a command: `specnb heads train --kind medusa --preset cpu`.

Stages, each of which goes on where it was stopped: text by the backbone, its hidden states, the heads, and the export
to a folder that `specnb generate --drafter medusa --heads-checkpoint FOLDER` opens.
"""

import json
import shlex
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer
from pydantic import ValidationError
from tqdm import tqdm

from specnb.errors import InputError
from specnb.io import cache_dir, write_atomic
from specnb.lm.base import LanguageModel
from specnb.lm.hf import attention as hf_attention
from specnb.lm.load import load
from specnb.medusa import checkpoint, data
from specnb.medusa.data import SPLITS, Examples
from specnb.medusa.nets import Backbone, Heads, HeadsConfig, network, new_heads
from specnb.medusa.text import Writing
from specnb.medusa.train import HELD_OUT, Recipe, Report, rank_shares, read_checkpoint, recipe, train

TARGET = "smollm2-135m?backend=hf&dtype=bfloat16&exact=False"
HELD_OUT_BATCHES = 2
PLACES = frozenset({"stage", "work", "out", "shard", "save_every"})
"""Options that say where and how far, not what heads come out."""
_bar = partial(tqdm, unit_scale=True, mininterval=2)


@dataclass(frozen=True)
class Work:
    """The text, states and runs in `home` that one backbone's heads are trained with.

    `options` are fields of HeadsConfig, `preset` names what `recipe` was before it was changed, and `texts` is a file
    to learn instead of what the backbone writes. A method is a stage: it returns what there is now, for the reader.
    """

    home: Path
    target: LanguageModel
    backbone: Backbone
    options: Mapping[str, Any]
    preset: str
    recipe: Recipe
    batches: int
    shard: tuple[int, int]
    texts: Path | None
    start: str | None
    save_every: int
    command: str

    @property
    def text(self) -> Path:
        return self.home / "text"

    @property
    def run(self) -> Path:
        """The folder of the checkpoints of this recipe and these heads."""
        shape = "-".join(str(self.options[key]) for key in sorted(self.options) if self.options[key])
        return self.home / "runs" / f"{self.preset}-{shape}"

    def write_text(self) -> str:
        """Stage 1: the training text, written by the backbone or taken from `texts`."""
        backbone, writing = self.backbone.digest, Writing()
        if self.texts is not None:
            data.write_given(self.target, self.texts, self.text, backbone=backbone, length=writing.length)
        else:
            batches = {"held_out": HELD_OUT_BATCHES, "train": self.batches}
            n_mine = sum(len(range(self.shard[0], n, self.shard[1])) for n in batches.values())
            with _bar(desc="text", total=n_mine * writing.batch_size * writing.length, unit="tokens") as bar:
                data.write(
                    self.target, self.text, batches=batches, backbone=backbone, writing=writing, shard=self.shard,
                    on_tokens=bar.update,
                )  # fmt: skip
        rows = data.read(self.text, "train")
        return f"{rows.tokens.size:,} tokens, {rows.n_own:,} of them the backbone's own, in {self.text}"

    def compute_hidden(self) -> str:
        """Stage 2: the hidden states of all text that has none yet."""
        with _bar(desc="hidden states", unit="tokens") as bar:
            data.compute_states(self.target.network, self.text, backbone=self.backbone.digest, on_tokens=bar.update)
        return f"states of {len(data.files(self.text))} files in {self.text}"

    def train(self) -> str:
        """Stage 3: the heads, from their last checkpoint on."""
        rows, size = self._rows("train"), self.recipe.batch_size
        heads = self.new_heads(rows)
        examples, held_out = (Examples.of(self.text, split, heads) for split in SPLITS)
        with _bar(desc="heads", total=self.recipe.steps * size, unit="examples") as bar:

            def on_start(seconds: float, left: int) -> None:
                bar.set_description(f"heads: {size / seconds:,.0f} examples/s, {left * seconds / 60:.0f} min left")

            def on_step(report: Report) -> None:
                top1 = " ".join(f"{share:.2f}" for share in report.heads.top1.tolist())
                bar.set_postfix_str(f"loss {report.loss:.3f}, top-1 by head {top1}", refresh=False)
                bar.update(report.step * size - bar.n)

            last = train(
                heads, self.recipe, examples, held_out, self.run, data=rows.digest(), start=self.start or "",
                save_every=self.save_every, on_start=on_start, on_step=on_step,
            )[-1]  # fmt: skip
        return f"step {last['step']}: held-out top-1 by head {last['top1']}"

    def export(self, out: Path) -> str:
        """Stage 4: the trained heads as a checkpoint with the facts of their training, and their card."""
        saved, rows = read_checkpoint(self.run), {split: self._rows(split) for split in SPLITS}
        if saved is None:
            raise InputError(f"nothing was trained in {self.run}: run --stage heads first")
        if saved["run"]["data"] != rows["train"].digest():
            raise InputError(f"{self.text} holds other text than {self.run} was trained on: train again, or restore it")
        heads = self.new_heads(rows["train"])
        heads.load_state_dict(saved["heads"])
        held_out = Examples.of(self.text, "held_out", heads).spread(4 * HELD_OUT, later=False)
        text = data.facts(self.text) | {
            "digest": saved["run"]["data"],
            "tokens": {split: part.tokens.size for split, part in rows.items()},
            "own": {split: part.n_own for split, part in rows.items()},
            "coverage": round(data.coverage(rows["held_out"], heads.token_map), 5),
        }
        facts = {
            "heads": heads.config.model_dump(), "preset": self.preset, "start": self.start, "command": self.command,
            "recipe": saved["run"]["recipe"], "log": saved["log"], "text": text,
            "accuracy": [[round(share, 5) for share in row] for row in rank_shares(heads, held_out).tolist()],
            "parameters": heads.cost()["parameters"], "torch": torch.__version__.split("+")[0],
        }  # fmt: skip
        checkpoint.save(heads, out, facts=facts)
        write_atomic(out / "README.md", checkpoint.card(out.name, facts).encode())
        last = {"parameters": facts["parameters"], "coverage": text["coverage"]} | saved["log"][-1]
        return json.dumps(last, indent=1)

    def new_heads(self, rows: data.TextRows) -> Heads:
        """Untrained heads, or those of `start`. Raises InputError for options that make no heads, or not those."""
        if self.start:
            heads, _ = checkpoint.load_trained_heads(self.start, self.backbone)
            other = {key: value for key, value in self.options.items() if getattr(heads.config, key) != value}
            if other:
                actual = {key: getattr(heads.config, key) for key in other}
                raise InputError(f"{self.start} holds heads of {actual}, but {other} was asked for: ask for the same")
            return heads
        try:
            config = HeadsConfig(
                **self.options, hidden_size=self.backbone.hidden_size, vocab_size=self.backbone.vocab_size,
                backbone=self.backbone.digest, backbone_name=self.target.name,
            )  # fmt: skip
        except ValidationError as error:
            raise InputError(f"these options make no heads: {error}") from error
        token_map = data.most_frequent(rows, config.draft_vocab) if config.draft_vocab else None
        return new_heads(config, self.backbone, token_map, self.recipe.seed)

    def _rows(self, split: str) -> data.TextRows:
        """The text of a split. Raises InputError where it is another backbone's, or not as much as was asked for."""
        data.require_backbone(self.text, self.backbone.digest)
        n = len(data.files(self.text, "train"))
        if self.texts is None and n != self.batches:
            raise InputError(f"{self.text} holds {n} batches, {self.batches} were asked for: say --batches {n}")
        return data.read(self.text, split)


def command(
    context: typer.Context,
    kind: Annotated[str, typer.Option(help="medusa | hydra")] = "medusa",
    preset: Annotated[str, typer.Option(help="report | reference (GPU), cpu, minute")] = "cpu",
    stage: Annotated[
        Literal["all", "data", "hidden", "heads", "export"], typer.Option(help="one stage, or all in order")
    ] = "all",
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
    home = work or cache_dir() / "medusa"
    training = recipe(preset, **changed)
    with closing(load(target)) as model:
        backbone = Backbone.of(network(model))
        if model.caps.details.get("attention") == hf_attention.NAME:
            raise InputError(f"{target!r} has row-wise attention, which takes no batches: add exact=False to it")
        job = Work(
            home, model, backbone, options, preset, training, batches=batches, shard=_shard(shard), texts=texts,
            start=start, save_every=save_every, command=_typed(context),
        )  # fmt: skip
        stages: dict[str, Callable[[], str]] = {
            "data": job.write_text,
            "hidden": job.compute_hidden,
            "heads": job.train,
            "export": lambda: job.export(out or home / f"{kind}-{preset}-export"),
        }
        for name in stages if stage == "all" else [stage]:
            typer.echo(f"{name}: {stages[name]()}")


def _typed(context: typer.Context) -> str:
    """The command that makes these heads from the beginning, in one go."""
    words = ["specnb heads train"]
    for option in context.command.params:
        value = context.params.get(option.name)
        if option.name not in PLACES and value is not None and value != option.default:
            words.append(f"{option.opts[0]} {shlex.quote(str(value))}")
    return " ".join(words)


def _shard(text: str) -> tuple[int, int]:
    first, _, of = text.partition("/")
    if not (first.isdecimal() and of.isdecimal() and int(first) < int(of)):
        raise InputError(f"--shard is i/n with i below n, for example 0/2, got {text!r}")
    return int(first), int(of)
