"""The committed notebooks are clean, and the checks that say so see what they are for."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output
from nbval.plugin import get_sanitize_patterns
from pydantic import BaseModel

from specnb import params
from specnb.paths import project_dir
from tests.book import hygiene

SHELF = project_dir() / "notebooks"
COMMITTED = sorted(SHELF.glob("[0-9]*.ipynb"))


def test_there_are_notebooks_to_check():
    assert COMMITTED, f"no notebook in {SHELF}: nothing below was checked"


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.name)
def test_committed_notebooks_are_clean(path):
    assert hygiene.problems(path, params) == []


class SweepParams(BaseModel):
    k: int = 4
    temperatures: tuple[float, ...] = (0.0, 0.7)
    engine: str = "gguf"


CLASSES = SimpleNamespace(SweepParams=SweepParams)
PARAMETERS = (
    "k: int = 4  # draft length, tokens\ntemperatures: list[float] = [0.0, 0.7]  # 0 is greedy\nengine: str = 'gguf'"
)


def clean() -> nbformat.NotebookNode:
    """A small notebook without fault: parameters, two checked tables, a figure that nbval ignores."""

    def code(count, source, output=None, tags=()):
        cell = new_code_cell(source, execution_count=count, outputs=[output] if output else [], id=f"cell-{count}")
        if tags:
            cell.metadata.tags = list(tags)
        return cell

    figure = {"application/vnd.plotly.v1+json": {"data": []}, "image/png": "iVBORw0KGgo/home/x=", "text/plain": "F()"}
    cells = [
        new_markdown_cell("# Does K pay?\nSee https://example.org/home/x and a/tmp.", id="title"),
        code(1, PARAMETERS, tags=["parameters"]),
        code(2, "print('K:\\n4')\n1 / 2", new_output("stream", name="stdout", text="K:\n4\n")),
        code(3, "%time table", new_output("execute_result", {"text/plain": "  K\n0 4"}, execution_count=3)),
        code(4, "figure", new_output("display_data", figure), tags=["nbval-ignore-output"]),
    ]
    nb = new_notebook(cells=cells)
    nb.metadata.kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nb.metadata.language_info = {"name": "python"}
    nb.metadata.specnb = {"params": "SweepParams"}
    return nb


def write(tmp_path: Path, nb) -> Path:
    path = tmp_path / "01_test.ipynb"
    path.write_text(json.dumps(nb), encoding="utf-8")
    return path


def test_a_clean_notebook_has_no_problems(tmp_path):
    assert hygiene.problems(write(tmp_path, clean()), CLASSES) == []


def cell_edit(index, **changes):
    return lambda nb: nb.cells[index].update(changes)


def parameters_edit(old, new):
    return cell_edit(1, source=PARAMETERS.replace(old, new))


def output_edit(text):
    return cell_edit(3, outputs=[new_output("stream", name="stdout", text=text)])


DEFECTS = {
    "old format": (lambda nb: nb.update(nbformat_minor=4), r"nbformat 4\.4"),
    "doubled id": (cell_edit(2, id="cell-3"), "'cell-3' occurs twice"),
    "run out of order": (cell_edit(2, execution_count=7), "cell 2: .* 7"),
    "error output": (
        cell_edit(2, outputs=[new_output("error", ename="E", evalue="", traceback=[])]),
        "cell 2: .*error",
    ),
    "widget state": (lambda nb: nb.metadata.update(widgets={}), r"metadata\.widgets"),
    "papermill cell": (lambda nb: nb.cells[0].metadata.update(papermill={}), r"cell 0: metadata\.papermill"),
    "kernel": (lambda nb: nb.metadata.kernelspec.update(name="my-env"), "'my-env'"),
    "large": (output_edit("x" * 200_000), "bytes"),
    "long": (lambda nb: nb.cells.extend(new_markdown_cell(str(i)) for i in range(26)), "31 cells"),
    "long function": (cell_edit(3, source="def f():\n" + "    x = 1\n" * 10), "cell 3: function f"),
    "no parameters": (lambda nb: nb.cells[1].metadata.update(tags=[]), "0 cells tagged"),
    "unknown class": (lambda nb: nb.metadata.specnb.update(params="Nope"), "names their class"),
    "lost name": (parameters_edit("engine: str = 'gguf'", ""), "parameter engine"),
    "other default": (parameters_edit("= 4", "= 5"), "parameter k is 5"),
    "papermill cannot read it": (parameters_edit("0 is greedy", "0 = greedy"), "papermill loses"),
    "untagged plotly": (lambda nb: nb.cells[4].metadata.update(tags=[]), "cell 4: shows a figure"),
    "only one checked": (cell_edit(3, outputs=[]), "1 cells whose output"),
    "path in source": (cell_edit(3, source="open('/home/me/x')"), "cell 3: .*/home/me/x"),
    "path in output": (output_edit("saved to /tmp/pytest-1/x\n"), "cell 3: .*absolute path"),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_each_defect_is_found(tmp_path, defect):
    edit, message = DEFECTS[defect]
    nb = clean()
    edit(nb)
    problems = hygiene.problems(write(tmp_path, nb), CLASSES)
    assert any(re.search(message, problem) for problem in problems), problems


def test_normalise_removes_leftovers_and_nothing_else(tmp_path):
    nb = clean()
    nb.metadata.update(widgets={"state": {}}, papermill={"duration": 1.0})
    nb.metadata.language_info.version = "3.11.7"
    for cell in nb.cells:
        cell.metadata.papermill = {"status": "completed"}
    nb.cells[2].metadata.update(execution={"iopub.status.busy": "now"}, collapsed=False, tags=["keep"])
    nb.cells[3].metadata.tags = []
    path = write(tmp_path, nb)
    hygiene.normalise(path)
    expected = clean()
    expected.cells[2].metadata.tags = ["keep"]
    assert nbformat.read(path, 4) == expected
    assert hygiene.problems(path, CLASSES) == []


SANITIZE = get_sanitize_patterns((SHELF / "sanitize.cfg").read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    "text, sanitized",
    [
        ("saved to '/tmp/pytest-1/x.json', done", "saved to 'PATH', done"),
        (r"C:\Users\me\x.json", "PATH"),
        ("id 123e4567-e89b-12d3-a456-426614174000", "id UUID"),
        ("took 1.25 s, then 30 ms", "took SECONDS, then SECONDS"),
        ("K 4 speed-up 1.25 tau 3.1", "K 4 speed-up 1.25 tau 3.1"),
        ("results/01_k_sweep/x", "results/01_k_sweep/x"),
        ("https://example.org/tmp/x", "https://example.org/tmp/x"),
    ],
)
def test_sanitize_rules_mask_the_machine_and_nothing_else(text, sanitized):
    for pattern, replacement in SANITIZE:
        text = re.sub(pattern, replacement, text)
    assert text == sanitized
