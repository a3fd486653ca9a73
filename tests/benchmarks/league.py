"""Keep what a run of notebook 07 found about its drafters: trained ones beside a copier, on another machine.

.venv/bin/specnb run 07_drafters --budget normal -p drafters suffix,jump,hydra,redrafter,eagle
.venv/bin/python -m tests.benchmarks.league results/07_drafters/RUN
"""

import argparse
import json
from pathlib import Path

import pandas as pd

from specnb.book.league import rank_drafters
from specnb.book.tables import baseline
from specnb.io import plain, write_atomic
from specnb.store import load_record

RECORD = Path(__file__).with_suffix(".json")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="the run's folder")
    record = load_record(parser.parse_args().run)
    table = pd.concat({t: rank_drafters(record, t) for t in record.params["temperatures"]}, names=["temperature"])
    shown = ["best_k", "range", "alpha_1", "tested", "tau", "predicted", "low", "high", "live", "live_low", "live_high"]
    print(table[shown].round(2).to_string())
    facts = {"cpu": record.provenance["cpu"], "run_id": record.run_id, "params": record.params}
    rows = plain(table.reset_index().to_dict("records"), nan=None)
    document = facts | {"baseline": str(baseline(record)), "rows": rows}
    write_atomic(RECORD, json.dumps(document, indent=1).encode())


if __name__ == "__main__":
    main()
