"""Claims of published notes, judged by what a run measured.

`data/claims.toml` says by which named value a claim is judged, and how: a verdict follows from where the interval of
that value lies, inside what is claimed, outside of it, or across an end. The module of a notebook in `book` computes
the values; the record keeps what was judged, and the gallery reads it there.
"""

from collections.abc import Mapping, Sequence
from math import isnan, nan
from typing import Any, NamedTuple, Self

from IPython.display import Markdown

from specnb.book.claims import report
from specnb.io import project_dir, read_json, read_toml
from specnb.measure.bench import FEWEST
from specnb.records import RunRecord
from specnb.store import figures_dir, save, save_beside_figures

Values = dict[str, Any]
"""Values that claims are judged by, by name."""
VERDICTS = {
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

    def __format__(self, spec: str) -> str:
        if isnan(self.value):
            return "–"
        ends = "" if isnan(self.low) or self.low == self.high else f" [{self.low:{spec}}, {self.high:{spec}}]"
        return format(self.value, spec) + ends


MISSING = Estimate(nan, nan, nan, 0)
"""The estimate of a value that a run did not measure."""
FEW = "too few data"


class Claim(NamedTuple):
    """A claim and how it is judged: by a person (`judgement`), or by where the interval of the named `value` lies.

    It `holds` inside `claimed`, `fails` outside; across an end, and from fewer than `needs` prompts, it is undecided.
    A claim of which only a planted fault was judged (`planted`) is undecided, too; a note gives the verdict for the
    plant. `evidence` is true for every verdict; the `conclusion` for the computed verdict, if any, is added to it.
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
        """Return the verdict that a value of this claim comes to; None is for a run of another set-up."""
        if measured is None:
            return "not testable here"
        _, low, high, n = measured if isinstance(measured, Estimate) else Estimate.exact(measured, self.needs)
        start, end = (self.claimed,) * 2 if isinstance(self.claimed, bool) else self.claimed
        if n < self.needs or not (start <= low <= high <= end or high < start or low > end):
            return "undecided"
        return self.holds if start <= low <= end else self.fails

    def judge(self, values: Values) -> dict[str, str]:
        """Return the row of this claim; `note` marks a judgement, too few data, and the verdict in a planted twin.

        Raises KeyError for a value or a placeholder that is missing in `values`.
        """
        verdict, note, evidence = self.judgement, "judgement", self.evidence.format_map(values)
        if not verdict:
            value = values[self.value]
            verdict, note = self.verdict(value), ""
            evidence += self.conclusion.get(verdict, "").format_map(values)
            if isinstance(value, Estimate) and value.n < self.needs:
                note, have = FEW, f"{value.n} of the {self.needs} needed" if value.n else "not measured in this run"
                evidence = f"{have}: {evidence}"
            elif self.planted:
                verdict, note = "undecided", f"in the planted twin: {verdict}"
        return {"claim": self.claim, "source": self.source, "verdict": verdict, "note": note, "evidence": evidence}


def claims_of(notebook: str) -> list[Claim]:
    """Return the claims that a notebook judges, in order; none where it judges none."""
    claims = read_toml(project_dir() / "data" / "claims.toml")
    return [Claim(**claim) for claim in claims.get(notebook, ())]


def judge_claims(record: RunRecord, values: Values) -> Markdown:
    """Judge a run's notebook by `values` and `fixed_values`, save the verdicts with its record, return their table."""
    named = fixed_values() | values
    rows = [claim.judge(named) for claim in claims_of(record.experiment)]
    record.measurements["claims"] = {"schema_version": 1, "rows": rows}
    save(record)
    save_beside_figures(record, figures_dir(record))  # those were published before it held the claims
    return Markdown(tabulate_claims(rows))


def tabulate_claims(rows: Sequence[dict[str, str]]) -> str:
    """Return the table of claims as Markdown, with what the verdicts mean, and how many the run is too small for."""
    few = sum(row["note"] == FEW for row in rows)
    lines = [f"**Undecided for want of data: {few} of {len(rows)} claims. A larger run may decide.**", ""]
    lines = lines * bool(few) + ["| published claim | source | verdict | evidence |", "|---|---|---|---|"]
    for row in rows:
        note = f" ({row['note']})" if row["note"] else ""
        lines.append(f"| {row['claim']} | {row['source']} | **{row['verdict']}**{note} | {row['evidence']} |")
    meanings = "; ".join(f"*{word}*: {meaning}" for word, meaning in VERDICTS.items())
    return "\n".join([*lines, "", f"{meanings}. A verdict is computed from data unless it is marked as judgement."])


def fixed_values() -> Values:
    """Return the named values that claims are judged by without a run, which `data/claims.py` derives.

    `code` and `prose` are rows of `report.compare_with_line` by K, `copy` is the run of the model as its own draft.
    """
    values, runs = read_json(project_dir() / "data" / "claims.json"), report.read_runs()
    for name, value in values.items():
        values[name] = Estimate(*value) if isinstance(value, list) else MISSING if value is None else value
    rows = report.compare_with_line(runs, report.fit_line(runs)).set_index("k")
    (copy,) = runs.query("content == 'self'").itertuples()
    return values | {name: rows[rows["content"] == name] for name in ("code", "prose")} | {"copy": copy}
