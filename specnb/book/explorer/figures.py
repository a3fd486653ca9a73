"""The explorer's figures and sentences: what a setting looks like, made of plain data. No widget, no model.

Each figure comes as a function that gives its traces as plain dicts, and one that gives the whole Figure: a live
figure is drawn anew from the dicts, without plotly's checks.
"""

import html
from typing import NamedTuple

import numpy as np
import plotly.graph_objects as go

from specnb.book.explorer.tables import AT, FIXED, POLICIES, Predicted, Setting, Tables
from specnb.book.style import COLOURS, template
from specnb.measure.recording import Recording
from specnb.measure.replay import Step

COLUMNS, ROWS = 10, 9
"""Of the token strip; longer generations show the rows around the round that is looked at."""
KINDS = {
    "accepted draft": (COLOURS[2], "circle"),
    "correction": (COLOURS[1], "x"),
    "bonus token": (COLOURS[4], "star"),
    "plain step": (COLOURS[6], "square-open"),
}
"""Colour and symbol of what a token of the strip is."""
BLACK, GREY = "#222", "#9a9a9a"


class View(NamedTuple):
    """All that is shown of one setting; `live` is (K, speed-up, low, high) of a live run, or None."""

    setting: Setting
    sweep: Predicted
    predicted: Predicted
    recording: Recording
    steps: list[Step]
    round: int
    live: tuple[float, float, float, float] | None = None

    @property
    def step(self) -> Step:
        return self.steps[self.round - 1]


def view(tables: Tables, setting: Setting, index: int, round_: int, live: tuple | None = None) -> View:
    """Look a setting up; `index` is the recording of the strip, `round_` counts from 1 and is kept in range."""
    steps = tables.steps(setting, index)
    at = min(max(1, round_), len(steps))
    return View(setting, tables.sweep(setting), tables.predict(setting), tables.recordings[index], steps, at, live)


def speedup(v: View) -> list[dict]:
    """Traces: interval, line over K, break-even, the chosen point, the live point."""
    ks, p = list(range(1, len(v.sweep.speedup))), v.predicted
    low, high = v.sweep.low[1:].tolist(), v.sweep.high[1:].tolist()
    known = not np.isnan(low).any()
    k, live, least, most = v.live or (None, None, None, None)
    bars = {"type": "data", "symmetric": False, "array": [], "arrayminus": []}
    if v.live and not np.isnan(least):
        bars |= {"array": [most - live], "arrayminus": [live - least]}
    chosen = {"color": COLOURS[1], "symbol": "diamond", "size": 14, "line": {"color": BLACK, "width": 1}}
    counts = "tau %{customdata[0]:.2f}<br>accepted %{customdata[1]:.0f} of %{customdata[2]:.0f}"
    return [
        {
            "x": [*ks, *ks[::-1]] if known else [], "y": [*high, *low[::-1]] if known else [], "mode": "lines",
            "name": "95 % interval over prompts", "fill": "toself", "fillcolor": "rgba(0,114,178,0.15)",
            "line": {"width": 0}, "hoverinfo": "skip",
        },
        {
            "x": ks, "y": v.sweep.speedup[1:].tolist(), "mode": "lines+markers", "name": "every fixed K",
            "line": {"color": COLOURS[0], "width": 2}, "marker": {"size": 6, "symbol": "circle"},
            "hovertemplate": "K = %{x}<br>speed-up %{y:.2f}<extra></extra>",
        },
        {
            "x": [0, ks[-1] + 1], "y": [1, 1], "mode": "lines", "name": "break-even",
            "line": {"color": BLACK, "width": 1, "dash": "dash"}, "hoverinfo": "skip",
        },
        {
            "x": [v.setting.k if v.setting.policy == FIXED else p.mean_k], "y": [p.speedup], "mode": "markers",
            "name": f"chosen: {label(v.setting)}", "marker": chosen, "customdata": [[p.tau, p.accepted, p.drafted]],
            "hovertemplate": f"chosen: speed-up %{{y:.2f}}<br>{counts}<extra></extra>",
        },
        {
            "x": [k], "y": [live], "mode": "markers", "name": "live run", "error_y": bars,
            "visible": v.live is not None, "marker": {"color": COLOURS[3], "symbol": "star", "size": 16},
            "hovertemplate": "live: speed-up %{y:.2f}<extra></extra>",
        },
    ]  # fmt: skip


