"""A smaller language model as the drafter (Leviathan et al. 2211.17192, Chen et al. 2302.01318).

It has its own state. No draft token is processed twice: after a round, the state is rewound to the
last accepted draft token, and the next round feeds the missing tokens. That is one token, or two
after a fully accepted round, whose last draft token was sampled but not fed. The model may be part
of the target (its first blocks, or all but some of them) or a quantized copy of it.
"""

from collections.abc import Sequence
from contextlib import suppress
from operator import ne
from time import perf_counter
from typing import Any

import numpy as np

from specnb.draft.base import DrafterBase, Proposal
from specnb.draft.translate import TokenIntersection
from specnb.errors import CapacityError, InputError
from specnb.lm.base import LanguageModel
from specnb.lm.files import name_copy, parse
from specnb.lm.load import load
from specnb.lm.vocab import first_difference


def n_common(left: Sequence[int], right: Sequence[int]) -> int:
    """Return the length of the common prefix of two token sequences."""
    return [*map(ne, left, right), True].index(True)


class ModelDrafter(DrafterBase):
    """Drafts by sampling from `model` (argmax if greedy), one token at a time.

    >>> from specnb import generate
    >>> from specnb.lm import toy
    >>> drafter = ModelDrafter(toy.cyclic(5))
    >>> drafted = generate(toy.cyclic(5), [0], drafter=drafter, k=3, max_new_tokens=8)
    >>> drafted.token_ids, drafted.acceptance_rate
    ((1, 2, 3, 4, 0, 1, 2, 3), 1.0)
    """

    def __init__(self, model: LanguageModel) -> None:
        self.model = model
        self.name = model.name
        self.vocab = model.vocab
        self.translation = getattr(model, "translation", None)  # if the vocabularies differ

    def start(self, tokens):
        self.model.reset()
        self._fed = []  # draft tokens in the state, after n_past - len(_fed) committed tokens
        if len(tokens) > 1:
            with suppress(CapacityError):  # see propose
                self.model.forward(tokens[:-1], n_logits=0)

    def propose(self, tokens, k, picker):
        # If a context shorter than the target's is full, drafting ends, but generation continues.
        k = min(k, self.model.caps.n_ctx - len(tokens) + 1)
        ids = []
        rows = []
        forward_s = 0.0
        feed = tokens[self.model.n_past :]
        while len(ids) < k and not (ids and picker.enough):
            self._fed = ids[:-1]  # the last draft token was sampled, but not fed
            began = perf_counter()
            try:
                logits = self.model.forward(feed, n_logits=1)
            except CapacityError:  # a spelled token takes several positions
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

    def commit(self, tokens):
        # the newest token stays out of the state, so that the next `propose` has a token to feed
        true = tokens[self.model.n_past - len(self._fed) : -1]
        self.model.rewind(len(self._fed) - n_common(self._fed, true))
        self._fed = []

    def close(self):
        self.model.close()


def model_drafter(name: str, target: LanguageModel, **options: Any) -> ModelDrafter:
    """Open the draft model `name`, and translate its vocabulary to the target's if needed.

    Raises VocabularyMismatch, InputError, FetchError, LoadError, MemoryShortError.
    """
    model = load(name, **options)
    try:
        return fit_drafter(model, target)
    except BaseException:
        model.close()
        raise


def fit_drafter(model: LanguageModel, target: LanguageModel) -> ModelDrafter:
    """Return an opened draft model as a drafter for `target`, translated if needed.

    Raises VocabularyMismatch if it cannot be translated.
    """
    if first_difference(target.vocab, model.vocab) is not None:
        model = TokenIntersection(model, target)
    return ModelDrafter(model)


# --- some of the target's own blocks, untrained ---------------------------------------------------
#
# LayerSkip (Elhoushi et al. 2404.16710) trains the target for early exit, and SWIFT (Xia et al.
# 2410.06916) searches for the blocks to skip in each text. Neither is done here. The drafter shares
# the target's weights, and has its own cache.


def exit_drafter(target: LanguageModel, *, n_blocks: int = 8) -> ModelDrafter:
    """Return a drafter that uses the first `n_blocks` blocks of a torch target."""
    return ModelDrafter(_require_torch(target).keep_blocks(range(n_blocks)))


def skip_drafter(target: LanguageModel, *, skipped: Sequence[int] = ()) -> ModelDrafter:
    """Return a drafter without the blocks `skipped`, by default every other in the middle half."""
    model = _require_torch(target)
    n_blocks = model.network.config.num_hidden_layers
    skipped = skipped or range(n_blocks // 4, n_blocks - n_blocks // 4, 2)
    return ModelDrafter(model.keep_blocks(sorted(set(range(n_blocks)) - set(skipped))))


def _require_torch(target: LanguageModel) -> Any:
    """Return the target. Raises InputError if it does not run in torch."""
    if not hasattr(target, "keep_blocks"):
        raise InputError(
            f"blocks of {target.name} cannot be skipped in {target.caps.engine}: "
            "open it with ?backend=hf"
        )
    return target


# --- a quantized copy of the target: same tokenizer, no training, no download ---------------------


def self_drafter(target: LanguageModel, **options: Any) -> ModelDrafter:
    """Return a drafter that is a copy of the target, quantized to q4_0."""
    refuse_copy(target.name)
    return model_drafter(name_copy(target.name), target, **options)


def refuse_copy(target: str) -> None:
    """Raise InputError for a target that does not allow a quantized copy."""
    spec = parse(target)
    if spec.where == "hf" and spec.backend != "llama":
        raise InputError(
            f"{target!r} is not a GGUF model, so it has no quantized copy: "
            "use a GGUF, or another drafter"
        )
