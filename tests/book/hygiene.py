"""What a committed notebook must be, so that its stored outputs are true, small, portable and checked.

nbval passes vacuously where a cell has no execution count; papermill loses a parameter whose line it cannot parse;
widget state makes a notebook five megabytes; a path of the author's machine is nobody else's. `problems` finds
these, `normalise` removes what tools leave behind: `python -m tests.book.hygiene notebooks/01_k_sweep.ipynb`.
"""

import ast
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import nbformat
import papermill
from IPython.core.inputtransformer2 import TransformerManager
from nbformat import NotebookNode
from nbformat.validator import iter_validate
from pydantic import BaseModel

from specnb.book.notebook import declared
from specnb.io import write_atomic

MAX_BYTES = 200_000
MAX_CELLS = 30
MAX_FUNCTION_LINES = 10
MIN_CHECKED_CELLS = 2

LEFTOVERS = {"widgets", "papermill"}
CELL_LEFTOVERS = {"papermill", "execution", "collapsed"}
UNCHECKED_TAGS = {"nbval-ignore-output", "nbval-skip"}
WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
FIGURES = re.compile(r"image/|application/vnd\.plotly|application/vnd\.jupyter\.widget-view")
ABSOLUTE = re.compile(
    r"(?<![\w.+/<-])/(?:home|root|work|workspace|tmp|var|opt|srv|mnt|media|usr|Users|private|content|scratch)\b"
    r"|\bfile://"
    r"|\b[A-Za-z]:(?:\\{1,2}|/)(?:Users|Windows|Program|Temp|Documents)"
)


def problems(path: Path, classes: object) -> list[str]:
    """What is wrong with the notebook at `path`; empty when it is clean. Cells are counted from 0.

    `classes` holds the parameter class that the notebook's metadata names: `{"specnb": {"params": "KSweepParams"}}`.
    """
    raw = json.loads(path.read_text(encoding="utf-8"))
    if faults := list(_format(raw)):
        return faults
    nb = nbformat.v4.reads_json(json.dumps(raw))
    faults = [f"has {n} bytes, at most {MAX_BYTES}"] if (n := path.stat().st_size) > MAX_BYTES else []
    faults += [f"has {n} cells, at most {MAX_CELLS}"] if (n := len(nb.cells)) > MAX_CELLS else []
    for check in (_metadata, _cells, _functions, _nbval):
        faults += check(nb)
    params = getattr(classes, nb.metadata.get("specnb", {}).get("params", ""), None)
    return faults + list(_parameters(path, nb, params))


def normalise(path: Path) -> None:
    """Rewrite the notebook without what tools leave in it.

    Outputs, execution counts, ids and tags stay, but for widgets, and for what progress bars wrote to stderr in cells
    whose output is not compared.
    """
    nb = nbformat.read(path, 4)
    for key in LEFTOVERS:
        nb.metadata.pop(key, None)
    nb.metadata.get("language_info", {}).pop("version", None)
    for cell in nb.cells:
        for key in CELL_LEFTOVERS:
            cell.metadata.pop(key, None)
        if not cell.metadata.get("tags", True):
            del cell.metadata["tags"]  # papermill gives every cell an empty list
        if _tags(cell) & UNCHECKED_TAGS:
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
        for output in cell.get("outputs", []):
            # without widget state, which is never stored, a viewer would say "model not found" in its place
            output.get("data", {}).pop(WIDGET_VIEW, None)
    write_atomic(path, (nbformat.writes(nb).rstrip("\n") + "\n").encode())


def _format(raw: dict) -> Iterator[str]:
    """On the bare JSON: nbformat's own reader repairs missing and doubled ids without a word."""
    if (raw["nbformat"], raw["nbformat_minor"]) != (4, 5):
        yield f"is nbformat {raw['nbformat']}.{raw['nbformat_minor']}, must be 4.5"
        return
    yield from (
        f"is not valid: {str(error).splitlines()[0]}" for error in iter_validate(raw, version=4, version_minor=5)
    )
    ids = [cell.get("id") for cell in raw["cells"]]
    yield from (f"cell id {each!r} occurs twice" for each in sorted({i for i in ids if i and ids.count(i) > 1}))


