"""How long the explorer takes to redraw, kernel side: median and p95 over all slider moves, for each control.

    python tests/benchmarks/explorer_redraw.py TRACE.parquet

Every control goes through all of its values (a float slider through twenty) while the others stand, for each drafter
and policy. Nothing is asserted: a time is a fact of one machine.
"""

import sys
from collections import defaultdict
from pathlib import Path
from time import perf_counter

import numpy as np

from specnb.book.explorer.widgets import Explorer
from specnb.measure.cost import straight_curve
from specnb.measure.recording import Trace


def values(control) -> list:
    """What a control can be moved to."""
    if hasattr(control, "options"):
        return [option[1] if isinstance(option, tuple) else option for option in control.options]
    steps = np.linspace(control.min, control.max, 20)
    return steps.tolist() if isinstance(control.value, float) else sorted({round(s) for s in steps})


def main(path: Path) -> None:
    trace = Trace.load(path)
    explorer = Explorer(trace, straight_curve("line", 1.4), {r.drafter: 0.3 for r in trace.recordings})
    taken = defaultdict(list)
    for drafter in values(explorer.drafter):
        explorer.drafter.value = drafter
        for policy in values(explorer.policy):
            explorer.policy.value = policy
            for name in ("k", "temperature", "at8", "c", "round", "prompt", "curve"):
                for value in values(explorer.controls[name]):
                    began = perf_counter()
                    explorer.controls[name].value = value
                    taken[name, policy].append(1000 * (perf_counter() - began))
    print(f"{'control':12} {'policy':20} {'moves':>6} {'median':>8} {'p95':>8} {'max':>8}  (ms)")
    for (name, policy), ms in taken.items():
        print(f"{name:12} {policy:20} {len(ms):6} {np.median(ms):8.1f} {np.quantile(ms, 0.95):8.1f} {max(ms):8.1f}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]))
