"""The league of drafters: all on the same texts of one target, replayed for every K, and live at the best one.

The measurement behind notebook 07. What a replay predicts and what runs live are told apart in the record.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import pandas as pd

from specnb.draft.base import Drafter
from specnb.measure.cost import Cost
from specnb.measure.experiment import Experiment, Progress, check_prompts, first_of_each, prompts_of, silent
from specnb.measure.ksweep import engine_options, replay_drafters
from specnb.measure.recording import Recording
from specnb.measure.replay import counts_of, fixed_k, route, sweep_row
from specnb.params import LeagueParams
from specnb.records import Generation, RunRecord

EXPERIMENT = "07_drafters"


def run_league(params: LeagueParams, *, progress: Progress = silent) -> RunRecord:
    """Generate plainly, follow every drafter along, choose a K for each, run it live; the record of all that.

    Routers (`auto`) choose K themselves, and go through the texts of a temperature as one stream. A drafter that does
    not fit the target is left out, with its reason in `left_out`; `names` says how each drafter was asked for. `replay`
    holds a row a drafter, text and K, `alphas` drafts tested and kept by position, `best` the K of the live runs, which
    are generations.
    """
    with Experiment(EXPERIMENT, params, prompts_of(params, params.categories, params.pack_prompts)) as study:
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
        costs = study.time_forwards(params.k_max)
        todo = list(product(params.temperatures, study.chosen))
        for done, (temperature, prompt) in enumerate(todo):
            progress(done, len(todo), f"{prompt.id}, temperature {temperature:g}, plain")
            study.generations.append(study.decode(prompt, temperature=temperature))
        study.measured["replay"], recordings = replay_drafters(study, range(1, params.k_max + 1), costs, progress)
        deepest = [(recording, fixed_k(recording, recording.k_max)) for recording in recordings]
        study.measured["alphas"] = [r.key | {"tested": n.tested, "kept": n.kept} for r, n in deepest]
        rows = pd.DataFrame(study.measured["replay"]["rows"])
        seconds = rows.pivot_table("seconds", ["temperature", "drafter"], "k", aggfunc="sum")
        study.measured["best"] = seconds.idxmin(axis=1).rename("k").reset_index().to_dict("records")
        study.measured["replay"]["rows"] += _routed(study, routers, recordings, costs)
        study.generations += _live(study, routers, progress)
        return study.record()


def _routed(
    study: Any, routers: Sequence[Any], recordings: Sequence[Recording], costs: dict[str, Cost]
) -> Iterator[dict[str, Any]]:
    """Rows of `replay` for routers, all of whose arms were followed: they go through the texts of a temperature."""
    plain_s = {(plain.prompt_id, plain.temperature): plain.decode_s for plain in study.generations}
    for router in routers:
        arms = {arm.drafter.name: arm.drafter for arm in router.arms}
        if arms.keys() - costs.keys():
            continue
        expected, k_max = {name: arm.expected for name, arm in arms.items()}, min(router.chooses_k, study.params.k_max)
        for temperature in study.params.temperatures:
            of_temperature = [recording for recording in recordings if recording.temperature == temperature]
            here = {name: costs[name] for name in arms}
            for text in route(of_temperature, here, k_max=k_max, expected=expected):
                recording = text.recording
                row = sweep_row(recording, k_max, counts_of(recording, text.steps), costs[recording.drafter])
                yield row | {"drafter": router.name, "seconds": sum(text.round_s),
                             "live_plain_s": plain_s[recording.prompt_id, temperature]}  # fmt: skip


def _live(study: Any, routers: Sequence[Drafter], progress: Progress) -> Iterator[Generation]:
    """The first prompts of each content plainly, with every drafter at its best K and with `routers`, in turn."""
    drafters = {drafter.name: drafter for drafter in (*study.drafters, *routers)}
    live = first_of_each(study.chosen, study.params.live_prompts)
    todo = [*product(live, study.params.temperatures)]
    for done, (prompt, temperature) in enumerate(todo):
        best = [(b["drafter"], b["k"]) for b in study.measured["best"] if b["temperature"] == temperature]
        methods = deque([("", 0), *best, *((router.name, None) for router in routers)])
        methods.rotate(-done)
        for name, k in methods:
            progress(done, len(todo), f"{prompt.id}, temperature {temperature:g}, {name or 'plain'}")
            yield study.decode(prompt, temperature=temperature, drafter=drafters.get(name), k=k)
