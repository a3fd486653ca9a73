"""One name, one reader: whatever a user may write is described or refused with what could be written instead."""

from fnmatch import fnmatch
from unittest.mock import Mock

import httpx
import pytest
from huggingface_hub.errors import GatedRepoError

from specnb.compat import shelf
from specnb.compat.check import Verdict, check
from specnb.compat.read import describe, opens
from specnb.errors import FetchError, InputError
from specnb.lm import zoo
from specnb.lm.gguf import binding
from tests.compat.test_folder import byte_level_tokenizer, folder_of, line, tiktoken
from tests.compat.test_gguf import bpe_file


def test_each_kind_of_source_finds_its_reader(tmp_path, monkeypatch):
    gguf = bpe_file(tmp_path)
    folder = folder_of(tmp_path / "model", byte_level_tokenizer())
    ranks = tiktoken(tmp_path / "o.tiktoken", line(b"a", 0))
    assert describe(gguf).vocab.size == 256
    assert describe(folder).vocab.size == 272
    assert describe(folder / "tokenizer.json").vocab.size == 262
    assert describe(ranks).vocab.size == 1
    monkeypatch.chdir(tmp_path)
    assert describe("model").architecture == "qwen2" and describe("model.gguf").architecture == "llama"
    assert describe("gpt-2").vocab.size == 50257 and describe("Qwen3-0.6B").architecture == "qwen3"
    named = describe(f"{gguf}?backend=hf")
    assert named.name == f"{gguf}?backend=hf" and named.source == str(gguf)


NOTHING = [
    "nonsense",
    "",
    "?",
    "a/b",
    "a\0b",
    "~nobody-here/model",
    "smollm3",
    "absent.gguf",
    "absent.json",
    "hf:a/b/c",
]


@pytest.mark.parametrize("name", NOTHING)
def test_what_is_nothing_of_these(name):
    with pytest.raises(InputError) as caught:
        describe(name)
    assert repr(name)[1:-1] in str(caught.value)


def test_a_copy_of_another_type_is_not_made_to_read_its_header(tmp_path, monkeypatch):
    shipped, asked = bpe_file(tmp_path), []
    monkeypatch.setattr(zoo, "path", lambda name: asked.append(name) or shipped)
    monkeypatch.setattr(binding, "requantize", lambda *_: pytest.fail("a model was requantised"))
    copy, base = describe("smollm2-135m:q4_0"), describe("smollm2-135m")
    assert asked == ["smollm2-135m", "smollm2-135m"]
    assert copy.vocab.digest == base.vocab.digest and copy.name == "smollm2-135m:q4_0"


def test_what_can_be_run_is_told_from_what_only_describes(tmp_path):
    folder = folder_of(tmp_path / "m", byte_level_tokenizer())
    assert [opens(n) for n in ("smollm2-135m:q4_0", "hf:a/b?revision=x", folder, "x.gguf")] == [True] * 4
    assert [opens(n) for n in ("gpt-2", "qwen3-0.6b", folder / "tokenizer.json", "o.tiktoken")] == [False] * 4


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """What is asked of the hub's library; it answers with the folder of a tokenizer."""
    folder = folder_of(tmp_path / "snapshot", byte_level_tokenizer())
    download = Mock(return_value=str(folder))
    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    return download.call_args_list


def test_a_family_that_may_not_be_shipped_is_compared_once_its_name_on_the_hub_is_given(hub):
    """The verdict on facts alone says which name that is. Neither weights nor code are fetched."""
    draft = shelf.describe("smollm2")
    report = check(shelf.describe("llama-3.2-1b-instruct"), draft)
    (pieces,) = (f for f in report.findings if f.topic == "pieces")
    name = next(word for word in pieces.remedy.split() if word.startswith("hf:"))
    assert report.verdict is Verdict.UNKNOWN and name == "hf:meta-llama/Llama-3.2-1B-Instruct"
    described = describe(f"{name}?revision=older&backend=hf")
    assert check(described, draft).verdict is Verdict.TRANSLATION and described.vocab.size == 272
    assert described.name == f"{name}?revision=older&backend=hf"
    (((repo,), options),) = hub
    assert (f"hf:{repo}", options["revision"]) == (name, "older")
    assert not any(fnmatch(name, p) for p in options["allow_patterns"] for name in ("model.safetensors", "modeling.py"))


def test_what_the_hub_refuses_is_one_error_with_the_remedy(monkeypatch):
    refused = httpx.Response(403, request=httpx.Request("GET", "https://hub.invalid"))
    gated = GatedRepoError("403\nCannot access gated repo", response=refused)
    monkeypatch.setattr("huggingface_hub.snapshot_download", Mock(side_effect=[gated, ConnectionError("no route")]))
    for remedy in ("hf auth login", "no route"):
        with pytest.raises(FetchError, match=f"hf:org/name.*{remedy}") as caught:
            describe("hf:org/name")
        assert "\n" not in str(caught.value)
