"""The explorer's figures and sentences: what a setting looks like. No widget, no model."""

from typing import NamedTuple

import numpy as np
import plotly.graph_objects as go

from specnb.book import tokens
from specnb.book.explorer.tables import THIS_MACHINE, Predicted, Setting, Tables
from specnb.book.style import COLOURS, template
from specnb.book.tables import BUSY
from specnb.measure.cost import AT, Cost
from specnb.measure.policies import FIXED, POLICIES
from specnb.measure.recording import Recording
from specnb.measure.replay import Step

FEW = 10
GHOST = {"color": "#888", "width": 2, "dash": "dot"}
"""The line of what is pinned."""
Live = tuple[float, float, float, float, bool]


class View(NamedTuple):
    """All that is shown of one setting, and of the one that is `pinned` to compare it with, if there is one.

    `live` is (K, speed-up, low, high, busy) of a live run, or None.
    """

    setting: Setting
    sweep: Predicted
    predicted: Predicted
    recording: Recording
    steps: list[Step]
    round: int
    live: Live | None = None
    pinned: "View | None" = None


def view(
    tables: Tables, setting: Setting, index: int, round_: int, live: Live | None = None, pinned: View | None = None
) -> View:
    """Look a setting up; `index` is the recording of the strip, `round_` counts from 1 and is kept in range."""
    steps = tables.steps(setting, index)
    at = min(max(1, round_), len(steps))
    sweep, p = tables.sweep(setting), tables.predict(setting)
    return View(setting, sweep, p, tables.recordings[index], steps, at, live, pinned)


def speedup(v: View) -> go.Figure:
    """Predicted speed-up over K: interval, line, the chosen point, the live point if there is one, break-even."""
    ks, p = list(range(1, len(v.sweep.speedup))), v.predicted
    low, high = v.sweep.low[1:].tolist(), v.sweep.high[1:].tolist()
    figure = go.Figure()
    figure.add_scatter(
        x=[*ks, *ks[::-1]], y=[*high, *low[::-1]], mode="lines", line_width=0, hoverinfo="skip",
        name="95 % interval over prompts", fill="toself", fillcolor="rgba(0,114,178,0.15)",
        visible=not np.isnan(low).any(),
    )  # fmt: skip
    figure.add_scatter(
        x=ks, y=v.sweep.speedup[1:].tolist(), mode="lines+markers", name="every fixed K", marker_size=6,
        line={"color": COLOURS[0], "width": 2}, hovertemplate="K = %{x}<br>speed-up %{y:.2f}<extra></extra>",
    )  # fmt: skip
    figure.add_hline(y=1, line={"color": "#777", "width": 1, "dash": "dash"})
    counts = f"tau {p.tau:.2f}<br>accepted {p.accepted:.0f} of {p.drafted:.0f}"
    figure.add_scatter(
        x=[at_k(v)], y=[float(p.speedup)],
        mode="markers", name=f"chosen: {label(v.setting)}", cliponaxis=False,
        marker={"color": COLOURS[1], "symbol": "diamond", "size": 14, "line": {"color": "#777", "width": 1}},
        hovertemplate=f"chosen: speed-up %{{y:.2f}}<br>{counts}<extra></extra>",
    )  # fmt: skip
    if v.live:
        k, live, least, most, busy = v.live
        figure.add_scatter(
            x=[k], y=[live], mode="markers", name="live run" + _marked(busy),
            marker={"color": COLOURS[3], "symbol": "star", "size": 16},
            error_y={"type": "data", "symmetric": False, "array": [most - live], "arrayminus": [live - least]},
            hovertemplate="live: speed-up %{y:.2f}<extra></extra>",
        )  # fmt: skip
    if v.pinned:
        y, s, at = v.pinned.sweep.speedup[1:].tolist(), v.pinned.setting, v.pinned.predicted
        figure.add_scatter(x=list(range(1, len(y) + 1)), y=y, mode="lines", name=f"pinned: {label(s)}", line=GHOST)
        figure.add_scatter(
            x=[at_k(v.pinned)], y=[float(at.speedup)], mode="markers", showlegend=False,
            marker={"color": GHOST["color"], "symbol": "diamond-open", "size": 14},
            hovertemplate="pinned: speed-up %{y:.2f}<extra></extra>",
        )  # fmt: skip
    figure.update_xaxes(title_text="draft length K (tokens a round)", range=[0, len(v.sweep.speedup)], dtick=4)
    figure.update_yaxes(title_text="decoding speed-up (plain in the same engine = 1)", rangemode="tozero")
    title = "Predicted speed-up over draft length" + f"<br>({BUSY})" * v.setting.machine.busy
    return figure.update_layout(template=template(), title_text=title, width=580, height=430)


