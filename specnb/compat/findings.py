"""Everything in which a draft differs from its target, one finding a topic, each with what to do about it.

A finder takes (target, draft) and gives a Finding, or None where they agree or a source does not say.
"""

from collections.abc import Callable, Iterator, Sequence
from enum import IntEnum
from itertools import groupby, islice
from operator import ne
from typing import NamedTuple

from specnb.compat.description import Description, State
from specnb.draft.token_map import Tokens
from specnb.errors import InputError


class Severity(IntEnum):
    """What a difference costs."""

    NOTE = 0  # speculation is not touched
    LOWERS = 1  # acceptance is lower than it could be
    BREAKS = 2  # ids or states cannot be used as they are


EXAMPLES = 5
NEVER_DRAFTED = "ids that only one of them has are never drafted"


class IdComparison(NamedTuple):
    """How far two vocabularies agree on what ids mean.

    `first_difference` is the smallest id that both have and that means two things; `n_different` counts these ids from
    0 on; `examples` hold the first few as (id, target's piece, draft's).
    """

    n_target: int
    n_draft: int
    first_difference: int | None
    n_different: int
    examples: tuple[tuple[int, bytes, bytes], ...]


def compare_ids(target: Tokens, draft: Tokens) -> IdComparison:
    """Compare two vocabularies id by id from 0. Padding rows (ids that no tokenizer produces) are no mismatch."""
    a, b = target.by_id, draft.by_id
    differ = [] if a == b else [i for i, unequal in enumerate(map(ne, a, b)) if unequal]
    examples = tuple((i, a[i], b[i]) for i in islice(differ, EXAMPLES))
    return IdComparison(len(a), len(b), differ[0] if differ else None, len(differ), examples)


class Finding(NamedTuple):
    """One difference, with the values of both and the remedy."""

    topic: str
    severity: Severity
    target: str
    draft: str
    remedy: str


BESIDE_TOKENS = ("state of the target", "state of the draft", "modified draft")
"""Topics that matter however well the tokens fit."""

Finder = Callable[[Description, Description], Finding | None]


def findings(target: Description, draft: Description, ids: IdComparison | None) -> tuple[Finding, ...]:
    """All findings, the gravest first, in the order of the topics among equals."""
    differences = [find(target, draft) for find in FINDERS]
    known = [*_of_pieces(target, draft, ids), *(finding for finding in differences if finding)]
    return tuple(sorted(known, key=lambda finding: -finding.severity))


def _of_pieces(target: Description, draft: Description, ids: IdComparison | None) -> Iterator[Finding]:
    if ids is None:
        held = ["at hand" if d.vocab else "not at hand" for d in (target, draft)]
        remedies = dict.fromkeys(_how_to_get(d) for d in (target, draft) if d.vocab is None)
        yield Finding("pieces", Severity.BREAKS, *held, " ".join(remedies))
        return
    if ids.n_different:
        at, a, b = ids.examples[0]
        remedy = "drafted ids would mean other texts: translate (load_drafter does), or take a draft of this tokenizer"
        yield Finding("pieces", Severity.BREAKS, f"id {at} is {a!r}", f"{b!r}; {ids.n_different} ids differ", remedy)
    if ids.n_target != ids.n_draft:
        severity = Severity.LOWERS if ids.n_different else Severity.NOTE
        yield Finding("len(tokenizer)", severity, str(ids.n_target), str(ids.n_draft), NEVER_DRAFTED)


def _how_to_get(described: Description) -> str:
    if described.hub is None:
        return f"Give a file or folder with the tokenizer of {described.name}."
    return f"Write {described.hub} for {described.name}: its small files are fetched once (if gated: hf auth login)."


def _differ(topic: str, read: Callable[[Description], object], severity: Severity, remedy: str) -> Finder:
    """A finder for a value that both state and that should be equal."""

    def find(target: Description, draft: Description) -> Finding | None:
        a, b = read(target), read(draft)
        return None if a is None or b is None or a == b else Finding(topic, severity, _shown(a), _shown(b), remedy)

    return find


def _shown(value: object) -> str:
    text = ", ".join(_ranges(sorted(value))) or "none" if isinstance(value, frozenset) else str(value)
    return text if len(text) <= 80 else f"{text[:79]}…"


def _ranges(ids: Sequence[int]) -> Iterator[str]:
    """Ascending ids, with runs of three or more as "first-last"."""
    for _, run in groupby(enumerate(ids), key=lambda pair: pair[1] - pair[0]):
        members = [i for _, i in run]
        yield from [f"{members[0]}-{members[-1]}"] if len(members) > 2 else map(str, members)


def _padding(target: Description, draft: Description) -> Finding | None:
    a, b = target.vocab_size, draft.vocab_size
    if a is None or b is None or a == b:
        return None
    rows = f"{a - (target.n_tokens or a)} and {b - (draft.n_tokens or b)} rows are padding"
    remedy = f"no mismatch by itself ({rows}): logits are cut to the ids that both know"
    return Finding("vocab_size", Severity.NOTE, str(a), str(b), remedy)


def _mask_tokens(target: Description, draft: Description) -> Finding | None:
    remedy = (
        "it was trained to draft several tokens at once from mask tokens (PARD 2504.18583): drafting one at a time "
        "works but is not what it was tuned for; take the model it was derived from"
    )
    masks = f"mask tokens {_shown(draft.mask)}"
    return Finding("modified draft", Severity.LOWERS, "-", masks, remedy) if draft.mask else None


