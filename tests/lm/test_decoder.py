"""The decoder equals transformers; its certificate holds, also with narrower instruction sets."""

import os
import subprocess
import sys
from math import inf

import numpy as np
import pytest
import torch

from specnb.errors import InputError
from specnb.lm.hf.decoder import Decoder, refuse
from specnb.lm.hf.int4 import Int4Product, round_network
from specnb.lm.hf.model import HfModel
from specnb.lm.hf.product import Product
from specnb.lm.probe import certify
from specnb.machine import cpuinfo
from tests.tiny_models import VOCAB, torch_model

IDS = [int(i) for i in np.random.default_rng(0).integers(3, VOCAB, 60)]
ROTATIONS = {
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn": {"factor": 2.0, "original_max_position_embeddings": 32},
    "linear": {"factor": 2.0},
}
MODELS = {
    "llama": {},
    "llama, biased": {"attention_bias": True, "mlp_bias": True},
    "llama, int4": {
        "intermediate_size": 64,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 64,
    },
    "llama, tied": {"tie_word_embeddings": True},
    "llama, many heads share": {"num_attention_heads": 32, "num_key_value_heads": 1, "head_dim": 4},
    "mistral": {"sliding_window": None, "head_dim": 16},
    "qwen2": {},
    "qwen3": {},
    **{
        f"qwen3, {kind}": {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4, **more}}
        for kind, more in ROTATIONS.items()
    },
}


def network(name: str, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    net = torch_model(name.split(",")[0], **MODELS[name]).to(dtype).eval()
    with torch.no_grad():  # norms and biases with an effect
        for parameter in net.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.linspace(-0.5, 0.5, len(parameter)).to(dtype))
    return net


def opened(
    name: str = "llama", dtype: torch.dtype | str = torch.float32, **options: str
) -> HfModel:
    net = network(name, torch.bfloat16 if dtype == "int4" else dtype)
    if dtype == "int4":
        round_network(net)
    model = HfModel(net, None, name=name, **options)
    assert model.caps.details["decoder"] == "specnb"
    return model


@torch.inference_mode()
def transformers_rows(net: torch.nn.Module) -> np.ndarray:
    return net(torch.tensor([IDS]), use_cache=False).logits[0].double().numpy()


@pytest.mark.parametrize("name", MODELS)
def test_the_decoder_computes_the_logits_of_transformers(name):
    """In bfloat16, the error against float64 is at most transformers', and top tokens agree."""
    judge = transformers_rows(network(name, torch.float64))
    spread = judge.std()
    for dtype, bound in ((torch.float64, 1e-5), (torch.float32, 1e-4), (torch.bfloat16, inf)):
        model = opened(name, dtype)
        expected = transformers_rows(network(name, dtype))
        model.forward(IDS[:20], 0)
        rows = np.concatenate([model.forward(IDS[20:21]), model.forward(IDS[21:])])
        assert abs(rows - expected[20:]).max() < bound * spread
        error, other = (np.square(x - judge[20:]).mean() ** 0.5 for x in (rows, expected[20:]))
        assert error < max(1.2 * other, 1e-4 * spread)
        top = rows.argmax(1)
        assert (
            judge[20:].max(1) - judge[np.arange(20, len(IDS)), top] < max(8 * other, 1e-4 * spread)
        ).all()


def test_hidden_states_of_tapped_layers_are_returned():
    net = network("qwen3")
    with torch.inference_mode():
        states = net(torch.tensor([IDS[:9]]), output_hidden_states=True).hidden_states
        decoder = Decoder(net, 64)
        out = decoder.decode(decoder.embed(torch.tensor(IDS[:9])), 0, keep=2, taps=[0])
    assert len(out.taps) == 1 and out.logits.shape == (2, VOCAB)
    for got, expected in ((out.taps[0], states[1]), (out.post_norm, states[2])):
        torch.testing.assert_close(got, expected[0], atol=1e-4, rtol=0)


def test_a_model_of_some_blocks_equals_a_network_with_only_these_blocks():
    model = opened("qwen3")
    net = network("qwen3")
    net.model.layers = net.model.layers[1:]
    np.testing.assert_allclose(
        model.keep_blocks([1]).forward(IDS), transformers_rows(net), atol=1e-4
    )
    np.testing.assert_array_equal(model.keep_blocks([0, 1]).forward(IDS), model.forward(IDS))
    for blocks in ([], [2], [-1]):
        with pytest.raises(InputError):
            model.keep_blocks(blocks)


