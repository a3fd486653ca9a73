"""Heads against plain decoding, side by side: `specnb bench medusa`. First the gates; then, if all hold, the speed.

Gates are measured on the last prompts of each category and speeds on the first ones, so a tree is not chosen on what it
is timed on. Wall times are whole calls, prefill included, of the same target in the same process; heads pay where they
are faster than the baseline, the fastest plain decoding of the same weights in any engine (`measure.baseline`).
"""

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from pydantic import Field, NonNegativeInt

from specnb.decode.generate import generate
from specnb.errors import InputError
from specnb.io import plain
from specnb.lm.load import load
from specnb.machine import Neighbours
from specnb.measure.baseline import Baseline
from specnb.measure.bench import FEWEST, Timed, interleaved, interval, tabulate_speeds
from specnb.measure.experiment import Progress, check_prompts, silent
from specnb.medusa import gates
from specnb.medusa.accuracy import Reference, accuracy_table, served_counts
from specnb.medusa.checkpoint import LoadReport, load_trained_heads
from specnb.medusa.drafter import (
    AUTO,
    Drafting,
    HeadsDrafter,
    check_heads,
    choose_drafts,
    fitting_checkpoint,
    tree_size,
)
from specnb.medusa.gates import Checked
from specnb.medusa.nets import Heads, backbone_of
from specnb.medusa.tree import RANKS, TreePlan
from specnb.params import Categories, Count, Params, Tokens
from specnb.prompts import CATEGORIES, Prompt, digest_prompts, prompts
from specnb.provenance import provenance

TARGET = "smollm2-135m?backend=hf&dtype=auto"
PLAIN, ALL = "plain", "all"
PARTS = ("draft", "verify", "rewind", "other")
SHOWN = ["category", "tau", "tau_needed", "alpha_1", "speedup", "low", "high", "speedup_same_engine", "tokens_per_s",
         "plain_tokens_per_s", "draft_share", "verify_share", "identical", "n_prompts"]  # fmt: skip
"""Columns of the speeds for a reader in a terminal."""


class HeadsBenchParams(Params):
    """Settings of the benchmark. `tree` is auto, chain or a number of nodes.

    auto is the tree of the most tokens a second, by costs measured here and accuracies on the prompts that gates judge.
    `categories` may be a text with commas; `num_trials` runs of each prompt count by their median.
    """

    target: str = TARGET
    heads_checkpoint: str | None = None
    prompts: str = ""
    categories: Categories = Field(default=list(CATEGORIES))
    prompts_per_category: Count = 2
    num_trials: Count = 5
    max_new_tokens: Tokens = 128
    tree: str = AUTO
    seed: NonNegativeInt = 0


