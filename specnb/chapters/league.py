"""Compare all drafters on the same texts of one target: replay every K, run the best K live.

The experiment of notebook 07. Its record separates replay predictions from live results.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from specnb.book.style import STYLE, dots, dress, error_bars, readable, series
from specnb.book.tables import baseline, compact, fastest_k, live_rows, replay_rows
from specnb.io import read_json
from specnb.measure.bench import speed_table
from specnb.measure.cost import Cost, CostCurve
from specnb.measure.experiment import Progress, check_prompts, first_of_each, prompts_of, silent
from specnb.measure.intervals import RATIOS
from specnb.measure.recording import Recording
from specnb.measure.sweep import Sweep
from specnb.medusa.checkpoint import TRAINING_FILE, shipped
from specnb.params import LeagueParams
from specnb.records import RunRecord

EXPERIMENT = "07_drafters"
SHOWN = {
    "speedup": "over same engine",
    "over_fastest": "over fastest engine",
    "best_k": "best K",
    "tau": "tokens per pass",
    "alpha_1": "acceptance rate",
    "c": "draft cost",
}
"""Columns of `rank_drafters` that notebook 07 shows, and their names there."""


def run_league(
    params: LeagueParams, *, progress: Progress = silent, recordings: list[Recording] | None = None
) -> RunRecord:
    """Generate plainly, follow every drafter along the texts, replay every K, run the best K live.

    Routers (`auto`) choose K themselves and process the texts of a temperature as one stream. The
    replay's recordings are appended to `recordings`.
    Measurements: `left_out` gives the reason for each drafter that does not fit the target, `names`
    maps drafters to their names in the parameters, `replay` has a row for each drafter, text and K,
    `draft_steps` the draft steps of a round at K = 1 (heads that are computed at once: all), `best`
    the K of the live runs, and `live_prompts` their prompts.
    """
    with Sweep(
        EXPERIMENT, params, prompts_of(params, params.categories, params.pack_prompts)
    ) as study:
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
        live = first_of_each(study.chosen, params.live_prompts)
        seconds = pd.DataFrame(rows).pivot_table(
            "seconds", ["temperature", "drafter"], "k", aggfunc="sum"
        )
        best = seconds.idxmin(axis=1).rename("k").loc[:, list(study.costs)]
        study.measured |= {
            "replay": {"rows": rows},
            "draft_steps": {
                recording.drafter: recording.steps(1) for recording in study.recordings
            },
            "best": best.reset_index().to_dict("records"),
            "live_prompts": [prompt.id for prompt in live],
        }

        # 6. Run every drafter live at its best K, and the routers.
        def methods(temperature: float) -> dict[str, Any]:
            at_best = {
                d.name: {"drafter": d, "k": int(best[temperature, d.name])} for d in study.drafters
            }
            return at_best | {router.name: {"drafter": router} for router in study.routers}

        study.run_live(methods, live, samplings, progress)
        if recordings is not None:
            recordings += study.recordings
        return study.record()


# --- Tables and figures of notebook 07: drafters by content, live and replayed; where they pay ---


def rank_drafters(record: RunRecord, temperature: float) -> pd.DataFrame:
    """Return one row per drafter, the fastest live one first.

    Columns:

    - speedup, low, high: live, over plain decoding in the same engine; the interval is over prompts
    - over_fastest, over_fastest_low, over_fastest_high: the same over the record's baseline
    - predicted, predicted_low, predicted_high: `speedup` by replay of the live prompts
    - best_k: the fastest K in the replay of all prompts, and the range of equally fast ones
    - tau, of the replay
    - c; alpha_1: the acceptance rate at K = 1
    - prompts: number of live prompts; identical: number of live texts equal to plain decoding

    A published record has no generations, so no live columns.
    """
    rows = replay_rows(record).query("n_decoded > 0 and temperature == @temperature")
    best = fastest_k(rows, ["drafter"], record).set_index("drafter")[["k", "range", "tau"]]
    at_best = rows[rows["k"] == rows["drafter"].map(best["k"])]
    ran_live = at_best[at_best["prompt_id"].isin(record.measurements["live_prompts"])]
    predicted = speed_table(ran_live, ["drafter"]).set_index("drafter")[["speedup", "low", "high"]]
    predicted.columns = ["predicted", "predicted_low", "predicted_high"]
    live = baseline(record).over(live_speeds(record, temperature))
    frame = live[[*RATIOS]].join([predicted, best.rename(columns={"k": "best_k"})], how="outer")
    frame["c"] = pd.Series(record.measurements["cs"])
    frame["alpha_1"] = _alpha_1(record, temperature)
    frame = frame.join(live[["prompts", "identical"]]).rename(index=record.measurements["names"])
    return frame.sort_values(["speedup", "predicted"], ascending=False)


def _alpha_1(record: RunRecord, temperature: float) -> pd.Series:
    """Return each drafter's acceptance rate at K = 1; a router has none."""
    rows = replay_rows(record).query("k == 1 and temperature == @temperature")
    sums = rows.groupby("drafter")[["accepted", "drafted"]].sum()
    return sums["accepted"] / sums["drafted"]


