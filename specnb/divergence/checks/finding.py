"""What a check before the tensors says."""

from collections.abc import Iterable
from typing import Literal, NamedTuple

import pandas as pd

Verdict = Literal["ok", "warn", "fail", "skipped"]
RANK: dict[str, int] = {"fail": 0, "warn": 1, "ok": 2, "skipped": 3}


class Finding(NamedTuple):
    """One check and its outcome. `evidence` says what was seen, also where nothing is wrong; `skipped` why not.

    `warn` is what may be meant (a longer context of the target), `fail` what cannot be (weights never written).
    `issues` are known cases upstream.
    """

    check: str
    verdict: Verdict
    evidence: str
    remedy: str = ""
    issues: tuple[str, ...] = ()


def table(findings: Iterable[Finding]) -> pd.DataFrame:
    """The findings, worst first: check, verdict, evidence, remedy, issues."""
    ranked = sorted(findings, key=lambda one: RANK[one.verdict])
    return pd.DataFrame(ranked, columns=list(Finding._fields))
