"""Claims of published notes, judged by the measurements of a run.

`data/claims.toml` defines, for each notebook, values as expressions over the record of a run, and
the claims that these values decide. A verdict follows from the position of a value's interval:
inside the claimed range, outside of it, or across one of its bounds. The record stores the
verdicts; the gallery reads them from there.
"""

from collections.abc import Mapping, Sequence
from math import isnan, nan
from typing import Any, NamedTuple, Self

import pandas as pd
from IPython.display import Markdown
from jinja2 import Environment, StrictUndefined

from specnb.book.claims import report
from specnb.io import JsonObject, project_dir, read_json, read_toml
from specnb.measure.intervals import FEWEST, NORMAL, interval, rate, wilson
from specnb.records import RunRecord
from specnb.store import figures_dir, save, save_beside_figures

Values = dict[str, Any]
"""Named values that claims refer to."""
VERDICTS = {
    "reproduced": "also observed here",
    "explained": "true in the source, for the reason given",
    "corrected": "false, or true for another reason",
    "undecided": "the data do not decide",
    "not testable here": "needs another machine or model",
}


class Estimate(NamedTuple):
    """A value with its interval, from `n` prompts, passages or conversations."""

    value: float
    low: float
    high: float
    n: int

    @classmethod
    def exact(cls, value: float, n: int) -> Self:
        """Return a count or another value without an interval."""
        return cls(float(value), float(value), float(value), n)

    def __sub__(self, other: Self) -> "Estimate":
        """Return the difference; its bounds combine opposite bounds of the two intervals."""
        return Estimate(
            self.value - other.value, self.low - other.high, self.high - other.low, self.n
        )

    def __format__(self, spec: str) -> str:
        if isnan(self.value):
            return "–"
        ends = (
            ""
            if isnan(self.low) or self.low == self.high
            else f" [{self.low:{spec}}, {self.high:{spec}}]"
        )
        return format(self.value, spec) + ends


MISSING = Estimate(nan, nan, nan, 0)
"""The estimate of a value that a run did not measure."""
FEW = "too few data"


class Claim(NamedTuple):
    """A claim and how it is judged: by a person (`judgement`), or by the interval of `value`.

    The verdict is `holds` if the interval lies inside `claimed`, and `fails` if it lies outside. It
    is undecided if the interval crosses a bound or comes from fewer than `needs` prompts, and if
    only a planted fault was judged (`planted`); a note then gives the verdict for that fault, if it
    is another. `evidence` is a text that is true for every verdict; the `conclusion` of the
    computed verdict, if any, is appended.
    """

    claim: str
    source: str
    evidence: str
    judgement: str = ""
    conclusion: Mapping[str, str] = {}
    value: str = ""
    claimed: bool | Sequence[float] = True
    holds: str = "reproduced"
    fails: str = "corrected"
    needs: int = FEWEST
    planted: bool = False

    def verdict(self, measured: Estimate | float | None) -> str:
        """Return the verdict for a value of this claim; None means a run with another setup."""
        if measured is None:
            return "not testable here"
        _, low, high, n = (
            measured if isinstance(measured, Estimate) else Estimate.exact(measured, self.needs)
        )
        start, end = (self.claimed,) * 2 if isinstance(self.claimed, bool) else self.claimed
        if n < self.needs or not (start <= low <= high <= end or high < start or low > end):
            return "undecided"
        return self.holds if start <= low <= end else self.fails

    def judge(self, values: Values) -> dict[str, str]:
        """Return the row of this claim.

        `note` marks a judgement, too few data, or the verdict for a planted fault. Raises KeyError
        for a value or a placeholder that is missing in `values`.
        """
        verdict = self.judgement
        note = "judgement"
        evidence = self.evidence.format_map(values)
        if not verdict:
            value = values[self.value]
            verdict = self.verdict(value)
            note = ""
            evidence += self.conclusion.get(verdict, "").format_map(values)
            if isinstance(value, Estimate) and value.n < self.needs:
                note = FEW
                have = (
                    f"{value.n} of {self.needs} required samples"
                    if value.n
                    else "Not measured in this run"
                )
                evidence = f"{have}. {evidence}"
            elif self.planted and verdict != "undecided":
                verdict, note = "undecided", f"for the planted fault: {verdict}"
        return {
            "claim": self.claim,
            "source": self.source,
            "verdict": verdict,
            "note": note,
            "evidence": evidence,
        }


def claims_of(notebook: str) -> list[Claim]:
    """Return the claims that a notebook judges, in order; empty if it judges none."""
    return [Claim(**claim) for claim in _read_claims().get(notebook, ())]


def judge_claims(record: RunRecord, tables: Values | None = None) -> Markdown:
    """Judge the claims of a run's notebook, save the verdicts in its record, return their table.

    `tables` are values that the notebook's expressions use in addition to the record.
    """
    values = values_of(record, tables)
    rows = [claim.judge(values) for claim in claims_of(record.experiment)]
    record.measurements["claims"] = {"schema_version": 1, "rows": rows}
    save(record)
    save_beside_figures(record, figures_dir(record))  # figures were published before it had claims
    return Markdown(tabulate_claims(rows))


