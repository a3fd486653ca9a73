"""Do these heads work? The measurement of notebook 05, section by section, into one record.

A section is a method: it measures, keeps what it found for the record, and returns it as a table.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from datetime import UTC, datetime
from functools import cached_property, wraps
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

import pandas as pd

from specnb.decode.generate import generate, prompt_ids
from specnb.errors import InputError
from specnb.io import file_digest
from specnb.lm.base import LanguageModel
from specnb.lm.load import load
from specnb.measure import curve as training_curve
from specnb.measure.bench import FEWEST
from specnb.measure.experiment import Progress, models_of, record_of, saving_failures, silent
from specnb.medusa import faults, gates
from specnb.medusa.accuracy import NO_LABEL, Scores, score, share_interval, trace
from specnb.medusa.bench import (
    HeadsBenchParams,
    checked_params,
    chosen_drafts,
    chosen_prompts,
    rows_of,
    time_prompts,
)
from specnb.medusa.checkpoint import LoadReport, load_trained_heads
from specnb.medusa.drafter import Drafting, HeadsDrafter, accuracy_of
from specnb.medusa.gates import Checked
from specnb.medusa.loop import Recipe
from specnb.medusa.nets import Backbone, Heads, network, new_heads
from specnb.medusa.practice import Watch, ablate, practise, survives_a_kill, write_text
from specnb.medusa.tree import TreePlan
from specnb.params import MedusaParams
from specnb.prompts import Prompt
from specnb.records import Generation, RunRecord

EXPERIMENT, KINDS = "05_medusa", ("medusa", "hydra")
TOPS, CHAIN = (1, 5), "chain"
RESUMED, FRESH = "resumed", "from scratch"
BATCH = 128
"""Positions a step of the short trainings."""
FAULT_TOKENS = 24
"""At most, of the texts that planted faults are judged on: what they do shows soon."""
PROBE = 64
"""Tokens whose states are compared."""
RATE, RESUMED_RATE = 2e-3, 1e-4
"""Highest learning rates: that of the preset `cpu`, and one that trained heads are not thrown off by."""


def section(name: str, *, after: str = "") -> Callable[[Callable[..., pd.DataFrame]], Callable[..., pd.DataFrame]]:
    """Keep the table of a method under `name` for the record; on an error the record so far is saved.

    Raises InputError where the section `after`, which it needs, was not run.
    """

    def decorated(method: Callable[..., pd.DataFrame]) -> Callable[..., pd.DataFrame]:
        @wraps(method)
        def measured(self: "Study", *args: Any, **options: Any) -> pd.DataFrame:
            with saving_failures(self._generations(), self.record):
                if after and after not in self.measured:
                    raise InputError(f"{name} needs the section {after}: run that first")
                table = method(self, *args, **options)
                self.measured[name] = rows_of(table)
                return table

        return measured

    return decorated


class Study:
    """The opened target, its two sets of heads, prompts, and the sections. `close` it in the end."""

    def __init__(
        self, params: MedusaParams, target: LanguageModel, loaded: Mapping[str, tuple[Heads, LoadReport]], work: Path
    ) -> None:
        self.params, self.target, self.work = params, target, work
        self.heads = {kind: heads for kind, (heads, _) in loaded.items()}
        self.reports = {kind: report for kind, (_, report) in loaded.items()}
        self.checked: dict[str, Checked] = {}
        self.drafting: dict[str, Drafting] = {}
        self.measured: dict[str, Any] = {}
        self._started = datetime.now(UTC)
        self._opened = ExitStack()

    @classmethod
    def open(cls, params: MedusaParams) -> Self:
        """Load the target and both checkpoints."""
        with ExitStack() as opened:
            target = load(params.target, backend="hf", dtype=params.dtype)
            opened.callback(target.close)
            loaded = {kind: loaded_heads(getattr(params, kind), kind, target) for kind in KINDS}
            work = Path(opened.enter_context(TemporaryDirectory(prefix="specnb-heads-")))
            study = cls(params, target, loaded, work)
            study._opened = opened.pop_all()
            return study

    def close(self) -> None:
        """Free the target and remove what the short trainings left."""
        self._opened.close()

    @property
    def text(self) -> Path:
        """The folder of the text to practise on."""
        return self.work / "text"

    @cached_property
    def bench(self) -> HeadsBenchParams:
        """What `specnb bench medusa` would be asked for the same measurement."""
        p = self.params
        return checked_params(
            target=p.target, categories=tuple(p.categories), prompts_per_category=p.prompts_per_category, num_trials=1,
            warmup_steps=1, max_new_tokens=p.max_new_tokens, seed=p.seed,
        )  # fmt: skip

    @cached_property
    def prompts(self) -> tuple[list[Prompt], list[Prompt]]:
        """Those that are timed, and those that heads are judged on."""
        return chosen_prompts(self.bench)

    @cached_property
    def backbone(self) -> Backbone:
        return Backbone.of(network(self.target))

    def record(self, error: BaseException | None = None) -> RunRecord:
        """The record of what has been measured so far; the same run id at any time."""
        models = models_of(self.target, [])
        models += [
            {"role": "drafter", "id": getattr(self.params, kind), "sha256": file_digest(self.reports[kind].path)}
            for kind in KINDS
        ]
        return record_of(
            EXPERIMENT, self.params, [*self.prompts[0], *self.prompts[1]], self.target, models, self._started,
            self._generations(), self.measured, error=error,
        )  # fmt: skip

    def _generations(self) -> list[Generation]:
        """Plain texts once, and the chains of both kinds."""
        plain = next((checked.plain for checked in self.checked.values()), ())
        return [*plain, *(g for checked in self.checked.values() for g in checked.chains)]

    @section("text")
    def write(self, progress: Progress = silent) -> pd.DataFrame:
        """Text by the backbone, made now. One row: what it holds, and the seconds it took."""
        p = self.params
        return pd.DataFrame([write_text(
            p.target, self.work / "text", rows=p.rows, length=p.row_tokens, dtype=p.dtype, seed=p.seed,
            progress=progress,
        )])  # fmt: skip

    @section("faults", after="text")
    def plant(self, progress: Progress = silent) -> pd.DataFrame:
        """The faults of the Medusa note on the Medusa heads: `faults.judge`, sound heads in the first row."""
        heads, report, backbone = self.heads["medusa"], self.reports["medusa"], self.backbone
        with TemporaryDirectory(dir=self.work) as folder:
            progress(0, 1, "a schedule that dies")
            died = faults.rate_died(heads, backbone, self._recipe(RATE, teacher=0.0), self.text, Path(folder))
        planted = [
            faults.Planted("none", "", heads, report, training_curve.read(report.path)),
            faults.never_loaded(heads, backbone, self.params.seed),
            faults.other_norm(heads, backbone, report, twice=False),
            faults.other_norm(heads, backbone, report, twice=True),
            died,
        ]
        self.measured["died"] = rows_of(pd.DataFrame(vars(died.curve)))
        return faults.judge(
            self.target, planted, self.prompts[1][:FEWEST], seed=self.params.seed, progress=progress,
            max_new_tokens=min(FAULT_TOKENS, self.params.max_new_tokens),
        )  # fmt: skip

    @property
    def died(self) -> pd.DataFrame:
        """The log of the schedule that died, after `plant`: step, lr, loss."""
        return pd.DataFrame(self.measured["died"])

    @section("last_hidden_state")
    def last_hidden_state(self) -> pd.DataFrame:
        """Which state transformers' `hidden_states[-1]` is: `faults.last_hidden_state`."""
        return faults.last_hidden_state(self.target, prompt_ids(self.target, self.prompts[1][0])[:PROBE])

    @section("practice", after="text")
    def practise(self, watch: Watch | None = None) -> pd.DataFrame:
        """The Medusa heads go on for a few steps, and new ones begin; a row for each head and training."""
        resumed, fresh = self._new_heads(), self._new_heads()
        resumed.load_state_dict(self.heads["medusa"].state_dict())
        with TemporaryDirectory(dir=self.work) as folder:
            runs = [
                practise(name, heads, self._recipe(rate), self.text, Path(folder) / name, watch=watch)
                for name, heads, rate in ((RESUMED, resumed, RESUMED_RATE), (FRESH, fresh, RATE))
            ]
        return pd.DataFrame([row for run in runs for row in run.rows()])

    @section("killed", after="text")
    def kill(self) -> pd.DataFrame:
        """A training that was killed and went on, against one that was not: `practice.survives_a_kill`."""
        with TemporaryDirectory(dir=self.work) as folder:
            return survives_a_kill(self._new_heads, self.text, Path(folder), seed=self.params.seed)

    @section("ablation", after="text")
    def ablate(self, progress: Progress = silent) -> pd.DataFrame:
        """One part of the Medusa heads changed at a time: `practice.ablate`."""
        shipped = self.heads["medusa"]
        recipe = self._recipe(RATE, steps=self.params.ablation_steps, teacher=0.0)
        return ablate(self.target, shipped.config, shipped.token_map, recipe, self.text, progress=progress)

    @section("gates")
    def gate(self, progress: Progress = silent) -> pd.DataFrame:
        """The gates on both sets of heads. A row for each gate: kind, gate, passed, says."""
        for kind, heads in self.heads.items():
            report = self.reports[kind]
            self.checked[kind] = gates.run(
                self.target, heads, report, self.prompts[1], curve=training_curve.read(report.path),
                max_new_tokens=self.params.max_new_tokens, seed=self.params.seed, progress=progress,
            )  # fmt: skip
        return pd.DataFrame([
            {"kind": kind, "gate": g.name, "passed": g.passed, "says": g.says}
            for kind, checked in self.checked.items() for g in checked.gates
        ])  # fmt: skip

    @section("accuracy", after="gates")
    def accuracy(self) -> pd.DataFrame:
        """Of each head on the judged prompts: kind, head, top, accuracy, low, high, n."""
        return pd.concat([
            by_head([score(self.heads[kind], trace(self.target, g)) for g in checked.plain]).assign(kind=kind)
            for kind, checked in self.checked.items()
        ], ignore_index=True)  # fmt: skip

    @section("served", after="gates")
    def served(self) -> pd.DataFrame:
        """alpha by position of greedy chains: kind, position, alpha, low, high, kept, tested."""
        tables = [checked.served.assign(kind=kind) for kind, checked in self.checked.items()]
        return pd.concat(tables, ignore_index=True)

    @section("trees", after="gates")
    def choose(self) -> pd.DataFrame:
        """The tree of each kind that pays here; a row for each size: nodes, depth, tokens, seconds.

        `tokens` are expected by the accuracies of the training text, not by those that `accuracy` measures.
        """
        for kind, checked in self.checked.items():
            trained = accuracy_of(self.reports[kind].path)
            self.drafting[kind] = chosen_drafts(self.target, self.heads[kind], checked, self.bench, trained)
        trees = pd.DataFrame([
            {"kind": kind, "nodes": len(c.plan), "depth": c.plan.depth, "tokens": c.tokens, "seconds": c.seconds}
            for kind, drafting in self.drafting.items() for c in drafting.candidates
        ])  # fmt: skip
        # nodes of no worth are left out, so that two sizes asked for may be one tree
        return trees.drop_duplicates(["kind", "nodes"]) if len(trees) else trees

    @section("speeds", after="trees")
    def time(self, progress: Progress = silent) -> pd.DataFrame:
        """Speeds of both kinds by category. Raises InputError where a gate failed: no speed then."""
        tables = []
        for kind, drafting in self.drafting.items():
            if not self.checked[kind].passed:
                why = "; ".join(f"{d.name} ({d.evidence}): {d.remedy}" for d in self.checked[kind].diagnoses)
                raise InputError(f"no speed of {kind} heads that failed a gate: {why or 'no known fault fits'}")
            table = time_prompts(self.target, self.heads[kind], drafting, self.prompts[0], self.bench, progress)
            tables.append(table.assign(kind=kind))
        return pd.concat(tables, ignore_index=True)

    @section("identity", after="trees")
    def compare_texts(self, progress: Progress = silent) -> pd.DataFrame:
        """Chains and the chosen trees against plain decoding in float32: `identity`."""
        p = self.params
        of = {c: [prompt for prompt in self.prompts[0] if prompt.category == c] for c in p.categories}
        prompts = [prompt for of_category in of.values() for prompt in of_category[: p.identity_prompts]]
        target = load(p.target, backend="hf", dtype="float32")
        with closing(target):
            drafting = {
                kind: (loaded_heads(getattr(p, kind), kind, target)[0], chosen.plan)
                for kind, chosen in self.drafting.items()
            }
            return identity(target, drafting, prompts, max_new_tokens=p.max_new_tokens, progress=progress)

    def _new_heads(self) -> Heads:
        """Untrained heads like the shipped Medusa's."""
        shipped = self.heads["medusa"]
        return new_heads(shipped.config, self.backbone, shipped.token_map, self.params.seed)

    def _recipe(self, rate: float, *, steps: int = 0, teacher: float = 0.5) -> Recipe:
        steps = steps or self.params.steps
        return Recipe(
            steps, batch_size=BATCH, peak_lr=rate, warmup=max(1, steps // 10), teacher=teacher, seed=self.params.seed
        )


def by_head(scores: list[Scores]) -> pd.DataFrame:
    """How often each head has the true token among its best `top`, with intervals over prompts."""
    rows = []
    for head in range(scores[0].rank.shape[1]):
        ranks = [score.rank[:, head][score.rank[:, head] != NO_LABEL] for score in scores]
        for top in TOPS:
            interval = share_interval([((rank < top).sum(), len(rank)) for rank in ranks])
            rows.append({
                "head": head, "top": top, "accuracy": interval.value, "low": interval.low, "high": interval.high,
                "n": sum(map(len, ranks)),
            })  # fmt: skip
    return pd.DataFrame(rows)


def loaded_heads(name_or_path: str, kind: str, target: LanguageModel) -> tuple[Heads, LoadReport]:
    """Trained heads of that kind. Raises InputError for another kind, and what the loader raises."""
    heads, report = load_trained_heads(name_or_path, network(target))
    if heads.config.kind != kind:
        raise InputError(f"{name_or_path!r} are {heads.config.kind} heads, given as {kind}: give each its own")
    return heads, report


def identity(
    target: LanguageModel,
    drafting: Mapping[str, tuple[Heads, TreePlan | None]],
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: int,
    progress: Progress = silent,
) -> pd.DataFrame:
    """Decode every prompt plainly and with each of `drafting`, as a chain and, where it has a plan, as that tree.

    One row for each kind and shape: drafts a round, tokens compared and those that `differ`, prompts, tau. The target
    is float32: in other types rounding may change a text.
    """
    plain = [generate(target, prompt, max_new_tokens=max_new_tokens) for prompt in prompts]
    shapes = [
        (kind, heads, plan) for kind, (heads, tree) in drafting.items() for plan in ([None, tree] if tree else [None])
    ]
    rows = []
    for done, (kind, heads, plan) in enumerate(shapes):
        progress(done, len(shapes), f"{target.caps.dtype}: {kind}")
        drafter, k = HeadsDrafter(target, heads, plan), heads.config.n_heads if plan is None else len(plan)
        texts = [generate(target, prompt, drafter=drafter, k=k, max_new_tokens=max_new_tokens) for prompt in prompts]
        rows.append({
            "kind": kind, "shape": CHAIN if plan is None else "tree", "drafts": k, "prompts": len(prompts),
            "tokens": sum(len(text.token_ids) for text in plain),
            "differ": sum(differing(a, b) for a, b in zip(texts, plain, strict=True)),
            "tau": sum(len(text.token_ids) for text in texts) / sum(len(text.rounds) for text in texts),
        })  # fmt: skip
    return pd.DataFrame(rows)


def differing(generation: Generation, other: Generation) -> int:
    """Places at which the two texts have different tokens, or only one has a token."""
    a, b = generation.token_ids, other.token_ids
    return sum(x != y for x, y in zip(a, b, strict=False)) + abs(len(a) - len(b))
