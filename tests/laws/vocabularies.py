"""Closed-form models over any vocabulary: the same text in other ids, other pieces, other padding."""

import zlib
from dataclasses import replace

import numpy as np

from specnb.errors import InputError
from specnb.lm import toy
from specnb.lm.vocab import Vocabulary


class SpellingLM(toy.ToyLM):
    """A toy with a tokenizer: the longest piece first, so that appended text can change the last token."""

    def encode(self, text, *, special=True):
        raw, ids = text.encode(), []
        known = {p: i for i, p in reversed(list(enumerate(self.vocab.pieces))) if p and i not in self.vocab.special}
        while raw:
            size = max((len(p) for p in known if raw.startswith(p)), default=0)
            if not size:
                raise InputError(f"the toy vocabulary has no token for {raw[:1]!r}")
            ids.append(known[raw[:size]])
            raw = raw[size:]
        return ids


def model(pieces, *, order=1, seed=0, sharpness=1.5, n_ctx=4096, **vocabulary):
    """A random Markov model whose id i is `pieces[i]`."""
    made = toy.markov(len(pieces), order=order, seed=seed, sharpness=sharpness)
    made.__class__ = SpellingLM
    made.vocab = Vocabulary(pieces=tuple(pieces), kind="toy", **vocabulary)
    made.caps = replace(made.caps, n_ctx=n_ctx, rewind_depth=n_ctx)
    made.name = f"{made.name} of {b' '.join(pieces).decode(errors='replace')}"
    return made


def rewritten(source, pieces):
    """`source` behind other ids: each is the one of the source's with its piece; ids without a like get -inf."""
    of = {p: i for i, p in enumerate(source.vocab.pieces) if p}
    ids = [of.get(piece) for piece in pieces]

    def logits_of(prefix):
        row = source._logits_of(tuple(ids[token] for token in prefix))
        return np.array([-np.inf if i is None else row[i] for i in ids])

    made = toy.ToyLM(logits_of, replace(source.vocab, pieces=tuple(pieces)), name=f"{source.name} rewritten")
    made.__class__ = SpellingLM
    return made


class Respelled:
    """A real model behind another vocabulary: ids in another order, padded, and a share of the pieces split in two.

    A piece that is missing is written as the longest pieces that are left; the model sees these, and what it thinks of
    the missing piece counts for the first of its parts. So it is a draft of another family with known quality.
    """

    def __init__(self, model, *, split=0.0, padding=64, seed=0):
        self._model = model
        vocab = model.vocab
        kept = [i for i, p in enumerate(vocab.pieces) if len(p) < 2 or i in vocab.control or not _drawn(p, split)]
        order = np.random.default_rng(seed).permutation(kept)
        self._inner = np.array(order)
        outer = {int(i): o for o, i in enumerate(order)}
        known = {vocab.pieces[i]: i for i in kept if i not in vocab.control}
        self._parts = {i: [outer[i]] for i in kept}
        for i in set(range(vocab.size)) - set(kept):
            self._parts[i] = [outer[j] for j in _longest(vocab.pieces[i], known)]
        self._lost = np.array([i for i in self._parts if len(self._parts[i]) > 1], dtype=int)
        self._first = np.array([self._parts[i][0] for i in self._lost], dtype=int)
        moved = {"bos": outer[vocab.bos], "eos": outer[vocab.eos]}
        moved |= {k: frozenset(outer[i] for i in getattr(vocab, k)) for k in ("eog", "special")}
        self.vocab = replace(vocab, pieces=(*(vocab.pieces[i] for i in order), *[b""] * padding), **moved)
        self.name, self.caps = f"{model.name} respelled", model.caps

    n_past = property(lambda self: self._model.n_past)

    def forward(self, ids, n_logits=None):
        rows = self._model.forward([int(self._inner[i]) for i in ids], n_logits)
        out = np.full((len(rows), self.vocab.size), -np.inf, dtype=np.float32)
        out[:, : len(self._inner)] = rows[:, self._inner]
        for row, own in zip(out, rows, strict=True):
            np.maximum.at(row, self._first, own[self._lost])
        return out

    def encode(self, text, *, special=True):
        return [part for i in self._model.encode(text, special=special) for part in self._parts[i]]

    def rewind(self, n):
        self._model.rewind(n)

    def reset(self):
        self._model.reset()

    def close(self):
        pass

    def locate_nonfinite(self, ids):
        return ""


def _drawn(piece, share):
    return zlib.crc32(piece) % 1000 < 1000 * share


def _longest(text, known):
    while text:
        size = max(n for n in range(1, len(text) + 1) if text[:n] in known)
        yield known[text[:size]]
        text = text[size:]