def show_ranks(record: RunRecord, temperature: float) -> pd.DataFrame:
    """Return `rank_drafters` for display; `*` marks drafters in another engine than the target."""
    ranks = compact(rank_drafters(record, temperature))[[*SHOWN]]
    return ranks.rename(index=_starred(record), columns=SHOWN)


def _starred(record: RunRecord) -> Callable[[str], str]:
    """Return a function that displays a drafter's name, as in `show_ranks`."""
    names = record.measurements["names"]
    across = [names[name] for name in record.measurements["c_across_engines"]]
    return lambda name: readable(name) + ("*" if name in across else "")


def live_speeds(record: RunRecord, temperature: float) -> pd.DataFrame:
    """Return one row per drafter: live speedup over interleaved plain decoding, with its interval.

    Columns: speedup, low, high, prompts, identical (greedy texts equal to plain decoding). Empty
    for a published record.
    """
    columns = ["speedup", "low", "high", "n_prompts", "identical"]
    table = pd.DataFrame(columns=["drafter", *columns])
    if record.generations:
        live = live_rows(record).query("k > 0 and n_decoded > 0 and temperature == @temperature")
        table = speed_table(live, ["drafter"]).reindex(columns=table.columns)
    return table.set_index("drafter").rename(columns={"n_prompts": "prompts"})


def count_loops(record: RunRecord) -> pd.DataFrame:
    """Return the number of plain answers by content and temperature, and how many of them loop."""
    answers = live_rows(record).query("k == 0")
    loops = answers.groupby(["category", "temperature"], sort=False)["loops"]
    return loops.agg(answers="size", looping="sum").reset_index()


def compare_contents(record: RunRecord, temperature: float) -> pd.DataFrame:
    """Return the predicted speedup of every drafter on every content, at its best K there.

    Drafters are in the order of `rank_drafters`. Columns: drafter, content, best_k, predicted, low,
    high, prompts; all prompts are replayed.
    """
    rows = replay_rows(record).query("n_decoded > 0 and temperature == @temperature")
    frame = fastest_k(rows, ["drafter", "category"], record)
    names = {"category": "content", "k": "best_k", "speedup": "predicted", "n_prompts": "prompts"}
    frame = frame.rename(columns=names).replace({"drafter": record.measurements["names"]})
    ranks = rank_drafters(record, temperature)
    frame = frame.sort_values("drafter", key=ranks.index.get_indexer, kind="stable")
    return frame[["drafter", "content", "best_k", "predicted", "low", "high", "prompts"]]


