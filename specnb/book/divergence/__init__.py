"""Notebook 06, section by section."""

from collections.abc import Mapping
from functools import cached_property
from typing import NamedTuple

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from numpy.linalg import norm

from specnb.book.claims import MISSING
from specnb.book.divergence import figures
from specnb.decode.generate import generate
from specnb.divergence.errors import name_module
from specnb.divergence.faults import FAULTS, RecordedFault, deploy_fault
from specnb.divergence.faults.planting import PlantedFault
from specnb.divergence.investigate import Investigation, judge_service, random_script
from specnb.divergence.pair import copy_of, open_net, pair
from specnb.divergence.parts import find
from specnb.divergence.setups import Lab, Outcome
from specnb.divergence.trace import Key
from specnb.draft.model import ModelDrafter
from specnb.errors import InputError
from specnb.io import digest
from specnb.measure.experiment import Experiment, Progress, silent
from specnb.params import DivergenceParams

EXPERIMENT = "06_divergence"
NOTHING = "-"
"""Shown where no module is named, and for what a tool does not tell."""
CASE = {"S0": "alone", "S1": "beside itself", "S3": "beside the larger target"}
"""The set-ups of the case, and how its notes call them."""
GALLERY = ("S0", "S1", "S2", "S3")
"""Set-ups that tell the planted faults apart."""


class Gallery(NamedTuple):
    """`table`: one row for each fault; `strips`: faults by modules, the worst of all tokens, log10 of error over floor.

    `named`: of each fault the module that was named first.
    """

    table: pd.DataFrame
    strips: pd.DataFrame
    named: Mapping[str, str]


class Study(Experiment):
    """The sections, which make one record. Names of faults are checked here, before anything is run."""

    def __init__(self, params: DivergenceParams) -> None:
        super().__init__(EXPERIMENT, params, [])
        self.models = [{"role": role, "id": f"divergence pair, seed {params.seed}"} for role in ("target", "drafter")]
        self.faults = tuple(params.gallery) or tuple(FAULTS)
        for name in self.faults:
            deploy_fault(name)
        self._deploy = deploy_fault(params.fault, layer=None if params.layer < 0 else params.layer)

    @cached_property
    def lab(self) -> Lab:
        """The embedded pair, with one pristine copy and its floors for all faults; it is fed tokens of the seed."""
        p = self.params
        models = pair(seed=p.seed, dtype=p.dtype)
        script = random_script(models.draft, tokens=p.tokens, prompt=p.prompt_tokens, k=p.k, seed=p.seed)
        return Lab(*models, script=script)

    def investigate(self, progress: Progress = silent) -> Investigation:
        """The fault, as a service under suspicion."""
        investigation = judge_service(self.lab, deploy=self._deploy, progress=progress)
        self.measured["investigation"] = investigation.document()
        return investigation

    def accept(self) -> pd.DataFrame:
        """Decode speculatively with the draft in service beside a neighbour; a row for each, and who verifies.

        Columns: beside, verified_by, drafted, kept, acceptance_rate. The draft's copy is pristine.
        """
        lab, p = self.lab, self.params
        copied, target = "a copy of itself", "the larger target"
        nets = {copied: copy_of(lab.reference), target: lab.target}
        verifiers = {name: open_net(net, name) for name, net in nets.items()}
        settings = {"k": p.k, "max_new_tokens": p.tokens, "ignore_eog": True}
        drafter, rows = ModelDrafter(open_net(lab.draft, "the draft")), []
        for beside, by in ((copied, copied), (target, copied), (target, target), ("nobody", target)):
            with self._deploy(lab.draft, nets.get(beside)):
                written = generate(verifiers[by], lab.script.feeds[0].ids, drafter=drafter, **settings)
            rows.append((beside, by, written.total_draft_tokens, written.accepted_tokens, written.acceptance_rate))
        table = pd.DataFrame(rows, columns=["beside", "verified_by", "drafted", "kept", "acceptance_rate"])
        self.measured["acceptance"] = table.to_dict("records")
        return table

    def gallery(self, progress: Progress = silent) -> Gallery:
        """Plant one fault of the gallery after the other and investigate each as a service of its own.

        Columns of the table: fault, planted (what it is), verdict, module, module_right, token, cause, cause_right,
        seconds. A fault that is none (`split_k`, `uniform_offset`) is right where nothing is named. Raises InputError
        for a fault that does not fit the models, and one that waits for something that this script does not do.
        """
        rows, strips, framed = [], {}, {}
        for done, name in enumerate(self.faults):
            progress(done, len(self.faults), name)
            deploy = RecordedFault(name)
            investigation = judge_service(self.lab, deploy=deploy, setups=GALLERY)
            rows.append(_gallery_row(name, deploy.acted(), investigation))
            strips[name] = investigation.heat().max(axis=1)
            if investigation.first is not None:
                framed[name] = investigation.first.module
        order = list(dict.fromkeys(module for strip in strips.values() for module in strip.index))
        table = pd.DataFrame(rows)
        self.measured["gallery"] = table.to_dict("records")  # in Python's own types
        return Gallery(table, pd.DataFrame(strips, index=order).T, framed)


