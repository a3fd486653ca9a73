"""Figures of notebook 05: faults and their fingerprints, training that can be watched, speed and its parts."""

from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from specnb.book.plot import Plot
from specnb.book.style import COLOURS, series, spread, template
from specnb.measure.experiment import Progress, silent
from specnb.medusa.bench import ALL, PARTS
from specnb.medusa.train import Report

FINGERPRINT = {
    "alpha_1": "drafts kept (alpha_1)",
    "right_normed_once": "right, were the norm applied once",
    "copies": "equal to the backbone's own next token",
}
"""Columns of `medusa.faults.judge` that tell faults apart, and what they are called."""
EVERY = 2
"""Steps between two drawings: one of them takes the browser longer than a short step."""


def faults(table: pd.DataFrame, died: pd.DataFrame) -> go.Figure:
    """The fingerprint of each fault, a mark for each share; beside it the schedule that died, and its loss.

    `died` has step, lr and loss.
    """
    figure = make_subplots(
        cols=2, rows=1, column_widths=[0.65, 0.35], horizontal_spacing=0.12,
        subplot_titles=["each fault in numbers", "the schedule that died"],
    )  # fmt: skip
    for index, (column, label) in enumerate(FINGERPRINT.items()):
        mark = go.Scatter(
            x=(100 * table[column].astype(float)).tolist(), y=table["fault"].tolist(), mode="markers", name=label,
            marker=series(index)["marker"] | {"size": 11}, orientation="h", offsetgroup=label,
            hovertemplate=f"%{{y}}<br>{label}: %{{x:.1f}} %<extra></extra>",
        )  # fmt: skip
        figure.add_trace(mark, row=1, col=1)
    loss = go.Scatter(
        x=died["step"].tolist(), y=died["loss"].tolist(), text=[f"{rate:.2g}" for rate in died["lr"]],
        mode="lines+markers", name="loss of all heads, weighted", **series(3),
        hovertemplate="step %{x}: %{y:.2f} nats, learning rate %{text}<extra></extra>",
    )  # fmt: skip
    figure.add_trace(loss, row=1, col=2)
    last_alive = died.loc[died["lr"] > 0, "step"].max()
    figure.add_vrect(
        x0=last_alive, x1=died["step"].max(), fillcolor="#888", opacity=0.25, line_width=0, annotation_text="rate 0",
        annotation_position="top left", row=1, col=2,
    )  # fmt: skip
    figure.update_xaxes(title_text="share of positions (%)", range=[-3, 103], col=1)
    figure.update_xaxes(title_text="step", col=2)
    figure.update_yaxes(autorange="reversed", col=1)
    figure.update_yaxes(title_text="loss (nats)", col=2)
    return figure.update_layout(
        template=template(), title_text="The faults of the Medusa note", margin={"l": 150}, scattermode="group",
        scattergap=0.3,
    )  # fmt: skip


def speed(table: pd.DataFrame) -> go.Figure:
    """Speed-up over plain decoding by category, with intervals, beside the parts that a round's time goes to."""
    figure = make_subplots(
        cols=2, rows=1, horizontal_spacing=0.12, column_widths=[0.5, 0.5],
        subplot_titles=["speed-up, interval over prompts", "where the time of a round goes (all categories)"],
    )  # fmt: skip
    for index, (kind, rows) in enumerate(table.groupby("kind", sort=False)):
        labels = [f"tau {row.tau:.2f}, {row.identical} of {row.n_prompts} texts as plain" for row in rows.itertuples()]
        bar = go.Bar(
            x=rows["category"].tolist(), y=rows["speedup"].tolist(), name=kind, text=labels, textposition="none",
            error_y=spread(rows["speedup"], rows["low"], rows["high"]), marker_color=COLOURS[index],
            hovertemplate=f"{kind}, %{{x}}: %{{y:.2f}} times plain<br>%{{text}}<extra></extra>",
        )  # fmt: skip
        figure.add_trace(bar, row=1, col=1)
    whole = table[table["category"] == ALL]
    before = np.zeros(len(whole))
    for index, part in enumerate(PARTS):
        shares = 100 * whole[f"{part}_share"].to_numpy(dtype=float)
        bar = go.Bar(
            x=shares.tolist(), y=whole["kind"].tolist(), base=before.tolist(), name=part, orientation="h",
            marker_color=COLOURS[index + 2], offsetgroup="parts", customdata=shares.tolist(),
            hovertemplate=f"%{{y}}, {part}: %{{customdata:.1f}} %<extra></extra>",
        )  # fmt: skip
        figure.add_trace(bar, row=1, col=2)
        before = before + shares
    figure.add_shape(type="line", x0=0, x1=1, xref="x domain", y0=1, y1=1, yref="y", line={"color": "#222", "width": 1})
    figure.update_yaxes(title_text="speed-up (plain = 1)", rangemode="tozero", col=1)
    figure.update_xaxes(title_text="share of the time (%)", range=[0, 100], col=2)
    figure.update_yaxes(autorange="reversed", col=2)
    return figure.update_layout(template=template(), title_text="Medusa and Hydra against plain decoding")


