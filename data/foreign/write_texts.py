"""Write other engines' greedy texts, plain and drafted: `texts.jsonl`, which notebook 08 audits.

    .venv/bin/pip install xllamacpp
    .venv/bin/python -m data.foreign.write_texts

Engines as installed: SmolLM2-135M in float32 by transformers, and in float16 by llama-cpp-python
and by llama.cpp's server, whose draft model is the 4-bit copy. Takes five minutes on two cores.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import llama_cpp
import torch
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

from specnb import load
from specnb.decode.generate import prompt_ids
from specnb.divergence.lossless import round_robin
from specnb.io import write_atomic
from specnb.lm.files import parse, prepare
from tests.benchmarks.against_llamacpp import N_CTX, TOKENS, K, serve

PROMPTS = 12
Write = Callable[[list[int]], list[int]]


def transformers_sources() -> Iterator[tuple[str, Write]]:
    """Open transformers' `generate`: plain, prompt lookup, drafted by the target's first half."""
    options = {
        "plain": {},
        "prompt lookup": {"prompt_lookup_num_tokens": K},
        "early exit": {"assistant_early_exit": 15},
    }
    with closing(
        load("smollm2-135m?backend=hf", dtype="float32", decoder="transformers")
    ) as target:

        def write(ids: list[int], **options: int) -> list[int]:
            limits = {"max_new_tokens": TOKENS, "do_sample": False}
            return target.network.generate(torch.tensor([ids]), **limits, **options)[
                0, len(ids) :
            ].tolist()

        for name, drafting in options.items():
            yield f"transformers, {name}", partial(write, **drafting)


def binding_sources() -> Iterator[tuple[str, Write]]:
    """Open llama-cpp-python: plain, and with its prompt lookup."""
    path = str(prepare(parse("smollm2-135m:f16")))
    for name, draft in (
        ("plain", None),
        ("prompt lookup", LlamaPromptLookupDecoding(num_pred_tokens=K)),
    ):
        model = llama_cpp.Llama(
            path, n_ctx=N_CTX, n_threads=2, logits_all=True, draft_model=draft, verbose=False
        )

        def write(ids: list[int], model: llama_cpp.Llama = model) -> list[int]:
            written = model.generate(ids, temp=0.0, top_k=1, repeat_penalty=1.0)
            return [token for token, _ in zip(written, range(TOKENS), strict=False)]

        yield f"llama-cpp-python, {name}", write
        model.close()


def server_sources() -> Iterator[tuple[str, Write]]:
    """Open llama.cpp's server: plain, with a draft model, and with its n-gram lookup."""
    for name, kind in (
        ("plain", "NONE"),
        ("draft model", "DRAFT_SIMPLE"),
        ("n-gram lookup", "NGRAM_SIMPLE"),
    ):
        yield f"llama.cpp's server, {name}", serve(kind)


def main() -> None:
    with closing(load("smollm2-135m:f16")) as model:
        prompts = {prompt.id: list(prompt_ids(model, prompt)) for prompt in round_robin(PROMPTS)}
    rows = []
    for sources in (transformers_sources, binding_sources, server_sources):
        for source, write in sources():
            print(source, flush=True)
            control = "" if source.endswith("plain") else f"{source.partition(',')[0]}, plain"
            facts = {"source": source, "control": control}
            rows += [
                {"id": name} | facts | {"prompt": ids, "output": write(ids)}
                for name, ids in prompts.items()
            ]
    lines = "".join(f"{json.dumps(row, separators=(',', ':'))}\n" for row in rows)
    write_atomic(Path(__file__).with_name("texts.jsonl"), lines.encode())


if __name__ == "__main__":
    main()
