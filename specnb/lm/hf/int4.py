"""Products of 4-bit weights and bfloat16 activations with torch's int4 kernel for CPUs.

The kernel (`aten::_weight_int4pack_mm_for_cpu`) computes a row independently of the number of rows,
so a token's logits are bit-identical at all widths of a forward pass. It processes blocks of four
rows: T(4) is only slightly larger than T(1).

The kernel accepts 4-bit codes. An 8-bit code is 16 * high + low: the halves are concatenated along
the inputs, and the inputs are repeated, so that the kernel adds both in float32.
"""

import itertools
from collections import OrderedDict
from collections.abc import Sequence
from copy import copy, deepcopy
from functools import partial
from statistics import median
from time import perf_counter

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from specnb.lm.hf.blocks import GROUP, Blocks, FileMatrix, Matrix, RoundedMatrix, group_of
from specnb.lm.hf.product import Product, can_multiply, joined_bias
from specnb.lm.probe import kernel_facts, probed_once

OUTPUTS = 16
"""The number of outputs must be a multiple of this."""
PACKED_AT_ONCE = 1 << 21
"""Weights to pack at once, in whole blocks of 64 outputs: small enough that the allocator reuses
memory, which halves the time."""
PROBED = 24
"""Number of products that `is_fastest` times (float32: 226 MB, int4: 35 MB)."""
PROBED_SIZE = 1536
REPEATS = 5
SERIAL = 32768
"""torch splits larger elementwise operators between threads (`at::internal::GRAIN_SIZE`)."""


class BlockLinear(nn.Linear):
    """A linear layer with the weights of `matrix`. Reading `weight` dequantizes all of them."""

    def __init__(self, matrix: Matrix, bias: Tensor | None = None) -> None:
        nn.Module.__init__(self)
        self.out_features, self.in_features = matrix.shape
        self.matrix = matrix
        self.bias = None if bias is None else nn.Parameter(bias.bfloat16(), requires_grad=False)
        self._product: Int4Product | None = None

    @property
    def weight(self) -> Tensor:
        """The matrix `(outputs, inputs)` in bfloat16."""
        return self.matrix.weights(slice(None)).bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        """Multiply `x (…, inputs)` with the int4 kernel; the first call packs the weights.

        If `x` requires a gradient, the product uses dequantized weights.
        """
        if x.requires_grad:
            return super().forward(x)
        self._product = self._product or Int4Product(self)
        return self._product(x.reshape(-1, self.in_features)).view(*x.shape[:-1], self.out_features)


class BlockEmbedding(nn.Embedding):
    """An embedding whose table stays in a file; rows are dequantized on lookup."""

    def __init__(self, matrix: FileMatrix) -> None:
        nn.Module.__init__(self)
        self.num_embeddings, self.embedding_dim = matrix.shape
        self.padding_idx = None
        self.matrix = matrix

    @property
    def weight(self) -> Tensor:
        """The table `(vocabulary, hidden size)` in bfloat16."""
        return self.matrix.weights(slice(None)).bfloat16()

    def forward(self, ids: Tensor) -> Tensor:
        rows = self.matrix.weights(ids.flatten().numpy())
        return rows.bfloat16().view(*ids.shape, self.embedding_dim)


class Int4Product:
    """`x (rows, inputs) @ W.T + b` in bfloat16 for concatenated layers: `(rows, outputs)`."""

    def __init__(self, *layers: BlockLinear) -> None:
        runs = itertools.groupby(layers, key=lambda layer: layer.matrix.bits)
        self.parts = [PackedPart([*run]) for _, run in runs]
        self.shape = tuple(part.shape for part in self.parts)

    def __call__(self, x: Tensor) -> Tensor:
        parts = [part(x) for part in self.parts]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    def add(self, x: Tensor, other: Tensor) -> Tensor:
        return other + self(x)


