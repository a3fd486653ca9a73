"""Short trainings that a reader can watch: a little text by the backbone, heads that learn from it, and ablations.

Short of what heads need by a factor of hundreds: they show how training goes, and in which order the variants of an
ablation come, not what they can reach.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import pandas as pd
from torch import Tensor, nn

from specnb.errors import SpecnbError
from specnb.lm.base import LanguageModel
from specnb.lm.load import load
from specnb.measure.experiment import Progress, silent
from specnb.medusa import data, loop
from specnb.medusa.data import SPLITS, Examples
from specnb.medusa.drafter import drafting_s
from specnb.medusa.loop import Recipe
from specnb.medusa.nets import Backbone, Heads, HeadsConfig, network, new_heads
from specnb.medusa.text import Writing

PACKAGES = ("rich", "transformers")
"""Whose texts the seeds are made from: the smallest with code and prose on both sides of the split, read in seconds."""
KILLED_AFTER, KILL_STEPS, KILL_BATCH = 2, 4, 32
"""Of the run that is killed and goes on: as short as can be, with steps of the optimizer on both sides."""
REPEATS = 15
"""Drafts behind a median."""


class Watch:
    """A training's callback: gets the seconds of a step before the first one, then every step. This ignores both."""

    def starts(self, run: str, steps: int, seconds_a_step: float) -> None:
        """Training `run` is about to begin."""

    def step(self, run: str, report: loop.Report) -> None:
        """A step was made; the figures are those of its batch, unweighted by head."""


def write_text(
    target: str, folder: Path, *, rows: int, length: int, dtype: str, seed: int, progress: Progress
) -> dict[str, Any]:
    """Have the backbone write `rows` rows of `length` tokens to learn from, and as many held out; with their states.

    Returns what came of it: tokens, how many are the backbone's own choice, seconds.
    """
    writing = Writing(
        length=length, batch_size=rows, longest_seed=length // 3, longest_answer=length // 2,
        longest_request=max(1, length // 4), seed=seed,
    )  # fmt: skip
    began, total, done = perf_counter(), len(SPLITS) * rows * length, 0

    def on_tokens(n: int) -> None:
        nonlocal done
        done = min(total, done + n)
        progress(done, total, "text by the backbone, and its states")

    # row-wise exact attention is for one sequence, and this is a batch
    writer = load(target, backend="hf", dtype=dtype, exact=False)
    try:
        data.write(
            writer, folder, batches=dict.fromkeys(SPLITS, 1), backbone=Backbone.of(writer.network).digest,
            writing=writing, packages=PACKAGES, on_tokens=on_tokens,
        )  # fmt: skip
    finally:
        writer.close()
    text = {split: data.read(folder, split) for split in SPLITS}
    return {
        **{f"{split}_tokens": part.tokens.size for split, part in text.items()},
        **{f"{split}_own": part.n_own for split, part in text.items()},
        "seconds": perf_counter() - began,
    }


def sets(folder: Path, heads: Heads) -> dict[str, Examples]:
    """The examples of each split for these heads."""
    return {split: Examples.of(folder, split, data.read(folder, split), heads) for split in SPLITS}


@dataclass(frozen=True)
class TrainLog:
    """A short training: its log, accuracies `before`, and the seconds that were foretold and taken."""

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
) -> TrainLog:
    """Train `heads` in place by the loop that trained the shipped ones; `save_every` 0 logs the last step only."""
    watch, told_s, examples = watch or Watch(), 0.0, sets(text, heads)
    before = loop.evaluate(heads.float(), recipe, examples["held_out"])

    def on_start(seconds: float, left: int) -> None:
        nonlocal told_s
        told_s = seconds * left
        watch.starts(run, recipe.steps, seconds)

    began = perf_counter()
    log = loop.train(
        heads, recipe, examples["train"], examples["held_out"], folder, data=data.read(text, "train").digest(),
        save_every=save_every or recipe.steps, on_start=on_start, on_step=lambda report: watch.step(run, report),
    )  # fmt: skip
    return TrainLog(run, log, before, told_s, perf_counter() - began)


class _Killed(SpecnbError):
    """Thrown into the training that is to go on later."""


