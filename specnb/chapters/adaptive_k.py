"""Compare draft-length controllers: replay each on every content and machine, check some live.

The experiment of notebook 02. All replays are greedy. They are exact, except for controllers that
read a draft model's confidence: after a rejected draft token, a replay uses the confidence along
the target's text.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from math import nan
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import plotly.express as px
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from specnb.book.claims import Estimate
from specnb.book.style import COLORS, dots, dress, error_bars, looks, readable
from specnb.book.tables import baseline
from specnb.decode.control import Controller
from specnb.draft.model import ModelDrafter
from specnb.errors import InputError, require_known
from specnb.io import project_dir
from specnb.measure.content import detect
from specnb.measure.cost import THIS_MACHINE, Cost, CostCurve
from specnb.measure.experiment import Progress, check_prompts, first_of_each, prompts_of, silent, turns_of
from specnb.measure.fork import explain_draft
from specnb.measure.intervals import interval, rate
from specnb.measure.machines import known_machines, machines
from specnb.measure.policies import CONTROLLERS
from specnb.measure.recording import Recording, Trace
from specnb.measure.replay import (
    ReplayStep,
    counts_of,
    expected_counts,
    oracle,
    route,
    seconds_of,
    walk_recording,
)
from specnb.measure.sweep import Sweep, plain_text_of
from specnb.params import AdaptiveKParams
from specnb.prompts import Prompt, read_jsonl
from specnb.records import Generation, RunRecord

EXPERIMENT = "02_adaptive_k"
GREEDY = [(0.0, 1.0)]
SWITCHING = "switching conversation"
"""A conversation whose answers switch between prose, code and JSON."""
STREAM = "all of them in turn"
PREFIX = "turns."
"""Prefix of the prompt ids of conversation questions, to identify their recordings."""


class ControllerStudy(NamedTuple):
    """The record of the experiment, and the trace from which its replays are computed."""

    record: RunRecord
    trace: Trace


def controllers(cost: Cost, k_max: int) -> dict[str, Controller]:
    """Return new controllers by name; the cost-aware one uses `cost`."""
    fresh = [make(cost, k_max) for make in CONTROLLERS.values()]
    return {control.name: control for control in fresh}


def run_adaptive(params: AdaptiveKParams, *, progress: Progress = silent) -> ControllerStudy:
    """Generate plainly, follow all drafters, replay all controllers on all machines, run some live.

    If an error ends the run, the generations so far are saved as a failed run.
    """
    for name in params.machines:
        require_known("machine", name, known_machines())
    with Sweep(EXPERIMENT, params, prompts_of(params, params.categories)) as study:
        # 1. Open the models.
        study.open_models(params.drafters)
        texts = list(study.chosen)
        if study.target.vocab.chat_template:
            texts += questions(params.conversations)
        check_prompts(study.target, texts, params.max_new_tokens)
        # 2. Time forward passes.
        study.time_forwards(params.k_max)
        # 3. Generate plainly.
        study.generate_plainly(texts, GREEDY, progress)
        # 4. Follow the drafters along the texts.
        study.follow_drafters(params.k_max, progress)
        # 5. Replay every controller, and the router.
        trace = Trace(tuple(study.recordings))
        study.measured |= {
            "c": study.measured["cs"],
            "replay": list(_replayed(trace, study.costs, params.machines, params.k_max)),
            "routed": list(_routed(trace, study.costs, params.machines, params.k_max)),
        }

        # 6. Run every controller live on the first contents.
        def methods(_temperature: float) -> dict[str, Any]:
            return {
                f"{drafter.name}, {name}": {"drafter": drafter, "k": control}
                for drafter in study.drafters
                for name, control in controllers(study.costs[drafter.name], params.k_max).items()
            }

        contents = params.categories[: params.live_contents]
        live = [prompt for prompt in first_of_each(study.chosen, params.live_prompts) if prompt.category in contents]
        study.run_live(methods, live, GREEDY, progress)
        study.measured["draft_forks"] = list(_draft_forks(study, trace))
        return ControllerStudy(study.record(), trace)


def _draft_forks(study: Sweep, trace: Trace) -> Iterator[dict[str, Any]]:
    """Yield the first draft token that differs from the replay, for live runs of draft models."""
    models = {drafter.name: drafter.model for drafter in study.drafters if isinstance(drafter, ModelDrafter)}
    for live in study.generations:
        if live.drafter in models:
            steps = _walk(trace, live, study.costs[live.drafter])[1]
            if fork := explain_draft(models[live.drafter], live, steps):
                key = {"prompt_id": live.prompt_id, "drafter": live.drafter, "policy": live.controller}
                yield key | fork.model_dump(mode="json")


def _walk(trace: Trace, live: Generation, cost: Cost) -> tuple[Recording, list[ReplayStep]]:
    """Return a live run's recording, and its replayed rounds with the same controller."""
    (recording,) = trace.select(prompt_id=live.prompt_id, drafter=live.drafter).recordings
    return recording, walk_recording(recording, controllers(cost, recording.k_max)[live.controller])


