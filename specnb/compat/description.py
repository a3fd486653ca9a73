"""The facts that decide whether two models can speculate together, whatever their source.

`compat.read` creates descriptions and `compat.check` compares them. A description needs no weights;
fields that its source does not state are None.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Any

from specnb.draft.spelling import GreedySpeller
from specnb.draft.token_map import Tokens
from specnb.io import read_toml
from specnb.lm.vocab import Vocabulary

STATES = read_toml(Path(__file__).with_name("states.toml"))
"""Architectures with a recurrent state, by `State`, and the `layer_types` that have one."""


class State(StrEnum):
    """The kind of a model's state, which decides how it can be rolled back."""

    ATTENTION = "attention"  # a KV cache, which can be cropped
    RECURRENT = "recurrent"  # one state for all tokens: needs snapshots, a checkpoint or a replay
    HYBRID = "hybrid"  # both


@dataclass(frozen=True, eq=False)
class Description:
    """One model or tokenizer.

    `vocab` holds the ids of a row of logits, including padding rows (piece b""); None if only facts
    are published. `n_tokens` is len(tokenizer): ids 0..n_tokens-1 have text. `vocab_size` is the
    width of a row of logits, which may be larger because of padding. `added` are the ids added to
    the trained vocabulary, control tokens or not. `merges` of a BPE in a GGUF has their `count` and
    the `digest` (sha256) of all merges in order, one "left right" per line. `hub` is the name under
    which the tokenizer can be read if its pieces are not available. `from_memory` names the fields
    that no available document shows; verdicts that depend on them are no more reliable. `mask` are
    ids that only a modified draft model uses (PARD's mask tokens). `tokenizer` encodes text without
    special tokens.
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
    merges: Mapping[str, Any] | None = None
    n_ctx: int | None = None
    n_layers: int | None = None
    licence: str | None = None
    state: State | None = None
    hub: str | None = None
    from_memory: tuple[str, ...] = ()
    tokenizer: Callable[[str], list[int]] | None = None

    def with_pieces(self, vocab: Vocabulary, n_tokens: int, **facts: Any) -> "Description":
        """Return the description with these pieces, padded to the row of logits, and `facts`."""
        rows = max(vocab.size, self.vocab_size or 0)
        padded = replace(vocab, pieces=(*vocab.pieces, *[b""] * (rows - vocab.size)))
        return replace(
            self,
            vocab=padded,
            n_tokens=n_tokens,
            vocab_size=rows,
            bos=vocab.bos,
            eos=vocab.eos,
            add_bos=vocab.add_bos,
            **facts,
        )

    @cached_property
    def tokens(self) -> Tokens | None:
        """The tokens, to compare with those of other models; None if only facts are published."""
        return self.vocab and Tokens(self)

    @cached_property
    def _speller(self) -> GreedySpeller:
        return GreedySpeller(self)

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Encode a text, control tokens as plain text; without a tokenizer, longest piece first."""
        return self.tokenizer(text) if self.tokenizer else self._speller.spell(text.encode())


def state_of(architecture: str | None, layer_types: Iterable[str] = ()) -> State | None:
    """Return the kind of state of an architecture, or None if the architecture is unknown.

    It is ATTENTION if STATES does not list it. `layer_types` of a config take precedence.
    """
    kinds = set(layer_types)
    recurrent = set(STATES["layer_types"])
    if kinds & recurrent:
        return State.RECURRENT if kinds <= recurrent - {"hybrid"} else State.HYBRID
    if architecture is None:
        return None
    name = architecture.lower().replace("-", "_").removesuffix("_text")
    return next(
        (state for state in (State.RECURRENT, State.HYBRID) if name in STATES[state]),
        State.ATTENTION,
    )
