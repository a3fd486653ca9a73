"""Is the router ever slower than plain decoding? Drafters that cannot win and ones that can, in both engines, live.

.venv/bin/python -m tests.benchmarks.never_slower [--engine llama] [--busy] [--repeats 3]

A cell is an engine, a content, a temperature and what is given to the router besides copying: one that is always wrong
and free (`wrong`), one as dear as its target (`dear`), a draft model behind another family's vocabulary (`foreign`),
and what the router takes by itself (`sound`). Every prompt is decoded plainly and with each router in turn; times are
whole calls, prefill included, of repeats the median. `--busy` runs another process beside all of them. An interval is
wide where prompts gain unlike amounts; `slowest` is the prompt that gains the least. `plain again` shows what is noise:
where its lower end is below 0.95, the machine is too busy to say more of a router.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from specnb.chapters.compatibility import with_vocabulary
from specnb.compat.read import describe
from specnb.decode.generate import generate
from specnb.decode.router import Router
from specnb.draft.base import DrafterBase, Proposal
from specnb.draft.model import ModelDrafter, fit_drafter
from specnb.draft.suffix import SuffixDrafter
from specnb.io import write_atomic
from specnb.lm.load import load
from specnb.machine import cpu_facts
from specnb.measure.auto import auto_drafter, route_between
from specnb.measure.bench import Timed, interleaved, tabulate_speeds
from specnb.prompts import prompts
from tests.benchmarks.busy_neighbour import SPIN

ENGINES = {"llama": "smollm2-135m", "hf": "smollm2-135m?backend=hf&dtype=float32"}
CONTENTS, TEMPERATURES, N_PROMPTS, N_TOKENS = ("code", "edit", "prose"), (0.0, 0.7), 14, 48
RECORD = Path(__file__).with_suffix(".json")


class Wrong(DrafterBase):
    """Copies a token that never comes, and says that it found a long match."""

    name = "wrong"

    def __init__(self, token: int) -> None:
        self.token = token

    def propose(self, tokens, k, picker):
        return Proposal((self.token,) * picker.copies(20, k))


def open_routers(target: Any, engine: str, opened: ExitStack) -> dict[str, Router]:
    """Return the routers by what was given to them."""
    draft = opened.enter_context(closing(load("smollm2-135m:q4_0")))
    foreign = with_vocabulary(draft, describe("gpt-2"))
    dear = opened.enter_context(closing(load("smollm2-135m:q8_0" if engine == "llama" else ENGINES["hf"])))
    given = {"wrong": Wrong(target.vocab.size - 1), "dear": ModelDrafter(dear), "foreign": fit_drafter(foreign, target)}
    routers = {"sound": auto_drafter(target)}
    for name, drafter in given.items():
        routers[name] = router = route_between(target, [SuffixDrafter(), drafter])
        c, at5 = router.arms[1].draft_s / router.verify_s[1], router.verify_s[5] / router.verify_s[1]
        print(f"{engine}, {name}: c = {c:.2f}, T(5)/T(1) = {at5:.2f}", flush=True)
    return routers


def gain(runs: Sequence[Timed], method: str) -> pd.Series:
    """Return the speed-up of `method` on each prompt, in whole calls; of repeats by their median."""
    times = pd.DataFrame(runs, columns=Timed._fields).groupby(["method", "prompt"])["wall_s"].median()
    return times["plain"] / times[method]  # all texts have N_TOKENS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", choices=ENGINES)
    parser.add_argument("--busy", action="store_true")
    parser.add_argument("--repeats", type=int, default=1)
    asked = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for engine in [asked.engine] if asked.engine else ENGINES:
        with ExitStack() as opened:
            target = opened.enter_context(closing(load(ENGINES[engine])))
            routers = open_routers(target, engine, opened)
            if asked.busy:
                opened.callback(subprocess.Popen([sys.executable, "-c", SPIN]).kill)
            for content in CONTENTS:
                for temperature in TEMPERATURES:
                    settings = {"max_new_tokens": N_TOKENS, "temperature": temperature, "ignore_eog": True}
                    plain = partial(generate, target, **settings)
                    methods = {"plain": plain, "plain again": plain}  # the second shows what is noise
                    methods |= {name: partial(plain, drafter=router) for name, router in routers.items()}
                    runs = list(interleaved(methods, prompts(content, limit=N_PROMPTS), repeats=asked.repeats))
                    table = tabulate_speeds(runs, baseline="plain")
                    table["slowest"] = [gain(runs, method).min() for method in table["method"]]
                    cell = {"engine": engine, "content": content, "temperature": temperature}
                    cell |= {"busy": asked.busy, "repeats": asked.repeats, "cpu": cpu_facts()["model"]}
                    rows += [cell | row for row in table.to_dict("records") if row["method"] != "plain"]
                    for row in rows[-len(methods) + 1 :]:
                        ends = f"{row['speedup']:.2f} ({row['low']:.2f}-{row['high']:.2f})"
                        print(engine, content, temperature, row["method"], ends, f"{row['slowest']:.2f}", flush=True)
    older = json.loads(RECORD.read_text())["cells"] if RECORD.exists() else []
    again = {(row["engine"], row["busy"]) for row in rows}
    others = [row for row in older if (row["engine"], row["busy"]) not in again]
    write_atomic(RECORD, json.dumps({"cells": others + rows}, indent=1).encode())
    slower = [row for row in rows if row["method"] in routers and (row["high"] < 0.98 or row["low"] < 0.95)]
    print(f"{len(rows)} cells; upper end below 0.98 or lower end below 0.95 in {len(slower)}: {slower}")


if __name__ == "__main__":
    main()
