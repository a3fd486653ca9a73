"""Every name that a user may give is described, or refused in one clear error."""

from unittest.mock import Mock

import httpx
import pytest
from huggingface_hub.errors import GatedRepoError

from specnb.compat.check import Verdict, check
from specnb.compat.models import opens
from specnb.compat.read import SMALL_FILES, describe, read_shelf
from specnb.errors import FetchError, InputError
from tests.compat.test_folder import byte_level_tokenizer, folder_of
from tests.compat.test_gguf import bpe_file


def test_each_kind_of_source_is_read_and_only_models_can_be_opened(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder_of(bpe_file(tmp_path).parent / "model", byte_level_tokenizer())
    sizes = {"model.gguf?backend=hf": 256, "model": 272}
    for name, size in sizes.items():
        described = describe(name)
        assert (described.name, described.source) == (name, name.partition("?")[0])
        assert described.vocab.size == size
        assert opens(name)
    assert describe("Qwen3-0.6B").architecture == "qwen3" and not opens("gpt-2")
    assert opens("smollm2-135m:q4_0") and opens("hf:a/b?revision=x")


def test_unknown_names_are_refused():
    for name in ("nonsense", "", "a/b", "a\0b", "~nobody-here/model", "absent.gguf", "hf:a/b/c"):
        with pytest.raises(InputError) as caught:
            describe(name)
        assert repr(name)[1:-1] in str(caught.value)


def test_a_tokenizer_that_cannot_be_shipped_is_read_from_the_hub(tmp_path, monkeypatch):
    """A verdict on facts alone gives its name on the hub. Neither weights nor code are fetched."""
    hub = Mock(return_value=str(folder_of(tmp_path / "snapshot", byte_level_tokenizer())))
    monkeypatch.setattr("huggingface_hub.snapshot_download", hub)
    monkeypatch.setattr("specnb.compat.read.reach_hub", lambda: None)
    draft = read_shelf("smollm2")
    report = check(read_shelf("llama-3.2-1b-instruct"), draft)
    (pieces,) = (f for f in report.findings if f.topic == "pieces")
    repository = "meta-llama/Llama-3.2-1B-Instruct"
    assert report.verdict is Verdict.UNKNOWN and "hf auth login" in pieces.remedy
    assert f"give hf:{repository} " in pieces.remedy
    described = describe(f"hf:{repository}?revision=older&backend=hf")
    assert check(described, draft).verdict is Verdict.TRANSLATION
    assert described.name == f"hf:{repository}?revision=older&backend=hf"
    hub.assert_called_once_with(repository, revision="older", allow_patterns=[*SMALL_FILES])


def test_a_failure_of_the_hub_raises_one_error_with_the_remedy(monkeypatch):
    refused = httpx.Response(403, request=httpx.Request("GET", "https://hub.invalid"))
    gated = GatedRepoError("403\nCannot access gated repo", response=refused)
    monkeypatch.setattr(
        "huggingface_hub.snapshot_download", Mock(side_effect=[gated, ConnectionError("no route")])
    )
    monkeypatch.setattr("specnb.compat.read.reach_hub", lambda: None)
    for remedy in ("hf auth login", "no route"):
        with pytest.raises(FetchError, match=f"hf:org/name.*{remedy}") as caught:
            describe("hf:org/name")
        assert "\n" not in str(caught.value)
