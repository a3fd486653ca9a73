"""Notebook 01 on a small model: every cell runs every day, the stored run only with `slow`."""

from pathlib import Path

from specnb import store
from specnb.book import tables
from specnb.book.engine import run_notebook
from specnb.io import project_dir

SMALL = {"target": "tiny-hybrid", "backend": "llama", "dtype": "", "contexts": [64]}
SMALL |= {"categories": ["code", "prose"]}  # the model has no chat template


def test_every_cell_runs_on_a_small_model_and_all_checks_pass(tmp_path):
    path = project_dir() / "notebooks" / "01_k_sweep.ipynb"
    outcome = run_notebook(path, SMALL, budget="quick", results=tmp_path)
    assert outcome.status == "completed", outcome.error
    found = tables.checks(store.load_record(Path(outcome.output).parent))
    assert found["ok"].all(), found.to_string()
