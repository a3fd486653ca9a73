"""The score of the lab over the grid of faults and controls, by process, model and dtype."""

import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from specnb.divergence.pair import DTYPES, SHAPES
from specnb.io import write_json
from specnb.measure.experiment import Progress, silent
from specnb.provenance import provenance
from tests.benchmarks.divergence_score import rows
from tests.benchmarks.divergence_score.controls import CONTROLS, controlled
from tests.benchmarks.divergence_score.faults import FAULTS
from tests.benchmarks.divergence_score.grid import Subject, cases, examined
from tests.benchmarks.divergence_score.tools import LAB, TELLS_TOKEN

BY_TOOL = ["tool", "against"]
TABLES = ("by_tool", "by_fault")


@dataclass(frozen=True)
class Part:
    """The work of one process: all cases of one model and text."""

    dtype: str
    seed: int
    layers: tuple[int, ...]


@dataclass(frozen=True)
class Score:
    """`rows` with `rows.COLUMNS`; `facts`: what ran, and the provenance."""

    rows: pd.DataFrame
    facts: dict[str, Any]

    def by_tool(self) -> pd.DataFrame:
        """Return one row per tool and sound run: shares of right answers, and false alarms.

        Shares of tokens and causes are NaN for a tool that names none.
        """
        both = self.rows[BY_TOOL].drop_duplicates()  # the lab first: outer joins sort
        for part in (rows.shares(self.rows, BY_TOOL), rows.alarms(self.rows, BY_TOOL)):
            both = both.merge(part, on=BY_TOOL, how="left")
        counts = ["n", "controls", "alarms", "same_bits"]
        both = both.fillna(dict.fromkeys(counts, 0)).astype(dict.fromkeys(counts, int))
        for names, tools in ((("token", "exact"), (LAB, *TELLS_TOKEN)), (("cause",), (LAB,))):
            columns = [f"{name}{end}" for name in names for end in ("", "_low", "_high")]
            both.loc[~both["tool"].isin(tools), columns] = float("nan")
        return both

    def by_fault(self) -> pd.DataFrame:
        """Return the lab's shares of right answers, one row per fault and dtype."""
        return rows.shares(self.rows[self.rows["tool"] == LAB], ["name", "dtype"])

    def document(self) -> dict[str, Any]:
        """Return a JSON document of the tables and facts, which `picture` reads."""
        tables = {
            name: json.loads(getattr(self, name)().to_json(orient="records")) for name in TABLES
        }
        return {"schema": 1, **tables, "facts": self.facts}

    def save(self, path: Path) -> None:
        """Write all rows as one parquet file, and the tables next to it as JSON."""
        self.rows.to_parquet(path, index=False)
        write_json(path.with_suffix(".json"), self.document())


def score(
    *,
    seeds: int = 3,
    layers: Sequence[int] | None = None,
    dtypes: Sequence[str] = tuple(DTYPES),
    workers: int = 1,
    progress: Progress = silent,
) -> Score:
    """Run the grid on the embedded pair and score it; `layers` None: all.

    `seeds` is the number of models, each with its own text. `workers` processes take one model and
    dtype at a time, with one thread each if there are several. Raises InputError for a fault that
    did not act.
    """
    n_layers = SHAPES["draft"]["num_hidden_layers"]
    every = tuple(range(n_layers)) if layers is None else tuple(layers)
    parts = [Part(dtype, seed, every) for seed in range(seeds) for dtype in dtypes]
    done = dict(_run(parts, workers, progress))
    ran = {
        "seeds": list(range(seeds)),
        "dtypes": list(dtypes),
        "faults": list(FAULTS),
        "layers": list(every),
    }
    facts = {
        "ran": ran,
        "provenance": provenance(seeds={"pair": ran["seeds"]}),
    }
    return Score(pd.concat([done[part] for part in parts], ignore_index=True), facts)


def _run(
    parts: Sequence[Part], workers: int, progress: Progress
) -> Iterator[tuple[Part, pd.DataFrame]]:
    """Yield parts as they are done."""
    if workers < 2 or len(parts) < 2:
        for number, part in enumerate(parts):
            text = f"{part.dtype}, seed {part.seed}"
            yield (
                part,
                measured(
                    part, lambda what, n=number, t=text: progress(n, len(parts), f"{t}: {what}")
                ),
            )
        return
    # Fresh processes: in a forked one, torch's threads do not run.
    with ProcessPoolExecutor(
        min(workers, len(parts)), get_context("spawn"), torch.set_num_threads, (1,)
    ) as pool:
        running = {pool.submit(measured, part): part for part in parts}
        for number, future in enumerate(as_completed(running)):
            part = running[future]
            progress(number, len(parts), f"{part.dtype}, seed {part.seed}: done")
            yield part, future.result()


def measured(part: Part, note: Callable[[str], None] = lambda _: None) -> pd.DataFrame:
    """Return all rows of a part."""
    subject = Subject(part.dtype, part.seed)
    collected = []
    lab = subject.lab
    for case in cases(lab.script, seed=part.seed, layers=part.layers):
        note(case.says)
        collected += examined(subject, case)
    for name in CONTROLS:
        note(name)
        collected += controlled(subject, name)
    return pd.DataFrame(collected, columns=rows.COLUMNS)
