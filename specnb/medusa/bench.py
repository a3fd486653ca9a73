"""Heads against plain decoding, side by side: `specnb bench medusa`. First the gates; then, if all hold, the speed.

Gates are measured on the last prompts of each category and speeds on the first ones, so a tree is not chosen on what it
is timed on. Wall times are whole calls, prefill included, of the same target in the same process.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from specnb.decode.generate import generate
from specnb.errors import InputError
from specnb.io import plain
from specnb.lm.base import LanguageModel
from specnb.lm.load import load
from specnb.measure import curve as training_curve
from specnb.measure.bench import FEWEST, Timed, interleaved, table
from specnb.measure.experiment import Progress, check_prompts, silent
from specnb.medusa import gates
from specnb.medusa.accuracy import accuracy_matrix
from specnb.medusa.checkpoint import load_trained_heads
from specnb.medusa.drafter import (
    AUTO,
    Drafting,
    HeadsDrafter,
    accuracy_of,
    choose_drafts,
    fitting_checkpoint,
    tree_size,
)
from specnb.medusa.gates import Checked, served_counts
from specnb.medusa.nets import Heads, network
from specnb.prompts import CATEGORIES, Category, Prompt, digest, prompts
from specnb.provenance import provenance

TARGET = "smollm2-135m?backend=hf&dtype=bfloat16"
PLAIN, ALL = "plain", "all"
PARTS = ("draft", "verify", "rewind", "other")


class HeadsBenchParams(BaseModel):
    """What is timed. `tree` is auto, chain or a number of nodes; `k` cuts the drafts.

    auto is the tree of the most tokens a second by costs measured here and accuracies on held-out training text.

    `dtype` replaces that of the target's name. `num_trials` runs of each prompt count by their median, after
    `warmup_steps` uncounted generations by each method.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    target: str = TARGET
    heads_checkpoint: str | None = None
    categories: tuple[Category, ...] = Field(default=CATEGORIES, min_length=1)
    prompts_per_category: int = Field(default=2, ge=1)
    num_trials: int = Field(default=5, ge=1)
    warmup_steps: int = Field(default=2, ge=1)
    max_new_tokens: int = Field(default=128, ge=2)
    tree: str = AUTO
    k: int | None = Field(default=None, ge=1)
    dtype: str | None = None
    seed: int = Field(default=0, ge=0)


def checked_params(**given: Any) -> HeadsBenchParams:
    """The parameters, `categories` as a text with commas if need be. Raises InputError that names each bad value."""
    if isinstance(given.get("categories"), str):
        given["categories"] = given["categories"].split(",")
    try:
        return HeadsBenchParams(**given)
    except ValidationError as error:
        # a list that is left without its bad entries is no second mistake
        wrong = [e for e in error.errors() if e["type"] != "too_short"] or error.errors()
        message = "; ".join(f"{'.'.join(map(str, e['loc']))} is {e['input']!r:.80}: {e['msg']}" for e in wrong)
        raise InputError(f"bench medusa: {message}") from error


@dataclass(frozen=True)
class HeadsBench:
    """The gates; and where all passed, what was drafted, and the speeds by category (last row: all of them)."""

    params: HeadsBenchParams
    loaded: str
    checked: Checked
    provenance: Mapping[str, Any]
    drafting: Drafting | None = None
    speeds: pd.DataFrame | None = None

    def tables(self) -> list[tuple[str, list[str], list[list[str]]]]:
        """Title, columns and rows of text for a reader: the gates, then their diagnoses or the speeds."""
        gates = [["passed" if g.passed else "FAILED", g.name, g.says] for g in self.checked.gates]
        shown = [(self.loaded, ["", "gate", "measured"], gates)]
        if self.speeds is None or self.drafting is None:
            rows = [list(diagnosis) for diagnosis in self.checked.diagnoses]
            return [*shown, ("no speed: a gate failed", ["diagnosis", "seen", "what to do"], rows)]
        rows = shown_rows(self.speeds)
        return [*shown, (f"{self.params.target}: {self.drafting.says}", list(SHOWN), rows)]

    def document(self) -> dict[str, Any]:
        """One JSON document; without the speeds where a gate failed."""
        document = {
            "params": self.params, "provenance": self.provenance, "loaded": self.loaded,
            "passed": self.checked.passed, "gates": [asdict(gate) for gate in self.checked.gates],
            "diagnoses": [d._asdict() for d in self.checked.diagnoses],
            "alpha": rows_of(self.checked.served), "accuracy": rows_of(self.checked.accuracy),
        }  # fmt: skip
        if self.drafting is not None and self.speeds is not None:
            plan = self.drafting.plan
            document["drafting"] = {
                "says": self.drafting.says, "k": self.drafting.k,
                "tree": None if plan is None else {"parents": plan.parents, "ranks": plan.ranks},
                "candidates": [
                    {"nodes": len(c.plan), "tokens": c.tokens, "seconds": c.seconds, "tokens_per_s": c.tokens_per_s}
                    for c in self.drafting.candidates
                ],
            }  # fmt: skip
            document["speeds"] = rows_of(self.speeds)
        return plain(document, nan=None)


