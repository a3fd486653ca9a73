"""Triage: does the acceptance look like a poor drafter or like a fault, and which one?

A poor drafter is right a few times in ten, with no pattern. Faults have other signs: no draft token
is ever accepted, all draft tokens of a round are equal, or only the first is ever accepted. The
thresholds of the signs are outside the range of correct drafters, and the counts must be large
enough: with too few rounds, the verdict is `inconclusive`. No tensors are compared, so the rounds
may come from any engine.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from specnb.findings import Finding
from specnb.io import read_toml
from specnb.measure.intervals import NORMAL, wilson
from specnb.records import Generation, RunRecord

if TYPE_CHECKING:
    from specnb.measure.fork import TextFork
    from specnb.measure.pair import PairRun

COPIES = re.compile(r"(auto\()?((lookup|suffix)\([^()]*\)(, )?)+\)?")
"""Names of drafters that only copy from the text: for these, low acceptance is not a fault."""
NEAR_ZERO = 0.05
"""Acceptance rate that compatible drafters exceed: small, quantized or translated draft models have
0.2 to 0.9."""
ALIVE = 0.25
"""Acceptance rate that is clearly above 0."""
REPEATED = 0.3
"""Share of equal adjacent draft tokens above which they may be a fault."""
TIMES_TEXT = 3.0
"""Multiple of the share in the text that they must also exceed."""

REMEDIES = read_toml(Path(__file__).with_name("remedies.toml"))
"""For each fault, where to look and what to try next."""


class Share(NamedTuple):
    """`hits` of `n` with the 95 % Wilson interval; if n is 0, rate NaN and the interval 0 to 1.

    Trials are assumed to be independent. The draft tokens of one text are not quite independent, so
    thresholds need a margin.
    """

    hits: int
    n: int
    rate: float
    low: float
    high: float

    @classmethod
    def of(cls, hits: int, n: int) -> "Share":
        if not n:
            return cls(hits, n, float("nan"), 0.0, 1.0)
        return cls(hits, n, hits / n, *wilson(hits / n, n, NORMAL))

    @classmethod
    def true_among(cls, answers: Sequence[bool]) -> "Share":
        return cls.of(sum(answers), len(answers))

    def __str__(self) -> str:
        return f"{self.hits} of {self.n}"


class Triage(NamedTuple):
    """The verdict on the acceptance in some rounds; `suspicions` start with the most specific."""

    verdict: Literal["suspicious", "nothing suspicious", "inconclusive"]
    suspicions: tuple[Finding, ...] = ()

    @property
    def line(self) -> str:
        """The first suspicion in one line; "" if there is none."""
        if not self.suspicions:
            return ""
        first = self.suspicions[0]
        return f"suspicious acceptance: {first.evidence}; {first.remedy}"


def triage(
    generations: Sequence[Generation],
    *,
    vocab_size: int,
    forks: Sequence["TextFork | Mapping[str, Any]"] = (),
) -> Triage:
    """Judge the rounds of generations with one drafter, except rounds with k = 0.

    `forks` are those of greedy generations that differ from plain decoding (`measure.fork`, or the
    entries of a sweep's record). Near-ties among them are ignored.
    """
    drafted = [g for g in generations if any(r.k for r in g.rounds)]
    if not drafted:
        return Triage("inconclusive")
    lookup = any(COPIES.fullmatch(g.drafter) for g in drafted)
    alphas = alpha(drafted) or [Share.of(0, 0)]
    signs = []
    if n_faults := sum(not dict(fork)["near_tie"] for fork in forks):  # lookup included
        evidence = f"{n_faults} greedy texts diverge from plain decoding without a near-tie"
        signs.append(("text differs", evidence))
    if not lookup:
        signs += _signs_of_draft(drafted, alphas, vocab_size)
    if signs:
        ranked = tuple(
            Finding(name, "suspicious", evidence, REMEDIES[name]) for name, evidence in signs
        )
        return Triage("suspicious", ranked)
    unsure = not lookup and alphas[0].low < NEAR_ZERO <= alphas[0].high
    return Triage("inconclusive" if unsure else "nothing suspicious")


def suspicions(record: RunRecord) -> list[str]:
    """Return one line for each drafter of a run whose acceptance looks like a fault.

    Uses all generations of a drafter, with any K and temperature, and the forks that the run
    measured (only the K sweep does, which has one live drafter).
    """
    size = record.provenance["extra"]["vocab_size"]
    forks = record.measurements.get("forks", ())
    lines = []
    for drafter in dict.fromkeys(g.drafter for g in record.generations if g.drafter):
        judged = triage(
            [g for g in record.generations if g.drafter == drafter], vocab_size=size, forks=forks
        )
        if judged.line:
            lines.append(f"{drafter}: {judged.line}")
    return lines


def suspicion(result: "PairRun") -> str:
    """Return the line of a single generation; "" if nothing is suspicious or was drafted."""
    fork = result.summary.fork
    return triage(
        [result.generation], vocab_size=result.vocab_size, forks=[fork] if fork else []
    ).line


# --- the signs: names of faults and the evidence for them, the most specific first ---------------


def _signs_of_draft(
    drafted: Sequence[Generation], alphas: Sequence[Share], vocab_size: int
) -> Iterator[tuple[str, str]]:
    """Yield the signs of faults that lookup cannot have."""
    # 1. The draft tokens of a round are equal, but the tokens of the text are not.
    chains = [r.draft_ids for g in drafted for r in g.rounds if r.k and not r.parents]
    repeats = Share.true_among([a == b for ids in chains for a, b in pairwise(ids)])
    texts = [(*g.prompt_ids, *g.token_ids) for g in drafted]
    of_text = Share.true_among([a == b for text in texts for a, b in pairwise(text)])
    # If later draft tokens are accepted, the text itself repeats tokens.
    later = any(share.low > ALIVE for share in alphas[1:])
    if repeats.low > max(REPEATED, TIMES_TEXT * of_text.rate) and not later:
        yield (
            "same input",
            f"{repeats} pairs of adjacent draft tokens, but {of_text} pairs of the text, are equal",
        )

    # 2. Low acceptance at the first positions.
    for name, evidence in signs_by_position(alphas):
        if name == "near zero":
            translations = "; ".join(sorted({g.translation for g in drafted if g.translation}))
            evidence += f" (translated by {translations})" if translations else ""
            evidence += f", {alphas[0].n / vocab_size:.2g} by chance"
        yield name, evidence


def signs_by_position(alphas: Sequence[Share]) -> Iterator[tuple[str, str]]:
    """Yield the signs that follow from the acceptance rates by position alone, in any engine."""
    first, *others = alphas
    if others and first.low >= ALIVE and others[0].high < NEAR_ZERO:
        second = others[0]
        yield (
            "first draft only",
            f"alpha_1 is {first.rate:.2f} ({first}), alpha_2 {second.rate:.2f} ({second})",
        )
    if first.high < NEAR_ZERO:
        yield "near zero", f"{first} first draft tokens were accepted"


def alpha(drafted: Sequence[Generation]) -> list[Share]:
    """Return alpha_k for k = 1, 2, …; for trees k is the depth.

    alpha_k is P(draft token k is accepted, given that the k - 1 before it were).
    """
    rounds = [r for g in drafted for r in g.rounds]
    depths = range(max((r.n_tested for r in rounds), default=0))
    return [Share.true_among([r.n_accepted > k for r in rounds if r.n_tested > k]) for k in depths]
