"""Plant every fault, and count how often the lab and common manual methods find it.

The whole grid takes hours:

    python -m tests.benchmarks.divergence_score --workers 2 --seeds 3 \\
        --out data/divergence/score.parquet

Every fault and control once, compared with the stored score, takes about ten minutes:

    OMP_NUM_THREADS=1 python -m tests.benchmarks.divergence_score --quick
"""

import argparse
from pathlib import Path

import pandas as pd

from specnb.io import project_dir
from specnb.measure.experiment import ProgressBar
from tests.benchmarks.divergence_score.rows import changed
from tests.benchmarks.divergence_score.score import score

STORED = project_dir() / "data" / "divergence" / "score.parquet"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--seeds", type=int, default=3, help="number of models, each with its own text"
    )
    parser.add_argument("--workers", type=int, default=1, help="processes")
    parser.add_argument(
        "--out", type=Path, help="file for all rows (parquet); the tables go next to it (JSON)"
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="every fault and control once, against the stored score",
    )
    given = parser.parse_args()
    if given.out is not None:  # before the long run
        given.out.absolute().parent.mkdir(parents=True, exist_ok=True)
    grid = (
        {"seeds": 1, "layers": (0,), "dtypes": ("float32",)}
        if given.quick
        else {"seeds": given.seeds}
    )
    with ProgressBar() as progress:
        result = score(**grid, workers=given.workers, progress=progress)
    if given.out is not None:
        result.save(given.out)
    right = ["n", "module", "token", "exact", "cause"]
    print(
        result.by_tool()[["tool", "against", *right, "alarms", "controls"]].to_string(index=False)
    )
    print(result.by_fault()[["name", "dtype", *right]].to_string(index=False))
    if given.quick:
        differing = changed(result.rows, pd.read_parquet(STORED))
        print(
            differing.to_string() if len(differing) else "every verdict is that of the stored score"
        )


if __name__ == "__main__":
    main()
