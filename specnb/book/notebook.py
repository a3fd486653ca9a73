"""Find and read notebook files and check their parameters; functions for running notebooks.

The cell tagged `parameters` declares names with defaults, one per line, such as
`temperature: float = 0.0  # 0 is greedy`. It is parsed as Python and never run, so defaults must be
literals.
"""

import ast
import json
import os
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import nbformat
from nbformat import NotebookNode

from specnb.errors import InputError, require_known
from specnb.io import JsonObject, comma_list, digest, project_dir, read_bytes, reading
from specnb.params import BUDGET, NotebookParams, Params, StartParams

if TYPE_CHECKING:
    from specnb.lm.base import LanguageModel
    from specnb.records import RunRecord

_WORDS = {"true": True, "false": False, "none": None, "~": None}


class Source(NamedTuple):
    """A notebook file: its path, its content in nbformat 4.5, and the SHA-256 of its bytes."""

    path: Path
    nb: NotebookNode
    sha256: str


def notebooks() -> list[Path]:
    """Return the checkout's numbered notebooks (01_topic.ipynb). Raises InputError without one."""
    folder = project_dir() / "notebooks"
    if not folder.is_dir():
        raise InputError(
            f"got no notebooks in {folder.parent}, expected a checkout: "
            "give a path, or clone specnb"
        )
    return sorted(folder.glob("[0-9][0-9]_*.ipynb"))


def find_notebook(name: str | Path) -> Path:
    """Return the notebook with this path, name (with or without `.ipynb`) or unique prefix (`01`).

    Raises InputError that lists similar names.
    """
    if (path := Path(name)).is_file():
        return path.absolute()
    by_stem = {path.stem: path for path in notebooks()}
    stem = str(name).removesuffix(".ipynb")
    fitting = [other for other in by_stem if other.startswith(stem)]
    if len(fitting) != 1:
        require_known("notebook", stem, by_stem)
    return by_stem[fitting[0]]  # a name sorts before longer names that start with it


def read_notebook(path: Path) -> Source:
    """Read and validate a notebook. Raises InputError for an invalid file."""
    data = read_bytes(path)
    with reading(f"{path}: the notebook"):
        nb = nbformat.v4.upgrade(nbformat.reads(data.decode(), as_version=4))
        nbformat.validate(nb)
    return Source(path, nb, digest(data))


def declared(code: str) -> JsonObject:
    """Return the names and defaults that a `parameters` cell declares, in order.

    Other statements are ignored. Raises InputError if the text is not Python, or a default is not a
    literal.
    """
    defaults = {}
    with reading("the `parameters` cell"):
        for statement in ast.parse(code).body:
            match statement:
                case (
                    ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value)
                    | ast.Assign(targets=[ast.Name(id=name)], value=value)
                ):
                    with reading(f"the literal {ast.unparse(statement)!r}"):
                        defaults[name] = ast.literal_eval(value)
    return defaults


def resolve_params(
    source: Source, given: JsonObject, budget: str | None = None
) -> tuple[JsonObject, ...]:
    """Check `given` against the parameters of a notebook; return the given values, and all values.

    The notebook's metadata may name a class of `specnb.params` as `{"specnb": {"params": NAME}}`.
    This class checks the values and fills in those that depend on the budget. The budget comes from
    `given`, `budget`, the environment or the cell, in this order of precedence. Raises InputError
    for an unknown name or an invalid value.
    """
    try:
        cell, model = _declared_by(source)
        known = defaults(source)
        for name in given:
            require_known("parameter", name, cell)
        given = {name: _fitted(value, known[name]) for name, value in given.items()}
        resolved = cell | given
        if model:
            if "budget" not in given and (chosen := budget or os.environ.get(BUDGET)):
                resolved["budget"] = chosen
            resolved = model.checked(**resolved).model_dump(mode="json")
    except InputError as error:
        raise InputError(f"{source.path.name}: {error}") from error
    return {name: resolved[name] for name in given}, resolved


