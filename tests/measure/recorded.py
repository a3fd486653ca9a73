"""Recordings of drafters along texts that are generated first."""

from specnb.decode.generate import generate
from specnb.measure.follow import follow


def record(target, drafters, prompts, *, k_max=24, max_new_tokens=128, **sampling):
    """Generate plainly from each prompt, and `follow` every drafter along the text; yield both."""
    for prompt in prompts:
        generation = generate(target, prompt, max_new_tokens=max_new_tokens, **sampling)
        yield (
            generation,
            follow(target, drafters, generation, k_max=k_max, max_new_tokens=max_new_tokens),
        )
