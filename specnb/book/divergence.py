"""Notebook 06, section by section: the case, why statistics mislead, the gallery of faults."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from specnb.book import divergence_figures as figures
from specnb.divergence.deploy import Recorded, planted
from specnb.divergence.errors import named
from specnb.divergence.faults import FAULTS
from specnb.divergence.investigate import Investigation, judge, made_up
from specnb.divergence.pair import Pair, pair
from specnb.divergence.planting import Fault
from specnb.divergence.script import Script
from specnb.divergence.setups import Lab, Outcome
from specnb.divergence.trace import Key
from specnb.errors import InputError
from specnb.io import digest
from specnb.measure.experiment import Progress, silent
from specnb.params import DivergenceParams
from specnb.provenance import provenance
from specnb.records import RunRecord
from specnb.store import run_id

EXPERIMENT = "06_divergence"
NOTHING = "-"
"""Shown where no module is named, and for what a tool does not tell."""
CASE = {"S0": "alone", "S1": "beside itself", "S3": "beside the larger target"}
"""The set-ups of the case, and how its notes call them."""
SHORT = 8
"""Digits of a digest that a table shows."""
GALLERY = ("S0", "S1", "S2", "S3")
"""Set-ups that tell the planted faults apart."""


class Gallery(NamedTuple):
    """`table`: one row for each fault; `strips`: faults by modules, the worst of all tokens, log10 of error over floor.

    `named`: of each fault the module that was named first.
    """

    table: pd.DataFrame
    strips: pd.DataFrame
    named: Mapping[str, str]


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
        investigation = judge(self.lab, deploy=self._deploy, progress=progress)
        self._measured["investigation"] = investigation.document()
        return investigation

    def gallery(self, progress: Progress = silent) -> Gallery:
        """Every fault of the gallery in turn."""
        gallery = gallery_of(self.lab, self.faults, progress)
        self._measured["gallery"] = gallery.table.to_dict("records")
        return gallery

    def record(self) -> RunRecord:
        """The record of what has been measured so far."""
        dumped = self.params.model_dump(mode="json")
        models = [{"role": role, "id": f"divergence pair, seed {self.params.seed}"} for role in ("target", "drafter")]
        return RunRecord(
            run_id=run_id(EXPERIMENT, dumped), experiment=EXPERIMENT, params=dumped,
            provenance=provenance(seeds={"seed": self.params.seed}, models=models), started=self._started,
            ended=datetime.now(UTC), measurements=dict(self._measured),
        )  # fmt: skip


# --- the case: what people compared by hand ---------------------------------------------------------------------------


def case_table(investigation: Investigation) -> pd.DataFrame:
    """The table of the case's notes, a column for each set-up: what people compared by hand, over the prompt.

    Key inputs are what the key projection gives to attention, attention outputs what the output projection is given.
    The digests are of all parameters of a bank of experts: as they were loaded, and as its operations read them.
    """
    outcomes = investigation.case.outcomes
    banks = [path for path, _ in investigation.case.parts.banks]
    attentions = [path for path, _ in investigation.case.parts.attentions]
    columns = {}
    for name, says in CASE.items():
        outcome, column = outcomes[name], {}
        for layer in (0, 1):
            keys = _statistics(outcome, f"{attentions[layer]}.k_proj", "out")
            attention = _statistics(outcome, f"{attentions[layer]}.o_proj", "in")
            column |= {f"layer {layer} key input mean": keys["mean"], f"layer {layer} key input std": keys["std"],
                       f"layer {layer} attention output std": attention["std"]}  # fmt: skip
            column |= {f"layer {layer} MoE output std": _statistics(outcome, banks[layer], "out")["std"]}
            column |= _digests(outcome, investigation.case.meant, banks[layer], f"layer {layer} MoE weights")
        prompt = len(outcome.script.feeds[0].ids)
        column["first draft token"] = int(outcome.logits[0][prompt - 1].argmax())
        columns[f"{name} {says}"] = column
    table = pd.DataFrame(columns, dtype=object)
    return table.map(lambda value: f"{value:.4f}" if isinstance(value, float) else str(value))


def _statistics(outcome: Outcome, module: str, role: str) -> pd.Series:
    return outcome.trace.rows(module=module, role=role, step=0).iloc[0]


def _digests(outcome: Outcome, meant: Mapping[str, str], bank: str, says: str) -> dict[str, str]:
    """One digest of all parameters of a bank as they were loaded, and of what its operations read."""
    params = outcome.trace.params
    read = params[params["module"] == bank].drop_duplicates(["owner", "owner_path"])
    leaves = tuple(f"{bank}.{path.rpartition('.')[2]}" for path in read["owner_path"])
    loaded = {path: digest for path, digest in meant.items() if path.endswith(leaves)}
    owners = " ".join(sorted({*read["owner"]})) or NOTHING
    return {f"{says}, as loaded": _joined(loaded.values()), f"{says}, as read": _joined(read["digest"]),
            f"{says}, owner of what is read": owners}  # fmt: skip


def _joined(digests: Sequence[str]) -> str:
    return digest(sorted(digests))[:SHORT]


def misleading(investigation: Investigation, sound: str = "S0") -> pd.DataFrame:
    """Of each module's output in a sound and in the first wrong set-up, over the whole text: what each number says.

    Columns: module, mean_ratio, std_ratio, cosine, relative_l2, all of the outputs as they are, errors of earlier
    modules included; `by_itself`, the largest error that the module itself made; `ratio` of that to its floor.
    Raises InputError where no set-up is wrong.
    """
    outcomes, bad = investigation.case.outcomes, investigation.case.bad
    if bad is None:
        raise InputError(f"none of the set-ups {', '.join(outcomes)} is wrong: there is nothing to compare")
    sound_run, wrong_run = outcomes[sound].along, bad.along
    errors = investigation.errors(bad.setup.id)
    outputs = errors[errors["role"] == "out"].groupby("at", sort=False)
    rows = []
    for module, error, ratio in outputs[["error", "ratio"]].max().itertuples():
        key = Key(module, 0, "out", "out")
        if key in sound_run.values and sound_run.values[key].dtype.kind == "f":
            rows.append((module, *_compared(sound_run.values[key], wrong_run.values[key]), error, ratio))
    columns = ["module", "mean_ratio", "std_ratio", "cosine", "relative_l2", "by_itself", "ratio"]
    return pd.DataFrame(rows, columns=columns)


def _compared(a: np.ndarray, b: np.ndarray) -> tuple[float, float, float, float]:
    a, b = a.astype(float).ravel(), b.astype(float).ravel()
    length = np.linalg.norm(a)
    with np.errstate(divide="ignore", invalid="ignore"):  # outputs that are all zero
        cosine = np.minimum(1.0, a @ b / (length * np.linalg.norm(b)))  # rounding may pass 1; NaN stays
        return b.mean() / a.mean(), b.std() / a.std(), float(cosine), float(np.linalg.norm(b - a) / length)


def setups_figure(investigation: Investigation) -> go.Figure:
    """The matrix of set-ups: a strip for each that was run, modules in order of time; named first is framed."""
    outcomes = investigation.case.outcomes
    names = {name: f"{name} {item.setup.says}" for name, item in outcomes.items()}
    strips = {names[name]: investigation.heat(name).max(axis=1) for name in outcomes}
    order = next(iter(strips.values())).index
    marks = {names[name]: item.wrong["module"].iloc[0] for name, item in outcomes.items() if not item.clean}
    title = "Beside whom the draft goes wrong, and where"
    return figures.strips(pd.DataFrame(strips, index=order).T, title=title, marks=marks)


# --- the gallery of planted faults ------------------------------------------------------------------------------------


def gallery_of(lab: Lab, faults: Sequence[str], progress: Progress = silent) -> Gallery:
    """Plant one fault after the other and investigate each as a service of its own.

    Columns of the table: fault, planted (what it is), verdict, module, module_right, token, cause, cause_right,
    seconds. A fault that is none (`split_k`, `uniform_offset`) is right where nothing is named. Raises InputError for a
    fault that does not fit the lab's models, and one that waits for something that this script does not do.
    """
    rows, strips, framed = [], {}, {}
    for done, name in enumerate(faults):
        progress(done, len(faults), name)
        deploy = Recorded(name)
        investigation = judge(lab, deploy=deploy, setups=lab.fitting(GALLERY))
        rows.append(_gallery_row(name, deploy.acted(), investigation))
        strips[name] = investigation.heat().max(axis=1)
        if investigation.first is not None:
            framed[name] = investigation.first.module
    order = list(dict.fromkeys(module for strip in strips.values() for module in strip.index))
    return Gallery(pd.DataFrame(rows), pd.DataFrame(strips, index=order).T, framed)


def _gallery_row(name: str, fault: Fault, investigation: Investigation) -> dict[str, object]:
    first = investigation.first
    sound = fault.first is None
    module = None if first is None else first.module
    cause = (
        investigation.causes[0].name
        if investigation.causes
        else ("PRECISION_ONLY" if investigation.verdict == "PRECISION_ONLY" else None)
    )
    return {
        "fault": name, "planted": fault.note, "verdict": investigation.verdict,
        "module": NOTHING if first is None else named(first), "module_right": module == fault.first,
        "token": -1 if first is None else first.first_token, "cause": cause or NOTHING,
        "cause_right": (first is None) if sound else cause == fault.cause, "seconds": investigation.facts["seconds"],
    }  # fmt: skip


def gallery_figure(gallery: Gallery) -> go.Figure:
    """A strip for each fault, what was named first is framed."""
    title = "Planted faults: where modules are wrong by themselves"
    return figures.strips(gallery.strips, title=title, marks=gallery.named)
