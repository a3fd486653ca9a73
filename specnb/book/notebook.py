"""A notebook as a file: find it, read it, check its parameters; and what a running one calls.

The cell tagged `parameters` declares names with defaults, one a line (`temperature: float = 0.0  # 0 is greedy`).
It is read as Python syntax, never run, so defaults must be literals.
"""

import ast
import json
import os
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import nbformat
import pandas as pd
from IPython import get_ipython
from nbformat import NotebookNode

from specnb.book.style import QUICK
from specnb.decode.generate import generate
from specnb.errors import InputError, require_known
from specnb.io import comma_list, digest, project_dir, read_bytes, reading
from specnb.lm.base import LanguageModel
from specnb.measure.baseline import time_baseline
from specnb.measure.bench import interleaved
from specnb.measure.experiment import Experiment
from specnb.params import BUDGET, NotebookParams, Params, StartParams
from specnb.prompts import prompts
from specnb.records import RunRecord

_WORDS = {"true": True, "false": False, "none": None, "~": None}


class Source(NamedTuple):
    """A notebook as read: where it lies, its content in nbformat 4.5, the sha256 of its bytes."""

    path: Path
    nb: NotebookNode
    sha256: str


def notebooks() -> list[Path]:
    """Return the numbered notebooks (`01_topic.ipynb`) of the checkout, in order. Raises InputError away from it."""
    folder = project_dir() / "notebooks"
    if not folder.is_dir():
        raise InputError(f"got no notebooks in {folder.parent}, expected a checkout: give a path, or clone specnb")
    return sorted(folder.glob("[0-9][0-9]_*.ipynb"))


def find_notebook(name: str | Path) -> Path:
    """Return the notebook meant by a path, a name with or without `.ipynb`, or a beginning that only it has (`01`).

    InputError names those that are close.
    """
    if (path := Path(name)).is_file():
        return path.absolute()
    known, stem = {path.stem: path for path in notebooks()}, str(name).removesuffix(".ipynb")
    fitting = [other for other in known if other.startswith(stem)]
    if len(fitting) != 1:
        require_known("notebook", stem, known)
    return known[fitting[0]]  # a name comes before those that it begins


def read_notebook(path: Path) -> Source:
    """Read and validate a notebook. Raises InputError for anything else."""
    data = read_bytes(path)
    with reading(f"{path}: the notebook"):
        nb = nbformat.v4.upgrade(nbformat.reads(data.decode(), as_version=4))
        nbformat.validate(nb)
    return Source(path, nb, digest(data))


def declared(code: str) -> dict[str, Any]:
    """Return names and defaults that the text of a `parameters` cell declares, in order; other statements are ignored.

    Raises InputError where it is not Python, or a default is not a literal.
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


def resolve_params(source: Source, given: Mapping[str, Any], budget: str | None = None) -> tuple[dict[str, Any], ...]:
    """Check `given` against what the notebook declares: (the given values, all values with the defaults).

    Where the notebook's metadata name a class of `specnb.params` (`{"specnb": {"params": "KSweepParams"}}`), this
    checks the values, and fills in those that the budget sets: that of `given`, else `budget`, else that of the
    environment, else that of the cell. Raises InputError for an unknown name and for a value that does not fit.
    """
    try:
        (cell, model), known = _declared_by(source), defaults(source)
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


def defaults(source: Source) -> dict[str, Any]:
    """Return what the notebook declares, with the default of its class where the cell leaves a value to the budget."""
    cell, model = _declared_by(source)
    of_class = vars(model.model_construct()) if model else {}
    return {name: of_class.get(name) if value is None else value for name, value in cell.items()}


def _declared_by(source: Source) -> tuple[dict[str, Any], type[Params] | None]:
    """Return the defaults of the `parameters` cell, and the class that checks them, if any."""
    cells = [cell.source for cell in source.nb.cells if "parameters" in cell.metadata.get("tags", [])]
    models = {model.__name__: model for model in NotebookParams.__subclasses__()}
    with reading("the metadata `specnb`"):
        if name := source.nb.metadata.get("specnb", {}).get("params"):
            require_known("class of parameters", name, models)
    return declared(cells[0]) if cells else {}, models.get(name)


def _fitted(value: Any, default: Any) -> Any:
    """Return `value`, as a list where the default is one: words between commas, or one item.

    None stays None: the budget chooses.
    """
    if value is None or isinstance(value, list) or not isinstance(default, list):
        return value
    if not isinstance(value, str):
        return [value]
    words = comma_list(value)
    return words if default and isinstance(default[0], str) else [parsed(word) for word in words]


def parse_parameters(words: Iterable[str]) -> dict[str, Any]:
    """Return values typed on a command line as `NAME=VALUE`, in JSON types: `4`, `[4, 8]`, `true`, `none`; or text.

    `4,8,12` stays text; `'"42"'` is the text 42. Raises InputError for a name without a value or given twice.
    """
    values = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not equals or name in values:
            raise InputError(f"got {name!r} {'twice' if equals else 'alone'}, expected NAME=VALUE, each name once")
        values[name] = parsed(text)
    return values


def parsed(text: str) -> Any:
    """Return a value typed on a command line, as a JSON type."""
    try:
        return json.loads(text)
    except ValueError:
        return _WORDS.get(text.strip().lower(), text)


def start(kind: type[NotebookParams], cell: Mapping[str, Any]) -> NotebookParams:
    """Return the parameters of the running notebook from its `cell` (`globals()`).

    Tables will show sentences whole, and those of a quick run that they are of one.
    """
    pd.set_option("display.max_colwidth", None)
    params = kind.from_cell(cell)
    if shell := get_ipython():
        formatter = shell.display_formatter.formatters["text/html"]
        formatter.pop(pd.DataFrame, None)
        measures = params.sizes and getattr(params, "trace", "new") == "new"  # else it shows what was measured before
        if measures and params.budget == "quick":
            formatter.for_type(pd.DataFrame, lambda table: f'{table._repr_html_()}<p class="quick">{QUICK}</p>')
    return params


def try_once(model: LanguageModel, params: StartParams, drafter: str) -> RunRecord:
    """Write the prompt of `params`, then others of its category, plainly and with drafts, in turn after a warm-up."""
    by_id = {prompt.id: prompt for prompt in prompts()}
    require_known("prompt", params.prompt, by_id)
    first = by_id[params.prompt]
    chosen = [*dict.fromkeys([first, *prompts(first.category)])][: params.n_prompts]
    study = Experiment("00_start_here", params, chosen, model)
    settings = params.model_dump(include={"temperature", "max_new_tokens", "seed"})
    plain = partial(generate, model, **settings)
    methods = {"plain": plain, "drafted": partial(plain, drafter=drafter, k=params.k)}
    runs = sorted(interleaved(methods, chosen), key=lambda run: (run.prompt, run.method == "drafted"))
    study.generations += [run.generation for run in runs]
    study.measured["baseline"] = time_baseline(model, (chosen * 2)[:5]).model_dump()
    return study.record()
