"""The drafter interface. It does not depend on verification.

To add a drafter, subclass `DrafterBase`, write a function that creates it for a target, and
register the function in `registry.DRAFTERS`. `tests/draft/test_conformance.py` then tests it, and
`--drafter bigram` runs it.

    # specnb/draft/bigram.py
    from specnb.draft.base import DrafterBase, Proposal

    class Bigram(DrafterBase):
        '''Proposes the token that followed the newest token last time.'''

        name = "bigram"

        def start(self, tokens):
            self.after, self.seen = {}, 1
            self.commit(tokens)

        def propose(self, tokens, k, picker):
            ids = [*tokens[-1:]]
            while ids and len(ids) <= k and ids[-1] in self.after:
                ids.append(self.after[ids[-1]])
            return Proposal(tuple(ids[1:]))  # no rows of q_draft: each id is a point mass

        def commit(self, tokens):
            self.after.update((tokens[i - 1], tokens[i]) for i in range(self.seen, len(tokens)))
            self.seen = len(tokens)

    def bigram_drafter(target, **options):
        return Bigram(**options)

    # specnb/registry.py
    DRAFTERS = {..., "bigram": "specnb.draft.bigram:bigram_drafter"}

`propose` may change the drafter's state, because a draft model processes its own draft tokens.
`commit` then rewinds the state to the committed tokens.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from specnb.lm.base import LanguageModel
from specnb.lm.tree import Tree
from specnb.lm.vocab import Vocabulary


class Proposal(NamedTuple):
    """Draft tokens for one round.

    `ids` contains up to k tokens. `q_draft (len(ids), vocab)` float64 contains the rows they were
    sampled from, or is None for a deterministic drafter (lookup, argmax), whose ids are verified as
    point masses. `forward_s` is the time spent in forward passes of the drafter, in seconds.

    Without a `tree`, each id follows the one before it. With a tree, id i follows id
    `tree.parents[i]`, or the newest token if that is -1. Children of one node must be distinct
    tokens. Trees are deterministic, so their `q_draft` is None (see `decode.accept`).
    """

    ids: tuple[int, ...]
    q_draft: np.ndarray | None = None
    forward_s: float = 0.0
    tree: Tree | None = None


class Picker(Protocol):
    """Picks tokens from rows of logits, with the settings and random stream of this generation."""

    enough: bool
    """Whether drafting ends after the last picked token, without computing another row."""

    def pick(self, logits: np.ndarray) -> tuple[int, np.ndarray | None] | None:
        """Return a token and the float64 row `(vocab,)` it was drawn from, None if greedy.

        A result of None ends drafting in this round, without a token from this row
        (`decode.control`).
        """
        ...

    def copies(self, support: int, k: int) -> int:
        """Return how many of `k` copied tokens to propose after a match of `support` tokens.

        A drafter that copies calls it, so that controllers and the router know the match length.
        """
        ...


class DrafterBase:
    """Base class of drafters, which propose draft tokens and follow the committed tokens.

    A subclass defines `name` and `propose`. The other defaults are those of a drafter of chains
    that has neither a model nor a state.
    """

    name: str
    vocab: Vocabulary | None = None
    """Vocabulary of the draft model, which is compared with the target's; None without one."""
    model: LanguageModel | None = None
    """The draft model, which is never the target."""
    target: LanguageModel | None = None
    """The only target that trained heads draft for, as they read its hidden states; else None."""
    n_heads: int = 0
    """Number of trained heads, and so the longest chain; 0 for drafters without this limit."""
    at_once: bool = False
    """Whether every round that drafts computes all heads, regardless of K."""
    tree_nodes: int = 0
    """Largest number of nodes in its trees; 0 for a drafter of chains."""
    chooses_k: int = 0
    """Largest K of a drafter that chooses K itself (a router); 0 for other drafters."""
    expected: Sequence[float] = ()
    """Acceptance rates by position, measured on held-out text in training; empty if unknown."""
    nested: bool = True
    """Whether the draft tokens for one K are a prefix of those for a larger K, as replay needs."""
    translation: object | None = None
    """A `token_map.Fit` if the draft model's vocabulary is translated."""
    findings: Sequence[str] = ()
    """Sentences to show with a result."""

    def start(self, tokens: Sequence[int]) -> None:
        """Reset the state and take `tokens` as the prompt."""

    def propose(self, tokens: Sequence[int], k: int, picker: Picker) -> Proposal:
        """Return up to `k` draft tokens after `tokens`, the text so far (read-only).

        All nodes of a tree count, because `k` limits the width of the target's forward pass.
        """
        raise NotImplementedError

    def commit(self, tokens: Sequence[int]) -> None:
        """Update the state to the committed `tokens` (the whole sequence); drop rejected tokens."""

    def locate_nonfinite(self, ids: Sequence[int]) -> str:
        """Return the name of the first module with a NaN or Inf output for `ids`; "" if unknown."""
        return (
            self.model.locate_nonfinite(ids)
            if self.model and self.model.vocab is self.vocab
            else ""
        )

    def close(self) -> None:
        """Free the resources of the drafter."""

    def step_s(self) -> float:
        """Return the median seconds of a draft step, for drafters without `model`."""
        return 0.0

    def rows(self, tokens: Sequence[int], ahead: Sequence[int]) -> list[np.ndarray]:
        """Return each head's logits `(vocab,)`. Head i reads `tokens` and the first i of `ahead`.

        Tokens that a head cannot draft have the logit -inf.
        """
        return []


Drafter = DrafterBase
"""Alias of the class, for annotations."""


class TokenView(Sequence[int]):
    """A read-only view of the tokens so far.

    Drafters get it instead of the loop's list, so that they cannot append to that list.
    """

    __slots__ = ("_tokens",)

    def __init__(self, tokens: list[int]) -> None:
        self._tokens = tokens

    def __getitem__(self, index: int | slice) -> int | tuple[int, ...]:
        part = self._tokens[index]
        return tuple(part) if isinstance(index, slice) else part

    def __len__(self) -> int:
        return len(self._tokens)
