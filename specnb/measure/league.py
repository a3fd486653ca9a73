"""The league of drafters: replays of every K on the same texts of one target, live at the best K.

The experiment of notebook 07. Its record separates predictions of replays from live results.
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
