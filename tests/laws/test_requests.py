"""The law of long sessions: many requests in a row to the same models, all answered correctly.

A request is a new text or the next turn of the previous one, with a K or a controller, a limit and
stop strings, which may end inside a draft. Some prompts nearly fill the context, and one draft
model has a shorter context than the target. Acceptance does not decrease, and memory does not leak
(vllm#41838, sglang#28771).
"""

from dataclasses import replace

import numpy as np
import psutil
import pytest

from specnb.decode.generate import generate
from specnb.draft.lookup import LookupDrafter
from specnb.draft.model import ModelDrafter
from specnb.lm import toy
from specnb.lm.base import TreeModel
from specnb.lm.gguf.model import GgufModel
from specnb.measure.cost import Cost
from specnb.measure.policies import CONTROLLERS
from tests.laws.trees import Trees
from tests.tiny_models import VOCAB, hf_model, llama_gguf

N_CTX, SHORT = 64, 40
COST = Cost.straight("a machine", 1.5, 0.2)
K_MAX = 8
WARM = 500
GROWTH = 16 << 20
"""Requests that warm up torch's kernels, and bytes that the remaining requests may add."""


def models(family, folder):
    """Return a target, an equal model for plain decoding, and drafters: lookup, models, trees."""

    def opened(seed, n_ctx=N_CTX):
        if family == "toy":
            model = toy.markov(VOCAB, order=2, seed=seed, eog=frozenset({3}))
            model.caps = replace(model.caps, n_ctx=n_ctx)
            return model
        if family == "gguf":
            return GgufModel.open(
                llama_gguf(folder / f"{seed}.gguf", seed=seed), n_ctx=n_ctx, threads=1
            )
        return hf_model(family, seed=seed, n_ctx=n_ctx)

    target = opened(0)
    drafters = [LookupDrafter(), ModelDrafter(opened(0, SHORT)), ModelDrafter(opened(1))]
    if isinstance(target, TreeModel) and target.caps.trees:
        drafters.append(Trees(7, VOCAB))
    return target, opened(0), drafters


@pytest.mark.parametrize(
    ("family", "requests"),
    [
        ("toy", 500),
        ("llama", 40),
        *(
            pytest.param(*day, marks=pytest.mark.slow)
            for day in (
                ("toy", 10_000),
                ("llama", 1_000),
                ("qwen3_5_text", 200),
                ("gguf", 1_000),
            )
        ),
    ],
)
def test_every_request_is_answered_as_by_plain_decoding(family, requests, tmp_path):
    rng = np.random.default_rng(5)
    target, twin, drafters = models(family, tmp_path)

    def fates():
        drawn = [
            generate(target, (5, 6, 7), drafter=drafter, k=4, max_new_tokens=24)
            for drafter in drafters
        ]
        return [[(r.k, r.n_accepted) for r in generation.rounds] for generation in drawn]

    ends = set()
    text = ()
    at_first = fates()
    resident = []
    for number in range(requests):
        asked = tuple(rng.integers(4, VOCAB, rng.integers(1, 12)).tolist())
        text = (
            (*text, *asked) if rng.random() < 0.6 and len(text) + len(asked) < N_CTX - 2 else asked
        )
        limits = {
            "max_new_tokens": int(rng.integers(1, 30)),
            "stop": [
                target.vocab.piece(int(rng.integers(4, VOCAB))).decode()
                for _ in range(rng.integers(0, 6))
            ],
        }
        drafter = drafters[rng.integers(len(drafters))]
        k = int(rng.integers(1, K_MAX + 1))
        if rng.random() < 0.5 and not drafter.tree_nodes:
            k = CONTROLLERS[rng.choice([*CONTROLLERS])](COST, k)
        plain = generate(twin, text, **limits)
        drafted = generate(target, text, drafter=drafter, k=k, **limits)
        request = f"request {number} with {drafter.name}, {k}"
        assert (drafted.token_ids, drafted.stop_reason) == (plain.token_ids, plain.stop_reason), (
            request
        )
        ends.add(plain.stop_reason)
        text = (*text, *plain.token_ids)
        if number in (WARM, requests - 1):
            resident.append(psutil.Process().memory_info().rss)
    assert {"length", "stop_string", "context"} <= ends
    assert fates() == at_first
    assert requests <= WARM or resident[-1] - resident[0] < GROWTH
