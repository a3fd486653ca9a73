"""Compare controllers of the draft length: replayed for every content and machine, checked live.

The experiment of notebook 02. All replays are greedy. They are exact, except for controllers that
read a draft model's confidence: after a wrong draft token these get the confidence along the
target's text.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

from specnb.decode.control import Controller
from specnb.draft.model import ModelDrafter
from specnb.errors import require_known
from specnb.io import project_dir
from specnb.measure.content import detect
from specnb.measure.cost import Cost, CostCurve
from specnb.measure.experiment import Experiment, Progress, check_prompts, first_of_each, prompts_of, silent, turns_of
from specnb.measure.follow import follow, require_followed
from specnb.measure.fork import explain_draft
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
