"""What decides whether two models can speculate together, as one value, wherever it was read from.

Readers (`compat.gguf`, `compat.folder`, `compat.shelf`) make descriptions; `compat.check` compares them.
A description needs no weights, and says None for whatever its source does not state.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from specnb.draft.spelling import Longest
from specnb.draft.token_map import Tokens
from specnb.lm.vocab import Vocabulary

HUB = "hf:"
"""What the name of a model on the hub begins with."""
MAX_ID = 4_000_000
"""No vocabulary has as many ids: a larger number is damage."""


class State(StrEnum):
    """What a model remembers, and so how it can be rewound."""

    ATTENTION = "attention"  # a KV cache: cropped
    RECURRENT = "recurrent"  # one state for all that was read: it needs snapshots, a checkpoint or a replay
    HYBRID = "hybrid"  # both


@dataclass(frozen=True)
class Merges:
    """The merge rules of a BPE in a GGUF, as their number and the sha256 of all in order, one "left right" a line."""

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
    merges: Merges | None = None
    n_ctx: int | None = None
    n_layers: int | None = None
    licence: str | None = None
    state: State | None = None
    hub: str | None = None
    from_memory: tuple[str, ...] = ()
    tokenizer: Callable[[str], list[int]] | None = None

    @cached_property
    def tokens(self) -> Tokens | None:
        """To be compared with others'; None where only facts are published."""
        return None if self.vocab is None else Tokens(self)

    @cached_property
    def _longest(self) -> Longest:
        return Longest(self)

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """The ids of a text; without its tokenizer, longest piece first. Control tokens are not looked for in it."""
        return self.tokenizer(text) if self.tokenizer else self._longest.spell(text.encode())


RECURRENT = "mamba mamba2 rwkv6 rwkv6qwen2 rwkv7 arwkv7 falcon_mamba rwkv xlstm"
HYBRID = (
    "jamba falcon_h1 plamo2 granitehybrid lfm2 lfm2moe nemotron_h nemotron_h_moe qwen3next kimi_linear bailingmoe3 "
    "kimi_k3 glm5_next qwen35 qwen35moe qwen4exp deepseek4 minimax_01 bamba granitemoehybrid zamba zamba2 qwen3_next "
    "qwen3_5 qwen3_5_moe qwen4_exp olmo_hybrid recurrent_gemma deepseek_v4 bailing_hybrid zaya lfm2_moe lfm3 minimax"
)
"""By llama.cpp's names (llm_arch_is_recurrent, llm_arch_is_hybrid) and by `model_type` of the classes of transformers
5.23 that say `_is_stateful` (lfm2, whose short convolutions are the state, does not)."""
STATES = dict.fromkeys(RECURRENT.split(), State.RECURRENT) | dict.fromkeys(HYBRID.split(), State.HYBRID)
RECURRENT_LAYERS = frozenset({"linear_attention", "mamba", "mamba2", "recurrent", "conv", "ssm", "rwkv", "hybrid"})
"""Entries of a config's `layer_types`."""


def state_of(architecture: str | None, layer_types: Iterable[str] = ()) -> State | None:
    """What a model of this architecture remembers; None where none is stated, a KV cache where it is not listed above.

    `layer_types`, where a config lists them, speak for architectures that are not known here.
    """
    kinds = set(layer_types)
    if kinds & RECURRENT_LAYERS:
        return State.RECURRENT if kinds <= RECURRENT_LAYERS - {"hybrid"} else State.HYBRID
    if architecture is None:
        return None
    return STATES.get(architecture.lower().replace("-", "_").removesuffix("_text"), State.ATTENTION)
