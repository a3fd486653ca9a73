"""Three notebooks on small models: every cell runs every day, the stored run only with `slow`."""

from pathlib import Path

import nbformat
import pytest

from specnb import store
from specnb.book import tables
from specnb.book.engine import run_notebook
from specnb.io import project_dir

HYBRID = {"target": "tiny-hybrid", "prompts_per_category": 1, "max_new_tokens": 8}
SMALL = {
    "01_k_sweep": {**HYBRID, "backend": "llama", "dtype": "", "contexts": [64]},
    "03_compatibility": {**HYBRID, "draft_model": "tiny-hybrid-draft"},
    "08_lossless": {"target": "tiny-hybrid", "draft": "tiny-hybrid-draft", "prompts": 2},
}


@pytest.mark.parametrize("name", SMALL)
def test_every_cell_runs_on_a_small_model_and_all_checks_pass(name, tmp_path):
    path = project_dir() / "notebooks" / f"{name}.ipynb"
    outcome = run_notebook(path, SMALL[name], budget="quick", results=tmp_path)
    assert outcome.status == "completed", outcome.error
    assert tables.checks(store.load_record(Path(outcome.output).parent))["ok"].all()
    cells = nbformat.read(outcome.output, 4).cells
    assert all(cell.outputs for cell in cells if cell.cell_type == "code" and cell.source.strip())
