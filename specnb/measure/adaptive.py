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
from specnb.draft.base import Drafter
from specnb.draft.load import load_drafter
from specnb.draft.model import ModelDrafter
from specnb.lm.base import LanguageModel
from specnb.lm.load import load
from specnb.measure.cost import NAMED, WIDTHS, CostCurve, straight_curve, verify_costs
from specnb.measure.experiment import Progress, record_of, silent
from specnb.measure.ksweep import check_prompts
from specnb.measure.recording import Recording, Trace
from specnb.measure.replay import Cost, Step, counts_of, fixed_k, oracle, walk
from specnb.measure.trace import follow
from specnb.params import AdaptiveKParams
from specnb.prompts import Prompt, prompts
from specnb.records import Generation, RunRecord

EXPERIMENT = "02_adaptive_k"
THIS_MACHINE = "this machine"
SESSION = "switching session"


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

    Raises what `specnb.load` and `generate` raise.
    """
    started = datetime.now(UTC)
    chosen = [p for category in params.categories for p in prompts(category, limit=params.prompts_per_category)]
    target = load(params.target)
    drafters: list[Drafter] = []
    try:
        for name in params.drafters:
            drafters.append(load_drafter(name, target, strict=True).drafter)
        check_prompts(target, chosen, params.max_new_tokens)
        costs = _costs(target, drafters, params.k_max)
        made, recordings = [], []
        for at, prompt in enumerate(chosen):
            progress(at, len(chosen), f"{prompt.id}: generate and follow")
            plain = generate(target, prompt, max_new_tokens=params.max_new_tokens, seed=params.seed)
            made.append(plain)
            recordings += follow(
                target, drafters, plain, k_max=params.k_max, max_new_tokens=params.max_new_tokens, astray=True
            )
        trace = Trace(tuple(recordings))
        live = list(_live(params, target, drafters, costs, chosen, progress))
        measurements = {
            "verify_curve": next(iter(costs.values())).curve.model_dump(mode="json"),
            "c": {name: cost.c for name, cost in costs.items()},
            "replay": list(_replayed(trace, costs, params.k_max)),
        }
        models = [{"role": "target", "id": target.name, "sha256": None}]
        record = record_of(EXPERIMENT, params, chosen, target, models, started, [*made, *live], measurements)
        return Study(record, trace)
    finally:
        for drafter in drafters:
            drafter.close()
        target.close()


def _costs(target: LanguageModel, drafters: Sequence[Drafter], k_max: int) -> dict[str, Cost]:
    """One curve of the target for all drafters, and each one's c."""
    widths = sorted({*WIDTHS, k_max + 1})
    curve, _ = verify_costs(target, None, widths=widths, context=128)
    models = {d.name: d.model if isinstance(d, ModelDrafter) else None for d in drafters}
    return {
        name: Cost(curve, verify_costs(target, model, widths=(1,), context=128)[1]) for name, model in models.items()
    }


def _live(
    params: AdaptiveKParams,
    target: LanguageModel,
    drafters: Sequence[Drafter],
    costs: Mapping[str, Cost],
    chosen: Sequence[Prompt],
    progress: Progress,
) -> Iterator[Generation]:
    """The first prompts of each content with every controller, fresh for each prompt."""
    seen: dict[str, int] = {}
    for at, prompt in enumerate(chosen):
        seen[prompt.category] = seen.get(prompt.category, 0) + 1
        if seen[prompt.category] > params.live_prompts:
            continue
        for drafter in drafters:
            for control in controllers(costs[drafter.name], params.k_max).values():
                progress(at, len(chosen), f"{prompt.id} live: {control.name}")
                yield generate(
                    target, prompt, drafter=drafter, k=control, max_new_tokens=params.max_new_tokens, seed=params.seed
                )


def machines(cost: Cost) -> dict[str, Cost]:
    """This machine's costs and the named ones; a drafter without a model costs nothing anywhere."""
    named = {name: Cost(straight_curve(name, at8), c if cost.c else 0.0) for name, (at8, c) in NAMED.items()}
    return {THIS_MACHINE: cost, **named}


def session(recordings: Sequence[Recording]) -> list[Recording]:
    """Recordings of all contents in turn: one of the first content, one of the next, and so on, and over again."""
    by_content: dict[str, list[Recording]] = {}
    for recording in recordings:
        by_content.setdefault(recording.category, []).append(recording)
    rounds = max(map(len, by_content.values()))
    return [group[i] for i in range(rounds) for group in by_content.values() if i < len(group)]


def walk_session(recordings: Sequence[Recording], control: Controller) -> list[tuple[Recording, list[Step]]]:
    """One controller along several recordings, one after the other; it keeps what it learns."""
    return [(recording, walk(recording, control)) for recording in recordings]


def _replayed(trace: Trace, costs: Mapping[str, Cost], k_max: int) -> Iterator[dict[str, Any]]:
    """One row per machine, drafter, content (and the switching session) and policy, fixed K's and the oracle too."""
    for drafter, own in costs.items():
        recordings = [r for r in trace.select(drafter=drafter).recordings if r.n_tokens > 1]
        contents = {
            c: [r for r in recordings if r.category == c] for c in dict.fromkeys(r.category for r in recordings)
        }
        contents[SESSION] = session(recordings)
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