def _switches(recording: Recording) -> bool:
    """Return whether the prompt is a question from a conversation."""
    return recording.prompt_id.startswith(PREFIX)


def _content(recording: Recording) -> str:
    return SWITCHING if _switches(recording) else recording.category


def _kind(recording: Recording) -> str:
    """Return the content of a text; in a conversation, the kind of the answer."""
    if not _switches(recording):
        return recording.category
    prompt, answer = (text.decode("utf-8", "replace") for text in (recording.prompt, b"".join(recording.pieces)))
    return detect(prompt, answer)


def _replayed(trace: Trace, costs: Mapping[str, Cost], names: Sequence[str], k_max: int) -> Iterator[dict[str, Any]]:
    """Yield a row for each machine, drafter, content (including the conversation) and policy.

    The policies are the controllers, the best fixed K and the oracle. `speedup` is over plain
    decoding in the same engine. `seconds` lists the time of each text; the oracle has none.
    """
    for drafter, drafter_cost in costs.items():
        groups = {}
        for recording in trace.select(drafter=drafter).recordings:
            if recording.n_tokens > 1:
                groups.setdefault(_content(recording), []).append(recording)
        counts = {content: expected_counts(group, range(k_max + 1)) for content, group in groups.items()}
        for (machine, cost), (content, group) in product(machines(drafter_cost, names).items(), groups.items()):
            by_k = seconds_of(counts[content], cost)
            best = by_k.sum(axis=0).argmin()
            policies = [(f"best fixed K = {best}", "fixed", by_k[:, best].tolist())]
            for name, control in controllers(cost, k_max).items():  # they learn across texts
                walks = [counts_of(recording, walk_recording(recording, control)) for recording in group]
                policies.append((name, "controller", [walk.seconds(cost) for walk in walks]))
            row = {"machine": machine, "drafter": drafter, "content": content}
            plain_s = by_k[:, 0].sum()
            for name, kind, seconds in policies:
                yield row | {"policy": name, "kind": kind, "seconds": seconds, "speedup": plain_s / sum(seconds)}
            bound_s = sum(oracle(recording, cost, k_max)[1] for recording in group)
            yield row | {"policy": "oracle", "kind": "oracle", "speedup": plain_s / bound_s}


