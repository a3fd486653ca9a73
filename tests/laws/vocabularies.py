"""Closed-form models over any vocabulary: the same texts with other ids, pieces and padding."""

from dataclasses import replace

import numpy as np

from specnb.errors import InputError
from specnb.lm import toy
from specnb.lm.vocab import Vocabulary


class SpellingLM(toy.ToyLM):
    """A toy model that tokenizes by longest match: appended text can change the last token."""

    def encode(self, text, *, special=True):
        raw = text.encode()
        ids = []
        known = {
            p: i
            for i, p in reversed(list(enumerate(self.vocab.pieces)))
            if p and i not in self.vocab.special
        }
        while raw:
            size = max((len(p) for p in known if raw.startswith(p)), default=0)
            if not size:
                raise InputError(f"the toy vocabulary has no token for {raw[:1]!r}")
            ids.append(known[raw[:size]])
            raw = raw[size:]
        return ids


def model(pieces, *, order=1, seed=0, sharpness=1.5, n_ctx=4096, **vocabulary):
    """Return a random Markov model whose id i is `pieces[i]`."""
    markov = toy.markov(len(pieces), order=order, seed=seed, sharpness=sharpness)
    vocab = Vocabulary(pieces=tuple(pieces), kind="toy", **vocabulary)
    name = f"{markov.name} of {b' '.join(pieces).decode(errors='replace')}"
    return SpellingLM(markov._logits_of, vocab, name=name, n_ctx=n_ctx)


def rewritten(source, pieces):
    """Return `source` with other ids, mapped by their pieces; ids not in `source` get -inf."""
    of = {p: i for i, p in enumerate(source.vocab.pieces) if p}
    ids = [of.get(piece) for piece in pieces]

    def logits_of(prefix):
        row = source._logits_of(tuple(ids[token] for token in prefix))
        return np.array([-np.inf if i is None else row[i] for i in ids])

    return SpellingLM(
        logits_of, replace(source.vocab, pieces=tuple(pieces)), name=f"{source.name} rewritten"
    )