def tabulate_claims(rows: Sequence[dict[str, str]]) -> str:
    """Return the claims as a Markdown table, with the meaning of each verdict.

    A line above the table counts the claims that are undecided for lack of data.
    """
    few = sum(row["note"] == FEW for row in rows)
    lines = ["| published claim | source | verdict | evidence |", "|---|---|---|---|"]
    if few:
        lines = [
            f"**Undecided for lack of data: {few} of {len(rows)} claims. More data may decide.**",
            "",
            *lines,
        ]
    for row in rows:
        note = f" ({row['note']})" if row["note"] else ""
        lines.append(
            f"| {row['claim']} | {row['source']} | **{row['verdict']}**{note} | {row['evidence']} |"
        )
    meanings = "; ".join(f"*{word}*: {meaning}" for word, meaning in VERDICTS.items())
    return "\n".join(
        [
            *lines,
            "",
            f"{meanings}. A verdict is computed from data unless it is marked as judgement.",
        ]
    )


# --- values: expressions over a record ---


def values_of(record: RunRecord, tables: Values | None = None) -> Values:
    """Return the values of a run's notebook by name.

    The expressions of `data/claims.toml` are evaluated in order. Each may use the expressions
    before it, the values of `read_fixed`, `params`, the measurements of the record (tables as data
    frames; empty ones are undefined), and `tables`.
    """
    measured = {
        name: pd.DataFrame(value)
        if isinstance(value, list) and isinstance(value[0], dict)
        else value
        for name, value in record.measurements.items()
        if value != []
    }
    names = read_fixed() | {"params": record.params} | measured | (tables or {})
    return evaluate(_read_claims()["values"].get(record.experiment, {}), names)


def read_fixed() -> Values:
    """Return the values that need no run: `data/claims.json`, and rows of the field report.

    `code` and `prose` are rows of `report.compare_with_line` by K; `copy` is the run of the model
    as its own draft model.
    """
    values = read_json(project_dir() / "data" / "claims.json")
    runs = report.read_runs()
    for name, value in values.items():
        values[name] = (
            Estimate(*value) if isinstance(value, list) else MISSING if value is None else value
        )
    rows = report.compare_with_line(runs, report.fit_line(runs)).set_index("k")
    (copy,) = runs.query("content == 'self'").itertuples()
    return (
        values
        | {name: rows[rows["content"] == name] for name in ("code", "prose")}
        | {"copy": copy}
    )


def evaluate(expressions: Mapping[str, str], names: Values) -> Values:
    """Return `names` and, by name, the value of each expression, which may use all names before it.

    Expressions are Jinja expressions; an unknown name raises UndefinedError.

    >>> names = {"kept": 3, "drafted": 4}
    >>> evaluate({"share": "kept / drafted", "most": "share > 0.5"}, names)["most"]
    True
    """
    values = dict(names)
    for name, expression in expressions.items():
        values[name] = _JINJA.compile_expression(expression, undefined_to_none=False)(values)
    return values


def estimate(row: pd.Series, value: str = "speedup", n: int | None = None) -> Estimate:
    """Return a row's `value`, its interval and n_prompts (or `n`); MISSING if it is NaN.

    The interval is in the columns low and high, or with the name of the value before:
    predicted_low.
    """
    if pd.isna(row[value]):
        return MISSING
    prefix = f"{value}_" * (f"{value}_low" in row)
    low, high = row[[f"{prefix}low", f"{prefix}high"]].astype(float)  # a record has None for NaN
    return Estimate(row[value], low, high, row["n_prompts"] if n is None else n)


def share(part: int, whole: int) -> Estimate:
    """Return `part / whole` with its Wilson interval."""
    return Estimate(part / whole, *wilson(part / whole, whole, NORMAL), FEWEST)


def ratio(numerators: pd.Series, denominators: pd.Series) -> Estimate:
    """Return the ratio of two totals, from columns of lists that are paired by prompt."""
    pairs = [*zip(numerators.explode(), denominators.explode(), strict=True)]
    return Estimate(*interval(pairs, rate), len(pairs)) if pairs else MISSING


def rate_change(last: pd.DataFrame, first: pd.DataFrame) -> Estimate:
    """Return the change of a rate, from rows (accepted, drafted) paired by conversation."""
    counts = pd.concat([last, first], axis=1)
    counts = counts[counts["drafted"].all(axis=1)].to_numpy()
    if not len(counts):
        return MISSING
    change = interval(counts, lambda rows: rate(rows[:, :2]) - rate(rows[:, 2:]), log=False)
    return Estimate(*change, len(counts))


def _read_claims() -> JsonObject:
    return read_toml(project_dir() / "data" / "claims.toml")


_JINJA = Environment(undefined=StrictUndefined)
_JINJA.globals |= {
    "missing": MISSING,
    "counted": Estimate.exact,
    "Estimate": Estimate,
    "estimate": estimate,
    "share": share,
    "ratio": ratio,
    "rate_change": rate_change,
}
