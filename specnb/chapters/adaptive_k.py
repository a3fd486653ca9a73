"""Compare controllers of the draft length: replayed for every content and machine, checked live.

The experiment of notebook 02. All replays are greedy. They are exact, except for controllers that
read a draft model's confidence: after a wrong draft token these get the confidence along the
target's text.
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
from specnb.measure.bench import interval, rate
from specnb.measure.content import detect
from specnb.measure.cost import THIS_MACHINE, Cost, CostCurve
from specnb.measure.experiment import Experiment, Progress, check_prompts, first_of_each, prompts_of, silent, turns_of
from specnb.measure.follow import follow, require_followed
from specnb.measure.fork import explain_draft
from specnb.measure.ksweep import baseline_of
from specnb.measure.machines import known_machines, machines
from specnb.measure.policies import CONTROLLERS
from specnb.measure.recording import Recording, Trace
from specnb.measure.replay import counts_of, every_k, oracle, route, walk_recording
from specnb.params import AdaptiveKParams
from specnb.prompts import Prompt, read_jsonl
from specnb.records import Generation, RunRecord

EXPERIMENT = "02_adaptive_k"
SWITCHING = "switching conversation"
"""A conversation whose answers switch between prose, code and JSON."""
STREAM = "all of them in turn"
PREFIX = "turns."
"""Prefix of the ids of a conversation's questions, which distinguishes their recordings."""


class ControllerStudy(NamedTuple):
    """The record of the experiment, and the trace from which its replays were computed."""

    record: RunRecord
    trace: Trace


def controllers(cost: Cost, k_max: int) -> dict[str, Controller]:
    """Return new controllers by full name; the cost-aware one uses `cost`."""
    fresh = [make(cost, k_max) for make in CONTROLLERS.values()]
    return {control.name: control for control in fresh}


def run_adaptive(params: AdaptiveKParams, *, progress: Progress = silent) -> ControllerStudy:
    """Generate, record every drafter, replay every controller on every machine, run some live.

    If an error occurs, the generations so far are saved as a failed run.
    """
    for name in params.machines:
        require_known("machine", name, known_machines())
    with Experiment(EXPERIMENT, params, prompts_of(params, params.categories)) as study:
        target = study.open_target(params.target)
        study.drafters += map(study.open_drafter, params.drafters)
        require_followed(study.drafters)
        todo = list(study.chosen)
        if target.vocab.chat_template:
            todo += questions(params.conversations)
        check_prompts(target, todo, params.max_new_tokens)
        costs = study.time_forwards(params.k_max)
        study.measured["c"] = study.measured["cs"]
        recordings = []
        for done, prompt in enumerate(todo):
            progress(done, len(todo), f"{prompt.id}: generate and follow")
            generation = study.decode(prompt)
            if switches(generation):  # the answer's kind is the category
                kind = detect(prompt.messages[-1].content, generation.text)
                generation = generation.model_copy(update={"category": kind})
            study.generations.append(generation)
            limits = {"k_max": params.k_max, "max_new_tokens": params.max_new_tokens}
            recordings += follow(target, study.drafters, generation, **limits)
        trace = Trace(tuple(recordings))
        study.measured |= {
            "replay": list(_replayed(trace, costs, params.machines, params.k_max)),
            "routed": list(_routed(trace, costs, params.machines, params.k_max)),
            "draft_forks": [],
        }
        study.generations += _live(study, trace, costs, progress)
        return ControllerStudy(study.record(), trace)


def switches(text: Generation | Recording) -> bool:
    """Return whether the prompt is a question of a conversation."""
    return text.prompt_id.startswith(PREFIX)


def _content(text: Generation | Recording) -> str:
    return SWITCHING if switches(text) else text.category


def _live(study: Experiment, trace: Trace, costs: Mapping[str, Cost], progress: Progress) -> Iterator[Generation]:
    """Generate the first prompts of the first contents with new instances of every controller.

    Adds to `draft_forks` the first token of a draft model that differs from the replay.
    """
    params = study.params
    contents = list(dict.fromkeys(prompt.category for prompt in study.chosen))
    live = first_of_each(study.chosen, params.live_prompts)
    live = [prompt for prompt in live if prompt.category in contents[: params.live_contents]]
    todo = list(product(live, study.drafters))
    for done, (prompt, drafter) in enumerate(todo):
        (recording,) = trace.select(prompt_id=prompt.id, drafter=drafter.name).recordings
        cost = costs[drafter.name]
        for name, control in controllers(cost, params.k_max).items():
            progress(done, len(todo), f"{prompt.id} live: {name}")
            generation = study.decode(prompt, drafter=drafter, k=control)
            yield generation
            if isinstance(drafter, ModelDrafter):
                replayed = walk_recording(recording, controllers(cost, params.k_max)[name])
                if fork := explain_draft(drafter.model, generation, replayed):
                    key = {"prompt_id": prompt.id, "drafter": drafter.name, "policy": name}
                    study.measured["draft_forks"].append(key | fork.model_dump(mode="json"))


