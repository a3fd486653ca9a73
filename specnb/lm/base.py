"""The one interface that decoding sees: tokens in, logits out, and an exact way back.

A `LanguageModel` is a state (the tokens it was fed) and a forward. It knows nothing of drafting or sampling.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Annotated, Any, Literal, Protocol, runtime_checkable

import numpy as np
from pydantic import BeforeValidator

from specnb.errors import CapacityError, InputError, RewindError, StateError
from specnb.lm.tree import COMMITTED, Tree
from specnb.lm.vocab import Vocabulary

Exact = Annotated[Literal["auto", "true", "false"], BeforeValidator(lambda value: str(value).lower())]
"""An option of both engines: whether a token is to have the same bits in forwards of every width."""
DEFAULT_N_CTX = 4096
"""Tokens of context at most, unless more are asked for."""


def kv_bytes(n_layers: int, n_kv_heads: int, head_dim: int, n_ctx: int, bytes_per_value: int) -> int:
    """Return the bytes of the key and value cache of an attention model for `n_ctx` positions."""
    return 2 * n_layers * n_kv_heads * head_dim * n_ctx * bytes_per_value


@dataclass(frozen=True)
class Capabilities:
    """Abilities of an engine with a model, so that callers need not ask for its class.

    `rewind` says how the state goes back, any number of tokens (a strategy of `lm.rollback`), and `rewind_reason` why
    it is not by dropping entries. `max_width` is the widest single forward, `n_ctx` the most tokens the state holds.
    `lossless_dtype` is True where widths 1 and n differ by float32 rounding only, and up to `same_bits_up_to` tokens
    they do not differ at all (0: they do from two on). `trees` says whether the model is a `TreeModel` and can be used
    as one, `trees_reason` why not. `details` are the engine's settings, for the record.
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
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def certificate(self) -> str:
        """Say how far greedy speculative decoding equals plain decoding here, as `probe.certify` found."""
        counts = self.details.get("thread_counts", [self.details.get("threads", 1)])
        threads = f"{' or '.join(map(str, counts))} threads"
        if self.details.get("threads_change") == "between texts":
            threads += " (the same number for both)"
        here = f"on this machine, in {self.engine}, {self.dtype}, {threads}"
        if not self.same_bits_up_to:
            differ = f"forward passes over 2 or more tokens round differently from single steps {here}"
            return f"{differ}: greedy output may diverge from plain decoding where two tokens are nearly tied"
        rule = f" ({by})" if (by := self.details.get("exact_by")) else ""
        widths = f"forward passes over 1 to {self.same_bits_up_to} tokens"
        return f"greedy output is bit-identical to plain decoding for {widths}, {here}{rule}"


