"""The first screen, before any tensor: does the acceptance look like a poor drafter, or like a fault, and which?

A drafter that is merely poor is right a few times in ten, evenly. Faults leave other marks: nothing is ever kept, all
drafts of a round are one token, only the first is ever right, or nothing is from some length on. The table CAUSES pairs
each fault with its mark. A mark asks for a distance that no sound drafter was seen to reach, and for counts that carry
it. With too few rounds the verdict is `inconclusive`, never a guess. The rounds may come from any engine.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import pandas as pd

from specnb.errors import InputError
from specnb.measure.bench import NORMAL, wilson
from specnb.records import Generation, RunRecord

if TYPE_CHECKING:
    from specnb.measure.pair import PairRun, TextFork

LOOKUP = "lookup("
"""How the names of lookup drafters begin: that they rarely match is no fault."""
NEAR_ZERO = 0.05
"""Rate that no fitting drafter stays below: drafts of a small, quantised or translated model are kept 2 to 9 in 10."""
ALIVE = 0.25
"""Rate of drafts that are well kept in one place, where they are near zero in another."""
REPEATED, TIMES_TEXT = 0.3, 3.0
"""Share of neighbouring drafts that are equal, and times that of the text, before it is no matter of the text."""
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
        return cls(hits, n, hits / n, *wilson(hits / n, n, NORMAL))

    @classmethod
    def equal(cls, pairs: Sequence[tuple[int, int]]) -> "Share":
        """Pairs of one token twice."""
        return cls.of(sum(a == b for a, b in pairs), len(pairs))

    def __str__(self) -> str:
        return f"{self.hits} of {self.n}"


@dataclass(frozen=True)
class Profile:
    """The drafting rounds of some generations (those with k = 0 say nothing); shares are over their drafts.

    `forks` are those of greedy texts from plain decoding.
    """

    generations: tuple[Generation, ...]
    vocab_size: int
    forks: tuple[Mapping[str, Any], ...] = ()

    @cached_property
    def rounds(self) -> tuple:
        return tuple(r for g in self.generations for r in g.rounds if r.k)

    @cached_property
    def alpha(self) -> tuple[Share, ...]:
        """alpha_k for k = 1, 2, …: P(draft k kept, given that the k - 1 before it were). Of a tree k is the depth."""
        depth = max((r.n_tested for r in self.rounds), default=0)
        kept = [sum(r.n_accepted > k for r in self.rounds) for k in range(depth)]
        tested = [sum(r.n_tested > k for r in self.rounds) for k in range(depth)]
        return tuple(map(Share.of, kept, tested))

    @cached_property
    def tested(self) -> Share:
        """Drafts kept of those put to the test: 1 where nothing was ever rejected."""
        return Share.of(sum(r.n_accepted for r in self.rounds), sum(r.n_tested for r in self.rounds))

    @property
    def dead_start(self) -> bool:
        """Whether next to no first draft is kept."""
        return bool(self.alpha) and self.alpha[0].high < NEAR_ZERO

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
    def texts(self) -> tuple[tuple[int, ...], ...]:
        """The tokens of texts with drafts, prompts included."""
        return tuple((*g.prompt_ids, *g.token_ids) for g in self.generations if any(r.k for r in g.rounds))

    @cached_property
    def text_repeats(self) -> Share:
        """Neighbouring tokens of the texts that are the same: what a right drafter repeats."""
        return Share.equal([pair for text in self.texts for pair in pairwise(text)])


def _drafting(generation: Generation) -> Iterator[tuple]:
    """Of each drafting round: tokens in front of it, the newest of them, the round."""
    tokens = (*generation.prompt_ids, *generation.token_ids)
    at = len(generation.prompt_ids)
    for r in generation.rounds:
        if r.k:
            yield at, tokens[at - 1], r
        at += len(r.committed_ids)


# --- what it may mean -----------------------------------------------------------------------------------------------


class Suspicion(NamedTuple):
    """A fault that the rounds look like: what was counted, where to look, known cases, what to try next."""

    name: str
    looks_like: str
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


def triage(
    generations: Sequence[Generation], *, vocab_size: int, forks: Sequence["TextFork | Mapping[str, Any]"] = ()
) -> Triage:
    """Judge the rounds of generations with one drafter, in the order in which they were made.

    `forks` are those of greedy generations that differ from plain decoding (`measure.pair`, or the entries of a
    sweep's record); near-ties among them are no evidence.
    """
    profile = Profile(tuple(generations), vocab_size, tuple(map(dict, forks)))
    lookup = any(g.drafter.startswith(LOOKUP) for g in generations)
    names = OF_THE_TARGET if lookup else CAUSES
    marks = {name: CAUSES[name][0](profile) for name in names}
    suspects = tuple(Suspicion(name, mark, *CAUSES[name][1:]) for name, mark in marks.items() if mark)
    if suspects:
        return Triage("suspicious", suspects, profile)
    alpha, reason = profile.alpha[0] if profile.alpha else Share.of(0, 0), ""
    if not profile.rounds:
        reason = "no round drafted anything"
    elif not lookup and alpha.low < NEAR_ZERO <= alpha.high:
        reason = f"{alpha} first drafts kept: anything from {alpha.low:.0%} to {alpha.high:.0%} fits; run more tokens"
    return Triage("inconclusive" if reason else "nothing suspicious", (), profile, reason)


def suspicions(record: RunRecord) -> list[str]:
    """One line for each drafter of a run whose drafts are kept as those of a faulty one are; empty where none is.

    Takes all of a drafter's generations, whatever K and temperature. Forks that the run measured (the K sweep's, of
    one drafter) count, too. Raises InputError for a record that does not say how large the target's vocabulary is.
    """
    size = record.provenance.get("extra", {}).get("vocab_size")
    if size is None:
        raise InputError(f"run {record.run_id} was recorded without the size of the target's vocabulary: run it again")
    forks = record.measurements.get("forks", ())
    by_drafter = {
        drafter: triage([g for g in record.generations if g.drafter == drafter], vocab_size=size, forks=forks)
        for drafter in dict.fromkeys(g.drafter for g in record.generations if g.drafter)
    }
    return [f"{drafter}: {judged.line}" for drafter, judged in by_drafter.items() if judged.suspicious]


def suspicion(result: "PairRun") -> str:
    """The line of a single generation; "" where nothing is suspicious, or nothing was drafted."""
    fork = result.summary.fork
    return triage([result.generation], vocab_size=result.vocab_size, forks=[fork] if fork else []).line


# --- the marks: what the rounds look like, in a sentence; "" where they do not --------------------------------------


def _above_text(drafts: Share, text: Share) -> bool:
    return drafts.low > max(REPEATED, TIMES_TEXT * text.rate if text.n else 0.0)


def _verify(p: Profile) -> str:
    return f"{p.tested} drafts kept, but {_forked(p)}" if _forked(p) and _perfect(p) else ""


def _differs(p: Profile) -> str:
    return f"{_forked(p)} ({p.tested} tested drafts kept)" if _forked(p) and not _perfect(p) else ""


def _perfect(p: Profile) -> bool:
    return p.tested.low > PERFECT or 0 < p.tested.n == p.tested.hits


def _forked(p: Profile) -> str:
    hard = sum(not fork["near_tie"] for fork in p.forks)
    return f"{hard} greedy texts leave plain decoding where it is no near-tie" if hard else ""


def _constant(p: Profile) -> str:
    counts, tokens = Counter(r.draft_ids[0] for r in p.rounds), [t for text in p.texts for t in text]
    token, hits = counts.most_common(1)[0] if counts else (-1, 0)
    drafted, text = Share.of(hits, counts.total()), Share.of(tokens.count(token), len(tokens))
    if not _above_text(drafted, text) or p.tested.rate > ALIVE:
        return ""
    return f"{drafted} first drafts are token {token}, which is {text} of the text"


def _echo(p: Profile) -> str:
    echoes = Share.equal([(newest, r.draft_ids[0]) for g in p.generations for _, newest, r in _drafting(g)])
    if not _above_text(echoes, p.text_repeats) or p.tested.rate > ALIVE:
        return ""
    return f"{echoes} first drafts repeat the newest token, which the text does {p.text_repeats} times"


def _same_input(p: Profile) -> str:
    repeats = Share.equal([pair for r in p.rounds if not r.parents for pair in pairwise(r.draft_ids)])
    # where drafts behind the first are kept as drafts that know something are, the repeats are the text's
    if not _above_text(repeats, p.text_repeats) or any(share.low > ALIVE for share in p.alpha[1:]):
        return ""
    return f"{repeats} neighbouring drafts are one token twice, of the text {p.text_repeats}"


def _first_only(p: Profile) -> str:
    if len(p.alpha) < 2 or p.alpha[0].low < ALIVE or p.alpha[1].high >= NEAR_ZERO:
        return ""
    first, second = p.alpha[:2]
    return f"alpha_1 is {first.rate:.2f} ({first}), alpha_2 {second.rate:.2f} ({second})"


def _narrow(p: Profile) -> str:
    highest = max((t for r in p.rounds for t in r.draft_ids), default=-1)
    tokens = [t for g in p.generations if any(r.k for r in g.rounds) for t in g.token_ids]
    beyond = Share.of(sum(t > highest for t in tokens), len(tokens))  # none by chance, where ids are drafted from all
    if not p.dead_start or beyond.low < 0.1:
        return ""
    return f"no drafted id is above {highest} of {p.vocab_size}, but {beyond} generated ids are"


def _near_zero(p: Profile) -> str:
    return "" if not p.dead_start or _knowing(p) else _few_kept(p)


def _above_chance(p: Profile) -> str:
    return f"{_few_kept(p)}: the drafts know something" if p.dead_start and _knowing(p) else ""


def _few_kept(p: Profile) -> str:
    ways = "; ".join(sorted({g.translation for g in p.generations if g.translation}))
    translated = f" (translated by {ways})" if ways else ""  # few shared tokens are a reason, too
    return f"{p.alpha[0]} first drafts kept{translated}, {p.alpha[0].n / p.vocab_size:.2g} by chance"


def _knowing(p: Profile) -> bool:
    """One draft may be kept by luck, whatever the vocabulary: with 50 000 ids chance is next to nothing."""
    return p.alpha[0].hits > CHANCE * p.alpha[0].n / p.vocab_size + 1


def _falls_with_length(p: Profile) -> str:
    at, before, after = _collapse(p.first, "position")
    return f"up to {at} tokens of text {before} first drafts are kept, from there on {after}" if before else ""


def _falls_with_time(p: Profile) -> str:
    at, before, after = _collapse(p.first, "generation")
    return f"in the first {at} generations {before} first drafts are kept, in later ones {after}" if before else ""


def _collapse(first: pd.DataFrame, column: str) -> tuple[int, Share | None, Share | None]:
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
    return 0, None, None


OF_THE_TARGET = ("verify side", "text differs")
"""Causes that a lookup may show as well."""

CAUSES: Mapping[str, tuple[Callable[[Profile], str], str, tuple[str, ...], str]] = {
    "verify side": (
        _verify,
        "the target's verify forward: it agrees with the draft, and not with itself",
        ("vllm-ascend #9983", "vLLM #51812", "vLLM #54928"),
        "compare the target's rows of a block with those of single steps",
    ),
    "text differs": (
        _differs,
        "the target's state after a rejection (trimmed too little or too much), then its block forward",
        ("mlxcel #994", "mlx-lm #1109", "llama.cpp #20075", "openvino.genai #4190"),
        "run the preflight's check of the cache after a rejection on the target",
    ),
    "constant draft": (
        _constant,
        "the draft's head and token map (d2t all zero), and a length gate that feeds a dummy token",
        ("EAGLE #222", "vLLM #58080"),
        "print d2t and the ids that are fed to the draft",
    ),
    "echo": (
        _echo,
        "what the draft is fed (it stands one token behind the text); of heads the loading: left at their identity "
        "start they repeat the backbone's own next token",
        ("SGLang #27829", "speculators #1131", "vLLM #14647"),
        "list the parameters that the loader never wrote, and compare the fed ids with the text",
    ),
    "same input": (
        _same_input,
        "the draft loop: every step is fed the same input instead of the prefix and the drafts before it",
        ("exo #1188", "exo #1685", "exo #2065"),
        "run the preflight's recurrence check on this drafter",
    ),
    "first draft only": (
        _first_only,
        "the step from one draft to the next: KV slot or position not advanced, the same input fed, one MTP layer "
        "used for all steps, heads behind the first not loaded",
        ("vLLM #52688", "vLLM #9730", "exo #1188"),
        "compare the draft's rows in the round with those of one forward over prefix and drafts",
    ),
    "narrow ids": (
        _narrow,
        "the map from draft to target ids: d2t is missing, and draft ids are taken for the first target ids",
        ("NeMo Automodel #2447", "EAGLE #222"),
        "look for d2t in the checkpoint's header",
    ),
    "near zero": (
        _near_zero,
        "identity (whose experts, head and map does the draft really use), then weights never loaded",
        ("vLLM #33497", "vLLM #33624", "SGLang #27829", "vLLM #46435", "SGLang #39087"),
        "run the preflight, then the draft alone, beside itself and beside a decoy twin",
    ),
    "near zero, above chance": (
        _above_chance,
        "what the draft is fed: hidden states of the wrong layers or before the norm, another RoPE, stale KV",
        ("vLLM #50170", "SGLang #32226", "vLLM #11672", "vLLM #50169", "vLLM #56734"),
        "run the preflight, then compare the draft's rows in place with those of a fresh prefill",
    ),
    "falls with position": (
        _falls_with_length,
        "RoPE and YaRN settings, sliding windows and the length gate of the draft (with one generation: or its age)",
        ("vLLM #58080", "vLLM #57941", "vLLM #50169", "SGLang #38786"),
        "compare the draft's rows there with those of a fresh prefill of the same tokens",
    ),
    "falls with time": (
        _falls_with_time,
        "state that outlives a generation: KV or prefix cache written by somebody else",
        ("vLLM #56734", "vLLM #41838", "SGLang #28771"),
        "repeat the first prompt now, and once more after clearing the caches",
    ),
}
"""By name: the mark, where to look, cases upstream, what to try next. In order of how specific they are."""
