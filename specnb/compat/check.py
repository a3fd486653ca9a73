"""Check whether a draft model works with a target: verdict, differences, other engines' checks.

`check(describe("smollm2-135m"), describe("qwen2.5-0.5b-instruct")).verdict`: "needs translation".
"""

from collections.abc import Iterator, Sequence
from enum import IntEnum, StrEnum
from itertools import groupby, permutations, zip_longest
from operator import ne
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from specnb.compat.description import Description, State
from specnb.draft.model import n_common
from specnb.draft.token_map import Fit, Tokens, Translation, VocabularyOverlap, choose_translation
from specnb.errors import OTHER_DRAFTERS, InputError
from specnb.io import read_toml


class Verdict(StrEnum):
    """The step needed before the target can verify the draft model's tokens."""

    DROP_IN = "drop-in"
    SLICING = "works with slicing"
    TRANSLATION = "needs translation"
    IMPOSSIBLE = "impossible"
    UNKNOWN = "unknown"  # a tokenizer is not available


VERDICTS = {
    Translation.SAME: (Verdict.DROP_IN, "all ids mean the same"),
    Translation.SLICING: (Verdict.SLICING, "every id that both have means the same"),
    Translation.TOKENS: (Verdict.TRANSLATION, "{0.n_different:,} ids mean other texts"),
    Translation.NONE: (Verdict.IMPOSSIBLE, "the tokens cannot be translated"),
    None: (Verdict.UNKNOWN, "a tokenizer is not available"),
}
"""The verdict and its reason for each translation that `load_drafter` would use."""


class Severity(IntEnum):
    """The effect of a difference."""

    NOTE = 0  # no effect on speculation
    LOWERS = 1  # acceptance is lower than it could be
    BREAKS = 2  # ids or states cannot be used as they are


NOTE, LOWERS, BREAKS = Severity
EXAMPLES = 5


class IdComparison(NamedTuple):
    """The agreement of two vocabularies on the meaning of ids.

    `first_difference` is the smallest id that both have with different pieces, `n_different` is the
    number of such ids, and `examples` holds the first few as (id, target's piece, draft's piece).
    """

    n_target: int
    n_draft: int
    first_difference: int | None
    n_different: int
    examples: tuple[tuple[int, bytes, bytes], ...]


def compare_ids(target: Tokens, draft: Tokens) -> IdComparison:
    """Compare two vocabularies id by id, except the padding rows at their ends."""
    a = target.by_id
    b = draft.by_id
    differ = [i for i, unequal in enumerate(map(ne, a, b)) if unequal]
    examples = tuple((i, a[i], b[i]) for i in differ[:EXAMPLES])
    return IdComparison(len(a), len(b), differ[0] if differ else None, len(differ), examples)


class Finding(NamedTuple):
    """One difference, with both values and the remedy."""

    topic: str
    severity: Severity
    target: str
    draft: str
    remedy: str


BESIDE_TOKENS = ("state of the target", "state of the draft", "modified draft")
"""Topics that matter even if all tokens match."""


class Opinion(NamedTuple):
    """An engine's own check: whether it accepts the pair (None if unknown), and why."""

    accepts: bool | None
    reason: str


