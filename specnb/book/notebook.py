"""A notebook as a file: find it, read it, and check what it is to be told.

The cell tagged `parameters` declares names with defaults, one a line (`temperature: float = 0.0  # 0 is greedy`).
It is read as Python syntax, never run, so defaults must be literals.
"""

import ast
import json
import re
import warnings
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from types import GenericAlias
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import TypeAdapter, ValidationError

from specnb.errors import InputError
from specnb.io import digest, project_dir, read_bytes

if TYPE_CHECKING:
    from nbformat import NotebookNode

MAX_BYTES = 20_000_000

_NUMBERED = re.compile(r"\d\d_.*\.ipynb")
_SIMPLE = {"int": int, "float": float, "str": str, "bool": bool, "list": list, "dict": dict}
_WORDS = {"true": True, "false": False, "none": None, "null": None}


class Source(NamedTuple):
    """A notebook as read: where it lies, its content in nbformat 4.5, the sha256 of its bytes."""

    path: Path
    nb: "NotebookNode"
    sha256: str


class Parameter(NamedTuple):
    """One declared parameter; `type` (`int`, `list[float]`, …) is that of the default where no annotation names one."""

    name: str
    type: Any
    default: Any


def notebooks(folder: Path | None = None) -> list[Path]:
    """The numbered notebooks (`01_topic.ipynb`) of `folder` (default `notebooks/` of the checkout), in order."""
    folder = project_dir() / "notebooks" if folder is None else Path(folder)
    if not folder.is_dir():
        raise InputError(f"no folder {folder}: notebooks are looked for there; give the path of a notebook instead")
    return sorted(path for path in folder.iterdir() if path.is_file() and _NUMBERED.fullmatch(path.name))


def find_notebook(name: str | Path, folder: Path | None = None) -> Path:
    """The notebook meant by a path, or by a name with or without `.ipynb`. InputError lists what there is."""
    if Path(name).suffix == ".ipynb" and Path(name).is_file():
        return Path(name).absolute()
    known = {path.stem: path for path in notebooks(folder)}
    stem = str(name).removesuffix(".ipynb")
    if stem not in known:
        raise InputError(f"no notebook {str(name)!r}: give a path, or one of {', '.join(known) or '(there are none)'}")
    return known[stem]


def read_notebook(path: Path) -> Source:
    """Read and validate a Python notebook of at most 20 MB. Raises InputError for anything else."""
    import nbformat

    path = Path(path)
    data = read_bytes(path, MAX_BYTES)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of cells without an id; they get one here
            nb = nbformat.convert(nbformat.reader.reads(data.decode()), 4)
            nb = nbformat.v4.upgrade(nb)
            nbformat.validate(nb)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, nbformat.ValidationError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise InputError(f"{path} is not a valid notebook: {reason}; open and save it in Jupyter") from error
    spec = nb.metadata.get("kernelspec", {})
    if spec.get("language", "python") != "python":
        raise InputError(f"{path} is written in {spec['language']!r}: only Python notebooks run here")
    return Source(path, nb, digest(data))


def parameters_of(source: Source) -> dict[str, Parameter]:
    """The parameters that the notebook declares, by name, in order; empty without a `parameters` cell.

    Raises InputError where the cell is not Python, or a default is not a literal of JSON types or not of its type.
    """
    cells = (cell for cell in source.nb.cells if "parameters" in cell.metadata.get("tags", []))
    try:
        return declared(next(cells).source)
    except StopIteration:
        return {}
    except InputError as error:
        raise InputError(f"{source.path}: {error}") from error


def declared(code: str) -> dict[str, Parameter]:
    """The parameters that the text of a `parameters` cell declares. Other statements are left alone."""
    try:
        body = ast.parse(code).body
    except (SyntaxError, ValueError, RecursionError) as error:
        raise InputError(f"the `parameters` cell is not Python: {error}") from error
    parameters = {}
    for statement in body:
        match statement:
            case ast.AnnAssign(target=ast.Name(id=name), annotation=annotation, value=ast.expr() as value):
                parameters[name] = _parameter(name, annotation, value)
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                parameters[name] = _parameter(name, None, value)
    return parameters


def resolve(source: Source, given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Check `given` against what the notebook declares: (the given values, all values with the defaults).

    An int given for a float becomes a float; nothing else is converted. Raises InputError for an unknown name and
    for a value of the wrong type.
    """
    parameters = parameters_of(source)
    for name in given:
        if name not in parameters:
            close = get_close_matches(name, parameters, n=3) or list(parameters)
            has = f"did you mean {' or '.join(close)}?" if close else "it has no parameters"
            raise InputError(f"{source.path.name} has no parameter {name!r}: {has}")
    checked = {name: _checked(parameters[name], value) for name, value in given.items()}
    return checked, {name: parameter.default for name, parameter in parameters.items()} | checked


def parse_parameters(pairs: Iterable[tuple[str, str]]) -> dict[str, Any]:
    """Values typed on a command line, as JSON types: `4`, `0.7`, `[4, 8]`, `true`, `none`; all else is text.

    `4,8,12` stays text; `'"42"'` is the text 42. Raises InputError for a name given twice.
    """
    values: dict[str, Any] = {}
    for name, text in pairs:
        if name in values:
            raise InputError(f"parameter {name!r} is given twice ({values[name]!r} and {text!r}): give it once")
        try:
            values[name] = json.loads(text)
        except (ValueError, RecursionError):
            values[name] = _WORDS.get(text.strip().lower(), text)
    return values


def _parameter(name: str, annotation: ast.expr | None, value: ast.expr) -> Parameter:
    try:
        default = ast.literal_eval(value)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError) as error:
        raise InputError(f"the default of parameter {name} is not a literal: {ast.unparse(value)}") from error
    parameter = Parameter(name, _annotated(annotation) or _type_of(default), None)
    return parameter._replace(default=_checked(parameter, default))


def _annotated(node: ast.expr | None) -> Any:
    """The type that an annotation names, None where it is none of the simple ones."""
    match node:
        case ast.Name(id=name):
            return _SIMPLE.get(name)
        case ast.Subscript(value=ast.Name(id="list"), slice=item):
            return (inner := _annotated(item)) and list[inner]
        case ast.Subscript(value=ast.Name(id="dict"), slice=ast.Tuple(elts=[ast.Name(id="str"), item])):
            return (inner := _annotated(item)) and dict[str, inner]
    return None


def _type_of(value: Any) -> Any:
    """The type that a default stands for: a list of items of one type takes only such items."""
    if value is None:
        return Any
    if isinstance(value, list) and len({type(item) for item in value}) == 1:
        return list[_type_of(value[0])]
    return type(value)


def _checked(parameter: Parameter, value: Any) -> Any:
    try:
        return TypeAdapter(parameter.type).validate_python(value, strict=True)
    except ValidationError as error:
        wanted = parameter.type if isinstance(parameter.type, GenericAlias) else parameter.type.__name__
        hint = "; text that looks like a number is quoted twice: '\"42\"'" if parameter.type is str else ""
        raise InputError(
            f"parameter {parameter.name} takes {wanted}, got {value!r} ({type(value).__name__}){hint}"
        ) from error