def run(params: HeadsBenchParams, *, progress: Progress = silent) -> HeadsBench:
    """Load, run the gates, and time what passed them."""
    tree_size(params.tree)  # before a model is opened for nothing
    timed, judged = chosen_prompts(params)
    target = load(params.target, **({"dtype": params.dtype} if params.dtype else {}))
    try:
        net = network(target)
        heads, report = load_trained_heads(params.heads_checkpoint or fitting_checkpoint(target), net)
        check_prompts(target, [*timed, *judged], params.max_new_tokens)
        checked = gates.run(
            target, heads, report, judged, curve=training_curve.read(report.path), seed=params.seed, progress=progress,
            max_new_tokens=min(params.max_new_tokens, gates.MAX_NEW_TOKENS),
        )  # fmt: skip
        facts = provenance(
            seeds={"seed": params.seed}, models=[{"role": "target", "id": target.name}],
            prompts_digest=digest([*timed, *judged]), extra={"target": asdict(target.caps)},
        )  # fmt: skip
        if not checked.passed:
            return HeadsBench(params, str(report), checked, facts)
        progress(0, 1, "costs of trees")
        drafting = chosen_drafts(target, heads, checked, params, accuracy_of(report.path))
        speeds = time_prompts(target, heads, drafting, timed, params, progress)
        return HeadsBench(params, str(report), checked, facts, drafting, speeds)
    finally:
        target.close()


