"""Will this draft work with that target? The verdict, every difference, and what other engines would say.

check(describe("smollm2-135m"), describe("qwen2.5-0.5b-instruct")).verdict   # needs translation
"""

from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

import pandas as pd

from specnb.compat import rules
from specnb.compat.description import Description
from specnb.compat.findings import BESIDE_TOKENS, Finding, findings
from specnb.compat.overlap import Overlap, Pieces, overlap
from specnb.compat.rules import Opinion
from specnb.errors import InputError

CANNOT_SPELL = frozenset({"wpm"})
"""Tokenizers whose pieces do not spell the text back: blanks and case are lost before anything is cut."""


class Verdict(StrEnum):
    """What has to be done so that the draft's tokens can be verified by the target."""

    DROP_IN = "drop-in"  # every id means the same, rows of logits are equally wide
    SLICING = "works with slicing"  # ids that both have mean the same; the others are masked
    TRANSLATION = "needs translation"  # ids differ, pieces are shared
    IMPOSSIBLE = "impossible"  # no piece is shared, or one of them cannot spell text
    UNKNOWN = "unknown"  # a tokenizer is not at hand


class Report(NamedTuple):
    """A pair's verdict on tokens, all findings, and what other engines would say.

    `overlap` is None where a vocabulary is not at hand. The verdict is about tokens alone; what else stands in the way
    (a recurrent state) is a finding of severity BREAKS. `from_memory` names what of the two no document at hand shows.
    """

    target: str
    draft: str
    verdict: Verdict
    overlap: Overlap | None
    findings: tuple[Finding, ...]
    llama_cpp: Opinion
    transformers: Opinion
    from_memory: tuple[str, ...] = ()

    def to_frame(self) -> pd.DataFrame:
        """One row a finding: topic, severity, both values, remedy."""
        rows = [f._replace(severity=f.severity.name.lower())._asdict() for f in self.findings]
        return pd.DataFrame(rows, columns=list(Finding._fields))

    def to_json(self) -> dict[str, object]:
        """Plain values for a document; pieces as their bytes in hexadecimal."""
        o = self.overlap
        pieces = None if o is None else o._asdict() | {"examples": [[i, a.hex(), b.hex()] for i, a, b in o.examples]}
        return self._asdict() | {
            "verdict": str(self.verdict),
            "overlap": pieces,
            "findings": self.to_frame().to_dict(orient="records"),
            "llama_cpp": self.llama_cpp._asdict(),
            "transformers": self.transformers._asdict(),
        }

    def summary(self) -> str:
        """The verdict in a sentence, with the overlap."""
        o = self.overlap
        if o is None:
            return f"{self.draft} for {self.target}: {self.verdict}; a tokenizer is not at hand."
        shared = (
            f"{o.shared:,} pieces in common ({o.share_target:.1%} of the target's, {o.share_draft:.1%} of the draft's)"
        )
        ids = (
            "every id that both have means the same" if not o.n_different else f"{o.n_different:,} ids mean other texts"
        )
        others = [
            f"{f.topic} ({f.target}, {f.draft})" for f in self.findings if f.severity and f.topic in BESIDE_TOKENS
        ]
        but = f" Beside the tokens: {'; '.join(others)}." if others else ""
        memory = f" From memory, in no document at hand: {', '.join(self.from_memory)}." if self.from_memory else ""
        return f"{self.draft} for {self.target}: {self.verdict}; {ids}; {shared}.{but}{memory}"


def check(target: Description, draft: Description) -> Report:
    """Compare a draft model with its target. Only descriptions are read, no weights."""
    pieces = Pieces.of(target), Pieces.of(draft)
    found = None if None in pieces else overlap(*pieces)
    return Report(
        target.name,
        draft.name,
        _verdict(target, draft, found),
        found,
        findings(target, draft, found),
        rules.llama_cpp(target, draft, pieces),
        rules.transformers(target, draft),
        tuple(f"{d.name}'s {key}" for d in (target, draft) for key in d.from_memory),
    )


def matrix(described: Sequence[Description]) -> pd.DataFrame:
    """Every ordered pair of two different models, one row each: verdict, overlap, what other engines would say.

    Raises InputError for fewer than two models, or two of the same name.
    """
    names = [d.name for d in described]
    repeated = next((n for n in names if names.count(n) > 1), None)
    if len(names) < 2 or repeated is not None:
        raise InputError(f"{repeated!r} is listed twice" if repeated else "a matrix needs two models or more")
    pieces = [Pieces.of(d) for d in described]
    pairs = [(i, j) for i in range(len(names)) for j in range(len(names)) if i != j]
    return pd.DataFrame([_row(described[i], described[j], (pieces[i], pieces[j])) for i, j in pairs])


def _verdict(target: Description, draft: Description, found: Overlap | None) -> Verdict:
    if found is None:
        return Verdict.UNKNOWN
    kinds = {target.vocab.kind, draft.vocab.kind}
    if found.n_different == 0 and found.n_target == found.n_draft:
        return Verdict.DROP_IN if target.vocab_size == draft.vocab_size else Verdict.SLICING
    if not found.shared or kinds & CANNOT_SPELL:
        return Verdict.IMPOSSIBLE
    return Verdict.TRANSLATION if found.n_different else Verdict.SLICING


def _row(target: Description, draft: Description, pieces: tuple[Pieces | None, Pieces | None]) -> dict[str, object]:
    o = None if None in pieces else overlap(*pieces)
    return {
        "target": target.name,
        "draft": draft.name,
        "verdict": str(_verdict(target, draft, o)),
        "first_difference": None if o is None else o.first_difference,
        "n_different": None if o is None else o.n_different,
        "share_target": None if o is None else o.share_target,
        "share_draft": None if o is None else o.share_draft,
        "llama_cpp": rules.llama_cpp(target, draft, pieces).accepts,
        "transformers": rules.transformers(target, draft).accepts,
    }
