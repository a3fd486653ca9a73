"""Controllers of the draft length side by side: replayed on every content and machine, live as the check.

The measurement behind notebook 02. All replays are greedy, so they are exact, drafts behind a wrong one included
(`trace.record(astray=True)`).
"""

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

from specnb.decode.control import ConfidenceStop, ContentK, Controller, EntropyStop, RollingAcceptance
from specnb.decode.costaware import CostAware
from specnb.decode.generate import generate
from specnb.draft.base import Drafter, model_of
from specnb.draft.load import load_drafter
from specnb.draft.model import ModelDrafter
from specnb.lm.base import LanguageModel
from specnb.lm.load import load
from specnb.measure.cost import NAMED, WIDTHS, CostCurve, straight_curve, verify_costs
from specnb.measure.experiment import Progress, models_of, record_of, saving_failures, silent
from specnb.measure.fork import explain_draft
from specnb.measure.ksweep import check_prompts
from specnb.measure.recording import Recording, Trace
from specnb.measure.replay import Cost, Step, counts_of, fixed_k, oracle, walk
from specnb.measure.switching import SWITCHING, answered, questions, switches
from specnb.measure.trace import follow
from specnb.params import AdaptiveKParams
from specnb.prompts import Prompt, prompts
from specnb.records import Generation, RunRecord

EXPERIMENT = "02_adaptive_k"
THIS_MACHINE = "this machine"


class Study(NamedTuple):
    """The record, and the trace that everything replayed in it comes from."""

    record: RunRecord
    trace: Trace


def controllers(cost: Cost, k_max: int) -> dict[str, Controller]:
    """Fresh controllers by name, the cost-aware one told what rounds cost."""
    verify_s = [cost.curve.seconds(n) for n in range(k_max + 2)]
    made = [
        RollingAcceptance(),
        ContentK(),
        ConfidenceStop(k_max, 0.5),
        ConfidenceStop(k_max, 0.3, cumulative=True),
        EntropyStop(k_max),
        CostAware(verify_s, cost.c * cost.curve.seconds(1)),
    ]
    return {control.name: control for control in made}


def run(params: AdaptiveKParams, *, progress: Progress = silent) -> Study:
    """Generate, follow every drafter, replay every controller on every machine, run some live.

    Raises what `specnb.load` and `generate` raise; what was generated before is saved as a failed run.
    """
    started = datetime.now(UTC)
    chosen = [p for category in params.categories for p in prompts(category, limit=params.prompts_per_category)]
    target = load(params.target)
    drafters: list[Drafter] = []
    made: list[Generation] = []
    measured: dict[str, Any] = {}

    def recorded(error: BaseException | None = None) -> RunRecord:
        models = models_of(target, drafters)
        return record_of(EXPERIMENT, params, chosen, target, models, started, made, measured, error=error)

    try:
        with saving_failures(made, recorded):
            for name in params.drafters:
                drafters.append(load_drafter(name, target, strict=True).drafter)
            asked = questions(params.conversations) if target.vocab.chat_template else ()
            check_prompts(target, [*chosen, *asked], params.max_new_tokens)
            costs = _costs(target, drafters, params.k_max)
            measured["verify_curve"] = next(iter(costs.values())).curve.model_dump(mode="json")
            measured["c"] = {name: cost.c for name, cost in costs.items()}
            trace = _follow_all(params, target, drafters, chosen, asked, made, progress)
            measured["replay"] = list(_replayed(trace, costs, params.k_max))
            measured["draft_forks"] = []
            for drafter, live in _live(params, target, drafters, costs, chosen, progress):
                made.append(live)
                measured["draft_forks"] += _draft_forks(drafter, live, trace, costs[drafter.name], params.k_max)
            return Study(recorded(), trace)
    finally:
        for drafter in drafters:
            drafter.close()
        target.close()


def _costs(target: LanguageModel, drafters: Sequence[Drafter], k_max: int) -> dict[str, Cost]:
    """One curve of the target for all drafters, and each one's c."""
    widths = sorted({*WIDTHS, k_max + 1})
    curve, _ = verify_costs(target, None, widths=widths, context=128)
    models = {d.name: model_of(d) for d in drafters}
    return {
        name: Cost(curve, verify_costs(target, model, widths=(1,), context=128)[1]) for name, model in models.items()
    }


