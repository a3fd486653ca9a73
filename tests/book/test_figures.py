"""Figures: what is drawn is what the table says, with units on the axes, and readable without colour."""

import pandas as pd
import plotly.io as pio
import pytest

from specnb.book import figures, style

COLUMNS = ["category", "temperature", "k", "tokens_per_s", "drafted", "accepted", "tau", "speedup", "low", "high"]
SWEEP = pd.DataFrame(
    [
        ("code", 0.0, 0, 10.0, 0, 0, 1.0, 1.0, 1.0, 1.0),
        ("code", 0.0, 2, 15.0, 40, 30, 2.5, 1.5, 1.25, 2.0),
        ("code", 0.0, 8, 12.0, 160, 40, 3.0, 1.2, 0.8, 1.3),
        ("prose", 0.0, 0, 10.0, 0, 0, 1.0, 1.0, 1.0, 1.0),
        ("prose", 0.0, 2, 8.0, 40, 4, 1.1, 0.8, 0.75, 0.875),
        ("prose", 0.7, 0, 10.0, 0, 0, 1.0, 1.0, 1.0, 1.0),
        ("prose", 0.7, 2, 7.0, 40, 2, 1.0, 0.7, 0.5, 0.75),
    ],
    columns=COLUMNS,
)
CURVE = pd.DataFrame({"width": [1, 2, 9], "median_s": [0.05, 0.06, 0.1], "ratio": [1.0, 1.2, 2.0]})


def lines_of(figure):
    """The drawn lines, without the entry that names the break-even line."""
    return [trace for trace in figure.data if trace.name != "break-even"]


def test_one_line_a_category_in_one_panel_a_temperature_without_the_baseline():
    figure = figures.speedup_over_k(SWEEP)
    lines = lines_of(figure)
    assert {(t.name, t.xaxis): (tuple(t.x), tuple(t.y)) for t in lines} == {
        ("code", "x"): ((2, 8), (1.5, 1.2)),
        ("prose", "x"): ((2,), (0.8,)),
        ("prose", "x2"): ((2,), (0.7,)),
    }
    assert [a.text for a in figure.layout.annotations] == ["temperature 0 (greedy)", "temperature 0.7"]
    for t in lines:  # bars are the intervals
        rows = SWEEP[(SWEEP["category"] == t.name) & (SWEEP["k"] > 0)]
        rows = rows[rows["temperature"] == (0.0 if t.xaxis == "x" else 0.7)]
        ends = [
            (y - below, y + above) for y, below, above in zip(t.y, t.error_y.arrayminus, t.error_y.array, strict=True)
        ]
        assert ends == [pytest.approx(interval) for interval in zip(rows["low"], rows["high"], strict=True)]


def test_axes_name_their_units_begin_at_zero_and_show_break_even():
    layout = figures.speedup_over_k(SWEEP).layout
    assert (layout.xaxis2.title.text, layout.yaxis.title.text) == (
        "draft length K (tokens)", "decoding speed-up (plain = 1)",
    )  # fmt: skip
    assert layout.yaxis.rangemode == "tozero" and layout.yaxis2.matches == "y"
    assert {(s.y0, s.y1, s.yref) for s in layout.shapes} == {(1.0, 1.0, "y"), (1.0, 1.0, "y2")}
    for lossless, named in ((True, False), (SWEEP["temperature"] == 0, True)):
        title = figures.speedup_over_k(SWEEP.assign(lossless=lossless)).layout.title.text
        assert ("lossy" in title) == named


def test_live_runs_lie_as_marks_with_bars_over_a_replayed_sweep():
    many = pd.concat([SWEEP.assign(k=SWEEP["k"] * n) for n in range(1, 8)]).query("temperature == 0")
    *lines, code, prose, _ = figures.speedup_over_k(many, live=SWEEP.query("temperature == 0")).data
    assert [(t.mode, t.error_y.array) for t in lines] == [("lines", None)] * 2
    assert [(t.name, t.mode, list(t.x)) for t in (code, prose)] == [
        ("code, live", "markers", [2, 8]), ("prose, live", "markers", [2]),
    ]  # fmt: skip
    assert [t.marker.color for t in (code, prose)] == [t.line.color for t in lines]


def test_a_category_looks_the_same_in_every_panel_and_is_named_once():
    """Also one that the first panel does not have."""
    for frame in (SWEEP, SWEEP[(SWEEP["category"] == "code") | (SWEEP["temperature"] > 0)]):
        lines = lines_of(figures.speedup_over_k(frame))
        looks = {(t.name, t.line.color, t.line.dash, t.marker.symbol, t.legendgroup) for t in lines}
        assert len(looks) == len({t.name for t in lines})
        assert sorted(t.name for t in lines if t.showlegend) == ["code", "prose"]


def test_the_curve_lies_between_free_width_and_single_steps_on_logarithmic_axes():
    figure = figures.verify_cost(CURVE)
    assert {t.name: (tuple(t.x), tuple(t.y)) for t in figure.data} == {
        "measured": ((1, 2, 9), (1.0, 1.2, 2.0)),
        "free width": ((1, 9), (1, 1)),
        "n single steps": ((1, 9), (1, 9)),
    }
    assert figure.data[0].text == ("50.0", "60.0", "100.0")  # milliseconds
    assert (figure.layout.xaxis.type, figure.layout.yaxis.type) == ("log", "log")
    assert figure.layout.xaxis.title.text == "tokens in one target forward, n"
    assert figure.layout.yaxis.title.text == "T(n) / T(1)"


def test_figures_carry_the_template_change_no_table_and_register_nothing():
    before, sweep, curve = (pio.templates.default, set(pio.templates)), SWEEP.copy(), CURVE.copy()
    for figure in (figures.speedup_over_k(sweep), figures.verify_cost(curve)):
        assert figure.layout.template.layout == style.template().layout
    assert sweep.equals(SWEEP) and curve.equals(CURVE)
    assert (pio.templates.default, set(pio.templates)) == before
