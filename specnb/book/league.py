"""Tables and figures of notebook 07: the drafters by content, live beside replayed, and where a cheaper copy pays."""

from itertools import product
from typing import Any

import numpy as np
import pandas as pd
import plotly.express as px
import plotly.graph_objects as go

from specnb.book.claims import MISSING, Estimate
from specnb.book.style import dots, dress, looks, readable
from specnb.book.tables import baseline, compact, live_rows, replay_rows, speed_without_loops, summarise_rows
from specnb.io import read_json
from specnb.measure.bench import TERMS, interval, rate, widen
from specnb.measure.cost import Cost, CostCurve
from specnb.measure.pair import TRAINED
from specnb.measure.probe import machines
from specnb.medusa.checkpoint import LAYOUTS, OWN, TRAINING_FILE, shipped
from specnb.records import RunRecord

SHOWN = (1, 2, 4)
"""Positions of which a table shows the acceptance."""
JUDGED = ("self", "exit", "skip")
"""Drafters that claims are about, beside the best of the trained ones."""


def rank_drafters(record: RunRecord, temperature: float, category: str = "") -> pd.DataFrame:
    """One row a drafter, the fastest first: all contents, or one.

    Columns: c; alpha_1, alpha_2, alpha_4 (the share kept of drafts that were tested there) and `tested`, drafts tested
    at the first; best_k and its range; tau; predicted, the speed-up at that K over plain decoding in the same engine,
    with low and high over prompts; without_loops, the same of answers that do not loop; live with live_low and
    live_high, `prompts` behind it and texts `identical` to plain decoding's; and over_fastest, live over the record's
    baseline.
    """
    wanted = "temperature == @temperature" + " and category == @category" * bool(category)
    rows = replay_rows(record).query(f"n_decoded > 0 and {wanted}")
    counts = pd.DataFrame(record.measurements["alphas"]).query(wanted)
    live, share = live_speeds(record, temperature, category), baseline(record).share
    table = []
    for drafter, group in rows.groupby("drafter", sort=False):
        seconds = group.pivot(index="prompt_id", columns="k", values="seconds")
        best = seconds.sum().idxmin()
        near = [k for k in seconds if k == best or not interval(seconds[[k, best]], rate).low > 1]
        chosen = group[group["k"] == best]
        summary = summarise_rows(chosen)
        table.append({
            "drafter": drafter, "c": record.measurements["cs"].get(drafter),
            **_alphas(counts[counts["drafter"] == drafter]),
            "best_k": best, "range": f"{min(near)}-{max(near)}",
            **{name: summary[name] for name in ("tau", "speedup", "low", "high", "n_prompts")},
            "without_loops": speed_without_loops(chosen, record),
        })  # fmt: skip
    frame = widen(pd.DataFrame(table), max(TERMS)).drop(columns="n_prompts").set_index("drafter")
    frame = frame.rename(columns={"speedup": "predicted"}).join(live, how="outer")
    frame = frame.assign(over_fastest=frame["live"] * share).rename(index=record.measurements["names"])
    return frame.sort_values("predicted", ascending=False)


def show_ranks(record: RunRecord, temperature: float) -> pd.DataFrame:
    """Return `rank_drafters` to be read: intervals in the cells of their values; a `*` marks a c across engines."""
    across = {record.measurements["names"][name] for name in record.measurements["c_across_engines"]}
    return compact(rank_drafters(record, temperature)).rename(index={name: f"{name}*" for name in across})


def live_speeds(record: RunRecord, temperature: float, category: str = "") -> pd.DataFrame:
    """Live decoding speed over plain decoding beside it, with its interval over prompts, a row a drafter.

    Columns live, live_low, live_high, prompts, and identical: greedy texts equal to the plain one.
    """
    wanted = "k > 0 and n_decoded > 0 and temperature == @temperature" + " and category == @category" * bool(category)
    groups = live_rows(record).query(wanted).groupby("drafter", sort=False)
    table = pd.DataFrame.from_dict({drafter: summarise_rows(group) for drafter, group in groups}, orient="index")
    names = {"speedup": "live", "low": "live_low", "high": "live_high", "n_prompts": "prompts"}
    return table.reindex(columns=[*names, "identical"]).rename(columns=names)


def count_loops(record: RunRecord) -> pd.DataFrame:
    """Answers by content and temperature, and how many of them loop."""
    by = ["category", "temperature"]
    answers = {(g.prompt_id, g.temperature): g for g in record.generations if not g.k}.values()
    rows = pd.DataFrame([(g.category, g.temperature, g.loops) for g in answers], columns=[*by, "loops"])
    return rows.groupby(by, sort=False)["loops"].agg(answers="size", looping="sum").reset_index()


