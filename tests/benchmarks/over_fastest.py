"""Does speculation pay over the fastest plain decoding of the same file? Live, interleaved with both plain decodings.

    python -m tests.benchmarks.over_fastest
    python -m tests.benchmarks.over_fastest --target …/qwen2.5-coder-1.5b-instruct-q4_k_m.gguf \\
        --plan edit=lookup:3,lookup:7 json=DRAFT:3 code=DRAFT:3 --draft …/qwen2.5-coder-0.5b-instruct-q4_k_m.gguf

Both engines open the same 4-bit file; drafters run with the torch int4 target, greedy. Each prompt is run by every
method in turn. Speeds are tokens a second after prefill; an answer ends, in all of them, where it begins to loop
(`Generation.loop_start`). `speedup` is over plain decoding in torch int4, `over_fastest` over the faster of both plain
decodings on that content. Prompts are the package's, and `more_prompts.jsonl`.
"""

import argparse
import json
from collections import defaultdict
from contextlib import closing
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd

from specnb import generate, load, load_drafter, prompts
from specnb.io import plain
from specnb.measure.bench import Timed, interleaved, interval, rate, rate_ratio
from specnb.measure.cost import verify_costs
from specnb.prompts import CATEGORIES, Prompt, digest_prompts
from specnb.provenance import provenance
from specnb.records import pool_rounds

LLAMA, TORCH = "llama.cpp", "torch int4"
RECORD = Path(__file__).with_suffix(".json")
MORE = str(Path(__file__).with_name("more_prompts.jsonl"))
PLAN = [
    "edit=lookup:3,auto",
    "code=hydra:3,hydra:tree,auto",
    "json=lookup:3,auto",
    "prose=auto",
    "general=auto",
    "chat=auto",
]


def chosen_prompts(content: str, limit: int) -> list[Prompt]:
    return [*prompts(content), *prompts(content, source=MORE)][:limit]


def speed_rows(runs: list[Timed], content: str) -> list[dict[str, object]]:
    """Return a row a method: its rate and both ratios, with 95 % intervals over prompts."""
    by_method = defaultdict(dict)
    for run in runs:
        by_method[run.method][run.prompt] = run.generation
    pairs = {method: {at: g.before_loop() for at, g in of.items()} for method, of in by_method.items()}
    used = [at for at in pairs[TORCH] if all(of[at][0] > 0 for of in pairs.values())]
    fastest = max((LLAMA, TORCH), key=lambda method: tokens_per_s([pairs[method][at] for at in used]))
    rows = []
    for method, of in pairs.items():
        row = {"content": content, "method": method, "tokens_per_s": tokens_per_s([of[at] for at in used])}
        for name, baseline in (("speedup", TORCH), ("over_fastest", fastest)):
            value = interval([(*of[at], *pairs[baseline][at]) for at in used], rate_ratio)
            row |= {name: value.value, f"{name}_low": value.low, f"{name}_high": value.high}
        texts = by_method[method]
        same = sum(texts[at].token_ids == by_method[TORCH][at].token_ids for at in used)
        row |= {"baseline": fastest, "tau": pool_rounds([texts[at] for at in used])["tau"], "identical": same}
        rows.append(row | {"n_prompts": len(used), "tokens": sum(of[at][0] for at in used)})
    return rows


def tokens_per_s(pairs: list[tuple[int, float]]) -> float:
    return rate(np.array(pairs))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--draft", default="")
    parser.add_argument("--plan", nargs="+", default=PLAN, help="content=drafter:K,…; DRAFT is the draft model")
    parser.add_argument("--prompts", type=int, default=15, help="prompts of each content")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--out", type=Path, default=RECORD, help="a .json file, to whose rows these are added")
    given = parser.parse_args()

    rows, runs_of, used = [], {}, []
    with (
        closing(load(f"{given.target}?exact=false")) as llama,
        closing(load(f"{given.target}?backend=hf&dtype=int4")) as target,
    ):
        settings = {"max_new_tokens": given.tokens}
        drafters = {}

        def method(text: str) -> partial:
            name, _, k = text.partition(":")
            options = {"tree": "auto"} if k == "tree" else {}
            if text not in drafters:
                drafters[text] = load_drafter(given.draft if name == "DRAFT" else name, target, strict=True, **options)
            k = {"k": int(k)} if k.isdecimal() else {}
            return partial(generate, target, drafter=drafters[text].drafter, **k, **settings)

        for content, _, names in (part.partition("=") for part in given.plan):
            methods = {LLAMA: partial(generate, llama, **settings), TORCH: partial(generate, target, **settings)}
            methods |= {text: method(text) for text in names.split(",")}
            chosen = chosen_prompts(content, given.prompts)
            runs_of[content] = list(interleaved(methods, chosen))
            used += chosen
            rows += speed_rows(runs_of[content], content)
            shown = [row for row in rows if row["content"] == content]
            print(pd.DataFrame(shown).round(2).to_string(index=False), flush=True)
        if all("auto" in part for part in given.plan) and len(runs_of) == len(CATEGORIES):
            every = [
                run._replace(prompt=(content, run.prompt))
                for content, runs in runs_of.items()
                for run in runs
                if run.method in (LLAMA, TORCH, "auto")
            ]
            rows += speed_rows(every, "all")
            print(pd.DataFrame(rows[-3:]).round(2).to_string(index=False), flush=True)
        curve, c = verify_costs(target, [loaded.drafter for loaded in drafters.values()], 8)
    ratios = {str(n): curve.ratio(n) for n in curve.widths}
    print("T(n)/T(1)", {n: round(ratio, 2) for n, ratio in ratios.items()}, "c", c)
    name = Path(given.target).name
    before = json.loads(given.out.read_text(encoding="utf-8"))["targets"] if given.out.is_file() else {}
    of_target = {"rows": rows, "T(n)/T(1)": ratios, "T(1) s": curve.seconds(1)}
    of_target["c"] = {Path(drafter).name: cost for drafter, cost in c.items()}
    of_target["provenance"] = provenance(prompts_digest=digest_prompts(used))
    document = plain({"targets": before | {name: of_target}}, nan=None)
    given.out.write_text(f"{json.dumps(document, indent=1)}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
