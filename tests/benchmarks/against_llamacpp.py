"""Tokens per second against llama.cpp's own speculation, with the same files, K and prompts.

    .venv/bin/pip install xllamacpp
    .venv/bin/python -m tests.benchmarks.against_llamacpp

Upstream's server runs in this process. The target is SmolLM2-135M in float16, the draft model its
4-bit quantized copy; copying is upstream's `ngram-simple` against `lookup`, both after matches of
three tokens. Greedy, whole calls, methods in turn on each prompt; two threads each, otherwise
upstream's defaults. Takes ten minutes on two cores.
"""

from functools import partial

import pandas as pd
import xllamacpp as upstream

from specnb import generate, load, load_drafter, prompts
from specnb.decode.generate import prompt_ids
from specnb.draft.lookup import LookupDrafter
from specnb.lm.files import parse, prepare
from specnb.measure.bench import interleaved, tabulate_speeds
from tests.benchmarks.record import arguments, write_record

TARGET, DRAFT = "smollm2-135m:f16", "smollm2-135m:q4_0"
CONTENTS = ("code", "edit", "prose")
EACH = 8
K = 4
TOKENS = 64
N_CTX = 1024
MATCH = 3
"""Tokens that ngram-simple matches; its default, 12, finds almost nothing here."""


def open_server(target, draft, kind, k, threads=2):
    """Open llama.cpp's server in this process, with one of its drafters, NONE, or DRAFT_SIMPLE."""
    params = upstream.CommonParams()
    params.model_alias = {target}
    params.model.path = str(prepare(parse(target)))
    params.n_ctx, params.n_parallel, params.verbosity = N_CTX, 1, 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.fit_params = params.cache_prompt = False
    params.endpoint_metrics = True
    drafting = params.speculative
    drafting.types = [getattr(upstream.common_speculative_type, f"COMMON_SPECULATIVE_TYPE_{kind}")]
    drafting.ngram_simple.size_n, drafting.ngram_simple.size_m = MATCH, k
    drafting.draft.n_max, drafting.draft.n_min, drafting.draft.p_min = k, 0, 0.0
    if kind == "DRAFT_SIMPLE":
        drafting.draft.mparams.path = str(prepare(parse(draft)))
    return upstream.Server(params)


def serve(kind="NONE"):
    """Return a function that completes a prompt, given as token ids, with an upstream server."""
    server = open_server(TARGET, DRAFT, kind, K)
    settings = {"n_predict": TOKENS, "temperature": 0.0, "cache_prompt": False}
    settings |= {"return_tokens": True, "verbose": True}
    return lambda ids: server.handle_completions({"prompt": ids} | settings)["__verbose"]["tokens"]


def compare_pairs(runs, pairs):
    """Return a row per kind: rates, their ratios to upstream's plain, and ours over upstream's."""
    over_plain = tabulate_speeds(runs, baseline=pairs["plain"][0]).set_index("method")
    rows = []
    for kind, (theirs, ours) in pairs.items():
        ratio = tabulate_speeds(
            [run for run in runs if run.method in (theirs, ours)], baseline=theirs
        )
        row = ratio.set_index("method").loc[ours]
        rows.append(
            {
                "kind": kind,
                "upstream": over_plain.loc[theirs, "tokens_per_s"],
                "ours": row["tokens_per_s"],
                "upstream_gain": over_plain.loc[theirs, "speedup"],
                "our_gain": over_plain.loc[ours, "speedup"],
                **row[["speedup", "low", "high", "identical", "n_prompts"]],
            }
        )
    return pd.DataFrame(rows)


def main():
    given = arguments(__doc__, __file__).parse_args()
    target = load(TARGET, n_ctx=N_CTX)
    draft = load_drafter(DRAFT, target).drafter
    ours = partial(generate, target, max_new_tokens=TOKENS)
    methods = {
        "upstream plain": serve(),
        "plain": ours,
        "upstream draft": serve("DRAFT_SIMPLE"),
        "draft": partial(ours, drafter=draft, k=K),
        "upstream copying": serve("NGRAM_SIMPLE"),
        "copying": partial(ours, drafter=LookupDrafter(n_max=MATCH, n_min=MATCH), k=K),
    }
    pairs = {kind: (f"upstream {kind}", kind) for kind in ("plain", "draft", "copying")}
    chosen = {content: prompts(content, limit=EACH) for content in CONTENTS}
    tables = []
    for content, of in chosen.items():
        runs = list(interleaved(methods, [prompt_ids(target, prompt) for prompt in of]))
        tables.append(compare_pairs(runs, pairs).assign(content=content))
        print(f"{content}\n{tables[-1].round(3).to_string(index=False)}\n", flush=True)
    settings = {
        "target": TARGET,
        "draft": DRAFT,
        "k": K,
        "match": MATCH,
        "upstream": upstream.BUILD_INFO,
    }
    every = [prompt for of in chosen.values() for prompt in of]
    write_record(given.out, settings | {"rows": pd.concat(tables).to_dict("records")}, every)


if __name__ == "__main__":
    main()
