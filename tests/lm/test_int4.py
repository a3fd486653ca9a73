"""int4: blocks equal the weights of a file, products agree with a reference, errors are clear."""

from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

import specnb
from specnb.errors import InputError, LoadError
from specnb.lm import files
from specnb.lm.hf import int4
from specnb.lm.hf.blocks import GROUP, Blocks, FileMatrix, Kind, RoundedMatrix, group_of, round_rows
from specnb.lm.hf.files import blocks_network
from specnb.lm.hf.int4 import BlockEmbedding, BlockLinear, Int4Gate, Int4Product, dense_copy
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


def random_matrix(kind: Kind, rows: int = 96, blocks: int = 2) -> FileMatrix:
    n_weights, n_bytes = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(kind)
    data = rng.integers(0, 256, (rows, blocks, n_bytes), dtype=np.uint8)
    for start in SCALES[kind]:
        scale = rng.uniform(0.001, 0.002, (rows, blocks)).astype(np.float16)
        data[..., start : start + 2] = scale[..., None].view(np.uint8).reshape(rows, blocks, 2)
    return FileMatrix(kind, data.reshape(rows, -1), (rows, blocks * n_weights))


def dequantized(blocks: Blocks) -> torch.Tensor:
    grouped = blocks.codes.unflatten(1, (blocks.scales.shape[1], -1)) * blocks.scales[..., None]
    grouped += blocks.offsets[..., None]
    return grouped.flatten(1)


@pytest.mark.parametrize("kind", SCALES, ids=lambda kind: kind.name)
def test_blocks_equal_the_weights_of_the_file(kind):
    """The reference is gguf's dequantization. Types other than Q4 are rounded to 255 steps."""
    matrix = random_matrix(kind)
    expected = torch.from_numpy(gguf.dequantize(matrix.data, kind))
    assert matrix.bits == (4 if "Q4" in kind.name else 8)
    got = dequantized(matrix.blocks(slice(None)))
    torch.testing.assert_close(matrix.weights(slice(None)), expected, rtol=1e-6, atol=1e-6)
    if matrix.bits == 8:
        group = group_of(expected.shape[1], 8)
        least, most = expected.unflatten(1, (-1, group)).aminmax(dim=-1)
        step = ((most - least) / 255).repeat_interleave(group, dim=1)
        assert ((got - expected).abs() <= 0.51 * step).all()
    else:
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)
    order = np.arange(len(expected))[::-1]
    turned = FileMatrix(kind, matrix.data, matrix.shape, order)
    assert torch.equal(turned.weights(slice(3, 9)), expected[order[3:9].copy()])


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q6_K, Kind.Q5_K], ids=lambda kind: kind.name)
def test_a_coarse_matrix_has_four_bits(kind):
    matrix = replace(random_matrix(kind), most_bits=4)
    weights = matrix.weights(slice(None))
    blocks = matrix.blocks(slice(None))
    assert matrix.bits == 4 and blocks.codes.max() == 15
    step = blocks.scales.repeat_interleave(GROUP, dim=1)
    assert ((dequantized(blocks) - weights).abs() <= 0.501 * step + 1e-7).all()


def test_rounding_preserves_extremes_and_constant_groups():
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    weight[0] = 0.25
    for bits in (4, 8):
        blocks = round_rows(weight, bits)
        step = blocks.scales.repeat_interleave(group_of(64, bits), dim=1)
        assert ((dequantized(blocks) - weight).abs() <= 0.501 * step + 1e-7).all()
        assert blocks.codes.max() == 2**bits - 1


@pytest.mark.parametrize(
    "kinds", [[Kind.Q4_1], [Kind.Q4_0, Kind.Q4_1], [Kind.Q8_0], [Kind.Q4_K, Kind.Q6_K]]
)
def test_the_product_uses_the_weights_of_all_its_layers(kinds, monkeypatch):
    monkeypatch.setattr(int4, "PACKED_AT_ONCE", 1)  # 64 rows at a time
    layers = [
        BlockLinear(random_matrix(kind, 96 + 16 * i), torch.ones(96 + 16 * i))
        for i, kind in enumerate(kinds)
    ]
    x = torch.randn(5, layers[0].in_features, generator=torch.Generator().manual_seed(0)).bfloat16()
    expected = torch.cat([x.double() @ layer.weight.double().T + 1 for layer in layers], 1)
    got = Int4Product(*layers)(x)
    assert got.shape == expected.shape and got.dtype == torch.bfloat16
    assert (got - expected).norm() < 0.01 * expected.norm()
    with torch.inference_mode():
        assert torch.equal(layers[0](x[None])[0], Int4Product(layers[0])(x))
    layers[0](x.requires_grad_()).sum().backward()
    assert x.grad.abs().sum() > 0