def speedup_figure(v: View) -> go.Figure:
    """Predicted speed-up over K, the chosen setting on it."""
    figure = _figure(speedup(v), "Predicted speed-up over draft length")
    figure.update_xaxes(title_text="draft length K (tokens a round)", range=[0, len(v.sweep.speedup)], dtick=4)
    return figure.update_yaxes(title_text="decoding speed-up (plain = 1)", rangemode="tozero")


def alpha(v: View) -> list[dict]:
    """The trace of acceptance by position, for positions that were reached."""
    p = v.predicted
    at = np.flatnonzero(p.tested > 1e-9)
    line = {
        "x": (at + 1).tolist(), "y": (p.kept[at] / p.tested[at]).tolist(), "mode": "lines+markers",
        "customdata": np.stack([p.kept[at], p.tested[at]], axis=1).round(1).tolist(),
        "line": {"color": COLOURS[2], "width": 2}, "marker": {"symbol": "square", "size": 8},
        "hovertemplate": "draft %{x}: %{y:.2f}<br>kept %{customdata[0]} of %{customdata[1]}<extra></extra>",
    }  # fmt: skip
    return [line]


def alpha_figure(v: View) -> go.Figure:
    """alpha_k over the position in the block; counts in the hover text."""
    figure = _figure(alpha(v), "Acceptance by position").update_layout(showlegend=False)
    figure.update_xaxes(title_text="position of the draft in its round", range=[0, len(v.sweep.speedup)], dtick=4)
    return figure.update_yaxes(title_text="share kept, given that it was reached", range=[-0.03, 1.06])


def kinds(v: View) -> list[tuple[int, str]]:
    """For each token of the strip's prompt: its round (from 1) and its kind."""
    marks: list[tuple[int, str]] = []
    for number, s in enumerate(v.steps, 1):
        marks += [(number, "accepted draft")] * s.n_accepted
        if s.at + s.n_accepted < v.recording.n_tokens:  # the last round may end within its drafts
            marks.append((number, ending(s)))
    return marks


def ending(s: Step) -> str:
    """What the target's own token at the end of a round is."""
    if not s.drafted:
        return "plain step"
    return "bonus token" if s.n_accepted == s.drafted else "correction"


