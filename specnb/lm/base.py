"""The model interface that decoding uses: tokens in, logits out, and an exact rollback.

A `LanguageModel` has a state (the tokens processed so far) and a forward pass. It has no notion of
drafting or sampling.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Annotated, Any, Literal, Protocol, runtime_checkable

import numpy as np
from pydantic import BeforeValidator

from specnb.errors import CapacityError, InputError, RewindError, StateError
from specnb.lm.tree import COMMITTED, Tree
from specnb.lm.vocab import Vocabulary

Exact = Annotated[
    Literal["auto", "true", "false"], BeforeValidator(lambda value: str(value).lower())
]
"""Type of the option `exact`: whether logits must be bit-identical at all forward-pass widths."""
DEFAULT_N_CTX = 4096
"""Upper limit of the default context length, in tokens."""


def kv_bytes(
    n_layers: int, n_kv_heads: int, head_dim: int, n_ctx: int, bytes_per_value: int
) -> int:
    """Return the size in bytes of an attention model's KV cache for `n_ctx` positions."""
    return 2 * n_layers * n_kv_heads * head_dim * n_ctx * bytes_per_value


@dataclass(frozen=True)
class Capabilities:
    """Capabilities of an engine with a model, so that callers need not check its class.

    `rewind` names the rollback strategy (see `lm.rollback`); `rewind_reason` explains why the cache
    cannot be cropped ("" if it can). `max_width` is the maximum number of tokens per forward pass,
    `n_ctx` of the state. `lossless_dtype` is True if passes over 1 and over n tokens
    differ by float32 rounding only; up to `same_bits_up_to` tokens they are bit-identical (0: at no
    width). `trees` is True if the model works as a `TreeModel`; `trees_reason` explains why not.
    `details` are the engine's settings, for the run record.
    """

    engine: str
    device: str
    dtype: str
    n_ctx: int
    max_width: int
    rewind: str = "recompute"  # until a strategy is chosen
    rewind_reason: str = ""
    lossless_dtype: bool = False
    same_bits_up_to: int = 0
    trees: bool = False
    trees_reason: str = ""
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def certificate(self) -> str:
        """A sentence that states at which widths greedy output equals plain decoding."""
        counts = self.details.get("thread_counts", [self.details.get("threads", 1)])
        threads = f"{' or '.join(map(str, counts))} threads"
        if self.details.get("threads_change") == "between texts":
            threads += " (the same number for both)"
        here = f"on this machine, in {self.engine}, {self.dtype}, {threads}"
        if not self.same_bits_up_to:
            return (
                "forward passes over 2 or more tokens round differently from single steps "
                f"{here}: greedy output may diverge from plain decoding where two tokens are "
                "nearly tied"
            )
        rule = f" ({by})" if (by := self.details.get("exact_by")) else ""
        return (
            "greedy output is bit-identical to plain decoding for forward passes over 1 to "
            f"{self.same_bits_up_to} tokens, {here}{rule}"
        )