@runtime_checkable
class LanguageModel(Protocol):
    """Logits of a causal language model over a state of `n_past` tokens."""

    name: str
    vocab: Vocabulary
    caps: Capabilities
    unsettled: Tree | None = None
    """The tree of the last `forward_tree`, whose nodes the state ends with, until `keep_path` (see `TreeModel`)."""

    @property
    def n_past(self) -> int: ...

    def forward(self, ids: Sequence[int], n_logits: int | None = None) -> np.ndarray:
        """Append `ids` to the state; return float32 logits `(n_logits, vocab)` of the last `n_logits` ids.

        `n_logits` None means every id; 0 computes no logits (prefill). The returned array is the caller's.
        Raises InputError (unknown id, empty ids), CapacityError (state would exceed n_ctx).
        """

    def rewind(self, n: int) -> None:
        """Forget the last `n` tokens, exactly: afterwards the model is as if it never had them.

        Raises RewindError, changing nothing, where the state does not hold as many.
        """

    def reset(self) -> None:
        """Forget everything."""

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Token ids of `text`; `special` recognises control tokens written in it and adds BOS where the model does."""

    def locate_nonfinite(self, ids: Sequence[int]) -> str:
        """Name of the first module whose output is NaN or Inf when `ids` are fed; "" when the engine cannot tell."""
        return ""

    def close(self) -> None:
        """Free the memory; the model cannot be used afterwards."""


@runtime_checkable
class TreeModel(LanguageModel, Protocol):
    """A model that computes a whole tree of drafted tokens in one forward; whether it can, `caps.trees` says.

    Between `forward_tree` and `keep_path` the state is the text and all nodes: `n_past` counts them, and `forward`,
    `rewind` and another `forward_tree` raise StateError. `reset` forgets them with everything else.
    """

    def forward_tree(self, ids: Sequence[int], tree: Tree) -> np.ndarray:
        """Append the nodes of `tree`, token `ids[i]` for node i; return their float32 logits `(len(ids), vocab)`.

        Each node sees the text and its ancestors only, and stands where it would if its path alone were fed: at
        `n_past + tree.depths[i]`. Raises InputError (unknown id, another number of ids than nodes, an engine or a
        model without trees), CapacityError (state would exceed n_ctx), StateError (the last tree is not settled).
        """

    def keep_path(self, nodes: Sequence[int]) -> None:
        """Settle the last `forward_tree`: keep these of its nodes, from a root down or none, and forget the others.

        Afterwards the model is as if the kept tokens alone had been fed. Raises InputError, changing nothing, for
        nodes that are no such path, and StateError where no tree is to be settled.
        """


def check_settled(model: LanguageModel) -> None:
    """Refuse what would build on a state that still holds a tree."""
    if (tree := model.unsettled) is not None:
        raise StateError(f"{model.name} holds {len(tree)} nodes of a tree: call keep_path ([] for none) or reset first")


def check_tree(model: LanguageModel, ids: Sequence[int], tree: Tree) -> None:
    """Validate the arguments of `forward_tree` before an engine sees them."""
    if not model.caps.trees:
        raise InputError(f"{model.name} cannot compute trees: {model.caps.trees_reason}")
    check_forward(model, ids, None)
    if len(ids) != len(tree):
        raise InputError(f"forward_tree of {model.name} got {len(ids)} ids for a tree of {len(tree)} nodes: one each")


def check_held(model: LanguageModel, position: int, start: int, n: int) -> int:
    """Return the row of the token at `position` among the hidden states of `n` tokens, the first of them at `start`.

    Raises StateError where the last forward did not compute this position, and where it was taken back since.
    """
    if not start <= position < min(start + n, model.n_past):
        place = f"position {position} of {model.name}, whose state has {model.n_past} tokens"
        raise StateError(f"no hidden state is held for {place}: feed it again")
    return position - start


def check_path(model: LanguageModel, nodes: Sequence[int]) -> list[int]:
    """Return the nodes as a list; refuse them unless they lead from the committed text down the tree fed last."""
    if (tree := model.unsettled) is None:
        raise StateError(f"keep_path of {model.name} settles a forward_tree, and there is none to settle")
    path = list(nodes)
    if tree.path(path[-1] if path else COMMITTED) != path:
        raise InputError(f"nodes {path!r:.80} are no path of the last tree of {model.name}, from a root down")
    return path


def check_forward(model: LanguageModel, ids: Sequence[int], n_logits: int | None) -> int:
    """Validate the arguments of `forward`; returns the number of logits rows. The engines would abort the process."""
    check_settled(model)
    array = np.asarray(ids)
    if array.ndim != 1 or not array.size or array.dtype.kind not in "iu":
        raise InputError(f"forward of {model.name} takes a flat list of at least one token id, got {ids!r:.80}")
    if (bad := array[(array < 0) | (array >= model.vocab.size)]).size:
        raise InputError(f"token id {bad[0]} is outside the vocabulary of {model.name} (0..{model.vocab.size - 1})")
    if model.n_past + len(ids) > model.caps.n_ctx:
        full = f"{model.name} holds {model.caps.n_ctx} tokens: {model.n_past} and {len(ids)} more do not fit"
        raise CapacityError(f"{full}; load it with a larger n_ctx, or shorten the prompt")
    rows = len(ids) if n_logits is None else n_logits
    if not 0 <= rows <= len(ids):
        raise InputError(f"n_logits is {n_logits}, but {len(ids)} ids are fed: 0..{len(ids)} rows can be asked for")
    return rows


def check_rewind(model: LanguageModel, n: int) -> None:
    """Refuse a rewind of more tokens than the state holds."""
    check_settled(model)
    if not isinstance(n, Integral) or not 0 <= n <= model.n_past:
        raise RewindError(f"cannot rewind {n!r} tokens of {model.name}: its state holds {model.n_past}")
