"""A smaller language model as drafter (Leviathan et al. 2211.17192, Chen et al. 2302.01318).

It keeps its own state. A drafted token is never evaluated twice: after a round the state is rewound to the last
token that became true, and the next round feeds what is missing, one token, or two after a fully accepted round
(the last draft was sampled, but never fed).
"""

from collections.abc import Sequence
from contextlib import suppress
from time import perf_counter

import numpy as np

from specnb.draft.base import DrafterBase, Picker, Proposal
from specnb.errors import CapacityError
from specnb.lm.base import LanguageModel


def n_common(left: Sequence[int], right: Sequence[int]) -> int:
    """Tokens that two texts begin with alike."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(left), len(right)))


class ModelDrafter(DrafterBase):
    """Drafts by sampling (or, greedy, by argmax) from `model`, one token at a time.

    >>> from specnb import generate
    >>> from specnb.lm import toy
    >>> drafted = generate(toy.cyclic(5), [0], drafter=ModelDrafter(toy.cyclic(5)), k=3, max_new_tokens=8)
    >>> drafted.token_ids, drafted.acceptance_rate
    ((1, 2, 3, 4, 0, 1, 2, 3), 1.0)
    """

    def __init__(self, model: LanguageModel) -> None:
        self.model = model
        self.name = model.name
        self.vocab = model.vocab
        self.translation = getattr(model, "translation", None)  # of a draft model with another vocabulary
        self._fed: list[int] = []  # drafts in the model's state, after its n_past - len(_fed) true tokens

    def start(self, tokens: Sequence[int]) -> None:
        self.model.reset()
        self._fed = []
        if 1 < len(tokens) <= self.model.caps.n_ctx:
            with suppress(CapacityError):  # see propose
                self.model.forward(tokens[:-1], n_logits=0)

    def propose(self, tokens: Sequence[int], k: int, picker: Picker) -> Proposal:
        # A shorter context than the target's ends drafting, not the generation: without room there is no proposal.
        k = min(k, self.model.caps.n_ctx - len(tokens) + 1)
        if k < 1:
            return Proposal(())
        ids, rows, forward_s, feed = [], [], 0.0, tokens[self.model.n_past :]
        while len(ids) < k and not (ids and picker.enough):
            self._fed = ids[:-1]  # the last draft was sampled, but not fed
            began = perf_counter()
            try:
                logits = self.model.forward(feed, n_logits=1)
            except CapacityError:  # in a translated state a token may take several places
                break
            forward_s += perf_counter() - began
            self._fed = ids[:]
            if (picked := picker.pick(logits[0])) is None:
                break
            token, row = picked
            ids.append(token)
            if row is not None:
                rows.append(row)
            feed = (token,)
        return Proposal(tuple(ids), np.stack(rows) if rows else None, forward_s)

    def commit(self, tokens: Sequence[int]) -> None:
        # the newest token stays out of the state, so that the next propose has something to feed
        true = tokens[self.model.n_past - len(self._fed) : -1]
        self.model.rewind(len(self._fed) - n_common(self._fed, true))
        self._fed = []

    def close(self) -> None:
        self.model.close()
