"""What notebook 06 shows: the table of the case, why statistics mislead, and the gallery of planted faults."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Self

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from pydantic import Field, field_validator, model_validator

from specnb.book import divergence_figures as figures
from specnb.divergence.along import Key
from specnb.divergence.deploy import planted
from specnb.divergence.faults import FAULTS
from specnb.divergence.faults_parts import Fault
from specnb.divergence.investigate import judge
from specnb.divergence.investigation import Investigation, shown
from specnb.divergence.script import Script
from specnb.divergence.setups import SETUPS, Deploy, Lab, Outcome
from specnb.errors import InputError, did_you_mean
from specnb.measure.experiment import Progress, silent
from specnb.params import Params
from specnb.provenance import json_digest

CASE = {"S0": "alone", "S1": "beside itself", "S3": "beside the larger target"}
"""The set-ups of the case, and how its notes call them."""
GALLERY = ("S0", "S1", "S2", "S3")
NOTHING = "-"
"""Named where there is no module to name."""
SHORT = 8
"""Digits of a digest that a table shows."""


class DivergenceParams(Params):
    """Notebook 06: acceptance is 0 %, nothing crashes: which module is it, which token, and why?

    The embedded pair of `dtype` and `seed` reads `tokens` tokens, `prompt_tokens` of them at once and the others in
    rounds of `k`. `fault` is planted in `layer` (-1: where it is by default) and investigated; then each of `gallery`.
    """

    fault: str = "positional_registry"
    layer: int = Field(default=-1, ge=-1, le=1000)
    dtype: Literal["float32", "bfloat16"] = "float32"
    tokens: int = Field(default=24, ge=8, le=4096)
    prompt_tokens: int = Field(default=14, ge=1, le=4096)
    k: int = Field(default=3, ge=1, le=64)
    gallery: list[str] = Field(default=list(FAULTS), min_length=1, max_length=64)
    seed: int = Field(default=0, ge=0, lt=2**31)

    @field_validator("fault", "gallery")
    @classmethod
    def _known(cls, names: str | list[str]) -> str | list[str]:
        listed = [names] if isinstance(names, str) else names
        for name in listed:
            if name not in FAULTS:
                raise ValueError(f"{did_you_mean(name, list(FAULTS))}known faults: {', '.join(FAULTS)}")
        if len(set(listed)) < len(listed):
            raise ValueError("a fault is listed twice")
        return names

    @model_validator(mode="after")
    def _something_to_draft(self) -> Self:
        if self.prompt_tokens >= self.tokens:
            raise ValueError(f"a prompt of {self.prompt_tokens} tokens leaves none of {self.tokens} to draft")
        return self

    def script(self, vocab_size: int) -> Script:
        """What the draft is fed: seeded tokens."""
        text = np.random.default_rng(self.seed).integers(0, vocab_size, self.tokens).tolist()
        return Script.drafting(text, prompt=self.prompt_tokens, k=self.k, vocab_size=vocab_size, seed=self.seed)

    def deploy(self) -> Deploy:
        """The fault as a service. Raises InputError for a layer of one that is in no layer."""
        return planted(self.fault, layer=None if self.layer < 0 else self.layer)


def case_table(
    investigation: Investigation, setups: Mapping[str, str] = CASE, layers: Sequence[int] = (0, 1)
) -> pd.DataFrame:
    """The table of the case's notes, a column for each set-up: what people compared by hand, over the prompt.

    Key inputs are what the key projection gives to attention, attention outputs what the output projection is given.
    The digests are of all parameters of a bank of experts: as they were loaded, and as its operations read them.
    Raises InputError for set-ups that were not run, and for a layer that has no such modules.
    """
    outcomes = investigation.case.outcomes
    if missing := [name for name in setups if name not in outcomes]:
        raise InputError(f"set-up {missing[0]} was not run: there are {', '.join(outcomes)}")
    banks = [path for path, _ in investigation.case.parts.banks]
    if len(banks) <= max(layers):
        raise InputError(f"layer {max(layers)} has no bank of experts: the case is one of mixtures of experts")
    attentions = [path for path, _ in investigation.case.parts.attentions]
    columns = {}
    for name, says in setups.items():
        one, column = outcomes[name], {}
        for layer in layers:
            keys = _statistics(one, f"{attentions[layer]}.k_proj", "out")
            attention = _statistics(one, f"{attentions[layer]}.o_proj", "in")
            column |= {f"layer {layer} key input mean": keys["mean"], f"layer {layer} key input std": keys["std"],
                       f"layer {layer} attention output std": attention["std"]}  # fmt: skip
            column |= {f"layer {layer} MoE output std": _statistics(one, banks[layer], "out")["std"]}
            column |= _digests(one, investigation.case.meant, banks[layer], f"layer {layer} MoE weights")
        prompt = len(one.script.feeds[0].ids)
        column["first draft token"] = int(one.logits[0][prompt - 1].argmax())
        columns[f"{name} {says}"] = column
    table = pd.DataFrame(columns, dtype=object)
    return table.map(lambda value: f"{value:.4f}" if isinstance(value, float) else str(value))


def _statistics(outcome: Outcome, module: str, role: str) -> pd.Series:
    rows = outcome.trace.rows(module=module, role=role, step=0)
    if rows.empty:
        raise InputError(f"{module} gave nothing in the first forward: the case's table is one of gpt-oss attention")
    return rows.iloc[0]


def _digests(outcome: Outcome, meant: Mapping[str, str], bank: str, says: str) -> dict[str, str]:
    """One digest of all parameters of a bank as they were loaded, and of what its operations read."""
    params = outcome.trace.params
    read = params[params["module"] == bank].drop_duplicates(["owner", "owner_path"])
    own = {path: digest for path, digest in meant.items() if path.endswith(tuple(f"{bank}.{n}" for n in _leaves(read)))}
    owners = " ".join(sorted({*read["owner"]})) or NOTHING
    return {f"{says}, as loaded": _joined(own.values()), f"{says}, as read": _joined(read["digest"]),
            f"{says}, owner of what is read": owners}  # fmt: skip


def _leaves(read: pd.DataFrame) -> list[str]:
    return [path.rpartition(".")[2] for path in read["owner_path"]]


def _joined(digests: Sequence[str]) -> str:
    return json_digest(sorted(digests))[:SHORT]


def misleading(investigation: Investigation, sound: str = "S0", wrong: str | None = None) -> pd.DataFrame:
    """Of each module's output in a sound and in the first wrong set-up, over the whole text: what each number says.

    Columns: module, mean_ratio, std_ratio, cosine, relative_l2, all of the outputs as they are, errors of earlier
    modules included; `by_itself`, the largest error that the module itself made; `ratio` of that to its floor.
    Raises InputError where no set-up is wrong, or one was not run.
    """
    outcomes, bad = investigation.case.outcomes, investigation.case.bad
    name = wrong or (bad.setup.id if bad is not None else None)
    if name is None or sound not in outcomes or name not in outcomes:
        raise InputError(f"give one sound and one wrong set-up of {', '.join(outcomes)}, not {sound} and {name}")
    ours, theirs = outcomes[sound].along, outcomes[name].along
    errors = outcomes[name].errors.join(investigation.floor, on=list(investigation.floor.index.names))
    own = errors[errors["role"] == "out"].assign(ratio=errors["error"] / errors["floor"]).groupby("at", sort=False)
    rows = []
    for module, error, ratio in own[["error", "ratio"]].max().itertuples():
        key = Key(module, 0, "out", "out")
        if key in ours.values and ours.values[key].dtype.kind == "f":
            rows.append((module, *_compared(ours.values[key], theirs.values[key]), error, ratio))
    columns = ["module", "mean_ratio", "std_ratio", "cosine", "relative_l2", "by_itself", "ratio"]
    return pd.DataFrame(rows, columns=columns)


def _compared(a: np.ndarray, b: np.ndarray) -> tuple[float, float, float, float]:
    a, b = a.astype(float).ravel(), b.astype(float).ravel()
    length = np.linalg.norm(a)
    with np.errstate(divide="ignore", invalid="ignore"):  # outputs that are all zero
        cosine = np.minimum(1.0, a @ b / (length * np.linalg.norm(b)))  # rounding may pass 1; NaN stays
        return b.mean() / a.mean(), b.std() / a.std(), float(cosine), float(np.linalg.norm(b - a) / length)


@dataclass(frozen=True)
class Gallery:
    """`table`: one row for each fault; `strips`: faults by modules, the worst of all tokens, log10 of error over floor.

    `named`: of each fault the module that was named first.
    """

    table: pd.DataFrame
    strips: pd.DataFrame
    named: Mapping[str, str]

    def figure(self) -> go.Figure:
        """A strip for each fault, what was named first is framed."""
        title = "Planted faults: where modules are wrong by themselves"
        return figures.strips(self.strips, title=title, marks=self.named)


def gallery(
    lab: Lab, faults: Sequence[str] = tuple(FAULTS), *, setups: Sequence[str] | None = None, progress: Progress = silent
) -> Gallery:
    """Plant one fault after the other and investigate each as a service of its own.

    `setups` None: those of GALLERY that the lab can run. Columns of the table: fault, planted (what it is), verdict,
    module, module_right, token, cause, cause_right, seconds. A fault that is none (`split_k`, `uniform_offset`) is
    right where nothing is named. Raises InputError for an unknown fault, and one that does not fit the lab's models.
    """
    if not faults:
        raise InputError(f"no fault to plant: give some of {', '.join(FAULTS)}")
    for name in faults:
        if name not in FAULTS:
            raise InputError(f"unknown fault {name!r}; {did_you_mean(name, list(FAULTS))}known: {', '.join(FAULTS)}")
    beside = lab.reference if lab.target is None else lab.target
    if setups is None:
        setups = [name for name in GALLERY if lab.target is not None or SETUPS[name].beside != "target"]
    rows, strips, named = [], {}, {}
    for done, name in enumerate(faults):
        progress(done, len(faults), name)
        with FAULTS[name](lab.draft, beside) as fault:
            pass  # only to be told what must be found
        found = judge(lab, deploy=FAULTS[name], setups=setups)
        rows.append(_row(name, fault, found))
        strips[name] = found.heat().max(axis=1)
        if found.first is not None:
            named[name] = found.first.module
    order = list(dict.fromkeys(module for strip in strips.values() for module in strip.index))
    return Gallery(pd.DataFrame(rows), pd.DataFrame(strips, index=order).T, named)


def _row(name: str, fault: Fault, found: Investigation) -> dict[str, object]:
    first = found.first
    sound = fault.first is None
    module = None if first is None else first.module
    cause = found.causes[0].name if found.causes else ("PRECISION_ONLY" if found.verdict == "PRECISION_ONLY" else None)
    return {
        "fault": name, "planted": fault.note, "verdict": found.verdict,
        "module": NOTHING if module is None else shown(module), "module_right": module == fault.first,
        "token": -1 if first is None else first.first_token, "cause": cause or NOTHING,
        "cause_right": (first is None) if sound else cause == fault.cause, "seconds": found.facts["seconds"],
    }  # fmt: skip


def setups_figure(investigation: Investigation) -> go.Figure:
    """The matrix of set-ups: a strip for each that was run, modules in order of time; named first is framed."""
    outcomes = investigation.case.outcomes
    names = {name: f"{name} {one.setup.says}" for name, one in outcomes.items()}
    strips = {names[name]: investigation.heat(name).max(axis=1) for name in outcomes}
    order = next(iter(strips.values())).index
    marks = {names[name]: one.wrong["module"].iloc[0] for name, one in outcomes.items() if not one.clean}
    title = "Beside whom the draft goes wrong, and where"
    return figures.strips(pd.DataFrame(strips, index=order).T, title=title, marks=marks)