def _replayed(trace: Trace, costs: Mapping[str, Cost], names: Sequence[str], k_max: int) -> Iterator[dict[str, Any]]:
    """Yield a row for each machine, drafter, content (one is the conversation) and policy.

    The policies are the controllers, the best fixed K and the oracle. `speedup` is over plain
    decoding in the same engine, `seconds` are those of each text (not for the oracle).
    """
    ks = range(k_max + 1)
    for drafter, drafter_cost in costs.items():
        groups = {}
        for recording in trace.select(drafter=drafter).recordings:
            groups.setdefault(_content(recording), []).append(recording)
        contents = {c: group for c, group in groups.items() if any(r.n_tokens > 1 for r in group)}
        exact = {content: [every_k(r, ks) for r in group] for content, group in contents.items()}
        for machine, cost in machines(drafter_cost, names).items():
            for content, group in contents.items():
                common = {"machine": machine, "drafter": drafter, "content": content}
                plain = sum(r.n_tokens - 1 for r in group) * cost.step_s
                fixed = [[counts[k].seconds(cost) for counts in exact[content]] for k in ks]
                best = min(ks, key=lambda k: sum(fixed[k]))
                rows = [(f"best fixed K = {best}", "fixed", fixed[best])]
                for name, control in controllers(cost, k_max).items():  # they learn across texts
                    walks = [(r, walk_recording(r, control)) for r in group]
                    rows.append((name, "controller", [counts_of(r, w).seconds(cost) for r, w in walks]))
                for name, kind, seconds in rows:
                    row = {"policy": name, "kind": kind, "seconds": seconds}
                    yield common | row | {"speedup": plain / sum(seconds)}
                bound = sum(oracle(r, cost, k_max)[1] for r in group)
                yield common | {"policy": "oracle", "kind": "oracle", "speedup": plain / bound}


def _routed(trace: Trace, costs: Mapping[str, Cost], names: Sequence[str], k_max: int) -> Iterator[dict[str, Any]]:
    """Yield a row for each machine and content: the router, and the best drafter and K.

    The router processes all texts as one stream and learns across them. `seconds`, `plain_s` and
    `best_s` are those of each text, including a draft model's prefill. The whole stream is one more
    row, with a single drafter and K in `best_s`. The best are known in hindsight only.
    """
    ks = range(k_max + 1)
    counts = {name: [every_k(r, ks) for r in trace.select(drafter=name).recordings] for name in costs}
    for machine in machines(next(iter(costs.values())), names):
        # 1. Route all texts; compute the time of every drafter and K on them.
        here = {name: machines(cost, names)[machine] for name, cost in costs.items()}
        step_s = next(iter(here.values())).step_s
        routed = list(route(trace.recordings, here, k_max=k_max))
        fixed = {
            f"{name}, K = {k}": [
                of_text[k].seconds(here[name]) + (text.prompt_s[name] if k else 0.0)
                for of_text, text in zip(of_drafter, routed, strict=True)
            ]
            for name, of_drafter in counts.items()
            for k in ks
        }
        # 2. Compare them on each content, and on the stream.
        contents = [_content(text.recording) for text in routed]
        for content in (*dict.fromkeys(contents), STREAM):
            texts = [i for i, of_text in enumerate(contents) if content in (of_text, STREAM)]
            plain_s = [step_s * (routed[i].recording.n_tokens - 1) for i in texts]
            if not any(plain_s):  # nothing to decode
                continue
            best = min(fixed, key=lambda name: sum(fixed[name][i] for i in texts))
            yield {
                "machine": machine,
                "content": content,
                "best": best,
                "best_s": [fixed[best][i] for i in texts],
                "seconds": [sum(routed[i].round_s) for i in texts],
                "plain_s": plain_s,
                "arms": dict(Counter(arm for i in texts for arm in routed[i].arms)),
            }


def cost_of(record: RunRecord, drafter: str) -> Cost:
    """Return the measured costs of this machine with which the record's replays were computed."""
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
    """Return the speed of each policy relative to the best fixed K: index machine, drafter, policy; columns contents.

    The best K is chosen in hindsight for each content; K = 0 (plain decoding) is included. Two more
    rows hold that K and its speed-up: on this machine over the record's `baseline`, and in a third row
    over plain decoding in the same engine.
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
    """Compare the router, by machine and content, with the best drafter at its best K and with plain decoding.

    Drafter and K are chosen in hindsight for the content. The columns are ratios of times with
    intervals over paired texts; `drafted by` counts the rounds of each arm.
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
    """Return one row per round of the router through all texts in turn: token, arm, content, speed.

    `speed` is relative to plain decoding, over about the last 24 tokens.
    """
    record, trace = study
    costs = {name: machines(cost_of(record, name))[machine] for name in record.measurements["c"]}
    step_s = next(iter(costs.values())).curve.seconds(1)
    rows = []
    start = 0
    for text in route(trace.recordings, costs, k_max=record.params["k_max"]):
        for step, arm, seconds in zip(text.steps, text.arms, text.round_s, strict=True):
            n = step.n_accepted + 1
            rows.append((start + step.at, n, seconds / step_s, arm or "none", text.recording.category))
        start += text.recording.n_tokens
    frame = pd.DataFrame(rows, columns=["token", "n", "steps", "arm", "content"])
    sums = frame[["n", "steps"]].cumsum()
    first = np.searchsorted(sums["n"], sums["n"] - 24)
    window = sums - sums.shift(fill_value=0).iloc[first].reset_index(drop=True)
    return frame.assign(speed=window["n"] / window["steps"])


