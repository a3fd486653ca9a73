"""Folders, hub ids and GGUF files for torch: whatever is broken is one readable error, and nothing is made up."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from specnb.errors import InputError, LoadError, MemoryShortError
from specnb.lm.gguf.model import GgufModel
from specnb.lm.hf.model import HfModel
from tests.tiny_models import llama_gguf, torch_folder


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECNB_CACHE", str(tmp_path / "cache"))
    return torch_folder(tmp_path / "model")


def test_a_folder_opens_and_computes_what_transformers_does(folder):
    from transformers import AutoModelForCausalLM

    model = HfModel.open(folder)
    assert (model.name, model.caps.device, model.caps.dtype, model.caps.n_ctx) == (str(folder), "cpu", "float32", 64)
    with torch.inference_mode():
        expected = AutoModelForCausalLM.from_pretrained(folder)(torch.tensor([[5, 6, 7]])).logits[0].numpy()
    np.testing.assert_allclose(model.forward([5, 6, 7]), expected, atol=1e-5)
    assert HfModel.open(folder, n_ctx=10, name="short").caps.n_ctx == 10
    assert model.vocab.decode([5]) == "<5>"  # a folder without a tokenizer
    with pytest.raises(InputError, match="pass token ids"):
        model.encode("a")


def test_a_folder_with_a_tokenizer_encodes(folder):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1, "b": 2}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>").save_pretrained(folder)
    model = HfModel.open(folder)
    assert model.encode("b a x") == [2, 1, 0]
    assert model.vocab.size == 64 and model.vocab.pieces[1:4] == (b"a", b"b", b"")
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(LoadError, match="cannot load"):
        HfModel.open(folder)


def test_what_is_no_option_and_no_model_is_refused_with_its_value(folder, tmp_path):
    bad = ("dtype", "fp32"), ("device", "banana"), ("device", "cuda:7"), ("n_ctx", 65), ("n_ctx", -1), ("threads", -1)
    for name, value in bad:
        with pytest.raises(InputError, match=str(value)):
            HfModel.open(folder, **{name: value})
    for name in ("./nowhere", "a/b/c", "~nobody-of-this-name/x", "no.gguf", " ", tmp_path):
        with pytest.raises((InputError, LoadError), match=r"no such model|config\.json"):
            HfModel.open(name)


@pytest.mark.parametrize("shape", [None, (3, 5)])
def test_weights_that_are_not_there_are_never_made_up(folder, shape):
    """transformers leaves them random and only logs it."""
    name, path = "model.layers.1.mlp.up_proj.weight", folder / "model.safetensors"
    tensors = load_file(path)
    del tensors[name]
    save_file(tensors | ({name: torch.zeros(shape)} if shape else {}), path, metadata={"format": "pt"})
    with pytest.raises(LoadError, match=f"lacks 1 of the model's weights.*{name}"):
        HfModel.open(folder)


def test_a_broken_file_is_one_readable_error(folder):
    for file, content in (
        ("model.safetensors", "version https://git-lfs"), ("config.json", '{"model_type": "nope"}'),
        ("config.json", '{"model_type": "t5"}'), ("config.json", "{"),
    ):  # fmt: skip
        (folder / file).write_text(content)
        with pytest.raises(LoadError, match=f"{folder}") as caught:
            HfModel.open(folder)
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 600


def test_a_config_with_wild_numbers_or_code_of_its_own_is_refused_and_runs_nothing(folder, monkeypatch):
    path, config = folder / "config.json", json.loads((folder / "config.json").read_text())
    (folder / "evil.py").write_text("from pathlib import Path\nPath(__file__).with_name('ran').touch()\n")
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("somebody asked"))
    evil = {"model_type": "nope", "auto_map": {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"}}
    wide = {"vocab_size": 10**12}
    for values, error in (({"hidden_size": -3}, LoadError), (wide, MemoryShortError), (evil, LoadError)):
        path.write_text(json.dumps(config | values))
        with pytest.raises(error, match=str(folder)):
            HfModel.open(folder)
    assert not (folder / "ran").exists()


def test_a_hub_id_that_cannot_be_reached_is_one_error(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # its client read the variable at import
    with pytest.raises(LoadError, match="cannot load 'some-org/some-model'"):
        HfModel.open("some-org/some-model")


def test_a_gguf_is_dequantised_once_and_computes_what_llama_cpp_does(folder, tmp_path):
    file = llama_gguf(tmp_path / "tiny.gguf", all_bytes=True)
    with pytest.warns(UserWarning, match=r"otherwise than llama\.cpp"):  # letters without a merge
        torch_side, llama = HfModel.open(file), GgufModel.open(file, threads=1)
        # llama.cpp's tokenizer ends the process at characters without byte tokens: it must not be asked for them
        assert HfModel.open(llama_gguf(tmp_path / "holes.gguf")).forward([5]).shape == (1, 64)
    ids = [260, 9, 61, 7, 270]
    np.testing.assert_allclose(torch_side.forward(ids), llama.forward(ids), atol=1e-4)
    assert torch_side.vocab.eog == llama.vocab.eog == {2}
    llama.close()
    (weights,) = (tmp_path / "cache" / "dequantised").glob("tiny*/model.safetensors")
    first = weights.stat().st_mtime_ns
    with pytest.warns(UserWarning, match="pass token ids"):  # at every load, not only when it is converted
        HfModel.open(file)
    assert weights.stat().st_mtime_ns == first
