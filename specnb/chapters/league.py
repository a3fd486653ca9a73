"""The league of drafters: replays of every K on the same texts of one target, live at the best K.

The experiment of notebook 07. Its record separates predictions of replays from live results.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import numpy as np
import pandas as pd
import plotly.express as px
import plotly.graph_objects as go

from specnb.book.style import dots, dress, readable, series
from specnb.book.tables import baseline, compact, live_rows, replay_rows, speed_without_loops, summarise_rows
from specnb.draft.base import Drafter
from specnb.io import read_json
from specnb.measure.bench import TERMS, interval, rate, widen
from specnb.measure.cost import Cost, CostCurve
from specnb.measure.experiment import Experiment, Progress, check_prompts, first_of_each, prompts_of, silent
from specnb.measure.ksweep import engine_options, replay_drafters
from specnb.measure.recording import Recording
from specnb.measure.replay import counts_of, fixed_k, route, sweep_row
from specnb.medusa.checkpoint import LAYOUTS, OWN, TRAINING_FILE, shipped
from specnb.params import LeagueParams
from specnb.records import Generation, RunRecord

EXPERIMENT = "07_drafters"


def run_league(params: LeagueParams, *, progress: Progress = silent) -> RunRecord:
    """Generate plainly, record every drafter along the texts, choose the best K, run it live.

    Routers (`auto`) choose K themselves and process the texts of a temperature as one stream.
    Drafters that do not fit the target are in `left_out` with the reason; `names` maps drafters to
    their names in the parameters. `replay` has a row for each drafter, text and K, `alphas` the
    tested and accepted draft tokens by position, `best` the K of the live runs. The live runs are
    generations.
    """
    with Experiment(EXPERIMENT, params, prompts_of(params, params.categories, params.pack_prompts)) as study:
        # 1. Open the models.
        target = study.open_target(params.target, **engine_options(params))
        names = {}
        study.measured |= {"left_out": {}, "names": names}
        routers = []
        for name in params.drafters:
            with study.leave_out(name):
                drafter = study.open_drafter(name)
                (routers if drafter.chooses_k else study.drafters).append(drafter)
                names[drafter.name] = name
        check_prompts(target, study.chosen, params.max_new_tokens)
        # 2. Measure costs, generate plainly, and replay every K.
        costs = study.time_forwards(params.k_max)
        todo = list(product(params.temperatures, study.chosen))
        for done, (temperature, prompt) in enumerate(todo):
            progress(done, len(todo), f"{prompt.id}, temperature {temperature:g}, plain")
            study.generations.append(study.decode(prompt, temperature=temperature))
        ks = range(1, params.k_max + 1)
        study.measured["replay"], recordings = replay_drafters(study, ks, costs, progress)
        deepest = [(recording, fixed_k(recording, recording.k_max)) for recording in recordings]
        study.measured["alphas"] = [r.key | {"tested": n.tested, "kept": n.kept} for r, n in deepest]
        # 3. Select the best K of each drafter, and run it live.
        rows = pd.DataFrame(study.measured["replay"]["rows"])
        seconds = rows.pivot_table("seconds", ["temperature", "drafter"], "k", aggfunc="sum")
        study.measured["best"] = seconds.idxmin(axis=1).rename("k").reset_index().to_dict("records")
        study.measured["replay"]["rows"] += _routed(study, routers, recordings, costs)
        study.generations += _live(study, routers, progress)
        return study.record()


def _routed(
    study: Any, routers: Sequence[Any], recordings: Sequence[Recording], costs: dict[str, Cost]
) -> Iterator[dict[str, Any]]:
    """Yield rows of `replay` for those routers whose arms were all recorded."""
    plain_s = {(plain.prompt_id, plain.temperature): plain.decode_s for plain in study.generations}
    for router in routers:
        arms = {arm.drafter.name: arm.drafter for arm in router.arms}
        if arms.keys() - costs.keys():
            continue
        arm_costs = {name: costs[name] for name in arms}
        expected = {name: arm.expected for name, arm in arms.items()}
        k_max = min(router.chooses_k, study.params.k_max)
        for temperature in study.params.temperatures:
            texts = [recording for recording in recordings if recording.temperature == temperature]
            for text in route(texts, arm_costs, k_max=k_max, expected=expected):
                recording = text.recording
                counts = counts_of(recording, text.steps)
                row = sweep_row(recording, k_max, counts, costs[recording.drafter])
                row["drafter"] = router.name
                row["seconds"] = sum(text.round_s)
                row["live_plain_s"] = plain_s[recording.prompt_id, temperature]
                yield row


def _live(study: Any, routers: Sequence[Drafter], progress: Progress) -> Iterator[Generation]:
    """Generate plainly, with every drafter at its best K, and with `routers`, in rotating order.

    Uses the first prompts of each content.
    """
    drafters = {drafter.name: drafter for drafter in (*study.drafters, *routers)}
    live = first_of_each(study.chosen, study.params.live_prompts)
    todo = [*product(live, study.params.temperatures)]
    for done, (prompt, temperature) in enumerate(todo):
        rows = [row for row in study.measured["best"] if row["temperature"] == temperature]
        best = [(row["drafter"], row["k"]) for row in rows]
        methods = deque([("", 0), *best, *((router.name, None) for router in routers)])
        methods.rotate(-done)
        for name, k in methods:
            progress(done, len(todo), f"{prompt.id}, temperature {temperature:g}, {name or 'plain'}")
            yield study.decode(prompt, temperature=temperature, drafter=drafters.get(name), k=k)


# --- Tables and figures of notebook 07: drafters by content, live and replayed, and where a draft pays ---

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
                "mb": (folder / LAYOUTS[OWN]).stat().st_size / 1e6,
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
