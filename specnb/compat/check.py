"""Will this draft work with that target? The verdict, every difference, and what other engines would say.

check(describe("smollm2-135m"), describe("qwen2.5-0.5b-instruct")).verdict   # needs translation
"""

from collections.abc import Sequence
from enum import StrEnum
from itertools import permutations, zip_longest
from typing import NamedTuple

import pandas as pd

from specnb.compat.description import Description
from specnb.compat.findings import BESIDE_TOKENS, Finding, IdComparison, compare_ids, findings
from specnb.compat.predict import predict, reach_of
from specnb.draft.token_map import VocabularyOverlap, Way, fit
from specnb.errors import InputError


class Verdict(StrEnum):
    """What has to be done so that the draft's tokens can be verified by the target."""

    DROP_IN = "drop-in"
    SLICING = "works with slicing"
    TRANSLATION = "needs translation"
    IMPOSSIBLE = "impossible"
    UNKNOWN = "unknown"  # a tokenizer is not at hand


OF_WAY = {
    Way.SAME: Verdict.DROP_IN,
    Way.SLICING: Verdict.SLICING,
    Way.TOKENS: Verdict.TRANSLATION,
    Way.STRINGS: Verdict.TRANSLATION,
    Way.NONE: Verdict.IMPOSSIBLE,
    None: Verdict.UNKNOWN,
}
"""The verdict on each way that `load_drafter` would take."""

SIZE_DIFFERENCE = 128
"""SPEC_VOCAB_MAX_SIZE_DIFFERENCE. It was 100 before 2025."""
FIRST_TEXT = 5
"""SPEC_VOCAB_CHECK_START_TOKEN_ID: texts of smaller ids are never compared."""


class Opinion(NamedTuple):
    """What an engine's check says: accepted or not (None: it cannot be told from what is known), and why."""

    accepts: bool | None
    reason: str


class Report(NamedTuple):
    """A pair's verdict on tokens, all findings, and what other engines would say.

    `way` is the one that `load_drafter` takes, `overlap` what is shared under whatever id, `ids` what the same ids
    mean, `reach` the share of an ordinary text's tokens that can be drafted (see `compat.predict`); all four are None
    where a vocabulary is not at hand. The verdict is about tokens alone; what else stands in the way (a recurrent
    state) is a finding of severity BREAKS. `from_memory` names what of the two no document at hand shows.
    """

    target: str
    draft: str
    verdict: Verdict
    way: Way | None
    overlap: VocabularyOverlap | None
    ids: IdComparison | None
    reach: float | None
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
        o, ids = self.overlap, self.ids
        return self._asdict() | {
            "overlap": o and o._asdict() | {"of_target": o.of_target, "of_draft": o.of_draft},
            "ids": ids and ids._asdict() | {"examples": [[i, a.hex(), b.hex()] for i, a, b in ids.examples]},
            "findings": self.to_frame().to_dict(orient="records"),
            "llama_cpp": self.llama_cpp._asdict(),
            "transformers": self.transformers._asdict(),
        }

    def expectation(self, k: int = 4) -> str:
        """What the verdict predicts at draft length `k`, in a sentence; empty where it cannot be told."""
        if not self.reach:
            return ""
        best = predict(self.reach, k)
        return (
            f"Of an ordinary text's tokens {self.reach:.1%} can be drafted. At K = {k} a draft that is never wrong "
            f"about them has {best.acceptance_rate:.0%} accepted and {best.tau:.2f} tokens a target call; one that is "
            f"right about a token with chance a, in the target's own tokens, has alpha = {self.reach:.3f} a."
        )

    def summary(self) -> str:
        """The verdict in a sentence, with the overlap."""
        o, n = self.overlap, self.ids.n_different if self.ids else 0
        memory = f" From memory, in no document at hand: {', '.join(self.from_memory)}." if self.from_memory else ""
        if o is None:
            return f"{self.draft} for {self.target}: {self.verdict}; a tokenizer is not at hand.{memory}"
        shared = f"{o.shared:,} pieces in common ({o.of_target:.1%} of the target's, {o.of_draft:.1%} of the draft's)"
        ids = f"{n:,} ids mean other texts" if n else "every id that both have means the same"
        by = f" by {self.way}" if self.verdict is Verdict.TRANSLATION else ""
        others = [f"{f.topic} ({f.target}, {f.draft})" for f in self.findings if f.topic in BESIDE_TOKENS]
        but = f" Beside the tokens: {'; '.join(others)}." if others else ""
        return f"{self.draft} for {self.target}: {self.verdict}{by}; {ids}; {shared}.{but}{memory}"


