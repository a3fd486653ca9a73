"""The committed notebooks are clean."""

import json
import re
from operator import itemgetter

import nbformat
import pytest
from nbval.plugin import get_sanitize_patterns

from specnb.book.picture import PLOTLY
from specnb.book.publish import sidecars
from specnb.io import project_dir
from tests.book import hygiene, store

FOLDER = project_dir() / "notebooks"
COMMITTED = sorted(FOLDER.glob("[0-9]*.ipynb"))
FIGURES = [
    s
    for s in sidecars(store.FIGURES)
    if "figure" in s and s["experiment"] in {p.stem for p in COMMITTED}
]


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.name)
def test_committed_notebooks_are_clean(path):
    assert hygiene.problems(path) == []


@pytest.mark.parametrize("notebook", store.BOXES)
def test_boxes_have_the_numbers_of_the_published_runs(notebook):
    assert (
        store.box(notebook)
        in nbformat.read(FOLDER / f"{notebook}.ipynb", 4).cells[0].source.splitlines()
    )


@pytest.mark.parametrize("sidecar", FIGURES, ids=itemgetter("name"))
def test_a_published_figure_equals_the_one_in_its_notebook(sidecar):
    cells = nbformat.read(FOLDER / f"{sidecar['experiment']}.ipynb", 4).cells
    outputs = [output.get("data", {}) for cell in cells for output in cell.get("outputs", [])]
    shown = [data[PLOTLY]["data"] for data in outputs if PLOTLY in data]
    assert all("image/png" in data for data in outputs if PLOTLY in data)
    drawn = json.loads(sidecar["figure"])["data"]
    assert rounded(drawn) in map(rounded, shown)


def rounded(data: object) -> object:
    """Return JSON with numbers rounded to ten digits, because writers differ in the last one."""
    return json.loads(json.dumps(data), parse_float=lambda digits: f"{float(digits):.10g}")


def test_sanitize_rules_mask_the_machine_and_nothing_else():
    masked = (
        r"in '/tmp/pytest-1/x', C:\Users\x, 123e4567-e89b-12d3-a456-426614174000, "
        "1.25 s, K 4, 1.25, https://a.org/tmp/x"
    )
    masked += ', </div><p class="quick">x</p>'
    for pattern, replacement in get_sanitize_patterns(
        (FOLDER / "sanitize.cfg").read_text(encoding="utf-8")
    ):
        masked = re.sub(pattern, replacement, masked)
    assert masked == "in 'PATH', PATH, UUID, SECONDS, K 4, 1.25, https://a.org/tmp/x, </div>"
