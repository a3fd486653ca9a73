"""The first screen, before any tensor: does the acceptance look like a poor drafter, or like a fault, and which?

A drafter that is merely poor is right a few times in ten, evenly. Faults leave other marks: nothing is ever kept, all
drafts of a round are one token, only the first is ever right, everything is right until some length and nothing from
there on. One rule a fault, with the cases seen upstream, asks for a distance that no sound drafter was seen to reach,
and for counts that carry it; with too few rounds the verdict is `inconclusive`, never a guess.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pandas as pd

from specnb.errors import InputError
from specnb.measure.acceptance import Profile, Share
from specnb.measure.fork import Fork
from specnb.records import Generation, RunRecord

if TYPE_CHECKING:
    from specnb.measure.pair import Pair

DrafterKind = Literal["model", "heads", "lookup"]

NEAR_ZERO = 0.05
"""Rate that no fitting drafter stays below: drafts of a small, quantised or translated model are kept 2 to 9 in 10."""
ALIVE = 0.25
"""Rate of drafts that are well kept in one place, where they are near zero in another."""
REPEATED = 0.3
"""Share of neighbouring drafts that are equal, and times that of the text, before it is no matter of the text."""
TIMES_TEXT = 3.0
"""See REPEATED."""
PERFECT = 0.98
"""Share of tested drafts above which next to nothing is rejected."""
CHANCE = 3.0
"""Times the number that guessing would keep (and one more), beyond which drafts know something."""


@dataclass(frozen=True)
class Suspicion:
    """A fault that the rounds look like: what was counted, where to look, what to try next, known cases."""

    name: str
    looks_like: str
    evidence: Mapping[str, Any]
    where: str
    issues: tuple[str, ...]
    next_experiment: str


@dataclass(frozen=True)
class _Case:
    """What the rules look at."""

    profile: Profile
    vocab_size: int
    kind: DrafterKind
    forks: tuple[Mapping[str, Any], ...]


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
    a sweep's record); near-ties among them are no evidence.
    """
    case = _Case(Profile(tuple(generations)), vocab_size, drafter_kind, tuple(map(dict, forks)))
    suspicions_of_rules = tuple(s for rule in RULES for s in rule(case))
    if suspicions_of_rules:
        return Triage("suspicious", suspicions_of_rules, case.profile)
    reason = _too_little(case)
    return Triage("inconclusive" if reason else "nothing suspicious", (), case.profile, reason)


def kind_of(drafter: str) -> DrafterKind:
    """The kind of a drafter by its name in a `Generation`: a draft model is called what `specnb.load` takes."""
    if drafter in HEADS:
        return "heads"
    return "lookup" if drafter.startswith("lookup(") else "model"


def suspicions(record: RunRecord) -> list[str]:
    """One line for each drafter of a run whose drafts are kept as those of a faulty one are; empty where none is.

    Takes all of a drafter's generations, whatever K and temperature. Forks that the run measured (the K sweep's, of
    one drafter) count, too. Raises InputError for a record that does not say how large the target's vocabulary is.
    """
    size = record.provenance.get("extra", {}).get("vocab_size")
    if size is None:
        raise InputError(f"run {record.run_id} was recorded without the size of the target's vocabulary: run it again")
    forks = record.measurements.get("forks", ())
    lines = []
    for drafter in dict.fromkeys(g.drafter for g in record.generations if g.drafter):
        generations = [g for g in record.generations if g.drafter == drafter]
        shown = triage(generations, vocab_size=size, drafter_kind=kind_of(drafter), forks=forks).line
        lines += [f"{drafter}: {shown}"] if shown else []
    return lines


def suspicion(pair: "Pair") -> str:
    """The line of a single generation; "" where nothing is suspicious, or nothing was drafted."""
    generation, fork = pair.generation, pair.summary.fork
    kind = kind_of(generation.drafter)
    return triage([generation], vocab_size=pair.vocab_size, drafter_kind=kind, forks=[fork] if fork else []).line


def _too_little(case: _Case) -> str:
    if not case.profile.rounds:
        return "no round drafted anything"
    alpha = case.profile.alpha[0] if case.profile.alpha else Share.of(0, 0)
    if case.kind != "lookup" and alpha.low < NEAR_ZERO <= alpha.high:
        return f"{alpha} first drafts kept: anything from {alpha.low:.0%} to {alpha.high:.0%} fits; run more tokens"
    return ""


def _above_text(drafts: Share, text: Share) -> bool:
    return drafts.low > max(REPEATED, TIMES_TEXT * text.rate if text.n else 0.0)


