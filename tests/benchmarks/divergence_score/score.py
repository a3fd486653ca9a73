"""The score of the lab: the whole grid of planted faults and controls, shared by processes, a model and dtype each."""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from importlib import metadata
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from specnb import divergence
from specnb.divergence.faults import FAULTS
from specnb.divergence.pair import DTYPES, SHAPES
from specnb.errors import InputError
from specnb.io import write_atomic
from specnb.measure.experiment import Progress, silent
from specnb.provenance import provenance
from tests.benchmarks.divergence_score import rows
from tests.benchmarks.divergence_score.controls import CONTROLS, controlled
from tests.benchmarks.divergence_score.grid import Subject, cases, examined, scaled
from tests.benchmarks.divergence_score.tools import LAB, TELLS_TOKEN

BY_TOOL = ["tool", "against"]
TARGETS = {"float32": 1e-3, "bfloat16": 2e-2}
"""The smallest scale fault that has to be found, by dtype."""
TABLES = ("by_tool", "by_fault", "smallest", "misses", "false_alarms")
CODE = (Path(divergence.__file__).parent, Path(__file__).parent)
"""What makes the rows: the lab, and this folder."""


@dataclass(frozen=True)
class Part:
    """What one process does: all cases of one model and text. It is kept when it is done."""

    dtype: str
    seed: int
    faults: tuple[str, ...]
    layers: tuple[int, ...]
    controls: bool

    @property
    def file(self) -> str:
        """A name that changes with what changes the rows: what is run, the code of the lab, torch, transformers."""
        whole = hashlib.blake2b(json.dumps(asdict(self), sort_keys=True).encode(), digest_size=6)
        whole.update(f"{torch.__version__} {metadata.version('transformers')}".encode())
        for path in sorted(path for folder in CODE for path in folder.rglob("*.py")):
            whole.update(path.read_bytes())
        return f"{self.dtype}-{self.seed}-{whole.hexdigest()}.parquet"


@dataclass(frozen=True)
class Score:
    """`rows` as `rows.SCHEMA` has them; `facts`: what was run, and the provenance."""

    rows: pd.DataFrame
    facts: dict[str, Any]

    def by_tool(self) -> pd.DataFrame:
        """A row for each tool and what it compared with: shares of right modules, tokens, causes, and false alarms.

        Shares of tokens and causes are NaN for a tool that tells none.
        """
        both = self.rows.loc[self.rows["kind"] != "scale", BY_TOOL].drop_duplicates()  # the lab first: outer joins sort
        for part in (rows.shares(self.rows, BY_TOOL), rows.alarms(self.rows, BY_TOOL)):
            both = both.merge(part, on=BY_TOOL, how="left")
        counts = ["n", "controls", "alarms", "same_bits"]
        both = both.fillna(dict.fromkeys(counts, 0)).astype(dict.fromkeys(counts, int))
        for names, tools in ((("token", "exact"), (LAB, *TELLS_TOKEN)), (("cause",), (LAB,))):
            columns = [f"{name}{end}" for name in names for end in ("", "_low", "_high")]
            both.loc[~both["tool"].isin(tools), columns] = float("nan")
        return both

    def by_fault(self) -> pd.DataFrame:
        """A row for each fault and dtype, of the lab."""
        return rows.shares(self.rows[self.rows["tool"] == LAB], ["name", "dtype"])

    def smallest(self) -> pd.DataFrame:
        """By dtype the smallest scale that is always found, and whether it is as small as it has to be."""
        table = rows.smallest(self.rows[self.rows["kind"] == "scale"])
        return table.assign(reached=table["eps"] <= table["dtype"].map(TARGETS).astype(float))

    def misses(self) -> pd.DataFrame:
        """Every fault of which the lab got module, token or first cause wrong."""
        own = self._of_lab("fault")
        return own[~(rows.right(own) & own["token"] & (own["rank"] == 1))].reset_index(drop=True)

    def false_alarms(self) -> pd.DataFrame:
        """Every control in which the lab named a module."""
        own = self._of_lab("control")
        return own[own["structural"]].reset_index(drop=True)

    def document(self) -> dict[str, Any]:
        """A JSON document of the tables and facts, which `specnb.divergence.report` reads."""
        tables = {name: json.loads(getattr(self, name)().to_json(orient="records")) for name in TABLES}
        return {"schema": 1, **tables, "facts": self.facts}

    def save(self, path: Path) -> None:
        """Write all rows as one parquet file, and beside it the tables as JSON."""
        rows.write(path, self.rows, self.facts)
        write_atomic(path.with_suffix(".json"), (json.dumps(self.document(), indent=1) + "\n").encode())

    @classmethod
    def load(cls, path: Path) -> "Score":
        """What `save` wrote."""
        return cls(*rows.read(path))

    def _of_lab(self, kind: str) -> pd.DataFrame:
        return self.rows[(self.rows["kind"] == kind) & (self.rows["tool"] == LAB)]