def compare_contents(record: RunRecord, temperature: float) -> pd.DataFrame:
    """The predicted speed-up of every drafter on every content, at the K that is best for it there."""
    names = replay_rows(record)["category"].unique()
    frame = pd.concat([rank_drafters(record, temperature, name).assign(content=name) for name in names])
    frame = frame.rename_axis("drafter").reset_index()
    return frame[["drafter", "content", "best_k", "predicted", "low", "high", "live", "prompts"]]


def list_trained() -> pd.DataFrame:
    """The shipped drafters: kind, megabytes, parameters, tokens of text and of training steps."""
    rows = []
    for name, folder in shipped().items():
        facts = read_json(folder / TRAINING_FILE)
        recipe, text = facts["recipe"], facts["text"]["tokens"]
        rows.append({
            "name": name, "kind": facts["heads"]["kind"], "mb": (folder / LAYOUTS[OWN].file).stat().st_size / 1e6,
            "parameters": facts["parameters"], "text_tokens": text["train"],
            "examples": recipe["steps"] * recipe["batch_size"],
        })  # fmt: skip
    return pd.DataFrame(rows)


# --- where a copy of the target pays as its drafter ---


def draw_region(record: RunRecord) -> go.Figure:
    """Acceptance from which on drafting pays, over what a draft costs, on each machine; marks are the drafters here."""
    here = Cost(CostCurve.model_validate(record.measurements["verify_curve"]))
    grid = product(machines(here).values(), np.linspace(0, 1, 51))
    lines = pd.DataFrame({"machine": m.name, "c": c, "alpha": m._replace(c=c).break_even()} for m, c in grid)
    figure = px.line(lines, x="c", y="alpha", **looks("machine", lines["machine"].unique(), by=["line_dash"]))
    points = rank_drafters(record, min(record.params["temperatures"]))
    points = points.dropna(subset="c").assign(name=lambda rows: rows.index.map(readable)).round(2)
    marks = points.groupby(["alpha_1", "c"])["name"].agg(", ".join).reset_index()
    figure.add_scatter(x=marks["c"], y=marks["alpha_1"], mode="markers+text", text=" " + marks["name"],
                       textposition=["top right", "bottom right"] * len(marks), name="drafters here",
                       marker={"color": "#222", "symbol": "x", "size": 9})  # fmt: skip
    return dress(figure, "break_even")


def draw_contents(frame: pd.DataFrame) -> go.Figure:
    """Predicted speed-up of each drafter by content (`compare_contents`); plain decoding in the same engine is 1."""
    named = frame.assign(drafter=frame["drafter"].map(readable))
    return dress(dots(named, x="predicted", y="drafter", by="content"), "drafters")


def league_values(record: RunRecord) -> dict[str, object]:
    """Return the named values that the claims of notebook 07 are judged by.

    Of JUDGED, and of the best of those that were `trained`, the predicted greedy speed-up over plain decoding in the
    same engine; of the copy also that over the baseline, c and alpha.
    """
    table = rank_drafters(record, min(record.params["temperatures"]))
    n, copy = replay_rows(record)["prompt_id"].nunique(), table.reindex(["self"]).iloc[0]
    best = next((name for name in table.index if name in TRAINED), "")
    judged = table.reindex([*JUDGED, best]).set_axis([*JUDGED, "trained"]).itertuples()
    values: dict[str, Any] = {
        row.Index: Estimate(row.predicted, row.low, row.high, n) if row.c == row.c else MISSING for row in judged
    }
    share, of_copy = baseline(record).share, values["self"]
    over_fastest = Estimate(*[share * end for end in of_copy[:3]], n=of_copy.n)
    return values | {"copy_over_fastest": over_fastest, "c_copy": copy.c, "alpha_copy": copy.alpha_1}


def _alphas(rows: pd.DataFrame) -> dict[str, float | int | None]:
    """The shares kept at the positions SHOWN, and `tested`, drafts at the first, of rows of counts by position."""
    if rows.empty:  # of a router
        return {}
    tested, kept = (np.sum(rows[name].tolist(), axis=0) for name in ("tested", "kept"))
    shares = {f"alpha_{n}": kept[n - 1] / tested[n - 1] if tested[n - 1] else None for n in SHOWN}
    return shares | {"tested": tested[0]}
