"""The drafter interface. It does not depend on verification.

To add a drafter, subclass `DrafterBase`, write a function that creates it for a target, and register
the function in `registry.DRAFTERS`. `tests/draft/test_conformance.py` then tests it, and
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
    DRAFTERS["bigram"] = "specnb.draft.bigram:bigram_drafter"

`propose` may change the drafter's state, because a draft model processes its own drafts. `commit`
then rewinds the state to the committed tokens.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from specnb.lm.base import LanguageModel
from specnb.lm.tree import Tree
from specnb.lm.vocab import Vocabulary


class Proposal(NamedTuple):
    """Draft tokens for one round.

    `ids` holds up to k tokens. `q_draft (len(ids), vocab)` float64 are the rows they were sampled
    from, or None for a deterministic drafter (lookup, argmax), whose ids are verified as point
    masses. `forward_s` are the seconds spent in the drafter's own model.

    Without a `tree` each id follows the one before it. With a tree, id i follows id
    `tree.parents[i]`, or the newest token if that is -1. Children of one parent must be distinct
    tokens. Trees are deterministic, with `q_draft` None (see `decode.accept`).
    """

    ids: tuple[int, ...]
    q_draft: np.ndarray | None = None
    forward_s: float = 0.0
    tree: Tree | None = None


class Picker(Protocol):
    """Picks a token from a row of logits, with the sampling settings and random stream of this generation."""

    enough: bool
    """Whether drafting ends after the token that was picked last, before another row is computed."""

    def pick(self, logits: np.ndarray) -> tuple[int, np.ndarray | None] | None:
        """Return a token and the float64 row `(vocab,)` it was drawn from; the row is None if greedy.

        Return None to end drafting for this round without a token from this row (`decode.control`).
        """
        ...

    def best(self, logits: np.ndarray) -> int | None:
        """Return the likeliest token, at any temperature, for a deterministic drafter; or None, as `pick`."""
        ...

    def copies(self, support: int, k: int) -> int:
        """Return how many of up to `k` tokens copied after a match of `support` tokens to propose."""
        ...


class DrafterBase:
    """Proposes draft tokens, and keeps its state in step with the committed tokens.

    A subclass defines `name` and `propose`. The defaults of the rest are those of a drafter of
    chains without a model or a state.
    """

    name: str
    vocab: Vocabulary | None = None
    """Vocabulary of the draft model, compared with the target's; None if the target's tokens are copied."""
    model: LanguageModel | None = None
    """The draft model, which is never the target."""
    target: LanguageModel | None = None
    """The only target it drafts for, because it reads that target's hidden states: trained heads."""
    n_heads: int = 0
    """Number of trained heads, the largest length of a chain; 0 for other drafters, which have no limit."""
    at_once: bool = False
    """Whether a round that drafts computes all heads, however few tokens are requested."""
    tree_nodes: int = 0
    """Largest number of tokens in the trees it drafts; 0 for a drafter of chains."""
    chooses_k: int = 0
    """Largest K of a drafter that chooses K itself if none is given; 0 for others."""
    expected: Sequence[float] = ()
    """Acceptance rate at each position, measured on held-out text in training; empty if not measured."""
    nested: bool = True
    """The drafts for one K are the first of those for a larger K; otherwise the drafter cannot be replayed."""
    translation: object | None = None
    """A `token_map.Fit` if the draft model's vocabulary is translated."""
    findings: Sequence[str] = ()
    """Sentences to show next to a result."""

    def start(self, tokens: Sequence[int]) -> None:
        """Reset the state and take `tokens` as the prompt."""

    def propose(self, tokens: Sequence[int], k: int, picker: Picker) -> Proposal:
        """Return up to `k` tokens to follow `tokens`, which is read-only; step j sees its own j-1 drafts.

        In a tree all nodes count, because `k` bounds the width of the target's forward pass.
        """
        raise NotImplementedError

    def commit(self, tokens: Sequence[int]) -> None:
        """Take `tokens` (the whole sequence) as committed, and drop the drafts that are not among them."""

    def locate_nonfinite(self, ids: Sequence[int]) -> str:
        """Return the name of the first module with a NaN or Inf output for `ids`; "" if unknown."""
        return self.model.locate_nonfinite(ids) if self.model and self.model.vocab is self.vocab else ""

    def close(self) -> None:
        """Free what the drafter opened."""

    def step_s(self) -> float:
        """Return the median seconds per draft token spent outside `model`."""
        return 0.0

    def rows(self, tokens: Sequence[int], ahead: Sequence[int]) -> list[np.ndarray]:
        """Return each head's logits `(vocab,)` after `tokens` and the start of `ahead`; -inf if it cannot draft it."""
        return []


Drafter = DrafterBase
"""The same class, as a type."""


class TokenView(Sequence[int]):
    """A read-only view of the tokens so far.

    Drafters get it in place of the loop's list, so that none can append to it ("HelloHello").
    """

    __slots__ = ("_tokens",)

    def __init__(self, tokens: list[int]) -> None:
        self._tokens = tokens

    def __getitem__(self, index: int | slice) -> int | tuple[int, ...]:
        part = self._tokens[index]
        return tuple(part) if isinstance(index, slice) else part

    def __len__(self) -> int:
        return len(self._tokens)