def survives_a_kill(new: Callable[[], Heads], text: Path, folder: Path, *, seed: int = 0) -> pd.DataFrame:
    """Train `new()` heads twice, once killed after KILLED_AFTER steps and gone on with; whether the weights are equal.

    One row for each tensor of the heads: name, values, `differing` values (bitwise), and whether it was `trained`.
    """
    recipe = Recipe(KILL_STEPS, batch_size=KILL_BATCH, warmup=1, seed=seed)

    def kill(report: loop.Report) -> None:
        if report.step > KILLED_AFTER:
            raise _Killed("as planned")

    def weights(run: str, **options: Any) -> dict[str, Tensor]:
        heads = new()
        examples = sets(text, heads)
        loop.train(
            heads, recipe, examples["train"], examples["held_out"], folder / run, data="kill", save_every=1, **options
        )
        return loop.read_checkpoint(folder / run)["heads"]  # float32: afterwards heads are rounded

    whole = weights("whole")
    with suppress(_Killed):
        weights("killed", on_step=kill)
    resumed = weights("killed")
    start = {name: tensor for name, tensor in new().float().state_dict().items() if tensor.is_floating_point()}
    return pd.DataFrame([
        {
            "tensor": name, "values": whole[name].numel(), "differing": int((whole[name] != resumed[name]).sum()),
            "trained": bool((whole[name] != tensor).any()),
        }
        for name, tensor in start.items()
    ])  # fmt: skip


@dataclass(frozen=True)
class Variant:
    """One change of an ablation. Heads that are not `trained` are only costed."""

    name: str
    changed: Mapping[str, Any] = field(default_factory=dict)
    all_tokens: bool = False
    norm: bool = True
    trained: bool = True


VARIANTS = (
    Variant("shared lm_head"),
    Variant("without the norm", norm=False),
    Variant("Hydra", {"kind": "hydra"}),
    Variant("low rank", {"lm_head": "low_rank", "rank": 32}),
    Variant("private lm_heads", {"lm_head": "private"}),
    Variant("shared, all tokens", all_tokens=True),
    # weights, gradients and optimizer of such matrices are 1.8 GB for four heads on SmolLM2-135M
    Variant("private, all tokens", {"lm_head": "private"}, all_tokens=True, trained=False),
)
"""The first is what the others differ from in one thing. Without the norm the blocks are fed the state in front of the
final norm as it is, which is what the Medusa note says it did."""


def ablate(
    target: LanguageModel,
    config: HeadsConfig,
    token_map: Tensor | None,
    recipe: Recipe,
    text: Path,
    *,
    progress: Progress = silent,
) -> pd.DataFrame:
    """Cost and train every variant of heads of `config` and `token_map` on the folder `text`; one row each.

    Columns: variant, kind, lm_head, draft_vocab, parameters, own_mb, shared_mb and read_mb (of 10^6 bytes; `read_mb`
    in one draft of all heads, in the target's type), draft_ms (median), steps, and lists by head of held-out top1 and
    top5, None for what was only costed. Variants of all tokens are left out where the first has them anyway.
    """
    chosen = [v for v in VARIANTS if token_map is not None or not v.all_tokens]
    backbone, rows = Backbone.of(network(target)), []
    for done, variant in enumerate(chosen):
        progress(done, len(chosen), f"ablation: {variant.name}")
        heads = variant_heads(variant, config, token_map, backbone, recipe.seed)
        n_heads, hydra = heads.config.n_heads, heads.config.kind == "hydra"
        cost, last = heads.cost(), {"step": 0, "top1": None, "top5": None}
        row = {
            "variant": variant.name, "kind": heads.config.kind, "lm_head": heads.config.lm_head,
            "draft_vocab": heads.config.draft_size, "parameters": cost["parameters"],
            "own_mb": cost["own_bytes"] / 1e6, "shared_mb": cost["shared_bytes"] / 1e6,
            # a Medusa's features meet the shared lm_head in one product, those of a Hydra head after head
            "read_mb": (cost["own_bytes"] + cost["shared_bytes"] * (n_heads if hydra else 1)) / 1e6,
            "draft_ms": 1e3 * drafting_s(target, heads, n_heads, repeats=REPEATS),
        }  # fmt: skip
        if variant.trained:
            with TemporaryDirectory(prefix="specnb-ablation-") as folder:
                last = practise(variant.name, heads, recipe, text, Path(folder)).log[-1]
        rows.append(row | {"steps": last["step"], "top1": last["top1"], "top5": last["top5"]})
    return pd.DataFrame(rows)


def variant_heads(
    variant: Variant, config: HeadsConfig, token_map: Tensor | None, backbone: Backbone, seed: int
) -> Heads:
    """Untrained heads of a variant."""
    token_map = None if variant.all_tokens else token_map
    n = 0 if token_map is None else len(token_map)
    changed = HeadsConfig(**(config.model_dump() | {"draft_vocab": n} | dict(variant.changed)))
    if not variant.norm:
        # the state as it is: pre-norm heads whose norm does nothing
        backbone, changed = replace(backbone, norm=nn.Identity()), changed.model_copy(update={"input": "pre_norm"})
    return new_heads(changed, backbone, token_map, seed)
