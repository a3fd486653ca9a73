"""Compare all drafters on the same texts of one target: replay every K, run the best K live.

The experiment of notebook 07. Its record separates replay predictions from live results.
"""

from typing import Any

import numpy as np
import pandas as pd
import plotly.express as px
import plotly.graph_objects as go

from specnb.book.style import dots, dress, readable, series
from specnb.book.tables import baseline, compact, fastest_k, live_rows, replay_rows
from specnb.io import read_json
from specnb.measure.bench import speed_table
from specnb.measure.cost import Cost, CostCurve
from specnb.measure.experiment import Progress, check_prompts, first_of_each, prompts_of, silent
from specnb.measure.recording import Recording
from specnb.measure.replay import fixed_k
from specnb.measure.sweep import Sweep
from specnb.medusa.checkpoint import LAYOUTS, OWN, TRAINING_FILE, shipped
from specnb.params import LeagueParams
from specnb.records import RunRecord

EXPERIMENT = "07_drafters"


def run_league(params: LeagueParams, *, progress: Progress = silent) -> RunRecord:
    """Generate plainly, follow every drafter along the texts, replay every K, run the best K live.

    Routers (`auto`) choose K themselves and process the texts of a temperature as one stream.
    Measurements: `left_out` gives the reason for each drafter that does not fit the target, `names`
    maps drafters to their names in the parameters, `replay` has a row for each drafter, text and K,
    `alphas` the tested and accepted draft tokens by position, and `best` the K of the live runs.
    """
    with Sweep(EXPERIMENT, params, prompts_of(params, params.categories, params.pack_prompts)) as study:
        # 1. Open the models.
        study.open_models([], params.drafters)
        check_prompts(study.target, study.chosen, params.max_new_tokens)
        # 2. Time forward passes.
        study.time_forwards(params.k_max)
        # 3. Generate plainly.
        samplings = [(temperature, 1.0) for temperature in params.temperatures]
        study.generate_plainly(study.chosen, samplings, progress)
        # 4. Follow the drafters along the texts.
        study.follow_drafters(params.k_max, progress)
        # 5. Replay every K, and choose the best one.
        rows = study.replay_every_k(range(1, params.k_max + 1))
        seconds = pd.DataFrame(rows).pivot_table("seconds", ["temperature", "drafter"], "k", aggfunc="sum")
        best = seconds.idxmin(axis=1).rename("k").loc[:, list(study.costs)]
        study.measured |= {
            "replay": {"rows": rows},
            "alphas": [_alphas(recording) for recording in study.recordings],
            "best": best.reset_index().to_dict("records"),
        }

        # 6. Run every drafter live at its best K, and the routers.
        def methods(temperature: float) -> dict[str, Any]:
            at_best = {d.name: {"drafter": d, "k": int(best[temperature, d.name])} for d in study.drafters}
            return at_best | {router.name: {"drafter": router} for router in study.routers}

        study.run_live(methods, first_of_each(study.chosen, params.live_prompts), samplings, progress)
        return study.record()


def _alphas(recording: Recording) -> dict[str, Any]:
    """Return the tested and accepted draft tokens by position, at the largest K."""
    counts = fixed_k(recording, recording.k_max)
    return recording.key | {"tested": counts.tested, "kept": counts.kept}


# --- Tables and figures of notebook 07: drafters by content, live and replayed, and where a draft pays ---

SHOWN = (1, 2, 4)
"""Positions whose acceptance rate the tables show."""