def _constant(case: _Case) -> Iterator[Suspicion]:
    token, drafted, text = case.profile.commonest
    if case.kind == "lookup" or not _above_text(drafted, text) or case.profile.tested.rate > ALIVE:
        return
    yield Suspicion(
        "constant draft",
        f"{drafted} first drafts are token {token}, which is {text} of the text",
        {"token": token, "drafted": drafted, "text": text, "kept": case.profile.tested},
        "the draft's head and token map (d2t all zero), and a length gate that feeds a dummy token",
        ("EAGLE #222", "vLLM #58080"),
        "print d2t and the ids that are fed to the draft",
    )


def _echo(case: _Case) -> Iterator[Suspicion]:
    seen, text = case.profile.echoes, case.profile.text_repeats
    if case.kind == "lookup" or not _above_text(seen, text) or case.profile.tested.rate > ALIVE:
        return
    where = "the loading of the heads: left at their identity start they repeat the backbone's own next token"
    if case.kind != "heads":
        where = "what the draft is fed: it stands one token behind the text"
    yield Suspicion(
        "echo",
        f"{seen} first drafts repeat the newest token, which the text does {text} times",
        {"echoes": seen, "text_repeats": text, "all_equal": case.profile.all_equal},
        where,
        ("SGLang #27829", "speculators #1131", "vLLM #14647"),
        "list the parameters that the loader never wrote, and compare the fed ids with the text",
    )


def _same_input(case: _Case) -> Iterator[Suspicion]:
    seen, text = case.profile.repeats, case.profile.text_repeats
    if case.kind == "lookup" or not _above_text(seen, text) or _kept_later(case.profile):
        return
    yield Suspicion(
        "same input",
        f"in {case.profile.all_equal} rounds all drafts are one token ({seen} neighbouring drafts equal, in the text "
        f"{text})",
        {"all_equal": case.profile.all_equal, "repeats": seen, "text_repeats": text},
        "the draft loop: every step is fed the same input instead of the prefix and the drafts before it",
        ("exo #1188", "exo #1685", "exo #2065"),
        "run the preflight's recurrence check on this drafter",
    )


def _kept_later(profile: Profile) -> bool:
    """Whether drafts behind the first are kept as drafts that know something are: repeats are the text's then."""
    return any(share.low > ALIVE for share in profile.alpha[1:])


def _first_only(case: _Case) -> Iterator[Suspicion]:
    alpha = case.profile.alpha
    if case.kind == "lookup" or len(alpha) < 2 or alpha[0].low < ALIVE or alpha[1].high >= NEAR_ZERO:
        return
    yield Suspicion(
        "first draft only",
        f"alpha_1 is {alpha[0].rate:.2f} ({alpha[0]}), alpha_2 {alpha[1].rate:.2f} ({alpha[1]})",
        {"alpha_1": alpha[0], "alpha_2": alpha[1], "all_equal": case.profile.all_equal},
        "the step from one draft to the next: KV slot or position not advanced, the same input fed, one MTP layer "
        "used for all steps, heads behind the first not loaded",
        ("vLLM #52688", "vLLM #9730", "exo #1188"),
        "compare the draft's rows in the round with those of one forward over prefix and drafts",
    )


def _narrow(case: _Case) -> Iterator[Suspicion]:
    beyond = case.profile.beyond_drafted
    alpha = case.profile.alpha
    if case.kind == "lookup" or not alpha or alpha[0].high >= NEAR_ZERO or beyond.low < 0.1:
        return
    highest = max(t for r in case.profile.rounds for t in r.draft_ids)
    yield Suspicion(
        "narrow ids",
        f"no drafted id is above {highest} of {case.vocab_size}, but {beyond} generated ids are",
        {"highest": highest, "beyond": beyond, "alpha_1": alpha[0]},
        "the map from draft to target ids: d2t is missing, and draft ids are taken for the first target ids",
        ("NeMo Automodel #2447", "EAGLE #222"),
        "look for d2t in the checkpoint's header",
    )