def _routed(trace: Trace, costs: Mapping[str, Cost], names: Sequence[str], k_max: int) -> Iterator[dict[str, Any]]:
    """Yield a row for each machine and content: the router, and the best drafter and K.

    The router processes all texts as one stream and learns across them. `seconds`, `best_s` and
    `plain_s` list the time of each text; the first two include a draft model's prefill. One more
    row is for the whole stream, with a single best drafter and K, chosen in hindsight.
    """
    ks = range(k_max + 1)
    counts = {name: expected_counts(trace.select(drafter=name).recordings, ks) for name in costs}
    for machine in machines(next(iter(costs.values())), names):
        # 1. Route all texts; compute the time of every drafter and K on them.
        here = {name: machines(cost, names)[machine] for name, cost in costs.items()}
        routed = list(route(trace.recordings, here, k_max=k_max))
        fixed = {}
        for name, cost in here.items():
            by_k = seconds_of(counts[name], cost)
            by_k[:, 1:] += [[text.prompt_s[name]] for text in routed]
            fixed |= {f"{name}, K = {k}": by_k[:, k] for k in ks}
        texts = pd.DataFrame(fixed).assign(
            content=[_content(text.recording) for text in routed],
            seconds=[sum(text.round_s) for text in routed],
            arms=[text.arms for text in routed],
        )
        # 2. Compare them on each content, and on the stream.
        for content in (*texts["content"].unique(), STREAM):
            of = texts if content == STREAM else texts[texts["content"] == content]
            plain_s = of[next(iter(fixed))]  # K = 0
            if not plain_s.any():  # nothing to decode
                continue
            best = of[list(fixed)].sum().idxmin()
            yield {
                "machine": machine,
                "content": content,
                "best": best,
                "best_s": of[best].tolist(),
                "seconds": of["seconds"].tolist(),
                "plain_s": plain_s.tolist(),
                "arms": dict(Counter(of["arms"].sum())),
            }


def cost_of(record: RunRecord, drafter: str) -> Cost:
    """Return the costs measured on this machine, which the record's replays use."""
    curve = CostCurve.model_validate(record.measurements["verify_curve"])
    return Cost(curve, record.measurements["c"][drafter])


def questions(limit: int) -> list[Prompt]:
    """Return a prompt for each question of the first `limit` conversations, in order."""
    talks = read_jsonl(project_dir() / "data" / "switching" / "conversations.jsonl")[:limit]
    return [
        prompt.model_copy(update={"id": f"{PREFIX}{talk.id}-{turn}"})
        for talk in talks
        for turn, prompt in enumerate(turns_of(talk), start=1)
    ]


# --- Tables and figures of notebook 02: controllers compared with the best fixed K, and K over time ---

SPEEDUP = "best fixed K: speed-up"
SAME_ENGINE = "best fixed K: speed-up, same engine"


def against_best(record: RunRecord) -> pd.DataFrame:
    """Return the speed of each policy relative to the best fixed K.

    Index machine, drafter, policy; one column per content. The best K is chosen in hindsight for
    each content, and may be 0 (plain decoding). Two more rows hold that K and its speed-up: on this
    machine over the record's `baseline`, and in a third row over plain decoding in the same engine.
    """
    rows = pd.DataFrame(record.measurements["replay"])
    is_best = rows["kind"] == "fixed"
    best = rows[is_best]
    here = best["machine"] == THIS_MACHINE
    # the best fixed K is the first row of each case
    shares = rows["speedup"] / rows.groupby(["machine", "drafter", "content"])["speedup"].transform("first")
    rows = pd.concat(
        [
            best.assign(
                policy="best fixed K", speedup=best["policy"].str.removeprefix("best fixed K = ").astype(float)
            ),
            best.assign(policy=SPEEDUP, speedup=best["speedup"].mask(here, best["speedup"] * baseline(record).share)),
            best[here].assign(policy=SAME_ENGINE),
            rows.assign(speedup=shares)[~is_best],
        ]
    ).sort_index(kind="stable")
    index = ["machine", "drafter", "policy"]
    return rows.pivot_table("speedup", index, "content", sort=False).rename_axis(columns=None)


