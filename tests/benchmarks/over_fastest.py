"""Does speculation pay over the fastest plain decoding of the same file? Measured live.

    python -m tests.benchmarks.over_fastest
    python -m tests.benchmarks.over_fastest --target …/qwen2.5-coder-1.5b-instruct-q4_k_m.gguf \\
        --plan edit=lookup:3,lookup:7 json=DRAFT:3 code=DRAFT:3 \\
        --draft …/qwen2.5-coder-0.5b-instruct-q4_k_m.gguf

Both engines open the same 4-bit file; drafters run with the torch int4 target, greedy. Every
method, including both plain decodings, runs each prompt in turn. Speeds are tokens per second after
prefill; answers end where they begin to loop (`Generation.loop_start`). `speedup` is over plain
decoding in torch int4, `over_fastest` over the faster plain decoding on that content. `--prompts`
is the number of prompts for each content. A plan is content=drafter:K,…, where DRAFT is the draft
model.
"""

from collections import defaultdict
from contextlib import closing
from functools import cache, partial
from pathlib import Path

import numpy as np
import pandas as pd

from specnb import generate, load, load_drafter
from specnb.measure.bench import interleaved
from specnb.measure.cost import verify_costs
from specnb.measure.intervals import interval, rate, rate_ratio
from specnb.prompts import CATEGORIES, prompts
from specnb.records import pool_rounds
from tests.benchmarks.record import add_rows, arguments

LLAMA, TORCH = "llama.cpp", "torch int4"
PLAN = [
    "edit=lookup:3,auto",
    "code=hydra:3,hydra:tree,auto",
    "json=lookup:3,auto",
    "prose=auto",
    "general=auto",
    "chat=auto",
]


def speed_rows(runs, content):
    """Return a row per method: its rate and both ratios, with 95 % intervals over prompts."""
    every = defaultdict(dict)
    for run in runs:
        every[run.method][run.prompt] = run.generation
    # A prompt is used if every method wrote a token before its answer began to loop.
    used = [at for at in every[TORCH] if all(of[at].before_loop()[0] > 0 for of in every.values())]
    texts = {method: [of[at] for at in used] for method, of in every.items()}
    pairs = {method: np.array([text.before_loop() for text in of]) for method, of in texts.items()}
    fastest = max((LLAMA, TORCH), key=lambda method: rate(pairs[method]))
    rows = []
    for method, of in texts.items():
        row = {"content": content, "method": method, "tokens_per_s": rate(pairs[method])}
        for name, baseline in (("speedup", TORCH), ("over_fastest", fastest)):
            value = interval(np.hstack([pairs[method], pairs[baseline]]), rate_ratio)
            row |= {name: value.value, f"{name}_low": value.low, f"{name}_high": value.high}
        same = sum(a.token_ids == b.token_ids for a, b in zip(of, texts[TORCH], strict=True))
        row |= {"baseline": fastest, "tau": pool_rounds(of)["tau"], "identical": same}
        rows.append(row | {"n_prompts": len(of), "tokens": int(pairs[method][:, 0].sum())})
    return rows


def main():
    given = arguments(
        __doc__, __file__, target="smollm2-135m", draft="", plan=PLAN, prompts=15, tokens=128
    ).parse_args()
    plan = {
        content: specs.split(",") for content, specs in (part.split("=", 1) for part in given.plan)
    }
    rows, pooled, used = [], [], []
    with (
        closing(load(f"{given.target}?exact=false")) as llama,
        closing(load(f"{given.target}?backend=hf&dtype=int4")) as target,
    ):
        run = partial(generate, max_new_tokens=given.tokens)

        @cache
        def opened(spec):
            name, _, k = spec.partition(":")
            options = {"tree": "auto"} if k == "tree" else {}
            return load_drafter(
                given.draft if name == "DRAFT" else name, target, strict=True, **options
            ).drafter

        def drafting(spec):
            k = spec.partition(":")[2]
            return partial(run, target, drafter=opened(spec), k=int(k) if k.isdecimal() else None)

        for content, specs in plan.items():
            methods = {LLAMA: partial(run, llama), TORCH: partial(run, target)}
            methods |= {spec: drafting(spec) for spec in specs}
            chosen = prompts(content, limit=given.prompts)
            runs = list(interleaved(methods, chosen))
            used += chosen
            pooled += [
                r._replace(prompt=(content, r.prompt))
                for r in runs
                if r.method in (LLAMA, TORCH, "auto")
            ]
            rows += speed_rows(runs, content)
            print(pd.DataFrame(rows[-len(methods) :]).round(2).to_string(index=False), flush=True)
        if plan.keys() == set(CATEGORIES) and all("auto" in specs for specs in plan.values()):
            rows += speed_rows(pooled, "all")
            print(pd.DataFrame(rows[-3:]).round(2).to_string(index=False), flush=True)
        curve, c = verify_costs(
            target, [opened(spec) for specs in plan.values() for spec in specs], 8
        )
    ratios = {str(n): curve.ratio(n) for n in curve.widths}
    print("T(n)/T(1)", {n: round(ratio, 2) for n, ratio in ratios.items()}, "c", c)
    name = {"target": Path(given.target).name}
    costs = {
        "T(n)/T(1)": ratios,
        "T(1) s": curve.seconds(1),
        "c": {Path(of).name: cost for of, cost in c.items()},
    }
    add_rows(given.out, {"rows": [name | row for row in rows], "costs": [name | costs]}, used)


if __name__ == "__main__":
    main()
