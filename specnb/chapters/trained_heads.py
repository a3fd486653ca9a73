"""Do these heads work? The experiment of notebook 05: gates, trees, speed, short training runs.

The short runs have hundreds of times fewer steps than heads need. They show how training proceeds,
and how the variants of an ablation compare, not the accuracy that heads can reach.
"""

from collections.abc import Sequence
from functools import cached_property, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any, Self

import numpy as np
import pandas as pd
import plotly.express as px
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from specnb.book.explorer.widgets import Plot
from specnb.book.style import COLORS, dots, dress, error_bars, looks
from specnb.book.tables import NOTHING
from specnb.decode.generate import generate
from specnb.errors import InputError
from specnb.io import file_digest, plain
from specnb.lm.base import LanguageModel
from specnb.lm.load import load
from specnb.machine import Neighbours
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
from specnb.medusa.gates import Checked, dead_steps, judge_gates
from specnb.medusa.nets import Backbone, Heads, backbone_of
from specnb.medusa.recipe import PRESETS, Figures, Recipe, in_float32
from specnb.medusa.train import lesson_of, time_step, train
from specnb.medusa.tree import TimedTree, fastest_tree, tree_curve
from specnb.params import MedusaParams
from specnb.prompts import Prompt, prompts
from specnb.records import RunRecord

