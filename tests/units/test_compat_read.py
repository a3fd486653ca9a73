"""One name, one reader: whatever a user may write is described or refused with what could be written instead."""

import struct

import pytest

from specnb.compat.read import describe
from specnb.errors import FetchError, InputError
from tests.units.test_gguf_header import bpe_file, letters_and
from tests.units.test_hf_folder import byte_level_tokenizer, folder_of, line, tiktoken


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


@pytest.mark.parametrize("name", ["nonsense", "", "?", "a/b", "x" * 5000, "a\0b", "~nobody-here/model", "smollm3"])
def test_what_is_nothing_of_these(name):
    with pytest.raises(InputError, match="smollm2-135m") as caught:
        describe(name)
    assert "hf:ORG/NAME" in str(caught.value)


@pytest.mark.parametrize("name", ["absent.gguf", "absent.tiktoken", "absent/tokenizer.json", "a\0.gguf"])
def test_files_that_are_not_there(name):
    with pytest.raises(InputError, match="no such file"):
        describe(name)


def test_unknown_types_of_the_zoo_name_the_known():
    with pytest.raises(InputError, match="q8_0"):
        describe("smollm2-135m:q9")


def test_a_hub_id_that_cannot_be_had(monkeypatch, tmp_path):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(FetchError):
        describe("hf:org/absent")


def test_a_gguf_by_another_name_is_refused_by_its_content(tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 0) + b"\xff")
    with pytest.raises(InputError, match=r"tokenizer\.json"):
        describe(path)


@pytest.mark.model
def test_a_zoo_name_is_its_file():
    d = describe("smollm2-135m")
    assert (d.name, d.quantisation, d.vocab.size) == ("smollm2-135m", "q4_1", 49152)
