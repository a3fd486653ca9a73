"""The law of a long day: many requests, one after the other, on the same models, each answered as if it were the first.

A request is a new text or one more turn on an earlier one, with some K, a limit and stop strings that may fall inside
a draft; some prompts nearly fill the context, and the context of one draft model is shorter than the target's.
"""

from dataclasses import replace

import numpy as np
import pytest

from specnb.decode.generate import generate
from specnb.draft.lookup import LookupDrafter
from specnb.draft.model import ModelDrafter
from specnb.lm import toy
from specnb.lm.hf.model import HfModel
from tests.tiny_models import VOCAB, torch_model

N_CTX, SHORT = 64, 40


def models(family):
    """A target, its twin that decodes plainly, and drafters: nothing but copies, a twin of less context, a stranger."""

    def opened(seed, n_ctx=N_CTX):
        if family == "toy":
            model = toy.markov(VOCAB, order=2, seed=seed, eog=frozenset({3}))
            model.caps = replace(model.caps, n_ctx=n_ctx)
            return model
        model = torch_model(family, seed=seed, max_position_embeddings=n_ctx)
        return HfModel(model, None, name=f"{family}-{seed}", n_ctx=n_ctx)

    drafters = [LookupDrafter(), ModelDrafter(opened(0, SHORT)), ModelDrafter(opened(1))]
    return opened(0), opened(0), drafters


@pytest.mark.parametrize(
    ("family", "requests"),
    [
        ("toy", 200),
        ("llama", 25),
        pytest.param("llama", 200, marks=pytest.mark.slow),
        pytest.param("qwen3_5_text", 200, marks=pytest.mark.slow),
    ],
)
def test_every_request_is_answered_as_if_it_were_the_first(family, requests):
    rng = np.random.default_rng(5)
    target, twin, drafters = models(family)
    ends, text = set(), ()
    for _ in range(requests):
        asked = tuple(rng.integers(4, VOCAB, rng.integers(1, 12)).tolist())
        text = (*text, *asked) if rng.random() < 0.6 and len(text) + len(asked) < N_CTX - 2 else asked
        settings = {
            "max_new_tokens": int(rng.integers(1, 30)),
            "stop": [target.vocab.piece(int(rng.integers(4, VOCAB))).decode() for _ in range(rng.integers(0, 6))],
        }
        plain = generate(twin, text, **settings)
        drafted = generate(target, text, drafter=drafters[rng.integers(3)], k=int(rng.integers(1, 9)), **settings)
        assert drafted.token_ids == plain.token_ids and drafted.stop_reason == plain.stop_reason
        ends.add(plain.stop_reason)
        text = (*text, *plain.token_ids)
    assert {"length", "stop_string", "context"} <= ends
