"""Everything in which a draft differs from its target, one finding a topic, each with what to do about it.

Where a source does not say, there is no finding.
"""

from collections.abc import Callable, Iterator, Sequence
from enum import IntEnum
from itertools import dropwhile, groupby, islice, zip_longest
from operator import attrgetter, ne
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


def findings(target: Description, draft: Description, ids: IdComparison | None) -> tuple[Finding, ...]:
    """All findings, the gravest first."""
    known = [*_of_pieces(target, draft, ids), *_of_texts(target, draft), *_of_fields(target, draft)]
    return tuple(sorted([*known, *_of_models(target, draft)], key=lambda finding: -finding.severity))


def _of_pieces(target: Description, draft: Description, ids: IdComparison | None) -> Iterator[Finding]:
    if ids is None:
        held = ["at hand" if d.vocab else "not at hand" for d in (target, draft)]
        how = "with a network it is fetched by itself (if gated: accept the licence there, then hf auth login)"
        remedies = [
            f"{d.hub} has the tokenizer of {d.name}: {how}."
            if d.hub
            else f"Give a file or folder with the tokenizer of {d.name}."
            for d in (target, draft)
            if d.vocab is None
        ]
        yield Finding("pieces", Severity.BREAKS, *held, " ".join(dict.fromkeys(remedies)))
        return
    if ids.n_different:
        at, a, b = ids.examples[0]
        remedy = "drafted ids would mean other texts: translate (load_drafter does), or take a draft of this tokenizer"
        yield Finding("pieces", Severity.BREAKS, f"id {at} is {a!r}", f"{b!r}; {ids.n_different} ids differ", remedy)
    if ids.n_target != ids.n_draft:
        severity = Severity.LOWERS if ids.n_different else Severity.NOTE
        yield Finding("len(tokenizer)", severity, str(ids.n_target), str(ids.n_draft), NEVER_DRAFTED)


PROBE = """def f(x):
    return x**2  # squared
a  b   c\t\td e \u00a0f 3.14159 1,000,000 0xFF 推測的デコーディング 추측 👩‍🔬🇨🇭 ✅ caf\ufffd Zürich e\u0301"""
"""A text that tokenizers cut differently, or change before they cut it."""


def _of_texts(target: Description, draft: Description) -> Iterator[Finding]:
    """Whether the real tokenizers, where both are at hand, write PROBE in different ids, from the first of them on."""
    if not (target.tokenizer and draft.tokenizer):
        return
    try:
        pairs = [*zip_longest(target.encode(PROBE), draft.encode(PROBE))]
    except InputError:  # one of them has no token for a letter
        return
    if apart := [*dropwhile(lambda pair: pair[0] == pair[1], pairs)]:
        remedy = "the target alone encodes prompts; a draft trained on another cut of the same text guesses worse"
        both = ([token for token in side if token is not None] for side in zip(*apart, strict=True))
        yield Finding("same text, other ids", Severity.LOWERS, *map(_shown, both), remedy)


def _of_models(target: Description, draft: Description) -> Iterator[Finding]:
    if target.n_ctx and draft.n_ctx and draft.n_ctx < target.n_ctx:
        remedy = "drafting ends where the draft's context does; generation goes on without it"
        yield Finding("context length", Severity.NOTE, str(target.n_ctx), str(draft.n_ctx), remedy)
    if draft.mask:
        remedy = (
            "it was trained to draft several tokens at once from mask tokens (PARD 2504.18583): drafting one at a "
            "time works but is not what it was tuned for; take the model it was derived from"
        )
        yield Finding("modified draft", Severity.LOWERS, "-", f"mask tokens {_shown(draft.mask)}", remedy)
    states = target.state, draft.state
    for role, state in zip(("target", "draft"), states, strict=True):
        if state in (State.RECURRENT, State.HYBRID):
            remedy = (
                f"a {state} state cannot be cropped: rejected tokens are taken back by replay, snapshots or a saved "
                "state (rollback=, notebook 04); an engine that crops all the same continues from a wrong state"
            )
            yield Finding(f"state of the {role}", Severity.BREAKS, *(s or "unknown" for s in states), remedy)


# --- fields that both state and that should be equal -----------------------------------------------------------------


def _of_fields(target: Description, draft: Description) -> Iterator[Finding]:
    for topic, severity, read, remedy in FIELDS:
        values = read(target), read(draft)
        if None not in values and ne(*values):
            yield Finding(topic, severity, *map(_shown, values), remedy)


def _of_vocab(field: str) -> Callable[[Description], object]:
    return lambda described: described.vocab and getattr(described.vocab, field)


def _pre(described: Description) -> str | None:
    """The name that a GGUF gives its pre-tokenizer; None for other sources, which give it none."""
    pre = described.vocab and described.vocab.pre
    return SAME_PRE.get(pre, pre) or None


def _merges(described: Description) -> str | None:
    return described.merges and "{count} ({digest:.8})".format_map(described.merges)


def _shown(value: object) -> str:
    text = ", ".join(_ranges(sorted(value))) or "none" if isinstance(value, frozenset) else str(value)
    return text if len(text) <= 80 else f"{text[:79]}…"


def _ranges(ids: Sequence[int]) -> Iterator[str]:
    """Ascending ids, with runs of three or more as "first-last"."""
    for _, run in groupby(enumerate(ids), key=lambda pair: pair[1] - pair[0]):
        members = [i for _, i in run]
        yield from [f"{members[0]}-{members[-1]}"] if len(members) > 2 else map(str, members)


SAME_PRE = {"deepseek-r1-qwen": "qwen2"}
"""Names that llama.cpp reads as one pre-tokenizer (LLAMA_VOCAB_PRE_TYPE_QWEN2)."""

NEVER_DRAFTED = "ids that only one of them has are never drafted"
END = "the target's end tokens decide when generation ends"
PROMPT = "the draft reads the target's prompt as it is"
PADDING = "no mismatch by itself, rows beyond the last token are padding: logits are cut to the ids that both know"

FIELDS: tuple[tuple[str, Severity, Callable[[Description], object], str], ...] = (
    ("tokenizer kind", Severity.LOWERS, _of_vocab("kind"), "only pieces that both have can be drafted"),
    ("pre-tokenizer", Severity.LOWERS, _pre, "texts may be cut differently"),
    ("merges", Severity.LOWERS, _merges, "texts are cut differently"),
    ("vocab_size", Severity.NOTE, attrgetter("vocab_size"), PADDING),
    ("BOS", Severity.NOTE, attrgetter("bos"), "the target's prompt decides; llama.cpp refuses where BOS is added"),
    ("EOS", Severity.NOTE, attrgetter("eos"), END),
    ("PAD", Severity.NOTE, attrgetter("pad"), "padding is never generated"),
    ("EOT", Severity.NOTE, attrgetter("eot"), END),
    ("add_bos", Severity.NOTE, attrgetter("add_bos"), PROMPT),
    ("add_eos", Severity.NOTE, attrgetter("add_eos"), PROMPT),
    ("end of generation", Severity.NOTE, _of_vocab("eog"), "a draft past the target's end is discarded"),
    ("control tokens", Severity.NOTE, _of_vocab("special"), "control tokens match by text and kind only"),
    ("added tokens", Severity.NOTE, lambda described: described.added or None, NEVER_DRAFTED),
)
