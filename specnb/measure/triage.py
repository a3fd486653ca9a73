"""The first screen, before any tensor: does the acceptance look like a poor drafter, or like a fault, and which?

A drafter that is merely poor is right a few times in ten, evenly. Faults leave other marks: nothing is ever kept, all
drafts of a round are one token, only the first is ever right, or nothing is from some length on. A mark asks for a
distance that no sound drafter was seen to reach, and for counts that carry it. With too few rounds the verdict is
`inconclusive`, never a guess. The rounds may come from any engine.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from specnb.io import read_toml
from specnb.measure.bench import NORMAL, wilson
from specnb.records import Generation, Round, RunRecord

if TYPE_CHECKING:
    from specnb.measure.fork import TextFork
    from specnb.measure.pair import PairRun

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
"""Times the number that guessing would keep (and one more), beyond which drafts carry information."""
PARTS = 10
"""Parts of as many first drafts each, in the order of the text in front, at whose borders a collapse is looked for."""

REMEDIES = read_toml(Path(__file__).with_name("remedies.toml"))
"""For each fault where to look, and what to try next."""


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
    def true_among(cls, answers: Sequence[bool]) -> "Share":
        return cls.of(sum(answers), len(answers))

    def __str__(self) -> str:
        return f"{self.hits} of {self.n}"


class Suspicion(NamedTuple):
    """A fault that the rounds look like: what was counted, where to look, what to try next."""

    name: str
    looks_like: str
    where: str
    next_experiment: str


class Triage(NamedTuple):
    """What the acceptance of some rounds looks like. `suspicions` are ranked, the most specific first."""

    verdict: Literal["suspicious", "nothing suspicious", "inconclusive"]
    suspicions: tuple[Suspicion, ...] = ()

    @property
    def line(self) -> str:
        """One line for the reader of a run; "" when nothing is suspicious."""
        if not self.suspicions:
            return ""
        top = self.suspicions[0]
        return f"suspicious acceptance: {top.looks_like}; look at {top.where}; next: {top.next_experiment}"


def triage(
    generations: Sequence[Generation], *, vocab_size: int, forks: Sequence["TextFork | Mapping[str, Any]"] = ()
) -> Triage:
    """Judge the rounds of generations with one drafter; those with k = 0 say nothing.

    `forks` are those of greedy generations that differ from plain decoding (`measure.fork`, or the entries of a
    sweep's record); near-ties among them are no evidence.
    """
    drafted = [g for g in generations if any(r.k for r in g.rounds)]
    if not drafted:
        return Triage("inconclusive")
    lookup = any(g.drafter.startswith(LOOKUP) for g in drafted)
    alphas = alpha(drafted) or [Share.of(0, 0)]
    tested = Share.of(sum(share.hits for share in alphas), sum(share.n for share in alphas))
    marks = []
    if hard := sum(not dict(fork)["near_tie"] for fork in forks):  # a lookup may show this as well
        forked = f"{hard} greedy texts leave plain decoding where it is no near-tie"
        if tested.rate > PERFECT:
            marks.append(("verify side", f"{tested} drafts kept, but {forked}"))
        else:
            marks.append(("text differs", f"{forked} ({tested} tested drafts kept)"))
    if not lookup:
        marks += _marks_of_draft(drafted, alphas, tested, vocab_size)
    if marks:
        return Triage("suspicious", tuple(Suspicion(name, mark, **REMEDIES[name]) for name, mark in marks))
    unsure = not lookup and alphas[0].low < NEAR_ZERO <= alphas[0].high
    return Triage("inconclusive" if unsure else "nothing suspicious")


def suspicions(record: RunRecord) -> list[str]:
    """One line for each drafter of a run whose drafts are kept as those of a faulty one are; empty where none is.

    Takes all of a drafter's generations, whatever K and temperature. Forks that the run measured (the K sweep's, of
    one drafter) count, too.
    """
    size = record.provenance["extra"]["vocab_size"]
    forks = record.measurements.get("forks", ())
    lines = []
    for drafter in dict.fromkeys(g.drafter for g in record.generations if g.drafter):
        judged = triage([g for g in record.generations if g.drafter == drafter], vocab_size=size, forks=forks)
        if judged.line:
            lines.append(f"{drafter}: {judged.line}")
    return lines


def suspicion(result: "PairRun") -> str:
    """The line of a single generation; "" where nothing is suspicious, or nothing was drafted."""
    fork = result.summary.fork
    return triage([result.generation], vocab_size=result.vocab_size, forks=[fork] if fork else []).line


# --- the marks: names of faults, and what the rounds look like; the most specific first -----------------------------


def _marks_of_draft(
    drafted: Sequence[Generation], alphas: Sequence[Share], tested: Share, vocab_size: int
) -> Iterator[tuple[str, str]]:
    """Those that a lookup cannot show; `tested` are drafts kept of those put to the test."""
    texts = [(*g.prompt_ids, *g.token_ids) for g in drafted]
    tokens = [token for text in texts for token in text]
    text_repeats = Share.true_among([a == b for text in texts for a, b in pairwise(text)])
    starts = [start for g in drafted for start in _starts(g)]
    rounds = [r for *_, r in starts]
    alive = tested.rate > ALIVE

    (token, hits), *_ = Counter(r.draft_ids[0] for r in rounds).most_common(1)
    constant, of_text = Share.of(hits, len(rounds)), Share.of(tokens.count(token), len(tokens))
    if _above(constant, of_text) and not alive:
        yield "constant draft", f"{constant} first drafts are token {token}, which is {of_text} of the text"

    echoes = Share.true_among([newest == r.draft_ids[0] for _, newest, _, r in starts])
    if _above(echoes, text_repeats) and not alive:
        yield "echo", f"{echoes} first drafts repeat the newest token, which the text does {text_repeats} times"

    repeats = Share.true_among([a == b for r in rounds if not r.parents for a, b in pairwise(r.draft_ids)])
    # where drafts behind the first are kept as drafts that know something are, the repeats are the text's
    if _above(repeats, text_repeats) and not any(share.low > ALIVE for share in alphas[1:]):
        yield "same input", f"{repeats} neighbouring drafts are one token twice, of the text {text_repeats}"

    if len(alphas) > 1 and alphas[0].low >= ALIVE and alphas[1].high < NEAR_ZERO:
        first, second = alphas[:2]
        yield "first draft only", f"alpha_1 is {first.rate:.2f} ({first}), alpha_2 {second.rate:.2f} ({second})"

    if alphas[0].high < NEAR_ZERO:
        highest, generated = max(t for r in rounds for t in r.draft_ids), [t for g in drafted for t in g.token_ids]
        beyond = Share.true_among([t > highest for t in generated])  # none by chance
        if beyond.low >= 0.1:
            yield "narrow ids", f"no drafted id is above {highest} of {vocab_size}, but {beyond} generated ids are"
        ways = "; ".join(sorted({g.translation for g in drafted if g.translation}))
        translated = f" (translated by {ways})" if ways else ""  # few shared tokens are a reason, too
        by_chance = alphas[0].n / vocab_size
        few = f"{alphas[0]} first drafts kept{translated}, {by_chance:.2g} by chance"
        if alphas[0].hits > CHANCE * by_chance + 1:  # one may be kept by luck, whatever the vocabulary
            yield "near zero, above chance", f"{few}: the drafts carry information"
        else:
            yield "near zero", few

    first_drafts = sorted((at, r.n_accepted > 0, content) for at, _, content, r in starts if r.n_tested)
    for n in (len(first_drafts) * part // PARTS for part in range(1, PARTS)):
        sides = first_drafts[:n], first_drafts[n:]
        before, after = (Share.true_among([kept for _, kept, _ in side]) for side in sides)
        # contents differ too, so each side must hold all of them
        same = {content for *_, content in sides[0]} == {content for *_, content in sides[1]}
        if before.low > ALIVE and after.high < NEAR_ZERO and same:
            place = f"up to {first_drafts[n][0]} tokens of text"
            yield "falls with position", f"{place} {before} first drafts are kept, from there on {after}"
            return


def alpha(drafted: Sequence[Generation]) -> list[Share]:
    """alpha_k for k = 1, 2, …: P(draft k kept, given that the k - 1 before it were). Of a tree k is the depth."""
    rounds = [r for g in drafted for r in g.rounds]
    depths = range(max((r.n_tested for r in rounds), default=0))
    return [Share.true_among([r.n_accepted > k for r in rounds if r.n_tested > k]) for k in depths]


def _above(drafts: Share, text: Share) -> bool:
    return drafts.low > max(REPEATED, TIMES_TEXT * text.rate if text.n else 0.0)


def _starts(generation: Generation) -> Iterator[tuple[int, int, str, Round]]:
    """Of each drafting round: tokens in front of it, the newest of them, the content, the round."""
    tokens = (*generation.prompt_ids, *generation.token_ids)
    at = len(generation.prompt_ids)
    for r in generation.rounds:
        if r.k:
            yield at, tokens[at - 1], generation.category, r
        at += len(r.committed_ids)
