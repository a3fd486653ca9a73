"""The K sweep of notebook 01: replay every K of every drafter, run some K live."""

from collections.abc import Iterator

from specnb.decode.generate import prompt_ids
from specnb.io import JsonObject
from specnb.measure.cost import verify_curve
from specnb.measure.experiment import (
    Progress,
    check_prompts,
    first_of_each,
    prompts_of,
    silent,
    turns_of,
)
from specnb.measure.follow import follow
from specnb.measure.fork import fork_of
from specnb.measure.recording import Recording
from specnb.measure.replay import fixed_k, sweep_row
from specnb.measure.sweep import Sweep, plain_text_of
from specnb.params import KSweepParams
from specnb.prompts import prompts
from specnb.records import RunRecord

EXPERIMENT = "01_k_sweep"
SIDE_BY_SIDE = (1, 2, 4, 5, 8, 10, 20, 40)
"""Widths of passes over 1, 2, 4 and 8 sequences, with one or five tokens per sequence."""


def run(
    params: KSweepParams, *, progress: Progress = silent, recordings: list[Recording] | None = None
) -> RunRecord:
    """Run the sweep; the record contains the generations, the verify cost curve, c, and the forks.

    If an error or an interrupt ends the run, the generations so far are saved as a failed run. A
    `drafter` that cannot be loaded is an error; one of `replayed` is left out, with the reason. The
    replay's recordings are appended to `recordings`.
    """
    # The text of a lossy rule depends on the drafts; the block rule accepts more draft tokens.
    replays = params.rule == "token"
    others = [name for name in params.replayed if replays and name != params.drafter]
    with Sweep(
        EXPERIMENT, params, prompts_of(params, params.categories, params.pack_prompts)
    ) as study:
        # 1. Open the models.
        study.open_models([params.drafter], others)
        check_prompts(study.target, study.chosen, params.max_new_tokens)
        # 2. Time forward passes.
        k_max = max(params.k_max, *params.ks)
        study.time_forwards(k_max)
        study.measured |= _more_costs(study)
        # 3. Generate plainly.
        samplings = [(temperature, 1.0) for temperature in params.temperatures]
        study.generate_plainly(study.chosen, samplings, progress)
        if replays:
            # 4. Follow the drafters along the texts.
            study.follow_drafters(k_max, progress)
            # 5. Replay every K.
            rows = study.replay_every_k(sorted({*range(1, params.k_max + 1), *params.ks}))
            study.measured["turns"] = list(_turns(study))
        # 6. Run some K of the first drafter live.
        drafter = study.drafters[0]
        methods = {f"K = {k}": {"drafter": drafter, "k": k, "rule": params.rule} for k in params.ks}
        live = first_of_each(study.chosen, params.live_prompts)
        study.run_live(lambda _temperature: methods, live, samplings, progress)
        study.measured["forks"] = list(_forks(study))
        if replays:
            study.measured["replay"] = {"rows": rows}
        if recordings is not None:
            recordings += study.recordings
        return study.record()


def _more_costs(study: Sweep) -> JsonObject:
    """Return c of the live drafter, and T(n) for several sequences at each context."""
    target = study.target
    contexts = [n for n in study.params.contexts if n + SIDE_BY_SIDE[-1] <= target.caps.n_ctx]
    curves = [verify_curve(target, widths=SIDE_BY_SIDE, context=n, repeats=3) for n in contexts]
    return {
        "c": study.costs[study.drafters[0].name].c,
        "contexts": [curve.model_dump(mode="json") for curve in curves],
    }


def _forks(study: Sweep) -> Iterator[JsonObject]:
    """Yield where greedy live texts diverge from the plain texts."""
    for live in study.generations:
        if live.k and not live.temperature:
            fork = fork_of(study.target, plain_text_of(study.generations, live), live)
            if fork:
                yield {"prompt_id": live.prompt_id, "k": live.k, **fork.model_dump(mode="json")}


def _turns(study: Sweep) -> Iterator[JsonObject]:
    """Generate each turn of the conversations greedily, and replay it with the largest live K.

    A conversation ends at the first turn that exceeds the context. Yields nothing for a model
    without a chat template.
    """
    target = study.target
    drafter = study.drafters[0]
    n = study.params.max_new_tokens
    k = max(study.params.ks)
    limit = study.params.conversations if target.vocab.chat_template else 0
    for conversation in prompts("chat", limit=limit):
        for turn, prompt in enumerate(turns_of(conversation), start=1):
            if len(prompt_ids(target, prompt)) + n > target.caps.n_ctx:
                break
            text = study.decode(prompt)
            (recording,) = follow(target, [drafter], text, k_max=k, max_new_tokens=n)
            row = sweep_row(recording, k, fixed_k(recording, k), study.costs[drafter.name])
            yield row | {"turn": turn}
