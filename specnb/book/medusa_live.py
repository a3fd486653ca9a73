"""Training that can be watched: a figure that grows with every step, and the same figure when it stands still."""

from typing import Any

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from specnb.book.plot import Plot
from specnb.book.style import series, template
from specnb.measure.experiment import Progress, silent
from specnb.medusa.loop import Report
from specnb.medusa.practice import Watch

SHOWN = {"loss": "loss (nats)", "top1": "top-1 (%)", "top5": "top-5 (%)"}
EVERY = 2
"""Steps between two drawings: one of them takes the browser longer than a short step."""


class TrainingView(Watch):
    """A `Watch` that draws: `plot` is the widget, `history` what it drew, a row for each run, step and head.

    `runs` are the names of the trainings to come, in their order, a row of panels each. `progress` is told the seconds
    that a training will take before its first step, and what is left of them.
    """

    def __init__(self, runs: list[str], n_heads: int, *, progress: Progress = silent) -> None:
        self._runs, self._n_heads, self._progress = list(runs), n_heads, progress
        self._steps, self._seconds = 0, 0.0
        self._rows: list[dict[str, Any]] = []
        self.notes: dict[str, str] = {}
        self.plot = Plot(training(self.history, runs=self._runs, n_heads=n_heads))

    @property
    def history(self) -> pd.DataFrame:
        """Columns: run, step, head, loss (of all heads, weighted), head_loss, top1, top5 (unweighted, of the batch)."""
        return pd.DataFrame(self._rows, columns=["run", "step", "head", "loss", "head_loss", "top1", "top5"])

    def starts(self, run: str, steps: int, seconds_a_step: float) -> None:
        self._steps, self._seconds = steps, seconds_a_step
        self.notes[run] = f"{steps} steps of {seconds_a_step:.2f} s, about {steps * seconds_a_step:.0f} s"
        self._progress(0, steps, f"{run}: {self.notes[run]}")

    def step(self, run: str, report: Report) -> None:
        for head in range(self._n_heads):
            shares = {name: float(values[head]) for name, values in report.heads._asdict().items()}
            self._rows.append({"run": run, "step": report.step, "head": head, "loss": report.loss, **shares})
        left = (self._steps - report.step) * self._seconds
        self._progress(report.step, self._steps, f"{run}: about {left:.0f} s left")
        if report.step % EVERY == 0 or report.step == self._steps:
            self.plot.update([{"x": line.x, "y": line.y} for line in self.figure().data])

    def figure(self) -> go.Figure:
        """What was drawn, as a plotly figure that needs no kernel."""
        return training(self.history, runs=self._runs, n_heads=self._n_heads, notes=self.notes)


def training(history: pd.DataFrame, *, runs: list[str], n_heads: int, notes: dict[str, str] | None = None) -> go.Figure:
    """Loss, top-1 and top-5 over steps, a row of panels for each run, a line for each head.

    `history` is that of a `TrainingView`; `notes` say of each run what was foretold of its time.
    """
    figure = make_subplots(
        rows=len(runs), cols=3, shared_xaxes=True, horizontal_spacing=0.08, vertical_spacing=0.14,
        subplot_titles=[title for run in runs for title in (f"{run}: loss", "top-1 of a batch", "top-5 of a batch")],
    )  # fmt: skip
    for row, run in enumerate(runs, start=1):
        of_run = history[history["run"] == run]
        once = of_run[of_run["head"] == 0]
        line = go.Scatter(
            x=once["step"].tolist(), y=once["loss"].tolist(), mode="lines", name="all heads, weighted",
            showlegend=row == 1, line=series(6)["line"], hovertemplate="step %{x}: %{y:.3f} nats<extra></extra>",
        )  # fmt: skip
        figure.add_trace(line, row=row, col=1)
        for column, field in enumerate(("top1", "top5"), start=2):
            for head in range(n_heads):
                line = of_run[of_run["head"] == head]
                figure.add_trace(
                    go.Scatter(x=line["step"].tolist(), y=(100 * line[field].astype(float)).tolist(), mode="lines",
                               name=f"head {head}", legendgroup=f"head {head}", showlegend=row == 1 and column == 2,
                               line=series(head)["line"],
                               hovertemplate=f"head {head}, step %{{x}}: %{{y:.1f}} %<extra></extra>"),
                    row=row, col=column,
                )  # fmt: skip
        figure.update_yaxes(title_text=SHOWN["loss"], row=row, col=1)
        for column, field in enumerate(("top1", "top5"), start=2):
            figure.update_yaxes(title_text=SHOWN[field], rangemode="tozero", row=row, col=column)
    figure.update_xaxes(title_text="step", row=len(runs))
    title = "Training heads" + "".join(
        f"<br><sup>{run}: {note}, foretold before the first step</sup>" for run, note in (notes or {}).items()
    )
    return figure.update_layout(template=template(), title_text=title, height=300 * len(runs) + 100, margin={"t": 130})