def mixed_stream(frame: pd.DataFrame, *, title: str) -> go.Figure:
    """Draw the speed over plain decoding along the stream, with the contents, and the arm of every round."""
    figure = make_subplots(rows=2, shared_xaxes=True, row_heights=[0.7, 0.3], vertical_spacing=0.06)
    figure.add_scatter(x=frame["token"], y=frame["speed"], mode="lines", line_color=COLORS[0])
    arms_below = px.scatter(frame, x="token", y=frame["arm"].map(readable), **looks("arm", sorted(frame["arm"]), by=()))
    arms_below.update_traces(marker_symbol="line-ns-open", marker_size=8)
    figure.add_traces(arms_below.data, rows=2, cols=1)
    _name_contents(figure, frame, row=1, col=1)
    return dress(figure, "mixed_stream", title=title)


def worst(record: RunRecord) -> pd.DataFrame:
    """Return the content on which each policy is worst compared with the best fixed K, and that share.

    One row per machine, drafter and policy. `low` and `high` are an interval over the texts of that
    content, paired with the same texts at the best K.
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
    """Index machine, drafter and content, one column per policy: a list of the seconds of each text."""
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
    """Compare every live generation with its replay: `same` is True if rounds, drafted and accepted are equal.

    Both are greedy and start with a fresh controller per prompt, so with lookup they are equal, unless
    the live text diverged from plain decoding at a near-tie (`same_text` is then False). A draft model
    whose passes over two tokens round differently from its single steps may draft another token at a
    near-tie of its own: `near_tie` is then True (False would be a fault). It is missing if no drafted
    token differs. A controller that reads the confidence of a
    draft model may stop at another token after a rejected draft.
    """
    generations = study.record.generations
    forks = study.record.measurements["draft_forks"]
    near_ties = {(fork["prompt_id"], fork["drafter"], fork["policy"]): fork["near_tie"] for fork in forks}
    rows = []
    for g in (g for g in generations if g.k):
        (recording,) = study.trace.select(prompt_id=g.prompt_id, drafter=g.drafter).recordings
        control = controllers(cost_of(study.record, g.drafter), recording.k_max)[g.controller]
        counts = counts_of(recording, walk_recording(recording, control))
        live = {"rounds": len(g.rounds), "drafted": g.total_draft_tokens, "accepted": g.accepted_tokens}
        rows.append(
            {"content": g.category, "drafter": g.drafter, "policy": g.controller}
            | live
            | {
                "same": live.items() <= counts._asdict().items(),
                "same_text": g.token_ids == baseline_of(generations, g).token_ids,
                "near_tie": near_ties.get((g.prompt_id, g.drafter, g.controller)),
            }
        )
    return pd.DataFrame(rows)


def trajectory(study: ControllerStudy, drafter: str, policies: Sequence[str]) -> pd.DataFrame:
    """Return K for every round of the switching conversation: policy, token (position), k, content."""
    recordings = [r for r in study.trace.select(drafter=drafter).recordings if switches(r)]
    if not recordings:
        raise InputError("the study has no switching conversation: run it with conversations of 1 or more")
    fresh = controllers(cost_of(study.record, drafter), recordings[0].k_max)
    rows = []
    start = 0
    for recording in recordings:
        for policy in policies:
            steps = walk_recording(recording, fresh[policy])
            rows += [(policy, start + step.at, step.drafted, recording.category) for step in steps]
        start += recording.n_tokens
    return pd.DataFrame(rows, columns=["policy", "token", "k", "content"])


def k_over_time(frame: pd.DataFrame, *, title: str) -> go.Figure:
    """Draw the drafted tokens of each round over the position in the answers, with the contents above."""
    figure = px.line(frame, x="token", y="k", line_shape="hv", **looks("policy", frame["policy"], by=["line_dash"]))
    _name_contents(figure, frame[frame["policy"] == frame["policy"].iloc[0]])
    return dress(figure, "k_over_time", title=title)


def _name_contents(figure: go.Figure, rows: pd.DataFrame, **panel: int) -> None:
    """Draw a line where each content begins, with its name above; names alternate between two heights."""
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
