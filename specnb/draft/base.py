"""The interface of whatever proposes tokens. Knows nothing about verification.

How to add a drafter: subclass `DrafterBase`, which lists all that a drafter may have, write a function that makes one
for a target, and add it to `registry.DRAFTERS`. `tests/draft/test_conformance.py` then tries it, and `--drafter bigram`
runs it.

    # specnb/draft/bigram.py
    from specnb.draft.base import DrafterBase, Proposal

    class Bigram(DrafterBase):
        '''Proposes what followed the newest token last time.'''

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

`propose` may change the state (a model reads its own drafts); `commit` then rewinds it to the tokens that became true.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from specnb.lm.base import LanguageModel
from specnb.lm.tree import Tree
from specnb.lm.vocab import Vocabulary


class Proposal(NamedTuple):
    """Drafted tokens for one round.

    `ids` holds up to k tokens. `q_draft (len(ids), vocab)` float64 are the rows they were sampled from, or None
    for a deterministic drafter (lookup, argmax): then each id stands for a point mass, and is verified as one.
    `forward_s` seconds were spent in the drafter's own model.

    Without a `tree` each id follows the one before it. With one, id i follows id `tree.parents[i]`, or for -1 the
    newest token: several guesses for one place, of which no two under the same parent may be the same token. Trees are
    deterministic, `q_draft` None (see `decode.accept`).
    """

    ids: tuple[int, ...]
    q_draft: np.ndarray | None = None
    forward_s: float = 0.0
    tree: Tree | None = None


class Picker(Protocol):
    """Chooses a token from a row of logits with the sampling settings and the random stream of this generation."""

    enough: bool
    """Whether drafting ends behind the token picked last, before another row is computed."""

    def pick(self, logits: np.ndarray) -> tuple[int, np.ndarray | None] | None:
        """A token and the float64 row `(vocab,)` it was drawn from; None for the row when the choice is greedy.

        None alone ends drafting for this round: the row is not to be drafted from (`decode.control`).
        """
        ...

    def best(self, logits: np.ndarray) -> int | None:
        """The likeliest token, at any temperature and without a draw: the choice of a deterministic drafter.

        None ends drafting for this round, as of `pick`.
        """
        ...

    def copies(self, support: int, k: int) -> int:
        """How many of up to `k` tokens to propose that followed a match of `support` tokens."""
        ...


class DrafterBase:
    """Proposes tokens that may follow; keeps whatever state it needs in step with the tokens that became true.

    A drafter is a subclass with a `name` and `propose`; the rest has defaults, those of a drafter of chains without a
    model or a state.
    """

    name: str
    vocab: Vocabulary | None = None
    """Of the model that drafts, to be compared with the target's; None when only the target's own tokens are copied."""
    model: LanguageModel | None = None
    """The model whose forwards drafting costs, another than the target."""
    target: LanguageModel | None = None
    """The only target that it drafts for, because it reads the hidden states of this one: trained heads."""
    n_heads: int = 0
    """Trained heads, the most drafts of a chain; 0 for other drafters, which have no such limit."""
    at_once: bool = False
    """All heads are computed in every round that drafts, however few drafts are asked for."""
    tree_nodes: int = 0
    """The most tokens of the trees that it drafts; 0 for a drafter of chains."""
    chooses_k: int = 0
    """The most drafts of one that chooses how many itself, where no K is asked for; 0 for others."""
    expected: Sequence[float] = ()
    """The share of drafts kept at each position, as its training measured on held-out text; none where nothing did."""
    nested: bool = True
    """The drafts for one K are the first of those for a larger K; otherwise the drafter cannot be replayed."""
    translation: object | None = None
    """A `token_map.Fit` where the draft model has another vocabulary than the target."""
    findings: Sequence[str] = ()
    """Sentences that the reader of a result should know."""

    def start(self, tokens: Sequence[int]) -> None:
        """Forget everything and take `tokens` as the prompt."""

    def propose(self, tokens: Sequence[int], k: int, picker: Picker) -> Proposal:
        """Up to `k` tokens to follow `tokens`, which cannot be changed; step j sees its own j-1 drafts.

        Of a tree all nodes count: `k` bounds the width of the target's forward.
        """
        raise NotImplementedError

    def commit(self, tokens: Sequence[int]) -> None:
        """`tokens` (the whole sequence) are now true: drop the drafts that are not among them."""

    def locate_nonfinite(self, ids: Sequence[int]) -> str:
        """Name of the first module with a NaN or Inf output when `ids` are fed; "" where it is not known."""
        return self.model.locate_nonfinite(ids) if self.model and self.model.vocab is self.vocab else ""

    def close(self) -> None:
        """Free what the drafter opened."""

    def step_s(self) -> float:
        """Median seconds of a draft that no forward of `model` makes."""
        return 0.0

    def rows(self, tokens: Sequence[int], ahead: Sequence[int]) -> list[np.ndarray]:
        """Logits `(vocab,)` of each head after `tokens` and the start of `ahead`; -inf for what it cannot draft."""
        return []


Drafter = DrafterBase
"""The same, as a type."""


class TokenView(Sequence[int]):
    """The tokens so far, read-only.

    Drafters get this view instead of the loop's list, so that none can append to the caller's tokens ("HelloHello").
    """

    __slots__ = ("_tokens",)

    def __init__(self, tokens: list[int]) -> None:
        self._tokens = tokens

    def __getitem__(self, index: int | slice) -> int | tuple[int, ...]:
        part = self._tokens[index]
        return tuple(part) if isinstance(index, slice) else part

    def __len__(self) -> int:
        return len(self._tokens)
