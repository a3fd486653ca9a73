"""Store runs in the notebooks of the checkout: `python -m tests.book.store 02_adaptive_k …`.

Outputs are those of the run whose figures `specnb publish` copied last; results/ must still hold it. The numbers of the
box at the head ("In short") are filled in by the template in `boxes.toml` from that run: `rows` and `row` look up a
figure's table, `record` is what is kept of the run, and the modules of `specnb.book` compute from it.
"""

import sys
from functools import cache
from pathlib import Path
from typing import Any

import nbformat
import pandas as pd
from jinja2 import Environment, StrictUndefined

from specnb.book import adaptive, league, tables
from specnb.book.claims import report
from specnb.book.explorer import tables as explorer
from specnb.io import project_dir, read_json, read_toml, write_atomic
from specnb.records import RunRecord
from specnb.store import results_dir
from tests.book.hygiene import normalise

ROOT = project_dir()
FIGURES = ROOT / "figures"
BOXES = read_toml(Path(__file__).with_name("boxes.toml"))
START = "> **In short.**"


def rows(figure: str, **where: Any) -> pd.DataFrame:
    """Return the rows of a published figure's table that have these values, of texts those that begin so."""
    table = pd.DataFrame(read_json(FIGURES / f"{figure}.json")["table"]["records"])
    for name, wanted in where.items():
        table = table[table[name].str.startswith(wanted) if isinstance(wanted, str) else table[name] == wanted]
    return table


def row(figure: str, **where: Any) -> pd.Series:
    """Return the only such row. Raises ValueError where there is another number of them."""
    ((_, only),) = rows(figure, **where).iterrows()
    return only


@cache
def traced() -> pd.DataFrame:
    """Return the best K of each drafter, content and machine in the shipped trace, greedily."""
    _, trace, curve, c, _ = explorer.stored(explorer.SHIPPED)
    return tables.best_k(explorer.sweep_k(explorer.Tables(trace), curve, c).query("temperature == 0"))


def best(drafter: str, category: str, machine: str = explorer.THIS_MACHINE) -> pd.Series:
    """Return the row of `traced` of a drafter."""
    table = traced().query("category == @category and machine == @machine")
    ((_, only),) = table[table["drafter"].str.startswith(drafter)].iterrows()
    return only


def ends(row: pd.Series, name: str = "speedup", digits: int = 2) -> str:
    """Return a value with its interval."""
    return f"{row[name]:.{digits}f} [{row['low']:.{digits}f}, {row['high']:.{digits}f}]"


def record_of(notebook: str) -> RunRecord:
    """Return what is kept of the run that a notebook's figures are of."""
    kept = (read_json(path) for path in (FIGURES / "records").glob("*.json"))
    (record,) = (record for record in kept if record["experiment"] == notebook)
    return RunRecord.model_validate(record | {"generations": []})


def box(notebook: str) -> str:
    """Return the line of the box, filled in."""
    environment = Environment(undefined=StrictUndefined)
    modules = {"adaptive": adaptive, "league": league, "report": report, "tables": tables}
    environment.globals |= {"rows": rows, "row": row, "best": best} | modules
    environment.filters |= {"ends": ends, "fixed": "{:.{}f}".format, "percent": lambda share: f"{100 * share:.0f}"}
    template = environment.from_string(" ".join(BOXES[notebook].split()))
    return f"{START} {template.render(record=record_of(notebook)).strip()}"


def store(notebook: str) -> None:
    """Write outputs and box of the published run into the notebook."""
    path = ROOT / "notebooks" / f"{notebook}.ipynb"
    ran = nbformat.read(results_dir() / notebook / record_of(notebook).run_id / "notebook.ipynb", 4)
    nb, outputs = nbformat.read(path, 4), {cell.id: cell for cell in ran.cells}
    for cell in nb.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = outputs[cell.id].outputs, outputs[cell.id].execution_count
        elif notebook in BOXES:
            lines = [box(notebook) if line.startswith(START) else line for line in cell.source.splitlines()]
            cell.source = "\n".join(lines)
    write_atomic(path, nbformat.writes(nb).encode())
    normalise(path)


if __name__ == "__main__":
    for word in sys.argv[1:]:
        store(word)
