"""Compare draft-length controllers: replay each on every content and machine, check some live.

The experiment of notebook 02. All replays are greedy. They are exact, except for controllers that
read a draft model's confidence: after a rejected draft token, a replay uses the confidence along
the target's text.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from math import nan
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import plotly.express as px
import plotly.graph_objects as go

from specnb.book.claims import Estimate, ratio
from specnb.book.style import STYLE, dots, dress, error_bars, looks, name_panels, readable
from specnb.book.tables import baseline, live_rows
from specnb.decode.content import detect
from specnb.decode.control import Controller, FixedK
from specnb.draft.model import ModelDrafter
from specnb.errors import InputError, require_known
from specnb.io import project_dir
from specnb.measure.auto import route_between
from specnb.measure.bench import speed_table
from specnb.measure.cost import THIS_MACHINE, Cost, CostCurve
from specnb.measure.experiment import (
    Progress,
    check_prompts,
    first_of_each,
    prompts_of,
    silent,
    turns_of,
)
from specnb.measure.fork import explain_draft
from specnb.measure.intervals import RATIOS, interval, rate_ratio
from specnb.measure.machines import known_machines, machines
from specnb.measure.policies import FIXED, POLICIES
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
PLAIN, ROUTER = "plain decoding", "router"
PREFIX = "turns."
"""Prefix of the prompt ids of conversation questions, to identify their recordings."""


class ControllerStudy(NamedTuple):
    """The record of the experiment, and the trace from which its replays are computed."""

    record: RunRecord
    trace: Trace


def controllers(cost: Cost, recording: Recording) -> dict[str, Controller]:
    """Return new controllers by name, with the recording's largest K.

    The cost-aware one uses `cost`. Prompt lookup has no confidence: `confidence` is left out.
    """
    fresh = [
        policy.make(cost, recording.k_max)
        for policy in POLICIES.values()
        if policy.option and not (policy.reads_beliefs and recording.support)
    ]
    return {control.name: control for control in fresh}


def run_adaptive(params: AdaptiveKParams, *, progress: Progress = silent) -> ControllerStudy:
    """Generate plainly, follow all drafters, replay all controllers on all machines, run all live.

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

        # 6. Run every controller, the best fixed K > 0 and the router live on the first contents.
        replay = study.measured["replay"]
        ks = {row["drafter"]: row["fixed_k"] for row in replay if row["machine"] == THIS_MACHINE}
        longest = {r.drafter: r for r in sorted(trace.recordings, key=lambda r: r.n_tokens)}
        router = route_between(study.target, study.drafters)

        def methods(_temperature: float) -> dict[str, Any]:
            chosen = {ROUTER: {"drafter": router}}
            for drafter in study.drafters:
                name = drafter.name
                fresh = controllers(study.costs[name], longest[name])
                for policy, k in {FIXED: ks[name], **fresh}.items():
                    chosen[f"{name}, {policy}"] = {"drafter": drafter, "k": k}
            return chosen

        contents = params.categories[: params.live_contents]
        chosen = [prompt for prompt in study.chosen if prompt.category in contents]
        study.run_live(methods, first_of_each(chosen, params.live_prompts), GREEDY, progress)
        study.measured["draft_forks"] = list(_draft_forks(study, trace))
        return ControllerStudy(study.record(), trace)


def _draft_forks(study: Sweep, trace: Trace) -> Iterator[dict[str, Any]]:
    """Yield the first draft token that differs from the replay, for live runs of draft models."""
    models = {
        drafter.name: drafter.model
        for drafter in study.drafters
        if isinstance(drafter, ModelDrafter)
    }
    for live in study.generations:
        if live.drafter in models:
            steps = _walk(trace, live, study.costs[live.drafter])[1]
            if fork := explain_draft(models[live.drafter], live, steps):
                key = {
                    "prompt_id": live.prompt_id,
                    "drafter": live.drafter,
                    "policy": live.controller,
                }
                yield key | fork.model_dump(mode="json")


def _walk(trace: Trace, live: Generation, cost: Cost) -> tuple[Recording, list[ReplayStep]]:
    """Return a live run's recording, and its replayed rounds with the same controller."""
    (recording,) = trace.select(prompt_id=live.prompt_id, drafter=live.drafter).recordings
    control = controllers(cost, recording).get(live.controller) or FixedK(live.k)
    return recording, walk_recording(recording, control)


def _switches(recording: Recording) -> bool:
    """Return whether the prompt is a question from a conversation."""
    return recording.prompt_id.startswith(PREFIX)


def _content(recording: Recording) -> str:
    return SWITCHING if _switches(recording) else recording.category


