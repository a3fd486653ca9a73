"""What trees add to the shipped jump drafter: chains and trees, live and in turn with plain decoding, by content.

.venv/bin/python -m tests.benchmarks.jump_trees [--prompts 6]
"""

import argparse
import json
from contextlib import closing
from functools import partial
from pathlib import Path

import numpy as np

from specnb.decode.generate import generate
from specnb.io import read_json, write_atomic
from specnb.lm.load import load
from specnb.measure.bench import compare
from specnb.medusa.checkpoint import TRAINING_FILE
from specnb.medusa.drafter import fitting_checkpoint
from specnb.medusa.jump import jump_drafter
from specnb.medusa.tree import TreePlan, grow
from specnb.prompts import Prompt, prompts
from specnb.provenance import provenance
from specnb.records import Generation

TARGET, NEW_TOKENS = "smollm2-135m?backend=hf&dtype=auto", 64
CHAINS, TREES = (1, 2, 3, 4), (2, 3, 4, 6, 8, 12)
CONTENTS = ("code", "edit", "prose", "general")
RECORD = Path(__file__).with_suffix(".json")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=6)
    each = parser.parse_args().prompts
    with closing(load(TARGET)) as target:
        plain, drafter = partial(generate, target, max_new_tokens=NEW_TOKENS), jump_drafter(target)
        accuracy = np.array(read_json(fitting_checkpoint(target, ("jump",)) / TRAINING_FILE)["accuracy"])

        def draft(prompt: Prompt, plan: TreePlan | None, k: int) -> Generation:
            drafter.take_plan(plan)
            return plain(prompt, drafter=drafter, k=k)

        methods = {"plain": plain} | {f"chain of {k}": partial(draft, plan=None, k=k) for k in CHAINS}
        methods |= {f"tree of {n}": partial(draft, plan=grow(accuracy, n), k=n) for n in TREES}
        table = compare(methods, [p for name in CONTENTS for p in prompts(name, limit=each)], baseline="plain")
        facts = provenance(models=[{"id": target.name}])
    rows = table.to_dict("records")
    write_atomic(RECORD, json.dumps({"cpu": facts["cpu"], "target": target.name, "rows": rows}, indent=1).encode())
    print(table[["method", "tau", "speedup", "low", "high", "identical", "n_prompts"]].round(2).to_string(index=False))


if __name__ == "__main__":
    main()
