"""What more text buys a drafter: `jump` from several amounts of one text, its kin and another loss from the same.

.venv/bin/specnb heads train --kind jump --batches 4 --steps 1 --work WORK --target TARGET
.venv/bin/python -m tests.benchmarks.slope WORK

The first command writes the text, the second trains on its first batches (an hour in all on two cores; stopped, it goes
on). Each token is seen as often at every amount. All are judged on the same held-out text.
"""

import json
import sys
from contextlib import closing
from pathlib import Path
from time import perf_counter
from typing import Any

from specnb.io import write_atomic
from specnb.lm.load import load
from specnb.medusa import data
from specnb.medusa import train as training
from specnb.medusa.rollouts import train_jump

TARGET = "smollm2-135m?backend=hf&dtype=float32&exact=False"
STEPS_A_BATCH = 59
"""As many as the shipped jump drafter had: 1,300 for 22 batches."""
RUNS = (("jump", 2, 0.5), ("jump", 4, 0.5), ("eagle", 2, 0.5), ("jump", 2, 0.0))
"""Kind, batches of 64 rows of 256 tokens, and the share of the LK loss; the rest is KL. The record also has a run of
`block`, masks in place of steps, a kind that was cut since."""
RECORD = Path(__file__).with_suffix(".json")


def first_batches(text: Path, folder: Path, n: int) -> Path:
    """Link the first `n` training batches of a text, and all that is held out, into a folder of their own."""
    folder.mkdir(parents=True, exist_ok=True)
    held_out = sorted(text.glob("held_out-*.npz"))
    for file in (text / data.FACTS_FILE, *held_out, *sorted(text.glob("train-*.npz"))[:n]):
        if not (folder / file.name).exists():
            (folder / file.name).symlink_to(file.resolve())
    return folder


def train_once(model: Any, work: Path, kind: str, n: int, lk: float) -> dict[str, Any]:
    """Train one drafter, and return what it was made of and its last held-out figures."""
    text = first_batches(work / "text", work / f"text-{n}", n)
    recipe = training.recipe("cpu", kind, steps=n * STEPS_A_BATCH, lk=lk)
    rows = data.read(text, "train")
    config = training.config_for(model, kind=kind, n_heads=8, n_layers=1, draft_vocab=8192)
    net: Any = training.make_heads(model, config, rows, seed=0)
    began = perf_counter()
    log = train_jump(net, recipe, text, work / f"{kind}-{n}-{lk:g}")
    facts = {"kind": kind, "lk": lk, "tokens": rows.tokens.size, "own": rows.n_own, "steps": recipe.steps}
    return facts | {"seconds": round(perf_counter() - began, 1), "log": log}


def main() -> None:
    work = Path(sys.argv[1])
    results = json.loads(RECORD.read_text()) if RECORD.exists() else []
    with closing(load(TARGET)) as model:
        for kind, n, lk in RUNS[len(results) :]:
            results.append(train_once(model, work, kind, n, lk))
            write_atomic(RECORD, json.dumps(results, indent=1).encode())
            last = results[-1]["log"][-1]
            print(kind, lk, results[-1]["tokens"], results[-1]["seconds"], last["top1"], last["tau"], flush=True)


if __name__ == "__main__":
    main()
