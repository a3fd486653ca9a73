"""The first screen, before any tensor: does the acceptance look like a poor drafter, or like a fault, and which?

A drafter that is merely poor is right a few times in ten, evenly. Faults leave other marks: nothing is ever kept, all
drafts of a round are one token, only the first is ever right, or nothing is from some length on. One rule a fault asks
for a distance that no sound drafter was seen to reach, and for counts that carry it. With too few rounds the verdict is
`inconclusive`, never a guess. What is counted (`Profile`) are the rounds of any engine.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from math import sqrt
from statistics import NormalDist
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import pandas as pd

from specnb.errors import InputError
from specnb.records import Generation, RunRecord

if TYPE_CHECKING:
    from specnb.measure.pair import PairRun, TextFork

LOOKUP = "lookup("
"""How the names of lookup drafters begin: that they rarely match is no fault."""
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


# --- what is counted ------------------------------------------------------------------------------------------------


class Share(NamedTuple):
    """`hits` of `n`, with the Wilson interval (1927) at 95 %; rate NaN and the interval 0..1 where n is 0.

    Trials count as independent. Drafts of one text are not quite, so that whoever decides keeps a distance.
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
        z2 = NormalDist().inv_cdf(0.975) ** 2
        rate, width = hits / n, 1 + z2 / n
        middle = (rate + z2 / (2 * n)) / width
        spread = sqrt(z2 * rate * (1 - rate) / n + z2 * z2 / (4 * n * n)) / width
        return cls(hits, n, rate, max(0.0, min(rate, middle - spread)), min(1.0, max(rate, middle + spread)))

    @classmethod
    def equal(cls, pairs: Sequence[tuple[int, int]]) -> "Share":
        """Pairs of one token twice."""
        return cls.of(sum(a == b for a, b in pairs), len(pairs))

    def __str__(self) -> str:
        return f"{self.hits} of {self.n}"


@dataclass(frozen=True)
class Profile:
    """The drafting rounds of some generations (those with k = 0 say nothing); shares are over their drafts."""

    generations: tuple[Generation, ...]

    @cached_property
    def rounds(self) -> tuple:
        return tuple(r for g in self.generations for r in g.rounds if r.k)

    @cached_property
    def alpha(self) -> tuple[Share, ...]:
        """alpha_k for k = 1, 2, …: P(draft k kept, given that the k - 1 before it were). Of a tree k is the depth."""
        depth = max((r.n_tested for r in self.rounds), default=0)
        kept, tested = (
            [sum(getattr(r, name) > k for r in self.rounds) for k in range(depth)]
            for name in ("n_accepted", "n_tested")
        )
        return tuple(map(Share.of, kept, tested))

    @cached_property
    def total(self) -> Share:
        """Accepted of drafted tokens."""
        return Share.of(sum(r.n_accepted for r in self.rounds), sum(r.k for r in self.rounds))

    @cached_property
    def tested(self) -> Share:
        """Drafts kept of those put to the test: 1 where nothing was ever rejected."""
        return Share.of(sum(r.n_accepted for r in self.rounds), sum(r.n_tested for r in self.rounds))

    @cached_property
    def first(self) -> pd.DataFrame:
        """The first draft of each round that put one to the test: kept, position, generation, category.

        `position` counts the tokens in front of the round, the prompt's among them; `generation` is its index.
        """
        rows = [
            (r.n_accepted > 0, at, index, g.category)
            for index, g in enumerate(self.generations)
            for at, _, r in _drafting(g)
            if r.n_tested
        ]
        return pd.DataFrame(rows, columns=["kept", "position", "generation", "category"])

    @cached_property
    def repeats(self) -> Share:
        """Neighbouring drafts of a chain that are the same token: all of them where each was drawn from one input."""
        return Share.equal([pair for r in self.rounds if not r.parents for pair in pairwise(r.draft_ids)])

    @cached_property
    def all_equal(self) -> Share:
        """Chains of at least two drafts in which d1 = d2 = … = dK."""
        chains = [r for r in self.rounds if not r.parents and len(r.draft_ids) > 1]
        return Share.of(sum(len(set(r.draft_ids)) == 1 for r in chains), len(chains))

    @cached_property
    def echoes(self) -> Share:
        """Rounds whose first draft is the newest token of the text once more."""
        rounds = [(newest, r) for g in self.generations for _, newest, r in _drafting(g)]
        return Share.equal([(newest, r.draft_ids[0]) for newest, r in rounds if r.draft_ids])

    @cached_property
    def text_repeats(self) -> Share:
        """Neighbouring tokens of the texts, prompts included, that are the same: what a right drafter repeats."""
        return Share.equal([pair for text in self._texts for pair in pairwise(text)])

    @cached_property
    def commonest(self) -> tuple[int, Share, Share]:
        """The token that is most often the first draft, its share of the first drafts, and of the texts' tokens."""
        counts = Counter(r.draft_ids[0] for r in self.rounds if r.draft_ids)
        if not counts:
            return -1, Share.of(0, 0), Share.of(0, 0)
        token, hits = counts.most_common(1)[0]
        tokens = [t for text in self._texts for t in text]
        return token, Share.of(hits, counts.total()), Share.of(tokens.count(token), len(tokens))

    @cached_property
    def highest(self) -> int:
        """The highest id that was drafted."""
        return max((t for r in self.rounds for t in r.draft_ids), default=-1)

    @cached_property
    def beyond_drafted(self) -> Share:
        """Generated tokens whose id is above every drafted id: none by chance, where ids are drafted from all."""
        tokens = [t for g in self.generations if any(r.k for r in g.rounds) for t in g.token_ids]
        return Share.of(sum(t > self.highest for t in tokens), len(tokens))

    @cached_property
    def _texts(self) -> tuple[tuple[int, ...], ...]:
        return tuple((*g.prompt_ids, *g.token_ids) for g in self.generations if any(r.k for r in g.rounds))

    def table(self) -> pd.DataFrame:
        """alpha by position: position (1..), alpha, low, high, kept, tested."""
        rows = [(k, s.rate, s.low, s.high, s.hits, s.n) for k, s in enumerate(self.alpha, 1)]
        return pd.DataFrame(rows, columns=["position", "alpha", "low", "high", "kept", "tested"])


