"""The committed notebooks are clean, and the checks that say so see what they are for."""

import json
import re

import nbformat
import pytest
from nbformat.v4 import new_markdown_cell, new_output
from nbval.plugin import get_sanitize_patterns

from specnb.io import project_dir
from tests.book import hygiene

FOLDER = project_dir() / "notebooks"
COMMITTED = sorted(FOLDER.glob("[0-9]*.ipynb"))
SMALL = FOLDER / "08_lossless.ipynb"


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.name)
def test_committed_notebooks_are_clean(path):
    assert hygiene.problems(path) == []


def cell(nb, *, shows="", tag=""):
    """The first cell with an output of a kind, or with a tag."""
    kinds = {id(c): [kind for o in c.get("outputs", []) for kind in o.get("data", {})] for c in nb.cells}
    return next(c for c in nb.cells if (shows in kinds[id(c)]) or (tag and tag in c.metadata.get("tags", [])))


def parameters_edit(old, new):
    def edit(nb):
        parameters = cell(nb, tag="parameters")
        parameters.source = parameters.source.replace(old, new)

    return edit


def output_edit(output):
    return lambda nb: nb.cells[-2].update(outputs=[output])


def text(words):
    return new_output("stream", name="stdout", text=words)


DEFECTS = {
    "old format": (lambda nb: nb.update(nbformat_minor=4), r"nbformat 4\.4"),
    "run out of order": (lambda nb: nb.cells[-2].update(execution_count=77), "77"),
    "error output": (output_edit(new_output("error", ename="E", evalue="", traceback=[])), "error output"),
    "widget state": (lambda nb: nb.metadata.update(widgets={}), r"metadata\.widgets"),
    "papermill cell": (lambda nb: nb.cells[0].metadata.update(papermill={}), r"cell 0: metadata\.papermill"),
    "kernel": (lambda nb: nb.metadata.kernelspec.update(name="my-env"), "'my-env'"),
    "large": (output_edit(text("x" * 200_000)), "bytes"),
    "long": (lambda nb: nb.cells.extend(new_markdown_cell(str(i)) for i in range(30)), "cells, at most 30"),
    "a function": (lambda nb: nb.cells[-2].update(source="def f():\n    pass"), "defines something"),
    "no parameters": (lambda nb: cell(nb, tag="parameters").metadata.update(tags=[]), "0 cells tagged"),
    "unknown class": (lambda nb: nb.metadata.specnb.update(params="Nope"), "names their class"),
    "lost name": (parameters_edit("k: int = 4", "kk: int = 4"), "parameter k "),
    "other default": (parameters_edit("k: int = 4", "k: int = 5"), "parameter k is 5"),
    "papermill cannot read it": (parameters_edit("k: int = 4", "k: int = 4  # 0 = none"), "papermill loses"),
    "untagged plotly": (
        lambda nb: cell(nb, shows="application/vnd.plotly.v1+json").metadata.update(tags=[]),
        "shows a figure",
    ),
    "too few checked": (
        lambda nb: [c.update(outputs=[]) for c in nb.cells[3:] if "outputs" in c],
        "0 cells whose output",
    ),
    "path in source": (lambda nb: nb.cells[0].update(source="See /home/me/x"), "cell 0: .*/home/me/x"),
    "path in output": (output_edit(text("saved to /tmp/pytest-1/x\n")), "absolute path"),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_each_defect_is_seen(tmp_path, defect):
    edit, message = DEFECTS[defect]
    nb, path = nbformat.read(SMALL, 4), tmp_path / "01_test.ipynb"
    edit(nb)
    path.write_text(json.dumps(nb), encoding="utf-8")
    problems = hygiene.problems(path)
    assert any(re.search(message, problem) for problem in problems), problems


def test_normalise_removes_leftovers_and_nothing_else(tmp_path):
    nb, path = nbformat.read(SMALL, 4), tmp_path / "01_test.ipynb"
    nb.metadata.update(widgets={"state": {}}, papermill={"duration": 1.0})
    nb.metadata.language_info.version = "3.11.7"
    for each in nb.cells:
        each.metadata.update(papermill={"status": "completed"}, tags=each.metadata.get("tags", []))
    cell(nb, tag=hygiene.UNCHECKED).outputs.append(new_output("stream", name="stderr", text="50 %"))
    nbformat.write(nb, path)
    hygiene.normalise(path)
    assert path.read_text(encoding="utf-8") == SMALL.read_text(encoding="utf-8")


SANITIZE = get_sanitize_patterns((FOLDER / "sanitize.cfg").read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    "shown, sanitized",
    [
        ("saved to '/tmp/pytest-1/x.json', done", "saved to 'PATH', done"),
        (r"C:\Users\me\x.json", "PATH"),
        ("id 123e4567-e89b-12d3-a456-426614174000", "id UUID"),
        ("took 1.25 s, then 30 ms", "took SECONDS, then SECONDS"),
        ("K 4 speed-up 1.25, results/01/x, https://example.org/tmp/x", None),
    ],
)
def test_sanitize_rules_mask_the_machine_and_nothing_else(shown, sanitized):
    masked = shown
    for pattern, replacement in SANITIZE:
        masked = re.sub(pattern, replacement, masked)
    assert masked == (sanitized or shown)
