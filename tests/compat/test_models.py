"""Lists of models and pairs: roles, and which pairs can win, by size and vocabulary."""

from pathlib import Path
from unittest.mock import Mock

import pytest

from specnb.compat import check
from specnb.compat.models import COLUMNS, active_share, listing, names_in, pairs
from specnb.errors import InputError
from tests.compat.test_gguf import LETTERS, bpe_file, file_of, ggml, pair


def test_a_pair_can_win_if_the_draft_is_small_enough(monkeypatch):
    sizes = {"qwen2.5": 1000, "qwen3": 100, "gpt-2": 10, "smollm2": 999}
    monkeypatch.setattr("specnb.compat.models.weights", sizes.__getitem__)
    table = pairs(list(sizes))
    assert tuple(table.columns) == COLUMNS and len(table) == 6, "the smaller one of two drafts"
    rows = table.set_index(["target", "draft"])
    same_size = rows.loc["qwen2.5", "smollm2"]
    assert not same_size.can_win and same_size.best_case < 1, "tau is below 1 + K c for every K"
    small = rows.loc["qwen2.5", "qwen3"]
    tau = sum((0.7 * small.text_shared) ** j for j in range(small.k + 1))
    assert small.can_win and small.best_case == pytest.approx(tau / (1 + 0.1 * small.k))
    assert table[table["target"] == "qwen2.5"]["best_case"].is_monotonic_decreasing


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


def test_all_models_are_listed_with_their_roles_and_nothing_is_fetched(
    copies, tmp_path, monkeypatch
):
    monkeypatch.setenv("SPECNB_CACHE", str(tmp_path / "empty"))
    for fetch in ("specnb.lm.files.zoo_file", "huggingface_hub.snapshot_download"):
        monkeypatch.setattr(fetch, Mock(side_effect=AssertionError))
    rows = {row.name: row for row in listing([str(copies)])}
    assert [
        rows[name].present for name in ("smollm2-135m", "tiny-hybrid", "qwen3-0.6b", "large.gguf")
    ] == [0, 1, 0, 1]
    roles = {
        "smollm2-1.7b": "target",
        "smollm2-135m:f32": "target, draft",
        "smollm2-135m:q2_k": "draft",
        "tiny-hybrid-draft": "draft",
        "qwen2.5-0.5b-instruct": "draft",
        "model.gguf": "draft",
        "deepseek-r1-distill-qwen-32b": "target",
        "hermes-4-70b": None,
        "qwen2.5-72b": "target",
        "qwen3-next-80b-a3b-instruct": "target, draft",
    }
    assert {name: rows[name].roles for name in roles} == roles
    facts = rows["qwen2.5-72b"]
    file = rows["middle.gguf"]
    assert (facts.source, facts.licence, facts.n_bytes, facts.path) == (
        "hf:Qwen/Qwen2.5-72B",
        "Qwen",
        None,
        None,
    )
    assert (file.source, file.n_bytes, file.path) == (
        str(copies),
        file.path.stat().st_size,
        copies / "middle.gguf",
    )


def test_copies_are_compared_once_and_published_facts_are_enough(copies, monkeypatch):
    compared = Mock(wraps=check.check)
    monkeypatch.setattr("specnb.compat.models.check", compared)
    assert len(pairs(names_in([str(copies)]))) == 3 and compared.call_count == 1
    (row,) = pairs(["qwen2.5-72b", "Qwen2.5-0.5B-instruct"]).to_dict("records")
    assert (
        row["verdict"] == "works with slicing"
        and row["can_win"]
        and row["c"] == pytest.approx(0.494 / 72.7)
    )


@pytest.mark.parametrize(
    ("target", "draft", "c", "can_win"),
    [
        ("qwen3-next-80b-a3b-instruct", "qwen2.5-coder-32b", 32.5 / 3, False),
        ("qwen3-coder-480b-a35b-instruct", "qwen3-next-80b-a3b-instruct", 3 / 35, True),
    ],
)
def test_a_step_of_a_mixture_reads_only_its_active_experts(target, draft, c, can_win):
    (row,) = pairs([target, draft]).to_dict("records")
    assert row["target"] == target and row["c"] == pytest.approx(c) and row["can_win"] is can_win


def test_the_share_of_active_weights_is_read_from_a_file(tmp_path):
    """Each token uses 2,048 + 512 values, and 2 of 16 experts with 1,024 values in total."""
    shapes = {
        "token_embd.weight": (8, 256),
        "ffn_gate_shexp.weight": (8, 64),
        "ffn_up_exps.weight": (8, 8, 16),
    }
    keys = {"general.architecture": "llama", "llama.expert_count": 16, "llama.expert_used_count": 2}
    tokens = ggml(model="gpt2", pre="gpt-2", tokens=LETTERS, merges=["a b"])
    mixture = file_of(
        tmp_path, *(pair(*each) for each in keys.items()), *tokens, tensors=list(shapes.items())
    )
    assert active_share(str(mixture)) == pytest.approx(1 - 1024 / 3584 * (1 - 2 / 16))
    for dense in (
        "tiny-hybrid",
        "smollm2-135m:q8_0",
        "qwen2.5",
        "hf:ORG/NAME",
        str(bpe_file(tmp_path)),
    ):
        assert active_share(dense) == 1


def test_a_damaged_file_is_listed_and_does_not_hide_the_others(copies):
    (copies / "damaged.gguf").write_bytes(b"garbage" * 9)
    rows = {row.name: row for row in listing([str(copies)])}
    assert "garb" in rows["damaged.gguf"].roles and rows["damaged.gguf"].n_bytes == 63
    assert rows["middle.gguf"].roles == "target, draft"
    table = pairs(names_in([str(copies)]))
    bad = table[table["draft"].isna()].set_index("target")
    assert (
        "garb" in bad.loc["damaged.gguf", "verdict"] and len(bad) == 1 and not bad["can_win"].any()
    )
    assert len(table) == 4 and table["can_win"].sum() == 3
    with pytest.raises(InputError, match="absent"):
        pairs([str(copies / "absent.gguf"), str(copies / "middle.gguf")])
