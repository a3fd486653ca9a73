"""Copy published runs into notebooks: `python -m tests.book.store 02_adaptive_k …`.

Outputs come from the run whose figures `specnb publish` copied last; results/ must still contain
it. The template in `boxes.toml` fills in the numbers of the box at the top ("In short"): `rows` and
`row` select from the `table` of a figure or the shipped `trace`, `record` is the stored part of the
run's record, and modules of `specnb.book` compute values.
"""

import sys
from functools import cache
from pathlib import Path
from typing import Any

import nbformat
import pandas as pd
from jinja2 import Environment, StrictUndefined

from specnb.book import tables
from specnb.book.claims import Estimate, report
from specnb.book.explorer import tables as explorer
from specnb.chapters import adaptive_k, league
from specnb.io import project_dir, read_json, read_toml, write_atomic
from specnb.records import Generation, RunRecord
from specnb.store import results_dir
from tests.book.hygiene import START, normalise

ROOT = project_dir()
FIGURES = ROOT / "figures"
BOXES = read_toml(Path(__file__).with_name("boxes.toml"))
SHIPPED_RUN = read_json(ROOT / "data" / "traces" / explorer.SHIPPED / "run.json")["run_id"]


@cache
def table(figure: str) -> pd.DataFrame:
    """Return the table of a published figure."""
    return pd.DataFrame(read_json(FIGURES / f"{figure}.json")["table"]["records"])


@cache
def trace() -> pd.DataFrame:
    """Return the best greedy K of each drafter, content and machine in the shipped trace."""
    _, recorded, curve, c, _ = explorer.stored(explorer.SHIPPED)
    return tables.best_k(
        explorer.sweep_k(explorer.Tables(recorded), curve, c).query("temperature == 0")
    )


def rows(frame: pd.DataFrame, **where: Any) -> pd.DataFrame:
    """Return the rows that have these values; a string matches as a prefix."""
    for name, wanted in where.items():
        frame = frame[
            frame[name].str.startswith(wanted) if isinstance(wanted, str) else frame[name] == wanted
        ]
    return frame


def row(frame: pd.DataFrame, **where: Any) -> pd.Series:
    """Return the only matching row. Raises ValueError if there is not exactly one."""
    ((_, only),) = rows(frame, **where).iterrows()
    return only


def ends(row: pd.Series, digits: int = 2) -> str:
    """Return a speed-up with its interval."""
    return format(Estimate(*row[["speedup", "low", "high"]], n=0), f".{digits}f")


def record_of(notebook: str) -> RunRecord:
    """Return the stored record behind a notebook's figures (not of the trace that 00 opens).

    Its generations have no rounds, so counts of rounds and draft tokens are 0.
    """
    records = (
        read_json(path) for path in (FIGURES / "records").glob("*.json") if path.stem != SHIPPED_RUN
    )
    (record,) = (record for record in records if record["experiment"] == notebook)
    generations = [
        Generation.model_construct(**each | {"rounds": (), "token_ids": tuple(each["token_ids"])})
        for each in record["generations"]
    ]
    return RunRecord.model_validate(record | {"generations": []}).model_copy(
        update={"generations": generations}
    )


def box(notebook: str) -> str:
    """Return the line of the box with its numbers."""
    record = record_of(notebook)
    cpu = record.provenance["cpu"]["model"].replace("(R)", "")
    models = str(record.provenance["models"])
    dtype = next((name for name in ("int4", "bfloat16") if name in models), "float32")
    environment = Environment(undefined=StrictUndefined)
    modules = {"adaptive": adaptive_k, "league": league, "report": report, "tables": tables}
    environment.tests["startswith"] = str.startswith
    environment.globals |= {"table": table, "trace": trace, "rows": rows, "row": row} | modules
    environment.filters |= {
        "ends": ends,
        "fixed": "{:.{}f}".format,
        "percent": lambda share: f"{100 * share:.0f}",
    }
    template = environment.from_string(" ".join(BOXES[notebook].split()))
    return f"{START} {template.render(record=record, cpu=cpu, dtype=dtype).strip()}"


def store(notebook: str) -> None:
    """Write outputs and box of the published run into the notebook."""
    path = ROOT / "notebooks" / f"{notebook}.ipynb"
    ran = nbformat.read(results_dir() / notebook / record_of(notebook).run_id / "notebook.ipynb", 4)
    nb = nbformat.read(path, 4)
    outputs = {cell.id: cell for cell in ran.cells}
    for cell in nb.cells:
        if cell.cell_type == "code":
            cell.outputs = outputs[cell.id].outputs
            cell.execution_count = outputs[cell.id].execution_count
        elif notebook in BOXES:
            lines = [
                box(notebook) if line.startswith(START) else line
                for line in cell.source.splitlines()
            ]
            cell.source = "\n".join(lines)
    write_atomic(path, nbformat.writes(nb).encode())
    normalise(path)


if __name__ == "__main__":
    for word in sys.argv[1:]:
        store(word)