class HeadsBench(NamedTuple):
    """The gates; and where all passed, what was drafted, and the speeds by category (last row: all of them).

    A `speedup` with its interval is over the `baseline`, `speedup_same_engine` over plain decoding of the target as it
    was opened, as is `expected_speedup`; from `tau_needed` tokens a call on, drafts pay. `loaded` is the loader's
    report; `facts` are the params and provenance of `specnb bench medusa`.
    """

    loaded: str
    checked: Checked
    drafting: Drafting | None = None
    speeds: pd.DataFrame | None = None
    baseline: Baseline | None = None
    facts: Mapping[str, Any] = MappingProxyType({})

    def required_speeds(self) -> pd.DataFrame:
        """The speeds. Raises InputError where a gate failed: no speed then."""
        if self.speeds is None:
            why = "; ".join(f"{d.name} ({d.evidence}): {d.remedy}" for d in self.checked.diagnoses)
            raise InputError(f"no speed of heads that failed a gate: {why or 'no known fault fits'}")
        return self.speeds

    def trees(self) -> pd.DataFrame:
        """The trees that were chosen among, each once: nodes, depth, tokens, seconds, speedup, low, high.

        The predicted speed-up is over plain decoding in the same engine; its interval is over the prompts of the gates.
        """
        counts = [accuracy_table([of_prompt])[["hits", "n"]] for of_prompt in self.checked.evidence.scores]
        plain_s, rows = self.drafting.candidates[0].seconds, {}

        def expect_tokens(plan: TreePlan, counted: np.ndarray) -> float:
            hits, n = counted.sum(axis=0).T
            return plan.tokens((hits / n.clip(1)).reshape(-1, RANKS))

        # nodes of no worth are left out, so that two sizes asked for may be one tree
        for plan, tokens, seconds in self.drafting.candidates:
            gains = plain_s / seconds * np.array(interval(counts, partial(expect_tokens, plan)))
            rows[len(plan)] = (len(plan), plan.depth, tokens, seconds, *gains)
        return pd.DataFrame(rows.values(), columns=["nodes", "depth", "tokens", "seconds", "speedup", "low", "high"])

    def tables(self) -> list[tuple[str, pd.DataFrame]]:
        """Titles and tables for a reader: the gates, then their diagnoses or the speeds."""
        gate_table = (self.loaded, self.checked.table())
        if self.speeds is None:
            return [gate_table, ("no speed: a gate failed", pd.DataFrame(self.checked.diagnoses))]
        note = "; the machine was busy" if self.speeds["busy"].any() else ""
        title = f"{self.facts['params'].target}: {self.drafting.says}{note}. speedup is over {self.baseline}"
        return [gate_table, (title, self.speeds[SHOWN])]

    def document(self) -> dict[str, Any]:
        """One JSON document; without the speeds where a gate failed."""
        checked, drafting = self.checked, self.drafting
        document = dict(self.facts) | {
            "loaded": self.loaded, "passed": checked.passed,
            "gates": [gate._asdict() for gate in checked.gates],
            "diagnoses": [d._asdict() for d in checked.diagnoses],
            "alpha": rows_of(checked.evidence.served), "accuracy": rows_of(accuracy_table(checked.evidence.scores)),
        }  # fmt: skip
        if drafting:
            plan = drafting.plan
            document |= {"speeds": rows_of(self.speeds), "baseline": self.baseline}
            document["drafting"] = {
                "says": drafting.says, "k": drafting.k,
                "tree": None if plan is None else {"parents": plan.parents, "ranks": plan.ranks},
                "candidates": [
                    {"nodes": len(c.plan), "tokens": c.tokens, "seconds": c.seconds, "tokens_per_s": c.tokens_per_s}
                    for c in drafting.candidates
                ],
            }  # fmt: skip
        return plain(document, nan=None)


def run_bench(params: HeadsBenchParams, *, progress: Progress = silent) -> HeadsBench:
    """Load, run the gates, and time what passed them."""
    check_heads(params.target, heads_checkpoint=params.heads_checkpoint, tree=params.tree)
    timed, judged = chosen_prompts(params.categories, params.prompts_per_category, params.prompts)
    with closing(load(params.target)) as target:
        checkpoint = params.heads_checkpoint or fitting_checkpoint(target)
        heads, report = load_trained_heads(checkpoint, backbone_of(target))
        check_prompts(target, [*timed, *judged], params.max_new_tokens)
        reference = Reference(target, judged, params.max_new_tokens, progress)
        result = measure(reference, heads, report, timed, params, progress)
        facts = provenance(
            seeds={"seed": params.seed}, models=[{"role": "target", "id": target.name}],
            prompts_digest=digest_prompts([*timed, *judged]), extra={"target": asdict(target.caps)},
        )  # fmt: skip
        return result._replace(facts={"params": params, "provenance": facts})


