"""Claims of published notes, judged by what a run measured, and a field report's own numbers as a line of cost.

`data/claims.toml` says by which named value a claim is judged, and how: a verdict follows from where the interval of
that value lies, inside what is claimed, outside of it, or across an end. The module of a notebook in `book` computes
the values; the record keeps what was judged, and the gallery reads it there.
"""

from collections.abc import Mapping, Sequence
from math import isnan, nan
from typing import Any, Literal, NamedTuple, Self

import numpy as np
import pandas as pd
import plotly.express as px
import plotly.graph_objects as go
from IPython.display import Markdown
from pydantic import BaseModel, TypeAdapter

from specnb.book.style import dress, series, template
from specnb.io import project_dir, read_json, read_toml
from specnb.measure.bench import FEWEST, NORMAL, wilson
from specnb.records import RunRecord
from specnb.store import save, save_beside_figures

LONGEST = 64
"""Up to this K the fastest is sought on a line of cost."""

Verdict = Literal["reproduced", "explained", "corrected", "undecided", "not testable here"]
VERDICTS: dict[Verdict, str] = {
    "reproduced": "also seen here", "explained": "true there, and why", "corrected": "false, or for another reason",
    "undecided": "the data do not tell", "not testable here": "needs another machine or model",
}  # fmt: skip


class Estimate(NamedTuple):
    """A value with its interval, from `n` prompts (or passages, conversations); a sentence shows both."""

    value: float
    low: float
    high: float
    n: int

    @classmethod
    def exact(cls, value: float, n: int) -> Self:
        """Return what was counted, and has no interval."""
        return cls(float(value), float(value), float(value), n)

    @classmethod
    def share(cls, part: int, whole: int, n: int) -> Self:
        """Return a share of trials on `n` prompts, with Wilson's interval."""
        rate = part / whole
        return cls(rate, *wilson(rate, whole, NORMAL), n)

    def __format__(self, spec: str) -> str:
        if isnan(self.value):
            return "–"
        ends = "" if isnan(self.low) or self.low == self.high else f" [{self.low:{spec}}, {self.high:{spec}}]"
        return format(self.value, spec) + ends


MISSING = Estimate(nan, nan, nan, 0)
"""The estimate of a value that a run did not measure."""
FEW = "too few data"


class Claim(BaseModel, frozen=True, extra="forbid"):
    """A claim and how it is judged: by a person (`judgement`), or by where the interval of `value` lies, or the number.

    It `holds` inside `claimed`, `fails` outside; across an end, and from fewer than `needs` prompts, it is undecided.
    So it is where only a fault was judged that was `planted` here: what holds for that is added.
    """

    claim: str
    source: str
    evidence: str
    judgement: Verdict | None = None
    value: str | bool | float = ""
    claimed: bool | tuple[float, float] = True
    holds: Verdict = "reproduced"
    fails: Verdict = "corrected"
    needs: int = FEWEST
    planted: bool = False

    def verdict(self, measured: Estimate | float) -> Verdict:
        """Return the verdict that a value of this claim comes to."""
        _, low, high, n = measured if isinstance(measured, Estimate) else Estimate.exact(measured, self.needs)
        start, end = (self.claimed,) * 2 if isinstance(self.claimed, bool) else self.claimed
        if n < self.needs or not (start <= low <= high <= end or high < start or low > end):
            return "undecided"
        return self.holds if start <= low <= end else self.fails

    def judge(self, values: Mapping[str, Any]) -> "Judgement":
        """Return the row of this claim. Raises KeyError for a value or a placeholder that is missing in `values`."""
        verdict, note, evidence = self.judgement, "judgement", self.evidence.format_map(values)
        if verdict is None:
            value = values[self.value] if isinstance(self.value, str) else self.value
            verdict, note = self.verdict(value), ""
            if isinstance(value, Estimate) and value.n < self.needs:
                note, have = FEW, f"{value.n} of the {self.needs} needed" if value.n else "not measured in this run"
                evidence = f"{have}: {evidence}"
            elif self.planted:
                verdict, note = "undecided", f"in the planted twin: {verdict}"
        return Judgement(claim=self.claim, source=self.source, verdict=verdict, note=note, evidence=evidence)


