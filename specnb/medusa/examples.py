"""From written text and its hidden states to what heads learn: one example is one position of one row.

At position t the heads get the hidden state of token t. Head i is to say token t + 2 + i; Hydra's head i is shown the
tokens t + 1 … t + 1 + i. An example exists where token t + 2 is the backbone's own choice, and head i has a label as
far as all tokens from there on are: what a user or a template writes is not the backbone's to foretell.
"""

from pathlib import Path
from typing import NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from specnb.errors import InputError
from specnb.medusa import hidden
from specnb.medusa.data import Rows
from specnb.medusa.heads import Heads

NO_LABEL = -100
OUTSIDE = -1
"""The label of a token that the draft vocabulary does not hold: no head can say it, and it counts as a miss."""


class Batch(NamedTuple):
    """`hidden (batch, hidden)`, `ids (batch, n_heads)` the tokens since, `labels (batch, n_heads)` draft ids,
    and, where asked for, `later (batch, n_heads, hidden)`, the states in which the backbone chose the labels."""

    hidden: Tensor
    ids: Tensor
    labels: Tensor
    later: Tensor | None


class Examples:
    """All examples of a split, drawn by step: the batch of step n is a function of (seed, n) alone."""

    def __init__(self, rows: Rows, states: Tensor, *, n_heads: int, token_map: Tensor | None, vocab_size: int) -> None:
        """`states (rows, length, size)` as `hidden.read` gives it. Raises InputError where text and states differ."""
        if tuple(states.shape[:2]) != rows.tokens.shape:
            raise InputError(f"text of {rows.tokens.shape} and states of {tuple(states.shape[:2])}: compute them again")
        n_rows, length = rows.tokens.shape
        if length < n_heads + 2:
            raise InputError(f"rows of {length} tokens hold no example for {n_heads} heads")
        self._hidden = states.flatten(0, 1)
        self._tokens = torch.from_numpy(rows.tokens.astype(np.int64)).flatten()
        self._n_heads = n_heads
        steps = range(n_heads)
        last = length - 1 - n_heads  # positions whose every label lies in the row
        own = np.stack([rows.own[:, 2 + i : 2 + i + last] for i in steps], axis=-1)
        self._known = torch.from_numpy(np.logical_and.accumulate(own, axis=-1)).flatten(0, 1)
        places = np.arange(n_rows)[:, None] * length + np.arange(last)
        self._places = torch.from_numpy(places).flatten()
        usable = self._known[:, 0]
        self._known, self._places = self._known[usable], self._places[usable]
        self._draft_id = _draft_ids(token_map, vocab_size)
        self._order: tuple[tuple[int, int], np.ndarray] = ((-1, -1), np.empty(0))

    @classmethod
    def of(cls, folder: Path, split: str, rows: Rows, heads: Heads) -> Self:
        """The examples of the `rows` of a split, with their states in `folder`, for these heads."""
        token_map = None if heads.token_map is None else heads.token_map.cpu()
        sizes = {"n_heads": heads.config.n_heads, "vocab_size": heads.config.vocab_size}
        return cls(rows, hidden.read(folder, split), token_map=token_map, **sizes)

    def __len__(self) -> int:
        return len(self._places)

    def at_step(self, step: int, *, batch_size: int, seed: int, later: bool = True) -> Batch:
        """The batch of a step: each epoch visits every example at most once, in another order."""
        if batch_size > len(self):
            raise InputError(
                f"a batch of {batch_size} was asked for, but there are {len(self)} examples: write more text"
            )
        epoch, place = divmod(step, len(self) // batch_size)
        if self._order[0] != (seed, epoch):  # made once an epoch: it takes longer than a small step
            self._order = ((seed, epoch), np.random.default_rng([seed, epoch]).permutation(len(self)))
        return self.batch(torch.from_numpy(self._order[1][place * batch_size : (place + 1) * batch_size]), later=later)

    def spread(self, n: int, *, later: bool = True) -> Batch:
        """About `n` examples spread evenly over all."""
        return self.batch(torch.arange(0, len(self), max(1, len(self) // n)), later=later)

    def batch(self, chosen: Tensor, *, later: bool = True) -> Batch:
        """The examples with these numbers; `later` are most of the bytes, and only soft targets need them."""
        at = self._places[chosen]
        since = at[:, None] + 1 + torch.arange(self._n_heads)
        labels = self._draft_id[self._tokens[since + 1]]
        labels = torch.where(self._known[chosen], labels, NO_LABEL)
        return Batch(self._hidden[at], self._tokens[since], labels, self._hidden[since] if later else None)


def most_frequent(rows: Rows, n: int) -> Tensor:
    """The `n` tokens that the backbone wrote most often, ascending, int64: a draft vocabulary.

    Where it wrote fewer different ones, the most frequent of what else stands in the text follow: they are likely in
    other texts. Raises InputError where all of the text has fewer.
    """
    size = int(rows.tokens.max()) + 1
    own, every = (np.bincount(tokens, minlength=size) for tokens in (rows.tokens[rows.own], rows.tokens.ravel()))
    if np.count_nonzero(every) < n:
        raise InputError(
            f"the text holds {np.count_nonzero(every)} different tokens, a draft vocabulary of {n} was asked"
        )
    return torch.from_numpy(np.sort(np.lexsort((-every, -own))[:n]))


def coverage(rows: Rows, token_map: Tensor | None) -> float:
    """Share of the backbone's own tokens that the draft vocabulary holds."""
    if token_map is None:
        return 1.0
    return float(np.isin(rows.tokens[rows.own], token_map.numpy()).mean())


def _draft_ids(token_map: Tensor | None, vocab_size: int) -> Tensor:
    """Draft id of every vocabulary id, OUTSIDE where there is none."""
    if token_map is None:
        return torch.arange(vocab_size)
    ids = torch.full((vocab_size,), OUTSIDE)
    ids[token_map] = torch.arange(len(token_map))
    return ids
