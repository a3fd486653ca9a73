"""The decoder equals transformers; its certificate holds, also with narrower instruction sets."""

import os
import subprocess
import sys
from math import inf

import numpy as np
import pytest
import torch

from specnb.errors import InputError
from specnb.lm.hf.int4 import Int4Product, round_network
from specnb.lm.hf.model import HfModel
from specnb.lm.hf.product import Product
from specnb.lm.probe import certify
from specnb.machine import cpuinfo
from tests.lm.networks import IDS, network
from tests.tiny_models import torch_model

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


def net_of(name, dtype=torch.float32):
    return network(name.split(",")[0], dtype, **MODELS[name])


def opened(name="llama", dtype=torch.float32):
    net = net_of(name, torch.bfloat16 if dtype == "int4" else dtype)
    if dtype == "int4":
        round_network(net)
    model = HfModel(net, None, name=name)
    assert model.caps.details["decoder"] == "specnb"
    return model


@torch.inference_mode()
def transformers_rows(net):
    return net(torch.tensor([IDS]), use_cache=False).logits[0].double().numpy()


@pytest.mark.parametrize("name", MODELS)
def test_the_decoder_computes_the_logits_of_transformers(name):
    """In bfloat16, the error against float64 is at most transformers'."""
    judge = transformers_rows(net_of(name, torch.float64))[20:]
    for dtype, bound in ((torch.float64, 1e-5), (torch.float32, 1e-4), (torch.bfloat16, inf)):
        model = opened(name, dtype)
        expected = transformers_rows(net_of(name, dtype))[20:]
        model.forward(IDS[:20], 0)
        rows = np.concatenate([model.forward(IDS[20:21]), model.forward(IDS[21:])])
        assert abs(rows - expected).max() < bound * judge.std()
        error, other = (np.square(each - judge).mean() ** 0.5 for each in (rows, expected))
        assert error < max(1.2 * other, 1e-4 * judge.std())


def test_a_model_of_some_blocks_equals_a_network_with_only_these_blocks():
    model = opened("qwen3")
    net = network("qwen3")
    net.model.layers = net.model.layers[1:]
    np.testing.assert_allclose(
        model.keep_blocks([1]).forward(IDS), transformers_rows(net), atol=1e-4
    )
    for blocks in ([], [2], [-1]):
        with pytest.raises(InputError):
            model.keep_blocks(blocks)


@pytest.mark.parametrize(
    ("kind", "config", "why"),
    [
        ("gpt2", {}, "GPT2LMHeadModel is not one of LlamaForCausalLM"),
        ("llama", {"hidden_act": "gelu"}, "with SiLU"),
        ("mistral", {}, "window of the past"),
        ("llama", {"dtype": torch.float16}, "no packed product"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "dynamic",
        ),
    ],
)
def test_unsupported_models_run_in_transformers(kind, config, why):
    model = HfModel(torch_model(kind, **config), None, name=kind)
    assert why in model.caps.details["decoder"] and model.caps.same_bits_up_to == 0


# --- exactness ------------------------------------------------------------------------------------


def check_certificates(*threads):
    """Check all rows of all widths up to the certified one against single steps, bit by bit."""
    for n in threads:
        torch.set_num_threads(n)
        for dtype in (torch.float32, torch.bfloat16, "int4"):
            model = opened("llama, int4" if dtype == "int4" else "llama", dtype)
            claimed = model.caps.same_bits_up_to
            assert claimed == 64 or dtype != "int4", "int4 is exact on every CPU"
            assert certify(model, range(2, claimed + 1), 64) == claimed, (n, dtype)


@pytest.mark.parametrize(
    ("name", "value", "less"),
    [
        ("OMP_WAIT_POLICY", "passive", ""),  # all instructions
        ("ONEDNN_MAX_CPU_ISA", "AVX2", "avx512f"),
        ("ONEDNN_MAX_CPU_ISA", "AVX512_CORE", "avx512_bf16"),
        ("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16", "amx_bf16"),
        ("ATEN_CPU_CAPABILITY", "avx2", "avx512f"),
        ("ATEN_CPU_CAPABILITY", "default", "avx2"),
    ],
)
def test_the_certificate_holds_without_the_instructions(name, value, less, tmp_path):
    """In a subprocess, because torch reads the variables once."""
    if less and less not in cpuinfo()[1]:
        pytest.skip(f"this CPU has no {less}: {name}={value} takes nothing away")
    env = os.environ | {"SPECNB_CACHE": str(tmp_path), name: value}
    threads = "2" if less else "1, 2, 3"
    code = f"from tests.lm.test_decoder import check_certificates; check_certificates({threads})"
    subprocess.run([sys.executable, "-c", code], env=env, check=True, timeout=120)


@pytest.mark.parametrize(
    ("product", "differs", "widest"),
    [(Product, lambda n: n == 1, 0), (Int4Product, lambda n: n > 8, 8)],
)
def test_the_probe_detects_the_width_at_which_the_kernel_changes(
    product, differs, widest, monkeypatch
):
    model = opened("llama, int4", "int4") if product is Int4Product else opened()
    if not model.caps.same_bits_up_to:
        pytest.skip("this CPU rounds rows by their number anyway")
    model._engine.decoder.rows = 1
    right = product.__call__

    def changed(self, x, *options):
        y = right(self, x, *options)
        return y.mul(1 + 2**-7) if differs(len(x)) else y  # one spacing of bfloat16

    monkeypatch.setattr(product, "__call__", changed)
    assert certify(model) == widest


@pytest.mark.parametrize("onednn", [True, False])
def test_the_attention_of_a_token_is_bit_identical_in_blocks(onednn):
    """Without AVX-512, oneDNN does not multiply bfloat16; fewer than 4 rows use another kernel."""
    decoder = opened("llama, int4", "int4")._engine.decoder
    n_held = 448
    decoder._reserve(n_held + 4)
    torch.manual_seed(0)

    def attended(q, start):
        return decoder._plan_one_call(len(q), start, 0)(q, 0, q)

    with torch.inference_mode(), torch.backends.mkldnn.flags(enabled=onednn):
        for _ in range(40):
            decoder.cache.normal_()
            q = torch.randn(4, decoder.H, decoder.d).bfloat16()
            steps = torch.cat([attended(row[None], n_held + i) for i, row in enumerate(q)])
            for n in (2, 4):
                assert torch.equal(attended(q[:n], n_held), steps[:n])


def test_a_model_sets_its_thread_count_only_during_a_pass():
    before = torch.get_num_threads()
    model = opened()
    seen = []
    model.listen(lambda *_states: seen.append(torch.get_num_threads()))
    torch.set_num_threads(before + 1)
    model.forward(IDS[:2])
    seen.append(torch.get_num_threads())
    torch.set_num_threads(before)
    assert seen == [before, before + 1]
