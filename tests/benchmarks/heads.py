"""Which heads learn most from the same text, and how far do the Medusa note's schedules get in the same time?

.venv/bin/specnb heads train --kind medusa --batches 8 --n-layers 3 --steps 1 --work WORK --target TARGET
.venv/bin/python -m tests.benchmarks.heads WORK medusa hydra report before [--minutes 60]

The first command writes the text. The second trains untrained heads on it by the loop of `specnb heads train`, and
keeps the curves on held-out text. Kinds have as many steps each; the note's schedules are stopped after the minutes.
A run that was stopped goes on; several may run side by side.
"""

import argparse
import json
from contextlib import closing, suppress
from dataclasses import asdict, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from specnb.book.medusa import OLD
from specnb.io import write_atomic
from specnb.lm.load import load
from specnb.medusa import data
from specnb.medusa import train as training
from specnb.provenance import provenance
from tests.benchmarks.slope import TARGET

STEPS, EVERY = 400, 20
KINDS = ("medusa", "hydra")
RUNS = {kind: (kind, training.recipe("cpu", kind, steps=STEPS)) for kind in KINDS}
RUNS["report"] = "medusa", training.PRESETS["report"]
RUNS["before"] = "medusa", replace(OLD, batch_size=training.PRESETS["report"].batch_size)  # the note does not give it
RECORD = Path(__file__).with_suffix(".json")


class TimeIsUp(Exception):
    """The minutes of a run are over."""


def train_for(minutes: float, model: Any, work: Path, name: str) -> dict[str, Any]:
    """Train the heads of a run, and return its recipe, its curve and how long it took."""
    (kind, recipe), began = RUNS[name], perf_counter()
    rows = data.read(work / "text", "train")
    config = training.config_for(model, kind=kind, n_heads=4, n_layers=3, draft_vocab=8192)
    heads: Any = training.make_heads(model, config, rows, seed=0)

    def stop(step: int, *_: object) -> None:
        if step % EVERY == 1 and perf_counter() - began > 60 * minutes:  # a checkpoint was just written
            raise TimeIsUp

    with suppress(TimeIsUp):
        training.train(heads, recipe, work / "text", work / name, save_every=EVERY, on_step=stop)
    log = torch.load(work / name / training.CHECKPOINT_FILE, weights_only=True)["log"]
    facts = {"run": name, "kind": kind, "tokens": rows.tokens.size, "own": rows.n_own, "recipe": asdict(recipe)}
    parameters, bytes_read = heads.cost()
    facts |= {"parameters": parameters, "bytes_read": bytes_read, "threads": torch.get_num_threads()}
    return facts | {"minutes": round((perf_counter() - began) / 60, 1), "log": log}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("work", type=Path)
    parser.add_argument("runs", nargs="+", choices=RUNS)
    parser.add_argument("--minutes", type=float, default=60)
    asked = parser.parse_args()
    cpu = provenance(models=[{"id": TARGET}])["cpu"]
    with closing(load(TARGET)) as model:
        for name in asked.runs:
            row = train_for(asked.minutes, model, asked.work, name) | {"cpu": cpu}
            older = json.loads(RECORD.read_text()) if RECORD.exists() else []
            rows = [other for other in older if other["run"] != name] + [row]
            write_atomic(RECORD, json.dumps(rows, indent=1).encode())
            print(name, row["minutes"], "min:", row["log"][-1], flush=True)


if __name__ == "__main__":
    main()