def routed(record: RunRecord) -> pd.DataFrame:
    """Compare the router with the best drafter at its best K and with plain decoding.

    One row per machine and content; the best is chosen in hindsight. `of the best` and `over plain`
    are ratios of times, with intervals over paired texts; `drafted by` counts rounds by arm.
    """
    rows = []
    for row in record.measurements["routed"]:
        rivals = [zip(row[name], row["seconds"], strict=True) for name in ("best_s", "plain_s")]
        ratios = [f"{Estimate(*interval([*pairs], rate), len(row['seconds'])):.2f}" for pairs in rivals]
        drafted_by = ", ".join(f"{arm or 'none'} {n}" for arm, n in sorted(row["arms"].items()))
        rows.append((row["machine"], row["content"], row["best"], *ratios, drafted_by))
    columns = ["machine", "content", "best", "of the best", "over plain", "drafted by"]
    return pd.DataFrame(rows, columns=columns).set_index(columns[:2])


def stream(study: ControllerStudy, machine: str) -> pd.DataFrame:
    """Return one row per round of the router, for all texts in sequence.

    Columns: token (position), n (committed tokens), steps (time in plain steps), arm, content, and
    speed relative to plain decoding over about the last 24 tokens.
    """
    record, trace = study
    costs = {name: machines(cost_of(record, name))[machine] for name in record.measurements["c"]}
    step_s = next(iter(costs.values())).curve.seconds(1)
    rows = []
    start = 0
    for text in route(trace.recordings, costs, k_max=record.params["k_max"]):
        for step, arm, seconds in zip(text.steps, text.arms, text.round_s, strict=True):
            n = step.n_accepted + 1
            rows.append((start + step.at, n, seconds / step_s, arm or "none", _kind(text.recording)))
        start += text.recording.n_tokens
    frame = pd.DataFrame(rows, columns=["token", "n", "steps", "arm", "content"])
    sums = frame[["n", "steps"]].cumsum()
    first = np.searchsorted(sums["n"], sums["n"] - 24)
    window = sums - sums.shift(fill_value=0).iloc[first].reset_index(drop=True)
    return frame.assign(speed=window["n"] / window["steps"])


def mixed_stream(frame: pd.DataFrame, *, title: str) -> go.Figure:
    """Draw the relative speed along the stream, with the contents and the arm of each round."""
    figure = make_subplots(rows=2, shared_xaxes=True, row_heights=[0.7, 0.3], vertical_spacing=0.06)
    figure.add_scatter(x=frame["token"], y=frame["speed"], mode="lines", line_color=COLORS[0])
    arms_below = px.scatter(frame, x="token", y=frame["arm"].map(readable), **looks("arm", sorted(frame["arm"]), by=()))
    arms_below.update_traces(marker_symbol="line-ns-open", marker_size=8)
    figure.add_traces(arms_below.data, rows=2, cols=1)
    _name_contents(figure, frame, row=1, col=1)
    return dress(figure, "mixed_stream", title=title)


def worst(record: RunRecord) -> pd.DataFrame:
    """Return each policy's worst content, and its speed there relative to the best fixed K.

    One row per machine, drafter and policy. `low` and `high` bound the interval over the texts of
    that content, paired with the same texts at the best K.
    """
    rows = against_best(record).drop(["best fixed K", SPEEDUP, SAME_ENGINE, "oracle"], level="policy")
    contents = rows.drop(columns=SWITCHING, errors="ignore")
    table = pd.DataFrame({"worst": contents.min(axis=1), "low": nan, "high": nan, "content": contents.idxmin(axis=1)})
    seconds = _seconds(record)
    for (machine, drafter, policy), content in table["content"].items():
        pairs = seconds.loc[[(machine, drafter, content)], ["fixed", policy]].explode(["fixed", policy])
        _, *ends = interval(pairs, rate)
        table.loc[(machine, drafter, policy), ["low", "high"]] = ends
    return table.join(rows.filter([SWITCHING]))


