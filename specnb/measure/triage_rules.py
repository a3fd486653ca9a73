"""What each fault of a drafter leaves in its acceptance: one rule a fault, with the cases seen upstream.

A rule asks for a distance that no sound drafter was seen to reach, and for counts that carry it.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from specnb.measure.acceptance import Profile, Share

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
class Case:
    """What the rules look at."""

    profile: Profile
    vocab_size: int
    kind: DrafterKind
    forks: tuple[Mapping[str, Any], ...]


def _above_text(drafts: Share, text: Share) -> bool:
    return drafts.low > max(REPEATED, TIMES_TEXT * text.rate if text.n else 0.0)


def _constant(case: Case) -> Iterator[Suspicion]:
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


def _echo(case: Case) -> Iterator[Suspicion]:
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


def _same_input(case: Case) -> Iterator[Suspicion]:
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


def _kept_later(found: Profile) -> bool:
    """Whether drafts behind the first are kept as drafts that know something are: repeats are the text's then."""
    return any(share.low > ALIVE for share in found.alpha[1:])


def _first_only(case: Case) -> Iterator[Suspicion]:
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


def _narrow(case: Case) -> Iterator[Suspicion]:
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


def _near_zero(case: Case) -> Iterator[Suspicion]:
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


def _falls_with_length(case: Case) -> Iterator[Suspicion]:
    first = case.profile.first
    found = _collapse(case, first.position)
    if found is None:
        return
    at, before, after = found
    yield Suspicion(
        "falls with position",
        f"up to {at} tokens of text {before} first drafts are kept, from there on {after}",
        {"from_position": at, "before": before, "after": after, "generations": len(set(first.generation.tolist()))},
        "RoPE and YaRN settings, sliding windows and the length gate of the draft (with one generation: or its age)",
        ("vLLM #58080", "vLLM #57941", "vLLM #50169", "SGLang #38786"),
        "compare the draft's rows there with those of a fresh prefill of the same tokens",
    )


def _falls_with_time(case: Case) -> Iterator[Suspicion]:
    first = case.profile.first
    found = _collapse(case, first.generation)
    if found is None:
        return
    at, before, after = found
    yield Suspicion(
        "falls with time",
        f"in the first {at} generations {before} first drafts are kept, in later ones {after}",
        {"from_generation": at, "before": before, "after": after},
        "state that outlives a generation: KV or prefix cache written by somebody else",
        ("vLLM #56734", "vLLM #41838", "SGLang #28771"),
        "repeat the first prompt now, and once more after clearing the caches",
    )


def _collapse(case: Case, along: np.ndarray) -> tuple[int, Share, Share] | None:
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


def _verify(case: Case) -> Iterator[Suspicion]:
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


RULES: tuple[Callable[[Case], Iterator[Suspicion]], ...] = (
    _verify, _constant, _echo, _same_input, _first_only, _narrow, _near_zero, _falls_with_length, _falls_with_time,
)  # fmt: skip
"""In order of how specific they are: what a text differs by counts first, a bare near-zero nearly last."""
