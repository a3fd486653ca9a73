"""The K sweep, the experiment of notebook 01: plain decoding, replays of every K, some K live.

Live runs, interleaved with plain decoding, check the predictions of the replay and its time.
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
"""Tokens of a forward pass for 1, 2, 4 and 8 sequences, with one and with five tokens of each."""
RATES = {
    "quick": {"n_prompt": 128, "n_gen": 16, "repeats": 1},
    "normal": {"repeats": 3},
    "full": {"repeats": 5},
}


def run(params: KSweepParams, *, progress: Progress = silent, recordings: list[Recording] | None = None) -> RunRecord:
    """Run the sweep; the record contains the generations, the verify cost curve, c, and the forks.

    If an error or an interrupt ends the run, the generations so far are saved as a failed run. A
    `drafter` that cannot be loaded is an error; one of `replayed` is left out with its reason. The
    recordings of the replay are added to `recordings`.
    """
    # A lossy rule's text depends on the drafts, and the block rule accepts more draft tokens.
    replays = params.rule == "token"
    with Experiment(EXPERIMENT, params, prompts_of(params, params.categories, params.pack_prompts)) as study:
        target = study.open_target(params.target, **engine_options(params))
        study.drafters.append(study.open_drafter(params.drafter))
        check_prompts(target, study.chosen, params.max_new_tokens)
        if replays:
            require_followed(study.drafters)
            for name in params.replayed:
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
        study.generations += _generations(study, progress)  # one by one, for the record of a failed run
        study.measured["forks"] = [
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
            n_plain = sum(not g.k for g in study.generations)
            live_s = fmean(g.wall_s for g in study.generations if g.k)
            study.measured["replay"]["live_s"] = live_s * n_plain * params.k_max
            study.measured["turns"] = list(_turns(study, first))
        return study.record()


def _generations(study: Experiment, progress: Progress) -> Iterator[Generation]:
    """Generate with k = 0 for each prompt and temperature, and with every K, rotating, for some."""
    params = study.params
    ks = deque([0, *params.ks])
    drafter = study.drafters[0]
    methods = {k: {"drafter": drafter if k else None, "k": k, "rule": params.rule} for k in ks}
    # 1. Rotate the order of K from prompt to prompt.
    todo = []
    live = first_of_each(study.chosen, params.live_prompts)
    for prompt in study.chosen:
        if prompt in live:
            todo += product([prompt], ks)
            ks.rotate(-1)
        else:
            todo.append((prompt, 0))
    # 2. Warm up, without recording.
    warm_up = {"temperature": params.temperatures[0], "max_new_tokens": 8}
    for k in (0, max(params.ks)):
        study.decode(study.chosen[0], **warm_up, **methods[k])
    # 3. Generate.
    steps = list(product(params.temperatures, todo))
    for done, (temperature, (prompt, k)) in enumerate(steps):
        progress(done, len(steps), f"{prompt.id}, temperature {temperature}, K {k}")
        yield study.decode(prompt, temperature=temperature, **methods[k])


def replay_drafters(
    study: Experiment, ks: Sequence[int], costs: Mapping[str, Cost], progress: Progress
) -> tuple[dict[str, Any], list[Recording]]:
    """Replay every drafter and K along every plain generation.

    Drafters that cannot be recorded are left out, except for the first. Returns the measurements
    and the recordings. `replay_s` is the time of this for the first drafter, without the plain
    generations. The sweep compares it with `live_s`, an estimate of live runs with as many K: their
    mean time multiplied by their number.
    """
    limits = {"k_max": max(ks), "max_new_tokens": study.params.max_new_tokens}
    plain = [g for g in study.generations if not g.k]
    total = len(study.drafters) * len(plain)
    rows = []
    recordings = []
    replay_s = 0.0
    for number, drafter in enumerate(study.drafters):
        start_s = perf_counter()
        new_rows = []
        new_recordings = []
        with study.leave_out(drafter.name) if number else nullcontext():
            for done, generation in enumerate(plain):
                progress(number * len(plain) + done, total, f"{drafter.name} replayed")
                (recording,) = follow(study.target, [drafter], generation, **limits)
                new_recordings.append(recording)
                for k, counts in zip(ks, every_k(recording, ks), strict=True):
                    row = sweep_row(recording, k, counts, costs[drafter.name])
                    new_rows.append(row | {"live_plain_s": generation.decode_s})
            rows += new_rows
            recordings += new_recordings
        replay_s = replay_s or perf_counter() - start_s
    return {"rows": rows, "replay_s": replay_s}, recordings


def _turns(study: Experiment, cost: Cost) -> Iterator[dict[str, Any]]:
    """Answer each turn of conversations greedily, and replay the answers with the largest live K.

    Yields nothing for a model without a chat template.
    """
    target = study.target
    n = study.params.max_new_tokens
    k = max(study.params.ks)
    limit = study.params.conversations if target.vocab.chat_template else 0
    for conversation in prompts("chat", limit=limit):
        for turn, prompt in enumerate(turns_of(conversation), start=1):
            if len(prompt_ids(target, prompt)) + n > target.caps.n_ctx:
                break
            generation = study.decode(prompt)
            (recording,) = follow(target, study.drafters[:1], generation, k_max=k, max_new_tokens=n)
            row = sweep_row(recording, k, fixed_k(recording, k), cost)
            yield row | {"turn": turn, "prompt_tokens": len(generation.prompt_ids)}


def baseline_of(generations: Sequence[Generation], generation: Generation) -> Generation:
    """Return the plain generation of the same prompt and temperature."""
    text = (generation.prompt_id, generation.temperature)
    plain = (g for g in generations if not g.k)
    return next(g for g in plain if (g.prompt_id, g.temperature) == text)


def engine_options(params: KSweepParams | LeagueParams) -> dict[str, str]:
    """Return options for `load`, without the empty ones; llama.cpp takes no dtype."""
    options = {"backend": params.backend, "dtype": params.dtype if params.backend == "hf" else ""}
    return {key: value for key, value in options.items() if value}
