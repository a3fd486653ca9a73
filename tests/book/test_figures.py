"""Figures: what is drawn is what the table says, with units on the axes, and readable without colour."""

import itertools
import json

import pandas as pd
import plotly.graph_objects as go
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


@pytest.fixture
def speedup():
    return figures.speedup_over_k(SWEEP)


@pytest.fixture
def verify():
    return figures.verify_cost(CURVE)


def series_of(figure):
    """The drawn lines, without the entry that names the break-even line."""
    return [trace for trace in figure.data if trace.name != "break-even"]


# --- speed-up over K ------------------------------------------------------------------------------------------------


def test_one_line_a_category_in_one_panel_a_temperature_without_the_baseline(speedup):
    drawn = {(t.name, t.xaxis): (tuple(t.x), tuple(t.y)) for t in series_of(speedup)}
    assert drawn == {
        ("code", "x"): ((2, 8), (1.5, 1.2)),
        ("prose", "x"): ((2,), (0.8,)),
        ("prose", "x2"): ((2,), (0.7,)),
    }
    assert [a.text for a in speedup.layout.annotations] == ["temperature 0 (greedy)", "temperature 0.7"]


def test_error_bars_are_the_intervals(speedup):
    for trace in series_of(speedup):
        rows = SWEEP[(SWEEP["category"] == trace.name) & (SWEEP["k"] > 0)]
        rows = rows[rows["temperature"] == (0.0 if trace.xaxis == "x" else 0.7)]
        above, below = trace.error_y.array, trace.error_y.arrayminus
        assert [y + e for y, e in zip(trace.y, above, strict=True)] == pytest.approx(rows["high"].tolist())
        assert [y - e for y, e in zip(trace.y, below, strict=True)] == pytest.approx(rows["low"].tolist())
        assert trace.error_y.symmetric is False


def test_the_break_even_line_is_at_one_in_every_panel_and_named(speedup):
    lines = [shape for shape in speedup.layout.shapes if shape.type == "line"]
    assert [(s.y0, s.y1) for s in lines] == [(1.0, 1.0)] * 2
    assert {s.yref for s in lines} == {"y", "y2"}
    named = [t for t in speedup.data if t.name == "break-even"]
    assert len(named) == 1 and named[0].showlegend is not False and named[0].line.color == lines[0].line.color


def test_axes_have_titles_with_units_and_begin_at_zero(speedup):
    assert {speedup.layout[axis].title.text for axis in ("xaxis", "xaxis2")} == {"draft length K (tokens)"}
    assert speedup.layout.yaxis.title.text == "decoding speed-up (plain = 1)"
    assert list(speedup.layout.xaxis.tickvals) == [2, 8]
    assert speedup.layout.yaxis.rangemode == "tozero" and speedup.layout.yaxis2.matches == "y"
    assert speedup.layout.title.text == "Speed-up over plain decoding"
    assert figures.speedup_over_k(SWEEP, title="Other").layout.title.text == "Other"


def test_a_category_looks_the_same_in_every_panel_and_is_named_once(speedup):
    """Also one that the first panel does not have."""
    for frame in (SWEEP, SWEEP[(SWEEP["category"] == "code") | (SWEEP["temperature"] > 0)]):
        lines = series_of(figures.speedup_over_k(frame))
        for name in {t.name for t in lines}:
            same = [t for t in lines if t.name == name]
            assert len({(t.line.color, t.line.dash, t.marker.symbol, t.legendgroup) for t in same}) == 1
            assert [t.showlegend for t in same] == [True] + [False] * (len(same) - 1)
        looks = {(t.line.color, t.line.dash, t.marker.symbol) for t in lines}
        assert len(looks) == len({t.name for t in lines})


def test_a_lossy_sweep_says_so():
    assert "lossy" not in figures.speedup_over_k(SWEEP.assign(lossless=True)).layout.title.text
    some = SWEEP.assign(lossless=SWEEP["temperature"] == 0)
    assert figures.speedup_over_k(some).layout.title.text.endswith("(lossy: not the target's distribution)")


def test_hover_shows_counts_and_tau(speedup):
    first = speedup.data[0]
    assert list(first.customdata[0]) == [15.0, 30, 40, 2.5]
    assert "accepted %{customdata[1]:.0f} of %{customdata[2]:.0f}" in first.hovertemplate


# --- the verify cost curve ------------------------------------------------------------------------------------------


def test_the_curve_lies_between_free_width_and_single_steps(verify):
    drawn = {t.name: (tuple(t.x), tuple(t.y)) for t in verify.data}
    assert drawn == {
        "measured": ((1, 2, 9), (1.0, 1.2, 2.0)),
        "free width": ((1, 9), (1, 1)),
        "n single steps": ((1, 9), (1, 9)),
    }
    assert [row[0] for row in verify.data[0].customdata] == [50.0, 60.0, 100.0]  # milliseconds
    assert "ms" in verify.data[0].hovertemplate


def test_both_axes_of_the_curve_are_logarithmic_and_named(verify):
    assert verify.layout.xaxis.type == verify.layout.yaxis.type == "log"
    assert verify.layout.xaxis.title.text == "tokens in one target forward, n"
    assert verify.layout.yaxis.title.text == "T(n) / T(1)"


# --- any figure -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["speedup", "verify"])
def test_a_figure_is_json_shown_nowhere_and_carries_the_template(name, request, monkeypatch):
    monkeypatch.setattr(go.Figure, "show", lambda *_: pytest.fail("shown"))
    figure = request.getfixturevalue(name)
    assert json.loads(figure.to_json(engine="json"))["layout"]["title"]["text"]
    assert figure.layout.template.layout == style.template().layout
    assert {t.name for t in figure.data if t.showlegend is not False} and figure.layout.template.layout.font.family


def test_the_table_is_not_changed():
    sweep, curve = SWEEP.copy(), CURVE.copy()
    figures.speedup_over_k(sweep)
    figures.verify_cost(curve)
    pd.testing.assert_frame_equal(sweep, SWEEP)
    pd.testing.assert_frame_equal(curve, CURVE)


# --- style ----------------------------------------------------------------------------------------------------------


def luminance(colour):
    r, g, b = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return 0.2126 * r**2.2 + 0.7152 * g**2.2 + 0.0722 * b**2.2


def test_seven_series_differ_in_colour_and_marker_and_neighbours_in_dash_too():
    """Six categories and "all". Printed in grey, marker and dash are what is left."""
    looks = [style.series(i) for i in range(len(style.COLOURS))]
    assert len(looks) == len(style.MARKERS) == len(style.DASHES) == 7
    for a, b in itertools.combinations(looks, 2):
        assert a["line"]["color"] != b["line"]["color"] and a["marker"]["symbol"] != b["marker"]["symbol"]
    assert len({look["line"]["dash"] for look in looks}) == 6  # plotly has no more
    assert all(a["line"]["dash"] != b["line"]["dash"] for a, b in itertools.pairwise(looks))


def test_line_and_marker_of_a_series_have_one_colour_and_stand_out_on_white():
    for i in range(7):
        look = style.series(i)
        assert look["line"]["color"] == look["marker"]["color"] == style.COLOURS[i]
        assert 1.05 / (luminance(style.COLOURS[i]) + 0.05) > 2.0, style.COLOURS[i]


def test_more_series_begin_again():
    assert style.series(7) == style.series(0) and style.series(9) == style.series(2)


def test_no_template_is_registered_or_made_the_default():
    import plotly.io as pio

    before = (pio.templates.default, set(pio.templates))
    style.template()
    figures.verify_cost(CURVE)
    assert (pio.templates.default, set(pio.templates)) == before
