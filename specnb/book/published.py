"""Published numbers beside measured ones: a field report's speeds as a line of cost, and claims with verdicts."""

from typing import NamedTuple

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from IPython.display import Markdown

from specnb.book.style import series, template
from specnb.errors import require_known
from specnb.io import project_dir

LONGEST = 64
VERDICTS = {
    "reproduced": "also seen here", "explained": "true there, and why", "corrected": "false, or for another reason",
    "not testable here": "needs another machine or model",
}  # fmt: skip


class RoundLine(NamedTuple):
    """Seconds of a round on a straight line over K: all that speeds alone tell of a machine.

    `per_draft_s` is a draft step and the column that it adds to the target's forward, which speeds cannot part.
    """

    base_s: float
    per_draft_s: float

    def seconds(self, k: float) -> float:
        return self.base_s + self.per_draft_s * k


def runs() -> pd.DataFrame:
    """The runs of `data/report`, one a row, with what follows from each: acceptance_rate, tau, round_s, implied_c.

    Rates come from counts where there are any. implied_c is what a draft adds to a round in the target's plain steps.
    """
    folder = project_dir() / "data" / "report"
    table, models = pd.read_csv(folder / "speeds.csv"), pd.read_csv(folder / "models.csv").set_index("model")
    rate = (table["accepted"] / table["drafted"]).fillna(table["acceptance_percent"] / 100)
    table = table.assign(acceptance_rate=rate, tau=1 + rate * table["k"])
    by_count = table["seconds"] * table["k"] / table["drafted"]  # rounds are drafted / k
    table["round_s"] = by_count.fillna(table["tau"] / table["tokens_per_s"])
    table["plain_s"] = 1 / table["target"].map(models["plain_tokens_per_s"])
    return table.assign(implied_c=(table["round_s"] / table["plain_s"] - 1) / table["k"])


def line(table: pd.DataFrame) -> RoundLine:
    """Return the cost of a round over K, fitted to the rows of code alone."""
    code = table[table["content"] == "code"]
    per_draft_s, base_s = np.polyfit(code["k"], code["round_s"], 1)
    return RoundLine(float(base_s), float(per_draft_s))


def compared(table: pd.DataFrame, cost: RoundLine) -> pd.DataFrame:
    """The rows of `runs` beside what the line predicts for the drafter that it was fitted to; empty for another.

    error is relative. alpha is the chance of every draft, were it constant, that gives a row's tau; best_k is the
    fastest K up to LONGEST that alpha has on the line.
    """
    same = table["content"] != "self"
    predicted = (table["tau"] / cost.seconds(table["k"])).where(same)
    alphas = [_constant_alpha(row.k, row.tau) for row in table.itertuples()]
    speeds = [[sum(a**i for i in range(k + 1)) / cost.seconds(k) for k in range(1, LONGEST + 1)] for a in alphas]
    shown = table[["content", "k", "acceptance_rate", "tau"]].assign(
        round_ms=1000 * table["round_s"], implied_c=table["implied_c"], in_fit=table["content"] == "code",
        tokens_per_s=table["tokens_per_s"], predicted=predicted, error=predicted / table["tokens_per_s"] - 1,
        alpha=alphas, best_k=1 + np.argmax(speeds, axis=1),
    )  # fmt: skip
    return shown.assign(best_k=shown["best_k"].astype("Int64").where(same))


def _constant_alpha(k: int, tau: float) -> float:
    """The positive root of 1 + a + ... + a^k = tau."""
    roots = np.roots([1.0] * k + [1 - tau])
    return float(max(root.real for root in roots if abs(root.imag) < 1e-9))


def round_cost(table: pd.DataFrame, cost: RoundLine) -> go.Figure:
    """Milliseconds of a round over K: each published run, the fitted line, and a plain step at K = 0."""
    table = table[table["content"] != "self"]
    figure = go.Figure(layout={"template": template(), "title": "What a round costs, from published speeds"})
    ends = [0, int(table["k"].max())]
    label = f"fitted to code: {1000 * cost.base_s:.0f} + {1000 * cost.per_draft_s:.1f} K ms"
    figure.add_scatter(
        x=ends, y=[1000 * cost.seconds(k) for k in ends], mode="lines", name=label, line=series(6)["line"]
    )
    marks = (("code", "top left", series(0)["marker"]), ("prose", "bottom right", series(1)["marker"]))
    for content, side, marker in marks:
        rows, fitted = table[table["content"] == content], content == "code"
        look = marker if fitted else marker | {"symbol": "square-open", "size": 16}  # around the mark that it meets
        figure.add_scatter(
            x=rows["k"].tolist(), y=(1000 * rows["round_s"]).tolist(), mode="markers+text", marker=look,
            text=[f"{speed:.2f}/s" for speed in rows["tokens_per_s"]], textposition=side,
            name=content + ", tokens/s beside" if fitted else f"{content}, not fitted",
            hovertemplate="K = %{x}<br>%{y:.0f} ms a round<br>%{text}",
        )  # fmt: skip
    plain = 1000 * float(table["plain_s"].iloc[0])
    figure.add_scatter(x=[0], y=[plain], mode="markers", name="a plain step", marker=series(2)["marker"])
    figure.update_xaxes(title_text="draft length K (tokens)", tickvals=[0, *sorted(table["k"].unique().tolist())])
    return figure.update_yaxes(title_text="time of a round (ms)", rangemode="tozero")


def claims(*rows: tuple[str, str, str | bool, str]) -> Markdown:
    """The table that a notebook ends with: claim, its source, verdict, evidence; below it what the verdicts mean.

    A verdict is one of VERDICTS, or what was computed: True for reproduced, False for corrected. Raises InputError.
    """
    shown = ["| published claim | source | verdict | evidence |", "|---|---|---|---|"]
    for claim, source, verdict, evidence in rows:
        word = {True: "reproduced", False: "corrected"}.get(verdict, verdict)
        require_known("verdict (nor True or False)", word, VERDICTS)
        shown.append(f"| {claim} | {source} | **{word}** | {evidence} |")
    return Markdown("\n".join([*shown, "", "; ".join(f"*{word}*: {meaning}" for word, meaning in VERDICTS.items())]))