def check(target: Description, draft: Description) -> Report:
    """Compare a draft model with its target. Only descriptions are read, no weights."""
    pair = target.tokens, draft.tokens
    known = None if None in pair else fit(*pair)
    way, overlap = known or (None, None)
    ids = known and compare_ids(*pair)
    return Report(
        target.name,
        draft.name,
        OF_WAY[way],
        way,
        overlap,
        ids,
        known and reach_of(known),
        findings(target, draft, ids),
        _llama_cpp(target, draft),
        _transformers(target, draft),
        tuple(f"{d.name}'s {key}" for d in (target, draft) for key in d.from_memory),
    )


def matrix(described: Sequence[Description]) -> pd.DataFrame:
    """Every ordered pair of two different models, one row each: verdict, overlap, what other engines would say.

    Raises InputError for fewer than two models, or two of the same name.
    """
    names = [d.name for d in described]
    if len(names) < 2 or len(set(names)) < len(names):
        raise InputError(f"got {', '.join(names)}, expected two or more different models")
    return pd.DataFrame([_row(check(target, draft)) for target, draft in permutations(described, 2)])


def _row(report: Report) -> dict[str, object]:
    ids, overlap = report.ids, report.overlap
    return {
        "target": report.target,
        "draft": report.draft,
        "verdict": str(report.verdict),
        "way": report.way and str(report.way),
        "first_difference": ids and ids.first_difference,
        "n_different": ids and ids.n_different,
        "share_target": overlap and overlap.of_target,
        "share_draft": overlap and overlap.of_draft,
        "text_shared": overlap and overlap.target_uses,
        "llama_cpp": report.llama_cpp.accepts,
        "transformers": report.transformers.accepts,
    }


def _llama_cpp(target: Description, draft: Description) -> Opinion:
    """What `common_speculative_are_compatible` (common/speculative.cpp) says; the first difference decides.

    Type, add_bos and bos, add_eos and eos, size difference <= 128, texts from id 5.
    """
    pair, vocabs = (target, draft), (target.vocab, draft.vocab)
    if None not in vocabs and target.vocab.kind != draft.vocab.kind:
        return Opinion(False, f"vocabulary types {target.vocab.kind} and {draft.vocab.kind}")
    for name in ("bos", "eos"):
        adds, ids = ([getattr(d, key) for d in pair] for key in (f"add_{name}", name))
        if None in adds:
            return Opinion(None, f"add_{name} is not known of both")
        if adds[0] != adds[1]:
            return Opinion(False, f"add_{name} {adds[0]} and {adds[1]}")
        if adds[0] and ids[0] != ids[1]:
            return Opinion(False, f"{name.upper()} {ids[0]} and {ids[1]}, which are added to every prompt")
    sizes = [d.vocab_size for d in pair]
    if None in sizes:
        return Opinion(None, "vocab_size is not known of both")
    if abs(sizes[0] - sizes[1]) > SIZE_DIFFERENCE:
        return Opinion(False, f"sizes {sizes[0]} and {sizes[1]} differ by more than {SIZE_DIFFERENCE}")
    if None in vocabs:
        return Opinion(None, "the texts of the tokens are not at hand")
    rows = enumerate(zip_longest(*(d.vocab.pieces[: min(d.n_tokens, *sizes)] for d in pair), fillvalue=b""))
    for at, (a, b) in rows:
        if at >= FIRST_TEXT and a != b:
            return Opinion(False, f"token {at} is {a!r} and {b!r}")
    return Opinion(True, f"type, added BOS and EOS, sizes and texts from id {FIRST_TEXT} agree")


def _transformers(target: Description, draft: Description) -> Opinion:
    """What generation's check of transformers 5.23 says: equal sizes are taken for equal tokenizers."""
    a, b = target.vocab_size, draft.vocab_size
    if None in (a, b):
        return Opinion(None, "vocab_size is not known of both")
    if a == b:
        return Opinion(True, f"config.vocab_size is {a} in both; the tokenizers are not compared")
    return Opinion(False, f"config.vocab_size {a} and {b}: taken for different tokenizers, it asks for both of them")
