"""Lists of models and pairs: which pairs can win, by size and vocabulary."""

from itertools import starmap
from pathlib import Path
from unittest.mock import Mock

import pytest

from specnb.compat import check
from specnb.compat.models import active_share, listing, names_in, pairs
from specnb.errors import InputError
from tests.compat.test_gguf import bpe_file, file_of, pair


def test_a_pair_can_win_if_the_draft_is_small_enough(monkeypatch):
    sizes = {"qwen2.5": 1000, "qwen3": 100, "smollm2": 999}
    monkeypatch.setattr("specnb.compat.models.weights", sizes.__getitem__)
    table = pairs(list(sizes))
    assert table["draft"].tolist() == ["qwen3", "smollm2", "qwen3"], "the smaller one, best first"
    small, same_size, _ = table.itertuples()
    assert not same_size.can_win and same_size.best_case < 1, "tau is below 1 + K c for every K"
    tau = sum((0.7 * small.text_shared) ** j for j in range(small.k + 1))
    assert small.can_win and small.best_case == pytest.approx(tau / (1 + 0.1 * small.k))


def test_a_folder_is_expanded_to_its_files(tmp_path):
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


@pytest.fixture
def copies(tmp_path):
    """A folder of three files with the same pieces, each half the size of the next."""
    file = bpe_file(tmp_path)
    for name, times in {"large": 4, "middle": 2}.items():
        file.with_name(f"{name}.gguf").write_bytes(file.read_bytes() * times)
    return tmp_path


def test_models_known_from_facts_are_listed_and_nothing_is_fetched(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECNB_CACHE", str(tmp_path / "empty"))
    rows = {row.name: row for row in listing()}
    facts = rows["qwen2.5-72b"]
    assert (facts.source, facts.licence, facts.path) == ("hf:Qwen/Qwen2.5-72B", "Qwen", None)
    assert rows["tiny-hybrid-draft"].present and not rows["smollm2-135m:f32"].present


def test_copies_are_compared_once(copies, monkeypatch):
    compared = Mock(wraps=check.check)
    monkeypatch.setattr("specnb.compat.models.check", compared)
    assert len(pairs(names_in([str(copies)]))) == 3 and compared.call_count == 1


@pytest.mark.parametrize(
    ("target", "draft", "c", "can_win"),
    [
        ("qwen2.5-72b", "Qwen2.5-0.5B-instruct", 0.494 / 72.7, True),
        ("qwen3-next-80b-a3b-instruct", "qwen2.5-coder-32b", 32.5 / 3, False),
        ("qwen3-coder-480b-a35b-instruct", "qwen3-next-80b-a3b-instruct", 3 / 35, True),
    ],
)
def test_facts_are_enough_and_a_mixture_reads_only_its_active_experts(target, draft, c, can_win):
    (row,) = pairs([target, draft]).to_dict("records")
    assert row["target"] == target and row["c"] == pytest.approx(c) and row["can_win"] is can_win


def test_the_share_of_active_weights_is_read_from_a_file(tmp_path):
    """Each token uses 2,048 + 512 values, and 2 of 16 experts with 1,024 values in total."""
    shapes = {"embd": (8, 256), "ffn_gate_shexp.weight": (8, 64), "ffn_up_exps.weight": (8, 8, 16)}
    keys = {"general.architecture": "llama", "llama.expert_count": 16, "llama.expert_used_count": 2}
    mixture = file_of(tmp_path, *starmap(pair, keys.items()), tensors=shapes.items())
    assert active_share(str(mixture)) == pytest.approx(1 - 1024 / 3584 * (1 - 2 / 16))
    for dense in ("tiny-hybrid", "smollm2-135m:q8_0", "qwen2.5", "hf:ORG/NAME"):
        assert active_share(dense) == 1
    assert active_share(str(bpe_file(tmp_path))) == 1


def test_a_damaged_file_is_listed_and_does_not_hide_the_others(copies):
    (copies / "damaged.gguf").write_bytes(b"garbage" * 9)
    table = pairs(names_in([str(copies)]))
    bad = table["target"] == "damaged.gguf"
    assert "garb" in table.loc[bad, "verdict"].item()
    assert table["can_win"].sum() == len(table[~bad]) == 3
    with pytest.raises(InputError, match="absent"):
        pairs([str(copies / "absent.gguf"), str(copies / "middle.gguf")])
