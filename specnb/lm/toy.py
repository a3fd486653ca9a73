"""Closed-form language models: every probability is known, so the laws of decoding can be checked exactly.

These are for the tests and for teaching; nothing that is measured uses them.
"""

from collections.abc import Callable, Iterable
from functools import cache

import numpy as np

from specnb.errors import InputError
from specnb.lm.base import Capabilities, TreeModel, check_forward, check_path, check_rewind, check_settled, check_tree
from specnb.lm.vocab import Vocabulary

LogitsOf = Callable[[tuple[int, ...]], np.ndarray]


def letters(size: int, *, eog: frozenset[int] = frozenset()) -> Vocabulary:
    """A vocabulary whose id i is the i-th of a, b, c, … (two letters beyond z)."""
    names = [chr(97 + i) if i < 26 else f"{chr(97 + i // 26 - 1)}{chr(97 + i % 26)}" for i in range(size)]
    return Vocabulary(pieces=tuple(n.encode() for n in names), kind="toy", bos=0, eos=min(eog, default=None), eog=eog)


class ToyLM(TreeModel):
    """A model whose logits are a function of the whole prefix: `logits_of(prefix) -> (vocab,)`."""

    def __init__(self, logits_of: LogitsOf, vocab: Vocabulary, *, name: str = "toy", n_ctx: int = 4096) -> None:
        self.name = name
        self.vocab = vocab
        self.caps = Capabilities("toy", "cpu", "float64", n_ctx, n_ctx, "crop", lossless_dtype=True, trees=True)
        self._logits_of = logits_of
        self._ids, self._tree = [], None  # whose nodes are the last of the ids

    @property
    def n_past(self):
        return len(self._ids)

    def forward(self, ids, n_logits=None):
        check_settled(self, self._tree)
        rows = check_forward(self, ids, n_logits)
        self._ids.extend(int(i) for i in ids)
        ends = range(len(self._ids) - rows + 1, len(self._ids) + 1)
        return self._rows(tuple(self._ids[:end]) for end in ends)

    def _rows(self, prefixes: Iterable[tuple[int, ...]]) -> np.ndarray:
        return np.array([*map(self._logits_of, prefixes)], np.float32).reshape(-1, self.vocab.size)

    def forward_tree(self, ids, tree):
        check_settled(self, self._tree)
        check_tree(self, ids, tree)
        nodes, paths = [int(i) for i in ids], map(tree.path, range(len(tree)))
        rows = self._rows((*self._ids, *(nodes[i] for i in path)) for path in paths)
        self._ids += nodes
        self._tree = tree
        return rows

    def keep_path(self, nodes):
        path = check_path(self, nodes, self._tree)
        start = len(self._ids) - len(self._tree)
        self._ids[start:] = [self._ids[start + node] for node in path]
        self._tree = None

    def rewind(self, n):
        check_settled(self, self._tree)
        check_rewind(self, n)
        del self._ids[len(self._ids) - n :]

    def reset(self):
        self._ids.clear()
        self._tree = None

    def encode(self, text, *, special=True):
        ids = {piece.decode(): i for i, piece in enumerate(self.vocab.pieces)}
        if unknown := set(text) - ids.keys():
            raise InputError(f"the toy vocabulary has no token for {min(unknown)!r}")
        return [ids[c] for c in text]

    def close(self):
        self.reset()

    def locate_nonfinite(self, ids):
        return "logits_of"


def markov(
    size: int, *, order: int = 1, seed: int = 0, sharpness: float = 1.5, eog: frozenset[int] = frozenset()
) -> ToyLM:
    """A random Markov model: the logits of the next token are fixed Gaussian draws given the last `order` tokens.

    `sharpness` scales them: 0 is uniform, large is nearly deterministic.
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
    """Always prefers the successor of the last token, modulo `size`: its greedy output is known by heart."""
    rows = 8.0 * np.roll(np.eye(size), 1, axis=1)
    return ToyLM(lambda prefix: rows[prefix[-1]].copy(), letters(size), name=f"cyclic(size={size})")