REPEATS = 15
"""Number of timed drafts per median."""
PLAIN, ALL = "plain", "all"
PARTS = ("draft", "verify", "rewind", "other")
"""Parts of a round's time."""


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
        self.loaded = {kind: load_kind(getattr(params, kind), kind, self.backbone) for kind in KINDS}
        self.checked: dict[str, Checked] = {}
        self.trees: dict[str, list[TimedTree]] = {}
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
        """Return the expected speed-up of the best tree of each size, for heads that passed.

        Accuracies are measured on the judged prompts; on training text they are higher. Columns:
        nodes, depth, tokens (expected per round), seconds (per round), speedup (over plain decoding
        in the same engine), low and high (interval over prompts). Raises InputError if a gate
        failed.
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
            expected = interval(by_prompt, lambda counts, plan=plan: plan.tokens(marginal(counts.sum(0))))
            gains = plain_s / seconds * np.array(expected)
            rows[len(plan)] = (len(plan), plan.depth, tokens, seconds, *gains)
        columns = ["nodes", "depth", "tokens", "seconds", "speedup", "low", "high"]
        return pd.DataFrame(rows.values(), columns=columns)

    def fastest(self, kind: str) -> TimedTree:
        """Return the tree of at least one node with the most expected tokens per second."""
        return fastest_tree(self.trees[kind][1:])

    def time(self, kind: str, progress: Progress = silent) -> pd.DataFrame:
        """Time the heads with their fastest tree, interleaved with plain decoding.

        Columns: those of `tabulate_by_category`, with speed-ups over the baseline;
        speedup_same_engine, over plain decoding of the target as opened; expected_tau and
        expected_speedup; tau_needed, the break-even tau; busy.
        """
        best = self.fastest(kind)
        drafter = HeadsDrafter(self.target, self.loaded[kind][0], best.plan)
        decode = partial(generate, self.target, max_new_tokens=self.params.max_new_tokens, strict=True)
        methods = {PLAIN: decode, kind: partial(decode, drafter=drafter, k=len(best.plan))}
        neighbours = Neighbours()
        runs = [*interleaved(methods, self.timed, progress=progress)]
        busy = neighbours.during(self.target.caps, [run.generation for run in runs]).busy
        baseline = self.reference.baseline
        speedup = best.tokens_per_s / self.trees[kind][0].tokens_per_s
        speeds = tabulate_by_category(runs, [prompt.category for prompt in self.timed], kind)
        return baseline.over(speeds).assign(
            expected_tau=best.tokens,
            tau_needed=best.tokens / speedup / baseline.share,
            expected_speedup=speedup,
            busy=busy,
        )

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
                rows.append({"kind": kind, "shape": shape, "prompts": len(expected), "differ": differ})
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


def choose_prompts(categories: Sequence[str], timed: int, source: str = "") -> tuple[list[Prompt], list[Prompt]]:
    """Return the first prompts of each category, to time, and the last, to judge heads on.

    At least FEWEST prompts are judged. Raises InputError if a category has too few for both.
    """
    by_category = {category: prompts(category, source=source) for category in categories}
    judged = -(-FEWEST // len(by_category))
    for category, of in by_category.items():
        if timed + judged > len(of):
            few = f"{category} has {len(of)} prompts, of which {judged} are judged"
            raise InputError(f"{few}: got {timed} to time, expected at most {max(0, len(of) - judged)}")
    first = [prompt for of in by_category.values() for prompt in of[:timed]]
    return first, [prompt for of in by_category.values() for prompt in of[-judged:]]


def load_kind(name_or_path: str, kind: str, backbone: Backbone) -> tuple[Heads, LoadReport]:
    """Load trained heads. Raises InputError for another kind, and what the loader raises."""
    heads, report = load_trained_heads(name_or_path, backbone)
    if heads.config.kind != kind:
        raise InputError(f"got {heads.config.kind} heads in {name_or_path!r}, expected {kind} heads")
    return heads, report


def tabulate_by_category(runs: Sequence[Timed], categories: Sequence[str], name: str) -> pd.DataFrame:
    """Tabulate the speed of the method `name`: one row per category, and one for all.

    `categories` lists the category of each prompt. Columns: category, those of
    `measure.bench.tabulate_speeds`, plain_tokens_per_s, and the share of a round's time of each of
    PARTS.
    """
    rows = []
    for category in (*dict.fromkeys(categories), ALL):
        of = [run for run in runs if category in (ALL, categories[run.prompt])]
        speeds = tabulate_speeds(of, baseline=PLAIN).set_index("method", drop=False).to_dict("index")
        rounds = [r for run in of if run.method == name for r in run.generation.rounds]
        seconds = {part: sum(getattr(r, f"{part}_s") for r in rounds) for part in PARTS}
        shares = {f"{part}_share": s / sum(seconds.values()) for part, s in seconds.items()}
        plain_rate = {"plain_tokens_per_s": speeds[PLAIN]["tokens_per_s"]}
        rows.append({"category": category} | speeds[name] | plain_rate | shares)
    return pd.DataFrame(rows)


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


def practise(run: str, heads: Heads, recipe: Recipe, text: Path, watch: Any = None) -> pd.DataFrame:
    """Train `heads` in place, in the loop that trained the shipped heads; return one row per head.

    During training, `watch.starts(run, steps, seconds_a_step)` and `watch.step(run, step, loss,
    figures)` are called. Columns: run, head, steps, told_s (estimated seconds), took_s (actual
    seconds), and held-out top1_before, top1, top5_before, top5.
    """
    lesson = lesson_of(heads, recipe, text)
    with in_float32(heads):
        before = lesson.judge()
        step_s = time_step(heads, recipe, lesson)
    if watch:
        watch.starts(run, recipe.steps, step_s)
    options = {"on_step": partial(watch.step, run)} if watch else {}
    started_s = perf_counter()
    with TemporaryDirectory(prefix="specnb-heads-") as folder:
        log = train(heads, recipe, text, Path(folder), save_every=recipe.steps, **options)
    shares = {"top1_before": before["top1"], "top1": log[-1]["top1"]}
    shares |= {"top5_before": before["top5"], "top5": log[-1]["top5"]}
    times = {"told_s": step_s * recipe.steps, "took_s": perf_counter() - started_s}
    head = range(heads.config.n_heads)
    return pd.DataFrame({"run": run, "head": head, "steps": recipe.steps} | times | shares)


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


def ablate(target: LanguageModel, sound: Sound, recipe: Recipe, *, progress: Progress = silent) -> pd.DataFrame:
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


# --- Figures of notebook 05: faults, training progress, trees, acceptance and speed ---

FINGERPRINT = {
    "alpha_1": "first draft accepted (alpha_1)",
    "right_normed_once": "right if the norm were applied once",
    "copies": "equal to the backbone's next token",
}
"""Columns of `medusa.faults.recognise` that distinguish faults, with their labels."""
FEW = 10
"""Marks with fewer tested draft tokens are drawn pale."""
PANELS = {"head_loss": "loss of a batch (nats)", "top1": "top-1 of a batch", "top5": "top-5 of a batch"}
"""Columns of the training history to draw, with panel titles."""
OLD = Recipe(10_000, peak_lr=1e-4, warmup=200, eta_min=1e-12)
"""The Medusa note's first recipe. Its LR decayed to zero, which `Recipe` rejects."""
RATES_AT = (0, 500, 6_500, 9_999, 29_999)
EVERY = 2
"""Steps between redraws: drawing in a browser may take longer than a step."""


