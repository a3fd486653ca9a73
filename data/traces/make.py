"""Record the shipped trace again: `python -m data.traces.make` (about 20 minutes, two idle cores).

Writes `data/traces/smollm2-135m/`: what notebook 09 writes for a run of its own, a record and
`trace.parquet`; and `SHA256SUMS`. `--out`, `--prompts-per-category` and `--max-new-tokens` make a
small one elsewhere.
"""

import os
import shutil
import tempfile
from pathlib import Path
from time import perf_counter

import typer

from specnb.book.explorer.live import Workbench
from specnb.book.explorer.tables import TRACE
from specnb.io import digest
from specnb.measure.cost import verify_costs
from specnb.measure.experiment import ProgressBar
from specnb.measure.recording import Recording, Trace
from specnb.params import ExplorerParams
from specnb.store import run_id, save

FOLDER = Path(__file__).parent / "smollm2-135m"
EXPERIMENT = "00_start_here"
TARGET = "smollm2-135m?backend=hf"
DRAFTERS = ["lookup", "medusa", "jump", "smollm2-135m:q4_0?backend=llama"]
MEASURED = 8
"""Times that costs are measured."""
DIGITS = 3
"""Of chances and probabilities: one more than is shown."""


def main(out: Path = FOLDER, prompts_per_category: int = 8, max_new_tokens: int = 48) -> None:
    sizes = {"prompts_per_category": prompts_per_category, "max_new_tokens": max_new_tokens}
    params = ExplorerParams(target=TARGET, drafters=DRAFTERS, **sizes)
    bench = Workbench(params)
    began = perf_counter()
    load_before = os.getloadavg()
    with ProgressBar() as progress:
        record, trace, *costs, _ = bench.record_trace(progress)
    # a neighbor makes forwards slower, never faster: the quickest of several is the least disturbed
    measured = [
        costs,
        *(verify_costs(bench.target, bench.drafters, params.k_max) for _ in range(MEASURED - 1)),
    ]
    curve, c = min(measured, key=lambda pair: sum(pair[0].median_s))
    facts = {"prompts": [prompt.id for prompt in bench.chosen], "loadavg": load_before}
    record = record.model_copy(
        update={
            "experiment": EXPERIMENT,
            "run_id": run_id(EXPERIMENT, record.params),
            "measurements": record.measurements
            | {"verify_curve": curve.model_dump(mode="json"), "c": c},
            "provenance": record.provenance | {"extra": record.provenance["extra"] | facts},
            "generations": (),  # their tokens are in the recordings
        }
    )
    with tempfile.TemporaryDirectory() as folder:
        Trace(tuple(map(rounded, trace.recordings))).save(save(record, Path(folder)) / TRACE)
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(
            Path(folder) / EXPERIMENT / record.run_id, out, ignore=shutil.ignore_patterns(".*")
        )
    files = sorted(out.iterdir())
    sums = [f"{digest(file)}  {out.name}/{file.name}\n" for file in files]
    (out.parent / "SHA256SUMS").write_text("".join(sums), encoding="utf-8")
    ratios = ", ".join(f"T({n})/T(1) = {curve.ratio(n):.2f}" for n in (2, 5, 9, 17, 25))
    n_bytes = sum(file.stat().st_size for file in files)
    took = (perf_counter() - began) / 60
    print(
        f"{len(trace.recordings)} recordings; {n_bytes:,} bytes; {took:.1f} min; {ratios}; c = {c}"
    )
    print(f"load {load_before[0]:.1f} before")


def rounded(recording: Recording) -> Recording:
    """Round chances to DIGITS; drop those behind a draft never kept: no round gets there."""
    keep = []
    for row in recording.keep:
        chances = [round(chance, DIGITS) for chance in row]
        keep.append(tuple(chances[: chances.index(0.0) + 1] if 0.0 in chances else chances))
    rows = {
        name: tuple(round(x, DIGITS) for x in getattr(recording, name))
        for name in ("p_target", "q_draft", "beliefs")
    }
    heads = tuple(tuple(round(top, DIGITS) for top in row) for row in recording.head_beliefs)
    return recording._replace(keep=tuple(keep), head_beliefs=heads, **rows)


if __name__ == "__main__":
    typer.run(main)