def _kind(recording: Recording) -> str:
    """Return the content of a text; in a conversation, the kind of the answer."""
    if not _switches(recording):
        return recording.category
    prompt, answer = (
        text.decode("utf-8", "replace") for text in (recording.prompt, b"".join(recording.pieces))
    )
    return detect(prompt, answer)


def _replayed(
    trace: Trace, costs: Mapping[str, Cost], names: Sequence[str], k_max: int
) -> Iterator[dict[str, Any]]:
    """Yield a row for each machine, drafter, content (including the conversation) and policy.

    The policies are the best fixed K of each content; `fixed K`, with the K > 0 that is best for
    all contents together (`fixed_k`); the controllers; and the oracle. `speedup` is over plain
    decoding in the same engine. `seconds` lists the time of each text; the oracle has none.
    """
    for drafter, drafter_cost in costs.items():
        groups = {}
        for recording in trace.select(drafter=drafter).recordings:
            if recording.n_tokens > 1:
                groups.setdefault(_content(recording), []).append(recording)
        counts = {
            content: expected_counts(group, range(k_max + 1)) for content, group in groups.items()
        }
        for machine, cost in machines(drafter_cost, names).items():
            times = {
                content: seconds_of(of_content, cost) for content, of_content in counts.items()
            }
            k = 1 + int(sum(by_k.sum(axis=0) for by_k in times.values())[1:].argmin())
            for content, group in groups.items():
                by_k = times[content]
                best = by_k.sum(axis=0).argmin()
                policies = [
                    (f"best fixed K = {best}", "fixed", by_k[:, best].tolist()),
                    (FIXED, "controller", by_k[:, k].tolist()),
                ]
                for name, control in controllers(cost, group[0]).items():  # they learn across texts
                    walks = [
                        counts_of(recording, walk_recording(recording, control))
                        for recording in group
                    ]
                    policies.append((name, "controller", [walk.seconds(cost) for walk in walks]))
                row = {"machine": machine, "drafter": drafter, "content": content, "fixed_k": k}
                plain_s = by_k[:, 0].sum()
                for name, kind, seconds in policies:
                    yield row | {
                        "policy": name,
                        "kind": kind,
                        "seconds": seconds,
                        "speedup": plain_s / sum(seconds),
                    }
                bound_s = sum(oracle(recording, cost, k_max)[1] for recording in group)
                yield row | {"policy": "oracle", "kind": "oracle", "speedup": plain_s / bound_s}


def _routed(
    trace: Trace, costs: Mapping[str, Cost], names: Sequence[str], k_max: int
) -> Iterator[dict[str, Any]]:
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


# --- Tables and figures of notebook 02: live speeds, regret over the best fixed K, K over time ---

BEST_SPEEDUP = "predicted speedup of the best fixed K"
LABELS = {
    FIXED: "one fixed K",
    "rolling acceptance": "rolling acceptance (field report)",
    "content K": "K by content (field report)",
}


def label(policy: str) -> str:
    """Return the display name of a controller.

    >>> label("confidence >= 0.5, K <= 24"), label("cost-aware")
    ('confidence >= 0.5 (as p_min in llama.cpp)', 'cost-aware')
    """
    if policy.startswith("confidence"):
        return policy.partition(",")[0] + " (as p_min in llama.cpp)"
    return LABELS.get(policy, policy)


def _label_machine(name: str) -> str:
    return name if name == THIS_MACHINE else f"{name} (simulated)"


def controller_speeds(record: RunRecord, check: pd.DataFrame) -> pd.DataFrame:
    """Return the live speeds of plain decoding and every controller, fastest first.

    `check` is `live_check` of the study.

    Columns: controller (for `one fixed K` with this K), drafter, tokens_per_s, speedup and
    over_fastest with intervals over prompts, predicted (the same speedup in a replay; missing for
    the router), acceptance_rate, tau, identical (prompts whose text equals plain decoding),
    n_prompts.
    """
    by = ["drafter", "policy"]
    live = [g for g in record.generations if g.k]
    rows = live_rows(record)  # the plain ones come first
    policies = [
        g.controller or (FIXED if g.drafter in record.measurements["c"] else ROUTER) for g in live
    ]
    rows["policy"] = [PLAIN] * (len(rows) - len(live)) + policies
    rows = rows[rows["prompt_id"].isin([g.prompt_id for g in live])]
    table = baseline(record).over(speed_table(rows, [*by, "k"]))
    replays = check.groupby(by)[["plain_s", "seconds"]].sum()
    table = table.join((replays["plain_s"] / replays["seconds"]).rename("predicted"), on=by)
    ks = table["k"].map(" ({})".format).where(table["policy"] == FIXED, "")
    table["controller"] = table["policy"].map(label) + ks
    table["drafter"] = (
        table["drafter"].map(readable).mask(table["policy"] == ROUTER, "all drafters")
    )
    counts = ["acceptance_rate", "tau", "identical", "n_prompts"]
    table = table.sort_values("speedup", ascending=False, ignore_index=True)
    return table[["controller", "drafter", "tokens_per_s", *RATIOS, "predicted", *counts]]


