"""What decides whether two models can speculate together, as one value, wherever it was read from.

`compat.read` makes descriptions, `compat.check` compares them. A description needs no weights, and says None for
whatever its source does not state.
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

DRAFT_HEADS = {"dflash": "draft-dflash", "eagle3": "draft-eagle3"}
"""Drafters that read the target's hidden states and use its vocabulary, by architecture, and
llama.cpp's `--spec-type` for each."""


class State(StrEnum):
    """A model's memory of the tokens before, which decides how it can be rewound."""

    ATTENTION = "attention"  # a KV cache: cropped
    RECURRENT = "recurrent"  # one state for all that was read: it needs snapshots, a checkpoint or a replay
    HYBRID = "hybrid"  # both


@dataclass(frozen=True, eq=False)
class Description:
    """One model or tokenizer.

    `vocab` holds the ids of a row of logits, padding rows (piece b"") included; None where only facts are published.
    `n_tokens` is len(tokenizer): ids 0..n_tokens-1 have a text. `vocab_size` is the width of a row of logits, which
    may be larger (padding). `added` are the ids that were added to the trained vocabulary, control tokens or not.
    `merges` of a BPE in a GGUF are their `count` and the `digest` (sha256) of all in order, one "left right" a line.
    `hub` is the name under which its tokenizer can be read, where its pieces are not at hand.
    `from_memory` names the fields that no document at hand shows: a verdict that rests on one is no better than that.
    `mask` are ids that only a modified draft model knows (PARD's mask tokens). `tokenizer` turns text into ids, without
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
        """Return it with these pieces, padded to the row of logits, with the ids that they state, and `facts`."""
        rows = max(vocab.size, self.vocab_size or 0)
        padded = replace(vocab, pieces=(*vocab.pieces, *[b""] * (rows - vocab.size)))
        return replace(
            self, vocab=padded, n_tokens=n_tokens, vocab_size=rows, bos=vocab.bos, eos=vocab.eos,
            add_bos=vocab.add_bos, **facts,
        )  # fmt: skip

    @cached_property
    def tokens(self) -> Tokens | None:
        """To be compared with others'; None where only facts are published."""
        return self.vocab and Tokens(self)

    @cached_property
    def _speller(self) -> GreedySpeller:
        return GreedySpeller(self)

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Return the ids of a text; without its tokenizer, longest piece first. Control tokens in it are plain text."""
        return self.tokenizer(text) if self.tokenizer else self._speller.spell(text.encode())


def state_of(architecture: str | None, layer_types: Iterable[str] = ()) -> State | None:
    """Return what a model of this architecture remembers; None without one, a KV cache where STATES does not list it.

    `layer_types`, where a config lists them, speak for architectures that are not listed.
    """
    kinds, recurrent = set(layer_types), set(STATES["layer_types"])
    if kinds & recurrent:
        return State.RECURRENT if kinds <= recurrent - {"hybrid"} else State.HYBRID
    if architecture is None:
        return None
    name = architecture.lower().replace("-", "_").removesuffix("_text")
    return next((state for state in (State.RECURRENT, State.HYBRID) if name in STATES[state]), State.ATTENTION)
