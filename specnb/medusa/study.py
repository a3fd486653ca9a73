"""Do these heads work? Short trainings that a reader can watch, an ablation, and the record of notebook 05.

The trainings are short of what heads need by a factor of hundreds: they show how training goes, and in which order the
variants of an ablation come, not what they can reach.
"""

from functools import cached_property, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any, Self

import pandas as pd
import torch

from specnb.decode.generate import generate
from specnb.errors import InputError
from specnb.io import file_digest
from specnb.lm.base import LanguageModel
from specnb.lm.load import load
from specnb.measure.experiment import Experiment, Progress, models_of, silent
from specnb.medusa import bench, data
from specnb.medusa.accuracy import Reference
from specnb.medusa.bench import HeadsBench, HeadsBenchParams
from specnb.medusa.checkpoint import LoadReport, load_trained_heads
from specnb.medusa.data import SPLITS, Writing
from specnb.medusa.drafter import CHAIN, KINDS, HeadsDrafter, drafting_s
from specnb.medusa.faults import Sound, vary_heads
from specnb.medusa.nets import Heads, backbone_of
from specnb.medusa.train import HELD_OUT, Examples, Recipe, objective, time_step, train
from specnb.params import MedusaParams
from specnb.records import RunRecord

REPEATS = 15
"""Drafts behind a median."""