def over_fixed_k(record: RunRecord) -> dict[str, Estimate]:
    """Return the live speed of `cost-aware` over one fixed K by drafter, paired by prompt."""
    runs = defaultdict(list)
    for g in record.generations:
        runs[g.drafter, g.controller].append((g.n_decoded, g.decode_s))
    speeds = {}
    for name in record.measurements["c"]:
        pairs = np.hstack([runs[name, "cost-aware"], runs[name, ""]])
        speeds[readable(name)] = Estimate(*interval(pairs, rate_ratio), len(pairs))
    return speeds


def draw_live(table: pd.DataFrame) -> go.Figure:
    """Draw over_fastest of `controller_speeds`, and plain decoding in the target's engine."""
    rows = table[table["controller"] != PLAIN]
    best = rows.iloc[0]
    title = (
        f"Live, {best['controller']} ({best['drafter']}) is fastest: "
        f"{best['over_fastest']:.2f} times<br>"
        "the speed of the fastest plain decoding of the same weights"
    )
    figure = dots(
        rows,
        x="over_fastest",
        y="controller",
        by="drafter",
        **error_bars(rows, "over_fastest", "x"),
    )
    figure.add_vline(best["over_fastest"] / best["speedup"], line_dash="dot")
    axis = (
        "live speed (fastest plain decoding of the same weights = 1)<br>"
        "dotted: plain decoding of the same target"
    )
    return dress(figure, "worst", title_text=title, xaxis_title_text=axis)


def against_best(record: RunRecord) -> pd.DataFrame:
    """Return the speed of each policy relative to the best fixed K.

    Index machine, drafter, policy; one column per content. The best K is chosen in hindsight for
    each content, and may be 0 (plain decoding). Two more rows hold that K and its predicted speedup
    over plain decoding in the same engine.
    """
    rows = _replay_rows(record)
    is_best = rows["kind"] == "fixed"
    best = rows[is_best]
    # the best fixed K is the first row of each case
    shares = rows["speedup"] / rows.groupby(["machine", "drafter", "content"])["speedup"].transform(
        "first"
    )
    best_k = best["policy"].str.removeprefix("best fixed K = ").astype(float)
    rows = pd.concat(
        [
            best.assign(policy="best fixed K", speedup=best_k),
            best.assign(policy=BEST_SPEEDUP),
            rows.assign(speedup=shares)[~is_best],
        ]
    ).sort_index(kind="stable")
    index = ["machine", "drafter", "policy"]
    return rows.pivot_table("speedup", index, "content", sort=False)


def _replay_rows(record: RunRecord) -> pd.DataFrame:
    rows = pd.DataFrame(record.measurements["replay"])
    return rows.assign(machine=rows["machine"].map(_label_machine))


def routed(record: RunRecord) -> pd.DataFrame:
    """Compare the router with the best drafter at its best K, and with plain decoding, in a replay.

    One row per machine and content; the best is chosen in hindsight. Both columns are ratios of
    times, with intervals over paired texts; plain decoding is that in the same engine.
    """
    columns = {"over plain decoding": "plain_s", "relative to the best drafter and K": "best_s"}
    rows = []
    for row in record.measurements["routed"]:
        seconds = pd.Series(row["seconds"])
        ratios = {name: f"{ratio(pd.Series(row[of]), seconds):.2f}" for name, of in columns.items()}
        rows.append({"content": row["content"], "machine": _label_machine(row["machine"])} | ratios)
    return pd.DataFrame(rows).set_index(["content", "machine"])


def worst(record: RunRecord) -> pd.DataFrame:
    """Return each policy's worst content, and its speed there relative to the best fixed K.

    One row per machine, drafter and policy, without the switching conversation. `low` and `high`
    bound the interval over the texts of that content, paired with the same texts at the best K.
    """
    share = against_best(record).drop(["best fixed K", BEST_SPEEDUP, "oracle"], level="policy")
    contents = share.drop(columns=SWITCHING, errors="ignore")
    table = pd.DataFrame(
        {"worst": contents.min(axis=1), "low": nan, "high": nan, "content": contents.idxmin(axis=1)}
    )
    rows = _replay_rows(record)
    rows["policy"] = rows["policy"].where(rows["kind"] == "controller", rows["kind"])
    # lists, by text
    seconds = rows.pivot(
        index=["machine", "drafter", "content"], columns="policy", values="seconds"
    )
    for (machine, drafter, policy), content in table["content"].items():
        lists = seconds.loc[[(machine, drafter, content)]]
        _, *ends, _ = ratio(lists["fixed"], lists[policy])
        table.loc[(machine, drafter, policy), ["low", "high"]] = ends
    return table