def _drafting(generation: Generation) -> Iterator[tuple]:
    """Of each drafting round: tokens in front of it, the newest of them, the round."""
    at = len(generation.prompt_ids)
    newest = generation.prompt_ids[-1] if generation.prompt_ids else -1
    for r in generation.rounds:
        if r.k:
            yield at, newest, r
        at += len(r.committed_ids)
        newest = r.committed_ids[-1] if r.committed_ids else newest


# --- what it may mean -----------------------------------------------------------------------------------------------


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
        columns = list(Suspicion.__dataclass_fields__)
        return pd.DataFrame([[getattr(s, column) for column in columns] for s in self.suspicions], columns=columns)


def triage(
    generations: Sequence[Generation], *, vocab_size: int, forks: Sequence["TextFork | Mapping[str, Any]"] = ()
) -> Triage:
    """Judge the rounds of generations with one drafter, in the order in which they were made.

    `forks` are those of greedy generations that differ from plain decoding (`measure.pair`, or the entries of a
    sweep's record); near-ties among them are no evidence.
    """
    lookup = any(g.drafter.startswith(LOOKUP) for g in generations)
    case = _Case(Profile(tuple(generations)), vocab_size, tuple(map(dict, forks)))
    signs = [sign for rule in (RULES[:1] if lookup else RULES) if (sign := rule(case))]
    if signs:
        suspects = tuple(Suspicion(name, looks_like, evidence, *KNOWN[name]) for name, looks_like, evidence in signs)
        return Triage("suspicious", suspects, case.profile)
    reason = _too_little(case.profile, lookup)
    return Triage("inconclusive" if reason else "nothing suspicious", (), case.profile, reason)


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
        line = triage([g for g in record.generations if g.drafter == drafter], vocab_size=size, forks=forks).line
        lines += [f"{drafter}: {line}"] if line else []
    return lines


def suspicion(result: "PairRun") -> str:
    """The line of a single generation; "" where nothing is suspicious, or nothing was drafted."""
    fork = result.summary.fork
    return triage([result.generation], vocab_size=result.vocab_size, forks=[fork] if fork else []).line


def _too_little(profile: Profile, lookup: bool) -> str:
    if not profile.rounds:
        return "no round drafted anything"
    alpha = profile.alpha[0] if profile.alpha else Share.of(0, 0)
    if not lookup and alpha.low < NEAR_ZERO <= alpha.high:
        return f"{alpha} first drafts kept: anything from {alpha.low:.0%} to {alpha.high:.0%} fits; run more tokens"
    return ""


# --- the faults: where to look, cases upstream, what to try next ----------------------------------------------------