def _metadata(nb: NotebookNode) -> Iterator[str]:
    if (name := nb.metadata.get("kernelspec", {}).get("name")) != "python3":
        yield f"kernelspec is {name!r}, must be 'python3': other names exist on one machine only"
    leftovers = [f"metadata.{key}" for key in LEFTOVERS & set(nb.metadata)]
    leftovers += ["language_info.version"] if "version" in nb.metadata.get("language_info", {}) else []
    for index, cell in enumerate(nb.cells):
        leftovers += [f"cell {index}: metadata.{key}" for key in CELL_LEFTOVERS & set(cell.metadata)]
        leftovers += [f"cell {index}: injected parameters"] if "injected-parameters" in _tags(cell) else []
    yield from (f"{place} is left over: normalise the notebook" for place in leftovers)


def _cells(nb: NotebookNode) -> Iterator[str]:
    code = [(index, cell) for index, cell in enumerate(nb.cells) if cell.cell_type == "code"]
    for expected, (index, cell) in enumerate(code, 1):
        if not cell.source.strip() or cell.execution_count != expected:
            yield f"cell {index}: empty, or execution count {cell.execution_count}, must be {expected}: run all"
        if any(output.output_type == "error" for output in cell.outputs):
            yield f"cell {index}: holds an error output"
    for index, cell in enumerate(nb.cells):
        if match := next(filter(None, map(ABSOLUTE.search, (cell.source, *_texts(cell)))), None):
            yield f"cell {index}: holds an absolute path: {match.string[match.start() : match.end() + 30]!r}"


def _functions(nb: NotebookNode) -> Iterator[str]:
    for index, cell in enumerate(nb.cells):
        if cell.cell_type == "code":
            for node in ast.walk(ast.parse(TransformerManager().transform_cell(cell.source))):
                if isinstance(node, ast.FunctionDef) and node.end_lineno - node.lineno >= MAX_FUNCTION_LINES:
                    yield f"cell {index}: function {node.name} is long: move it into the package"


def _nbval(nb: NotebookNode) -> Iterator[str]:
    checked = 0
    for index, cell in enumerate(nb.cells):
        ignored = bool(UNCHECKED_TAGS & _tags(cell)) or bool(re.search(r"#\s*NBVAL_(IGNORE_OUTPUT|SKIP)", cell.source))
        kinds = [kind for output in cell.get("outputs", []) for kind in output.get("data", {})]
        html = any("Plotly.newPlot" in text for text in _texts(cell))
        if (html or any(map(FIGURES.match, kinds))) and "nbval-ignore-output" not in _tags(cell):
            yield f"cell {index}: shows a figure: tag it nbval-ignore-output, check its numbers in a table before it"
        printed = any(o.output_type == "stream" and o.name == "stdout" for o in cell.get("outputs", []))
        checked += not ignored and (printed or any(kind.startswith("text/") for kind in kinds))
    if checked < MIN_CHECKED_CELLS:
        yield f"has {checked} cells whose output nbval checks, must have {MIN_CHECKED_CELLS}: show facts that stay true"


def _parameters(path: Path, nb: NotebookNode, params: type[BaseModel] | None) -> Iterator[str]:
    """The cell, papermill (which reads it line by line, and loses what it cannot parse) and the class agree."""
    cells = [cell for cell in nb.cells if "parameters" in _tags(cell)]
    if len(cells) != 1 or params is None:
        yield f"has {len(cells)} cells tagged `parameters`, must have 1, and metadata.specnb.params names their class"
        return
    shown = declared(cells[0].source)
    expected = params().model_dump(mode="json")
    for name in sorted(set(shown) | set(expected)):
        here, there = (json.dumps(values.get(name, "(none)")) for values in (shown, expected))
        if here != there:
            yield f"parameter {name} is {here} in the notebook, {there} in {params.__name__}"
    if lost := set(shown) ^ set(papermill.inspect_notebook(path)):
        yield f"papermill loses parameters {sorted(lost)}: one line each, no second `=`"


def _tags(cell: NotebookNode) -> set[str]:
    return set(cell.metadata.get("tags", []))


def _texts(cell: NotebookNode) -> Iterator[str]:
    """Every text that the outputs of a cell hold, pictures aside."""
    for output in cell.get("outputs", []):
        yield output.get("text", "")
        for kind, value in output.get("data", {}).items():
            if not kind.startswith("image/"):
                yield value if isinstance(value, str) else json.dumps(value)


if __name__ == "__main__":
    for word in sys.argv[1:]:
        normalise(Path(word))
