"""Folders, hub ids and GGUF files in torch: damage raises one error, never random weights."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save
from transformers import AutoModelForCausalLM

from specnb.errors import InputError, LoadError, MemoryShortError
from specnb.lm.hf.model import HfModel
from specnb.lm.load import load
from tests.tiny_hybrids import byte_level
from tests.tiny_models import llama_gguf, torch_folder

LACKING = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECNB_CACHE", str(tmp_path / "cache"))
    return torch_folder(tmp_path / "model")


def test_a_folder_computes_the_logits_of_transformers(folder):
    model = HfModel.open(folder)
    net = AutoModelForCausalLM.from_pretrained(folder)
    with torch.inference_mode():
        expected = net(torch.tensor([[5, 6, 7]])).logits[0].numpy()
    np.testing.assert_allclose(model.forward([5, 6, 7]), expected, atol=1e-5)
    assert (model.name, model.caps.dtype, model.caps.n_ctx) == (str(folder), "float32", 64)
    assert HfModel.open(folder, n_ctx=10).caps.n_ctx == 10
    assert model.vocab.decode([5]) == "<5>"  # a folder without a tokenizer
    with pytest.raises(InputError, match="pass token ids"):
        model.encode("a")


def test_bad_options_and_missing_models_are_rejected_with_their_value(folder, tmp_path):
    for name, value in (
        ("dtype", "fp32"),
        ("device", "banana"),
        ("device", "cuda:7"),
        ("n_ctx", 65),
        ("n_ctx", -1),
        ("threads", -1),
    ):
        with pytest.raises(InputError, match=str(value)):
            load(folder, **{name: value})
    with pytest.raises(LoadError, match=r"config\.json"):
        HfModel.open(tmp_path)


def without_a_weight(folder, **other):
    tensors = load_file(folder / "model.safetensors")
    del tensors[LACKING]
    return save(tensors | other, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("file", "content", "problem"),
    [
        ("model.safetensors", "version https://git-lfs", ""),
        ("config.json", '{"model_type": "nope"}', ""),
        ("config.json", '{"model_type": "t5"}', ""),
        ("config.json", "{", ""),
        # transformers initializes missing weights at random, and only logs it
        ("model.safetensors", without_a_weight, LACKING),
        (
            "model.safetensors",
            lambda folder: without_a_weight(folder, **{LACKING: torch.zeros(3, 5)}),
            LACKING,
        ),
    ],
)
def test_a_broken_file_raises_one_readable_error(folder, file, content, problem):
    data = content.encode() if isinstance(content, str) else content(folder)
    (folder / file).write_bytes(data)
    with pytest.raises(LoadError, match=f"{folder}.*{problem}") as caught:
        HfModel.open(folder)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600


def test_a_config_with_extreme_numbers_or_code_is_rejected_and_no_code_runs(folder, monkeypatch):
    path = folder / "config.json"
    config = json.loads(path.read_text())
    code = "from pathlib import Path\nPath(__file__).with_name('ran').touch()\n"
    (folder / "evil.py").write_text(code)
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("somebody asked"))
    classes = {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"}
    for values, error in (
        ({"hidden_size": -3}, LoadError),
        ({"vocab_size": 10**12}, MemoryShortError),
        ({"model_type": "nope", "auto_map": classes}, LoadError),
    ):
        path.write_text(json.dumps(config | values))
        with pytest.raises(error, match=str(folder)):
            HfModel.open(folder)
    assert not (folder / "ran").exists()


def test_a_tokenizer_that_panics_raises_one_readable_error(tmp_path):
    """A panic of the tokenizers library (Rust) is not an Exception, or it aborts the process."""
    folder = torch_folder(tmp_path / "model", vocab_size=300)
    tokenizer = json.loads(byte_level([]).to_str())
    endless = {"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": "b"}
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer | {"normalizer": endless}))
    model = HfModel.open(folder)
    assert model.encode("ab")
    with pytest.raises(InputError, match="aaaaa"):
        model.encode("a" * 60 + "c")
    tokenizer["model"]["vocab"]["a"] = 4 * 10**9
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(LoadError, match=f"{folder}.*4000000000"):
        HfModel.open(folder)


def test_a_hub_id_that_cannot_be_reached_raises_one_error(monkeypatch):
    # its client reads the variable at import
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(LoadError, match="cannot load 'some-org/some-model'"):
        HfModel.open("some-org/some-model")


def test_a_gguf_is_dequantized_once_and_computes_the_logits_of_llama_cpp(folder, tmp_path):
    file = llama_gguf(tmp_path / "tiny.gguf", all_bytes=True)
    holes = llama_gguf(tmp_path / "holes.gguf")
    with pytest.warns(UserWarning, match=r"differently from llama\.cpp"):  # letters without a merge
        torch_side = load(file, backend="hf")
        llama = load(file, threads=1)
        # llama.cpp's tokenizer aborts on characters without byte tokens: they must not reach it
        assert load(holes, backend="hf").forward([5]).shape == (1, 64)
    ids = [260, 9, 61, 7, 270]
    np.testing.assert_allclose(torch_side.forward(ids), llama.forward(ids), atol=1e-4)
    assert torch_side.vocab.eog == llama.vocab.eog == {2}
    llama.close()
    (weights,) = (tmp_path / "cache" / "dequantised").glob("tiny*/model.safetensors")
    first = weights.stat().st_mtime_ns
    with pytest.warns(UserWarning, match="pass token ids"):  # at each load, not only at conversion
        load(file, backend="hf")
    assert weights.stat().st_mtime_ns == first
