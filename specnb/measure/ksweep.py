"""The K sweep: every prompt plainly and with every K, live, interleaved. The measurement behind notebook 01."""

from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any

from specnb.decode.generate import generate
from specnb.draft.base import Drafter
from specnb.draft.load import load_drafter
from specnb.draft.model import ModelDrafter
from specnb.errors import InputError
from specnb.lm.base import LanguageModel
from specnb.lm.load import load, local_file, parse
from specnb.measure.cost import WIDTHS, draft_cost, verify_curve
from specnb.measure.fork import explain_fork
from specnb.params import KSweepParams
from specnb.prompts import Prompt, digest, prompts
from specnb.provenance import file_digest, provenance
from specnb.records import Generation, RunRecord
from specnb.store import run_id

EXPERIMENT = "01_k_sweep"

Progress = Callable[[int, int, str], None]
"""Called before each generation with (done, total, what comes next)."""


def run(params: KSweepParams, *, progress: Progress | None = None) -> RunRecord:
    """Run the sweep; the record holds every generation, the verify cost curve, c, and the forks that were found.

    Raises what `specnb.load` and `generate` raise. A draft model that cannot be loaded ends the run: a sweep
    without its drafter answers nothing.
    """
    started = datetime.now(UTC)
    chosen = [p for category in params.categories for p in prompts(category, limit=params.prompts_per_category)]
    target = load(params.target, **_engine(params))
    drafter: Drafter | None = None
    try:
        drafter = load_drafter(params.drafter, target, strict=True).drafter
        measurements = _costs(target, drafter, max(params.ks))
        made = tuple(_generations(params, target, drafter, chosen, progress or _silent))
        measurements["forks"] = list(_forks(target, made))
    finally:
        if drafter is not None:
            drafter.close()
        target.close()
    dumped = params.model_dump(mode="json")
    return RunRecord(
        run_id=run_id(EXPERIMENT, dumped),
        experiment=EXPERIMENT,
        params=dumped,
        provenance=provenance(
            seeds={"seed": params.seed},
            models=_models(params),
            prompts_digest=digest(chosen),
            extra=_conditions(target),
        ),
        started=started,
        ended=datetime.now(UTC),
        generations=made,
        measurements=measurements,
    )


def _silent(_done: int, _total: int, _what: str) -> None:
    return None


def _generations(
    params: KSweepParams, target: LanguageModel, drafter: Drafter, chosen: list[Prompt], progress: Progress
) -> Iterator[Generation]:
    """Baseline (k = 0) and every K on each prompt and temperature; the order rotates from prompt to prompt."""
    ks = [0, *params.ks]
    total = len(ks) * len(chosen) * len(params.temperatures)
    common = {"max_new_tokens": params.max_new_tokens, "seed": params.seed, "rule": params.rule}
    for k in (0, max(ks)):  # warm-up, not recorded
        generate(target, chosen[0], drafter=drafter if k else None, k=k, **(common | {"max_new_tokens": 8}))
    done = 0
    for temperature in params.temperatures:
        for at, prompt in enumerate(chosen):
            for k in ks[at % len(ks) :] + ks[: at % len(ks)]:
                progress(done, total, f"{prompt.id}, temperature {temperature}, K {k}")
                yield generate(target, prompt, drafter=drafter if k else None, k=k, temperature=temperature, **common)
                done += 1
    progress(total, total, "done")


def _costs(target: LanguageModel, drafter: Drafter, k_max: int) -> dict[str, Any]:
    """The verify cost curve up to k_max + 1 and, for a draft model, c."""
    context = min(256, target.caps.n_ctx // 2)
    widths = sorted({n for n in WIDTHS if n <= k_max} | {1, k_max + 1})
    curve = verify_curve(target, widths=widths, context=context)
    c = 0.0
    if isinstance(drafter, ModelDrafter):
        c = draft_cost(
            curve, verify_curve(drafter.model, widths=(1,), context=min(context, drafter.model.caps.n_ctx // 2))
        )
    return {"verify_curve": curve.model_dump(mode="json"), "c": c}


def baseline_of(made: tuple[Generation, ...], one: Generation) -> Generation:
    """The plain generation of the same prompt and temperature. Raises InputError when the record has none."""
    key = (one.prompt_id, one.temperature)
    found = next((g for g in made if g.k == 0 and (g.prompt_id, g.temperature) == key), None)
    if found is None:
        raise InputError(f"no baseline for prompt {key[0]!r} at temperature {key[1]}")
    return found


def _forks(target: LanguageModel, made: tuple[Generation, ...]) -> Iterator[dict[str, Any]]:
    """Each greedy generation that differs from its baseline, with margin and noise at the first difference."""
    for one in made:
        if one.temperature > 0 or one.k == 0:
            continue
        base = baseline_of(made, one)
        fork = explain_fork(target, one.prompt_ids, base.token_ids, one.token_ids, width=one.k + 1)
        if fork is not None:
            yield {"prompt_id": one.prompt_id, "k": one.k, **fork.model_dump(mode="json")}


def _engine(params: KSweepParams) -> dict[str, str]:
    """The backend as an option of `load`; empty leaves the choice to the target's name."""
    return {"backend": params.backend} if params.backend else {}


def _models(params: KSweepParams) -> list[dict[str, Any]]:
    """Names and file digests of what was run; a transformers model is named by its folder or hub id only."""
    names = {"target": params.target}
    if params.drafter not in ("lookup", "self"):
        names["drafter"] = params.drafter
    files = {role: local_file(parse(name)) for role, name in names.items()}
    return [
        {"role": role, "id": names[role], "sha256": file_digest(file) if file else None} for role, file in files.items()
    ]


def _conditions(target: LanguageModel) -> dict[str, Any]:
    caps = target.caps
    return {"engine": caps.engine, "device": caps.device, "dtype": caps.dtype, "n_ctx": caps.n_ctx}
