"""The gallery says what the sidecars say, and nothing else."""

import json

import pytest

from specnb.book.gallery import gallery
from specnb.errors import InputError
from specnb.io import project_dir


def test_the_gallery_in_the_repository_is_that_of_its_sidecars():
    folder = project_dir() / "figures"
    assert (folder / "README.md").read_text(encoding="utf-8") == gallery(folder), "run `specnb publish`"


def test_an_entry_holds_picture_caption_origin_and_data(tmp_path):
    with pytest.raises(InputError, match=tmp_path.name):
        gallery(tmp_path)
    sidecar = {
        "name": "01_a",
        "experiment": "01_k_sweep",
        "title": "A",
        "caption": "A: run 1.",
        "files": {"01_a.png": "0"},
    }
    sidecar |= {"provenance": {"git": {"commit": "f" * 40, "dirty": True}, "utc": "2026-11-21T08:39:54+00:00"}}
    sidecar |= {"table": {"columns": ["k", "tau"], "records": [{"k": 4, "tau": 1.23456}, {"k": None, "tau": 2.0}]}}
    (tmp_path / "01_a.json").write_text(json.dumps(sidecar))
    page = gallery(tmp_path)
    for text in ("specnb run 01_k_sweep", "![A](01_a.png)", "A: run 1.", "2026-11-21, commit ffffffffff, with changes"):
        assert text in page
    assert "| k | tau |\n| --- | --- |\n| 4 | 1.235 |\n|  | 2 |" in page
