"""Tables and figures of notebook 02: controllers against the best fixed K, and K over time."""

from collections.abc import Sequence

import pandas as pd
import plotly.express as px
import plotly.graph_objects as go

from specnb.book.style import looks, template
from specnb.book.tables import baseline
from specnb.errors import InputError
from specnb.measure.adaptive import SWITCHING, ControllerStudy, controllers, cost_of, switches
from specnb.measure.cost import THIS_MACHINE
from specnb.measure.replay import counts_of, walk
from specnb.records import RunRecord

SPEEDUP, SAME_ENGINE = "best fixed K: speed-up", "best fixed K: speed-up, same engine"


def against_best(record: RunRecord) -> pd.DataFrame:
    """Index machine, drafter and policy, one column per content: speed as a share of the best fixed K's.

    The best K is chosen in hindsight for each content (K = 0, plain decoding, included); two rows hold that K and its
    speed-up: on this machine over the record's `baseline`, and in a third row over plain decoding in the same engine.
    """
    rows = pd.DataFrame(record.measurements["replay"])
    key = ["machine", "drafter", "content"]
    best = rows[rows["kind"] == "fixed"]
    here = best["machine"] == THIS_MACHINE
    lengths = best["policy"].str.extract(r"(\d+)$", expand=False).astype(float)
    others = rows[rows["kind"] != "fixed"].join(best.set_index(key)["speedup"].rename("best"), on=key)
    rows = pd.concat([
        best.assign(policy="best fixed K", speedup=lengths),
        best.assign(policy=SPEEDUP, speedup=best["speedup"].mask(here, best["speedup"] * baseline(record).share)),
        best[here].assign(policy=SAME_ENGINE),
        others.assign(speedup=others["speedup"] / others["best"]),
    ]).sort_index(kind="stable")  # fmt: skip
    index = ["machine", "drafter", "policy"]
    return rows.pivot_table("speedup", index, "content", sort=False).rename_axis(columns=None)


def worst(share: pd.DataFrame) -> pd.DataFrame:
    """The lowest share of the best fixed K over the contents, by machine, drafter and policy, and its content."""
    rows = share.drop(["best fixed K", SPEEDUP, SAME_ENGINE, "oracle"], level="policy")
    contents = rows.drop(columns=SWITCHING, errors="ignore")
    table = pd.DataFrame({"worst": contents.min(axis=1), "content": contents.idxmin(axis=1)})
    return table.join(rows.filter([SWITCHING]))


def live_check(study: ControllerStudy) -> pd.DataFrame:
    """Every live generation beside its replay: rounds, tokens drafted and kept; `same` where all three are equal.

    Greedy and from the same controller fresh for each prompt, so with lookup they are the same, integer for integer,
    unless the live text forked from the plain one at a near-tie (`same_text` is then False). A draft model whose
    forwards of two tokens round otherwise than its steps may draft another token at a near-tie of its own: then
    `near_tie` is True (False would be a fault); it is missing where no drafted token differs.
    """
    plain = {g.prompt_id: g for g in study.record.generations if not g.k}
    fork_rows = study.record.measurements["draft_forks"]
    forks = {(f["prompt_id"], f["drafter"], f["policy"]): f["near_tie"] for f in fork_rows}
    rows = []
    for g in (g for g in study.record.generations if g.k):
        (recording,) = study.trace.select(prompt_id=g.prompt_id, drafter=g.drafter).recordings
        control = controllers(cost_of(study.record, g.drafter), recording.k_max)[g.controller]
        counts = counts_of(recording, walk(recording, control))
        live = (len(g.rounds), g.total_draft_tokens, g.accepted_tokens)
        same = live == (counts.rounds, counts.drafted, counts.accepted)
        same_text = g.token_ids == plain[g.prompt_id].token_ids
        near_tie = forks.get((g.prompt_id, g.drafter, g.controller))
        rows.append((g.category, g.drafter, g.controller, *live, same, same_text, near_tie))
    columns = ["content", "drafter", "policy", "rounds", "drafted", "accepted", "same", "same_text", "near_tie"]
    return pd.DataFrame(rows, columns=columns)


def trajectory(study: ControllerStudy, drafter: str, policies: Sequence[str]) -> pd.DataFrame:
    """K of every round through the switching conversation: policy, token (position in its answers), k, content."""
    recordings = [r for r in study.trace.select(drafter=drafter).recordings if switches(r)]
    if not recordings:
        raise InputError("the study has no switching conversation: run it with conversations of 1 or more")
    fresh = controllers(cost_of(study.record, drafter), recordings[0].k_max)
    rows = []
    for policy in policies:
        before = 0
        for recording in recordings:
            steps = walk(recording, fresh[policy])
            rows += [(policy, before + s.at, s.drafted, recording.category) for s in steps]
            before += recording.n_tokens
    return pd.DataFrame(rows, columns=["policy", "token", "k", "content"])


def k_over_time(frame: pd.DataFrame, *, title: str = f"K through the {SWITCHING}") -> go.Figure:
    """Drafted tokens of each round over the position in the answers, with the contents named above their stretch."""
    look = looks("policy", frame["policy"].unique().tolist())
    del look["symbol"], look["symbol_map"]
    figure = px.line(frame, x="token", y="k", line_shape="hv", template=template(), title=title, **look)
    first = frame[frame["policy"] == frame["policy"].iloc[0]]
    for at, start in enumerate(first[first["content"] != first["content"].shift()].itertuples()):
        figure.add_vline(x=start.token, line={"color": "#bbb", "width": 1, "dash": "dot"})
        place = {"x": start.token, "y": 1.0 + 0.04 * (at % 2), "yref": "paper", "xanchor": "left", "yanchor": "bottom"}
        figure.add_annotation(text=start.content, showarrow=False, font_size=11, **place)
    figure.update_xaxes(title_text="position in the answers (generated tokens)")
    figure.update_yaxes(title_text="tokens drafted (0: a plain step)", rangemode="tozero")
    return figure.update_layout(legend_title_text="")