def _state(role: str, pick: int) -> Finder:
    def find(target: Description, draft: Description) -> Finding | None:
        states = target.state, draft.state
        if states[pick] in (None, State.ATTENTION):
            return None
        remedy = (
            f"a {states[pick]} state cannot be cropped: rejected tokens are taken back by replay, snapshots or a saved "
            "state (rollback=, notebook 04); an engine that crops all the same continues from a wrong state"
        )
        return Finding(f"state of the {role}", Severity.BREAKS, *(state or "unknown" for state in states), remedy)

    return find


def _context(target: Description, draft: Description) -> Finding | None:
    if target.n_ctx is None or draft.n_ctx is None or draft.n_ctx >= target.n_ctx:
        return None
    remedy = "drafting ends where the draft's context does; generation goes on without it"
    return Finding("context length", Severity.NOTE, str(target.n_ctx), str(draft.n_ctx), remedy)


def _cuts(target: Description, draft: Description) -> Finding | None:
    """What the real tokenizers do with PROBES, where both are at hand."""
    remedy = "the target alone encodes prompts; a draft that was trained on another cut of the same text guesses worse"
    for name, text in PROBES.items():
        a, b = (_encoded(described, text) for described in (target, draft))
        if a is not None and b is not None and a != b:
            return Finding("same text, other ids", Severity.LOWERS, _shown(f"{name}: {a}"), _shown(b), remedy)
    return None


def _encoded(described: Description, text: str) -> list[int] | None:
    try:
        return described.encode(text) if described.encode else None
    except InputError:  # it has no token for a letter
        return None


def _pre(target: Description, draft: Description) -> Finding | None:
    """Names of pre-tokenizers say something within one format only: GGUF names models, tokenizer.json algorithms."""
    names = [(d.vocab.pre if d.vocab else "") for d in (target, draft)]
    kinds = {name in ALGORITHMS for name in names}
    if not all(names) or len(kinds) > 1 or SAME_PRE.get(names[0], names[0]) == SAME_PRE.get(names[1], names[1]):
        return None
    return Finding("pre-tokenizer", Severity.LOWERS, *names, "texts may be cut differently")


def _normalizer(target: Description, draft: Description) -> Finding | None:
    a, b = target.normalizer, draft.normalizer
    flags = ["add_space_prefix" in text or "remove_extra" in text for text in (a or "", b or "")]
    if a is None or b is None or a == b or flags[0] != flags[1]:  # GGUF states flags, tokenizer.json steps
        return None
    remedy = "texts are changed differently before they are cut"
    return Finding("normalizer", Severity.LOWERS, _shown(a), _shown(b), remedy)


ALGORITHMS = frozenset(
    {"sequence", "bytelevel", "metaspace", "whitespace", "whitespacesplit", "split", "digits", "bertpretokenizer",
     "punctuation", "chardelimitersplit", "unicodescripts"}
)  # fmt: skip
"""Pre-tokenizers of tokenizer.json, in lower case."""
SAME_PRE = {"deepseek-r1-qwen": "qwen2"}
"""Names that llama.cpp reads as one pre-tokenizer (LLAMA_VOCAB_PRE_TYPE_QWEN2)."""

PROBES = {
    "code": "def f(x):\n    return x**2  # squared\n",
    "whitespace": "a  b   c\t\td\n\n\n e \u00a0f",
    "numbers": "3.14159 1,000,000 0xFF 2026-11-21",
    "CJK": "推測的デコーディング 投机解码 추측",
    "emoji": "👩‍🔬🇨🇭 ok ✅",
    "broken UTF-8": b"caf\xc3 \xff\xfe end".decode("utf-8", errors="replace"),
    "accents": "Zürich naïve e\u0301",
}
"""Texts that tokenizers cut differently."""

_L, _N = Severity.LOWERS, Severity.NOTE
FINDERS: tuple[Finder, ...] = (
    _cuts,
    _differ("tokenizer kind", lambda d: d.vocab and d.vocab.kind, _L, "only pieces that both have can be drafted"),
    _pre,
    _normalizer,
    _padding,
    _differ("BOS", lambda d: d.bos, _N, "the target's prompt decides; llama.cpp refuses where BOS is added"),
    _differ("EOS", lambda d: d.eos, _N, "the target's end tokens decide when generation ends"),
    _differ("PAD", lambda d: d.pad, _N, "padding is never generated"),
    _differ("EOT", lambda d: d.eot, _N, "the target's end tokens decide when generation ends"),
    _differ("add_bos", lambda d: d.add_bos, _N, "the draft reads the target's prompt as it is"),
    _differ("add_eos", lambda d: d.add_eos, _N, "the draft reads the target's prompt as it is"),
    _differ("end of generation", lambda d: d.vocab and d.vocab.eog, _N, "a draft past the target's end is discarded"),
    _differ("control tokens", lambda d: d.vocab and d.vocab.special, _N, "control tokens match by text and kind only"),
    _differ("added tokens", lambda d: d.added or None, _N, NEVER_DRAFTED),
    _differ(
        "merges", lambda d: d.merges and f"{d.merges.count} ({d.merges.digest[:8]})", _L, "texts are cut differently"
    ),
    _context,
    _mask_tokens,
    _state("target", 0),
    _state("draft", 1),
)
