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


def parameters_edit(new):
    def edit(nb):
        parameters = tagged(nb, "parameters")
        parameters.source = parameters.source.replace("k: int = 4", new)

    return edit


def output_edit(words):
    return lambda nb: nb.cells[-2].update(outputs=[new_output("stream", name="stdout", text=words)])


DEFECTS = {  # an edit, and what the problem names
    "run out of order": (lambda nb: nb.cells[-2].update(execution_count=77), "77"),
    "error": (
        lambda nb: nb.cells[-2].update(outputs=[new_output("error", ename="E", evalue="", traceback=[])]),
        "error",
    ),
    "widget state": (lambda nb: nb.metadata.update(widgets={}), "widgets"),
    "papermill cell": (lambda nb: nb.cells[0].metadata.update(papermill={}), "papermill"),
    "kernel": (lambda nb: nb.metadata.kernelspec.update(name="my-env"), "'my-env'"),
    "large": (output_edit("x" * 200_000), "bytes"),
    "a function": (lambda nb: nb.cells[-2].update(source="def f():\n    pass"), "defines"),
    "no parameters": (lambda nb: tagged(nb, "parameters").metadata.update(tags=[]), "0 cells"),
    "unknown class": (lambda nb: nb.metadata.specnb.update(params="Nope"), "class"),
    "other default": (parameters_edit("k: int = 5"), "'k': 5"),
    "papermill cannot read it": (parameters_edit("k: int = 4  # 0 = none"), "loses"),
    "untagged figures": (lambda nb: [c.metadata.update(tags=[]) for c in nb.cells[-4:]], "figure"),
    "too few checked": (lambda nb: [c.update(outputs=[]) for c in nb.cells[3:] if "outputs" in c], "0 cells"),
    "path in source": (lambda nb: nb.cells[0].update(source="See /home/me/x"), "/home/me/x"),
    "path in output": (output_edit("saved to /tmp/pytest-1/x\n"), "/tmp/pytest-1"),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_each_defect_is_seen(tmp_path, defect):
    edit, named = DEFECTS[defect]
    nb, path = nbformat.read(SMALL, 4), tmp_path / "01_test.ipynb"
    edit(nb)
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
