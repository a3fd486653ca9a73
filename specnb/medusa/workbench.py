"""What the study of heads works with: the opened target, its two sets of heads, prompts, and the record."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

import pandas as pd

from specnb.errors import InputError
from specnb.lm.base import LanguageModel
from specnb.lm.load import load
from specnb.measure.experiment import models_of, record_of, saving_failures
from specnb.medusa import bench as heads_bench
from specnb.medusa.accuracy import network
from specnb.medusa.backbone import Backbone
from specnb.medusa.bench import Drafting, HeadsBenchParams, rows_of
from specnb.medusa.checkpoint import LoadReport, load_trained_heads
from specnb.medusa.gates import Checked
from specnb.medusa.heads import Heads
from specnb.params import MedusaParams
from specnb.prompts import Prompt
from specnb.provenance import file_digest
from specnb.records import Generation, RunRecord

EXPERIMENT = "05_medusa"
KINDS = ("medusa", "hydra")


class Workbench:
    """The opened target and its two sets of heads. Use as a context manager, or `close` it."""

    def __init__(
        self, params: MedusaParams, target: LanguageModel, loaded: Mapping[str, tuple[Heads, LoadReport]], work: Path
    ) -> None:
        self.params, self.target, self.work = params, target, work
        self.heads = {kind: heads for kind, (heads, _) in loaded.items()}
        self.reports = {kind: report for kind, (_, report) in loaded.items()}
        self.checked: dict[str, Checked] = {}
        self.drafting: dict[str, Drafting] = {}
        self.measured: dict[str, Any] = {}
        self._started = datetime.now(UTC)
        self._opened = ExitStack()

    @classmethod
    def open(cls, params: MedusaParams) -> Self:
        """Load the target and both checkpoints. Raises what they raise, and InputError for heads of another kind."""
        with ExitStack() as opened:
            target = load(params.target, backend="hf", dtype=params.dtype)
            opened.callback(target.close)
            loaded = {kind: loaded_heads(getattr(params, kind), kind, target) for kind in KINDS}
            work = Path(opened.enter_context(TemporaryDirectory(prefix="specnb-heads-")))
            bench = cls(params, target, loaded, work)
            bench._opened = opened.pop_all()
            return bench

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the target and remove what the short trainings left."""
        self._opened.close()

    @property
    def text(self) -> Path:
        """The folder of the text to practise on. Raises InputError before `write`."""
        folder = self.work / "text"
        if not folder.is_dir():
            raise InputError("there is no text to practise on yet: call write first")
        return folder

    @cached_property
    def bench(self) -> HeadsBenchParams:
        """What `specnb bench medusa` would be asked for the same measurement."""
        p = self.params
        return heads_bench.checked_params(
            target=p.target, categories=tuple(p.categories), prompts_per_category=p.prompts_per_category, num_trials=1,
            warmup_steps=1, max_new_tokens=p.max_new_tokens, seed=p.seed,
        )  # fmt: skip

    @cached_property
    def prompts(self) -> tuple[list[Prompt], list[Prompt]]:
        """Those that are timed, and those that heads are judged on."""
        return heads_bench.chosen_prompts(self.bench)

    def record(self, error: BaseException | None = None) -> RunRecord:
        """The record of what has been measured so far; the same run id at any time."""
        timed, judged = self.prompts
        models = models_of(self.target, [])
        models += [
            {"role": "drafter", "id": getattr(self.params, kind), "sha256": file_digest(self.reports[kind].path)}
            for kind in KINDS
        ]
        return record_of(
            EXPERIMENT, self.params, [*timed, *judged], self.target, models, self._started, self._generations(),
            self.measured, error=error,
        )  # fmt: skip

    def _generations(self) -> list[Generation]:
        """Plain texts once, and the chains of both kinds."""
        plain = next((checked.plain for checked in self.checked.values()), ())
        return [*plain, *(g for checked in self.checked.values() for g in checked.chains)]

    @cached_property
    def backbone(self) -> Backbone:
        return Backbone.of(network(self.target))

    @contextmanager
    def keeping(self, name: str) -> Iterator[Any]:
        """Gives a function that keeps a section's table for the record; on an error the record so far is saved."""

        def keep(frame: pd.DataFrame) -> pd.DataFrame:
            self.measured[name] = rows_of(frame)
            return frame

        with saving_failures(self._generations(), self.record):
            yield keep


def loaded_heads(name_or_path: str, kind: str, target: LanguageModel) -> tuple[Heads, LoadReport]:
    """Trained heads of that kind. Raises InputError for another kind, and what the loader raises."""
    heads, report = load_trained_heads(name_or_path, network(target))
    if heads.config.kind != kind:
        raise InputError(f"{name_or_path!r} are {heads.config.kind} heads, given as {kind}: give each its own")
    return heads, report
