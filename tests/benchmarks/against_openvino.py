"""Tokens a second next to OpenVINO GenAI on the same 4-bit GGUF file and prompts: plain, and prompt lookup.

    pip install openvino-genai
    python -m tests.benchmarks.against_openvino qwen2.5-coder-1.5b-instruct-q4_k_m.gguf

Ours is the torch engine in int4, OpenVINO's is `LLMPipeline(file, "CPU", prompt_lookup=True)`. Greedy, methods in turn
on each prompt. A speed is (tokens - 1) over the seconds after the first token: OpenVINO's own metrics, our `decode_s`.
`identical` counts lookup texts that equal the same engine's plain text.
"""

import argparse
import json
from collections import defaultdict
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import openvino
import openvino_genai
import pandas as pd

from specnb import generate, load, load_drafter
from specnb.decode.generate import prompt_ids
from specnb.io import plain
from specnb.measure.bench import interval, rate, rate_ratio
from specnb.provenance import provenance
from tests.benchmarks.over_fastest import chosen_prompts

CONTENTS, KS = ("code", "edit", "json"), (3, 7)
RECORD = Path(__file__).with_suffix(".json")


class Run(NamedTuple):
    """What a method wrote, and how fast after the first token."""

    token_ids: tuple[int, ...]
    n_decoded: int
    decode_s: float


def theirs(pipeline: openvino_genai.LLMPipeline, tokens: int, k: int, ids: list[int]) -> Run:
    config = openvino_genai.GenerationConfig()
    config.max_new_tokens, config.do_sample, config.apply_chat_template = tokens, False, False
    if k:
        config.num_assistant_tokens, config.max_ngram_size = k, 3
    given = openvino.Tensor(np.array([ids], dtype=np.int64))
    result = pipeline.generate(openvino_genai.TokenizedInputs(given, openvino.Tensor(np.ones_like(given.data))), config)
    metrics, ids = result.perf_metrics, tuple(result.tokens[0])
    seconds = (metrics.get_generate_duration().mean - metrics.get_ttft().mean) / 1e3
    return Run(ids, len(ids) - 1, seconds)


def ours(target: object, tokens: int, drafter: object, k: int, ids: list[int]) -> Run:
    options = {"drafter": drafter, "k": k} if k else {}
    done = generate(target, ids, max_new_tokens=tokens, **options)
    return Run(done.token_ids, done.n_decoded, done.decode_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--prompts", type=int, default=10, help="prompts of each content")
    parser.add_argument("--tokens", type=int, default=80)
    given = parser.parse_args()

    rows = []
    plain_pipeline = openvino_genai.LLMPipeline(str(given.file), "CPU")
    lookup_pipeline = openvino_genai.LLMPipeline(str(given.file), "CPU", prompt_lookup=True)
    with closing(load(f"{given.file}?backend=hf&dtype=int4")) as target:
        drafter = load_drafter("lookup", target).drafter
        methods = {
            "openvino plain": partial(theirs, plain_pipeline, given.tokens, 0),
            "ours plain": partial(ours, target, given.tokens, None, 0),
        }
        for k in KS:
            methods[f"openvino lookup K={k}"] = partial(theirs, lookup_pipeline, given.tokens, k)
            methods[f"ours lookup K={k}"] = partial(ours, target, given.tokens, drafter, k)
        for content in CONTENTS:
            runs = defaultdict(list)
            for at, prompt in enumerate(chosen_prompts(content, given.prompts)):
                ids = prompt_ids(target, prompt)
                names = [*methods][at % len(methods) :] + [*methods][: at % len(methods)]
                for name in names if at else [*names, *names]:  # the first prompt warms up
                    runs[name].append(methods[name](list(ids)))
                if not at:
                    runs = defaultdict(list, {name: of[-1:] for name, of in runs.items()})
            best = max((f"openvino lookup K={k}" for k in KS), key=lambda name: speed(runs[name]))
            for name, of in runs.items():
                against = "openvino plain" if "plain" in name else best
                pairs = [
                    (a.n_decoded, a.decode_s, b.n_decoded, b.decode_s) for a, b in zip(of, runs[against], strict=True)
                ]
                value = interval(pairs, rate_ratio)
                texts = runs[f"{name.split()[0]} plain"]
                same = sum(a.token_ids == b.token_ids for a, b in zip(of, texts, strict=True))
                rows.append({
                    "content": content, "method": name, "tokens_per_s": speed(of), "over": against,
                    "ratio": value.value, "low": value.low, "high": value.high, "identical": same, "n_prompts": len(of),
                })  # fmt: skip
            print(pd.DataFrame(rows[-len(methods) :]).round(2).to_string(index=False), flush=True)
    facts = {"file": given.file.name, "openvino_genai": openvino_genai.__version__, "tokens": given.tokens}
    document = plain(facts | {"rows": rows, "provenance": provenance()}, nan=None)
    RECORD.write_text(f"{json.dumps(document, indent=1)}\n", encoding="utf-8")


def speed(runs: list[Run]) -> float:
    return rate(np.array([(run.n_decoded, run.decode_s) for run in runs]))


if __name__ == "__main__":
    main()