# --- the case: what people compared by hand ---------------------------------------------------------------------------


def case_table(investigation: Investigation) -> pd.DataFrame:
    """The table of the case's notes, a column for each set-up: what people compared by hand, over the prompt.

    Key inputs are what the key projection gives to attention, attention outputs what the output projection is given.
    The digests are of all parameters of a bank of experts: as they were loaded, and as its operations read them.
    `difference` is that of the last set-up from the first, relative.
    """
    outcomes = investigation.outcomes
    parts = find(investigation.lab.draft)
    banks, attentions = ([path for path, _ in parts[kind]] for kind in ("bank", "attention"))
    columns = {}
    for name, says in CASE.items():
        outcome, column = outcomes[name], {}
        for layer in (0, 1):
            mean, std = _statistics(outcome, f"{attentions[layer]}.k_proj", "out")
            attended = _statistics(outcome, f"{attentions[layer]}.o_proj", "in")
            params = outcome.trace.params
            read = params[params["module"] == banks[layer]].drop_duplicates(["owner", "owner_path"])
            leaves = tuple(f"{banks[layer]}.{path.rpartition('.')[2]}" for path in read["owner_path"])
            loaded = [known for path, known in investigation.lab.meant.items() if path.endswith(leaves)]
            facts = {
                "key input mean": mean, "key input std": std,
                **dict(zip(("attention output mean", "attention output std"), attended, strict=True)),
                "MoE output std": _statistics(outcome, banks[layer], "out")[1],
                "MoE weights, as loaded": digest(sorted(loaded))[:8],
                "MoE weights, as read": digest(sorted(read["digest"]))[:8],
                "MoE weights, owner of what is read": " ".join(sorted({*read["owner"]})) or NOTHING,
            }  # fmt: skip
            column |= {f"layer {layer} {name}": value for name, value in facts.items()}
        prompt = len(outcome.script.feeds[0].ids)
        column["first draft token"] = int(outcome.logits[0][prompt - 1].argmax())
        columns[f"{name} {says}"] = column
    table = pd.DataFrame(columns, dtype=object)
    ends = zip(table.iloc[:, 0], table.iloc[:, -1], strict=True)
    off = [f"{abs(beside / alone - 1):.1%}" if isinstance(alone, float) else NOTHING for alone, beside in ends]
    return table.map(lambda value: f"{value:.4f}" if isinstance(value, float) else str(value)).assign(difference=off)


HYPOTHESES = {
    "autotuning, caches or buffers that the target's run left behind": ("S4", "wrong_unrun"),
    "memory layout, KV slots": ("S2", "wrong_same_shape"),
    "rounding that adds up": ("S3", "banks_alone"),
    "the fused norm and residual": ("S3", "banks_alone"),
    "routing": ("S3", "banks_alone"),
}
"""The notes' guesses: the set-up that tells, and the value of `divergence_values` that is true if it rules one out."""


def tabulate_hypotheses(investigation: Investigation) -> pd.DataFrame:
    """A row for each guess of the notes: the set-up that tells, what it showed, and whether the guess is ruled out.

    It is so for the plant alone: of the case itself no trace is at hand.
    """
    values = divergence_values(investigation)
    rows = [
        (guess, setup, "ruled out" if values[value] is True else "open", "unknown")
        for guess, (setup, value) in HYPOTHESES.items()
    ]
    table = pd.DataFrame(rows, columns=["hypothesis", "setup", "for the plant", "for the case"])
    return table.merge(investigation.setups()[["setup", "says", "verdict", "first"]], on="setup", how="left")


def _statistics(outcome: Outcome, module: str, role: str) -> tuple[float, float]:
    """The mean and the deviation of what a module was given or gave over the prompt."""
    values = outcome.trace.arrays[outcome.trace.rows(module=module, role=role, step=0)["digest"].iloc[0]].astype(float)
    return float(values.mean()), float(values.std())


def tabulate_misleading(investigation: Investigation) -> pd.DataFrame:
    """Tabulate what each number says of each module's outputs, in S0w, which is sound, and in the first wrong set-up.

    Columns: module, mean_ratio, std_ratio, cosine, relative_l2, all of the outputs as they are, errors of earlier
    modules included; `by_itself`, the largest error that the module itself made; `ratio` of that to its floor.
    Raises InputError where no set-up is wrong.
    """
    outcomes, bad = investigation.outcomes, investigation.bad
    if bad is None:
        raise InputError(f"none of the set-ups {', '.join(outcomes)} is wrong: there is nothing to compare")
    sound_run, wrong_run = outcomes["S0w"].run.whole, bad.run.whole
    errors = bad.errors
    outputs = errors[errors["role"] == "out"].groupby("at", sort=False)
    rows = []
    for module, error, ratio in outputs[["error", "ratio"]].max().itertuples():
        key = Key(module, 0, "out", "out")
        if key in sound_run and sound_run[key].values.dtype.kind == "f":
            a, b = (run[key].values.astype(float).ravel() for run in (sound_run, wrong_run))
            with np.errstate(divide="ignore", invalid="ignore"):  # outputs that are all zero
                cosine = np.minimum(1.0, a @ b / (norm(a) * norm(b)))  # rounding may pass 1; NaN stays
                ratios = b.mean() / a.mean(), b.std() / a.std(), cosine, norm(b - a) / norm(a)
            rows.append((module, *ratios, error, ratio))
    columns = ["module", "mean_ratio", "std_ratio", "cosine", "relative_l2", "by_itself", "ratio"]
    return pd.DataFrame(rows, columns=columns)


