"""What every experiment does alike: report progress, and put what was made into a record."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from specnb.draft.base import Drafter, model_of
from specnb.errors import InputError, SpecnbError
from specnb.io import file_digest
from specnb.lm.base import LanguageModel
from specnb.lm.load import local_file, parse
from specnb.params import Params
from specnb.prompts import Prompt, digest
from specnb.provenance import provenance
from specnb.records import Generation, RunRecord
from specnb.store import run_id, save

Progress = Callable[[int, int, str], None]
"""Called before each generation with (done, total, what comes next)."""


def silent(_done: int, _total: int, _what: str) -> None:
    """The progress of nobody."""


def models_of(target: LanguageModel, drafters: Sequence[Drafter]) -> list[dict[str, Any]]:
    """Role, name and file digest of what was run; the digest is None for what is not one file on this machine."""
    names = [("target", target.name)] + [("drafter", d.name) for d in drafters if model_of(d)]
    files = [(role, name, _file(name)) for role, name in names]
    return [{"role": role, "id": name, "sha256": file_digest(file) if file else None} for role, name, file in files]


@contextmanager
def saving_failures(
    generations: Sequence[Generation], recorded: Callable[[BaseException], RunRecord]
) -> Iterator[None]:
    """What ends with an error has its `generations` saved as the record of a failed run; the error goes on."""
    try:
        yield
    except BaseException as error:
        if generations:
            try:
                save(recorded(error))
            except SpecnbError as unsaved:
                error.add_note(f"what was generated before is lost: {unsaved}")
        raise


def _file(name: str) -> Path | None:
    try:
        return local_file(parse(name))
    except InputError:  # made in memory: its name opens nothing
        return None


def record_of(
    experiment: str,
    params: Params,
    chosen: Sequence[Prompt],
    target: LanguageModel,
    models: list[dict[str, Any]],
    started: datetime,
    generations: Sequence[Generation],
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
            extra={"target": asdict(target.caps), "vocab_size": target.vocab.size},
        ),
        started=started,
        ended=datetime.now(UTC),
        generations=tuple(generations),
        measurements=measurements,
        status="completed" if error is None else "failed",
        error=None if error is None else f"{type(error).__name__}: {error}",
    )