def score(
    *,
    seeds: int = 3,
    layers: Sequence[int] | None = None,
    dtypes: Sequence[str] = tuple(DTYPES),
    faults: Sequence[str] | None = None,
    controls: bool = True,
    workers: int = 1,
    keep: Path | None = None,
    progress: Progress = silent,
) -> Score:
    """Run the grid on the embedded pair and score it; `layers` and `faults` None: all.

    `seeds` counts models, each with a text of its own. `controls` also runs the false-alarm controls and looks for the
    smallest scale fault. Work is shared by `workers` processes, of one thread each if they are several, a model and
    dtype at a time. With `keep`, a folder, each of these is written down when it is done and not run again. Raises
    InputError for a fault that did not act.
    """
    n_layers = SHAPES["draft"]["num_hidden_layers"]
    every = tuple(range(n_layers)) if layers is None else tuple(layers)
    chosen = tuple(FAULTS) if faults is None else tuple(faults)
    for kind, given, known in (("dtype", dtypes, DTYPES), ("fault", chosen, FAULTS), ("layer", every, range(n_layers))):
        if unknown := [name for name in given if name not in known]:
            raise InputError(f"no {kind} {unknown[0]!r}: there are {', '.join(map(str, known))}")
    parts = [Part(dtype, seed, chosen, every, controls) for seed in range(seeds) for dtype in dtypes]
    done = {part: rows.read(keep / part.file)[0] for part in parts if keep is not None and (keep / part.file).exists()}
    done |= dict(_run([part for part in parts if part not in done], keep, workers, progress))
    ran = {"seeds": list(range(seeds)), "dtypes": list(dtypes), "faults": list(chosen), "layers": list(every)}
    facts = {"ran": ran | {"controls": controls}, "provenance": provenance(seeds={"pair": ran["seeds"]})}
    return Score(pd.concat([done[part] for part in parts], ignore_index=True), facts)


def _run(
    parts: Sequence[Part], keep: Path | None, workers: int, progress: Progress
) -> Iterator[tuple[Part, pd.DataFrame]]:
    """Parts as they are done. Each is kept by the process that did it: where one fails, the others are not lost."""
    if workers < 2 or len(parts) < 2:
        for number, part in enumerate(parts):
            text = f"{part.dtype}, seed {part.seed}"
            yield part, _written(part, keep, lambda what, n=number, t=text: progress(n, len(parts), f"{t}: {what}"))
        return
    # a fresh process each: one that is forked has torch's threads, but none of them running
    with ProcessPoolExecutor(min(workers, len(parts)), get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        running = {pool.submit(_written, part, keep): part for part in parts}
        for number, future in enumerate(as_completed(running)):
            part = running[future]
            progress(number, len(parts), f"{part.dtype}, seed {part.seed}: done")
            yield part, future.result()


def _written(part: Part, keep: Path | None, note: Callable[[str], None] = lambda _: None) -> pd.DataFrame:
    path = None if keep is None else keep / part.file  # before it is run: code that is changed meanwhile made no rows
    measured_rows = measured(part, note)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        rows.write(path, measured_rows, {})
    return measured_rows


def measured(part: Part, note: Callable[[str], None]) -> pd.DataFrame:
    """All rows of a part."""
    subject, collected = Subject(part.dtype, part.seed), []
    lab = subject.lab
    for case in cases(lab.draft, lab.script, seed=part.seed, faults=part.faults, layers=part.layers):
        note(case.says)
        collected += examined(subject, case)
    for name in CONTROLS if part.controls else ():
        note(name)
        collected += controlled(subject, name)
    for layer in part.layers if part.controls else ():
        note(f"smallest scale in layer {layer}")
        collected += scaled(subject, layer)
    return rows.table(collected)