@pytest.mark.parametrize(
    ("kind", "config", "dtype", "why"),
    [
        ("gpt2", {}, torch.float32, "GPT2LMHeadModel is not one of LlamaForCausalLM"),
        ("llama", {"hidden_act": "gelu"}, torch.float32, "with SiLU"),
        ("mistral", {}, torch.float32, "window of the past"),
        ("llama", {}, torch.float16, "no packed product"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            torch.float32,
            "dynamic",
        ),
    ],
)
def test_unsupported_models_run_in_transformers(kind, config, dtype, why):
    net = torch_model(kind, **config).to(dtype)
    assert why in refuse(net)
    model = HfModel(net, None, name=kind)
    assert why in model.caps.details["decoder"] and model.caps.same_bits_up_to == 0


# --- exactness ------------------------------------------------------------------------------------


def check_certificates(*threads: int) -> None:
    """Check all rows of all widths up to the certified one against single steps, bit by bit."""
    for n in threads:
        torch.set_num_threads(n)
        for dtype in (torch.float32, torch.bfloat16, "int4"):
            model = opened("llama, int4" if dtype == "int4" else "llama", dtype)
            claimed = model.caps.same_bits_up_to
            assert certify(model, range(2, claimed + 1), 64) == claimed, (n, dtype)
            print(f"{n} threads, {model.caps.dtype}: {claimed}")


NARROWER = [
    ("ONEDNN_MAX_CPU_ISA", "AVX2", "avx512f"),
    ("ONEDNN_MAX_CPU_ISA", "AVX512_CORE", "avx512_bf16"),
    ("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16", "amx_bf16"),
    ("ATEN_CPU_CAPABILITY", "avx2", "avx512f"),
    ("ATEN_CPU_CAPABILITY", "default", "avx2"),
]
"""Variable, value, and the instructions that it disables (no effect if the CPU lacks them)."""


@pytest.mark.parametrize(("name", "value", "less"), [("", "", ""), *NARROWER])
def test_the_certificate_holds_for_all_instruction_sets(name, value, less, tmp_path):
    """In a subprocess, because torch reads the variables once."""
    if less and less not in cpuinfo()[1]:
        pytest.skip(f"this CPU has no {less}: {name}={value} takes nothing away")
    env = os.environ | {"SPECNB_CACHE": str(tmp_path)} | ({name: value} if name else {})
    threads = "2" if name else "1, 2, 3"
    code = f"from tests.lm.test_decoder import check_certificates; check_certificates({threads})"
    subprocess.run([sys.executable, "-c", code], env=env, check=True, timeout=120)


def test_the_probe_detects_another_kernel_for_single_rows(monkeypatch):
    model = opened()
    if not model.caps.same_bits_up_to:
        pytest.skip("this CPU rounds rows by their number anyway")
    model._engine.decoder.rows = 1
    right = Product.__call__

    def product(self, x, activation="none"):
        y = right(self, x, activation)
        return y.double().mul(1 + 1e-6).to(y.dtype) if len(x) == 1 else y

    monkeypatch.setattr(Product, "__call__", product)
    assert certify(model) < model.caps.same_bits_up_to


def test_the_probe_detects_the_width_at_which_the_int4_kernel_changes(monkeypatch):
    model = opened("llama, int4", "int4")
    assert (
        model.caps.dtype == "int4"
        and model._engine.decoder.rows == 1
        and model.caps.same_bits_up_to == 64
    )
    right = Int4Product.__call__

    def product(self, x):
        y = right(self, x)
        return y.mul_(1 + 2**-7) if len(x) > 8 else y  # one spacing of bfloat16

    monkeypatch.setattr(Int4Product, "__call__", product)
    assert certify(model) == 8


@pytest.mark.parametrize("onednn", [True, False])
def test_the_attention_of_a_token_is_bit_identical_in_blocks(onednn):
    """Without AVX-512, oneDNN does not multiply bfloat16; fewer than 4 rows use another kernel."""
    decoder = opened("llama, int4", "int4")._engine.decoder
    n_held = 448
    decoder._reserve(n_held + 4)
    torch.manual_seed(0)
    with torch.inference_mode(), torch.backends.mkldnn.flags(enabled=onednn):
        for _ in range(40):
            decoder.cache.normal_()
            q = torch.randn(4, decoder.H, decoder.d).bfloat16()
            steps = [
                decoder._plan_one_call(1, n_held + i, 0)(row[None], 0, row)
                for i, row in enumerate(q)
            ]
            for n in (2, 4):
                rows = decoder._plan_one_call(n, n_held, 0)(q[:n], 0, q)
                assert torch.equal(rows, torch.cat(steps[:n]))


def test_a_model_sets_its_thread_count_only_during_a_pass():
    before = torch.get_num_threads()
    model = opened()
    seen = []
    model.listen(lambda *_states: seen.append(torch.get_num_threads()))
    torch.set_num_threads(before + 1)
    try:
        model.forward(IDS[:2])
        assert (
            seen == [before] == [model.caps.details["threads"]]
            and torch.get_num_threads() == before + 1
        )
    finally:
        torch.set_num_threads(before)
