"""Figures show the numbers of their table: lines, intervals, break-even and markers."""

import pandas as pd
import pytest

from specnb.book import figures

SWEEP = pd.DataFrame(
    [
        ("code", 0.0, 0, 1.0, 1.0, 1.0),
        ("code", 0.0, 2, 1.5, 1.25, 2.0),
        ("code", 0.0, 8, 1.2, 0.8, 1.3),
        ("prose", 0.0, 2, 0.8, 0.75, 0.875),
        ("prose", 0.7, 2, 0.7, 0.5, 0.75),
    ],
    columns=["category", "temperature", "k", "speedup", "low", "high"],
).assign(busy=False)


def lines_of(figure):
    """Return the drawn lines, without traces that are only in the legend."""
    return [trace for trace in figure.data if trace.x[0] is not None]


def test_each_temperature_is_a_panel_with_a_line_per_category_and_intervals():
    figure = figures.speedup_over_k(SWEEP, panel="temperature", title="Speed-up")
    lines = lines_of(figure)
    assert {(t.name, t.xaxis): (tuple(t.x), tuple(t.y)) for t in lines} == {
        ("code", "x"): ((1.9, 7.9), (1.5, 1.2)),
        ("prose", "x"): ((2.1,), (0.8,)),
        ("prose", "x2"): ((2.1,), (0.7,)),
    }
    assert list(lines[0].error_y.array) == pytest.approx([0.5, 0.1])
    assert list(lines[0].error_y.arrayminus) == pytest.approx([0.25, 0.4])
    assert [a.text for a in figure.layout.annotations] == ["0.0", "0.7"]
    assert {line.y0 for line in figure.layout.shapes} == {1.0}
    lossy = SWEEP.assign(lossless=SWEEP["temperature"] == 0, busy=True)
    figure = figures.speedup_over_k(lossy, panel="temperature", title="x")
    assert all(word in figure.layout.title.text for word in ("lossy", "busy"))


def test_live_runs_are_filled_markers_over_replayed_lines_and_replays_open():
    greedy = SWEEP.query("temperature == 0")
    many = pd.concat([greedy.assign(k=greedy["k"] * n) for n in range(1, 8)])
    marks = {"live": greedy, "again": greedy.assign(speedup=3.0)}
    figure = figures.speedup_over_k(many, panel="temperature", marks=marks, title="x", fastest=4.0)
    *lines, code, prose, again, _, line = lines_of(figure)
    assert line.y == (4.0,) and figure.layout.title.text == "x<br>highest: 0.0, code, K = 2: 1.50"
    assert (again.marker.symbol, again.y[0]) == (f"{code.marker.symbol}-open", 3.0)
    assert [(t.mode, t.error_y.array) for t in lines] == [("lines", None)] * 2
    assert (code.mode, list(code.x), list(prose.x)) == ("markers", [1.9, 7.9], [2.1])
    assert [t.marker.color for t in (code, prose)] == [t.line.color for t in lines]