class Report(NamedTuple):
    """The verdict on a pair, all findings, and other engines' checks.

    `way`: the translation that `load_drafter` uses. `overlap`: the pieces shared under any id.
    `ids`: the comparison id by id. `reach`: the share of an ordinary text's tokens that can be
    drafted (see `predict`). All four are None if a vocabulary is not available. The verdict only
    concerns tokens; other obstacles, such as a recurrent state, are findings of severity BREAKS.
    `from_memory` names the facts that no available document shows.
    """

    target: str
    draft: str
    verdict: Verdict
    way: Translation | None
    overlap: VocabularyOverlap | None
    ids: IdComparison | None
    reach: float | None
    findings: tuple[Finding, ...]
    llama_cpp: Opinion
    transformers: Opinion
    from_memory: tuple[str, ...]

    def to_frame(self) -> pd.DataFrame:
        """Return one row per finding: topic, severity, both values, remedy."""
        rows = [f._replace(severity=f.severity.name.lower()) for f in self.findings]
        return pd.DataFrame(rows, columns=list(Finding._fields))

    def to_json(self) -> dict[str, object]:
        """Return JSON values, with pieces as hexadecimal bytes."""
        o = self.overlap
        ids = self.ids
        return self._asdict() | {
            "overlap": o and o._asdict() | {"of_target": o.of_target, "of_draft": o.of_draft},
            "ids": ids
            and ids._asdict() | {"examples": [[i, a.hex(), b.hex()] for i, a, b in ids.examples]},
            "findings": self.to_frame().to_dict(orient="records"),
            "llama_cpp": self.llama_cpp._asdict(),
            "transformers": self.transformers._asdict(),
        }

    def expectation(self, k: int = 4) -> str:
        """Return a sentence with the predicted acceptance at draft length `k`, or "" if unknown."""
        if not self.reach:
            return ""
        best = predict(self.reach, k)
        return (
            f"Of an ordinary text's tokens, {self.reach:.1%} can be drafted. At K = {k}, "
            "a draft model that predicts all of them correctly has "
            f"{best.acceptance_rate:.0%} of its draft tokens accepted, with {best.tau:.2f} "
            "tokens per target forward pass. If it predicts a token with probability a, "
            f"alpha = {self.reach:.3f} a."
        )

    def why(self) -> str:
        """Return the reason for the verdict in words."""
        return VERDICTS[self.way][1].format(self.ids)

    def summary(self) -> str:
        """Return the verdict in a sentence, with the overlap."""
        o = self.overlap
        memory = (
            f" From memory, without a document: {', '.join(self.from_memory)}."
            if self.from_memory
            else ""
        )
        if o is None:
            return f"{self.draft} for {self.target}: {self.verdict}; {self.why()}.{memory}"
        shared = (
            f"{o.shared:,} pieces in common "
            f"({o.of_target:.1%} of the target's, {o.of_draft:.1%} of the draft's)"
        )
        by = f" by {self.way}" if self.verdict is Verdict.TRANSLATION else ""
        others = [
            f"{f.topic} ({f.target}, {f.draft})" for f in self.findings if f.topic in BESIDE_TOKENS
        ]
        but = f" Apart from the tokens: {'; '.join(others)}." if others else ""
        return (
            f"{self.draft} for {self.target}: {self.verdict}{by}; "
            f"{self.why()}; {shared}.{but}{memory}"
        )


def check(target: Description, draft: Description) -> Report:
    """Compare a draft model with a target, from their descriptions alone.

    >>> from specnb.compat.read import describe
    >>> check(describe("qwen2.5"), describe("qwen3")).verdict.value
    'works with slicing'
    """
    pair = target, draft
    tokens = target.tokens, draft.tokens
    fitted = None if None in tokens else choose_translation(*tokens)
    way, overlap = fitted or (None, None)
    ids = fitted and compare_ids(*tokens)
    rows = [*_of_pieces(*pair, ids, way), *_of_texts(*pair), *_of_fields(*pair), *_of_models(*pair)]
    return Report(
        target.name,
        draft.name,
        VERDICTS[way][0],
        way,
        overlap,
        ids,
        fitted and reach_of(fitted),
        tuple(sorted(map(Finding._make, rows), key=lambda finding: -finding.severity)),
        Opinion(*_llama_cpp(*pair)),
        Opinion(*_transformers(*pair)),
        tuple(f"{d.name}'s {key}" for d in pair for key in d.from_memory),
    )


def matrix(described: Sequence[Description]) -> pd.DataFrame:
    """Return one row per ordered pair of models: verdict, overlap, other engines' checks.

    Raises InputError for fewer than two models, or two with the same name.
    """
    names = [d.name for d in described]
    if len(names) < 2 or len(set(names)) < len(names):
        raise InputError(f"got {', '.join(names)}, expected two or more different models")
    rows = []
    for pair in permutations(described, 2):
        report = check(*pair)
        ids = report.ids
        overlap = report.overlap
        rows.append(
            {
                "target": report.target,
                "draft": report.draft,
                "verdict": str(report.verdict),
                "way": report.way and str(report.way),
                "why": f"{report.why()}; llama.cpp: {report.llama_cpp.reason}",
                "first_difference": ids and ids.first_difference,
                "n_different": ids and ids.n_different,
                "share_target": overlap and overlap.of_target,
                "share_draft": overlap and overlap.of_draft,
                "text_shared": overlap and overlap.target_uses,
                "llama_cpp": report.llama_cpp.accepts,
                "transformers": report.transformers.accepts,
            }
        )
    return pd.DataFrame(rows)


# --- predictions ----------------------------------------------------------------------------------
#
# `reach` is the share of an ordinary text's tokens, in the target's tokenization, that the draft
# model can propose. `quality` is the probability that it predicts a token correctly in the target's
# own vocabulary. Then (Leviathan 2211.17192)
#
#     alpha = quality * reach,   tau = 1 + alpha + … + alpha^K,   acceptance = (tau - 1) / K
#
# This assumes that shared tokens are no easier to predict than others, that the draft model is as
# good after a token that it had to spell, and that the text is an ordinary one. The second
# assumption is optimistic: for SmolLM2-135M with the tokens of five other families, K = 4, greedy,
# the measured rate is 0.00 to 0.11 below the predicted one on code and prose (notebook 03 shows
# both), and 0.08 to 0.17 below it on editing chats. `quality` comes from a run of the same draft
# model in the target's vocabulary, or is 1, the upper bound.


