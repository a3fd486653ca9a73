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

import json
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pandas as pd
import xllamacpp as upstream

from specnb.batch import attach as servers
from specnb.batch.logs import sweep_log
from specnb.io import plain, write_atomic
from specnb.measure.cost import Cost
from specnb.measure.experiment import ProgressBar, first_of_each
from specnb.measure.intervals import interval, rate, rate_ratio
from specnb.params import ServerParams
from specnb.prompts import prompts
from tests.benchmarks.against_llamacpp import CONTENTS, DRAFT, TARGET, open_server
from tests.benchmarks.record import arguments, write_record

K = 8


@contextmanager
def serve(target, draft, k, threads):
    """Run llama.cpp's server in this process, with K = `k`, and yield its URL."""
    server = open_server(target, draft, "DRAFT_SIMPLE" if k else "NONE", k, threads)
    try:
        yield server.listening_address
    finally:
        del server


def compare_ks(documents):
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


def main():
    parser = arguments(__doc__, __file__, target=TARGET, draft=DRAFT, contents=[*CONTENTS])
    for name, default in {"prompts_per_content": 6, "tokens": 64, "threads": 2}.items():
        parser.add_argument(name, nargs="?", type=int, default=default)
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
            serve(*models, k, given.threads) as url,
            serve(*models, 0, given.threads) as plain_url,
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
    models = {"target": Path(given.target).name, "draft": Path(given.draft).name}
    facts = models | {"upstream": upstream.BUILD_INFO}
    write_record(given.out, facts | {"rows": table.to_dict("records")}, chosen)


if __name__ == "__main__":
    main()