def draw_worst(table: pd.DataFrame) -> go.Figure:
    """Draw the table `worst`: one panel per machine, one row per controller, the best one first."""
    rows = table.reset_index()
    least = rows.groupby("policy")["worst"].min()
    title = (
        f"Predicted on the worst content: {label(least.idxmax())} has {least.max():.0%} "
        "of the best fixed K's speed<br>"
        f"or more; {label(least.idxmin())} has as little as {least.min():.0%}"
    )
    lookup = rows["drafter"].str.startswith("lookup")
    # On a simulated machine, c is that of a small draft model.
    rows["drafter"] = rows["drafter"].map(readable).where(lookup, "draft model")
    rows["controller"] = rows["policy"].map(label)
    rows = rows.sort_values("drafter", ascending=False, kind="stable")
    bars = error_bars(rows, "worst", "x")
    panels = {"facet_col": "machine", "facet_col_wrap": 2}
    figure = dots(rows, x="worst", y="controller", by="drafter", **panels, **bars)
    order = [label(policy) for policy in least.sort_values(ascending=False).index]
    figure.update_yaxes(categoryorder="array", categoryarray=order)
    figure = dress(figure, "worst_by_machine", title_text=title)
    return figure.update_xaxes(title_text="", row=2)  # counted from the bottom


def live_check(study: ControllerStudy) -> pd.DataFrame:
    """Compare every live generation with its replay, except the router's.

    `seconds` and `plain_s` are predicted, for this run and for plain decoding.
    `same` is True if rounds, drafted and accepted are equal. Both are greedy and start with a new
    controller per prompt. With lookup they are equal, unless the live text diverged from plain
    decoding at a near-tie (`same_text` is then False). A draft model whose passes over two tokens
    round differently from its single steps may draft another token at its own near-tie: `near_tie`
    is then True (False: a fault; missing: no draft token differs). A controller that reads a draft
    model's confidence may stop elsewhere after a rejected draft token.
    """
    generations = study.record.generations
    forks = study.record.measurements["draft_forks"]
    near_ties = {
        (fork["prompt_id"], fork["drafter"], fork["policy"]): fork["near_tie"] for fork in forks
    }
    rows = []
    for live in (g for g in generations if g.drafter in study.record.measurements["c"]):
        cost = cost_of(study.record, live.drafter)
        counts = counts_of(*_walk(study.trace, live, cost))
        measured = {
            "rounds": len(live.rounds),
            "drafted": live.total_draft_tokens,
            "accepted": live.accepted_tokens,
        }
        rows.append(
            {"content": live.category, "drafter": live.drafter, "policy": live.controller or FIXED}
            | measured
            | {
                "seconds": counts.seconds(cost),
                "plain_s": live.n_decoded * cost.step_s,
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
        raise InputError(
            "the study has no switching conversation: run it with conversations of 1 or more"
        )
    fresh = controllers(cost_of(study.record, drafter), recordings[0])
    rows = []
    start = 0
    for recording in recordings:
        for policy in policies:
            steps = walk_recording(recording, fresh[policy])
            rows += [(policy, start + step.at, step.drafted, _kind(recording)) for step in steps]
        start += recording.n_tokens
    return pd.DataFrame(rows, columns=["policy", "token", "k", "content"])


def k_over_time(frame: pd.DataFrame, drafter: str) -> go.Figure:
    """Draw the draft tokens of each round over the position, with the contents above."""
    named = frame.assign(policy=frame["policy"].map(label))
    figure = px.line(
        named,
        x="token",
        y="k",
        facet_col="policy",
        facet_col_wrap=1,
        line_shape="hv",
        **looks("policy", named["policy"], by=()),
    )
    name_panels(figure)
    _name_contents(figure, frame[frame["policy"] == frame["policy"].iloc[0]])
    medians = named.groupby("policy", sort=False)["k"].median()
    title = ", ".join(f"{policy} {k:g}" for policy, k in medians.items())
    title = (
        "Median draft length as the content switches "
        f"({readable(drafter)}, this machine):<br>{title}"
    )
    return dress(figure, "k_over_time", title_text=title)


def _name_contents(figure: go.Figure, rows: pd.DataFrame) -> None:
    """Draw a line where each content begins, labeled above."""
    figure.update_layout(margin_t=130, title_y=0.95)
    for start in rows[rows["content"] != rows["content"].shift()].itertuples():
        figure.add_vline(start.token, **STYLE["content"])
        figure.add_annotation(x=start.token, text=start.content, **STYLE["content_name"])
