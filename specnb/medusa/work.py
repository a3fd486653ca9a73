"""A folder of work: the text, the states and the runs that one backbone's heads are trained with, stage by stage."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from specnb import store
from specnb.errors import InputError
from specnb.lm import hf_attention
from specnb.lm.base import LanguageModel
from specnb.lm.load import load
from specnb.medusa import checkpoint, data, examples, given, hidden, losses, train_loop
from specnb.medusa.backbone import Backbone
from specnb.medusa.card import card
from specnb.medusa.config import HeadsConfig
from specnb.medusa.heads import Heads, new_heads
from specnb.medusa.recipe import Recipe, recipe
from specnb.medusa.stream import Writing

HELD_OUT_BATCHES = 2


@dataclass(frozen=True)
class Work:
    """What the stages share. Open one with `Work.open`.

    `options` are fields of HeadsConfig, `preset` names what `recipe` was before it was changed, and `texts` is a file
    to learn instead of what the backbone writes, `command` is what was typed. In `home` are the folders `text` and
    `runs`.
    """

    home: Path
    target: LanguageModel
    backbone: Backbone
    options: Mapping[str, Any]
    preset: str
    recipe: Recipe
    batches: int = 1
    shard: tuple[int, int] = (0, 1)
    texts: Path | None = None
    start: str | None = None
    save_every: int = 100
    command: str = ""

    @classmethod
    @contextmanager
    def open(
        cls,
        target: str,
        home: Path,
        *,
        heads: Mapping[str, Any],
        preset: str = "cpu",
        changed: Mapping[str, Any] | None = None,
        **others: Any,
    ) -> Iterator["Work"]:
        """Load the backbone and close it afterwards; `changed` are values of the preset's recipe, `others` fields.

        Raises InputError for a preset or options that do not exist, or a target whose hidden states cannot be read.
        """
        made = recipe(preset, **(changed or {}))
        model = load(target)
        try:
            if not hasattr(model, "network"):
                raise InputError(f"heads are trained on torch models; open {target!r} with ?backend=hf")
            if model.caps.details.get("attention") == hf_attention.NAME:
                raise InputError(
                    f"{target!r} has row-wise attention, which takes no batches: add exact=False to its name"
                )
            yield cls(home, model, Backbone.of(model.network), dict(heads), preset, made, **others)
        finally:
            model.close()

    @property
    def text(self) -> Path:
        """The folder of the text that heads learn from, and its states."""
        return self.home / "text"

    @property
    def run(self) -> Path:
        """The folder of the checkpoints of this recipe and these heads."""
        shape = "-".join(str(self.options[key]) for key in sorted(self.options) if self.options[key])
        return self.home / "runs" / f"{self.preset}-{shape}"

    @property
    def tokens_to_write(self) -> int:
        """By this process, were no batch there yet."""
        made = Writing()
        mine = sum(len(range(self.shard[0], n, self.shard[1])) for n in (self.batches, HELD_OUT_BATCHES))
        return mine * made.batch_size * made.length

    def write_text(self, on_tokens: Callable[[int], None] = lambda n: None) -> str:
        """Stage 1: the training text, written by the backbone or taken from `texts`."""
        if self.texts is not None:
            texts, facts = given.of_file(self.texts)
            given.write(
                self.target, texts, self.text, facts=facts, backbone=self.backbone.digest, length=Writing().length
            )
        else:
            data.write(
                self.target, self.target.network, self.text, backbone=self.backbone.digest, shard=self.shard,
                batches={"held_out": HELD_OUT_BATCHES, "train": self.batches},
                on_tokens=on_tokens, on_states=hidden.save,
            )  # fmt: skip
        rows = data.read(self.text, "train")
        return f"{rows.tokens.size:,} tokens, {rows.n_own:,} of them the backbone's own, in {self.text}"

    def compute_hidden(self, on_tokens: Callable[[int], None] = lambda n: None) -> str:
        """Stage 2: the hidden states of all text that has none yet."""
        hidden.compute(self.target.network, self.text, backbone=self.backbone.digest, on_tokens=on_tokens)
        return f"states of {len(data.files(self.text))} files in {self.text}"

    def new_heads(self, rows: data.Rows) -> Heads:
        """Untrained heads, or those of `start`. Raises InputError for options that make no heads, or not those."""
        if self.start:
            heads, _ = checkpoint.load_trained_heads(self.start, self.backbone)
            other = {key: value for key, value in self.options.items() if getattr(heads.config, key) != value}
            if other:
                found = {key: getattr(heads.config, key) for key in other}
                raise InputError(f"{self.start} holds heads of {found}, but {other} was asked for: ask for the same")
            return heads
        n = self.options.get("draft_vocab", 0)
        try:
            config = HeadsConfig(
                **self.options, hidden_size=self.backbone.hidden_size, vocab_size=self.backbone.vocab_size,
                backbone=self.backbone.digest, backbone_name=self.target.name,
            )  # fmt: skip
        except ValidationError as error:
            raise InputError(f"these options make no heads: {error}") from error
        token_map = examples.most_frequent(rows, n) if n else None
        return new_heads(config, self.backbone, token_map, self.recipe.seed)

    def train(self, **watching: Any) -> list[dict[str, Any]]:
        """Stage 3: the heads, from their last checkpoint on. Returns the log.

        `watching` are `on_start` and `on_step` of `train_loop.train`.
        """
        rows = self._rows()
        heads = self.new_heads(rows["train"])
        sets = {split: examples.Examples.of(self.text, split, rows[split], heads) for split in data.SPLITS}
        return train_loop.train(
            heads, self.recipe, sets["train"], sets["held_out"], self.run, data=rows["train"].digest(),
            start=self.start or "", save_every=self.save_every, **watching,
        )  # fmt: skip

    def export(self, out: Path) -> dict[str, Any]:
        """Stage 4: the trained heads as a checkpoint with the facts of their making; returns the last of these."""
        saved, rows = train_loop.read_checkpoint(self.run), self._rows()
        if saved is None:
            raise InputError(f"nothing was trained in {self.run}: run --stage heads first")
        if saved["run"]["data"] != rows["train"].digest():
            raise InputError(f"{self.text} holds other text than {self.run} was trained on: train again, or restore it")
        heads = self.new_heads(rows["train"])
        heads.load_state_dict(saved["heads"])
        facts = {
            "heads": heads.config.model_dump(),
            "preset": self.preset,
            "start": self.start,
            "command": self.command,
            "recipe": saved["run"]["recipe"],
            "log": saved["log"],
            "text": data.facts(self.text)
            | {"digest": saved["run"]["data"], "tokens": {split: one.tokens.size for split, one in rows.items()},
               "own": {split: one.n_own for split, one in rows.items()},
               "coverage": round(examples.coverage(rows["held_out"], heads.token_map), 5)},
            "accuracy": self._accuracy(heads, rows["held_out"]),
            "parameters": heads.cost()["parameters"],
            "torch": torch.__version__.split("+")[0],
        }  # fmt: skip
        checkpoint.save(heads, out, dtype="bfloat16", facts=facts)
        store.write_atomic(out / "README.md", card(out.name, facts).encode())
        return {"parameters": facts["parameters"], "coverage": facts["text"]["coverage"]} | saved["log"][-1]

    def _rows(self) -> dict[str, data.Rows]:
        """The text by split. Raises InputError where it is another backbone's, or not as much as was asked for."""
        data.require_backbone(self.text, self.backbone.digest)
        found = len(data.files(self.text, "train"))
        if self.texts is None and found != self.batches:
            raise InputError(f"{self.text} holds {found} batches, {self.batches} were asked for: say --batches {found}")
        return {split: data.read(self.text, split) for split in data.SPLITS}

    def _accuracy(self, heads: Heads, held_out: data.Rows) -> list[list[float]]:
        """On held-out text, in the backbone's type: `losses.rank_shares`, by which trees are chosen."""
        of = examples.Examples.of(self.text, "held_out", held_out, heads)
        batch = of.spread(4 * train_loop.HELD_OUT, later=False)
        shares = losses.rank_shares(heads, train_loop.on_device(batch, heads))
        return [[round(share, 5) for share in row] for row in shares.tolist()]
