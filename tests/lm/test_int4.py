"""int4: blocks equal the weights of a file, products agree with a reference, errors are clear."""

from dataclasses import replace

import gguf
import numpy as np
import pytest
import torch

import specnb
from specnb.errors import InputError, LoadError
from specnb.lm import files
from specnb.lm.hf import int4
from specnb.lm.hf.blocks import FileMatrix, Kind, group_of
from specnb.lm.hf.files import blocks_network
from specnb.lm.hf.int4 import BlockLinear, Int4Gate, Int4Product
from tests.tiny_models import llama_gguf, mamba_gguf, torch_folder, torch_model

SCALES = {
    Kind.Q4_0: [0],
    Kind.Q4_1: [0, 2],
    Kind.Q8_0: [0],
    Kind.Q4_K: [0, 2],
    Kind.Q6_K: [208],
    Kind.Q5_K: [0, 2],
}
"""Offsets of float16 values in a block, where random bytes may be NaN."""


def random_matrix(kind, rows=96, blocks=2, most_bits=8):
    n_weights, n_bytes = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(kind)
    data = rng.integers(0, 256, (rows, blocks, n_bytes), dtype=np.uint8)
    for start in SCALES[kind]:
        scale = rng.uniform(0.001, 0.002, (rows, blocks, 1)).astype(np.float16)
        data[..., start : start + 2] = scale.view(np.uint8)
    return FileMatrix(kind, data.reshape(rows, -1), (rows, blocks * n_weights), None, most_bits)


def random_rows(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).bfloat16()


@pytest.mark.parametrize("most_bits", [4, 8])
@pytest.mark.parametrize("kind", SCALES, ids=lambda kind: kind.name)
def test_blocks_equal_the_weights_of_the_file(kind, most_bits):
    """The reference is gguf's dequantization. Types other than Q4 are rounded to `most_bits`."""
    matrix = random_matrix(kind, most_bits=most_bits)
    expected = torch.from_numpy(gguf.dequantize(matrix.data, kind))
    torch.testing.assert_close(matrix.weights(slice(None)), expected, rtol=1e-6, atol=1e-6)
    exact = "Q4" in kind.name
    bits = 4 if exact else most_bits
    codes, *blocks = matrix.blocks(slice(None))
    group = group_of(expected.shape[1], bits)
    scales, offsets = (numbers.repeat_interleave(group, dim=1) for numbers in blocks)
    error = (codes * scales + offsets - expected).abs()
    assert matrix.bits == bits and codes.max() == 2**bits - 1
    assert (error <= (1e-6 if exact else 0.501 * scales + 1e-7)).all()
    turned = replace(matrix, order=np.arange(96)[::-1])
    assert torch.equal(turned.weights(slice(3, 9)), expected.flip(0)[3:9])


@pytest.mark.parametrize(
    "kinds", [[Kind.Q4_1], [Kind.Q4_0, Kind.Q4_1], [Kind.Q8_0], [Kind.Q4_K, Kind.Q6_K]]
)
def test_the_product_uses_the_weights_of_all_its_layers(kinds, monkeypatch):
    monkeypatch.setattr(int4, "PACKED_AT_ONCE", 1)  # 64 rows at a time
    layers = [
        BlockLinear(random_matrix(kind, 96 + 16 * i), torch.ones(96 + 16 * i))
        for i, kind in enumerate(kinds)
    ]
    x = random_rows(5, layers[0].in_features)
    expected = torch.cat([x.double() @ layer.weight.double().T + 1 for layer in layers], 1)
    got = Int4Product(*layers)(x)
    assert got.dtype == torch.bfloat16 and (got - expected).norm() < 0.01 * expected.norm()
    with torch.inference_mode():
        assert torch.equal(layers[0](x[None])[0], Int4Product(layers[0])(x))
    layers[0](x.requires_grad_()).sum().backward()
    assert x.grad.abs().sum() > 0


def test_the_gate_is_bit_identical_for_any_number_of_rows():
    layers = [BlockLinear(random_matrix(Kind.Q4_K, 1536, 1)) for _ in range(2)]
    gate = Int4Gate(*layers)
    x = random_rows(100, 256)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            assert torch.equal(gate(x), torch.cat([gate(row[None]) for row in x]))
    finally:
        torch.set_num_threads(before)


@pytest.fixture
def file(tmp_path):
    """A model whose tensors are all float32."""
    return llama_gguf(tmp_path / "tiny.gguf", all_bytes=True)