def _follow_all(
    params: AdaptiveKParams,
    target: LanguageModel,
    drafters: Sequence[Drafter],
    chosen: Sequence[Prompt],
    asked: Sequence[Prompt],
    made: list[Generation],
    progress: Progress,
) -> Trace:
    """Append the plain generation of every prompt and question to `made`; every drafter followed along each."""
    recordings: list[Recording] = []
    common = {"k_max": params.k_max, "max_new_tokens": params.max_new_tokens}
    total = len(chosen) + len(asked)
    for at, prompt in enumerate(chosen):
        progress(at, total, f"{prompt.id}: generate and follow")
        made.append(generate(target, prompt, max_new_tokens=params.max_new_tokens, seed=params.seed))
        recordings += follow(target, drafters, made[-1], astray=True, **common)
    for at, (answer, followed) in enumerate(answered(target, drafters, asked, seed=params.seed, **common), start=1):
        progress(len(chosen) + at, total, f"{answer.prompt_id}: answered and followed")
        made.append(answer)
        recordings += followed
    return Trace(tuple(recordings))


def _live(
    params: AdaptiveKParams,
    target: LanguageModel,
    drafters: Sequence[Drafter],
    costs: Mapping[str, Cost],
    chosen: Sequence[Prompt],
    progress: Progress,
) -> Iterator[tuple[Drafter, Generation]]:
    """The first prompts of each content with every controller, fresh for each prompt."""
    seen: dict[str, int] = {}
    for at, prompt in enumerate(chosen):
        seen[prompt.category] = seen.get(prompt.category, 0) + 1
        if seen[prompt.category] > params.live_prompts:
            continue
        for drafter in drafters:
            for control in controllers(costs[drafter.name], params.k_max).values():
                progress(at, len(chosen), f"{prompt.id} live: {control.name}")
                live = generate(
                    target, prompt, drafter=drafter, k=control, max_new_tokens=params.max_new_tokens, seed=params.seed
                )
                yield drafter, live


def _draft_forks(drafter: Drafter, live: Generation, trace: Trace, cost: Cost, k_max: int) -> Iterator[dict[str, Any]]:
    """The first draft that differs between a live run and its replay, with margin and noise; none for a lookup."""
    if isinstance(drafter, ModelDrafter):
        (recording,) = trace.select(prompt_id=live.prompt_id, drafter=drafter.name).recordings
        steps = walk(recording, controllers(cost, k_max)[live.controller])
        fork = explain_draft(drafter.model, live, [(s.drafted, s.n_accepted) for s in steps])
        if fork is not None:
            key = {"prompt_id": live.prompt_id, "drafter": live.drafter, "policy": live.controller}
            yield key | fork.model_dump(mode="json")


def machines(cost: Cost) -> dict[str, Cost]:
    """This machine's costs and the named ones; a drafter without a model costs nothing anywhere."""
    named = {name: Cost(straight_curve(name, at8), c if cost.c else 0.0) for name, (at8, c) in NAMED.items()}
    return {THIS_MACHINE: cost, **named}


def walk_session(recordings: Sequence[Recording], control: Controller) -> list[tuple[Recording, list[Step]]]:
    """One controller along several recordings, one after the other; it keeps what it learns."""
    return [(recording, walk(recording, control)) for recording in recordings]


def _replayed(trace: Trace, costs: Mapping[str, Cost], k_max: int) -> Iterator[dict[str, Any]]:
    """One row per machine, drafter, content (the switching conversation is one) and policy, fixed K's and oracle."""
    for drafter, own in costs.items():
        recordings = [r for r in trace.select(drafter=drafter).recordings if r.n_tokens > 1]
        contents: dict[str, list[Recording]] = {}
        for recording in recordings:
            contents.setdefault(SWITCHING if switches(recording) else recording.category, []).append(recording)
        exact = {id(r): [fixed_k(r, k) for k in range(k_max + 1)] for r in recordings}
        for machine, cost in machines(own).items():
            for content, group in contents.items():
                common = {"machine": machine, "drafter": drafter, "content": content}
                plain = sum(r.n_tokens - 1 for r in group) * cost.curve.seconds(1)
                fixed = [sum(exact[id(r)][k].seconds(cost) for r in group) for k in range(k_max + 1)]
                best = min(range(k_max + 1), key=fixed.__getitem__)
                yield common | {"policy": f"best fixed K = {best}", "kind": "fixed", "speedup": plain / fixed[best]}
                for name, control in controllers(cost, k_max).items():
                    seconds = sum(counts_of(r, steps).seconds(cost) for r, steps in walk_session(group, control))
                    yield common | {"policy": name, "kind": "controller", "speedup": plain / seconds}
                bound = sum(oracle(r, cost, k_max)[1] for r in group)
                yield common | {"policy": "oracle", "kind": "oracle", "speedup": plain / bound}


def cost_of(record: RunRecord, drafter: str) -> Cost:
    """The measured costs that a record of this experiment was replayed with."""
    return Cost(CostCurve.model_validate(record.measurements["verify_curve"]), record.measurements["c"][drafter])
