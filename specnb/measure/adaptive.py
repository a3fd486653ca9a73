"""Controllers of the draft length side by side: replayed on every content and machine, live as the check.

The measurement behind notebook 02. All replays are greedy. They are exact but for controllers that read a draft
model's confidence: after a wrong draft these get the confidence along the target's text.
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
"""One conversation whose answers switch between prose, code and JSON: what a controller has to follow."""
STREAM = "all of them in turn"
PREFIX = "turns."
"""Of the ids of questions, so that their recordings can be told from those of prompts."""


class ControllerStudy(NamedTuple):
    """The record, and the trace that everything replayed in it comes from."""

    record: RunRecord
    trace: Trace


def controllers(cost: Cost, k_max: int) -> dict[str, Controller]:
    """Fresh controllers by their full names, the cost-aware one told what rounds cost."""
    fresh = [make(cost, k_max) for make in CONTROLLERS.values()]
    return {control.name: control for control in fresh}


def run_adaptive(params: AdaptiveKParams, *, progress: Progress = silent) -> ControllerStudy:
    """Generate, follow every drafter, replay every controller on every machine, run some live.

    What was generated before an error is saved as a failed run.
    """
    for name in params.machines:
        require_known("machine", name, known_machines())
    with Experiment(EXPERIMENT, params, prompts_of(params, params.categories)) as study:
        target = study.open_target(params.target)
        study.drafters += map(study.open_drafter, params.drafters)
        require_followed(study.drafters)
        todo = study.chosen + (questions(params.conversations) if target.vocab.chat_template else [])
        check_prompts(target, todo, params.max_new_tokens)
        costs = study.time_forwards(params.k_max)
        study.measured["c"] = study.measured["cs"]
        recordings = []
        for done, prompt in enumerate(todo):
            progress(done, len(todo), f"{prompt.id}: generate and follow")
            generation = study.decode(prompt)
            if switches(generation):  # the category of a question is what its answer turned out to be
                kind = detect(prompt.messages[-1].content, generation.text)
                generation = generation.model_copy(update={"category": kind})
            study.generations.append(generation)
            recordings += follow(
                target, study.drafters, generation, k_max=params.k_max, max_new_tokens=params.max_new_tokens
            )
        trace = Trace(tuple(recordings))
        study.measured |= {
            "replay": list(_replayed(trace, costs, params.machines, params.k_max)),
            "routed": list(_routed(trace, costs, params.machines, params.k_max)),
            "draft_forks": [],
        }
        study.generations += _live(study, trace, costs, progress)
        return ControllerStudy(study.record(), trace)


def switches(text: Generation | Recording) -> bool:
    """Whether it answers a conversation's question."""
    return text.prompt_id.startswith(PREFIX)


def _content(text: Generation | Recording) -> str:
    return SWITCHING if switches(text) else text.category


def _live(study: Experiment, trace: Trace, costs: Mapping[str, Cost], progress: Progress) -> Iterator[Generation]:
    """The first prompts of the first contents with every controller, fresh for each prompt.

    Notes in `draft_forks` the first draft of a draft model that differs from the replay, with margin and noise.
    """
    params = study.params
    contents = list(dict.fromkeys(prompt.category for prompt in study.chosen))[: params.live_contents]
    live = [prompt for prompt in first_of_each(study.chosen, params.live_prompts) if prompt.category in contents]
    for at, (prompt, drafter) in enumerate(product(live, study.drafters)):
        (recording,) = trace.select(prompt_id=prompt.id, drafter=drafter.name).recordings
        cost = costs[drafter.name]
        for name, control in controllers(cost, params.k_max).items():
            progress(at, len(live) * len(study.drafters), f"{prompt.id} live: {name}")
            generation = study.decode(prompt, drafter=drafter, k=control)
            yield generation
            if isinstance(drafter, ModelDrafter):
                replayed = walk_recording(recording, controllers(cost, params.k_max)[name])
                if fork := explain_draft(drafter.model, generation, replayed):
                    key = {"prompt_id": prompt.id, "drafter": drafter.name, "policy": name}
                    study.measured["draft_forks"].append(key | fork.model_dump(mode="json"))


