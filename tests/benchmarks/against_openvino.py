"""Tokens per second against OpenVINO GenAI on the same 4-bit GGUF file: plain and prompt lookup.

    pip install openvino-genai
    python -m tests.benchmarks.against_openvino qwen2.5-coder-1.5b-instruct-q4_k_m.gguf

Ours is the torch engine in int4, OpenVINO's is `LLMPipeline(file, "CPU", prompt_lookup=True)`.
Greedy, methods in turn on each prompt. A speed is (tokens - 1) over the seconds after the first
token, from OpenVINO's own metrics and our `decode_s`. `identical` counts lookup texts that equal
the same engine's plain text.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
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
from specnb.measure.bench import rotate
from specnb.measure.intervals import interval, rate, rate_ratio
from specnb.prompts import prompts
from tests.benchmarks.record import add_rows, arguments

CONTENTS = ["code", "edit", "json"]
KS = (3, 7)


class Run(NamedTuple):
    """The tokens of a text, their number and seconds after the first one."""

    token_ids: tuple[int, ...]
    n_decoded: int
    decode_s: float


def theirs(pipeline: openvino_genai.LLMPipeline, tokens: int, k: int, ids: list[int]) -> Run:
    config = openvino_genai.GenerationConfig()
    config.max_new_tokens, config.do_sample, config.apply_chat_template = tokens, False, False
    if k:
        config.num_assistant_tokens, config.max_ngram_size = k, 3
    given = openvino.Tensor(np.array([ids], dtype=np.int64))
    result = pipeline.generate(
        openvino_genai.TokenizedInputs(given, openvino.Tensor(np.ones_like(given.data))), config
    )
    metrics = result.perf_metrics
    ids = tuple(result.tokens[0])
    seconds = (metrics.get_generate_duration().mean - metrics.get_ttft().mean) / 1e3
    return Run(ids, len(ids) - 1, seconds)


def ours(target: object, tokens: int, drafter: object, k: int, ids: list[int]) -> Run:
    options = {"drafter": drafter, "k": k} if k else {}
    done = generate(target, ids, max_new_tokens=tokens, **options)
    return Run(done.token_ids, done.n_decoded, done.decode_s)


def in_turn(
    methods: Mapping[str, Callable[[list[int]], Run]], prompts: Sequence[list[int]]
) -> dict[str, list[Run]]:
    """Run every method on every prompt in rotating order, after a warm-up on the first prompt."""
    for run in methods.values():
        run(prompts[0])
    runs = defaultdict(list)
    for _, at, name in rotate(list(methods), len(prompts)):
        runs[name].append(methods[name](prompts[at]))
    return runs


def speed_rows(runs: Mapping[str, list[Run]], content: str) -> list[dict[str, object]]:
    """Return a row per method: its rate, and the ratio to OpenVINO's plain or fastest lookup."""
    pairs = {
        name: np.array([(run.n_decoded, run.decode_s) for run in of]) for name, of in runs.items()
    }
    fastest = max((f"openvino lookup K={k}" for k in KS), key=lambda name: rate(pairs[name]))
    rows = []
    for name, of in runs.items():
        against = "openvino plain" if "plain" in name else fastest
        value = interval(np.hstack([pairs[name], pairs[against]]), rate_ratio)
        texts = runs[f"{name.split()[0]} plain"]
        same = sum(a.token_ids == b.token_ids for a, b in zip(of, texts, strict=True))
        row = {
            "content": content,
            "method": name,
            "tokens_per_s": rate(pairs[name]),
            "over": against,
        }
        row |= {"ratio": value.value, "low": value.low, "high": value.high}
        rows.append(row | {"identical": same, "n_prompts": len(of)})
    return rows


def main() -> None:
    parser = arguments(__doc__, __file__, contents=CONTENTS, prompts=10, tokens=80)
    parser.add_argument("file", type=Path)
    given = parser.parse_args()

    facts = {
        "model": given.file.name,
        "tokens": given.tokens,
        "openvino_genai": openvino_genai.__version__,
    }
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
        for content in given.contents:
            chosen = [
                list(prompt_ids(target, prompt)) for prompt in prompts(content, limit=given.prompts)
            ]
            rows = [facts | row for row in speed_rows(in_turn(methods, chosen), content)]
            print(
                pd.DataFrame(rows).drop(columns=[*facts]).round(2).to_string(index=False),
                flush=True,
            )
            add_rows(given.out, {"rows": rows})


if __name__ == "__main__":
    main()
