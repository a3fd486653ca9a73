"""What decides whether two models can speculate together, as one value, wherever it was read from.

Readers (`compat.gguf_header`, `compat.hf_folder`, `compat.shelf`) make descriptions; `compat.check` compares them.
A description needs no weights, and says None for whatever its source does not state.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from specnb.lm.vocab import Vocabulary

HUB = "hf:"
"""What the name of a model on the hub begins with."""


class State(StrEnum):
    """What a model remembers, and so how it can be rewound."""

    ATTENTION = "attention"  # a KV cache: cropped
    RECURRENT = "recurrent"  # one state for all that was read: it needs snapshots, a checkpoint or a replay
    HYBRID = "hybrid"  # both


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding: base frequency, rotated dimensions, and scaling as "kind factor", such as "yarn 4"."""

    base: float | None = None
    dims: int | None = None
    scaling: str | None = None


@dataclass(frozen=True)
class Merges:
    """The merge rules of a BPE, as their number and the sha256 of all of them in order, one "left right" a line."""

    count: int
    digest: str


@dataclass(frozen=True, eq=False)
class Description:
    """One model or tokenizer.

    `vocab` holds the ids of a row of logits, padding rows (piece b"") included; None where only facts are published.
    `n_tokens` is len(tokenizer): ids 0..n_tokens-1 have a text. `vocab_size` is the width of a row of logits, which
    may be larger (padding). `added` are the ids that were added to the trained vocabulary, control tokens or not.
    `hub` is the name under which its tokenizer can be read, where its pieces are not at hand.
    `from_memory` names the fields that no document at hand shows: a verdict that rests on one is no better than that.
    `mask` are ids that only a modified draft model knows (PARD's mask tokens). `encode` turns text into ids with the
    real tokenizer, without special tokens; opening it may take a second, reading the description must not.
    """

    name: str
    source: str
    architecture: str | None = None
    vocab: Vocabulary | None = None
    n_tokens: int | None = None
    vocab_size: int | None = None
    bos: int | None = None
    eos: int | None = None
    pad: int | None = None
    eot: int | None = None
    add_bos: bool | None = None
    add_eos: bool | None = None
    added: frozenset[int] = frozenset()
    mask: frozenset[int] = frozenset()
    normalizer: str | None = None
    merges: Merges | None = None
    n_ctx: int | None = None
    rope: Rope | None = None
    quantisation: str | None = None
    state: State | None = None
    hub: str | None = None
    from_memory: tuple[str, ...] = ()
    encode: Callable[[str], list[int]] | None = None
