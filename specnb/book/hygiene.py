"""What a committed notebook must be, so that its stored outputs are true, small, portable and checked.

nbval passes vacuously where a cell has no execution count; papermill loses a parameter whose line it cannot parse;
widget state makes a notebook five megabytes; a path of the author's machine is nobody else's. `problems` finds
these, `normalise` removes what tools leave behind.
"""

import ast
import importlib
import inspect
import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel, ValidationError

from specnb.book.notebook import declared, read_notebook
from specnb.errors import InputError
from specnb.io import write_atomic

if TYPE_CHECKING:
    from nbformat import NotebookNode

MAX_BYTES = 200_000
MAX_CELLS = 30
MAX_FUNCTION_LINES = 10
MIN_CHECKED_CELLS = 2

LEFTOVERS = {"widgets", "papermill"}
CELL_LEFTOVERS = {"papermill", "execution", "collapsed"}
UNCHECKED_TAGS = {"nbval-ignore-output", "nbval-skip"}
FIGURES = re.compile(r"image/|application/vnd\.plotly|application/vnd\.jupyter\.widget-view")

_ANNOTATION = re.compile(r"\w[\w\[\],\s]*")  # what papermill's own pattern takes
_ABSOLUTE = re.compile(
    r"(?<![\w.+/<-])/(?:home|root|work|workspace|tmp|var|opt|srv|mnt|media|usr|Users|private|content|scratch)\b"
    r"|\bfile://"
    r"|\b[A-Za-z]:(?:\\{1,2}|/)(?:Users|Windows|Program|Temp|Documents)"
    r"|\b[A-Z]:\\{1,2}(?![nrtbfavxuN0])\w"  # but not the "K:\n" of a text
)


def problems(path: Path, classes: ModuleType | None = None) -> list[str]:
    """What is wrong with the committed notebook at `path`; empty when it is clean.

    `classes` (default `specnb.params`) holds the parameter class that the notebook's metadata names as
    `{"specnb": {"params": "KSweepParams"}}`. Cells are counted from 0.
    """
    import nbformat

    path = Path(path)
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            return [f"has {path.stat().st_size} bytes, the limit is {MAX_BYTES}: smaller figures, no widget state"]
        raw = json.loads(data)
        found = list(_format_problems(raw))
        nb = None if found else nbformat.v4.reads_json(data.decode())
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        return [f"is not a notebook: {error!r}"]
    if nb is None:
        return found
    checks = (_metadata, _counts, _outputs, _size, _functions, _paths, _nbval)
    found = [problem for check in checks for problem in check(nb)]
    return found + list(_parameters(nb, classes or importlib.import_module("specnb.params")))


def normalise(path: Path) -> bool:
    """Rewrite the notebook without what tools leave in it; True when the file changed.

    Outputs, execution counts, ids and tags stay, but for widgets, and for what progress bars wrote to stderr in cells
    whose output is not compared. Raises InputError, and leaves the file alone, where it is no notebook.
    """
    import nbformat

    path = Path(path)
    nb = read_notebook(path).nb
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
            output.get("data", {}).pop("application/vnd.jupyter.widget-view+json", None)
    data = (nbformat.writes(nb).rstrip("\n") + "\n").encode()
    if data == path.read_bytes():
        return False
    write_atomic(path, data)
    return True


def _format_problems(raw: Any) -> Iterator[str]:
    """On the bare JSON: nbformat's own reader repairs missing and doubled ids without a word."""
    from nbformat.validator import iter_validate

    if (raw["nbformat"], raw["nbformat_minor"]) != (4, 5):
        yield f"is nbformat {raw['nbformat']}.{raw['nbformat_minor']}, must be 4.5: open and save it in JupyterLab"
        return
    for error in iter_validate(raw, version=4, version_minor=5):
        yield f"is not valid: {str(error).splitlines()[0]}"
    ids = [cell.get("id") for cell in raw["cells"]]
    yield from (f"cell id {each!r} occurs twice" for each in sorted({i for i in ids if i and ids.count(i) > 1}))


def _metadata(nb: "NotebookNode") -> Iterator[str]:
    if (name := nb.metadata.get("kernelspec", {}).get("name")) != "python3":
        yield f"kernelspec is {name!r}, must be 'python3': other names exist on one machine only"
    for key in sorted(LEFTOVERS & set(nb.metadata)):
        yield f"metadata.{key} is left over: normalise it"
    if "version" in nb.metadata.get("language_info", {}):
        yield "metadata.language_info.version is left over: normalise it"
    for index, cell in enumerate(nb.cells):
        for key in sorted(CELL_LEFTOVERS & set(cell.metadata)):
            yield f"cell {index}: metadata.{key} is left over: normalise it"
        if "injected-parameters" in _tags(cell):
            yield f"cell {index}: papermill's injected parameters are committed: delete the cell"


def _counts(nb: "NotebookNode") -> Iterator[str]:
    code = [(index, cell) for index, cell in enumerate(nb.cells) if cell.cell_type == "code"]
    for expected, (index, cell) in enumerate(code, 1):
        if not cell.source.strip():
            yield f"cell {index}: empty: delete it"
        if cell.execution_count != expected:
            yield f"cell {index}: execution count {cell.execution_count}, must be {expected}: run all from the top"