class TrainingView:
    """Draws trainings while they go on: `plot` is the widget, `figure` the same when it stands still.

    `runs` are the names of the trainings to come, in their order, a row of panels each. `progress` is told the seconds
    that a training will take before its first step, and what is left of them.
    """

    def __init__(self, runs: list[str], n_heads: int, *, progress: Progress = silent) -> None:
        self._runs, self._n_heads, self._progress = list(runs), n_heads, progress
        self._steps, self._seconds = 0, 0.0
        self._rows: list[dict[str, Any]] = []
        self._notes: list[str] = []
        self.plot = Plot(self.figure())

    @property
    def history(self) -> pd.DataFrame:
        """Columns: run, step, head, loss (of all heads, weighted), head_loss, top1, top5 (unweighted, of the batch)."""
        return pd.DataFrame(self._rows, columns=["run", "step", "head", "loss", "head_loss", "top1", "top5"])

    def starts(self, run: str, steps: int, seconds_a_step: float) -> None:
        self._steps, self._seconds = steps, seconds_a_step
        note = f"{run}: {steps} steps of {seconds_a_step:.2f} s, about {steps * seconds_a_step:.0f} s"
        self._notes.append(note)
        self._progress(0, steps, note)

    def step(self, run: str, report: Report) -> None:
        for head in range(self._n_heads):
            shares = {name: float(values[head]) for name, values in report.heads._asdict().items()}
            self._rows.append({"run": run, "step": report.step, "head": head, "loss": report.loss, **shares})
        left = (self._steps - report.step) * self._seconds
        self._progress(report.step, self._steps, f"{run}: about {left:.0f} s left")
        if report.step % EVERY == 0 or report.step == self._steps:
            self.plot.update(self.figure())

    def figure(self) -> go.Figure:
        """Loss, top-1 and top-5 over steps, a row of panels for each run, a line for each head."""
        figure = make_subplots(
            rows=len(self._runs), cols=3, shared_xaxes=True, horizontal_spacing=0.08, vertical_spacing=0.14,
            subplot_titles=[t for run in self._runs for t in (f"{run}: loss", "top-1 of a batch", "top-5 of a batch")],
        )  # fmt: skip
        for row, run in enumerate(self._runs, start=1):
            of_run = self.history[self.history["run"] == run]
            once = of_run[of_run["head"] == 0]
            lines = [(1, 6, "all heads, weighted", once["step"], once["loss"])]
            for column, field in enumerate(("top1", "top5"), start=2):
                for head, of_head in ((head, of_run[of_run["head"] == head]) for head in range(self._n_heads)):
                    lines.append((column, head, f"head {head}", of_head["step"], 100 * of_head[field].astype(float)))
            for column, index, name, x, y in lines:
                line = go.Scatter(
                    x=x.tolist(), y=y.tolist(), mode="lines", name=name, legendgroup=name, line=series(index)["line"],
                    showlegend=row == 1 and column < 3, hovertemplate=f"{name}, step %{{x}}: %{{y:.3g}}<extra></extra>",
                )  # fmt: skip
                figure.add_trace(line, row=row, col=column)
            for column, title in enumerate(("loss (nats)", "top-1 (%)", "top-5 (%)"), start=1):
                mode = "normal" if column == 1 else "tozero"
                figure.update_yaxes(title_text=title, rangemode=mode, row=row, col=column)
        figure.update_xaxes(title_text="step", row=len(self._runs))
        title = "Training heads" + "".join(f"<br><sup>{n}, foretold before the first step</sup>" for n in self._notes)
        return figure.update_layout(
            template=template(), title_text=title, height=300 * len(self._runs) + 100, margin={"t": 130}
        )