def draw_faults(table: pd.DataFrame) -> go.Figure:
    """Draw the columns of FINGERPRINT for each fault, in percent."""
    shares = 100 * table.set_index("fault")[[*FINGERPRINT]].astype(float).rename(columns=FINGERPRINT)
    rows = shares.reset_index().melt("fault", var_name="share", value_name="percent")
    return dress(dots(rows, x="percent", y="fault", by="share"), "faults")


def draw_speed(table: pd.DataFrame) -> go.Figure:
    """Draw the speed-up over the baseline by category, and the parts of a round's time."""
    titles = ["speed-up, interval over prompts", "where the time of a round goes (all categories)"]
    figure = make_subplots(cols=2, horizontal_spacing=0.12, subplot_titles=titles)
    speeds = px.bar(
        table, x="category", y="speedup", hover_data=["tau", "identical", "n_prompts"],
        **looks("kind", table["kind"], by=()), **error_bars(table),
    )  # fmt: skip
    figure.add_traces(speeds.data, rows=1, cols=1)
    whole = table[table["category"] == ALL]
    before = 0.0
    for index, part in enumerate(PARTS):
        shares = 100 * whole[f"{part}_share"]
        figure.add_bar(
            x=shares, y=whole["kind"], base=before, name=part, orientation="h",
            marker_color=COLORS[index + 2], offsetgroup="parts", customdata=shares, showlegend=False,
            text=[f"{part} {share:.0f} %" if share > 4 else "" for share in shares], insidetextanchor="middle",
            hovertemplate=f"%{{y}}, {part}: %{{customdata:.1f}} %<extra></extra>", textposition="inside",
            row=1, col=2,
        )  # fmt: skip
        before = before + shares
    return dress(figure, "speed")


def draw_alpha(table: pd.DataFrame) -> go.Figure:
    """Draw alpha_k by position, with counts and intervals over prompts."""
    place, kinds = pd.factorize(table["kind"])
    rows = table.assign(
        at=table["position"] + 0.36 * (place - (len(kinds) - 1) / 2),
        counts=table["kept"].astype(str) + " of " + table["tested"].astype(str),
    )
    figure = px.scatter(
        rows, x="at", y="alpha", text="counts", **looks("kind", kinds, by=["symbol"]), **error_bars(rows, "alpha")
    )
    for trace in figure.data:
        trace.marker.opacity = np.where(rows["tested"][rows["kind"] == trace.name] < FEW, 0.3, 1.0)
    figure.update_traces(textposition="middle right", textfont_size=11, marker_size=11)
    figure.update_xaxes(tickvals=table["position"].unique())
    return dress(figure, "alpha", yaxis_title_text=f"alpha_k (pale: fewer than {FEW} tested)")