class Judgement(BaseModel, frozen=True, extra="forbid"):
    """A row of the table; `note` says where a person judged, where data are too few, what holds in a planted twin."""

    claim: str
    source: str
    verdict: Verdict
    note: str
    evidence: str


class Judgements(BaseModel, frozen=True, extra="forbid"):
    """The `claims` that `judge` leaves in the `measurements` of a record."""

    schema_version: Literal[1] = 1
    rows: list[Judgement]


def claims_of(notebook: str) -> list[Claim]:
    """Return the claims that a notebook judges, in order; none where it judges none."""
    rows = read_toml(project_dir() / "data" / "claims.toml")
    return TypeAdapter(list[Claim]).validate_python(rows.get(notebook, []))


def judge_claims(record: RunRecord, values: Mapping[str, Any]) -> Markdown:
    """Judge a run's notebook by `values` and `fixed_values`, save the verdicts with its record, return their table."""
    named = {**fixed_values(), **values}
    rows = [claim.judge(named) for claim in claims_of(record.experiment)]
    record.measurements["claims"] = Judgements(rows=rows).model_dump(mode="json")
    save_beside_figures(record, save(record) / "figures")  # those were published before it held the claims
    return Markdown(tabulate_claims(rows))


def tabulate_claims(rows: Sequence[Judgement]) -> str:
    """Return the table of claims as Markdown, with what the verdicts mean, and how many the run is too small for."""
    few = sum(row.note == FEW for row in rows)
    lines = [f"**{few} of {len(rows)} claims are undecided for want of data: a larger run may have them.**", ""]
    lines = lines * bool(few) + ["| published claim | source | verdict | evidence |", "|---|---|---|---|"]
    for row in rows:
        note = f" ({row.note})" if row.note else ""
        lines.append(f"| {row.claim} | {row.source} | **{row.verdict}**{note} | {row.evidence} |")
    meanings = "; ".join(f"*{word}*: {meaning}" for word, meaning in VERDICTS.items())
    return "\n".join([*lines, "", f"{meanings}. A verdict is computed from data unless it is marked as judgement."])


# --- a field report's numbers ----------------------------------------------------------------------------------------


class RoundLine(NamedTuple):
    """Seconds of a round on a straight line over K: all that speeds alone tell of a machine.

    `per_draft_s` is a draft step and the column that it adds to the target's forward, which speeds cannot part.
    """

    base_s: float
    per_draft_s: float

    def seconds(self, k: float) -> float:
        return self.base_s + self.per_draft_s * k


def report_runs() -> pd.DataFrame:
    """Return the runs of `data/report`, one a row, with acceptance_rate, tau, round_s and implied_c of each.

    Rates come from counts where there are any. implied_c is what a draft adds to a round in the target's plain steps.
    """
    folder = project_dir() / "data" / "report"
    table, models = (pd.read_csv(folder / f"{name}.csv") for name in ("speeds", "models"))
    table["acceptance_rate"] = (table["accepted"] / table["drafted"]).fillna(table["acceptance_percent"] / 100)
    table["tau"] = 1 + table["acceptance_rate"] * table["k"]
    by_count = table["seconds"] * table["k"] / table["drafted"]  # rounds are drafted / k
    table["round_s"] = by_count.fillna(table["tau"] / table["tokens_per_s"])
    table["plain_s"] = 1 / table["target"].map(models.set_index("model")["plain_tokens_per_s"])
    return table.assign(implied_c=(table["round_s"] / table["plain_s"] - 1) / table["k"])


