"""Closed-form language models with exact probabilities, for teaching and tests of decoding rules.

They are not used in measurements.
"""

from collections.abc import Callable, Iterable
from functools import cache

import numpy as np

from specnb.errors import InputError
from specnb.lm.base import (
    Capabilities,
    TreeModel,
    check_forward,
    check_path,
    check_rewind,
    check_tree,
)
from specnb.lm.vocab import Vocabulary

LogitsOf = Callable[[tuple[int, ...]], np.ndarray]


def letters(size: int, *, eog: frozenset[int] = frozenset()) -> Vocabulary:
    """Return a vocabulary whose id i is the i-th of a, b, c, … (two letters after z)."""
    names = [
        chr(97 + i) if i < 26 else f"{chr(97 + i // 26 - 1)}{chr(97 + i % 26)}" for i in range(size)
    ]
    return Vocabulary(
        pieces=tuple(n.encode() for n in names),
        kind="toy",
        bos=0,
        eos=min(eog, default=None),
        eog=eog,
    )


class ToyLM(TreeModel):
    """A model whose logits are a function of the prefix: `logits_of(prefix) -> (vocab,)`."""

    def __init__(
        self, logits_of: LogitsOf, vocab: Vocabulary, *, name: str = "toy", n_ctx: int = 4096
    ) -> None:
        self.name = name
        self.vocab = vocab
        self.caps = Capabilities(
            "toy", "cpu", "float64", n_ctx, n_ctx, "crop", lossless_dtype=True, trees=True
        )
        self._logits_of = logits_of
        self._ids = []

    @property
    def n_past(self):
        return len(self._ids)

    def forward(self, ids, n_logits=None):
        rows = check_forward(self, ids, n_logits)
        self._ids += map(int, ids)
        ends = range(len(self._ids) - rows + 1, len(self._ids) + 1)
        return self._rows(tuple(self._ids[:end]) for end in ends)

    def _rows(self, prefixes: Iterable[tuple[int, ...]]) -> np.ndarray:
        return np.array([*map(self._logits_of, prefixes)], np.float32).reshape(-1, self.vocab.size)

    def forward_tree(self, ids, tree):
        check_tree(self, ids, tree)
        nodes = [*map(int, ids)]
        paths = map(tree.path, range(len(tree)))
        rows = self._rows((*self._ids, *(nodes[i] for i in path)) for path in paths)
        self._ids += nodes
        self.unsettled = tree
        return rows

    def keep_path(self, nodes):
        path = check_path(self, nodes)
        start = len(self._ids) - len(self.unsettled)
        self._ids[start:] = [self._ids[start + node] for node in path]
        self.unsettled = None

    def rewind(self, n):
        check_rewind(self, n)
        del self._ids[len(self._ids) - n :]

    def reset(self):
        self._ids.clear()
        self.unsettled = None

    def encode(self, text, *, special=True):
        ids = {piece.decode(): i for i, piece in enumerate(self.vocab.pieces)}
        if unknown := set(text) - ids.keys():
            raise InputError(f"got {min(unknown)!r}, expected letters of the toy vocabulary")
        return [ids[c] for c in text]

    def locate_nonfinite(self, ids):
        return "logits_of"


def markov(
    size: int,
    *,
    order: int = 1,
    seed: int = 0,
    sharpness: float = 1.5,
    eog: frozenset[int] = frozenset(),
) -> ToyLM:
    """Return a random Markov model: the last `order` tokens determine the Gaussian logits.

    `sharpness` scales the logits: 0 gives a uniform distribution, large values a nearly
    deterministic one.
    """

    @cache
    def row(context):
        return sharpness * np.random.default_rng([seed, order, *context]).standard_normal(size)

    return ToyLM(
        lambda prefix: row(prefix[-order:]),
        letters(size, eog=eog),
        name=f"markov(size={size}, order={order}, seed={seed})",
    )


def cyclic(size: int) -> ToyLM:
    """Return a model whose greedy next token is the last token plus one, modulo `size`."""
    rows = 8.0 * np.roll(np.eye(size), 1, axis=1)
    return ToyLM(lambda prefix: rows[prefix[-1]].copy(), letters(size), name=f"cyclic(size={size})")
