"""Lossless drafting by a model with another vocabulary (Timor et al. 2502.05202).

`TokenIntersection` (TLI) keeps what both vocabularies have: the draft's rows become rows over the target's ids, and q
is renormalised on the shared pieces by the sampling itself. `StringMatch` (SLEM) lets the model draft as it likes and
spells the drafted text in the target's tokens; these are point masses. Both stay lossless however badly a text is
translated: the verification rules hold for every q, as long as the drafts came from it.
`fitted` takes whichever a pair needs.
"""

from collections.abc import Sequence
from functools import cache
from time import perf_counter
from typing import Any

import numpy as np

from specnb.draft.base import DrafterBase, Proposal
from specnb.draft.model import ModelDrafter, n_common
from specnb.draft.spelling import CONTEXT, GrowingSpelling, Longest, encode_exact, whole_characters
from specnb.draft.token_map import Fit, Tokenizing, TokenMap, Tokens, Way, fit
from specnb.errors import OTHER_DRAFTERS, VocabularyMismatch
from specnb.lm.base import LanguageModel, check_forward, check_rewind
from specnb.lm.load import load

DRAFTS_PER_TOKEN = 3
"""Most draft tokens that are spent on one token of the target, on average over a round."""


class TokenIntersection(LanguageModel):
    """A draft model that reads and predicts the target's ids: a LanguageModel for `ModelDrafter`.

    A row holds the draft's logits at shared pieces and -inf elsewhere. The state is the wrapped model's, in its own
    ids: a shared token is one of its tokens, another is spelled, each by itself, so that n tokens can be rewound
    whatever they took. Raises VocabularyMismatch when not one piece is shared.
    """

    def __init__(self, model: LanguageModel, target: Tokenizing) -> None:
        self._map = TokenMap(Tokens(target), Tokens(model))
        if not len(self._map.draft_ids):
            raise VocabularyMismatch(f"{target.name} and {model.name} share not one token: {OTHER_DRAFTERS}")
        self.translation = Fit(Way.SLICING if self._map.is_slice else Way.TOKENS, self._map.overlap)
        self.model, self.name, self.vocab = model, model.name, target.vocab
        self.caps, self.encode = model.caps, target.encode
        self._longest = Longest(model)
        self._spelling = cache(self._spell)
        self._sizes: list[int] = []  # draft tokens that each token of the state takes

    @property
    def n_past(self):
        return len(self._sizes)

    def can_draft(self, token: int) -> bool:
        """Whether a token of the target is among those that can be drafted."""
        return token in self._map

    def forward(self, ids, n_logits=None):
        rows, vocab = check_forward(self, ids, n_logits), self.model.vocab
        parts = [self._spelling(int(token)) for token in ids]
        if not self._sizes and vocab.add_bos and vocab.bos not in (None, parts[0][0]):
            parts[0] = (vocab.bos, *parts[0])
        sizes = [*map(len, parts)]
        ends = np.cumsum([0, *sizes[len(sizes) - rows + 1 :]]) if rows else []  # a token's row is that of its last part
        logits = self.model.forward([i for part in parts for i in part], int(ends[-1]) + 1 if rows else 0)
        self._sizes += sizes
        logits = logits[ends]
        out = np.full((rows, self.vocab.size), -np.inf, dtype=np.float32)
        out[:, self._map.target_ids] = logits[:, self._map.draft_ids]
        out[~(logits.max(axis=1, initial=-np.inf) < np.inf)] = np.nan  # bad logits are reported, wherever they stood
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
        """The draft tokens of a target's token, by itself; at least one, for each token has its place in the state."""
        same, text = self._map.draft_of(token), self.vocab.pieces[token]
        spelled = encode_exact(self.model, b"", text) if same is None else (same,)
        ends = [i for i in (self.model.vocab.eos, self.model.vocab.bos, 0) if i is not None]
        return spelled or tuple(self._longest.spell(text) or ends[:1])  # an end for what the draft cannot spell


