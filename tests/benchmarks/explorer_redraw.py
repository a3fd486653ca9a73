"""How long the explorer takes to redraw, kernel side: median and p95 over all slider moves, for each control.

    python tests/benchmarks/explorer_redraw.py TRACE.parquet

Every control goes through all of its values (a float slider through twenty) while the others stand, for each drafter
and policy, over all contents and over one. Nothing is asserted: a time is a fact of one machine.
"""

import sys
from collections import defaultdict
from itertools import product
from pathlib import Path

import numpy as np

from specnb.book.explorer.widgets import Explorer
from specnb.measure.cost import CostCurve
from specnb.measure.recording import Trace


def values(control) -> list:
    """What a control can be moved to."""
    if hasattr(control, "options"):
        return [option[1] if isinstance(option, tuple) else option for option in control.options]
    steps = np.linspace(control.min, control.max, 20)
    return steps.tolist() if isinstance(control.value, float) else sorted({round(s) for s in steps})


def main(path: Path) -> None:
    curve = CostCurve(
        model="line", context=0, widths=(1, 9, 25), samples_s=((0.02,), (0.03,), (0.05,))
    )  # which numbers these are does not matter here
    explorer = Explorer(Trace.load(path), curve, 0.3)
    taken = defaultdict(list)
    for drafter, content in product(values(explorer.drafter), values(explorer.content)[:2]):
        explorer.drafter.value, explorer.content.value = drafter, content
        for policy in values(explorer.policy):
            explorer.policy.value = policy
            for name in ("k", "temperature", "at8", "c", "round", "prompt", "curve"):
                for value in values(explorer.controls[name]):
                    explorer.redraw_ms.clear()
                    explorer.controls[name].value = value
                    taken[name, policy] += list(explorer.redraw_ms)
    print(f"{'control':12} {'policy':20} {'moves':>6} {'median':>8} {'p95':>8} {'max':>8}  (ms)")
    for (name, policy), ms in [*taken.items(), (("all", "all"), [ms for some in taken.values() for ms in some])]:
        print(f"{name:12} {policy:20} {len(ms):6} {np.median(ms):8.1f} {np.quantile(ms, 0.95):8.1f} {max(ms):8.1f}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]))
