"""Checks that the stored outputs of a committed notebook are current, small, portable and compared.

nbval compares nothing if a cell has no execution count; widget state takes megabytes; a path of the
author's machine exists nowhere else. `problems` reports these, and `normalise` removes what tools
add to a notebook: `python -m tests.book.hygiene notebooks/01_k_sweep.ipynb`.
"""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import nbformat
from nbconvert.preprocessors import CoalesceStreamsPreprocessor
from nbformat import NotebookNode

from specnb import params
from specnb.book.notebook import declared
from specnb.io import write_atomic

MAX_BYTES, MAX_PICTURE_BYTES, MAX_CELLS, MIN_CHECKED_CELLS = 220_000, 1_000_000, 24, 2
MAX_WORDS, MAX_BOX_WORDS = 900, 80
START = "> **In short.**"
LEFTOVERS = {"widgets", "papermill"}
CELL_LEFTOVERS = {"papermill", "execution", "collapsed"}
UNCHECKED = "nbval-ignore-output"
WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
FIGURES = re.compile(r"image/|application/vnd\.plotly|application/vnd\.jupyter\.widget-view")
ABSOLUTE = re.compile(
    r"(?<![\w.+/<-])/(?:home|root|work|workspace|tmp|var|opt|srv|mnt|media|usr"
    r"|Users|private|content|scratch)\b"
    r"|\bfile://"
    r"|\b[A-Za-z]:(?:\\{1,2}|/)(?:Users|Windows|Program|Temp|Documents)"
)


def problems(path: Path) -> list[str]:
    """Return the problems of a notebook, none if it is clean. Cells are counted from 0."""
    nb = nbformat.v4.reads_json(path.read_text(encoding="utf-8"))
    nbformat.validate(nb)
    return [*_notebook(path, nb), *_prose(nb), *_cells(nb), *_parameters(path, nb)]


def normalise(path: Path) -> None:
    """Rewrite the notebook without what tools add to it.

    Outputs, execution counts, ids and tags are kept, except for widgets and, in cells whose output
    is not compared, stderr (progress bars).
    """
    nb = nbformat.read(path, 4)
    for key in LEFTOVERS:
        nb.metadata.pop(key, None)
    nb.metadata.get("language_info", {}).pop("version", None)
    for cell in nb.cells:
        for key in CELL_LEFTOVERS:
            cell.metadata.pop(key, None)
        # also drops what progress bars overwrote
        CoalesceStreamsPreprocessor().preprocess_cell(cell, {}, 0)
        if not cell.metadata.get("tags", True):
            del cell.metadata["tags"]  # papermill adds an empty list to every cell
        if UNCHECKED in _tags(cell):
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
        for output in cell.get("outputs", []):
            # Widget state is never stored, and without it a viewer shows "model not found".
            output.get("data", {}).pop(WIDGET_VIEW, None)
    write_atomic(path, (nbformat.writes(nb).rstrip("\n") + "\n").encode())


def _prose(nb: NotebookNode) -> Iterator[str]:
    texts = [cell.source for cell in nb.cells if cell.cell_type == "markdown"]
    box = [line for line in texts[0].splitlines() if line.startswith(START)]
    if len(box) != 1:
        yield f"has no box in one line, '{START} …'"
    for what, part, most in (("text", texts, MAX_WORDS), ("box", box, MAX_BOX_WORDS)):
        n = sum(bool(re.search("[A-Za-z]", word)) for word in " ".join(part).split())
        if n > most:
            yield f"its {what} has {n} words, at most {most} are allowed"


