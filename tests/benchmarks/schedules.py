"""How far do the Medusa note's schedules get in the same time? Its preset `report` beside the one that it replaced.

.venv/bin/specnb heads train --kind medusa --batches 24 --n-layers 3 --steps 1 --work WORK --target TARGET
.venv/bin/python -m tests.benchmarks.schedules WORK [--minutes 60]

The first command writes the text. The second trains the same untrained heads by each schedule for as long, by the loop
of `specnb heads train`, and keeps the curves on held-out text. Stopped, it goes on.
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

SCHEDULES = {
    "report": training.PRESETS["report"],
    "before": replace(OLD, batch_size=training.PRESETS["report"].batch_size),
}
"""The note's recipes. It does not give their batch."""
EVERY = 20
RECORD = Path(__file__).with_suffix(".json")


class TimeIsUp(Exception):
    """The minutes of a schedule are over."""


def train_for(minutes: float, model: Any, work: Path, name: str) -> dict[str, Any]:
    """Train heads by a schedule, and return its recipe, its curve and how long it took."""
    rows, began = data.read(work / "text", "train"), perf_counter()
    config = training.config_for(model, kind="medusa", n_heads=4, n_layers=3, draft_vocab=8192)
    heads: Any = training.make_heads(model, config, rows, seed=0)

    def stop(report: training.StepReport) -> None:
        if report.step % EVERY == 1 and perf_counter() - began > 60 * minutes:  # a checkpoint was just written
            raise TimeIsUp

    with suppress(TimeIsUp):
        training.train(heads, SCHEDULES[name], work / "text", work / name, save_every=EVERY, on_step=stop)
    log = torch.load(work / name / training.CHECKPOINT_FILE, weights_only=True)["log"]
    row = {"schedule": name, "tokens": rows.tokens.size, "recipe": asdict(SCHEDULES[name]), "log": log}
    return row | {"minutes": round((perf_counter() - began) / 60, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("work", type=Path)
    parser.add_argument("--minutes", type=float, default=60)
    asked = parser.parse_args()
    with closing(load(TARGET)) as model:
        rows = [train_for(asked.minutes, model, asked.work, name) for name in SCHEDULES]
    cpu = provenance(models=[{"id": TARGET}])["cpu"]
    write_atomic(RECORD, json.dumps({"cpu": cpu, "threads": torch.get_num_threads(), "rows": rows}, indent=1).encode())
    for row in rows:
        print(row["schedule"], row["minutes"], "min:", row["log"][-1])


if __name__ == "__main__":
    main()