def list_trained() -> pd.DataFrame:
    """Return the size of each shipped drafter and of the text it was trained on, in millions."""
    rows = {}
    for folder in shipped().values():
        facts = read_json(folder / TRAINING_FILE)
        rows[readable(facts["heads"]["kind"])] = {
            "parameters (M)": facts["parameters"] / 1e6,
            "tokens of training text (M)": facts["text"]["tokens"]["train"] / 1e6,
        }
    return pd.DataFrame(rows).T.round(1)


# --- where a copy of the target pays as its drafter ---


def draw_region(record: RunRecord) -> go.Figure:
    """Draw the break-even acceptance rate over c, with the drafters at K = 1 as labeled marks.

    Above the line, drafting beats plain decoding in the run's engine, on its machine. Heads that
    are computed at once are drawn at the cost of all.
    """
    cost = Cost(CostCurve.model_validate(record.measurements["verify_curve"]))
    c = np.linspace(0, 1, 51)
    needed = [cost._replace(c=step).break_even() for step in c]
    figure = go.Figure().add_scatter(
        x=c, y=needed, mode="lines", name="break-even in this engine", **series(0)
    )
    points = pd.DataFrame({"c": record.measurements["cs"]})
    points["alpha_1"] = _alpha_1(record, min(record.params["temperatures"]))
    points["c"] *= pd.Series(record.measurements["draft_steps"])
    points["name"] = points.index.map(record.measurements["names"]).map(_starred(record))
    # Drafters at the same place share a mark and a label.
    same_place = [points["c"].round(2), points["alpha_1"].round(2)]
    places = points.groupby(same_place).agg({"c": "first", "alpha_1": "first", "name": ", ".join})
    figure.add_scatter(
        x=places["c"],
        y=places["alpha_1"],
        mode="markers",
        name="drafter",
        cliponaxis=False,
        **series(1),
    )
    for place in places.itertuples():
        right = (places["c"] - place.c).between(0, 0.15, inclusive="right")
        above = (places["alpha_1"] - place.alpha_1)[right]
        beside = above[above.abs() < 0.04]
        shift = 0 if beside.empty else (-14 if beside.max() > 0.01 else 14)
        look = STYLE["mark"] | {"yshift": shift}
        figure.add_annotation(x=place.c, y=place.alpha_1, text=place.name, **look)
    pays = points["alpha_1"] > np.interp(points["c"], c, needed)
    title = (
        f"At K = 1, {pays.sum()} of {len(points)} drafters have an acceptance rate "
        "above the break-even<br>over plain decoding in the same engine"
    )
    return dress(figure, "break_even", title_text=title)


def draw_ranks(record: RunRecord, ranks: pd.DataFrame) -> go.Figure:
    """Draw `rank_drafters`: live and predicted speedups with intervals, over both baselines."""
    share = baseline(record).share
    live = ranks.assign(measured="live")
    predicted = ranks[["predicted", "predicted_low", "predicted_high"]]
    predicted = predicted.set_axis(["speedup", "low", "high"], axis=1).assign(measured="predicted")
    rows = pd.concat([live, predicted]).reset_index(names="drafter")
    rows["drafter"] = rows["drafter"].map(_starred(record))
    figure = dots(rows, x="speedup", y="drafter", by="measured", **error_bars(rows, axis="x"))
    first = ranks.iloc[0]
    title = f"Fastest live: {readable(ranks.index[0])}, {first['speedup']:.2f} times plain decoding"
    if share < 1:
        title += f", {first['over_fastest']:.2f} times the fastest plain decoding"
        text = f"plain,<br>{baseline(record).baseline_engine}"
        figure.add_vline(
            1 / share, line=STYLE["line"], annotation_text=text, annotation_position="top right"
        )
    return dress(figure, "drafters", title_text=title)


def draw_contents(record: RunRecord, frame: pd.DataFrame) -> go.Figure:
    """Draw the predicted speedup of each drafter by content, from `compare_contents`."""
    named = frame.assign(drafter=frame["drafter"].map(_starred(record)))
    return dress(dots(named, x="predicted", y="drafter", by="content"), "contents")
