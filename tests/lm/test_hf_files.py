"""Folders, hub ids and GGUF files for torch: whatever is broken is one readable error, and nothing is made up."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from specnb.errors import InputError, LoadError, MemoryShortError
from specnb.lm.gguf.model import GgufModel
from specnb.lm.hf.model import HfModel
from tests.tiny_models import llama_gguf, torch_folder


@pytest.fixture
def folder(tmp_path):
    return torch_folder(tmp_path / "model")


@pytest.fixture
def no_hub(monkeypatch):
    """The hub's client read the variable when it was imported."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def change_config(folder: Path, **values: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def change_weights(folder: Path, change) -> None:
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    save_file(change(load_file(path)), path, metadata={"format": "pt"})


def test_a_folder_opens_and_computes_what_transformers_does(folder):
    from transformers import AutoModelForCausalLM

    model = HfModel.open(folder)
    assert (model.name, model.caps.device, model.caps.dtype, model.caps.n_ctx) == (str(folder), "cpu", "float32", 64)
    with torch.inference_mode():
        expected = AutoModelForCausalLM.from_pretrained(folder)(torch.tensor([[5, 6, 7]])).logits[0].numpy()
    np.testing.assert_allclose(model.forward([5, 6, 7]), expected, atol=1e-5)
    assert HfModel.open(folder, n_ctx=10, name="short").caps.rewind_depth == 10


def test_without_a_tokenizer_ids_work_and_text_does_not(folder):
    model = HfModel.open(folder)
    assert model.vocab.decode([5]) == "<5>" and model.forward([5]).shape == (1, 64)
    with pytest.raises(InputError, match="pass token ids"):
        model.encode("a")


def test_a_folder_with_a_tokenizer_encodes(folder):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1, "b": 2}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>").save_pretrained(folder)
    model = HfModel.open(folder)
    assert model.encode("b a x") == [2, 1, 0]
    assert model.vocab.size == 64 and model.vocab.pieces[1:4] == (b"a", b"b", b"")
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(LoadError, match="cannot load"):
        HfModel.open(folder)


@pytest.mark.parametrize(
    ("option", "error", "says"),
    [
        ({"dtype": "fp32"}, InputError, "'fp32'; known: float32, bfloat16, float16"),
        ({"device": "banana"}, InputError, "'banana': use cpu"),
        ({"device": "meta"}, InputError, "'meta': use cpu"),
        ({"n_ctx": 65}, InputError, "n_ctx is 65.*knows 64 positions"),
        ({"n_ctx": -1}, InputError, "-1"),
        ({"threads": -1}, InputError, "-1"),
    ],
)
def test_a_bad_option_is_refused_with_its_value(folder, option, error, says):
    with pytest.raises(error, match=says):
        HfModel.open(folder, **option)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
@pytest.mark.parametrize("device", ["cuda", "cuda:7"])
def test_a_device_that_is_not_there_is_refused(folder, device):
    with pytest.raises(InputError, match=f"device '{device}'.*device=cpu"):
        HfModel.open(folder, device=device)


def test_threads_are_torchs_own_setting(folder):
    before = torch.get_num_threads()
    try:
        HfModel.open(folder, threads=1)
        assert torch.get_num_threads() == 1
        HfModel.open(folder)
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


def test_weights_that_are_not_there_are_never_made_up(folder):
    """transformers leaves them random and only logs it."""
    name = "model.layers.1.mlp.up_proj.weight"
    change_weights(folder, lambda tensors: {k: v for k, v in tensors.items() if k != name})
    with pytest.raises(LoadError, match=f"lacks 1 of the model's weights.*{name}"):
        HfModel.open(folder)
    change_weights(folder, lambda tensors: tensors | {name: torch.zeros(3, 5)})
    with pytest.raises(LoadError, match=f"lacks 1 .*{name}"):
        HfModel.open(folder)


@pytest.mark.parametrize("content", [b"", b"version https://git-lfs", None])
def test_broken_weights_are_one_error(folder, content):
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] if content is None else content)
    with pytest.raises(LoadError, match=r"cannot load .*model"):
        HfModel.open(folder)


@pytest.mark.parametrize("content", ["{", "[]", '{"model_type": "nope"}', '{"model_type": "t5"}'])
def test_a_broken_config_is_one_error(folder, content):
    (folder / "config.json").write_text(content)
    with pytest.raises(LoadError, match="cannot load"):
        HfModel.open(folder)