def defaults(source: Source) -> JsonObject:
    """Return the declared defaults; for values that depend on the budget, the class's default."""
    cell, model = _declared_by(source)
    of_class = vars(model.model_construct()) if model else {}
    return {name: of_class.get(name) if value is None else value for name, value in cell.items()}


def _declared_by(source: Source) -> tuple[JsonObject, type[Params] | None]:
    """Return the defaults of the `parameters` cell, and the class that checks them (or None)."""
    cells = [
        cell.source for cell in source.nb.cells if "parameters" in cell.metadata.get("tags", [])
    ]
    models = {model.__name__: model for model in NotebookParams.__subclasses__()}
    with reading("the metadata `specnb`"):
        if name := source.nb.metadata.get("specnb", {}).get("params"):
            require_known("class of parameters", name, models)
    return declared(cells[0]) if cells else {}, models.get(name)


def _fitted(value: Any, default: Any) -> Any:
    """Return `value`, converted to a list if the default is a list: a string is split at commas.

    None stays None, because the budget sets the value.
    """
    if value is None or isinstance(value, list) or not isinstance(default, list):
        return value
    if not isinstance(value, str):
        return [value]
    words = comma_list(value)
    return words if default and isinstance(default[0], str) else [parsed(word) for word in words]


def parse_parameters(words: Iterable[str]) -> JsonObject:
    """Parse `NAME=VALUE` words; values are JSON (`4`, `[4, 8]`, `true`), `none` or text.

    `4,8,12` is text, and so is `'"42"'`. Raises InputError for a word without `=`, and for a
    repeated name.
    """
    values = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not equals or name in values:
            raise InputError(
                f"got {name!r} {'twice' if equals else 'alone'}, "
                "expected NAME=VALUE, each name once"
            )
        values[name] = parsed(text)
    return values


def parsed(text: str) -> Any:
    """Parse a value of a command line: JSON, true, false, none or ~ in any case, or else text."""
    try:
        return json.loads(text)
    except ValueError:
        return _WORDS.get(text.strip().lower(), text)


def start(kind: type[NotebookParams], cell: Mapping[str, Any]) -> NotebookParams:
    """Return the parameters of the running notebook from its `cell` (`globals()`).

    Afterwards, tables show long texts in full, and tables of a quick run are marked as such.
    """
    import pandas as pd
    from IPython import get_ipython

    from specnb.book.style import QUICK

    pd.set_option("display.max_colwidth", None)
    params = kind.from_cell(cell)
    if shell := get_ipython():
        formatter = shell.display_formatter.formatters["text/html"]
        formatter.pop(pd.DataFrame, None)
        measures = params.sizes and getattr(params, "trace", "new") == "new"  # not an earlier run
        if measures and params.budget == "quick":
            formatter.for_type(
                pd.DataFrame, lambda table: f'{table._repr_html_()}<p class="quick">{QUICK}</p>'
            )
    return params


def try_once(model: "LanguageModel", params: StartParams, drafter: str) -> "RunRecord":
    """Run the prompt of `params` and others of its category, plain and speculative, interleaved."""
    from specnb.decode.generate import generate
    from specnb.measure.baseline import BaselineTimer
    from specnb.measure.bench import interleaved
    from specnb.measure.experiment import Experiment
    from specnb.prompts import prompts

    by_id = {prompt.id: prompt for prompt in prompts()}
    require_known("prompt", params.prompt, by_id)
    first = by_id[params.prompt]
    chosen = [*dict.fromkeys([first, *prompts(first.category)])][: params.n_prompts]
    study = Experiment("00_start_here", params, chosen, model)
    settings = params.model_dump(include={"temperature", "max_new_tokens", "seed"})
    plain = partial(generate, model, **settings)
    methods = {"plain": plain, "drafted": partial(plain, drafter=drafter, k=params.k)}
    with BaselineTimer(model) as timer:
        runs = list(interleaved(methods, chosen, timer=timer))
        study.measured["baseline"] = timer.baseline().model_dump()
    runs.sort(key=lambda run: (run.prompt, run.method == "drafted"))
    study.generations += [run.generation for run in runs]
    return study.record()
