"""Lossless drafting by a model with another vocabulary (TLI, Timor et al. 2502.05202).

`TokenIntersection` lets such a model draft the tokens that both vocabularies have, matched by their
bytes. Its rows become rows over the target's ids, and sampling renormalizes q over the shared
tokens. This is lossless for any pair of vocabularies, because acceptance rules are exact for every
q that the draft tokens were sampled from. With few shared tokens, only the acceptance rate is
lower.
"""

from functools import cache
from typing import Any

import numpy as np

from specnb.draft.spelling import GreedySpeller, encode_exact
from specnb.draft.token_map import Tokens, Translation, choose_translation
from specnb.errors import OTHER_DRAFTERS, VocabularyMismatch
from specnb.lm.base import LanguageModel, check_forward, check_rewind


class TokenIntersection(LanguageModel):
    """A draft model that reads and predicts the target's ids: a LanguageModel for `ModelDrafter`.

    A row contains the draft model's logits for shared tokens, and -inf elsewhere. The state is that
    of the wrapped model, in its own ids: a shared token is one of its tokens, and any other token
    is spelled by one or more of them, independently of its neighbors, so that it can be rewound
    alone. Raises VocabularyMismatch if the tokens cannot be translated.

    `target_ids[i]` and `draft_ids[i]` are pairs of ids with equal pieces, sorted by `draft_ids`. If
    every id that both have means the same, the pairs are these ids.
    """

    def __init__(self, model: LanguageModel, target: Any) -> None:
        """Translate for `target`, a LanguageModel or a `compat.description.Description` of one."""
        target_tokens = Tokens(target)
        draft_tokens = Tokens(model)
        self.translation = choose_translation(target_tokens, draft_tokens)
        if self.translation.way is Translation.NONE:
            kinds = f"{model.name} ({model.vocab.kind}) cannot draft for {target.name} ({target.vocab.kind})"
            why = f"their tokens cannot be translated ({self.translation.overlap})"
            raise VocabularyMismatch(f"{kinds}: {why}. {OTHER_DRAFTERS}")
        if self.translation.way is Translation.TOKENS:
            keys = target_tokens.ids.keys() & draft_tokens.ids.keys()
            pairs = sorted((draft_tokens.ids[key], target_tokens.ids[key]) for key in keys)
        else:  # repeated pieces too
            pieces = min(target_tokens.by_id, draft_tokens.by_id, key=len)
            pairs = [(i, i) for i, piece in enumerate(pieces) if piece]
        self.draft_ids, self.target_ids = np.array(pairs, dtype=np.intp).reshape(-1, 2).T.copy()
        self._draft_of = {t: d for d, t in pairs}
        self.model = model
        self.name = model.name
        self.vocab = target.vocab
        self.caps = model.caps
        self.encode = target.encode
        self._speller = GreedySpeller(model)
        self._draft_tokens_of = cache(self._spell)
        self._sizes: list[int] = []  # number of the model's tokens for each target token in the state

    @property
    def n_past(self):
        return len(self._sizes)

    def can_draft(self, token: int) -> bool:
        """Return whether a token of the target is shared, so that it can be drafted."""
        return token in self._draft_of

    def forward(self, ids, n_logits=None):
        rows = check_forward(self, ids, n_logits)
        vocab = self.model.vocab
        parts = [self._draft_tokens_of(int(token)) for token in ids]
        if not self._sizes and vocab.add_bos and vocab.bos not in (None, parts[0][0]):
            parts[0] = (vocab.bos, *parts[0])
        sizes = [*map(len, parts)]
        # the row of a target token is that of the last of the model's tokens for it
        ends = np.cumsum([0, *sizes[len(sizes) - rows + 1 :]]) if rows else []
        n_rows = int(ends[-1]) + 1 if rows else 0
        logits = self.model.forward([i for part in parts for i in part], n_rows)
        self._sizes += sizes
        logits = logits[ends]
        out = np.full((rows, self.vocab.size), -np.inf, dtype=np.float32)
        out[:, self.target_ids] = logits[:, self.draft_ids]
        # rows that are not finite are reported even if only unshared tokens are affected
        out[~(logits.max(axis=1, initial=-np.inf) < np.inf)] = np.nan
        return out

    def rewind(self, n):
        check_rewind(self, n)
        if n:
            self.model.rewind(sum(self._sizes[-n:]))
            del self._sizes[-n:]

    def reset(self):
        self.model.reset()
        self._sizes.clear()

    def close(self):
        self.model.close()

    def _spell(self, token: int) -> tuple[int, ...]:
        """Return the model's ids for a token of the target, at least one.

        Control tokens that the model lacks are spelled, too: it reads "<|im_start|>" as ordinary
        text. If the target's tokenizer adds a BOS that is not shared, the model's BOS stands for it.
        """
        if token in self._draft_of:
            return (self._draft_of[token],)
        vocab = self.model.vocab
        if token == self.vocab.bos and self.vocab.add_bos and vocab.bos is not None:
            return (vocab.bos,)
        text = self.vocab.pieces[token]
        spelled = encode_exact(self.model, b"", text) or tuple(self._speller.spell(text))
        if spelled:
            return spelled
        ends = (vocab.eos, vocab.bos, 0)  # for text that the model cannot spell
        return (next(end for end in ends if end is not None),)