class Prediction(NamedTuple):
    """`tau` tokens per target forward pass, and accepted / drafted tokens in rounds of K."""

    tau: float
    acceptance_rate: float


def reach_of(fit: Fit) -> float | None:
    """Return the share of an ordinary text's tokens that can be drafted, or None if unknown."""
    if fit.way is Translation.SAME:
        return 1.0
    if fit.way is Translation.NONE:
        return 0.0
    return fit.overlap.target_uses


def predict(reach: float, k: int, quality: float = 1.0) -> Prediction:
    """Return the acceptance at draft length `k` >= 1; `reach` and `quality` are between 0 and 1.

    >>> predict(0.5, 2)
    Prediction(tau=1.75, acceptance_rate=0.375)
    """
    alpha = reach * quality
    accepted = sum(alpha**j for j in range(1, k + 1))
    return Prediction(1 + accepted, accepted / k)


# --- findings -------------------------------------------------------------------------------------


def _of_pieces(
    target: Description, draft: Description, ids: IdComparison | None, way: Translation | None
) -> Iterator[tuple]:
    if ids is None:
        values = ["at hand" if d.vocab else "not at hand" for d in (target, draft)]
        sources = " and ".join(
            d.hub or f"a file or folder of {d.name}" for d in (target, draft) if d.vocab is None
        )
        remedy = (
            f"give {sources} with the tokenizer "
            "(if gated: accept the license there, then hf auth login)"
        )
        yield "pieces", BREAKS, *values, remedy
        return
    if ids.n_different:
        token, a, b = ids.examples[0]
        remedy = (
            "drafted ids would mean other texts: "
            "translate (load_drafter does), or take a draft of this tokenizer"
        )
        if way is Translation.NONE:
            remedy = f"the tokens cannot be translated. {OTHER_DRAFTERS}"
        yield (
            "pieces",
            BREAKS,
            f"id {token} is {_quote(a)}",
            f"{_quote(b)}; {ids.n_different} ids differ",
            remedy,
        )
    if ids.n_target != ids.n_draft:
        severity = LOWERS if ids.n_different else NOTE
        yield "len(tokenizer)", severity, str(ids.n_target), str(ids.n_draft), NEVER_DRAFTED


PROBE = """def f(x):
    return x**2  # squared
a  b   c\t\td e \u00a0f 3.14159 1,000,000 0xFF 推測的デコーディング 추측 \
👩‍🔬🇨🇭 ✅ caf\ufffd Zürich e\u0301"""
"""A text that tokenizers split or normalize differently."""


def _of_texts(target: Description, draft: Description) -> Iterator[tuple]:
    """Compare the ids of PROBE from the first difference on, if both tokenizers are available."""
    if not (target.tokenizer and draft.tokenizer):
        return
    try:
        ids = target.encode(PROBE)
        others = draft.encode(PROBE)
    except InputError:  # one of them cannot encode a character
        return
    if ids != others:
        remedy = (
            "only the target encodes prompts; "
            "a draft trained on another tokenization predicts worse"
        )
        n = n_common(ids, others)
        yield "same text, other ids", LOWERS, _show(ids[n:]), _show(others[n:]), remedy


def _of_models(target: Description, draft: Description) -> Iterator[tuple]:
    if target.n_ctx and draft.n_ctx and draft.n_ctx < target.n_ctx:
        remedy = "drafting ends where the draft's context does; generation goes on without it"
        yield "context length", NOTE, str(target.n_ctx), str(draft.n_ctx), remedy
    if draft.mask:
        remedy = (
            "it was trained to draft several tokens at once from mask tokens (PARD 2504.18583): "
            "drafting one at a time works but is not what it was tuned for; "
            "take the model it was derived from"
        )
        yield "modified draft", LOWERS, "-", f"mask tokens {_show(draft.mask)}", remedy
    states = target.state, draft.state
    for role, state in zip(("target", "draft"), states, strict=True):
        if state in (State.RECURRENT, State.HYBRID):
            remedy = (
                f"a {state} state cannot be cropped: rejected tokens are rolled back by replay, "
                "snapshots or a saved state (rollback=, notebook 04); "
                "an engine that crops anyway continues from a wrong state"
            )
            yield f"state of the {role}", BREAKS, *(s or "unknown" for s in states), remedy


