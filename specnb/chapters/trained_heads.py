"""Do these heads work? The experiment of notebook 05: gates, trees, speed, short training runs.

The short runs have hundreds of times fewer steps than heads need. They show how training proceeds,
and how the variants of an ablation compare, not the accuracy that heads can reach.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Self

import numpy as np
import pandas as pd
import plotly.express as px
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from specnb.book.explorer.widgets import Plot
from specnb.book.style import COLORS, dots, dress, error_bars, looks, readable
from specnb.decode.generate import generate
from specnb.errors import InputError
from specnb.io import file_digest, plain
from specnb.lm.base import LanguageModel
from specnb.lm.load import load
from specnb.lm.tree import COMMITTED
from specnb.machine import Neighbours
from specnb.measure.baseline import Baseline, BaselineTimer
from specnb.measure.bench import Timed, interleaved, tabulate_speeds
from specnb.measure.cost import CostCurve
from specnb.measure.experiment import Experiment, Progress, models_of, silent
from specnb.measure.intervals import FEWEST, interval
from specnb.medusa import data
from specnb.medusa.accuracy import Reference, count_ranks, marginal
from specnb.medusa.checkpoint import LoadReport, load_trained_heads
from specnb.medusa.data import SPLITS, Writing
from specnb.medusa.drafter import CHAIN, KINDS, HeadsDrafter, drafting_s, timed_trees
from specnb.medusa.faults import Sound, vary_heads
from specnb.medusa.gates import Checked, judge_gates
from specnb.medusa.nets import Backbone, Heads, backbone_of
from specnb.medusa.recipe import Figures, Recipe, in_float32
from specnb.medusa.train import lesson_of, train
from specnb.medusa.tree import TimedTree, fastest_tree, tree_curve
from specnb.params import MedusaParams
from specnb.prompts import Prompt, prompts
from specnb.records import RunRecord

REPEATS = 15
"""Number of timed drafts per median."""
PLAIN, ALL = "plain", "all"
PASSES_IF = {
    "loader": "the checkpoint was loaded, with every parameter",
    "zero blocks": "without their blocks, the heads give the target's own predictions",
    "acceptance": (
        "more draft tokens are accepted than with shuffled weights, "
        "and not clearly fewer than with another norm"
    ),
    "serving": (
        "in at least 95 % of the rounds, generation accepts the draft tokens "
        "that are right in the finished text"
    ),
    "schedule": "the learning rate stayed above zero until the end of training",
}
"""What each gate of `medusa.gates` requires."""


class HeadsStudy(Experiment):
    """The experiment, with one set of heads of each kind. Call `close` at the end.

    `timed` and `judged` are prompts; `text` is the folder of the training text for short runs.
    """

    def __init__(self, params: MedusaParams, target: LanguageModel) -> None:
        chosen = choose_prompts(params.categories, params.prompts_per_category, params.prompts)
        self.timed, self.judged = chosen
        super().__init__("05_medusa", params, [*self.timed, *self.judged])
        self.target = self.opened(target)
        self.backbone = backbone_of(target)
        self.loaded = {
            kind: load_kind(getattr(params, kind), kind, self.backbone) for kind in KINDS
        }
        self.checked: dict[str, Checked] = {}
        self.trees: dict[str, list[TimedTree]] = {}
        self.baseline = Baseline()
        folder = self._opened.enter_context(TemporaryDirectory(prefix="specnb-heads-"))
        self.text = Path(folder) / "text"

    @property
    def sound(self) -> Sound:
        """The Medusa heads and the training text, for planted faults and ablations."""
        return Sound(*self.loaded["medusa"], self.backbone, self.text, self.params.seed)

    @cached_property
    def reference(self) -> Reference:
        """The target's own texts for the prompts on which heads are judged."""
        return Reference(self.target, self.judged, self.params.max_new_tokens)

    @cached_property
    def tree_costs(self) -> CostCurve:
        """The target's T(n) for forward passes over trees."""
        return tree_curve(self.target)

    @classmethod
    def open(cls, params: MedusaParams) -> Self:
        """Load the target and the heads of both kinds."""
        return cls(params, load(params.target, backend="hf", dtype=params.dtype))

    def close(self) -> None:
        """Close the target and remove the text."""
        self._opened.close()

    def keep(self, name: str, *tables: pd.DataFrame) -> pd.DataFrame:
        """Store a table in the record under `name`, and return it.

        Two tables, one per kind, are joined into one with a column `kind`.
        """
        table = tables[0]
        if len(tables) > 1:
            tagged = dict(zip(KINDS, tables, strict=True))
            table = pd.concat(tagged, names=["kind"]).reset_index("kind")
        self.measured[name] = plain(table.to_dict(orient="records"), nan=None)
        return table.reset_index(drop=True)

    def judge(self, kind: str, progress: Progress = silent) -> Checked:
        """Judge all gates for the heads of a kind."""
        self.checked[kind] = judge_gates(self.reference, *self.loaded[kind], progress=progress)
        return self.checked[kind]

    def compare_trees(self, kind: str) -> pd.DataFrame:
        """Predict the speed of the best tree of each size, for heads that passed.

        Accuracies are measured on the judged prompts; on training text they are higher. Columns:
        nodes, depth, predicted_tau, predicted_ms (per round), predicted_speedup (over plain
        decoding in the same engine), low and high (interval over prompts). Raises InputError if a
        gate failed.
        """
        checked = self.checked[kind]
        if not checked.passed:
            why = "; ".join(f"{d.name} ({d.evidence}): {d.remedy}" for d in checked.diagnoses)
            raise InputError(f"the {kind} heads failed a gate: {why}")
        scores = checked.evidence.scores
        drafter = HeadsDrafter(self.target, self.loaded[kind][0])
        self.trees[kind] = timed_trees(drafter, marginal(count_ranks(scores)), self.tree_costs)
        by_prompt = [count_ranks([of_prompt]) for of_prompt in scores]
        plain_s = self.trees[kind][0].seconds
        rows = {}  # several sizes may give the same tree
        for plan, tokens, seconds in self.trees[kind]:
            expected = interval(
                by_prompt, lambda counts, plan=plan: plan.tokens(marginal(counts.sum(0)))
            )
            gains = plain_s / seconds * np.array(expected)
            rows[len(plan)] = (len(plan), plan.depth, tokens, 1e3 * seconds, *gains)
        columns = [
            "nodes",
            "depth",
            "predicted_tau",
            "predicted_ms",
            "predicted_speedup",
            "low",
            "high",
        ]
        return pd.DataFrame(rows.values(), columns=columns)

    def fastest(self, kind: str) -> TimedTree:
        """Return the tree of at least one node with the most expected tokens per second."""
        return fastest_tree(self.trees[kind][1:])

    def time(self, progress: Progress = silent) -> pd.DataFrame:
        """Time plain decoding and both kinds of heads with their fastest trees, interleaved.

        Keeps the baseline, timed with them, as `baseline`. One row per kind and category. Columns:
        kind, those of `tabulate_by_category` and `Baseline.over`, predicted_speedup (over plain
        decoding in the same engine), predicted_tau, busy.
        """
        # 1. Run all methods on each prompt.
        decode = partial(
            generate, self.target, max_new_tokens=self.params.max_new_tokens, strict=True
        )
        methods = {PLAIN: decode}
        for kind, (heads, _) in self.loaded.items():
            plan = self.fastest(kind).plan
            drafter = HeadsDrafter(self.target, heads, plan)
            methods[kind] = partial(decode, drafter=drafter, k=len(plan))
        neighbours = Neighbours()
        with BaselineTimer(self.target) as timer:
            timed = interleaved(methods, self.timed, timer=timer, progress=progress)
            runs = [run.without_prefill() for run in timed]
        undrafted = [run for run in runs if run.method == PLAIN]
        rate = sum(run.n_tokens for run in undrafted) / sum(run.wall_s for run in undrafted)
        self.baseline = timer.baseline().model_copy(update={"live_tokens_per_s": rate})
        self.measured["baseline"] = self.baseline.model_dump()
        busy = neighbours.during(self.target.caps, [run.generation for run in runs]).busy
        # 2. Compare each kind with plain decoding, and with its prediction.
        categories = [prompt.category for prompt in self.timed]
        tables = []
        for kind in KINDS:
            best = self.fastest(kind)
            predicted = best.tokens_per_s / self.trees[kind][0].tokens_per_s
            speeds = self.baseline.over(tabulate_by_category(runs, categories, kind))
            tables.append(
                speeds.assign(predicted_speedup=predicted, predicted_tau=best.tokens, busy=busy)
            )
        return self.keep("speeds", *tables)

    def compare_texts(self) -> pd.DataFrame:
        """Compare drafted texts with plain texts in float32, where rounding changes no text.

        One row per kind and shape (chain, tree): number of prompts, and of texts that differ.
        """
        p = self.params
        target = self.target
        loaded = self.loaded
        n = p.prompts_per_category
        chosen = [prompt for i in range(n) for prompt in self.timed[i::n]][: p.identity_prompts]
        if target.caps.dtype != "float32":
            target = self.opened(load(p.target, backend="hf", dtype="float32"))
            backbone = backbone_of(target)
            loaded = {kind: load_kind(getattr(p, kind), kind, backbone) for kind in KINDS}
        decode = partial(generate, target, max_new_tokens=p.max_new_tokens)
        expected = [decode(prompt) for prompt in chosen]
        rows = []
        for kind in self.trees:
            for shape, plan in {CHAIN: None, "tree": self.fastest(kind).plan}.items():
                drafter = HeadsDrafter(target, loaded[kind][0], plan)
                drafted = partial(decode, drafter=drafter, k=drafter.tree_nodes or drafter.n_heads)
                differ = sum(drafted(g.prompt_ids).token_ids != g.token_ids for g in expected)
                rows.append(
                    {"kind": kind, "shape": shape, "prompts": len(expected), "differ": differ}
                )
        return self.keep("identity", pd.DataFrame(rows))

    def record(self, error: BaseException | None = None) -> RunRecord:
        """Return the record of the measurements so far; its run ID depends on the parameters."""
        self.models = models_of(self.target, []) + [
            {
                "role": "drafter",
                "id": getattr(self.params, kind),
                "sha256": file_digest(report.path),
            }
            for kind, (_, report) in self.loaded.items()
        ]
        chains = [chain for checked in self.checked.values() for chain in checked.evidence.chains]
        self.generations = [*chains, *(self.reference.plain if chains else ())]
        return super().record(error)


