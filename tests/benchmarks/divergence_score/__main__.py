"""Plant every fault, and count how often the lab and the tools that people use instead find it.

python -m tests.benchmarks.divergence_score --workers 2 --seeds 3 --out
data/divergence/score.parquet
"""

import argparse
from pathlib import Path

from specnb.measure.experiment import ProgressBar
from tests.benchmarks.divergence_score.score import score


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="number of models, each with its own text")
    parser.add_argument("--workers", type=int, default=1, help="processes")
    parser.add_argument("--out", type=Path, help="file for all rows (parquet); the tables go next to it (JSON)")
    given = parser.parse_args()
    if given.out is not None:  # before the long run
        given.out.absolute().parent.mkdir(parents=True, exist_ok=True)
    with ProgressBar() as progress:
        result = score(seeds=given.seeds, workers=given.workers, progress=progress)
    if given.out is not None:
        result.save(given.out)
    right = ["n", "module", "token", "exact", "cause"]
    print(result.by_tool()[["tool", "against", *right, "alarms", "controls"]].to_string(index=False))
    print(result.by_fault()[["name", "dtype", *right]].to_string(index=False))
    print(f"{len(result.misses())} faults missed or misnamed, {len(result.false_alarms())} false alarms of the lab")


if __name__ == "__main__":
    main()