@runtime_checkable
class LanguageModel(Protocol):
    """A causal language model with a state of `n_past` tokens."""

    name: str
    vocab: Vocabulary
    caps: Capabilities
    unsettled: Tree | None = None
    """The last tree, whose nodes end the state, until `keep_path` or `reset`."""

    @property
    def n_past(self) -> int: ...

    def forward(self, ids: Sequence[int], n_logits: int | None = None) -> np.ndarray:
        """Append `ids`; return the logits of the last `n_logits` ids, `(n_logits, vocab)` float32.

        None returns logits for every id; 0 computes no logits (prefill). The caller owns the array.
        Raises InputError (unknown id, empty ids), CapacityError (the state would exceed n_ctx),
        StateError (unsettled tree).
        """

    def rewind(self, n: int) -> None:
        """Remove the last `n` tokens, exactly: the state is as if they had never been processed.

        Raises RewindError, and changes nothing, if the state holds fewer tokens.
        """

    def reset(self) -> None:
        """Clear the state."""

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Return the token ids of `text`; `special` parses control tokens and adds BOS."""

    def locate_nonfinite(self, ids: Sequence[int]) -> str:
        """Return the name of the first module that outputs NaN or Inf on `ids`; "" if unknown."""
        return ""

    def close(self) -> None:
        """Free the memory. The model cannot be used afterwards."""


@runtime_checkable
class TreeModel(LanguageModel, Protocol):
    """A model that computes a tree of draft tokens in one forward pass, if `caps.trees` is True.

    Between `forward_tree` and `keep_path` the state holds the text and all nodes: `n_past` counts
    them, and `forward`, `rewind` and `forward_tree` raise StateError. `reset` clears them as well.
    """

    def forward_tree(self, ids: Sequence[int], tree: Tree) -> np.ndarray:
        """Append the nodes of `tree`, token `ids[i]` at node i; return `(len(ids), vocab)` float32.

        Node i has position `n_past + tree.depths[i]`, and attends only to the text, its ancestors
        and itself, as in a pass over its path. Raises InputError (unknown id, not one id per node,
        no tree support), CapacityError (the state would exceed n_ctx), StateError (unsettled tree).
        """

    def keep_path(self, nodes: Sequence[int]) -> None:
        """Settle the last `forward_tree`: keep one path from a root, or no node, and drop the rest.

        Afterwards the state is as if only these tokens had been processed. Raises StateError if
        there is no tree, and InputError, changing nothing, if `nodes` are not such a path.
        """


def check_settled(model: LanguageModel) -> None:
    """Raise StateError if the state still holds a tree."""
    if (tree := model.unsettled) is not None:
        raise StateError(
            f"{model.name} holds {len(tree)} nodes of a tree: call keep_path ([] for none) or "
            "reset first"
        )


def check_tree(model: LanguageModel, ids: Sequence[int], tree: Tree) -> None:
    """Validate the arguments of `forward_tree`, and raise its errors."""
    if not model.caps.trees:
        raise InputError(f"{model.name} cannot compute trees: {model.caps.trees_reason}")
    check_forward(model, ids, None)
    if len(ids) != len(tree):
        raise InputError(
            f"forward_tree of {model.name} got {len(ids)} ids for a tree of {len(tree)} nodes: "
            "pass one id per node"
        )


def check_path(model: LanguageModel, nodes: Sequence[int]) -> list[int]:
    """Return `nodes` as a list if they are a path of the last tree; raise as `keep_path` does."""
    if (tree := model.unsettled) is None:
        raise StateError(
            f"keep_path of {model.name} needs a tree, and there is none to settle: call "
            "forward_tree first"
        )
    path = list(nodes)
    if tree.path(path[-1] if path else COMMITTED) != path:
        raise InputError(
            f"got nodes {path!r:.80}, expected a path from a root of the last tree of {model.name}"
        )
    return path


def check_forward(model: LanguageModel, ids: Sequence[int], n_logits: int | None) -> int:
    """Validate the arguments of `forward`, since engines may abort; return the number of rows."""
    check_settled(model)
    array = np.asarray(ids)
    if array.ndim != 1 or not array.size or array.dtype.kind not in "iu":
        raise InputError(
            f"forward of {model.name} got {ids!r:.80}, expected a flat list of at least one token "
            "id"
        )
    if (bad := array[(array < 0) | (array >= model.vocab.size)]).size:
        raise InputError(
            f"token id {bad[0]} is outside the vocabulary of {model.name} "
            f"(0..{model.vocab.size - 1})"
        )
    if model.n_past + len(ids) > model.caps.n_ctx:
        raise CapacityError(
            f"the context of {model.name} holds {model.caps.n_ctx} tokens: {model.n_past} and "
            f"{len(ids)} more do not fit; load it with a larger n_ctx, or shorten the prompt"
        )
    rows = len(ids) if n_logits is None else n_logits
    if not 0 <= rows <= len(ids):
        raise InputError(f"got n_logits={n_logits}, expected 0 to {len(ids)} (the number of ids)")
    return rows


def check_rewind(model: LanguageModel, n: int) -> None:
    """Raise RewindError if the state holds fewer than `n` tokens."""
    check_settled(model)
    if not isinstance(n, Integral) or not 0 <= n <= model.n_past:
        raise RewindError(
            f"cannot rewind {n!r} tokens of {model.name}: its state holds {model.n_past}"
        )