def draw_tree_sizes(table: pd.DataFrame) -> go.Figure:
    """Draw the predicted speed-up by tree size, with intervals; the fastest tree is annotated.

    The speed-up is over plain decoding in the same engine, not over the baseline. Trees with fewer
    expected tokens than a smaller tree are left out.
    """
    rows = table.sort_values("nodes", kind="stable").astype({"nodes": str})
    rows = rows[rows["tokens"] == rows.groupby("kind")["tokens"].cummax()]
    figure = px.line(
        rows, x="nodes", y="speedup", hover_data=["depth", "tokens"], markers=True,
        **looks("kind", rows["kind"]), **error_bars(rows),
    )  # fmt: skip
    for index, best in enumerate(rows.loc[rows.groupby("kind", sort=False)["speedup"].idxmax()].itertuples()):
        text = f"{best.kind}, nodes: {best.nodes}, {best.speedup:.2f} times"
        figure.add_annotation(x=best.nodes, y=best.speedup, text=text, ax=110, ay=40 * (-1) ** index)
    return dress(figure, "tree_sizes", xaxis_categoryarray=rows["nodes"].unique())


def compare_schedules() -> pd.DataFrame:
    """Return settings, learning rates and the share of dead steps of the Medusa note's two recipes.

    Dead steps are those after the peak with the LR decayed to at most `gates.DEAD_LR` of it.
    """
    columns = {}
    for name, recipe in {"old": OLD, "new": PRESETS["report"]}.items():
        rates = np.array([*map(recipe.lr, range(recipe.steps))])
        dead = dead_steps([{"step": step, "lr": rate} for step, rate in enumerate(rates, 1)])
        columns[name] = {
            **{field: getattr(recipe, field) for field in ("steps", "peak_lr", "warmup")}, "dead steps": f"{dead:.1%}",
            **{f"rate at step {step:,}": f"{rates[step]:.1e}" if step < recipe.steps else NOTHING for step in RATES_AT},
        }  # fmt: skip
    return pd.DataFrame(columns, dtype=object)


class TrainingView:
    """Plots training runs live: `plot` is the widget, `figure()` a static figure.

    `runs` are the names of the runs in order, with one row of panels each. `progress` reports the
    estimated seconds of a run, then the seconds left.
    """

    def __init__(self, runs: list[str], n_heads: int, *, progress: Progress = silent) -> None:
        self._runs, self._heads, self._progress = runs, range(n_heads), progress
        self._rows = []
        self.plot = Plot(self.figure())

    @property
    def history(self) -> pd.DataFrame:
        """Columns: run, step, head, loss, head_loss, top1, top5.

        `loss` is the weighted loss of all heads; the others are unweighted metrics of the batch.
        """
        return pd.DataFrame(self._rows, columns=["run", "step", "head", "loss", *PANELS])

    def starts(self, run: str, steps: int, seconds_a_step: float) -> None:
        self._steps, self._seconds = steps, seconds_a_step
        self._progress(0, steps, f"{run}: about {steps * seconds_a_step:.0f} s")

    def step(self, run: str, step: int, loss: float, figures: Figures) -> None:
        for head in self._heads:
            self._rows.append((run, step, head, loss, *(figures[name][head] for name in PANELS)))
        left = (self._steps - step) * self._seconds
        self._progress(step, self._steps, f"{run}: about {left:.0f} s left")
        if step % EVERY == 0 or step == self._steps:
            self.plot.update(self.figure())

    def figure(self) -> go.Figure:
        """Draw loss, top-1 and top-5 of each head over steps, one row of panels per run."""
        rows = self.history.rename(columns=PANELS).astype({"head": str}).melt(["run", "step", "head"], PANELS.values())
        figure = px.line(
            rows, x="step", y="value", facet_row="run", facet_col="variable", facet_col_spacing=0.08,
            height=300 * len(self._runs) + 40, **looks("head", map(str, self._heads)),
        )  # fmt: skip
        figure.for_each_annotation(lambda note: note.update(text=note.text.partition("=")[2]))
        figure.update_yaxes(matches=None)
        return dress(figure, "training")