def at_k(v: View) -> float:
    """Where a setting stands on the axis of K: its K, or the drafts that its policy makes in a round."""
    return v.setting.k if v.setting.policy == FIXED else float(v.predicted.drafted / v.predicted.rounds)


def alpha(v: View) -> go.Figure:
    """Return alpha_k over the positions in the block that were reached, pale by few rounds; counts in the hover."""
    p = v.predicted
    at = np.flatnonzero(p.tested > 1e-9)
    figure = go.Figure()
    figure.add_scatter(
        x=(at + 1).tolist(), y=(p.kept[at] / p.tested[at]).tolist(), mode="lines+markers",
        customdata=np.stack([p.kept[at], p.tested[at]], axis=1).round(1).tolist(),
        line={"color": COLOURS[2], "width": 2},
        marker={"symbol": "square", "size": 8, "opacity": np.where(p.tested[at] < FEW, 0.25, 1.0).tolist()},
        hovertemplate="draft %{x}: %{y:.2f}<br>kept %{customdata[0]} of %{customdata[1]}<extra></extra>",
    )  # fmt: skip
    if v.pinned:
        ghost = v.pinned.predicted
        at = np.flatnonzero(ghost.tested > 1e-9)
        figure.add_scatter(
            x=(at + 1).tolist(), y=(ghost.kept[at] / ghost.tested[at]).tolist(), mode="lines+markers", name="pinned",
            line=GHOST, marker={"color": GHOST["color"], "symbol": "square-open"},
        )  # fmt: skip
    figure.update_xaxes(title_text="position of the draft in its round", range=[0, len(v.sweep.speedup)], dtick=4)
    figure.update_yaxes(title_text="share kept, given that it was reached", range=[-0.03, 1.06])
    look = {"template": template(), "showlegend": False, "width": 400, "height": 430}
    return figure.update_layout(title_text="Acceptance by position", **look)


def strip(v: View) -> str:
    """The tokens of one prompt as HTML, the round looked at framed."""
    return tokens.strip(tokens.replayed(v.recording, v.steps), v.round)


def label(s: Setting) -> str:
    """The policy with its K."""
    if s.policy == FIXED:
        return f"fixed K = {s.k}"
    return f"{s.policy}, K up to {s.k}" if "k" in POLICIES[s.policy].depends else s.policy


def summary(v: View) -> list[str]:
    """What the figures show, in sentences."""
    s, p, machine = v.setting, v.predicted, v.setting.machine
    about = "no interval: fewer than five prompts" if np.isnan(p.low) else f"95 % interval {p.low:.2f} to {p.high:.2f}"
    best_k = int(np.argmax(v.sweep.speedup))
    best = f"K = {best_k} with {v.sweep.speedup[best_k]:.2f}" if best_k else "none: plain decoding is faster"
    return [
        f"{where(s)}: predicted speed-up {p.speedup:.2f}, prompts: {p.n_prompts} ({about}); {verdict(p, machine)}.",
        f"tau {p.tau:.2f}, {p.accepted:.0f} of {p.drafted:.0f} drafts kept, {p.drafted / p.rounds:.1f} drafts a round. "
        f"Best fixed K: {best}.",
        f"Costs: {machine.name}, T({AT})/T(1) = {machine.at8:.2f}, c = {machine.c:.2f}{_marked(machine.busy)}.",
        round_line(v),
        *([f"Pinned: {where(v.pinned.setting)}: {v.pinned.predicted.speedup:.2f}."] if v.pinned else []),
    ]


def where(s: Setting) -> str:
    """A setting in words; a machine that did not make the trace is named."""
    machine = f", {s.machine.name}" * (s.machine.name != THIS_MACHINE)
    return f"{label(s)}, drafter {s.drafter}, content {s.content}, temperature {s.sampling}{machine}"


def verdict(p: Predicted, machine: Cost) -> str:
    """Whether the whole interval lies on one side of break-even; none by costs that a busy machine measured."""
    if machine.busy:
        return f"no verdict: {BUSY} while forwards were timed, so end the other processes and record anew"
    if p.low > 1:
        return "speculation pays"
    return "speculation does not pay" if p.high < 1 else "these prompts cannot tell whether it pays"


def _marked(busy: bool) -> str:
    return f" ({BUSY})" * busy


def round_line(v: View) -> str:
    """The round of the strip in words."""
    (shown,) = tokens.replayed(v.recording, [v.steps[v.round - 1]])
    return f"Round {v.round} of {len(v.steps)} of {v.recording.prompt_id}: {shown.line}"
