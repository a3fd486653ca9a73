"""The K sweep, the measurement behind notebook 01: every prompt plainly, every K by replay, some K's live as the check.

Live runs are interleaved with the plain ones. What a replay predicts is measured against them, and so is its time.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from itertools import product
from statistics import fmean
from time import perf_counter
from typing import Any

from specnb.decode.generate import prompt_ids
from specnb.measure.cost import Cost, plain_rates, verify_curve
from specnb.measure.experiment import Experiment, Progress, check_prompts, first_of_each, prompts_of, silent, turns_of
from specnb.measure.follow import follow, require_followed
from specnb.measure.fork import fork_of
from specnb.measure.recording import Recording
from specnb.measure.replay import every_k, fixed_k, sweep_row
from specnb.params import KSweepParams, LeagueParams
from specnb.prompts import prompts
from specnb.records import Generation, RunRecord

EXPERIMENT = "01_k_sweep"
SIDE_BY_SIDE = (1, 2, 4, 5, 8, 10, 20, 40)
"""Tokens of a forward for 1, 2, 4 and 8 sequences: one of each, and five."""
RATES = {"quick": {"n_prompt": 128, "n_gen": 16, "repeats": 1}, "normal": {"repeats": 3}, "full": {"repeats": 5}}


def run(params: KSweepParams, *, progress: Progress = silent, recordings: list[Recording] | None = None) -> RunRecord:
    """Run the sweep; the record holds every generation, the verify cost curve, c, and the forks that were found.

    What was generated before an error or an interrupt is saved, as a record whose status is failed. A `drafter` that
    cannot be loaded ends the run: a sweep without it answers nothing. One of `replayed` is left out, with its reason.
    What the replay follows is added to `recordings`.
    """
    replays = params.rule == "token"  # a lossy rule's text depends on the drafts, the block rule keeps more of them
    with Experiment(EXPERIMENT, params, prompts_of(params, params.categories, params.pack_prompts)) as study:
        target = study.open_target(params.target, **engine_options(params))
        study.drafters.append(study.open_drafter(params.drafter))
        check_prompts(target, study.chosen, params.max_new_tokens)
        if replays:
            require_followed(study.drafters)
            for name in params.replayed:  # as far as they fit the target
                if name != params.drafter:
                    with study.leave_out(name):
                        drafter = study.open_drafter(name)
                        require_followed([*study.drafters, drafter])
                        study.drafters.append(drafter)
        costs = study.time_forwards(max(params.k_max, *params.ks))
        first = costs[study.drafters[0].name]
        study.measured["c"] = first.c
        study.measured["contexts"] = [
            verify_curve(target, widths=SIDE_BY_SIDE, context=n, repeats=3).model_dump(mode="json")
            for n in params.contexts
            if n + SIDE_BY_SIDE[-1] <= target.caps.n_ctx
        ]
        study.measured["plain_rates"] = plain_rates(target, **RATES[params.budget])
        study.generations += _generations(study, progress)  # one by one: what is there when the next fails is saved
        study.measured["forks"] = [  # of greedy generations that differ from their baseline
            {"prompt_id": drafted.prompt_id, "k": drafted.k, **fork.model_dump(mode="json")}
            for drafted in study.generations
            if drafted.k and drafted.temperature == 0
            if (fork := fork_of(target, baseline_of(study.generations, drafted), drafted))
        ]
        if replays:
            ks = sorted({*range(1, params.k_max + 1), *params.ks})
            study.measured["replay"], followed = replay_drafters(study, ks, costs, progress)
            if recordings is not None:
                recordings += followed
            plain, live = ([g for g in study.generations if bool(g.k) is drafted] for drafted in (False, True))
            study.measured["replay"]["live_s"] = fmean(g.wall_s for g in live) * len(plain) * params.k_max
            study.measured["turns"] = list(_turns(study, first))
        return study.record()


def _generations(study: Experiment, progress: Progress) -> Iterator[Generation]:
    """The baseline (k = 0) of each prompt and temperature, and every K on those that run live, the order rotating."""
    params, ks = study.params, deque([0, *study.params.ks])
    methods = {k: {"drafter": study.drafters[0] if k else None, "k": k, "rule": params.rule} for k in ks}
    todo = []
    live = first_of_each(study.chosen, params.live_prompts)
    for prompt in study.chosen:
        todo += product([prompt], ks if prompt in live else [0])
        ks.rotate(-(prompt in live))

    for k in (0, max(params.ks)):  # warm-up, not recorded
        study.decode(study.chosen[0], temperature=params.temperatures[0], max_new_tokens=8, **methods[k])
    for done, (temperature, (prompt, k)) in enumerate(product(params.temperatures, todo)):
        progress(done, len(todo) * len(params.temperatures), f"{prompt.id}, temperature {temperature}, K {k}")
        yield study.decode(prompt, temperature=temperature, **methods[k])


def replay_drafters(
    study: Experiment, ks: Sequence[int], costs: Mapping[str, Cost], progress: Progress
) -> tuple[dict[str, Any], list[Recording]]:
    """Every drafter and K along every plain generation; one that cannot follow is left out, but for the first.

    Returns what is measured, and the recordings. `replay_s` is how long that took for the first drafter. The sweep's
    `live_s` is how long live runs of as many K's take: their mean time times their number. The plain generations are
    counted in neither.
    """
    limits = {"k_max": max(ks), "max_new_tokens": study.params.max_new_tokens}
    plain = [g for g in study.generations if not g.k]
    rows, recordings, replay_s = [], [], 0.0
    for number, drafter in enumerate(study.drafters):
        started, swept, followed = perf_counter(), [], []
        with study.leave_out(drafter.name) if number else nullcontext():
            for done, generation in enumerate(plain):
                progress(number * len(plain) + done, len(study.drafters) * len(plain), f"{drafter.name} replayed")
                (recording,) = follow(study.target, [drafter], generation, **limits)
                followed.append(recording)
                for k, counts in zip(ks, every_k(recording, ks), strict=True):
                    row = sweep_row(recording, k, counts, costs[drafter.name])
                    swept.append(row | {"live_plain_s": generation.decode_s})
            rows += swept
            recordings += followed
        replay_s = replay_s or perf_counter() - started
    return {"rows": rows, "replay_s": replay_s}, recordings


def _turns(study: Experiment, cost: Cost) -> Iterator[dict[str, Any]]:
    """Conversations, cut after each turn of the user, answered greedily and replayed with the largest live K.

    None for a model without a chat template.
    """
    target, n, k = study.target, study.params.max_new_tokens, max(study.params.ks)
    wanted = study.params.conversations if target.vocab.chat_template else 0
    for prompt in prompts("chat", limit=wanted):
        for turn, asked in enumerate(turns_of(prompt), start=1):
            if len(prompt_ids(target, asked)) + n > target.caps.n_ctx:
                break
            generation = study.decode(asked)
            (recording,) = follow(target, study.drafters[:1], generation, k_max=k, max_new_tokens=n)
            row = sweep_row(recording, k, fixed_k(recording, k), cost)
            yield row | {"turn": turn, "prompt_tokens": len(generation.prompt_ids)}


def baseline_of(generations: Sequence[Generation], generation: Generation) -> Generation:
    """The plain generation of the same prompt and temperature."""
    text = generation.prompt_id, generation.temperature
    return next(plain for plain in generations if not plain.k and (plain.prompt_id, plain.temperature) == text)


def engine_options(params: KSweepParams | LeagueParams) -> dict[str, str]:
    """Options of `load`; what is empty is left to the target's name. llama.cpp's weights have their own type."""
    options = {"backend": params.backend, "dtype": params.dtype if params.backend == "hf" else ""}
    return {key: value for key, value in options.items() if value}