def _replayed(trace: Trace, costs: Mapping[str, Cost], names: Sequence[str], k_max: int) -> Iterator[dict[str, Any]]:
    """One row per machine, drafter, content (the switching conversation is one) and policy, fixed K's and oracle.

    `speedup` is over plain decoding in the same engine.
    `seconds` are those of each text, in order; the oracle has none.
    """
    ks = range(k_max + 1)
    for drafter, drafter_cost in costs.items():
        contents = {}
        for recording in trace.select(drafter=drafter).recordings:
            contents.setdefault(_content(recording), []).append(recording)
        contents = {name: group for name, group in contents.items() if any(r.n_tokens > 1 for r in group)}
        exact = {content: [every_k(r, ks) for r in group] for content, group in contents.items()}
        for machine, cost in machines(drafter_cost, names).items():
            for content, group in contents.items():
                common = {"machine": machine, "drafter": drafter, "content": content}
                plain = sum(r.n_tokens - 1 for r in group) * cost.step_s
                fixed = [[counts[k].seconds(cost) for counts in exact[content]] for k in ks]
                best = min(ks, key=lambda k: sum(fixed[k]))
                timed = {f"best fixed K = {best}": fixed[best]}
                for name, control in controllers(cost, k_max).items():  # each keeps what it learns from text to text
                    timed[name] = [counts_of(r, walk_recording(r, control)).seconds(cost) for r in group]
                for at, (name, seconds) in enumerate(timed.items()):
                    row = {"policy": name, "kind": "controller" if at else "fixed", "seconds": seconds}
                    yield common | row | {"speedup": plain / sum(seconds)}
                bound = sum(oracle(r, cost, k_max)[1] for r in group)
                yield common | {"policy": "oracle", "kind": "oracle", "speedup": plain / bound}


def _routed(trace: Trace, costs: Mapping[str, Cost], names: Sequence[str], k_max: int) -> Iterator[dict[str, Any]]:
    """One row per machine and content: the router over all drafters, and the best of them at its best K in hindsight.

    The router goes through all texts in turn as one stream and keeps what it learns; `seconds`, `plain_s` and `best_s`
    are those of each text, a draft model's own prefill included. The stream as a whole is one more row, whose `best_s`
    are of one drafter and K.
    """
    counts = {name: [every_k(r, range(k_max + 1)) for r in trace.select(drafter=name).recordings] for name in costs}
    for machine in machines(next(iter(costs.values())), names):
        here = {name: machines(cost, names)[machine] for name, cost in costs.items()}
        step_s = next(iter(here.values())).step_s
        routed = list(route(trace.recordings, here, k_max=k_max))
        fixed = {
            f"{name}, K = {k}": [
                of_text[k].seconds(here[name]) + text.prompt_s[name] * bool(k)
                for of_text, text in zip(of_drafter, routed, strict=True)
            ]
            for name, of_drafter in counts.items()
            for k in range(k_max + 1)
        }
        for content in (*dict.fromkeys(_content(text.recording) for text in routed), STREAM):
            places = [i for i, text in enumerate(routed) if content in (_content(text.recording), STREAM)]
            plain_s = [step_s * (routed[i].recording.n_tokens - 1) for i in places]
            if not any(plain_s):  # nothing to decode
                continue
            best = min(fixed, key=lambda name: sum(fixed[name][i] for i in places))
            yield {
                "machine": machine, "content": content, "best": best, "best_s": [fixed[best][i] for i in places],
                "seconds": [sum(routed[i].round_s) for i in places], "plain_s": plain_s,
                "arms": dict(Counter(arm for i in places for arm in routed[i].arms)),
            }  # fmt: skip


def cost_of(record: RunRecord, drafter: str) -> Cost:
    """The measured costs of this machine that a record of this experiment was replayed with."""
    return Cost(CostCurve.model_validate(record.measurements["verify_curve"]), record.measurements["c"][drafter])


def questions(limit: int) -> list[Prompt]:
    """The first `limit` conversations, cut behind each question of the user: one prompt a question, in order."""
    talks = read_jsonl(project_dir() / "data" / "switching" / "conversations.jsonl")[:limit]
    return [
        asked.model_copy(update={"id": f"{PREFIX}{talk.id}-{turn}"})
        for talk in talks
        for turn, asked in enumerate(turns_of(talk), start=1)
    ]
