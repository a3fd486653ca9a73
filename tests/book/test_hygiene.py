"""The committed notebooks are clean, and the checks that say so see what they are for."""

import json
import re

import nbformat
import pytest
from nbformat.v4 import new_output
from nbval.plugin import get_sanitize_patterns

from specnb.io import project_dir
from tests.book import hygiene

FOLDER = project_dir() / "notebooks"
COMMITTED = sorted(FOLDER.glob("[0-9]*.ipynb"))
SMALL = FOLDER / "08_lossless.ipynb"


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.name)
def test_committed_notebooks_are_clean(path):
    assert hygiene.problems(path) == []


def tagged(nb, tag):
    return next(c for c in nb.cells if tag in c.metadata.get("tags", []))


def with_parameter(nb, new):
    parameters = tagged(nb, "parameters")
    parameters.source = parameters.source.replace("k: int = 4", new)


def last_code(nb):
    """The last cell of code whose output is compared."""
    return [c for c in nb.cells if c.cell_type == "code" and "tags" not in c.metadata][-1]


def printing(nb, words):
    last_code(nb).update(outputs=[new_output("stream", name="stdout", text=words)])


DEFECTS = {  # what the problem names, and an edit
    "77": lambda nb: last_code(nb).update(execution_count=77),
    "error": lambda nb: last_code(nb).update(outputs=[new_output("error", ename="E", evalue="", traceback=[])]),
    "papermill": lambda nb: nb.cells[0].metadata.update(papermill={}),
    "'my-env'": lambda nb: nb.metadata.kernelspec.update(name="my-env"),
    "bytes": lambda nb: printing(nb, "x" * 200_000),
    "defines": lambda nb: last_code(nb).update(source="def f():\n    pass"),
    "has 0 cells tagged": lambda nb: tagged(nb, "parameters").metadata.update(tags=[]),
    "class": lambda nb: nb.metadata.specnb.update(params="Nope"),
    "'k': 5": lambda nb: with_parameter(nb, "k: int = 5"),
    "loses": lambda nb: with_parameter(nb, "k: int = 4  # 0 = none"),
    "figure": lambda nb: [c.metadata.update(tags=[]) for c in nb.cells[3:]],
    "has 0 cells whose": lambda nb: [c.update(outputs=[]) for c in nb.cells[3:] if "outputs" in c],
    "/home/me/x": lambda nb: nb.cells[0].update(source="See /home/me/x"),
    "/tmp/pytest-1": lambda nb: printing(nb, "saved to /tmp/pytest-1/x\n"),
}


@pytest.mark.parametrize("named", DEFECTS)
def test_each_defect_is_seen(tmp_path, named):
    nb, path = nbformat.read(SMALL, 4), tmp_path / "01_test.ipynb"
    DEFECTS[named](nb)
    path.write_text(json.dumps(nb), encoding="utf-8")
    problems = hygiene.problems(path)
    assert any(named in problem for problem in problems), problems


def test_normalise_removes_leftovers_and_nothing_else(tmp_path):
    nb, path = nbformat.read(SMALL, 4), tmp_path / "01_test.ipynb"
    nb.metadata.update(widgets={"state": {}}, papermill={"duration": 1.0})
    nb.metadata.language_info.version = "3.11.7"
    for each in nb.cells:
        each.metadata.update(papermill={"status": "completed"}, tags=each.metadata.get("tags", []))
    tagged(nb, hygiene.UNCHECKED).outputs.append(new_output("stream", name="stderr", text="50 %"))
    nbformat.write(nb, path)
    hygiene.normalise(path)
    assert path.read_text(encoding="utf-8") == SMALL.read_text(encoding="utf-8")


def test_sanitize_rules_mask_the_machine_and_nothing_else():
    masked = r"in '/tmp/pytest-1/x', C:\Users\x, 123e4567-e89b-12d3-a456-426614174000, 1.25 s, K 4, 1.25, https://a.org/tmp/x"
    for pattern, replacement in get_sanitize_patterns((FOLDER / "sanitize.cfg").read_text(encoding="utf-8")):
        masked = re.sub(pattern, replacement, masked)
    assert masked == "in 'PATH', PATH, UUID, SECONDS, K 4, 1.25, https://a.org/tmp/x"