def choose_prompts(
    categories: Sequence[str], timed: int, source: str = ""
) -> tuple[list[Prompt], list[Prompt]]:
    """Return the first prompts of each category, to time, and the last, to judge heads on.

    At least FEWEST prompts are judged. Raises InputError if a category has too few for both.
    """
    groups = [prompts(category, source=source) for category in dict.fromkeys(categories)]
    judged = -(-FEWEST // len(groups))
    for of in groups:
        if timed + judged > len(of):
            few = f"{of[0].category} has {len(of)} prompts, of which {judged} are judged"
            raise InputError(
                f"{few}: got {timed} to time, expected at most {max(0, len(of) - judged)}"
            )
    first = [prompt for of in groups for prompt in of[:timed]]
    return first, [prompt for of in groups for prompt in of[-judged:]]


def load_kind(name_or_path: str, kind: str, backbone: Backbone) -> tuple[Heads, LoadReport]:
    """Load trained heads. Raises InputError for another kind, and what the loader raises."""
    heads, report = load_trained_heads(name_or_path, backbone)
    if heads.config.kind != kind:
        raise InputError(
            f"got {heads.config.kind} heads in {name_or_path!r}, expected {kind} heads"
        )
    return heads, report


def tabulate_by_category(
    runs: Sequence[Timed], categories: Sequence[str], name: str
) -> pd.DataFrame:
    """Tabulate the speed of the method `name`: one row per category, and one for all.

    `categories` lists the category of each prompt. Columns: category, those of
    `measure.bench.tabulate_speeds`, and plain_tokens_per_s.
    """
    rows = []
    for category in (*dict.fromkeys(categories), ALL):
        of = [run for run in runs if category in (ALL, categories[run.prompt])]
        speeds = tabulate_speeds(of, baseline=PLAIN).set_index("method", drop=False)
        plain_rate = speeds.at[PLAIN, "tokens_per_s"]
        rows.append({"category": category, **speeds.loc[name], "plain_tokens_per_s": plain_rate})
    return pd.DataFrame(rows)


def tabulate_gates(table: pd.DataFrame) -> pd.DataFrame:
    """Return one row per gate for display: what it requires, and whether each kind passed."""
    passed = table.replace({True: "yes", False: "no"}).pivot(index="gate", columns="kind")["passed"]
    return pd.DataFrame({"passes if": PASSES_IF}).join(passed[[*KINDS]]).rename_axis("gate")


def write_study_text(
    params: MedusaParams, target: LanguageModel, folder: Path, progress: Progress = silent
) -> pd.DataFrame:
    """Generate `rows` rows of `row_tokens` tokens per split (train, held_out), with hidden states.

    Return one row: tokens of each split, how many of them heads learn (`own`), seconds.
    """
    rows, length = params.rows, params.row_tokens
    writing = Writing(length=length, batch_size=rows, longest_seed=length // 3, seed=params.seed)
    started_s = perf_counter()
    batches = dict.fromkeys(SPLITS, 1)
    data.write_splits(target, folder, batches=batches, writing=writing, progress=progress)
    text = {split: data.read(folder, split) for split in SPLITS}
    sizes = {f"{split}_tokens": part.tokens.size for split, part in text.items()}
    sizes |= {f"{split}_own": part.n_own for split, part in text.items()}
    return pd.DataFrame([sizes | {"seconds": perf_counter() - started_s}])


def practise(
    run: str, heads: Heads, recipe: Recipe, text: Path, watch: "TrainingView | None" = None
) -> pd.DataFrame:
    """Train `heads` in place, in the loop that trained the shipped heads; return one row per head.

    `watch` shows the progress. Columns: run, head, steps, seconds (with held-out metrics), and
    held-out top1_before, top1, top5_before, top5.
    """
    lesson = lesson_of(heads, recipe, text)
    with in_float32(heads):
        before = lesson.judge()
    options = {}
    if watch:
        watch.add(run, 0, HELD_OUT, before)
        options["on_step"] = partial(watch.step, run, recipe.steps, lesson.judge)
    started_s = perf_counter()
    with TemporaryDirectory(prefix="specnb-heads-") as folder:
        log = train(heads, recipe, text, Path(folder), save_every=recipe.steps, **options)
    rows = {"run": run, "head": range(heads.config.n_heads), "steps": recipe.steps}
    rows |= {"seconds": perf_counter() - started_s}
    for share in ("top1", "top5"):
        rows |= {f"{share}_before": before[share], share: log[-1][share]}
    return pd.DataFrame(rows)


VARIANTS = {
    "shared lm_head": {},
    "without the norm": {"norms": 0},
    "Hydra": {"kind": "hydra"},
    "private lm_heads": {"lm_head": "private"},
    "shared, all tokens": {"all_tokens": True},
    "private, all tokens": {"lm_head": "private", "all_tokens": True},
}
"""Variants of the heads, as arguments of `vary_heads`.

Without the norm, the blocks take the state before the final norm, as the Medusa note reports.
"""
NOT_TRAINED = "private, all tokens"
"""Only its cost is measured: training four heads on SmolLM2-135M would take 1.8 GB of memory."""


def ablate(
    target: LanguageModel, sound: Sound, recipe: Recipe, *, progress: Progress = silent
) -> pd.DataFrame:
    """Measure the cost of each variant of the heads, and train it; return one row per variant.

    Columns: variant, parameters, read_mb (10^6 bytes read to draft with all heads), draft_ms
    (median), and held-out top1 and top5 (lists by head, None for NOT_TRAINED).
    """
    rows = []
    for done, (variant, changes) in enumerate(VARIANTS.items()):
        progress(done, len(VARIANTS), f"ablation: {variant}")
        heads = vary_heads(sound, **changes)
        shares = dict.fromkeys(("top1", "top5"))
        parameters, read_bytes = heads.cost()
        draft_s = drafting_s(HeadsDrafter(target, heads), heads.config.n_heads, repeats=REPEATS)
        if variant != NOT_TRAINED:
            shares = practise(variant, heads, recipe, sound.text)[[*shares]].to_dict("list")
        costs = {"parameters": parameters, "read_mb": read_bytes / 1e6, "draft_ms": 1e3 * draft_s}
        rows.append({"variant": variant} | costs | shares)
    return pd.DataFrame(rows)


# --- Figures of notebook 05: faults, trees, acceptance, speed, training progress ---

FINGERPRINT = {
    "right": "first head right (should be high)",
    "right_normed_once": "the same, given the correct state (normed once)",
    "copies": "heads repeat the target's next token (should be low)",
}
"""Columns of `medusa.faults.recognise` that distinguish faults, with their labels."""
RATIOS = {
    "speedup": "over plain decoding in PyTorch",
    "over_fastest": "over the fastest plain decoding",
}
"""Columns of a speed table to draw, with panel titles."""
DRAWN = (1, 4, 8, 16)
"""Numbers of nodes of the trees to draw."""
OLD = Recipe(10_000, peak_lr=1e-4, warmup=200, eta_min=1e-12)
"""The Medusa note's first recipe. Its LR decayed to zero, which `Recipe` rejects."""
POINTS = 6
"""Number of times that held-out metrics are measured in a training run."""
BATCH, HELD_OUT = "training batch", "held-out"


def draw_faults(table: pd.DataFrame) -> go.Figure:
    """Draw FINGERPRINT's columns for each planted fault, in percent; labels list failed gates."""
    failed = ("fails " + table["failed"]).replace("fails ", "passes every gate")
    shares = 100 * table[[*FINGERPRINT]].astype(float).rename(columns=FINGERPRINT)
    shares["planted"] = "<b>" + table["planted"] + "</b><br>" + failed
    rows = shares.melt("planted", var_name="share", value_name="percent")
    title = (
        f"{table['agree'].sum()} of {len(table)} planted faults and controls "
        "are diagnosed as expected"
    )
    return dress(dots(rows, x="percent", y="planted", by="share"), "faults", title_text=title)


def draw_speed(table: pd.DataFrame) -> go.Figure:
    """Draw the live RATIOS by category, with intervals over prompts, one panel per ratio."""
    in_engine = table[["kind", "category", "speedup", "low", "high"]]
    over = table[["kind", "category", "over_fastest", "over_fastest_low", "over_fastest_high"]]
    panels = dict(
        zip(RATIOS.values(), (in_engine, over.set_axis(in_engine.columns, axis=1)), strict=True)
    )
    rows = pd.concat(panels, names=["ratio"]).reset_index("ratio").reset_index(drop=True)
    rows["kind"] = rows["kind"].map(readable)
    figure = dots(
        rows, x="speedup", y="category", by="kind", facet_col="ratio", **error_bars(rows, axis="x")
    )
    whole = table[table["category"] == ALL]
    speeds = ", ".join(whole["kind"].map(readable) + whole["over_fastest"].map(" {:.2f}".format))
    return dress(
        figure,
        "speed",
        title_text=f"Live speed over the fastest plain decoding, all prompts: {speeds}",
    )


def draw_trees(table: pd.DataFrame, trees: Mapping[str, Sequence[TimedTree]]) -> go.Figure:
    """Draw the predicted speed-up by tree size, with intervals, and the DRAWN trees of one kind.

    The speed-up is over plain decoding in the same engine. The drawn trees are of the kind with the
    highest speed-up.
    """
    # 1. Speed-ups.
    rows = table.assign(label=table["kind"].map(readable), nodes=table["nodes"].astype(str))
    lines = px.line(
        rows,
        x="nodes",
        y="predicted_speedup",
        hover_data=["depth", "predicted_tau"],
        markers=True,
        **looks("label", rows["label"]),
        **error_bars(rows, "predicted_speedup"),
    )
    figure = make_subplots(rows=2, row_heights=[0.62, 0.38], vertical_spacing=0.24)
    figure.add_traces(lines.data, rows=1, cols=1)
    drafted = rows[rows["nodes"] != "0"].sort_values("predicted_speedup")
    best = drafted.drop_duplicates("kind", keep="last")
    speeds = best["predicted_speedup"].map(" ({:.2f} times)".format)
    sizes = ", ".join(best["nodes"] + " for " + best["label"] + speeds)
    order = [*map(str, sorted(table["nodes"].unique()))]
    title = f"Draft tokens in the fastest tree (predicted): {sizes}"
    dress(figure, "tree_sizes", title_text=title, xaxis_categoryarray=order)
    # 2. Trees, from left to right.
    left = 0.0
    for plan in (tree.plan for tree in trees[best["kind"].iloc[-1]] if len(tree.plan) in DRAWN):
        places = place_nodes(plan.parents)
        x, y = [], []
        for node, parent in enumerate(plan.parents):
            x += [left + places[parent], left + places[node], None]
            y += [-plan.depths[node], -1 - plan.depths[node], None]
        figure.add_scatter(
            x=x,
            y=y,
            text=[f"{len(plan)} drafted"],
            textposition="top center",
            mode="lines+markers+text",
            marker_color=COLORS[-1],
            cliponaxis=False,
            showlegend=False,
            row=2,
            col=1,
        )
        left += max(places) + 2
    figure.update_xaxes(visible=False, type="linear", row=2)
    return figure.update_yaxes(visible=False, rangemode="normal", row=2)


def place_nodes(parents: Sequence[int]) -> list[float]:
    """Return the horizontal places of a tree's nodes and, last, its root: parents are centered."""
    places = [0.0] * (len(parents) + 1)
    free = count()

    def place(node: int) -> float:
        below = [place(child) for child, parent in enumerate(parents) if parent == node]
        places[node] = sum(below) / len(below) if below else next(free)
        return places[node]

    place(COMMITTED)
    return places


class TrainingView:
    """Plots training runs live: `plot` is the widget, `figure()` a static figure.

    `runs` are the names of the runs in order.
    """

    def __init__(self, runs: list[str], *, progress: Progress = silent) -> None:
        self._runs, self._progress = runs, progress
        self._rows = []
        self.plot = Plot(self.figure())

    @property
    def history(self) -> pd.DataFrame:
        """The first head's top-1 share of batches and of held-out text: run, step, text, top1."""
        return pd.DataFrame(self._rows, columns=["run", "step", "text", "top1"])

    def add(self, run: str, step: int, text: str, figures: Figures) -> None:
        self._rows.append((run, step, text, figures["top1"][0]))

    def step(
        self,
        run: str,
        steps: int,
        judge: Callable[[], Figures],
        step: int,
        _loss: float,
        figures: Figures,
    ) -> None:
        self.add(run, step, BATCH, figures)
        self._progress(step, steps, run)
        if step % -(-steps // POINTS) == 0 or step == steps:
            self.add(run, step, HELD_OUT, judge())
            self.plot.update(self.figure())

    def figure(self) -> go.Figure:
        """Draw the first head's top-1 share over steps, in percent: one held-out curve per run."""
        rows = self.history.assign(percent=lambda rows: 100 * rows["top1"])
        held_out = rows[rows["text"] == HELD_OUT]
        look = {"x": "step", "y": "percent"} | looks("run", self._runs)
        figure = px.line(held_out, markers=True, **look).update_traces(line_width=3, marker_size=11)
        batches = px.line(rows[rows["text"] == BATCH], **look)
        batches.update_traces(mode="lines", opacity=0.6, line_width=1.5, showlegend=False)
        figure.add_traces(batches.data)
        ends = held_out.groupby("run", sort=False)["percent"].agg(["first", "last"])
        changes = ", ".join(
            f"{run} {first:.0f} % to {last:.0f} %" for run, first, last in ends.itertuples()
        )
        return dress(figure, "training", title_text=f"Held-out top-1 of the first head: {changes}")
