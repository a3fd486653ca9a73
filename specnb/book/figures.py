"""Tables to figures: pure functions from a DataFrame to a plotly Figure. Nothing is shown or written here."""

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from specnb.book.style import series, spread, template

MANY = 8
"""More K's than this are drawn as a line without bars and marks, which would cover each other."""


def speedup_over_k(
    sweep: pd.DataFrame, *, live: pd.DataFrame | None = None, title: str = "Speed-up over plain decoding"
) -> go.Figure:
    """Speed-up over draft length K, one panel a temperature, one line a category, with the break-even line at 1.

    `sweep` is `tables.k_sweep` or `tables.replayed`; bars are its intervals, left out for more than MANY K's. `live`
    (`tables.k_sweep`) is drawn over a replayed sweep as marks. K = 0, the baseline, is the line at 1 and not drawn.
    """
    drawn = sweep[sweep["k"] > 0]
    temperatures = sorted(drawn["temperature"].unique())
    categories = drawn["category"].unique().tolist()  # a category looks the same in every panel
    titles = [f"temperature {t:g}" + (" (greedy)" if t == 0 else "") for t in temperatures]
    figure = make_subplots(
        cols=len(temperatures), rows=1, shared_yaxes=True, subplot_titles=titles, horizontal_spacing=0.04
    )
    for column, temperature in enumerate(temperatures, start=1):
        panel = drawn[drawn["temperature"] == temperature]
        for category, line in panel.groupby("category", sort=False):
            first = not any(trace.name == category for trace in figure.data)
            trace = _speedup_trace(str(category), line, categories.index(category), legend=first)
            figure.add_trace(trace, row=1, col=column)
            if live is not None:
                ran = live[(live["category"] == category) & (live["temperature"] == temperature) & (live["k"] > 0)]
                marks = _speedup_trace(str(category), ran, categories.index(category), legend=False)
                figure.add_trace(marks.update(mode="markers", name=f"{category}, live"), row=1, col=column)
    figure.add_hline(y=1.0, line={"color": "#222", "width": 1})
    # named in the legend, where it cannot lie across the data
    line = {"color": "#222", "width": 1}
    figure.add_trace(go.Scatter(x=[None], y=[None], mode="lines", line=line, name="break-even"), row=1, col=1)
    ks = sorted(drawn["k"].unique())
    figure.update_xaxes(title_text="draft length K (tokens)", tickvals=ks if len(ks) <= MANY else ks[3::4])
    figure.update_yaxes(title_text="decoding speed-up (plain = 1)", col=1)
    figure.update_yaxes(rangemode="tozero")
    lossy = "" if drawn.get("lossless", pd.Series([True])).all() else " (lossy: not the target's distribution)"
    return figure.update_layout(template=template(), title_text=title + lossy)


def _speedup_trace(category: str, line: pd.DataFrame, index: int, *, legend: bool) -> go.Scatter:
    few = len(line) <= MANY
    return go.Scatter(
        x=line["k"].tolist(),
        y=line["speedup"].tolist(),
        error_y=spread(line["speedup"], line["low"], line["high"]) if few else None,
        customdata=line[["tokens_per_s", "accepted", "drafted", "tau"]].to_numpy().tolist(),
        hovertemplate=(
            "K = %{x}<br>speed-up %{y:.2f}<br>%{customdata[0]:.1f} tokens/s<br>"
            "accepted %{customdata[1]:.0f} of %{customdata[2]:.0f}<br>tau %{customdata[3]:.2f}"
        ),
        mode="lines+markers" if few else "lines",
        name=category,
        legendgroup=category,
        showlegend=legend,
        **series(index),
    )


def verify_cost(curve: pd.DataFrame, *, title: str = "Verify cost curve") -> go.Figure:
    """T(n)/T(1) over the width n of a target forward, beside the two extremes: free width, and n single steps."""
    widths, ratios = curve["width"].tolist(), curve["ratio"].tolist()
    seconds = [[1000 * s] for s in curve["median_s"]]
    figure = go.Figure(
        go.Scatter(
            x=widths,
            y=ratios,
            customdata=seconds,
            mode="lines+markers",
            name="measured",
            hovertemplate="n = %{x}<br>T(n)/T(1) = %{y:.2f}<br>%{customdata[0]:.1f} ms",
            **series(0),
        )
    )
    ends = [widths[0], widths[-1]]
    for index, (name, ys) in enumerate({"free width": [1, 1], "n single steps": ends}.items(), start=2):
        figure.add_trace(
            go.Scatter(x=ends, y=ys, mode="lines", name=name, line=series(index)["line"], hoverinfo="skip")
        )
    figure.update_xaxes(title_text="tokens in one target forward, n", type="log", tickvals=widths)
    figure.update_yaxes(title_text="T(n) / T(1)", type="log", tickvals=[1, 2, 4, 8, 16, 32])
    return figure.update_layout(template=template(), title_text=title)