def strip(v: View) -> list[dict]:
    """A trace for each kind up to the round that is looked at, the tokens still to come, and the round's frame."""
    marks = kinds(v)
    n_rows = -(-len(marks) // COLUMNS)
    first = max(0, min(v.step.at // COLUMNS - ROWS // 2, n_rows - ROWS))  # the looked-at round is in sight
    shown = [(i, *marks[i]) for i in range(first * COLUMNS, min(len(marks), (first + ROWS) * COLUMNS))]
    frame = {"color": "rgba(0,0,0,0)", "symbol": "circle", "size": 18, "line": {"color": BLACK, "width": 2}}

    def tokens(name: str, group: list[tuple[int, int, str]], colour: str, marker: dict) -> dict:
        points = {
            "x": [i % COLUMNS for i, _, _ in group],
            "y": [i // COLUMNS - first for i, _, _ in group],
            # plotly reads tags
            "text": ["\u00a0" + html.escape(shown_text(v.recording.pieces[i]), quote=False) for i, _, _ in group],
            "customdata": [[i + 1, number, kind] for i, number, kind in group],
        }
        if not group:  # a trace without any point would leave the legend
            points = {"x": [None], "y": [None], "text": [""], "customdata": [["", "", ""]]}
        return points | {
            "name": name, "mode": "markers+text", "textposition": "middle right", "marker": marker,
            "textfont": {"family": "DejaVu Sans Mono, Liberation Mono, monospace", "size": 12, "color": colour},
            "hovertemplate": "token %{customdata[0]}, round %{customdata[1]}: %{customdata[2]}<extra></extra>",
        }  # fmt: skip

    traces = []
    for kind, (colour, symbol) in KINDS.items():
        group = [token for token in shown if token[2] == kind and token[1] <= v.round]
        traces.append(tokens(kind, group, BLACK, {"color": colour, "symbol": symbol, "size": 10}))
    later = {"color": GREY, "symbol": "circle-open", "size": 5}
    traces.append(tokens("later rounds", [token for token in shown if token[1] > v.round], GREY, later))
    current = tokens("this round", [token for token in shown if token[1] == v.round], BLACK, frame)
    return [*traces, current | {"mode": "markers", "hoverinfo": "skip", "hovertemplate": None}]


def shown_text(piece: bytes, most: int = 8) -> str:
    """A token as it can be read in a cell: blanks and line ends made visible, cut to `most` characters."""
    text = piece.decode("utf-8", errors="replace").replace("\n", "⏎").replace("\t", "⇥").replace(" ", "·")
    text = "".join(c if c.isprintable() else "�" for c in text)
    return text if len(text) <= most else text[: most - 1] + "…"


def strip_figure(v: View) -> go.Figure:
    """Tokens of one prompt, row by row, by what they were; those of later rounds are grey."""
    figure = _figure(strip(v), "The tokens of one prompt, round by round")
    figure.update_xaxes(visible=False, range=[-0.3, COLUMNS], fixedrange=True)
    figure.update_yaxes(visible=False, range=[ROWS - 0.4, -0.6], fixedrange=True)
    legend = {"y": 1.0, "yanchor": "bottom"}
    return figure.update_layout(height=400, legend=legend, margin={"l": 10, "r": 10, "t": 90, "b": 10})


def _figure(traces: list[dict], title: str) -> go.Figure:
    return go.Figure(list(map(go.Scatter, traces))).update_layout(template=template(), title_text=title)


def label(s: Setting) -> str:
    """The policy with what it was told."""
    if s.policy == FIXED:
        return f"fixed K = {s.k}"
    return f"{s.policy}, K up to {s.k}" if "k" in POLICIES[s.policy].depends else s.policy


def summary(v: View) -> list[str]:
    """What the figures show, in sentences."""
    s, p, m = v.setting, v.predicted, v.setting.machine
    rate = (
        f"{p.accepted:.0f} of {p.drafted:.0f} drafts kept ({p.accepted / p.drafted:.0%})" if p.drafted else "no drafts"
    )
    about = "no interval: fewer than five prompts" if np.isnan(p.low) else f"95 % interval {p.low:.2f} to {p.high:.2f}"
    prompts = f"{p.n_prompts} prompt{'s' * (p.n_prompts != 1)}"
    best_k = int(np.argmax(v.sweep.speedup))
    top = (
        f"K = {best_k} with {v.sweep.speedup[best_k]:.2f}" if best_k else "none: plain decoding is faster than every K"
    )
    return [
        f"{label(s)}, drafter {s.drafter}, content {s.content}, temperature {s.temperature:g}: "
        f"predicted speed-up {p.speedup:.2f} over {prompts} ({about}); {verdict(p)}.",
        f"tau {p.tau:.2f}, {rate}, {p.mean_k:.1f} drafts a round. Best fixed K: {top}.",
        f"Costs: {m.name}, T({AT})/T(1) = {m.at8:.2f}, c = {m.c:.2f}.",
        round_line(v),
    ]


def verdict(p: Predicted) -> str:
    """Whether the whole interval lies on one side of break-even."""
    if np.isnan(p.low):
        return "faster than plain decoding, as far as so few prompts tell" if p.speedup > 1 else "not faster here"
    if p.low > 1:
        return "speculation pays"
    return "speculation does not pay" if p.high < 1 else "these prompts cannot tell whether it pays"


def round_line(v: View) -> str:
    """The round of the strip in words."""
    s = v.step
    committed = v.recording.pieces[s.at : s.at + s.n_accepted + 1]
    drafts = (
        f"{s.drafted} drafted, {s.n_accepted} kept, {s.drafted - s.n_accepted} discarded" if s.drafted else "no draft"
    )
    end = ending(s) if s.at + s.n_accepted < v.recording.n_tokens else "the end"
    text = "".join(shown_text(piece, 40) for piece in committed)
    return f"Round {v.round} of {len(v.steps)} of {v.recording.prompt_id}: {drafts}, then {end}: “{text[:80]}”."