class StringMatch(DrafterBase):
    """Drafts text with `model`, greedily and in its own vocabulary, and proposes it in the target's tokens.

    The draft's state holds the true text as the draft's own tokenizer writes it. The proposal is what the target's
    tokenizer writes behind the text so far; drafting ends at a control token. It is deterministic given the text, so
    `q_draft` is None. Both tokenizers see a window of the text, so that a round costs the same at any length.

    The last token of a proposal may be the beginning of a longer one. So the drafts for one K are not the first of
    those for a larger one (`nested`), and a recording answers for one K only (`measure.follow.follow`).
    """

    nested = False

    def __init__(self, model: LanguageModel, target: LanguageModel) -> None:
        self._map = TokenMap(Tokens(target), Tokens(model))
        self.translation = Fit(Way.STRINGS, self._map.overlap)
        self.model, self.name, self.vocab = model, model.name, target.vocab
        self._target = target
        self._spelling = GrowingSpelling(model)

    def start(self, tokens):
        self.model.reset()
        self._spelling.clear()
        self._seen = 0  # tokens of the target that are in the spelling
        self._fed = []  # drafts in the model's state, behind the whole spelling
        if self.model.vocab.add_bos and (bos := self.model.vocab.bos) is not None:
            self._spelling.add_control(bos)
        self._follow(tokens)
        if 1 < len(self._spelling.ids) <= self.model.caps.n_ctx:
            self.model.forward(self._spelling.ids[:-1], n_logits=0)

    def propose(self, tokens, k, picker):
        ids, vocab = self._spelling.ids, self.model.vocab
        most = min(DRAFTS_PER_TOKEN * k, self.model.caps.n_ctx - len(ids) + 1)
        if most < 1 or not ids:
            return Proposal(())
        before, text = self._target.vocab.raw_bytes(tokens[-CONTEXT:]), b""
        drafted, spelled, forward_s, feed = [], (), 0.0, ids[self.model.n_past :]
        while True:
            began = perf_counter()
            logits = self.model.forward(feed, n_logits=1)[0]
            forward_s += perf_counter() - began
            self._fed = list(drafted)
            # the best token at any temperature, since a point mass is kept with its probability under the target
            token = picker.best(logits)
            if token is None or token in vocab.control or not vocab.pieces[token]:
                break
            drafted.append(token)
            text += vocab.pieces[token]
            spelled = encode_exact(self._target, before, whole_characters(text)) or spelled
            feed = (token,)
            if picker.enough or len(spelled) >= k or len(drafted) == most:
                break
        return Proposal(spelled[:k], None, forward_s)

    def commit(self, tokens):
        state = [*self._spelling.ids, *self._fed][: self.model.n_past]
        self._follow(tokens)
        now = self._spelling.ids[:-1]  # the newest token stays out, so that the next propose has something to feed
        self.model.rewind(len(state) - n_common(state, now))
        self._fed = []

    def close(self):
        self.model.close()

    def _follow(self, tokens: Sequence[int]) -> None:
        """Spell the tokens that are new: text as text, control tokens as the draft's own where it has their like."""
        text, vocab = bytearray(), self._target.vocab
        for token in tokens[self._seen :]:
            control = self._map.draft_of(token) if token in vocab.control else None
            if control is None:  # text, or a control token that is read as the text it is written with
                text += vocab.pieces[token]
                continue
            self._spelling.add(bytes(text))
            text.clear()
            if self._spelling.ids != [control]:  # the BOS that is there already
                self._spelling.add_control(control)
        self._spelling.add(bytes(text))
        self._seen = len(tokens)


def model_drafter(name: str, target: LanguageModel, **options: Any) -> ModelDrafter | StringMatch:
    """Open the draft model `name` and fit it to the target's vocabulary before the first token.

    Raises VocabularyMismatch, InputError, FetchError, LoadError, MemoryShortError.
    """
    model = load(name, **options)
    try:
        return fitted(model, target)
    except BaseException:
        model.close()
        raise


def fitted(model: LanguageModel, target: LanguageModel) -> ModelDrafter | StringMatch:
    """An opened draft model as a drafter for `target`, translated where it must be.

    Raises VocabularyMismatch where there is no way.
    """
    way, overlap = fit(Tokens(target), Tokens(model))
    match way:
        case Way.SAME:
            return ModelDrafter(model)
        case Way.STRINGS:
            return StringMatch(model, target)
        case Way.NONE:
            kinds = f"{model.name} ({model.vocab.kind}) cannot draft for {target.name} ({target.vocab.kind})"
            raise VocabularyMismatch(f"{kinds}: {overlap}, and text cannot be spelled. {OTHER_DRAFTERS}")
    return ModelDrafter(TokenIntersection(model, target))
