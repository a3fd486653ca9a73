"""One name, one reader: whatever a user may write is described or refused with what could be written instead."""

import pytest

from specnb.compat.read import describe, opens
from specnb.errors import InputError
from specnb.lm import zoo
from specnb.lm.gguf import binding
from tests.compat.test_folder import byte_level_tokenizer, folder_of, line, tiktoken
from tests.compat.test_gguf import bpe_file, letters_and


def test_each_kind_of_source_finds_its_reader(tmp_path, monkeypatch):
    gguf = bpe_file(tmp_path, letters_and())
    folder = folder_of(tmp_path / "model", byte_level_tokenizer())
    ranks = tiktoken(tmp_path / "o.tiktoken", line(b"a", 0))
    assert describe(gguf).vocab.size == 256
    assert describe(folder).vocab.size == 272
    assert describe(folder / "tokenizer.json").vocab.size == 262
    assert describe(ranks).vocab.size == 1
    monkeypatch.chdir(tmp_path)
    assert describe("model").architecture == "qwen2" and describe("model.gguf").architecture == "llama"


def test_a_vocabulary_of_the_shelf_has_a_name():
    assert describe("gpt-2").vocab.size == 50257 and describe("Qwen3-0.6B").architecture == "qwen3"


def test_the_name_is_the_one_that_was_given(tmp_path):
    path = bpe_file(tmp_path, letters_and())
    d = describe(f"{path}?backend=hf")
    assert d.name == f"{path}?backend=hf" and d.source == str(path)


@pytest.mark.parametrize(
    "name",
    ["nonsense", "", "?", "a/b", "x" * 5000, "a\0b", "~nobody-here/model", "smollm3", "absent.gguf", "smollm2-135m:q9"],
)
def test_what_is_nothing_of_these(name):
    with pytest.raises(InputError) as caught:
        describe(name)
    assert repr(name)[1:-1] in str(caught.value) or name.partition(":")[2] in str(caught.value)


def test_a_copy_of_another_type_is_not_made_to_read_its_header(tmp_path, monkeypatch):
    shipped, asked = bpe_file(tmp_path, letters_and()), []
    monkeypatch.setattr(zoo, "path", lambda name: asked.append(name) or shipped)
    monkeypatch.setattr(binding, "requantize", lambda *_: pytest.fail("a model was requantised"))
    copy, base = describe("smollm2-135m:q4_0"), describe("smollm2-135m")
    assert asked == ["smollm2-135m", "smollm2-135m"] and copy.quantisation == "q4_0"
    assert copy.vocab.digest == base.vocab.digest and copy.name == "smollm2-135m:q4_0"


def test_what_can_be_run_is_told_from_what_only_describes(tmp_path):
    folder = folder_of(tmp_path / "m", byte_level_tokenizer())
    assert [opens(n) for n in ("smollm2-135m:q4_0", "hf:a/b?revision=x", folder, "x.gguf")] == [True] * 4
    assert [opens(n) for n in ("gpt-2", "qwen3-0.6b", folder / "tokenizer.json", "o.tiktoken")] == [False] * 4
