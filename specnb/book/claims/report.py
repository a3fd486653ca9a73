"""A cost model fitted to the speeds of a field report, and its experiment with small models.

The report (`data/report`) used llama.cpp, Qwen2.5-Coder-32B and a draft model of 0.5B, on a server
with 96 cores.
"""

from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import plotly.express as px
import plotly.graph_objects as go

from specnb.book.style import COLORS, MARKERS, dress, series, template
from specnb.io import project_dir, read_json
from specnb.measure.baseline import Baseline

LONGEST = 64
"""The largest candidate for the fastest K."""


class RoundLine(NamedTuple):
    """Seconds of a round as a linear function of K.

    `per_draft_s` is the cost of a draft step plus one more token in the target's forward pass;
    speeds alone cannot separate the two.
    """

    base_s: float
    per_draft_s: float

    def seconds(self, k: Any) -> Any:
        """Return the seconds of a round with K = `k`, a number or an array."""
        return self.base_s + self.per_draft_s * k


def read_runs() -> pd.DataFrame:
    """Return one row per run of `data/report`, with acceptance_rate, tau, round_s and implied_c.

    Rates are computed from counts if available. implied_c is the cost that a draft token adds to a
    round, in plain steps of the target.
    """
    folder = project_dir() / "data" / "report"
    table, models = (pd.read_csv(folder / f"{name}.csv") for name in ("speeds", "models"))
    table["acceptance_rate"] = (table["accepted"] / table["drafted"]).fillna(
        table["acceptance_percent"] / 100
    )
    table["tau"] = 1 + table["acceptance_rate"] * table["k"]
    by_count = table["seconds"] * table["k"] / table["drafted"]  # rounds are drafted / k
    table["round_s"] = by_count.fillna(table["tau"] / table["tokens_per_s"])
    table["plain_s"] = 1 / table["target"].map(models.set_index("model")["plain_tokens_per_s"])
    return table.assign(implied_c=(table["round_s"] / table["plain_s"] - 1) / table["k"])


def fit_line(table: pd.DataFrame) -> RoundLine:
    """Return the cost of a round over K, fitted to the rows of code only."""
    code = table.query("content == 'code'")
    per_draft_s, base_s = np.polyfit(code["k"], code["round_s"], 1)
    return RoundLine(base_s, per_draft_s)


def compare_with_line(table: pd.DataFrame, cost: RoundLine) -> pd.DataFrame:
    """Return the rows of `read_runs` with the line's predictions; NaN for another drafter.

    error is relative. best_k is the fastest K up to LONGEST for the constant acceptance rate that
    gives a row's tau.
    """
    same = table["content"] != "self"
    ks = np.arange(LONGEST + 1)
    predicted = (table["tau"] / cost.seconds(table["k"])).where(same)
    alphas = [_constant_alpha(row.k, row.tau) for row in table.itertuples()]
    best_k = [1 + np.argmax((np.cumsum(alpha**ks) / cost.seconds(ks))[1:]) for alpha in alphas]
    return table[["content", "k", "acceptance_rate", "tau"]].assign(
        round_ms=1000 * table["round_s"],
        implied_c=table["implied_c"],
        tokens_per_s=table["tokens_per_s"],
        predicted=predicted,
        error=predicted / table["tokens_per_s"] - 1,
        best_k=pd.Series(best_k, table.index, "Int64").where(same),
    )


def _constant_alpha(k: int, tau: float) -> float:
    """Return the positive root of 1 + a + ... + a^k = tau."""
    roots = np.roots([1.0] * k + [1 - tau])
    return max(root.real for root in roots if abs(root.imag) < 1e-9)


def draw_rounds(table: pd.DataFrame, cost: RoundLine) -> go.Figure:
    """Draw the ms of a round over K: published runs, the fitted line, a plain step at K = 0."""
    names = {"code": "code, with tokens/s", "prose": "prose, not fitted"}
    rows = table.assign(
        round_ms=1000 * table["round_s"], content=table["content"].map(names)
    ).dropna(subset="content")
    figure = px.scatter(
        rows,
        x="k",
        y="round_ms",
        color="content",
        symbol="content",
        symbol_sequence=["circle", "square-open"],
        text=rows["tokens_per_s"].map("{:.2f}/s".format),
        template=template(),
    ).update_traces(marker_size=12, textposition="top left", cliponaxis=False)
    figure.data[1].textposition = "bottom right"  # markers of prose and code overlap
    ends = [0, rows["k"].max()]
    plain_ms = 1000 * rows["plain_s"].iloc[0]
    label = f"fitted to code: {1000 * cost.base_s:.0f} + {1000 * cost.per_draft_s:.1f} K ms"
    figure.add_scatter(
        x=ends,
        y=[1000 * cost.seconds(k) for k in ends],
        mode="lines",
        name=label,
        line_color="#555",
    )
    figure.add_scatter(x=[0], y=[plain_ms], mode="markers", name="a plain step", **series(2))
    figure.update_xaxes(tickvals=[0, *rows["k"].unique()])
    return dress(figure, "round_cost")


# --- the experiment with small models ---------------------------------------------------------


def read_small() -> pd.DataFrame:
    """Return the results of tests/benchmarks/report_pair.py: one row per setting and K (0: plain).

    speedup and predicted, with their intervals, are over plain decoding in the same setting;
    over_fastest is over the fastest of all settings, which have the same weights. Its interval does
    not include the uncertainty of the ratio between the settings.
    """
    rows = read_json(project_dir() / "data" / "report" / "small.json")["rows"]
    table = pd.DataFrame(rows).rename(columns={"speedup_low": "low", "speedup_high": "high"})
    table["round_ms"] = 1000 * table["tau"] / table["tokens_per_s"]
    plain = table[table["k"] == 0].set_index("setting")["tokens_per_s"]
    fastest = {"baseline_engine": plain.idxmax(), "baseline_tokens_per_s": plain.max()}
    of_setting = table.groupby("setting", sort=False)
    return pd.concat(
        Baseline(**fastest, plain_tokens_per_s=plain[name]).over(part) for name, part in of_setting
    )


def draw_small(table: pd.DataFrame, runs: pd.DataFrame) -> go.Figure:
    """Draw the speed-up over K by setting: markers live, lines predicted; add the report's code."""
    figure = go.Figure()
    for index, (setting, rows) in enumerate(table.query("k > 0").groupby("setting", sort=False)):
        figure.add_scatter(
            x=rows["k"],
            y=rows["predicted"],
            mode="lines",
            name=f"{setting}, predicted",
            **series(index),
        )
        figure.add_scatter(
            x=rows["k"] + index / 3,  # otherwise, the intervals would overlap
            y=rows["speedup"],
            mode="markers",
            name=f"{setting}, live",
            **series(index),
            error_y_array=rows["high"] - rows["speedup"],
            error_y_arrayminus=rows["speedup"] - rows["low"],
        )
    code = runs.query("content == 'code'")
    figure.add_scatter(
        x=code["k"],
        y=code["tokens_per_s"] * code["plain_s"],
        mode="markers",
        name="field report (target 32B) on code, one run each",
        marker_symbol=MARKERS[-1],
        marker_color=COLORS[-1],
        marker_size=10,
    )
    figure.update_xaxes(tickvals=table["k"].unique())
    return dress(figure, "small")