class PackedPart:
    """The product of layers with the same number of bits per code, packed for the kernel."""

    def __init__(self, layers: Sequence[BlockLinear]) -> None:
        self.bits = layers[0].matrix.bits
        inputs = layers[0].in_features
        outputs = sum(layer.out_features for layer in layers)
        self.shape = outputs, inputs, self.bits
        self.group = group_of(inputs, self.bits)
        inputs *= self.bits // 4  # an 8-bit code counts as two inputs
        self.packed = torch.empty(outputs, inputs // 2, dtype=torch.uint8)
        self.scales_and_zeros = torch.empty(inputs // self.group, outputs, 2, dtype=torch.bfloat16)
        step = max(1, PACKED_AT_ONCE // inputs // 64) * 64
        for start in range(0, outputs, step):
            rows = slice(start, min(start + step, outputs))
            codes, scales, offsets = _read_rows(layers, rows)
            # The kernel computes scale * (code - 8) + zero with a bfloat16 scale. The zero corrects
            # the rounding of the scale, so that each group's mean is exact. This halves the KL
            # divergence of Qwen2.5-Coder-1.5B.
            center = 8 if self.bits == 4 else 136
            rounded = scales.bfloat16()
            codes = codes.int()
            mean = codes.unflatten(1, (-1, self.group)).sum(-1, dtype=torch.int32) / self.group
            zeros = offsets + mean * scales - (mean - center) * rounded
            if self.bits == 8:
                codes = torch.cat([codes >> 4, codes & 15], 1)
                rounded = torch.cat([16 * rounded, rounded], 1)
                zeros = torch.cat([torch.zeros_like(zeros), zeros], 1)
            self.packed[rows] = torch._convert_weight_to_int4pack_for_cpu(codes, 1)
            self.scales_and_zeros[:, rows] = torch.stack([rounded, zeros.bfloat16()], -1).transpose(
                0, 1
            )
        for layer in layers:
            layer.matrix.forget()
        self.bias = joined_bias(layers)

    def __call__(self, x: Tensor) -> Tensor:
        if self.bits == 8:
            x = torch.cat([x, x], 1)
        y = torch._weight_int4pack_mm_for_cpu(x, self.packed, self.group, self.scales_and_zeros)
        return y if self.bias is None else y.add_(self.bias)


def _read_rows(layers: Sequence[BlockLinear], rows: slice) -> Blocks:
    """Return these rows of the layers' concatenated matrices."""
    parts = []
    start = 0
    for layer in layers:
        inside = slice(max(rows.start - start, 0), min(rows.stop - start, layer.out_features))
        if inside.start < inside.stop:
            parts.append(layer.matrix.blocks(inside))
        start += layer.out_features
    return parts[0] if len(parts) == 1 else Blocks(*map(torch.cat, zip(*parts, strict=True)))


class Int4Gate:
    """SiLU(gate(x)) * up(x) `(rows, outputs)`, in one product."""

    def __init__(self, gate: BlockLinear, up: BlockLinear) -> None:
        self.product = Int4Product(gate, up)
        self.shape = self.product.shape

    def __call__(self, x: Tensor) -> Tensor:
        gate, up = self.product(x).chunk(2, 1)
        if gate.numel() < SERIAL:
            return F.silu(gate).mul_(up)
        # if threads split an operator, the last elements of each part may round differently
        parts = gate.split(max(1, (SERIAL - 1) // gate.shape[1]))
        return torch.cat([F.silu(part) for part in parts]).mul_(up)


def is_fastest(wide: str) -> bool:
    """Return whether int4 products are at least as fast as those in dtype `wide`, for 1 and 4 rows.

    Times PROBED square products of size PROBED_SIZE, which exceed the CPU caches, once per CPU,
    torch version, thread count and `wide`. The result is cached on disk.
    """
    key = [*kernel_facts(), torch.__version__, torch.get_num_threads(), wide]
    return probed_once("int4", key, partial(_test_speed, wide))["fastest"]


def _test_speed(wide: str) -> dict[str, bool]:
    dtype = getattr(torch, wide)
    layer = nn.Linear(PROBED_SIZE, PROBED_SIZE, bias=False, dtype=dtype)
    in_blocks = BlockLinear(RoundedMatrix(layer.weight.detach(), 4))
    dense = [Product(layer, packed=can_multiply(dtype)) for _ in range(PROBED)]
    int4 = [Int4Product(in_blocks) for _ in range(PROBED)]
    x = torch.ones(4, PROBED_SIZE, dtype=torch.bfloat16)
    # products of packed weights have at least four rows, see `decoder.ROWS`
    runs = [(dense, x.to(dtype), []), (int4, x[:1], []), (int4, x, [])]
    with torch.inference_mode():
        for _ in range(1 + REPEATS):
            for products, rows, taken_s in runs:
                start_s = perf_counter()
                for product in products:
                    product(rows)
                taken_s.append(perf_counter() - start_s)
    dense_s, *int4_s = (median(taken_s) for _, _, taken_s in runs)
    return {"fastest": max(int4_s) <= dense_s}


def fits(module: nn.Module) -> bool:
    """Return whether the kernel supports the shape of a linear layer."""
    return type(module) is nn.Linear and not (
        module.in_features % GROUP or module.out_features % OUTPUTS
    )


def dense_copy(module: nn.Module) -> nn.Module:
    """Return a trainable copy of a module, with dequantized weights and without hooks."""
    if isinstance(module, BlockLinear):
        dense = nn.Linear(
            module.in_features,
            module.out_features,
            bias=module.bias is not None,
            dtype=torch.bfloat16,
        )
        dense.load_state_dict(module.state_dict() | {"weight": module.weight})
        return dense
    dense = copy(module)
    # Hooks must not be shared: transformers would capture each layer's output twice, and a hook may
    # hold a reference to the whole network.
    dense._forward_hooks = OrderedDict()
    dense._forward_pre_hooks = OrderedDict()
    vars(dense).pop("_output_capturing_hooks_installed", None)
    dense._buffers = dict(module._buffers)
    dense._parameters = deepcopy(module._parameters)
    # not named_children(), which names a module that occurs twice only once
    dense._modules = {
        name: None if child is None else dense_copy(child)
        for name, child in module._modules.items()
    }
    return dense


def round_network(net: nn.Module, head_bits: int = 8) -> None:
    """Round the linear layers of a network to 4 bits, and its lm_head to `head_bits`."""
    head = net.get_output_embeddings()
    for parent in [*net.modules()]:
        for name, module in [*parent.named_children()]:
            if fits(module):
                bits = head_bits if module is head else 4
                weight = module.weight.detach().bfloat16()
                setattr(parent, name, BlockLinear(RoundedMatrix(weight, bits), module.bias))