def _notebook(path: Path, nb: NotebookNode) -> Iterator[str]:
    data = [output.get("data", {}) for cell in nb.cells for output in cell.get("outputs", [])]
    pictures = sum(
        len(text) for texts in data for kind, text in texts.items() if kind.startswith("image/")
    )
    large = path.stat().st_size - pictures > MAX_BYTES or pictures > MAX_PICTURE_BYTES
    if nb.nbformat_minor != 5 or large or len(nb.cells) > MAX_CELLS:
        limits = f"{MAX_BYTES} bytes, {MAX_PICTURE_BYTES} of pictures or {MAX_CELLS} cells"
        yield f"is not of nbformat 4.5, or has more than {limits}"
    if (name := nb.metadata.kernelspec.name) != "python3":
        yield f"kernelspec is {name!r}, must be 'python3': other names exist on one machine only"
    left = LEFTOVERS & set(nb.metadata) | {
        key for cell in nb.cells for key in CELL_LEFTOVERS & set(cell.metadata)
    }
    left |= {"version"} & set(nb.metadata.get("language_info", {}))
    if left:
        yield f"metadata {sorted(left)} are left over: normalise the notebook"


def _cells(nb: NotebookNode) -> Iterator[str]:
    ran = checked = 0
    for index, cell in enumerate(nb.cells):
        texts = list(_texts(cell))
        if match := next(filter(None, map(ABSOLUTE.search, (cell.source, *texts))), None):
            yield (
                f"cell {index}: holds an absolute path: "
                f"{match.string[match.start() : match.end() + 30]!r}"
            )
        if cell.cell_type != "code":
            continue
        ran += 1
        if not cell.source.strip() or cell.execution_count != ran:
            yield (
                f"cell {index}: empty, or execution count {cell.execution_count}, "
                f"must be {ran}: run all"
            )
        if any(output.output_type == "error" for output in cell.outputs):
            yield f"cell {index}: holds an error output"
        if re.search(r"^\s*(def|class) ", cell.source, re.MULTILINE):
            yield f"cell {index}: defines something: move it into the package"
        kinds = [kind for output in cell.outputs for kind in output.get("data", {})]
        if UNCHECKED not in _tags(cell):
            checked += any(texts)
            if any(map(FIGURES.match, kinds)):
                yield (
                    f"cell {index}: shows a figure: tag it {UNCHECKED}, "
                    "check its numbers in a table before it"
                )
    if checked < MIN_CHECKED_CELLS:
        yield (
            f"has {checked} cells whose output nbval checks, must have {MIN_CHECKED_CELLS}: "
            "show facts that stay true"
        )


def _parameters(path: Path, nb: NotebookNode) -> Iterator[str]:
    """Yield the differences between the parameters cell and its class."""
    cells = [cell for cell in nb.cells if "parameters" in _tags(cell)]
    kind = getattr(params, nb.metadata.get("specnb", {}).get("params", ""), None)
    if len(cells) != 1 or kind is None:
        yield (
            f"has {len(cells)} cells tagged `parameters`, must have 1, "
            "and metadata.specnb.params names their class"
        )
        return
    shown = declared(cells[0].source)
    expected = kind(budget="quick").model_dump(mode="json") | dict.fromkeys(kind.sizes)
    if json.dumps(shown, sort_keys=True) != json.dumps(expected, sort_keys=True):
        yield f"parameters are {shown} in the notebook, {expected} in {kind.__name__}"
    for name, size in kind.sizes.items():
        sizes = f"{_size(size['quick'])}, {_size(getattr(kind(), name))} or {_size(size['full'])}"
        comment = f"{name} = None  # by the budget: {sizes}"
        if comment not in cells[0].source:
            yield f"the parameters lack the line {comment!r}"


def _size(value: object) -> str:
    """Return a size as the comment shows it: a number of names ("all" if empty), or the value."""
    names = isinstance(value, list) and all(isinstance(name, str) for name in value)
    return f"{len(value) or 'all'}" if names else str(value)


def _tags(cell: NotebookNode) -> set[str]:
    return set(cell.metadata.get("tags", []))


def _texts(cell: NotebookNode) -> Iterator[str]:
    """Yield the texts in the outputs of a cell, except pictures."""
    for output in cell.get("outputs", []):
        yield output.get("text", "")
        for kind, value in output.get("data", {}).items():
            if not kind.startswith("image/"):
                yield value if isinstance(value, str) else json.dumps(value)


if __name__ == "__main__":
    for word in sys.argv[1:]:
        normalise(Path(word))