def write_study_text(
    params: MedusaParams, target: LanguageModel, folder: Path, progress: Progress = silent
) -> pd.DataFrame:
    """Have the target write `rows` rows of `row_tokens` to learn from, and as many held out; with their states.

    One row: tokens of each split, how many are the target's own choice, seconds.
    """
    rows, length = params.rows, params.row_tokens
    writing = Writing(length=length, batch_size=rows, longest_seed=length // 3, seed=params.seed)
    started_s = perf_counter()
    data.write_splits(target, folder, batches=dict.fromkeys(SPLITS, 1), writing=writing, progress=progress)
    text = {split: data.read(folder, split) for split in SPLITS}
    sizes = {f"{split}_tokens": part.tokens.size for split, part in text.items()}
    sizes |= {f"{split}_own": part.n_own for split, part in text.items()}
    return pd.DataFrame([sizes | {"seconds": perf_counter() - started_s}])


def practise(run: str, heads: Heads, recipe: Recipe, text: Path, watch: Any = None) -> pd.DataFrame:
    """Train `heads` in place by the loop that trained the shipped ones, and return a row for each head.

    `watch` follows it: `starts(run, steps, seconds_a_step)` and `step(run, step, loss, figures)`. Columns: run, head,
    steps, told_s, took_s (seconds announced and taken), and held-out top1_before, top1, top5_before, top5.
    """
    examples, held_out = (Examples(text, split, heads) for split in SPLITS)
    with torch.no_grad():
        _, before = objective(heads.float(), recipe, held_out.spread(HELD_OUT))
    step_s = time_step(heads, recipe, objective, examples)
    if watch:
        watch.starts(run, recipe.steps, step_s)
    started_s = perf_counter()
    with TemporaryDirectory(prefix="specnb-heads-") as folder:
        *_, after = train(
            heads, recipe, text, Path(folder), save_every=recipe.steps,
            on_step=lambda *step: watch and watch.step(run, *step),
        )  # fmt: skip
    return pd.DataFrame({
        "run": run, "head": range(heads.config.n_heads), "steps": recipe.steps, "told_s": step_s * recipe.steps,
        "took_s": perf_counter() - started_s, "top1_before": before["top1"], "top1": after["top1"],
        "top5_before": before["top5"], "top5": after["top5"],
    })  # fmt: skip


VARIANTS = {
    "shared lm_head": {},
    "without the norm": {"norms": 0},
    "Hydra": {"kind": "hydra"},
    "private lm_heads": {"lm_head": "private"},
    "shared, all tokens": {"all_tokens": True},
    "private, all tokens": {"lm_head": "private", "all_tokens": True},
}
"""Changes by `vary_heads`. The first is what the others differ from in one thing. Without the norm the blocks are
fed the state in front of the final norm as it is, which is what the Medusa note says it did."""
NOT_TRAINED = "private, all tokens"
"""Only costed: weights, gradients and optimizer of such matrices are 1.8 GB for four heads on SmolLM2-135M."""


def ablate(target: LanguageModel, sound: Sound, recipe: Recipe, *, progress: Progress = silent) -> pd.DataFrame:
    """Cost and train every variant of `sound` heads on their text; one row each.

    Columns: variant, parameters, read_mb (of 10^6 bytes, in one draft of all heads, in the target's type), draft_ms
    (median), and lists by head of held-out top1 and top5, None for what was only costed.
    """
    rows = []
    for done, (variant, changes) in enumerate(VARIANTS.items()):
        progress(done, len(VARIANTS), f"ablation: {variant}")
        heads, shares = vary_heads(sound, **changes), dict.fromkeys(("top1", "top5"))
        parameters, read_bytes = heads.cost()
        draft_s = drafting_s(HeadsDrafter(target, heads), heads.config.n_heads, repeats=REPEATS)
        if variant != NOT_TRAINED:
            shares = practise(variant, heads, recipe, sound.text)[[*shares]].to_dict("list")
        costs = {"parameters": parameters, "read_mb": read_bytes / 1e6, "draft_ms": 1e3 * draft_s}
        rows.append({"variant": variant} | costs | shares)
    return pd.DataFrame(rows)


class HeadsStudy(Experiment):
    """The experiment with its two sets of heads by kind. `close` it in the end.

    `timed` and `judged` are prompts, `text` is the folder of the text to practise on.
    """

    def __init__(self, params: MedusaParams, target: LanguageModel) -> None:
        self.timed, self.judged = bench.chosen_prompts(params.categories, params.prompts_per_category, params.prompts)
        super().__init__("05_medusa", params, [*self.timed, *self.judged])
        self.target, self.backbone = self.opened(target), backbone_of(target)
        self.loaded = {kind: loaded_heads(getattr(params, kind), kind, target) for kind in KINDS}
        self.results = {}
        self.text = Path(self._opened.enter_context(TemporaryDirectory(prefix="specnb-heads-"))) / "text"

    @property
    def sound(self) -> Sound:
        """The Medusa heads and the text, to plant faults on and to vary."""
        return Sound(*self.loaded["medusa"], self.backbone, self.text, self.params.seed)

    @cached_property
    def reference(self) -> Reference:
        """The target's own texts of the prompts that heads are judged on."""
        return Reference(self.target, self.judged, self.params.max_new_tokens)

    @classmethod
    def open(cls, params: MedusaParams) -> Self:
        """Load the target and both checkpoints."""
        return cls(params, load(params.target, backend="hf", dtype=params.dtype))

    def close(self) -> None:
        """Free the target and remove the text."""
        self._opened.close()

    def keep(self, name: str, *tables: pd.DataFrame) -> pd.DataFrame:
        """Put a table into the record under `name`, and return it; of two, one for each kind, one with the kind."""
        table = tables[0]
        if len(tables) > 1:
            table = pd.concat(dict(zip(KINDS, tables, strict=True)), names=["kind"]).reset_index("kind")
        self.measured[name] = bench.rows_of(table)
        return table.reset_index(drop=True)

    def measure(self, kind: str, progress: Progress = silent) -> HeadsBench:
        """Gates, tree and speed of the heads of a kind: `bench.measure`."""
        settings = HeadsBenchParams(num_trials=1, max_new_tokens=self.params.max_new_tokens, seed=self.params.seed)
        self.results[kind] = bench.measure(self.reference, *self.loaded[kind], self.timed, settings, progress)
        return self.results[kind]

    def compare_texts(self) -> pd.DataFrame:
        """Decode timed prompts in float32, where rounding changes no text: plainly, with chains and chosen trees.

        One row for each kind and shape: prompts, and texts that `differ` from the plain ones.
        """
        p, n, target, loaded, rows = self.params, self.params.prompts_per_category, self.target, self.loaded, []
        prompts = [prompt for i in range(n) for prompt in self.timed[i::n]][: p.identity_prompts]
        if target.caps.dtype != "float32":
            target = self.opened(load(p.target, backend="hf", dtype="float32"))
            loaded = {kind: loaded_heads(getattr(p, kind), kind, target) for kind in KINDS}
        decode = partial(generate, target, max_new_tokens=p.max_new_tokens)
        expected = [decode(prompt) for prompt in prompts]
        for kind, result in self.results.items():
            heads, tree = loaded[kind][0], result.drafting.plan
            for shape, plan in ({CHAIN: None, "tree": tree} if tree else {CHAIN: None}).items():
                drafter = HeadsDrafter(target, heads, plan)
                drafted = partial(decode, drafter=drafter, k=drafter.tree_nodes or drafter.n_heads)
                differ = sum(drafted(g.prompt_ids).token_ids != g.token_ids for g in expected)
                rows.append({"kind": kind, "shape": shape, "prompts": len(expected), "differ": differ})
        return self.keep("identity", pd.DataFrame(rows))

    def record(self, error: BaseException | None = None) -> RunRecord:
        """The record of what has been measured so far; the same run id at any time."""
        self.models = models_of(self.target, []) + [
            {"role": "drafter", "id": getattr(self.params, kind), "sha256": file_digest(report.path)}
            for kind, (_, report) in self.loaded.items()
        ]
        chains = [chain for result in self.results.values() for chain in result.checked.evidence.chains]
        self.generations = [*chains, *(self.reference.plain if chains else ())]
        return super().record(error)


def loaded_heads(name_or_path: str, kind: str, target: LanguageModel) -> tuple[Heads, LoadReport]:
    """Trained heads of that kind. Raises InputError for another kind, and what the loader raises."""
    heads, report = load_trained_heads(name_or_path, backbone_of(target))
    if heads.config.kind != kind:
        raise InputError(f"{name_or_path!r} are {heads.config.kind} heads, given as {kind}: give each its own")
    return heads, report