def test_the_gate_is_bit_identical_for_any_number_of_rows():
    layers = [BlockLinear(random_matrix(Kind.Q4_K, 1536, 1)) for _ in range(2)]
    gate = Int4Gate(*layers)
    x = torch.randn(100, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            assert torch.equal(gate(x), torch.cat([gate(row[None]) for row in x]))
    finally:
        torch.set_num_threads(before)


def test_an_embedding_reads_its_rows_from_the_file():
    table = BlockEmbedding(random_matrix(Kind.Q6_K))
    ids = torch.tensor([[3, 1, 3]])
    assert torch.equal(table(ids), table.weight[ids])


@pytest.fixture
def file(tmp_path):
    """A model whose tensors are all float32."""
    return llama_gguf(tmp_path / "tiny.gguf", all_bytes=True)


def test_a_file_opens_with_its_weights(file):
    """Rounding to 8 bits changes the logits only slightly."""
    wide, model, coarse = (
        specnb.load(f"{file}?backend=hf&dtype={kind}")
        for kind in ("float32", "int4", "int4&coarse=true")
    )
    ids = [5, 9, 4, 30, 31, 17]
    expected = wide.forward(ids)
    got = model.forward(ids)
    assert model.caps.dtype == "int4" and vars(model.vocab) == vars(wide.vocab)
    assert np.linalg.norm(got - expected) < 0.05 * np.linalg.norm(
        expected - expected.mean(1, keepdims=True)
    )
    assert [each.network.model.layers[0].mlp.up_proj.matrix.bits for each in (model, coarse)] == [
        8,
        4,
    ]


def test_a_missing_tensor_raises_an_error_with_its_name(file):
    data = file.read_bytes()
    file.write_bytes(data.replace(b"blk.1.ffn_gate.weight", b"blk.1.ffn_gote.weight"))
    with pytest.raises(LoadError, match=r"blk\.1\.ffn_gate\.weight"):
        specnb.load(f"{file}?backend=hf&dtype=int4")


def test_int4_supports_only_some_families_and_only_the_cpu(file, tmp_path):
    for name, value in (
        (f"{mamba_gguf(tmp_path / 'mamba.gguf')}?backend=hf&dtype=int4", "llama, qwen2, qwen3"),
        (f"{file}?backend=hf&dtype=int4&device=cuda", "cpu"),
        (f"{torch_folder(tmp_path / 'gpt2', 'gpt2')}?dtype=int4", "GPT2LMHeadModel"),
        (f"{file}?backend=hf&dtype=bfloat16&coarse=true", "dtype=int4, got dtype=bfloat16"),
    ):
        with pytest.raises(InputError, match=value):
            specnb.load(name)


def test_the_weights_of_a_folder_are_rounded(tmp_path):
    folder = torch_folder(tmp_path / "tiny", "qwen3", intermediate_size=64)
    model = specnb.load(f"{folder}?dtype=int4")
    kinds = {
        type(layer.matrix) for layer in model.network.modules() if isinstance(layer, BlockLinear)
    }
    assert model.caps.dtype == "int4" and kinds == {RoundedMatrix}
    assert model.network.lm_head.matrix.bits == 8
    coarse = specnb.load(f"{folder}?dtype=int4&coarse=true")
    assert coarse.network.lm_head.matrix.bits == 4


def test_a_dense_copy_has_the_dequantized_weights_and_can_be_trained(file):
    origin = specnb.load(f"{file}?backend=hf&dtype=int4").network.model.layers[0]
    dense = dense_copy(origin)
    assert type(dense.mlp.up_proj) is torch.nn.Linear and isinstance(
        origin.mlp.up_proj, BlockLinear
    )
    assert torch.equal(dense.mlp.up_proj.weight, origin.mlp.up_proj.weight)
    dense.requires_grad_(True).mlp(torch.ones(1, 32, dtype=torch.bfloat16)).sum().backward()
    assert dense.mlp.up_proj.weight.grad.abs().sum() > 0
    assert (
        not origin.mlp.up_proj.weight.requires_grad
        and dense.input_layernorm is not origin.input_layernorm
    )


def test_a_four_bit_file_opens_in_int4_if_that_is_fastest(monkeypatch):
    for fastest, types in ((True, {"int4"}), (False, {"float32", "bfloat16"})):
        monkeypatch.setattr(int4, "is_fastest", lambda wide, fastest=fastest: fastest)
        for name in (
            "smollm2-135m?backend=hf",
            "smollm2-135m?backend=hf&dtype=auto",
            "m-Q4_K_M.gguf?backend=hf",
        ):
            assert files.parse(name).options["dtype"] in types
        for name in ("smollm2-135m:q8_0?backend=hf&dtype=auto", "m.F16.gguf?backend=hf&dtype=auto"):
            assert files.parse(name).options["dtype"] in {"float32", "bfloat16"}
    for name in ("hf:ORG/NAME", "m.F16.gguf?backend=hf", "smollm2-135m:q8_0?backend=hf"):
        assert "dtype" not in files.parse(name).options


def test_whether_int4_is_fastest_is_cached_for_this_cpu(monkeypatch, tmp_path):
    monkeypatch.setenv("SPECNB_CACHE", str(tmp_path))
    int4.is_fastest("float32")
    (file,) = Path(tmp_path, "int4").iterdir()
    file.write_bytes(file.read_bytes()[:2])  # a damaged file is replaced
    first = int4.is_fastest("float32")
    monkeypatch.setattr(int4, "Int4Product", None)
    assert int4.is_fastest("float32") == first and [*Path(tmp_path, "int4").iterdir()] == [file]


def test_a_layer_that_the_kernel_does_not_support_keeps_its_bias(tmp_path):
    """The 8 outputs of k_proj are not a multiple of 16."""
    net = torch_model("llama", num_key_value_heads=1, head_dim=8, attention_bias=True)
    for layer in net.model.layers:
        layer.self_attn.k_proj.bias.data.fill_(2.0)
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
    for layer in blocks_network(file, net.config).model.layers:
        assert type(layer.self_attn.k_proj) is torch.nn.Linear
        assert layer.self_attn.k_proj.bias.tolist() == [2.0] * 8