def measure(
    reference: Reference, heads: Heads, report: LoadReport, timed: Sequence[Prompt], params: HeadsBenchParams,
    progress: Progress = silent,
) -> HeadsBench:  # fmt: skip
    """Run the gates on the prompts of a reference and, where all pass, time the `timed` ones; `params` has settings."""
    checked = gates.judge_gates(reference, heads, report, seed=params.seed, progress=progress)
    if not checked.passed:
        return HeadsBench(str(report), checked)
    progress(0, 1, "costs of trees")
    target = reference.target
    # those that came with the heads are of training text, on which heads are right more often
    accuracy = accuracy_table(checked.evidence.scores)["marginal"].to_numpy().reshape(-1, RANKS)
    source = f"measured here on {len(reference.plain)} prompts"
    drafter, name = HeadsDrafter(target, heads), heads.config.kind
    drafting = choose_drafts(
        drafter, tree_size(params.tree), accuracy, source, always=True, costs=lambda: reference.tree_costs
    )
    drafter.take_plan(drafting.plan)
    plainly = partial(generate, target, max_new_tokens=params.max_new_tokens, strict=True)
    methods = {PLAIN: plainly, name: partial(plainly, drafter=drafter, k=drafting.k)}
    neighbours, runs, total = Neighbours(), [], len(timed) * len(methods) * params.num_trials
    progress(0, total, "timing")
    for timed_run in interleaved(methods, timed, repeats=params.num_trials):
        runs.append(timed_run)
        progress(len(runs), total, f"timing: {timed[timed_run.prompt].id}")
    speeds = reference.baseline.over(speed_table(runs, [prompt.category for prompt in timed], name))
    busy = neighbours.during(target.caps, [run.generation for run in runs]).busy
    expected_tau, expected_speedup = drafting.expected
    needed = expected_tau / expected_speedup / reference.baseline.share
    speeds = speeds.assign(expected_tau=expected_tau, tau_needed=needed, expected_speedup=expected_speedup, busy=busy)
    return HeadsBench(str(report), checked, drafting, speeds, reference.baseline)


def chosen_prompts(categories: Sequence[str], timed: int, source: str = "") -> tuple[list[Prompt], list[Prompt]]:
    """Return the prompts to time, the first of each category, and those to judge, the last, FEWEST in all or more.

    Raises InputError where a category has too few for both.
    """
    by_category = {category: prompts(category, source=source) for category in categories}
    each = -(-FEWEST // len(by_category))
    for category, of in by_category.items():
        if timed + each > len(of):
            few = f"{category} has {len(of)} prompts, of which the gates judge {each}"
            raise InputError(f"{few}: got {timed} to be timed, expected at most {max(0, len(of) - each)}")
    timed_ones = [prompt for of in by_category.values() for prompt in of[:timed]]
    return timed_ones, [prompt for of in by_category.values() for prompt in of[-each:]]


def rows_of(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Rows that a record or a JSON document holds: None for what does not exist."""
    return plain(frame.to_dict(orient="records"), nan=None)


def speed_table(runs: Sequence[Timed], categories: Sequence[str], name: str) -> pd.DataFrame:
    """One row for each category, and one of all: `category` (of each prompt), then what heads did there.

    Columns: those of `measure.bench.tabulate_speeds` for the method `name` (speed-ups are over the same engine),
    plain_tokens_per_s, alpha_1 with accepted_1 and tested_1 (of one run of each prompt), share_identical, and the share
    of the decoding time of each of PARTS.
    """
    lines = []
    for category in (*dict.fromkeys(categories), ALL):
        of = [run for run in runs if category in (ALL, categories[run.prompt])]
        row = tabulate_speeds(of, baseline=PLAIN).set_index("method", drop=False).to_dict("index")
        drafted = [run for run in of if run.method == name]
        # a greedy generation repeats itself: only its times are new evidence
        accepted, tested = np.sum([served_counts(run.generation)[0] for run in drafted if not run.repeat], axis=0)
        rounds = [r for run in drafted for r in run.generation.rounds]
        parts = {part: sum(getattr(r, f"{part}_s") for r in rounds) for part in PARTS}
        lines.append({
            "category": category, **row[name], "plain_tokens_per_s": row[PLAIN]["tokens_per_s"],
            "alpha_1": accepted / tested if tested else None, "accepted_1": int(accepted), "tested_1": int(tested),
            "share_identical": row[name]["identical"] / row[name]["n_prompts"],
            **{f"{part}_share": seconds / sum(parts.values()) for part, seconds in parts.items()},
        })  # fmt: skip
    return pd.DataFrame(lines)
