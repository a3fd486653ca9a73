"""What notebook 06 shows: the table of the case, why statistics mislead, and the gallery of planted faults."""

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from specnb.book import divergence_figures as figures
from specnb.divergence.align import Key
from specnb.divergence.gallery import Gallery
from specnb.divergence.grading.baselines import TELLS_TOKEN
from specnb.divergence.grading.rows import LAB, NOTHING
from specnb.divergence.investigation import Investigation
from specnb.divergence.score import Score
from specnb.divergence.setups import Outcome
from specnb.errors import InputError
from specnb.io import digest

SCORED = {"module": "module", "or its part": "near", "a token": "token", "the first token": "exact", "cause": "cause"}
"""Columns of a score, and how the table calls them."""
TOLD_BY = {"token": (LAB, *TELLS_TOKEN), "exact": (LAB, *TELLS_TOKEN), "cause": (LAB,)}
"""Which tools tell it; others all do."""
CASE = {"S0": "alone", "S1": "beside itself", "S3": "beside the larger target"}
"""The set-ups of the case, and how its notes call them."""
SHORT = 8
"""Digits of a digest that a table shows."""


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
    return digest(sorted(digests))[:SHORT]


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
    errors = investigation.errors(name)
    own = errors[errors["role"] == "out"].groupby("at", sort=False)
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


def setups_figure(investigation: Investigation) -> go.Figure:
    """The matrix of set-ups: a strip for each that was run, modules in order of time; named first is framed."""
    outcomes = investigation.case.outcomes
    names = {name: f"{name} {one.setup.says}" for name, one in outcomes.items()}
    strips = {names[name]: investigation.heat(name).max(axis=1) for name in outcomes}
    order = next(iter(strips.values())).index
    marks = {names[name]: one.wrong["module"].iloc[0] for name, one in outcomes.items() if not one.clean}
    title = "Beside whom the draft goes wrong, and where"
    return figures.strips(pd.DataFrame(strips, index=order).T, title=title, marks=marks)


def gallery_figure(gallery: Gallery) -> go.Figure:
    """A strip for each fault, what was named first is framed."""
    title = "Planted faults: where modules are wrong by themselves"
    return figures.strips(gallery.strips, title=title, marks=gallery.named)


def score_table(score: Score) -> pd.DataFrame:
    """By tool, and what it compared with: how often module, a token that is wrong, the first of them, cause were right.

    Shares with their 95 % intervals as text; "-" for what a tool does not tell. `or its part` also counts a module that
    the right one holds. False alarms are of controls that change bits: where none does, no tool can be wrong.
    """
    table = score.by_tool()
    shown = table[["tool", "against", "n"]].rename(columns={"n": "cases"})
    for name, column in SCORED.items():
        told_by = TOLD_BY.get(column)
        tells = [told_by is None or tool in told_by for tool in table["tool"]]
        shares = [_share(row, column) for row in table.to_dict("records")]
        shown[name] = [share if told else NOTHING for share, told in zip(shares, tells, strict=True)]
    alarms = zip(table["alarms"], table["controls"], strict=True)
    return shown.assign(**{"false alarms": [f"{int(a)} of {int(n)}" for a, n in alarms]})


def score_figure(score: Score) -> go.Figure:
    """How often each tool names the right module."""
    table = score.by_tool()
    names = [
        f"{tool}, {against}" if tool != LAB else tool
        for tool, against in zip(table["tool"], table["against"], strict=True)
    ]
    columns = {"module_right": "module", "low": "module_low", "high": "module_high", "near": "near"}
    shares = {name: table[column].to_numpy() for name, column in columns.items()}
    return figures.scores(pd.DataFrame({"tool": names} | shares), ours=LAB)


def _share(row: Mapping[str, float], name: str) -> str:
    return f"{row[name]:.3f} ({row[f'{name}_low']:.3f}-{row[f'{name}_high']:.3f})"
