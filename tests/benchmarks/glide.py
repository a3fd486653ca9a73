"""Does the explorer's gliding temperature hold? What it says between recorded temperatures, against live runs there.

.venv/bin/python -m tests.benchmarks.glide

Each prompt is recorded at RECORDED, and run with drafts, by other random numbers, at LIVE. As on the page, drafts made
and kept at a temperature between lie on a straight line between those of its neighbours.
"""

import json
from contextlib import ExitStack, closing
from pathlib import Path

from specnb.book.explorer.tables import ALL, FREE, Setting, Tables
from specnb.decode.generate import generate
from specnb.draft.load import load_drafter
from specnb.io import write_atomic
from specnb.lm.load import load
from specnb.measure.bench import interval, rate
from specnb.measure.follow import record
from specnb.measure.policies import FIXED
from specnb.measure.recording import Trace
from specnb.prompts import prompts
from specnb.provenance import provenance

TARGET, DRAFTERS, K = "smollm2-135m:f16", ("suffix", "smollm2-135m:q4_0"), 4
CONTENTS, N_PROMPTS, N_TOKENS = ("code", "edit", "prose"), 8, 48
RECORDED, LIVE = (0.2, 0.4, 0.6), (0.3, 0.5)
RECORD = Path(__file__).with_suffix(".json")


def main() -> None:
    chosen, rows = [prompt for name in CONTENTS for prompt in prompts(name, limit=N_PROMPTS)], []
    with ExitStack() as opened:
        target = opened.enter_context(closing(load(TARGET)))
        drafters = [opened.enter_context(closing(load_drafter(name, target).drafter)) for name in DRAFTERS]
        limits, recordings = {"max_new_tokens": N_TOKENS}, []
        for temperature in RECORDED:
            for _, followed in record(target, drafters, chosen, k_max=K, temperature=temperature, **limits):
                recordings += followed
        tables = Tables(Trace(tuple(recordings)))
        for temperature in LIVE:
            near = [each for each in RECORDED if abs(each - temperature) < 0.11]
            for drafter in drafters:
                sweeps = [tables.sweep(Setting(drafter.name, each, ALL, FIXED, K, FREE)).iloc[K] for each in near]
                predicted = sum(p["accepted"] for p in sweeps) / sum(p["drafted"] for p in sweeps)
                runs = [
                    generate(target, prompt, drafter=drafter, k=K, temperature=temperature, seed=1, **limits)
                    for prompt in chosen
                ]
                live = interval([(g.accepted_tokens, g.total_draft_tokens) for g in runs], rate, log=False)
                inside = live.low <= predicted <= live.high
                rows.append({"temperature": temperature, "drafter": drafter.name, "k": K, "predicted": predicted,
                             **live._asdict(), "inside": inside, "n_prompts": len(chosen)})  # fmt: skip
                print(f"T = {temperature}, {drafter.name}: predicted {predicted:.3f}, live {live.value:.3f} "
                      f"({live.low:.3f} to {live.high:.3f})", flush=True)  # fmt: skip
    facts = provenance(models=[{"id": TARGET}])
    write_atomic(RECORD, json.dumps({"cpu": facts["cpu"], "rows": rows}, indent=1).encode())


if __name__ == "__main__":
    main()