def fit_line(table: pd.DataFrame) -> RoundLine:
    """Return the cost of a round over K, fitted to the rows of code alone."""
    code = table[table["content"] == "code"]
    per_draft_s, base_s = np.polyfit(code["k"], code["round_s"], 1)
    return RoundLine(float(base_s), float(per_draft_s))


def compare_with_report(table: pd.DataFrame, cost: RoundLine) -> pd.DataFrame:
    """Return the rows of `report_runs` beside what the line predicts for its drafter; empty for another.

    error is relative. alpha is the chance of every draft, were it constant, that gives a row's tau; best_k is the
    fastest K up to LONGEST that alpha has on the line.
    """
    same, ks = table["content"] != "self", np.arange(LONGEST + 1)
    predicted = (table["tau"] / cost.seconds(table["k"])).where(same)
    alphas = [_constant_alpha(row.k, row.tau) for row in table.itertuples()]
    line = np.array([cost.seconds(k) for k in ks.tolist()])
    speeds = [(np.cumsum(alpha**ks) / line)[1:] for alpha in alphas]
    shown = table[["content", "k", "acceptance_rate", "tau"]].assign(
        round_ms=1000 * table["round_s"], implied_c=table["implied_c"], in_fit=table["content"] == "code",
        tokens_per_s=table["tokens_per_s"], predicted=predicted, error=predicted / table["tokens_per_s"] - 1,
        alpha=alphas, best_k=1 + np.argmax(speeds, axis=1),
    )  # fmt: skip
    return shown.assign(best_k=shown["best_k"].astype("Int64").where(same))


def fixed_values() -> dict[str, Any]:
    """Return the named values that claims are judged by without a run, which `data/claims.py` derives.

    `code` and `prose` are rows of `compare_with_report` by K, `copy` is the run of the model as its own draft.
    """
    values, runs = read_json(project_dir() / "data" / "claims.json"), report_runs()
    for name, value in values.items():
        values[name] = Estimate(*value) if isinstance(value, list) else MISSING if value is None else value
    rows = compare_with_report(runs, fit_line(runs)).set_index("k")
    (copy,) = runs[runs["content"] == "self"].itertuples()
    return values | {name: rows[rows["content"] == name] for name in ("code", "prose")} | {"copy": copy}


def _constant_alpha(k: int, tau: float) -> float:
    """The positive root of 1 + a + ... + a^k = tau."""
    roots = np.roots([1.0] * k + [1 - tau])
    return float(max(root.real for root in roots if abs(root.imag) < 1e-9))


def round_cost(table: pd.DataFrame, cost: RoundLine) -> go.Figure:
    """Milliseconds of a round over K: each published run, the fitted line, and a plain step at K = 0."""
    names = {"code": "code, tokens/s beside", "prose": "prose, not fitted"}
    rows = table.assign(round_ms=1000 * table["round_s"], content=table["content"].map(names)).dropna(subset="content")
    figure = px.scatter(
        rows, x="k", y="round_ms", color="content", symbol="content", symbol_sequence=["circle", "square-open"],
        text=rows["tokens_per_s"].map("{:.2f}/s".format), template=template(),
    ).update_traces(marker_size=12, textposition="top left", cliponaxis=False)  # fmt: skip
    figure.data[1].textposition = "bottom right"  # prose lies on code's marks
    ends, plain_ms = [0, int(rows["k"].max())], 1000 * float(rows["plain_s"].iloc[0])
    label = f"fitted to code: {1000 * cost.base_s:.0f} + {1000 * cost.per_draft_s:.1f} K ms"
    figure.add_scatter(x=ends, y=[1000 * cost.seconds(k) for k in ends], mode="lines", name=label, line_color="#555")
    figure.add_scatter(x=[0], y=[plain_ms], mode="markers", name="a plain step", marker=series(2)["marker"])
    figure.update_xaxes(tickvals=[0, *sorted(rows["k"].unique().tolist())])
    return dress(figure, "round_cost")
