"""Closed-form language models: every probability is known, so the laws of decoding can be checked exactly.

These are for the tests and for teaching; nothing that is measured uses them.
"""

from collections.abc import Callable, Sequence

import numpy as np

from specnb.errors import InputError
from specnb.lm.base import Capabilities, check_forward, check_path, check_rewind, check_settled, check_tree
from specnb.lm.tree import Tree
from specnb.lm.vocab import Vocabulary

LogitsOf = Callable[[tuple[int, ...]], np.ndarray]


def letters(size: int, *, eog: frozenset[int] = frozenset()) -> Vocabulary:
    """A vocabulary whose id i is the i-th of a, b, c, … (two letters beyond z)."""
    names = [chr(97 + i) if i < 26 else f"{chr(97 + i // 26 - 1)}{chr(97 + i % 26)}" for i in range(size)]
    return Vocabulary(pieces=tuple(n.encode() for n in names), kind="toy", bos=0, eos=min(eog, default=None), eog=eog)


class ToyLM:
    """A model whose logits are a function of the whole prefix: `logits_of(prefix) -> (vocab,)`."""

    def __init__(self, logits_of: LogitsOf, vocab: Vocabulary, *, name: str = "toy", n_ctx: int = 4096) -> None:
        self.name = name
        self.vocab = vocab
        self.caps = Capabilities("toy", "cpu", "float64", n_ctx, n_ctx, "crop", lossless_dtype=True, trees=True)
        self._logits_of = logits_of
        self._ids: list[int] = []
        self._tree: Tree | None = None  # whose nodes are the last of the ids

    @property
    def n_past(self) -> int:
        return len(self._ids)

    def forward(self, ids: Sequence[int], n_logits: int | None = None) -> np.ndarray:
        check_settled(self, self._tree)
        rows = check_forward(self, ids, n_logits)
        self._ids.extend(int(i) for i in ids)
        ends = range(len(self._ids) - rows + 1, len(self._ids) + 1)
        logits = [self._logits_of(tuple(self._ids[:end])) for end in ends]
        return np.array(logits, dtype=np.float32).reshape(rows, self.vocab.size)

    def forward_tree(self, ids: Sequence[int], tree: Tree) -> np.ndarray:
        check_settled(self, self._tree)
        check_tree(self, ids, tree)
        nodes = [int(i) for i in ids]
        paths = (tree.path(node) for node in range(len(tree)))
        prefixes = [(*self._ids, *(nodes[i] for i in path)) for path in paths]
        out = np.stack([self._logits_of(prefix) for prefix in prefixes]).astype(np.float32)
        self._ids += nodes
        self._tree = tree
        return out

    def keep_path(self, nodes: Sequence[int]) -> None:
        path = check_path(self, nodes, self._tree)
        start = len(self._ids) - len(self._tree)
        self._ids[start:] = [self._ids[start + node] for node in path]
        self._tree = None

    def rewind(self, n: int) -> None:
        check_settled(self, self._tree)
        check_rewind(self, n)
        del self._ids[len(self._ids) - n :]

    def reset(self) -> None:
        self._ids.clear()
        self._tree = None

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        ids = {piece.decode(): i for i, piece in enumerate(self.vocab.pieces)}
        unknown = sorted(set(text) - set(ids))
        if unknown:
            raise InputError(f"the toy vocabulary has no token for {unknown[0]!r}")
        return [ids[c] for c in text]

    def close(self) -> None:
        self.reset()

    def locate_nonfinite(self, ids: Sequence[int]) -> str:
        return "logits_of"


def markov(
    size: int, *, order: int = 1, seed: int = 0, sharpness: float = 1.5, eog: frozenset[int] = frozenset()
) -> ToyLM:
    """A random Markov model: the logits of the next token are fixed Gaussian draws given the last `order` tokens.

    `sharpness` scales them: 0 is uniform, large is nearly deterministic.
    """
    table: dict[tuple[int, ...], np.ndarray] = {}

    def logits_of(prefix: tuple[int, ...]) -> np.ndarray:
        context = prefix[-order:]
        if context not in table:
            rng = np.random.default_rng([seed, order, *context])
            table[context] = sharpness * rng.standard_normal(size)
        return table[context]

    return ToyLM(logits_of, letters(size, eog=eog), name=f"markov(size={size}, order={order}, seed={seed})")


def cyclic(size: int) -> ToyLM:
    """Always prefers the successor of the last token, modulo `size`: its greedy output is known by heart."""
    rows = 8.0 * np.roll(np.eye(size), 1, axis=1)
    return ToyLM(lambda prefix: rows[prefix[-1]].copy(), letters(size), name=f"cyclic(size={size})")
