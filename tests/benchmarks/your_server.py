"""`specnb attach` and the log reader against llama.cpp's own server.

    pip install xllamacpp
    python -m tests.benchmarks.your_server [PROMPTS_PER_CONTENT TOKENS THREADS]
    python -m tests.benchmarks.your_server 5 24 2 --contents code --out your_server_coder.json \\
        --target …/qwen2.5-coder-1.5b-instruct-q4_k_m.gguf \\
        --draft …/qwen2.5-coder-0.5b-instruct-q4_k_m.gguf

Runs the server in this process, on the default model with its 4-bit copy as draft model, at K = 8
and plainly, and writes the measurements of `attach` to data/servers/xllamacpp.json, which notebook
10 shows (not for another target). Then runs K = 1 to 7, and writes the tokens per round and speed
of each next to those computed from K = 8 alone. Takes half an hour on two cores.
"""

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pandas as pd
import xllamacpp as upstream

from specnb.batch import attach as servers
from specnb.batch.logs import sweep_log
from specnb.io import plain, write_atomic
from specnb.lm.files import parse, prepare
from specnb.measure.cost import Cost
from specnb.measure.experiment import ProgressBar, first_of_each
from specnb.measure.intervals import interval, rate, rate_ratio
from specnb.params import ServerParams
from specnb.prompts import prompts

TARGET, DRAFT, K, N_CTX = "smollm2-135m:f16", "smollm2-135m:q4_0", 8, 1024
CONTENTS = ("code", "edit", "prose")
RECORD = Path(__file__).with_suffix(".json")


@contextmanager
def serve(
    k: int,
    threads: int,
    target: str = TARGET,
    draft: str = DRAFT,
    verify_threads: int | None = None,
    key_type: str = "F16",
    p_min: float = 0.0,
) -> Iterator[str]:
    """Run llama.cpp's server in this process, with K = `k`, and yield its URL.

    `verify_threads` is the number of threads in passes over several tokens (default: `threads`),
    `key_type` the type of the keys in the KV cache.
    """
    params = upstream.CommonParams()
    params.model_alias = {target}
    params.model.path = str(prepare(parse(target)))
    params.n_ctx = N_CTX
    params.n_parallel = 1
    params.verbosity = 0
    params.endpoint_metrics = True
    params.cpuparams.n_threads = threads
    params.cpuparams_batch.n_threads = verify_threads or threads
    params.cache_type_k = getattr(upstream.ggml_type, f"GGML_TYPE_{key_type}")
    params.fit_params = params.cache_prompt = False
    drafting = params.speculative
    drafting.types = [
        getattr(
            upstream.common_speculative_type,
            f"COMMON_SPECULATIVE_TYPE_{'DRAFT_SIMPLE' if k else 'NONE'}",
        )
    ]
    drafting.draft.n_max = k
    drafting.draft.n_min = 0
    drafting.draft.p_min = p_min
    if k:
        drafting.draft.mparams.path = str(prepare(parse(draft)))
    server = upstream.Server(params)
    try:
        yield server.listening_address
    finally:
        del server


def compare_ks(documents: dict[int, dict]) -> pd.DataFrame:
    """Return tau and speed, measured and computed from K = 8, per content, temperature and K."""
    runs = pd.concat(
        [pd.DataFrame(document["runs"]).assign(k=k) for k, document in documents.items()]
    )
    runs.loc[runs["way"] == servers.PLAIN, "k"] = 0
    step_s, token_s = servers.fit_times(pd.DataFrame(documents[K]["runs"]))
    cost = Cost.straight("server", 1 + 7 * token_s / step_s)
    rows = []
    for (content, temperature), part in runs.groupby(["category", "temperature"]):
        own = servers.requests_of(part[part["k"] == K])
        swept = sweep_log(own, [cost], K).set_index("k")
        base = part[(part["k"] == 0)].groupby("prompt")[["n_tokens", "seconds"]].sum()
        for k in range(1, K + 1):
            live = part[part["k"] == k].groupby("prompt")[["n_tokens", "accepted", "seconds"]].sum()
            passes = live["n_tokens"] - live["accepted"]
            tau = interval(np.stack([live["n_tokens"], passes], 1), rate)
            both = live.join(base, rsuffix="_plain")
            speed = interval(
                both[["n_tokens", "seconds", "n_tokens_plain", "seconds_plain"]], rate_ratio
            )
            computed = swept.loc[k, ["tau", "tau_low", "tau_high", "speedup"]]
            rows.append(
                {
                    "content": content,
                    "temperature": temperature,
                    "k": k,
                    "measured": tau.value,
                    "low": tau.low,
                    "high": tau.high,
                    **computed,
                    "measured_speedup": speed.value,
                }
            )
    return pd.DataFrame(rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("prompts_per_content", nargs="?", type=int, default=6)
    parser.add_argument("tokens", nargs="?", type=int, default=64)
    parser.add_argument("threads", nargs="?", type=int, default=2)
    parser.add_argument("--target", default=TARGET)
    parser.add_argument("--draft", default=DRAFT)
    parser.add_argument("--contents", nargs="+", default=CONTENTS)
    parser.add_argument("--out", type=Path, default=RECORD)
    given = parser.parse_args()
    models = given.target, given.draft
    chosen = [
        p
        for p in first_of_each(prompts(), given.prompts_per_content)
        if p.category in given.contents
    ]
    documents = {}
    for k in [K, *range(1, K)]:
        with (
            serve(k, given.threads, *models) as url,
            serve(0, given.threads, *models) as plain_url,
            ProgressBar() as progress,
        ):
            params = ServerParams(server=url, plain=plain_url, max_new_tokens=given.tokens)
            documents[k] = servers.attach(params, chosen, progress)
        assert not documents[k]["error"], documents[k]["error"]
        if k == K and models == (TARGET, DRAFT):
            write_atomic(servers.RECORDING, json.dumps(plain(documents[k], nan=None)).encode())
    table = compare_ks(documents)
    print(table.round(3).to_string(index=False))
    inside = table["tau"].between(table["low"], table["high"])
    print(f"tau within the measured interval: {inside.sum()} of {len(table)}")
    for content, rows in table[table["temperature"] == 0].groupby("content"):
        best = rows.loc[rows["speedup"].idxmax()]
        loss = 1 - best["measured_speedup"] / rows["measured_speedup"].max()
        print(
            f"{content}: best K computed {best['k']}, "
            f"{100 * loss:.1f} % slower than the best measured"
        )
    document = {
        "target": Path(given.target).name,
        "draft": Path(given.draft).name,
        "upstream": upstream.BUILD_INFO,
        "rows": table.to_dict("records"),
    }
    write_atomic(given.out, json.dumps(plain(document, nan=None), indent=1).encode())


if __name__ == "__main__":
    main()