def rank_drafters(record: RunRecord, temperature: float, category: str = "") -> pd.DataFrame:
    """Return one row per drafter, fastest first, on all contents or on one `category`.

    Columns:

    - c; alpha_1, alpha_2, alpha_4 (share of the draft tokens tested at this position that were
      accepted); tested (draft tokens tested at position 1)
    - best_k and its range; tau
    - predicted, low, high: speed-up at that K over plain decoding in the same engine, with an
      interval over prompts; without_loops: the same, excluding answers that loop
    - live, live_low, live_high; prompts; identical: number of texts equal to plain decoding
    - over_fastest: live over the record's baseline
    """
    wanted = "temperature == @temperature" + " and category == @category" * bool(category)
    rows = replay_rows(record).query(f"n_decoded > 0 and {wanted}")
    speeds = fastest_k(rows, ["drafter"], record).set_index("drafter")
    counts = pd.DataFrame(record.measurements["alphas"]).query(wanted).set_index("drafter")
    tested, kept = (
        pd.DataFrame(counts[name].tolist(), counts.index).groupby("drafter").sum() for name in ("tested", "kept")
    )
    alphas = (kept / tested).reindex(columns=[n - 1 for n in SHOWN])  # none for a router
    frame = alphas.set_axis([f"alpha_{n}" for n in SHOWN], axis=1).assign(tested=tested[0])
    frame.insert(0, "c", pd.Series(record.measurements["cs"]))
    columns = ["k", "range", "tau", "speedup", "low", "high", "without_loops"]
    speeds = speeds[columns].rename(columns={"k": "best_k", "speedup": "predicted"})
    frame = frame.join([speeds, live_speeds(record, temperature, category)], how="outer")
    frame = frame.assign(over_fastest=frame["live"] * baseline(record).share).rename(index=record.measurements["names"])
    return frame.sort_values("predicted", ascending=False)


def show_ranks(record: RunRecord, temperature: float) -> pd.DataFrame:
    """Return `rank_drafters` for display; `*` marks drafters in another engine than the target."""
    return compact(rank_drafters(record, temperature)).rename(index=lambda name: name + _star(record, name))


def _star(record: RunRecord, drafter: str) -> str:
    """Return "*" for a drafter in another engine than the target, else ""."""
    names = record.measurements["names"]
    return "*" if drafter in [names[name] for name in record.measurements["c_across_engines"]] else ""


def live_speeds(record: RunRecord, temperature: float, category: str = "") -> pd.DataFrame:
    """Return one row per drafter: live speed-up over interleaved plain decoding, with its interval.

    Columns: live, live_low, live_high, prompts, identical (greedy texts equal to plain decoding).
    Empty for a published record, which has no generations.
    """
    columns = {
        "speedup": "live",
        "low": "live_low",
        "high": "live_high",
        "n_prompts": "prompts",
        "identical": "identical",
    }
    if not record.generations:
        return pd.DataFrame(columns=[*columns.values()])
    wanted = "k > 0 and n_decoded > 0 and temperature == @temperature" + " and category == @category" * bool(category)
    table = speed_table(live_rows(record).query(wanted), ["drafter"])
    return table.reindex(columns=["drafter", *columns]).set_index("drafter").rename(columns=columns)


def count_loops(record: RunRecord) -> pd.DataFrame:
    """Return the number of plain answers by content and temperature, and how many of them loop."""
    answers = live_rows(record).query("k == 0")
    loops = answers.groupby(["category", "temperature"], sort=False)["loops"]
    return loops.agg(answers="size", looping="sum").reset_index()


def compare_contents(record: RunRecord, temperature: float) -> pd.DataFrame:
    """Return the predicted speed-up of every drafter on every content, at its best K there."""
    names = replay_rows(record)["category"].unique()
    frame = pd.concat([rank_drafters(record, temperature, name).assign(content=name) for name in names])
    columns = ["content", "best_k", "predicted", "low", "high", "live", "prompts"]
    return frame[columns].rename_axis("drafter").reset_index()


def list_trained() -> pd.DataFrame:
    """Return the shipped drafters: name, kind, mb, parameters, text_tokens (training), examples."""
    rows = []
    for name, folder in shipped().items():
        facts = read_json(folder / TRAINING_FILE)
        recipe = facts["recipe"]
        rows.append(
            {
                "name": name,
                "kind": facts["heads"]["kind"],
                "mb": (folder / LAYOUTS[OWN]).stat().st_size / 1e6,
                "parameters": facts["parameters"],
                "text_tokens": facts["text"]["tokens"]["train"],
                "examples": recipe["steps"] * recipe["batch_size"],
            }
        )
    return pd.DataFrame(rows)


# --- where a copy of the target pays as its drafter ---


def draw_region(record: RunRecord) -> go.Figure:
    """Draw the break-even acceptance rate over c, with the drafters as marks.

    Above the line, drafting beats plain decoding in the run's engine, on its machine.
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
    """Draw the predicted speed-up of each drafter by content, from `compare_contents`."""
    named = frame.assign(drafter=frame["drafter"].map(readable))
    return dress(dots(named, x="predicted", y="drafter", by="content"), "drafters")