def _outputs(nb: "NotebookNode") -> Iterator[str]:
    for index, cell in enumerate(nb.cells):
        for output in cell.get("outputs", []):
            if output.output_type == "error":
                yield f"cell {index}: holds an error output ({output.ename})"


def _size(nb: "NotebookNode") -> Iterator[str]:
    if len(nb.cells) > MAX_CELLS:
        yield f"has {len(nb.cells)} cells, the limit is {MAX_CELLS}: one notebook, one question"


def _functions(nb: "NotebookNode") -> Iterator[str]:
    from IPython.core.inputtransformer2 import TransformerManager

    for index, cell in enumerate(nb.cells):
        if cell.cell_type != "code":
            continue
        try:
            tree = ast.parse(TransformerManager().transform_cell(cell.source))
        except (SyntaxError, ValueError) as error:
            yield f"cell {index}: is not Python: {error}"
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = node.end_lineno - node.lineno + 1
                if lines > MAX_FUNCTION_LINES:
                    yield f"cell {index}: function {node.name} has {lines} lines: move it into the package"


def _paths(nb: "NotebookNode") -> Iterator[str]:
    for index, cell in enumerate(nb.cells):
        for text in (cell.source, *_texts(cell)):
            if match := _ABSOLUTE.search(text):
                around = text[max(0, match.start() - 10) : match.end() + 30]
                yield f"cell {index}: holds an absolute path: {around!r}"
                break


def _nbval(nb: "NotebookNode") -> Iterator[str]:
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


def _parameters(nb: "NotebookNode", classes: ModuleType) -> Iterator[str]:
    cells = [cell for cell in nb.cells if "parameters" in _tags(cell)]
    if len(cells) != 1:
        yield f"has {len(cells)} cells tagged `parameters`, must have 1"
        return
    try:
        shown = declared(cells[0].source)
    except InputError as error:
        yield str(error)
        return
    yield from _line_problems(cells[0].source)
    name = nb.metadata.get("specnb", {}).get("params", "")
    wanted = getattr(classes, name, None) if isinstance(name, str) and name else None
    if not (inspect.isclass(wanted) and issubclass(wanted, BaseModel)):
        yield f"metadata.specnb.params is {name!r}, must name a parameter class of {classes.__name__}"
        return
    try:
        defaults = wanted().model_dump(mode="json")
    except ValidationError as error:
        yield f"{name} has no defaults for all its fields: {error}"
        return
    for each in sorted(set(shown) ^ set(defaults)):
        yield f"parameter {each} is only in {'the notebook' if each in shown else name}"
    for each in (each for each in shown if each in defaults):
        if json.dumps(shown[each].default) != json.dumps(defaults[each]):
            yield f"parameter {each} is {shown[each].default!r} in the notebook, {defaults[each]!r} in {name}"
        kind, field = _type_name(shown[each].type), _type_name(wanted.model_fields[each].annotation)
        if kind != field:
            yield f"parameter {each} is annotated {kind} in the notebook, {field} in {name}"


def _line_problems(code: str) -> Iterator[str]:
    """papermill reads the cell line by line with a pattern; what does not match is lost without an error."""
    lines = code.splitlines()
    for statement in ast.parse(code).body:
        line = lines[statement.lineno - 1]
        match statement:
            case ast.AnnAssign(target=ast.Name(), annotation=annotation, value=ast.expr() as value):
                if statement.end_lineno != statement.lineno or line.count("=") != 1:
                    yield f"parameter line {line!r}: one line each, and no second `=` (in a comment it hides the name)"
                if not _ANNOTATION.fullmatch(ast.unparse(annotation)):
                    yield f"parameter line {line!r}: annotate with int, float, str, bool, list[…] or dict[str, …]"
                if isinstance(value, ast.Constant) and value.value is None:
                    yield f'parameter line {line!r}: None has no type: use "" or 0 for "not given"'
            case _:
                yield f"parameter line {line!r}: must be `name: type = default  # meaning, unit`"


def _type_name(kind: Any) -> str:
    """How a type is written in a `parameters` cell: a choice is the type of its members, a tuple is a list."""
    arguments = get_args(kind)
    match get_origin(kind):
        case None:
            return kind.__name__ if inspect.isclass(kind) else str(kind)
        case origin if origin is Literal:
            return type(arguments[0]).__name__
        case origin if origin is Annotated:
            return _type_name(arguments[0])
        case origin if origin in (list, tuple):
            return f"list[{_type_name(arguments[0])}]"
    return str(kind)


def _tags(cell: "NotebookNode") -> set[str]:
    return set(cell.metadata.get("tags", []))


def _texts(cell: "NotebookNode") -> Iterator[str]:
    """Every text that the outputs of a cell hold, pictures aside."""
    for output in cell.get("outputs", []):
        yield output.get("text", "")
        yield "\n".join(output.get("traceback", []))
        for kind, value in output.get("data", {}).items():
            if not kind.startswith("image/"):
                yield value if isinstance(value, str) else json.dumps(value)
