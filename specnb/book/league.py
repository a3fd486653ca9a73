"""Tables and figures of notebook 07: drafters by content, live and replayed, and where a draft pays."""

import numpy as np
import pandas as pd
import plotly.express as px
import plotly.graph_objects as go

from specnb.book.style import dots, dress, readable, series
from specnb.book.tables import baseline, compact, live_rows, replay_rows, speed_without_loops, summarise_rows
from specnb.io import read_json
from specnb.measure.bench import TERMS, interval, rate, widen
from specnb.measure.cost import Cost, CostCurve
from specnb.medusa.checkpoint import LAYOUTS, OWN, TRAINING_FILE, shipped
from specnb.records import RunRecord

SHOWN = (1, 2, 4)
"""Positions of which a table shows the acceptance."""


def rank_drafters(record: RunRecord, temperature: float, category: str = "") -> pd.DataFrame:
    """Return one row per drafter, the fastest first, on all contents or on one `category`.

    Columns:

    - c; alpha_1, alpha_2, alpha_4 (share accepted of the draft tokens that were tested at this
      position); tested (draft tokens tested at position 1)
    - best_k and its range; tau
    - predicted, low, high: speed-up at that K over plain decoding in the same engine, with an
      interval over prompts; without_loops: the same without answers that loop
    - live, live_low, live_high; prompts; identical: number of texts equal to plain decoding
    - over_fastest: live over the record's baseline
    """
    wanted = "temperature == @temperature" + " and category == @category" * bool(category)
    rows = replay_rows(record).query(f"n_decoded > 0 and {wanted}")
    counts = pd.DataFrame(record.measurements["alphas"]).query(wanted)
    live = live_speeds(record, temperature, category)
    table = []
    for drafter, group in rows.groupby("drafter", sort=False):
        seconds = group.pivot(index="prompt_id", columns="k", values="seconds")
        best = seconds.sum().idxmin()
        near = [k for k in seconds if k == best or not interval(seconds[[k, best]], rate).low > 1]
        chosen = group.query("k == @best")
        summary = summarise_rows(chosen)
        counted = counts.query("drafter == @drafter")  # none for a router
        tested, kept = (pd.DataFrame(counted[name].tolist()).sum() for name in ("tested", "kept"))
        alphas = kept / tested
        table.append(
            {
                "drafter": drafter,
                "c": record.measurements["cs"].get(drafter),
                **{f"alpha_{n}": alphas.get(n - 1) for n in SHOWN},
                "tested": tested.get(0),
                "best_k": best,
                "range": f"{min(near)}-{max(near)}",
                **{name: summary[name] for name in ("tau", "speedup", "low", "high", "n_prompts")},
                "without_loops": speed_without_loops(chosen, record),
            }
        )
    frame = widen(pd.DataFrame(table), max(TERMS)).drop(columns="n_prompts").set_index("drafter")
    frame = frame.rename(columns={"speedup": "predicted"}).join(live, how="outer")
    frame = frame.assign(over_fastest=frame["live"] * baseline(record).share).rename(index=record.measurements["names"])
    return frame.sort_values("predicted", ascending=False)


def show_ranks(record: RunRecord, temperature: float) -> pd.DataFrame:
    """Return `rank_drafters` for display; a `*` marks a drafter that runs in another engine than the target."""
    return compact(rank_drafters(record, temperature)).rename(index=lambda name: name + _star(record, name))


def _star(record: RunRecord, drafter: str) -> str:
    """Return "*" for a drafter that runs in another engine than the target."""
    names = record.measurements["names"]
    return "*" if drafter in [names[name] for name in record.measurements["c_across_engines"]] else ""


def live_speeds(record: RunRecord, temperature: float, category: str = "") -> pd.DataFrame:
    """Return one row per drafter: live decoding speed over interleaved plain decoding, with its interval.

    Columns: live, live_low, live_high, prompts, identical (greedy texts equal to plain decoding).
    """
    wanted = "k > 0 and n_decoded > 0 and temperature == @temperature" + " and category == @category" * bool(category)
    groups = live_rows(record).query(wanted).groupby("drafter", sort=False)
    table = pd.DataFrame.from_dict({drafter: summarise_rows(group) for drafter, group in groups}, orient="index")
    names = {"speedup": "live", "low": "live_low", "high": "live_high", "n_prompts": "prompts"}
    return table.reindex(columns=[*names, "identical"]).rename(columns=names)


def count_loops(record: RunRecord) -> pd.DataFrame:
    """Return the number of answers by content and temperature, and how many of them loop."""
    answers = live_rows(record).query("k == 0").drop_duplicates(["prompt_id", "temperature"])
    loops = answers.groupby(["category", "temperature"], sort=False)["loops"]
    return loops.agg(answers="size", looping="sum").reset_index()


def compare_contents(record: RunRecord, temperature: float) -> pd.DataFrame:
    """Return the predicted speed-up of every drafter on every content, at its best K there."""
    names = replay_rows(record)["category"].unique()
    frame = pd.concat([rank_drafters(record, temperature, name).assign(content=name) for name in names])
    columns = ["content", "best_k", "predicted", "low", "high", "live", "prompts"]
    return frame[columns].rename_axis("drafter").reset_index()


def list_trained() -> pd.DataFrame:
    """Return the shipped drafters: kind, megabytes, parameters, tokens of training text, examples."""
    rows = []
    for name, folder in shipped().items():
        facts = read_json(folder / TRAINING_FILE)
        recipe = facts["recipe"]
        rows.append(
            {
                "name": name,
                "kind": facts["heads"]["kind"],
                "mb": (folder / LAYOUTS[OWN].file).stat().st_size / 1e6,
                "parameters": facts["parameters"],
                "text_tokens": facts["text"]["tokens"]["train"],
                "examples": recipe["steps"] * recipe["batch_size"],
            }
        )
    return pd.DataFrame(rows)


# --- where a copy of the target pays as its drafter ---


def draw_region(record: RunRecord) -> go.Figure:
    """Draw the acceptance rate from which drafting beats plain decoding over c, with the drafters as marks.

    Both are for the engine and the machine of the run.
    """
    cost = Cost(CostCurve.model_validate(record.measurements["verify_curve"]))
    c = np.linspace(0, 1, 51)
    needed = [cost._replace(c=step).break_even() for step in c]
    figure = go.Figure().add_scatter(x=c, y=needed, mode="lines", name="break-even in this engine", **series(0))
    points = rank_drafters(record, min(record.params["temperatures"])).dropna(subset="c")
    labels = [readable(name) + _star(record, name) for name in points.index]
    symbols = [*range(9), "star", "pentagon", "hexagram"]
    marks = px.scatter(points, x="c", y="alpha_1", symbol=labels, symbol_sequence=symbols)
    figure.add_traces(marks.update_traces(marker_color="#222", marker_size=10, cliponaxis=False).data)
    return dress(figure, "break_even")


def draw_contents(frame: pd.DataFrame) -> go.Figure:
    """Draw the predicted speed-up of each drafter by content (`compare_contents`)."""
    named = frame.assign(drafter=frame["drafter"].map(readable))
    return dress(dots(named, x="predicted", y="drafter", by="content"), "drafters")