# --- fields that should be equal if both sources state them ---------------------------------------


def _of_fields(target: Description, draft: Description) -> Iterator[tuple]:
    for field, (topic, severity, remedy) in FIELDS.items():
        values = _stated(target, field), _stated(draft, field)
        if None not in values and values[0] != values[1]:
            yield topic, Severity[severity], *map(_show, values), remedy


def _stated(described: Description, field: str) -> object:
    """Return the value of a compared field; None if the source does not state it."""
    in_vocab = field in ("kind", "pre", "eog", "special")
    value = getattr(described.vocab if in_vocab else described, field, None)
    if field in ("pre", "added"):  # empty means not stated
        return SAME_PRE.get(value, value) or None
    return "{count} ({digest:.8})".format_map(value) if field == "merges" and value else value


def _show(value: object) -> str:
    text = (
        ", ".join(_ranges(sorted(value))) or "none" if isinstance(value, frozenset) else str(value)
    )
    return text if len(text) <= 80 else f"{text[:79]}…"


def _quote(piece: bytes) -> str:
    """Return a piece as quoted text; an id without text is "unused"."""
    return repr(piece.decode(errors="backslashreplace")) if piece else "unused"


def _ranges(ids: Sequence[int]) -> Iterator[str]:
    """Yield ascending ids; runs of three or more as "first-last"."""
    for _, run in groupby(enumerate(ids), key=lambda pair: pair[1] - pair[0]):
        members = [i for _, i in run]
        yield from [f"{members[0]}-{members[-1]}"] if len(members) > 2 else map(str, members)


SAME_PRE = {"deepseek-r1-qwen": "qwen2"}
"""Names that llama.cpp reads as one pre-tokenizer (LLAMA_VOCAB_PRE_TYPE_QWEN2)."""

NEVER_DRAFTED = "tokens that only one of them has are never drafted"
FIELDS = read_toml(Path(__file__).with_name("fields.toml"))
"""Topic, severity and remedy, by field name."""


# --- other engines --------------------------------------------------------------------------------

SIZE_DIFFERENCE = 128
"""SPEC_VOCAB_MAX_SIZE_DIFFERENCE. It was 100 before 2025."""
FIRST_TEXT = 5
"""SPEC_VOCAB_CHECK_START_TOKEN_ID: texts of smaller ids are never compared."""


def _llama_cpp(target: Description, draft: Description) -> tuple[bool | None, str]:
    """Apply the check of `common_speculative_are_compatible` (common/speculative.cpp).

    It compares type, add_bos and bos, add_eos and eos, size (difference <= 128), and texts from
    id 5. The first difference decides.
    """
    pair = target, draft
    vocabs = target.vocab, draft.vocab
    if None not in vocabs and target.vocab.kind != draft.vocab.kind:
        return False, f"vocabulary types {target.vocab.kind} and {draft.vocab.kind}"
    for name in ("bos", "eos"):
        adds, ids = ([getattr(d, key) for d in pair] for key in (f"add_{name}", name))
        if None in adds:
            return None, f"add_{name} is not known for both"
        if adds[0] != adds[1]:
            return False, f"add_{name} {adds[0]} and {adds[1]}"
        if adds[0] and ids[0] != ids[1]:
            return False, f"{name.upper()} {ids[0]} and {ids[1]}, which are added to every prompt"
    sizes = [d.vocab_size for d in pair]
    if None in sizes:
        return None, "vocab_size is not known for both"
    if abs(sizes[0] - sizes[1]) > SIZE_DIFFERENCE:
        return False, f"sizes {sizes[0]} and {sizes[1]} differ by more than {SIZE_DIFFERENCE}"
    if None in vocabs:
        return None, "the texts of the tokens are not available"
    pieces = (d.vocab.pieces[FIRST_TEXT : min(d.n_tokens, *sizes)] for d in pair)
    for token, (a, b) in enumerate(zip_longest(*pieces, fillvalue=b""), FIRST_TEXT):
        if a != b:
            return False, f"token {token} is {_quote(a)} and {_quote(b)}"
    return True, f"type, added BOS and EOS, sizes, and texts from id {FIRST_TEXT} on agree"


def _transformers(target: Description, draft: Description) -> tuple[bool | None, str]:
    """Apply the check of transformers 5.23, which takes equal sizes for equal tokenizers."""
    a = target.vocab_size
    b = draft.vocab_size
    if None in (a, b):
        return None, "vocab_size is not known for both"
    if a == b:
        return True, f"config.vocab_size is {a} in both; the tokenizers are not compared"
    differ = f"config.vocab_size {a} and {b}: different tokenizers for transformers"
    return False, f"{differ}, which asks for both"