def _seconds(record: RunRecord) -> pd.DataFrame:
    """Return lists of seconds per text: index machine, drafter, content; columns policies."""
    rows = pd.DataFrame(record.measurements["replay"])
    rows["policy"] = rows["policy"].where(rows["kind"] == "controller", rows["kind"])
    return rows.pivot(index=["machine", "drafter", "content"], columns="policy", values="seconds")


def draw_worst(table: pd.DataFrame) -> go.Figure:
    """Draw the table `worst`: one mark per machine."""
    rows = table.reset_index()
    rows["policy"] += ", " + rows["drafter"].map(readable)
    rows = rows.sort_values(["drafter", "policy"])
    return dress(dots(rows, x="worst", y="policy", by="machine", **error_bars(rows, "worst", axis="x")), "worst")


def live_check(study: ControllerStudy) -> pd.DataFrame:
    """Compare every live generation with its replay.

    `same` is True if rounds, drafted and accepted are equal. Both are greedy and start with a new
    controller per prompt. With lookup they are equal, unless the live text diverged from plain
    decoding at a near-tie (`same_text` is then False). A draft model whose passes over two tokens
    round differently from its single steps may draft another token at its own near-tie: `near_tie`
    is then True (False: a fault; missing: no draft token differs). A controller that reads a draft
    model's confidence may stop elsewhere after a rejected draft token.
    """
    generations = study.record.generations
    forks = study.record.measurements["draft_forks"]
    near_ties = {(fork["prompt_id"], fork["drafter"], fork["policy"]): fork["near_tie"] for fork in forks}
    rows = []
    for live in (g for g in generations if g.k):
        counts = counts_of(*_walk(study.trace, live, cost_of(study.record, live.drafter)))
        measured = {"rounds": len(live.rounds), "drafted": live.total_draft_tokens, "accepted": live.accepted_tokens}
        rows.append(
            {"content": live.category, "drafter": live.drafter, "policy": live.controller}
            | measured
            | {
                "same": measured.items() <= counts._asdict().items(),
                "same_text": live.token_ids == plain_text_of(generations, live).token_ids,
                "near_tie": near_ties.get((live.prompt_id, live.drafter, live.controller)),
            }
        )
    return pd.DataFrame(rows)


def trajectory(study: ControllerStudy, drafter: str, policies: Sequence[str]) -> pd.DataFrame:
    """Return K for every round of the switching conversation: policy, token (position), k, content.

    Raises InputError if the study has none.
    """
    recordings = [r for r in study.trace.select(drafter=drafter).recordings if _switches(r)]
    if not recordings:
        raise InputError("the study has no switching conversation: run it with conversations of 1 or more")
    fresh = controllers(cost_of(study.record, drafter), recordings[0].k_max)
    rows = []
    start = 0
    for recording in recordings:
        for policy in policies:
            steps = walk_recording(recording, fresh[policy])
            rows += [(policy, start + step.at, step.drafted, _kind(recording)) for step in steps]
        start += recording.n_tokens
    return pd.DataFrame(rows, columns=["policy", "token", "k", "content"])


def k_over_time(frame: pd.DataFrame, *, title: str) -> go.Figure:
    """Draw the draft tokens of each round over the position, with the contents above."""
    figure = px.line(frame, x="token", y="k", line_shape="hv", **looks("policy", frame["policy"], by=["line_dash"]))
    _name_contents(figure, frame[frame["policy"] == frame["policy"].iloc[0]])
    return dress(figure, "k_over_time", title=title)


def _name_contents(figure: go.Figure, rows: pd.DataFrame, **panel: int) -> None:
    """Draw a line where each content begins, labeled above at two alternating heights."""
    for at, start in enumerate(rows[rows["content"] != rows["content"].shift()].itertuples()):
        figure.add_vline(
            start.token,
            line_dash="dot",
            line_color="#bbb",
            line_width=1,
            annotation_text=start.content,
            annotation_font_size=11,
            annotation_y=1 + 0.06 * (at % 2),
            annotation_yref="y domain",
            annotation_yanchor="bottom",
            **panel,
        )
