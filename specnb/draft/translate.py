"""Lossless drafting by a model with another vocabulary (TLI, Timor et al. 2502.05202).

`TokenIntersection` lets such a model draft the tokens that both vocabularies have, matched by their
bytes. Its rows become rows over the target's ids, and sampling renormalizes q over the shared
tokens. This is lossless for any pair of vocabularies, because acceptance rules are exact for every
q that the draft tokens were sampled from. With few shared tokens, only the acceptance rate is
lower.
"""

from functools import cache

import numpy as np

from specnb.draft.spelling import GreedySpeller, encode_exact
from specnb.draft.token_map import TokenMap, Tokens, Translation, choose_translation
from specnb.errors import OTHER_DRAFTERS, VocabularyMismatch
from specnb.lm.base import LanguageModel, check_forward, check_rewind


class TokenIntersection(LanguageModel):
    """A draft model that reads and predicts the target's ids: a LanguageModel for `ModelDrafter`.

    A row contains the draft model's logits for shared tokens, and -inf elsewhere. The state is that
    of the wrapped model, in its own ids: a shared token is one of its tokens, and any other token
    is spelled by one or more of them, independently of its neighbors, so that it can be rewound
    alone. Raises VocabularyMismatch if the tokens cannot be translated.
    """

    def __init__(self, model: LanguageModel, target: LanguageModel) -> None:
        tokens = Tokens(target), Tokens(model)
        self.translation = choose_translation(*tokens)
        if self.translation.way is Translation.NONE:
            raise VocabularyMismatch(
                f"{model.name} ({model.vocab.kind}) cannot draft for {target.name} "
                f"({target.vocab.kind}): their tokens cannot be translated "
                f"({self.translation.overlap}). {OTHER_DRAFTERS}"
            )
        self._map = TokenMap(*tokens)
        self.model = model
        self.name = model.name
        self.vocab = target.vocab
        self.caps = model.caps
        self.encode = target.encode
        self._speller = GreedySpeller(model)
        self._draft_tokens_of = cache(self._spell)
        self._sizes: list[
            int
        ] = []  # number of the model's tokens for each target token in the state

    @property
    def n_past(self):
        return len(self._sizes)

    def can_draft(self, token: int) -> bool:
        """Return whether a token of the target is shared, so that it can be drafted."""
        return token in self._map

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
        out[:, self._map.target_ids] = logits[:, self._map.draft_ids]
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
        """Return the model's ids for a token of the target, at least one."""
        shared = self._map.draft_of(token)
        if shared is not None:
            return (shared,)
        text = self.vocab.pieces[token]
        spelled = encode_exact(self.model, b"", text) or tuple(self._speller.spell(text))
        if spelled:
            return spelled
        # for text that the model cannot spell
        ends = self.model.vocab.eos, self.model.vocab.bos, 0
        return (next(end for end in ends if end is not None),)