KNOWN: Mapping[str, tuple[str, tuple[str, ...], str]] = {
    "verify side": (
        "the target's verify forward: it agrees with the draft, and not with itself",
        ("vllm-ascend #9983", "vLLM #51812", "vLLM #54928"),
        "compare the target's rows of a block with those of single steps",
    ),
    "text differs": (
        "the target's state after a rejection (trimmed too little or too much), then its block forward",
        ("mlxcel #994", "mlx-lm #1109", "llama.cpp #20075", "openvino.genai #4190"),
        "run the preflight's check of the cache after a rejection on the target",
    ),
    "constant draft": (
        "the draft's head and token map (d2t all zero), and a length gate that feeds a dummy token",
        ("EAGLE #222", "vLLM #58080"),
        "print d2t and the ids that are fed to the draft",
    ),
    "echo": (
        "what the draft is fed (it stands one token behind the text); of heads the loading: left at their identity "
        "start they repeat the backbone's own next token",
        ("SGLang #27829", "speculators #1131", "vLLM #14647"),
        "list the parameters that the loader never wrote, and compare the fed ids with the text",
    ),
    "same input": (
        "the draft loop: every step is fed the same input instead of the prefix and the drafts before it",
        ("exo #1188", "exo #1685", "exo #2065"),
        "run the preflight's recurrence check on this drafter",
    ),
    "first draft only": (
        "the step from one draft to the next: KV slot or position not advanced, the same input fed, one MTP layer "
        "used for all steps, heads behind the first not loaded",
        ("vLLM #52688", "vLLM #9730", "exo #1188"),
        "compare the draft's rows in the round with those of one forward over prefix and drafts",
    ),
    "narrow ids": (
        "the map from draft to target ids: d2t is missing, and draft ids are taken for the first target ids",
        ("NeMo Automodel #2447", "EAGLE #222"),
        "look for d2t in the checkpoint's header",
    ),
    "near zero": (
        "identity (whose experts, head and map does the draft really use), then weights never loaded",
        ("vLLM #33497", "vLLM #33624", "SGLang #27829", "vLLM #46435", "SGLang #39087"),
        "run the preflight, then the draft alone, beside itself and beside a decoy twin",
    ),
    "near zero, above chance": (
        "what the draft is fed: hidden states of the wrong layers or before the norm, another RoPE, stale KV",
        ("vLLM #50170", "SGLang #32226", "vLLM #11672", "vLLM #50169", "vLLM #56734"),
        "run the preflight, then compare the draft's rows in place with those of a fresh prefill",
    ),
    "falls with position": (
        "RoPE and YaRN settings, sliding windows and the length gate of the draft (with one generation: or its age)",
        ("vLLM #58080", "vLLM #57941", "vLLM #50169", "SGLang #38786"),
        "compare the draft's rows there with those of a fresh prefill of the same tokens",
    ),
    "falls with time": (
        "state that outlives a generation: KV or prefix cache written by somebody else",
        ("vLLM #56734", "vLLM #41838", "SGLang #28771"),
        "repeat the first prompt now, and once more after clearing the caches",
    ),
}


# --- the rules: a name of KNOWN, what it looks like, the evidence ---------------------------------------------------


class _Case(NamedTuple):
    """What the rules look at."""

    profile: Profile
    vocab_size: int
    forks: tuple[Mapping[str, Any], ...]


_Sign = tuple[str, str, dict[str, Any]]


def _above_text(drafts: Share, text: Share) -> bool:
    return drafts.low > max(REPEATED, TIMES_TEXT * text.rate if text.n else 0.0)


def _dead_start(profile: Profile) -> bool:
    """Whether next to no first draft is kept."""
    return bool(profile.alpha) and profile.alpha[0].high < NEAR_ZERO


def _verify(case: _Case) -> _Sign | None:
    hard = [fork for fork in case.forks if not fork["near_tie"]]
    if not hard:
        return None
    tested = case.profile.tested
    evidence = {"hard_forks": len(hard), "near_ties": len(case.forks) - len(hard), "kept_of_tested": tested}
    forked = f"{len(hard)} greedy texts leave plain decoding where it is no near-tie"
    if tested.low > PERFECT or (tested.n > 0 and tested.hits == tested.n):
        return "verify side", f"{tested} drafts kept, but {forked}", evidence
    return "text differs", f"{forked} ({tested} tested drafts kept)", evidence


def _constant(case: _Case) -> _Sign | None:
    token, drafted, text = case.profile.commonest
    if not _above_text(drafted, text) or case.profile.tested.rate > ALIVE:
        return None
    evidence = {"token": token, "drafted": drafted, "text": text, "kept": case.profile.tested}
    return "constant draft", f"{drafted} first drafts are token {token}, which is {text} of the text", evidence


