"""What every experiment does alike: report progress, and put what was made into a record."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from specnb.lm.base import LanguageModel
from specnb.params import Params
from specnb.prompts import Prompt, digest
from specnb.provenance import provenance
from specnb.records import Generation, RunRecord
from specnb.store import run_id

Progress = Callable[[int, int, str], None]
"""Called before each generation with (done, total, what comes next)."""


def silent(_done: int, _total: int, _what: str) -> None:
    """The progress of nobody."""


def record_of(
    experiment: str,
    params: Params,
    chosen: Sequence[Prompt],
    target: LanguageModel,
    models: list[dict[str, Any]],
    started: datetime,
    made: Sequence[Generation],
    measurements: dict[str, Any],
    *,
    error: BaseException | None = None,
) -> RunRecord:
    """The record of a run that ends now; `models` say role and id of what was run, `error` is what ended it."""
    dumped = params.model_dump(mode="json")
    return RunRecord(
        run_id=run_id(experiment, dumped),
        experiment=experiment,
        params=dumped,
        provenance=provenance(
            seeds={"seed": params.seed},
            models=models,
            prompts_digest=digest(chosen),
            extra={"target": asdict(target.caps)},
        ),
        started=started,
        ended=datetime.now(UTC),
        generations=tuple(made),
        measurements=measurements,
        status="completed" if error is None else "failed",
        error=None if error is None else f"{type(error).__name__}: {error}",
    )