def _near_zero(case: _Case) -> Iterator[Suspicion]:
    alpha = case.profile.alpha
    if case.kind == "lookup" or not alpha or alpha[0].high >= NEAR_ZERO:
        return
    chance = alpha[0].n / case.vocab_size
    evidence = {"alpha_1": alpha[0], "by_chance": chance, "total": case.profile.total}
    if spoken := sorted({g.translation for g in case.profile.generations if g.translation}):
        evidence["translation"] = "; ".join(spoken)  # few shared tokens are a reason, too
    # one draft may be kept by luck, whatever the vocabulary: with 50 000 ids chance is next to nothing
    if alpha[0].hits <= CHANCE * chance + 1:
        yield Suspicion(
            "near zero",
            f"{alpha[0]} first drafts kept, {chance:.2g} by chance",
            evidence,
            "identity (whose experts, head and map does the draft really use), then weights never loaded",
            ("vLLM #33497", "vLLM #33624", "SGLang #27829", "vLLM #46435", "SGLang #39087"),
            "run the preflight, then the draft alone, beside itself and beside a decoy twin",
        )
    else:
        yield Suspicion(
            "near zero, above chance",
            f"{alpha[0]} first drafts kept, {chance:.2g} by chance: the drafts know something",
            evidence,
            "what the draft is fed: hidden states of the wrong layers or before the norm, another RoPE, stale KV",
            ("vLLM #50170", "SGLang #32226", "vLLM #11672", "vLLM #50169", "vLLM #56734"),
            "run the preflight, then compare the draft's rows in place with those of a fresh prefill",
        )


def _falls_with_length(case: _Case) -> Iterator[Suspicion]:
    first = case.profile.first
    place = _collapse(case, first.position)
    if place is None:
        return
    at, before, after = place
    yield Suspicion(
        "falls with position",
        f"up to {at} tokens of text {before} first drafts are kept, from there on {after}",
        {"from_position": at, "before": before, "after": after, "generations": len(set(first.generation.tolist()))},
        "RoPE and YaRN settings, sliding windows and the length gate of the draft (with one generation: or its age)",
        ("vLLM #58080", "vLLM #57941", "vLLM #50169", "SGLang #38786"),
        "compare the draft's rows there with those of a fresh prefill of the same tokens",
    )


def _falls_with_time(case: _Case) -> Iterator[Suspicion]:
    first = case.profile.first
    place = _collapse(case, first.generation)
    if place is None:
        return
    at, before, after = place
    yield Suspicion(
        "falls with time",
        f"in the first {at} generations {before} first drafts are kept, in later ones {after}",
        {"from_generation": at, "before": before, "after": after},
        "state that outlives a generation: KV or prefix cache written by somebody else",
        ("vLLM #56734", "vLLM #41838", "SGLang #28771"),
        "repeat the first prompt now, and once more after clearing the caches",
    )


def _collapse(case: _Case, along: np.ndarray) -> tuple[int, Share, Share] | None:
    """Where first drafts, well kept below a value of `along`, are near zero from it on: value, before, after.

    Tried at 9 cuts of equal counts. Contents differ too, so each side must hold all of the categories (of several).
    """
    first = case.profile.first
    if case.kind == "lookup" or not len(along):
        return None
    cuts = sorted(set(np.quantile(along, np.linspace(0.1, 0.9, 9), method="nearest").tolist()))
    for cut in cuts:
        behind = along >= cut
        before, after = first.share(~behind), first.share(behind)
        same = set(first.category[behind]) == set(first.category[~behind])
        if before.low > ALIVE and after.high < NEAR_ZERO and same:
            return int(cut), before, after
    return None


def _verify(case: _Case) -> Iterator[Suspicion]:
    hard = [fork for fork in case.forks if not fork["near_tie"]]
    if not hard:
        return
    tested = case.profile.tested
    nothing_rejected = tested.low > PERFECT or (tested.n > 0 and tested.hits == tested.n)
    evidence = {"hard_forks": len(hard), "near_ties": len(case.forks) - len(hard), "kept_of_tested": tested}
    forked = f"{len(hard)} greedy texts leave plain decoding where it is no near-tie"
    if nothing_rejected:
        yield Suspicion(
            "verify side",
            f"{tested} drafts kept, but {forked}",
            evidence,
            "the target's verify forward: it agrees with the draft, and not with itself",
            ("vllm-ascend #9983", "vLLM #51812", "vLLM #54928"),
            "compare the target's rows of a block with those of single steps",
        )
    else:
        yield Suspicion(
            "text differs",
            f"{forked} ({tested} tested drafts kept)",
            evidence,
            "the target's state after a rejection (trimmed too little or too much), then its block forward",
            ("mlxcel #994", "mlx-lm #1109", "llama.cpp #20075", "openvino.genai #4190"),
            "run the preflight's check of the cache after a rejection on the target",
        )


RULES: tuple[Callable[[_Case], Iterator[Suspicion]], ...] = (
    _verify, _constant, _echo, _same_input, _first_only, _narrow, _near_zero, _falls_with_length, _falls_with_time,
)  # fmt: skip
"""In order of how specific they are: what a text differs by counts first, a bare near-zero nearly last."""
