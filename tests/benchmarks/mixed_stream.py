"""Does `auto` beat the best single drafter at its best K in hindsight, live, on prompts of mixed contents?

.venv/bin/python -m tests.benchmarks.mixed_stream [--engine hf]

Contents alternate. Every prompt is decoded plainly, with each drafter at each K, and with a router between the same
drafters, in turn; times are whole calls. Which single drafter and K are best is chosen afterwards, over all prompts,
and of each content over its own.
"""

import argparse
import json
from contextlib import ExitStack, closing
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np

from specnb.decode.generate import generate
from specnb.draft.load import load_drafter
from specnb.io import write_atomic
from specnb.lm.load import load
from specnb.machine import cpu_facts
from specnb.measure.auto import route_between
from specnb.measure.bench import Timed, interleaved, interval, rate_ratio
from specnb.prompts import prompts

ENGINES = {"llama": ("smollm2-135m:f16", ("suffix", "smollm2-135m:q4_0"), (2, 4, 8)),
           "hf": ("smollm2-135m?backend=hf&dtype=auto", ("suffix", "jump"), (1, 2, 4, 8))}  # fmt: skip
CONTENTS, N_PROMPTS, N_TOKENS = ("code", "edit", "json", "prose"), 14, 64
RECORD = Path(__file__).with_suffix(".json")


def judge(runs: list[Timed], chosen: list[int]) -> dict[str, object]:
    """Return `auto` over the best single method in hindsight, and over plain decoding, on the prompts `chosen`."""
    times = {(run.method, run.prompt): (run.n_tokens, run.wall_s) for run in runs}
    totals = {name: np.sum([times[name, n] for n in chosen], axis=0) for name, _ in times}
    single = {name: tokens / seconds for name, (tokens, seconds) in totals.items() if name not in ("plain", "auto")}
    best = max(single, key=single.get)
    over = {rival: interval([(*times["auto", n], *times[rival, n]) for n in chosen], rate_ratio)
            for rival in (best, "plain")}  # fmt: skip
    fixed_over_plain = single[best] / np.divide(*totals["plain"])
    return {"n_prompts": len(chosen), "best": best, "best_over_plain": fixed_over_plain,
            "auto_over_best": over[best], "auto_over_plain": over["plain"]}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", choices=ENGINES, default="llama")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.7])
    asked = parser.parse_args()
    name, drafters, ks = ENGINES[asked.engine]
    packs = [prompts(content, limit=N_PROMPTS) for content in CONTENTS]
    stream, rows = list(chain.from_iterable(zip(*packs, strict=True))), []
    with ExitStack() as opened:
        target = opened.enter_context(closing(load(name)))
        single = [opened.enter_context(closing(load_drafter(d, target).drafter)) for d in drafters]
        routed = opened.enter_context(
            closing(route_between(target, [load_drafter(d, target).drafter for d in drafters]))
        )
        for temperature in asked.temperatures:
            plain = partial(generate, target, max_new_tokens=N_TOKENS, temperature=temperature, ignore_eog=True)
            methods = {"plain": plain, "auto": partial(plain, drafter=routed)}
            methods |= {f"{d.name}, K = {k}": partial(plain, drafter=d, k=k)
                        for d in single for k in ks if k <= (d.n_heads or k)}  # fmt: skip
            runs = list(interleaved(methods, stream))
            for place, content in enumerate(("mixed", *CONTENTS)):
                chosen = [n for n in range(len(stream)) if not place or n % len(CONTENTS) == place - 1]
                row = {"target": name, "temperature": temperature, "content": content} | judge(runs, chosen)
                print(row, flush=True)
                rows.append(row)
    older = json.loads(RECORD.read_text())["rows"] if RECORD.exists() else []
    cpu = cpu_facts()
    rows = [row for row in older if row["target"] != name] + [row | {"cpu": cpu} for row in rows]
    write_atomic(RECORD, json.dumps({"rows": rows}, indent=1).encode())


if __name__ == "__main__":
    main()