def misleading_figure(investigation: Investigation) -> go.Figure:
    """Draw `misleading`."""
    return figures.draw_misleading(tabulate_misleading(investigation))


def setups_figure(investigation: Investigation) -> go.Figure:
    """The matrix of set-ups: a strip for each that was run, modules in order of time; named first is framed."""
    outcomes = investigation.outcomes
    names = {name: f"{name} {item.setup.says}" for name, item in outcomes.items()}
    strips = {names[name]: investigation.heat(name).max(axis=1) for name in outcomes}
    order = next(iter(strips.values())).index
    marks = {names[name]: item.wrong["module"].iloc[0] for name, item in outcomes.items() if not item.clean}
    title = "Beside whom the draft goes wrong, and where"
    return figures.strips(pd.DataFrame(strips, index=order).T, title=title, marks=marks)


def _gallery_row(name: str, fault: PlantedFault, investigation: Investigation) -> dict[str, object]:
    first, causes = investigation.first, [cause.name for cause in investigation.causes]
    cause = causes[0] if causes else "PRECISION_ONLY" if investigation.verdict == "PRECISION_ONLY" else NOTHING
    return {
        "fault": name, "planted": fault.note, "verdict": investigation.verdict,
        "module": NOTHING if first is None else name_module(first),
        "module_right": (None if first is None else first.module) == fault.first,
        "token": -1 if first is None else first.first_token, "cause": cause,
        "cause_right": (first is None) if fault.first is None else cause == fault.cause,
        "seconds": investigation.facts["seconds"],
    }  # fmt: skip


def gallery_figure(gallery: Gallery) -> go.Figure:
    """A strip for each fault, what was named first is framed."""
    title = "Planted faults: where modules are wrong by themselves"
    return figures.strips(gallery.strips, title=title, marks=gallery.named)


def draw_heat(investigation: Investigation) -> go.Figure:
    """The heat map of the first wrong set-up, its first divergence framed; of the last where none is wrong."""
    setup, first = investigation.outcome().setup, investigation.first
    box = None if first is None else (first.module, first.first_token, first.last_token)
    title = f"{setup.id}, {setup.says}: where modules are wrong by themselves"
    return figures.draw_heat_map(investigation.heat(), box=box, title=title)


def divergence_values(investigation: Investigation) -> dict[str, object]:
    """Return the named values that the claims of notebook 06 are judged by; those of a set-up not run are missing.

    `kept` and `kept_itself`: the share of tokens that the draft gives beside the target, or a copy, as it does alone.
    """
    seen, outcomes = case_table(investigation), investigation.outcomes
    alone, beside = seen["S0 alone"], seen["S3 beside the larger target"]
    tokens = {name: np.concatenate([logits.argmax(-1) for logits in outcomes[name].logits]) for name in CASE}
    kept, kept_itself = (float((tokens[name] == tokens["S0"]).mean()) for name in ("S3", "S1"))
    wrong = {name: not outcomes[name].clean if name in outcomes else MISSING for name in ("S2", "S4")}
    banks = [path for path, _ in find(investigation.lab.draft)["bank"]]
    first, outputs = investigation.first, [float(column["layer 0 MoE output std"]) for column in (alone, beside)]
    return {
        "kept": kept, "kept_itself": kept_itself, "kept_less": kept_itself - kept, "n": len(tokens["S0"]),
        "token": beside["first draft token"], "token_alone": alone["first draft token"],
        "begins_between": alone["layer 0 attention output std"] == beside["layer 0 attention output std"]
        and alone["layer 1 key input std"] != beside["layer 1 key input std"],
        "at_bank_0": first is not None and first.module == banks[0],
        "line": investigation.line.partition(" (")[0],
        "read_alike": alone["layer 0 MoE weights, as read"] == beside["layer 0 MoE weights, as read"],
        "output_alone": outputs[0], "output_beside": outputs[1], "output_ratio": outputs[1] / outputs[0],
        "wrong_unrun": wrong["S4"], "wrong_same_shape": wrong["S2"],
        "banks_alone": set(outcomes["S3"].wrong["module"]) <= {*banks},
        "foreign": outcomes["S1"].foreign["owner_path"].nunique(),
    }  # fmt: skip
