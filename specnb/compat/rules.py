"""What other engines would say of a pair, so that wrong refusals and wrong acceptances can be seen.

llama.cpp: `common_speculative_are_compatible` (common/speculative.cpp); transformers 5.23: generation's check of
the arguments, which looks at `config.vocab_size` and nothing else.
"""

from typing import NamedTuple

from specnb.compat.description import Description

SIZE_DIFFERENCE = 128
"""SPEC_VOCAB_MAX_SIZE_DIFFERENCE. It was 100 before 2025."""
FIRST_TEXT = 5
"""SPEC_VOCAB_CHECK_START_TOKEN_ID: texts of smaller ids are never compared."""


class Opinion(NamedTuple):
    """What an engine's check says: accepted or not (None: it cannot be told from what is known), and why."""

    accepts: bool | None
    reason: str


def llama_cpp(target: Description, draft: Description) -> Opinion:
    """Type, add_bos and bos, add_eos and eos, size difference <= 128, texts from id 5; the first that fails decides."""
    if target.vocab is not None and draft.vocab is not None and target.vocab.kind != draft.vocab.kind:
        return Opinion(False, f"vocabulary types {target.vocab.kind} and {draft.vocab.kind}")
    for name in ("bos", "eos"):
        adds = [getattr(d, f"add_{name}") for d in (target, draft)]
        ids = [getattr(d, name) for d in (target, draft)]
        if None in adds:
            return Opinion(None, f"add_{name} is not known of both")
        if adds[0] != adds[1]:
            return Opinion(False, f"add_{name} {adds[0]} and {adds[1]}")
        if adds[0] and ids[0] != ids[1]:
            return Opinion(False, f"{name.upper()} {ids[0]} and {ids[1]}, which are added to every prompt")
    sizes = [d.vocab_size for d in (target, draft)]
    if None in sizes:
        return Opinion(None, "vocab_size is not known of both")
    if abs(sizes[0] - sizes[1]) > SIZE_DIFFERENCE:
        return Opinion(False, f"sizes {sizes[0]} and {sizes[1]} differ by more than {SIZE_DIFFERENCE}")
    if target.vocab is None or draft.vocab is None:
        return Opinion(None, "the texts of the tokens are not at hand")
    return _texts(target, draft)


def _texts(target: Description, draft: Description) -> Opinion:
    end = min(target.vocab_size, draft.vocab_size)
    texts = [d.vocab.pieces[: d.n_tokens] for d in (target, draft)]
    rows = [text[FIRST_TEXT:end] + (b"",) * (end - max(FIRST_TEXT, len(text))) for text in texts]
    at = next((i for i, (a, b) in enumerate(zip(*rows, strict=True), FIRST_TEXT) if a != b), None)
    if at is None:
        return Opinion(True, f"type, added BOS and EOS, sizes and texts from id {FIRST_TEXT} agree")
    a, b = (rows[side][at - FIRST_TEXT] or b"[PAD]" for side in (0, 1))
    return Opinion(False, f"token {at} is {a!r} and {b!r}")


def transformers(target: Description, draft: Description) -> Opinion:
    """`config.vocab_size` alone: equal sizes are taken for equal tokenizers, other sizes for other tokenizers."""
    sizes = [d.vocab_size for d in (target, draft)]
    if None in sizes:
        return Opinion(None, "vocab_size is not known of both")
    if sizes[0] == sizes[1]:
        return Opinion(True, f"config.vocab_size is {sizes[0]} in both; the tokenizers are not compared")
    return Opinion(
        False, f"config.vocab_size {sizes[0]} and {sizes[1]}: taken for different tokenizers, it asks for both of them"
    )
