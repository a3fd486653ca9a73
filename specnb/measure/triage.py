"""The first screen, before any tensor: does the acceptance look like a poor drafter, or like a fault, and which?

A drafter that is merely poor is right a few times in ten, evenly. Faults leave other marks: nothing is ever kept, all
drafts of a round are one token, only the first is ever right, everything is right until some length and nothing from
there on. `triage_rules` has them; with too few rounds the verdict is `inconclusive`, never a guess.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import index
from typing import Any, Literal, get_args

import pandas as pd

from specnb.errors import InputError, did_you_mean
from specnb.measure.acceptance import Profile, Share, profile
from specnb.measure.fork import Fork
from specnb.measure.triage_rules import NEAR_ZERO, RULES, Case, DrafterKind, Suspicion
from specnb.records import Generation

KINDS: tuple[str, ...] = get_args(DrafterKind)
HEADS = ("medusa", "hydra")
"""What a drafter of trained heads is called."""


@dataclass(frozen=True)
class Triage:
    """What the acceptance of some rounds looks like. `suspicions` are ranked, the most specific first."""

    verdict: Literal["suspicious", "nothing suspicious", "inconclusive"]
    suspicions: tuple[Suspicion, ...]
    profile: Profile = field(repr=False)
    reason: str = ""

    @property
    def suspicious(self) -> bool:
        return bool(self.suspicions)

    @property
    def line(self) -> str:
        """One line for the reader of a run; "" when nothing is suspicious."""
        if not self.suspicions:
            return ""
        top = self.suspicions[0]
        more = f" (and {len(self.suspicions) - 1} more)" if len(self.suspicions) > 1 else ""
        return f"suspicious acceptance: {top.looks_like}{more}; look at {top.where}; next: {top.next_experiment}"

    def table(self) -> pd.DataFrame:
        """The suspicions, ranked: name, looks_like, evidence, where, issues, next_experiment."""
        columns = ["name", "looks_like", "evidence", "where", "issues", "next_experiment"]
        rows = [[getattr(s, column) for column in columns] for s in self.suspicions]
        return pd.DataFrame(rows, columns=columns)


def triage(
    generations: Sequence[Generation],
    *,
    vocab_size: int,
    drafter_kind: DrafterKind = "model",
    forks: Sequence[Fork | Mapping[str, Any]] = (),
) -> Triage:
    """Judge the rounds of generations with one drafter, in the order in which they were made.

    `drafter_kind`: a draft model (a requantised copy too), trained heads, or a lookup, which rarely matching is no
    fault. `forks` are those of greedy generations that differ from plain decoding (`measure.fork`, or the entries of
    a sweep's record); near-ties among them are no evidence. Raises InputError.
    """
    if drafter_kind not in KINDS:
        hint = did_you_mean(str(drafter_kind), KINDS)
        raise InputError(f"unknown kind of drafter {drafter_kind!r}; {hint}known: {', '.join(KINDS)}")
    try:
        size = index(vocab_size)
    except TypeError as error:
        raise InputError(f"vocab_size is {vocab_size!r}: give the number of ids, a whole number") from error
    if size < 2:
        raise InputError(f"vocab_size is {size}: a vocabulary has at least 2 ids")
    case = Case(profile(generations), size, drafter_kind, tuple(map(_as_mapping, forks)))
    found = tuple(s for rule in RULES for s in rule(case))
    if found:
        return Triage("suspicious", found, case.profile)
    reason = _too_little(case)
    return Triage("inconclusive" if reason else "nothing suspicious", (), case.profile, reason)


def line(
    generations: Sequence[Generation],
    *,
    vocab_size: int,
    drafter_kind: DrafterKind = "model",
    forks: Sequence[Fork | Mapping[str, Any]] = (),
) -> str:
    """The one line of `triage`; "" when nothing is suspicious, or too few rounds say anything. Raises InputError."""
    return triage(generations, vocab_size=vocab_size, drafter_kind=drafter_kind, forks=forks).line


def kind_of(drafter: str) -> DrafterKind:
    """The kind of a drafter by its name in a `Generation`: a draft model is called what `specnb.load` takes."""
    if drafter in HEADS:
        return "heads"
    return "lookup" if drafter.startswith("lookup(") else "model"


def _as_mapping(fork: Fork | Mapping[str, Any]) -> Mapping[str, Any]:
    held = fork.model_dump() if isinstance(fork, Fork) else fork
    if not isinstance(held, Mapping) or not isinstance(held.get("near_tie"), bool):
        raise InputError(f"a fork is one of measure.fork, with near_tie true or false, got {fork!r:.80}")
    return held


def _too_little(case: Case) -> str:
    if not case.profile.rounds:
        return "no round drafted anything"
    alpha = case.profile.alpha[0] if case.profile.alpha else Share.of(0, 0)
    if case.kind != "lookup" and alpha.low < NEAR_ZERO <= alpha.high:
        return f"{alpha} first drafts kept: anything from {alpha.low:.0%} to {alpha.high:.0%} fits; run more tokens"
    return ""
