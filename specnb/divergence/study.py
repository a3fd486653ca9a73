"""Notebook 06, section by section, into one record: the case, the gallery of faults, sampling, the score."""

from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from specnb.divergence import gallery as shown
from specnb.divergence.deploy import planted
from specnb.divergence.faults import FAULTS
from specnb.divergence.gallery import Gallery
from specnb.divergence.grading.rows import LAB
from specnb.divergence.grading.sampling import tried
from specnb.divergence.investigate import judge, made_up
from specnb.divergence.investigation import Investigation
from specnb.divergence.pair import Pair, pair
from specnb.divergence.score import Score
from specnb.divergence.script import Script
from specnb.divergence.setups import Lab
from specnb.errors import InputError
from specnb.measure.experiment import Progress, silent
from specnb.params import DivergenceParams
from specnb.paths import project_dir
from specnb.provenance import provenance
from specnb.records import RunRecord
from specnb.store import run_id

EXPERIMENT = "06_divergence"


class Study:
    """The sections. Names of faults are checked here, before anything is run."""

    def __init__(self, params: DivergenceParams) -> None:
        self.params = params
        self.faults = tuple(params.gallery) or tuple(FAULTS)
        for name in self.faults:
            planted(name)
        self._deploy = planted(params.fault, layer=None if params.layer < 0 else params.layer)
        self._started = datetime.now(UTC)
        self._measured: dict[str, Any] = {}

    @cached_property
    def pair(self) -> Pair:
        """The embedded pair."""
        return pair(seed=self.params.seed, dtype=self.params.dtype)

    @cached_property
    def script(self) -> Script:
        """What the draft is fed: tokens of the seed."""
        p = self.params
        return made_up(self.pair.draft, tokens=p.tokens, prompt=p.prompt_tokens, k=p.k, seed=p.seed)

    @cached_property
    def lab(self) -> Lab:
        """One pristine copy and its floors, for all faults."""
        return Lab(self.pair.draft, self.pair.target, script=self.script)

    def investigate(self, progress: Progress = silent) -> Investigation:
        """The fault, as a service under suspicion."""
        found = judge(self.lab, deploy=self._deploy, progress=progress)
        self._measured["investigation"] = found.document()
        return found

    def gallery(self, progress: Progress = silent) -> Gallery:
        """Every fault of the gallery in turn."""
        found = shown.gallery(self.lab, self.faults, progress=progress)
        self._measured["gallery"] = found.table.to_dict("records")
        return found

    def sampling(self, progress: Progress = silent) -> pd.DataFrame:
        """The sampling audit on a toy pair: sound, and with each fault that no comparison of tensors can see."""
        found = tried(seed=self.params.seed, progress=progress)
        self._measured["sampling"] = found.to_dict("records")
        return found

    def score(self) -> Score:
        """The whole grid, as `specnb divergence score --out` wrote it."""
        found = Score.load(published())
        self._measured["score"] = found.document()
        return found

    def record(self) -> RunRecord:
        """The record of what has been measured so far."""
        dumped = self.params.model_dump(mode="json")
        models = [{"role": role, "id": f"divergence pair, seed {self.params.seed}"} for role in ("target", "drafter")]
        return RunRecord(
            run_id=run_id(EXPERIMENT, dumped), experiment=EXPERIMENT, params=dumped,
            provenance=provenance(seeds={"seed": self.params.seed}, models=models), started=self._started,
            ended=datetime.now(UTC), measurements=dict(self._measured),
        )  # fmt: skip


def published() -> Path:
    """Where the score of the whole grid lies in the checkout."""
    return project_dir() / "data" / "divergence" / "score.parquet"


def published_alarms() -> tuple[int, int] | None:
    """Of the score in the checkout: false alarms of the lab, and controls; None where there is none.

    Raises InputError outside a checkout, and for a file that is no score of the lab.
    """
    path = published()
    if not path.exists():
        return None
    tools = Score.load(path).by_tool().set_index("tool")
    if LAB not in tools.index:
        raise InputError(f"{path} has no rows of the lab: make it again (specnb divergence score --out)")
    lab = tools.loc[LAB]
    return int(lab["alarms"]), int(lab["controls"])
