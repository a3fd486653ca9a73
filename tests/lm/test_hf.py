"""transformers models in our loop: cached forward passes equal one pass without a cache."""

import numpy as np
import pytest
import torch

from specnb.errors import InputError, LoadError
from specnb.lm.hf.model import HfModel
from tests.lm.networks import IDS
from tests.tiny_models import torch_model

TEXT = IDS[:30]
CROPPABLE = (
    "llama",
    "mistral",
    "gemma3_text",
    "gpt2",
    "opt",
    "bloom",
    "gpt_neox",
    "bart",
    "deepseek_v3",
)
STATEFUL = ("mamba", "mamba2", "falcon_mamba", "jamba", "lfm2", "qwen3_next")
FORGETFUL = {"mamba", "falcon_mamba", "jamba"}
"""Families whose mixers ignore their state in blocks (transformers 5.23), without a recurrence
function to record."""


def some_of(families, *default):
    """All families; the default tests run one of each kind of cache, position and mixer."""
    return [
        pytest.param(name, marks=() if name.startswith(default) else pytest.mark.slow)
        for name in families
    ]


def check_widths(model):
    """Check blocks, single steps and chunked prefill against transformers without a cache."""
    with torch.inference_mode():
        out = model.network(input_ids=torch.tensor([TEXT]), use_cache=False)
    expected = out.logits[0].float().numpy()
    for width in (1, 2, 5, len(TEXT)):
        model.reset()
        rows = [model.forward(TEXT[i : i + width]) for i in range(0, len(TEXT), width)]
        np.testing.assert_allclose(
            np.concatenate(rows), expected, atol=2e-3, err_msg=f"width {width}"
        )
    model.reset()
    model.forward(TEXT[:-4], 0)
    np.testing.assert_allclose(model.forward(TEXT[-4:], 2), expected[-2:], atol=2e-3)


@pytest.mark.parametrize("decoder", ["auto", "transformers"])
@pytest.mark.parametrize(
    "family", some_of(CROPPABLE, "llama", "gemma3_text", "gpt2", "opt", "deepseek_v3")
)
def test_attention_models_agree_at_all_widths_and_rewind_exactly(family, decoder, monkeypatch):
    monkeypatch.setattr("specnb.lm.hf.engine.PREFILL_WIDTH", 8)
    model = HfModel(torch_model(family), None, name=family, decoder=decoder)
    assert model.caps.rewind == "crop" and model.caps.lossless_dtype
    check_widths(model)
    for n in (1, 2, 4, 7, 8, 9, 16, 24):  # beyond every window, and across its start
        model.reset()
        model.forward(TEXT[: 26 - n], 1)
        expected = model.forward(TEXT[-4:])
        model.rewind(4)
        model.forward(TEXT[1 : 1 + n])
        model.rewind(n)
        np.testing.assert_array_equal(model.forward(TEXT[-4:]), expected, err_msg=f"rewind of {n}")


@pytest.mark.parametrize("kind", some_of(STATEFUL, "mamba2", "jamba", "lfm2", "qwen3_next"))
def test_recurrent_models_agree_at_all_widths(kind, monkeypatch):
    monkeypatch.setattr("specnb.lm.hf.engine.PREFILL_WIDTH", 8)
    model = HfModel(torch_model(kind), None, name=kind)
    assert model.caps.rewind == ("snapshots" if kind in FORGETFUL else "replay")
    for each in (model, HfModel(torch_model(kind), None, name=kind, rollback="checkpoint")):
        check_widths(each)
    with pytest.raises(InputError, match=f"rollback=crop is not for {kind}"):
        HfModel(torch_model(kind), None, name=kind, rollback="crop")


@pytest.mark.parametrize(
    ("kind", "config", "why"),
    [
        ("bert", {}, "not a causal language model"),
        ("recurrent_gemma", {"lru_width": 32, "num_hidden_layers": 3, "head_dim": 8}, "steps"),
        ("rwkv", {"attention_hidden_size": 32, "context_length": 64}, "takes no cache"),
    ],
)
def test_models_that_would_return_wrong_logits_are_rejected(kind, config, why):
    with pytest.raises(LoadError, match=why):
        HfModel(torch_model(kind, **config), None, name=kind)


@pytest.mark.parametrize(
    ("kind", "where"),
    [
        ("llama", "model.layers.1.mlp.up_proj"),
        ("mamba", "backbone.layers.1.mixer.out_proj"),
        ("qwen3_5_text", "model.layers.1.mlp.up_proj"),
    ],
)
def test_a_model_with_nan_opens_and_the_module_is_located(kind, where):
    net = torch_model(kind)
    with torch.no_grad():
        net.get_submodule(where).weight.fill_(float("nan"))
    model = HfModel(net, None, name="m")
    assert np.isnan(model.forward(TEXT)).any() and model.locate_nonfinite(TEXT) == where
    sound = HfModel(torch_model(kind), None, name="m")
    sound.forward(TEXT[:2])
    expected = sound.forward(TEXT[2:6])[3:]
    assert sound.locate_nonfinite(TEXT) == ""
    sound.rewind(1)  # locate_nonfinite changed neither the recording nor the state
    np.testing.assert_allclose(sound.forward(TEXT[5:6]), expected, atol=1e-4)