@pytest.mark.parametrize(
    ("value", "error"),
    [
        ({"hidden_size": "abc"}, LoadError),
        ({"hidden_size": -3}, LoadError),
        ({"num_attention_heads": 0}, LoadError),
        ({"vocab_size": 10**12}, MemoryShortError),
    ],
)
def test_a_config_with_wild_numbers_is_refused_before_anything_is_built(folder, value, error):
    change_config(folder, **value)
    with pytest.raises(error, match=str(folder)):
        HfModel.open(folder)


def test_a_model_neither_runs_its_code_nor_ends_the_process(folder, tmp_path):
    """In a process of its own, with a yes at hand, should anybody ask.

    Without byte tokens llama.cpp's tokenizer throws through C; the comparison of tokenizers must not ask it.
    """
    change_config(folder, model_type="nope", auto_map={"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"})
    (folder / "evil.py").write_text("from pathlib import Path\nPath(__file__).with_name('ran').touch()\n")
    file = llama_gguf(tmp_path / "holes.gguf")
    code = (
        "import warnings", "from specnb.lm.hf.model import HfModel", "from specnb.errors import LoadError",
        "try:", f"    HfModel.open({str(folder)!r})", "except LoadError as error:", "    print('refused', error)",
        "warnings.simplefilter('ignore')", f"print(HfModel.open({str(file)!r}).forward([5]).shape)",
    )  # fmt: skip
    environment = os.environ | {"SPECNB_CACHE": str(tmp_path / "cache")}
    options = {"input": "y\n" * 9, "capture_output": True, "text": True, "timeout": 120, "env": environment}
    done = subprocess.run([sys.executable, "-c", "\n".join(code)], **options)
    assert done.stdout.startswith("refused") and "[y/N]" not in done.stdout + done.stderr, done.stderr[-500:]
    assert done.returncode == 0 and done.stdout.endswith("(1, 64)\n"), done.stderr[-500:]
    assert not (folder / "ran").exists()


def test_what_is_no_model_folder_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"no config\.json"):
        HfModel.open(tmp_path)
    for name in ("./nowhere", "/nowhere/at/all", "a/b/c", "~nobody-of-this-name/x", str(tmp_path / "absent")):
        with pytest.raises(InputError, match="no such model folder"):
            HfModel.open(name)
    with pytest.raises(InputError, match="no such model file"):
        HfModel.open(tmp_path / "absent.gguf")
    for name in ("", " "):
        with pytest.raises(InputError, match="empty"):
            HfModel.open(name)


@pytest.mark.parametrize("name", ["some-org/some-model", "not a valid id"])
def test_a_hub_id_that_cannot_be_reached_is_a_quick_readable_error(no_hub, name):
    with pytest.raises(LoadError, match=f"cannot load '{name}'.*local folder") as caught:
        HfModel.open(name)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600


@pytest.mark.parametrize("cut", [4, 1500, 20_000])
def test_a_truncated_gguf_is_one_error_in_torch_too(tmp_path, monkeypatch, cut):
    monkeypatch.setenv("SPECNB_CACHE", str(tmp_path / "cache"))
    file = llama_gguf(tmp_path / "cut.gguf", all_bytes=True)
    file.write_bytes(file.read_bytes()[:cut])
    with pytest.raises(LoadError, match=r"cut\.gguf"):
        HfModel.open(file)
    assert not list((tmp_path / "cache" / "dequantised").glob("*/config.json"))


def test_a_gguf_is_dequantised_once_and_computes_what_llama_cpp_does(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECNB_CACHE", str(tmp_path / "cache"))
    file = llama_gguf(tmp_path / "tiny.gguf", all_bytes=True)
    with pytest.warns(UserWarning, match=r"otherwise than llama\.cpp"):  # letters without a merge
        torch_side, llama = HfModel.open(file), GgufModel.open(file, threads=1)
    ids = [260, 9, 61, 7, 270]
    np.testing.assert_allclose(torch_side.forward(ids), llama.forward(ids), atol=1e-4)
    assert torch_side.vocab.eog == llama.vocab.eog == {2}
    made = next((tmp_path / "cache" / "dequantised").glob("*/model.safetensors")).stat().st_mtime_ns
    with pytest.warns(UserWarning, match="pass token ids"):  # said at every load, not only when it is converted
        HfModel.open(file)
    assert next((tmp_path / "cache" / "dequantised").glob("*/model.safetensors")).stat().st_mtime_ns == made
    llama.close()
