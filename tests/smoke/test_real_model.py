"""The real model in each engine, opened once: a user's first steps work and are exact."""

import pytest

import specnb
from specnb.measure.fork import explain_fork

pytestmark = pytest.mark.model

ENGINES = ["smollm2-135m", "smollm2-135m?backend=hf"]
PROMPT = "def fibonacci(n):\n    if n < 2:\n        return n\n"
SETTINGS = {"max_new_tokens": 24, "ignore_eog": True}


@pytest.mark.parametrize("name", ENGINES)
def test_speculative_output_equals_plain_decoding(opened, name):
    target = opened(name)
    plain = specnb.generate(target, PROMPT, **SETTINGS)
    model = specnb.ModelDrafter(opened("smollm2-135m:q4_0"))
    for drafter in (specnb.LookupDrafter(), model):
        generation = specnb.generate(target, PROMPT, drafter=drafter, k=4, **SETTINGS)
        fork = explain_fork(
            target, generation.prompt_ids, plain.token_ids, generation.token_ids, width=5
        )
        assert fork is None or (fork.near_tie and "backend=hf" not in name), fork
        assert len(generation.token_ids) == 24 and generation.accepted_tokens > 0


@pytest.mark.parametrize("name", ENGINES)
def test_sampling_with_the_same_seed_is_reproducible(opened, name):
    settings = SETTINGS | {"temperature": 0.8, "seed": 5, "drafter": specnb.LookupDrafter()}
    first, second = (specnb.generate(opened(name), PROMPT, **settings) for _ in range(2))
    assert first.token_ids == second.token_ids and first.text == second.text
