"""Figures of notebook 05: faults, trainings while they run, trees, acceptance and speed."""

import numpy as np
import pandas as pd
import plotly.express as px
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from specnb.book.explorer.widgets import Plot
from specnb.book.style import COLORS, dots, dress, error_bars, looks
from specnb.book.tables import NOTHING
from specnb.measure.experiment import Progress, silent
from specnb.medusa.gates import dead_steps
from specnb.medusa.study import ALL, PARTS
from specnb.medusa.train import PRESETS, Figures, Recipe

FINGERPRINT = {
    "alpha_1": "first draft accepted (alpha_1)",
    "right_normed_once": "right if the norm were applied once",
    "copies": "equal to the backbone's next token",
}
"""Columns of `medusa.faults.recognise` that tell faults apart, with their labels."""
FEW = 10
"""Marks with fewer tested drafts are drawn pale."""
PANELS = {"head_loss": "loss of a batch (nats)", "top1": "top-1 of a batch", "top5": "top-5 of a batch"}
"""Columns of a training's history to draw, with the titles of their panels."""
OLD = Recipe(10_000, peak_lr=1e-4, warmup=200, eta_min=1e-12)
"""The Medusa note's first recipe. There the rate decayed to zero, which `Recipe` refuses."""
RATES_AT = (0, 500, 6_500, 9_999, 29_999)
EVERY = 2
"""Steps between two drawings: a browser may take longer to draw than a step takes."""


def draw_faults(table: pd.DataFrame) -> go.Figure:
    """Draw the fingerprint of each fault: one mark per share."""
    shares = 100 * table.set_index("fault")[[*FINGERPRINT]].astype(float).rename(columns=FINGERPRINT)
    rows = shares.reset_index().melt("fault", var_name="share", value_name="percent")
    return dress(dots(rows, x="percent", y="fault", by="share"), "faults")


def draw_speed(table: pd.DataFrame) -> go.Figure:
    """Draw the speed-up over the baseline by category, next to the parts of a round's time."""
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
    """Draw the acceptance rate by position, with intervals over prompts and counts; few are pale."""
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
    """Draw the predicted speed-up by size of the tree, with intervals; the fastest is annotated.

    It is over plain decoding in the same engine, not over the baseline. Trees with fewer expected
    tokens than a smaller one are left out.
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
    """Return the settings, learning rates and dead steps of the Medusa note's two recipes.

    The rate of a dead step is under a thousandth of the highest.
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
    """Draws trainings while they run: `plot` is the widget, `figure()` a still picture of it.

    `runs` are the names of the trainings in order, one row of panels each. `progress` reports the
    estimated seconds that a training takes, then those that are left.
    """

    def __init__(self, runs: list[str], n_heads: int, *, progress: Progress = silent) -> None:
        self._runs, self._heads, self._progress = runs, range(n_heads), progress
        self._rows = []
        self.plot = Plot(self.figure())

    @property
    def history(self) -> pd.DataFrame:
        """Columns: run, step, head, loss, head_loss, top1, top5.

        The loss is that of all heads, weighted; the others are unweighted figures of the batch.
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