def chosen_prompts(params: HeadsBenchParams) -> tuple[list[Prompt], list[Prompt]]:
    """Those that are timed, the first of each category; and those that are judged, the last, FEWEST in all or more.

    Raises InputError where a category has too few for both.
    """
    by_category = {category: prompts(category) for category in params.categories}
    each, timed = -(-FEWEST // len(by_category)), params.prompts_per_category
    for category, of in by_category.items():
        if timed + each > len(of):
            raise InputError(
                f"{category} has {len(of)} prompts, too few for {timed} that are timed and {each} others that the "
                f"gates judge: at most {max(0, len(of) - each)} a category can be timed, give fewer"
            )
    return (
        [prompt for of in by_category.values() for prompt in of[:timed]],
        [prompt for of in by_category.values() for prompt in of[-each:]],
    )


def chosen_drafts(
    target: LanguageModel, heads: Heads, checked: Checked, params: HeadsBenchParams, trained: np.ndarray | None
) -> Drafting:
    """What `params.tree` and `params.k` come to on this machine; something is drafted even where it does not pay.

    A tree is grown from `trained`, the accuracies `(heads, ranks)` that came with the heads, of far more text than the
    gates see; only where there are none, from those that the gates measured.
    """
    known = (trained,)
    if trained is None:
        known = accuracy_matrix(checked.accuracy), f"measured here on {len(checked.plain)} prompts"
    drafts = choose_drafts(target, heads, tree_size(params.tree), *known)
    if drafts.plan is not None and not len(drafts.plan):
        best = max(drafts.candidates[1:], key=lambda c: c.tokens_per_s).plan
        says = f"{drafts.says}; timed all the same is one of {len(best)} nodes"
        drafts = replace(drafts, plan=best, k=len(best), says=says)
    return replace(drafts, k=min(drafts.k, params.k or drafts.k))


def time_prompts(
    target: LanguageModel,
    heads: Heads,
    drafting: Drafting,
    timed: Sequence[Prompt],
    params: HeadsBenchParams,
    progress: Progress = silent,
) -> pd.DataFrame:
    """Interleaved runs, plain and with heads; `speed_table` of them."""
    drafter = HeadsDrafter(target, heads, drafting.plan)
    name, settings = heads.config.kind, {"max_new_tokens": params.max_new_tokens}
    methods = {
        PLAIN: lambda prompt: generate(target, prompt, **settings),
        name: lambda prompt: generate(target, prompt, drafter=drafter, k=drafting.k, **settings),
    }
    for warm in range(params.warmup_steps - 1):  # `interleaved` makes one more
        for method in methods.values():
            method(timed[warm % len(timed)])
    runs: list[Timed] = []
    total = len(timed) * len(methods) * params.num_trials
    progress(0, total, "timing")
    for run in interleaved(methods, timed, repeats=params.num_trials):
        runs.append(run)
        progress(len(runs), total, f"timing: {timed[run.prompt].id}")
    return speed_table(runs, [prompt.category for prompt in timed], name)


def rows_of(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Rows that a record or a JSON document holds: None for what does not exist."""
    return plain(frame.to_dict(orient="records"), nan=None)


def speed_table(runs: Sequence[Timed], categories: Sequence[str], name: str) -> pd.DataFrame:
    """One row for each category, and one of all: `category` (of each prompt), then what heads did there.

    Columns: those of `bench.table` for the method `name`, plain_tokens_per_s, alpha_1 with accepted_1 and tested_1 (of
    one run of each prompt), share_identical, and the share of the decoding time of each of PARTS.
    """
    lines = []
    for category in (*dict.fromkeys(categories), ALL):
        of = [run for run in runs if category in (ALL, categories[run.prompt])]
        row = {row["method"]: row for row in table(of, baseline=PLAIN).to_dict(orient="records")}
        drafted = [run for run in of if run.method == name]
        # a greedy generation repeats itself: only its times are new evidence
        counts = [served_counts(run.generation) for run in drafted if not run.repeat]
        accepted, tested = np.sum([c[0] for c in counts if len(c)] or [(0, 0)], axis=0)
        rounds = [r for run in drafted for r in run.generation.rounds]
        parts = {part: sum(getattr(r, f"{part}_s") for r in rounds) for part in PARTS}
        lines.append({
            "category": category,
            **row[name],
            "plain_tokens_per_s": row[PLAIN]["tokens_per_s"],
            "alpha_1": accepted / tested if tested else None, "accepted_1": int(accepted), "tested_1": int(tested),
            "share_identical": row[name]["identical"] / row[name]["n_prompts"],
            **{f"{part}_share": seconds / sum(parts.values()) for part, seconds in parts.items()},
        })  # fmt: skip
    return pd.DataFrame(lines)


SHOWN: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "category": lambda row: row["category"],
    "tau": lambda row: f"{row['tau']:.2f}",
    "alpha_1": lambda row: f"{row['accepted_1']}/{row['tested_1']}",
    "speed-up": lambda row: (  # its interval where there are prompts enough for one
        f"{row['speedup']:.2f}" + (f" [{row['low']:.2f}, {row['high']:.2f}]" if np.isfinite(row["low"]) else "")
    ),
    "tokens/s": lambda row: f"{row['tokens_per_s']:.1f}",
    "plain": lambda row: f"{row['plain_tokens_per_s']:.1f}",
    "draft/verify/rewind/other": lambda row: " ".join(f"{row[f'{part}_share']:.0%}" for part in PARTS),
    "identical": lambda row: f"{row['identical']}/{row['n_prompts']}",
}
"""Columns for a reader, and what stands in them."""


def shown_rows(speeds: pd.DataFrame) -> list[list[str]]:
    """The rows of a `speed_table` as text, in the columns SHOWN."""
    return [[cell(row) for cell in SHOWN.values()] for row in speeds.to_dict(orient="records")]