def test_a_file_opens_with_its_weights(file):
    """Rounding to 8 bits changes the logits only slightly."""
    wide, model = (specnb.load(f"{file}?backend=hf&dtype={kind}") for kind in ("float32", "int4"))
    ids = [5, 9, 4, 30, 31, 17]
    expected = wide.forward(ids)
    got = model.forward(ids)
    assert model.caps.dtype == "int4" and vars(model.vocab) == vars(wide.vocab)
    spread = np.linalg.norm(expected - expected.mean(1, keepdims=True))
    assert np.linalg.norm(got - expected) < 0.05 * spread


def test_int4_supports_only_whole_files_of_some_families_and_only_the_cpu(file, tmp_path):
    lacking = tmp_path / "lacking.gguf"
    lacking.write_bytes(file.read_bytes().replace(b"blk.1.ffn_gate", b"blk.1.ffn_gote"))
    for name, value in (
        (f"{lacking}?backend=hf&dtype=int4", r"blk\.1\.ffn_gate\.weight"),
        (f"{mamba_gguf(tmp_path / 'mamba.gguf')}?backend=hf&dtype=int4", "llama, qwen2, qwen3"),
        (f"{file}?backend=hf&dtype=int4&device=cuda", "cpu"),
        (f"{torch_folder(tmp_path / 'gpt2', 'gpt2')}?dtype=int4", "GPT2LMHeadModel"),
        (f"{file}?backend=hf&dtype=bfloat16&coarse=true", "dtype=int4, got dtype=bfloat16"),
    ):
        with pytest.raises((InputError, LoadError), match=value):
            specnb.load(name)


@pytest.mark.parametrize(("coarse", "head_bits"), [("true", 4), ("false", 8)])
def test_the_weights_of_a_folder_or_file_are_rounded(coarse, head_bits, file, tmp_path):
    folder = torch_folder(tmp_path / "tiny", "qwen3", intermediate_size=64)
    net, of_file = (
        specnb.load(f"{source}?backend=hf&dtype=int4&coarse={coarse}").network
        for source in (folder, file)
    )
    assert net.model.layers[1].mlp.down_proj.matrix.bits == 4
    assert net.lm_head.matrix.bits == of_file.model.layers[0].mlp.up_proj.matrix.bits == head_bits


def test_a_four_bit_file_opens_in_int4_if_that_is_fastest(monkeypatch):
    four_bits = ("smollm2-135m?backend=hf", "smollm2-135m?backend=hf&dtype=auto")
    others = ("smollm2-135m:q8_0?backend=hf&dtype=auto", "m.F16.gguf?backend=hf&dtype=auto")
    for fastest, types in ((False, {"float32", "bfloat16"}), (True, {"int4"})):
        monkeypatch.setattr(int4, "is_fastest", lambda wide, fastest=fastest: fastest)
        for name in (*four_bits, "m-Q4_K_M.gguf?backend=hf"):
            assert files.parse(name).options["dtype"] in types
    for name in others:
        assert files.parse(name).options["dtype"] in {"float32", "bfloat16"}
    for name in ("hf:ORG/NAME", "m.F16.gguf?backend=hf", "smollm2-135m:q8_0?backend=hf"):
        assert "dtype" not in files.parse(name).options


def test_whether_int4_is_fastest_is_cached_for_this_cpu(monkeypatch, tmp_path):
    monkeypatch.setenv("SPECNB_CACHE", str(tmp_path))
    monkeypatch.setattr(int4, "PROBED", 1)
    int4.is_fastest("float32")
    folder = tmp_path / "int4"
    (file,) = folder.iterdir()
    file.write_bytes(file.read_bytes()[:2])  # a damaged file is replaced
    first = int4.is_fastest("float32")
    monkeypatch.setattr(int4, "Int4Product", None)
    assert int4.is_fastest("float32") == first and [*folder.iterdir()] == [file]


def test_a_layer_that_the_kernel_does_not_support_keeps_its_bias(tmp_path):
    """The 8 outputs of k_proj are not a multiple of 16."""
    net = torch_model(num_key_value_heads=1, head_dim=8, attention_bias=True)
    net.model.layers[1].self_attn.k_proj.bias.data.fill_(2.0)
    file = tmp_path / "biased.gguf"
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
    out = gguf.GGUFWriter(str(file), "llama")
    for key, value in net.state_dict().items():
        module, _, part = key.rpartition(".")
        out.add_tensor(f"{names.get_name(module)}.{part}", value.numpy())
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    got = blocks_network(file, net.config).model.layers[1].self_attn.k_proj
    assert type(got) is torch.nn.Linear and got.bias.tolist() == [2.0] * 8
