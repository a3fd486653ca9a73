"""Which files can draft for which, and which can win: sizes and vocabularies that are known."""

from pathlib import Path

import pytest

from specnb.compat.pairs import COLUMNS, names_in, pairs
from specnb.errors import InputError


def test_a_pair_can_win_where_the_draft_is_small_enough(monkeypatch):
    sizes = {"qwen2.5": 1000, "qwen3": 100, "gpt-2": 10, "smollm2": 999}
    monkeypatch.setattr("specnb.compat.pairs.parse", lambda name: name)
    monkeypatch.setattr("specnb.compat.pairs.weights_bytes", sizes.__getitem__)
    table = pairs(list(sizes))
    assert tuple(table.columns) == COLUMNS and len(table) == 6, "the smaller one of two drafts"
    rows = table.set_index(["target", "draft"])
    same_size = rows.loc["qwen2.5", "smollm2"]
    assert not same_size.can_win and same_size.best_case < 1, "tau is below 1 + K c for every K"
    small = rows.loc["qwen2.5", "qwen3"]
    tau = sum((0.7 * small.text_shared) ** j for j in range(small.k + 1))
    assert small.can_win and small.best_case == pytest.approx(tau / (1 + 0.1 * small.k))
    assert table[table["target"] == "qwen2.5"]["best_case"].is_monotonic_decreasing


def test_a_folder_stands_for_its_files(tmp_path):
    for name in ("a.gguf", "sub/b-00001-of-00002.gguf", "sub/b-00002-of-00002.gguf", "notes.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    files = [Path(name).name for name in names_in([str(tmp_path), "smollm2-135m", "smollm2-135m"])]
    assert files == ["a.gguf", "b-00001-of-00002.gguf", "smollm2-135m"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="empty"):
        names_in([str(tmp_path / "empty")])
    with pytest.raises(InputError, match="qwen2"):
        pairs(["qwen2.5"])