def _echo(case: _Case) -> _Sign | None:
    echoes, text = case.profile.echoes, case.profile.text_repeats
    if not _above_text(echoes, text) or case.profile.tested.rate > ALIVE:
        return None
    evidence = {"echoes": echoes, "text_repeats": text, "all_equal": case.profile.all_equal}
    return "echo", f"{echoes} first drafts repeat the newest token, which the text does {text} times", evidence


def _same_input(case: _Case) -> _Sign | None:
    repeats, text, all_equal = case.profile.repeats, case.profile.text_repeats, case.profile.all_equal
    # where drafts behind the first are kept as drafts that know something are, the repeats are the text's
    if not _above_text(repeats, text) or any(share.low > ALIVE for share in case.profile.alpha[1:]):
        return None
    shown = f"in {all_equal} rounds all drafts are one token ({repeats} neighbouring drafts equal, in the text {text})"
    return "same input", shown, {"all_equal": all_equal, "repeats": repeats, "text_repeats": text}


def _first_only(case: _Case) -> _Sign | None:
    alpha = case.profile.alpha
    if len(alpha) < 2 or alpha[0].low < ALIVE or alpha[1].high >= NEAR_ZERO:
        return None
    evidence = {"alpha_1": alpha[0], "alpha_2": alpha[1], "all_equal": case.profile.all_equal}
    shown = f"alpha_1 is {alpha[0].rate:.2f} ({alpha[0]}), alpha_2 {alpha[1].rate:.2f} ({alpha[1]})"
    return "first draft only", shown, evidence


def _narrow(case: _Case) -> _Sign | None:
    beyond, highest = case.profile.beyond_drafted, case.profile.highest
    if not _dead_start(case.profile) or beyond.low < 0.1:
        return None
    shown = f"no drafted id is above {highest} of {case.vocab_size}, but {beyond} generated ids are"
    return "narrow ids", shown, {"highest": highest, "beyond": beyond, "alpha_1": case.profile.alpha[0]}


def _near_zero(case: _Case) -> _Sign | None:
    if not _dead_start(case.profile):
        return None
    alpha = case.profile.alpha[0]
    chance = alpha.n / case.vocab_size
    evidence = {"alpha_1": alpha, "by_chance": chance, "total": case.profile.total}
    if spoken := sorted({g.translation for g in case.profile.generations if g.translation}):
        evidence["translation"] = "; ".join(spoken)  # few shared tokens are a reason, too
    shown = f"{alpha} first drafts kept, {chance:.2g} by chance"
    # one draft may be kept by luck, whatever the vocabulary: with 50 000 ids chance is next to nothing
    if alpha.hits <= CHANCE * chance + 1:
        return "near zero", shown, evidence
    return "near zero, above chance", f"{shown}: the drafts know something", evidence


def _falls_with_length(case: _Case) -> _Sign | None:
    if (place := _collapse(case.profile.first, "position")) is None:
        return None
    at, before, after = place
    n_generations = int(case.profile.first["generation"].nunique())
    shown = f"up to {at} tokens of text {before} first drafts are kept, from there on {after}"
    evidence = {"from_position": at, "before": before, "after": after, "generations": n_generations}
    return "falls with position", shown, evidence


def _falls_with_time(case: _Case) -> _Sign | None:
    if (place := _collapse(case.profile.first, "generation")) is None:
        return None
    at, before, after = place
    shown = f"in the first {at} generations {before} first drafts are kept, in later ones {after}"
    return "falls with time", shown, {"from_generation": at, "before": before, "after": after}


def _collapse(first: pd.DataFrame, column: str) -> tuple[int, Share, Share] | None:
    """Where first drafts, well kept below a value of the column, are near zero from it on: value, before, after.

    Tried at 9 cuts of equal counts. Contents differ too, so each side must hold all of the categories (of several).
    """
    cuts = first[column].quantile(np.linspace(0.1, 0.9, 9), interpolation="nearest").unique() if len(first) else ()
    for cut in cuts:
        sides = first[first[column] < cut], first[first[column] >= cut]
        before, after = (Share.of(int(side["kept"].sum()), len(side)) for side in sides)
        same = set(sides[0]["category"]) == set(sides[1]["category"])
        if before.low > ALIVE and after.high < NEAR_ZERO and same:
            return int(cut), before, after
    return None


RULES: tuple[Callable[[_Case], _Sign | None], ...] = (
    _verify, _constant, _echo, _same_input, _first_only, _narrow, _near_zero, _falls_with_length, _falls_with_time,
)  # fmt: skip
"""In order of how specific they are: what a text differs by counts first, a bare near-zero nearly last."""
