"""Matrix products with weights that oneDNN packs once.

The weights are read once for any number of rows, and all rows are summed in the same order. torch's
float32 product uses another kernel for single rows, and packs the weights in each pass over several
rows: nine rows then cost 1.6 to 2 times as much as one. Packed weights are a second copy in memory.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from specnb.machine import free_bytes, need_bytes

PACKED_FOR = 16
"""Number of rows for which oneDNN optimizes the packing; any number works."""
MAX_ROWS = 64
"""Longer blocks are prefill, identical in plain and speculative decoding, or training batches."""


def can_multiply(dtype: torch.dtype) -> bool:
    """Return whether oneDNN supports this type on this machine."""
    if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    return dtype != torch.float64 and torch.backends.mkldnn.is_available()


def can_pack(net: PreTrainedModel) -> bool:
    """Return whether oneDNN supports the dtype, and two more weight copies fit in memory."""
    fits = need_bytes(2 * sum(parameter.nbytes for parameter in net.parameters())) <= free_bytes()
    return can_multiply(net.dtype) and fits


def joined_bias(layers: Sequence[nn.Linear]) -> Tensor | None:
    """Return the concatenated biases of linear layers; None if they have none."""
    biases = [layer.bias.detach() for layer in layers if layer.bias is not None]
    return torch.cat(biases) if biases else None


class Product:
    """`x (rows, inputs) @ W.T + b` for several concatenated linear layers: `(rows, outputs)`."""

    def __init__(self, *layers: nn.Linear, packed: bool) -> None:
        weight = torch.cat([layer.weight.detach() for layer in layers])
        self.bias = joined_bias(layers)
        self.packed = packed
        self.shape = (*weight.shape, str(weight.dtype))
        self.weight = (
            torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_FOR) if packed else weight
        )

    def __call__(self, x: Tensor, activation: str = "none") -> Tensor:
        """Return the product, or its SiLU if `activation` is "swish"."""
        if self.packed:
            return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, activation, [], "")
        y = F.linear(x, self.weight, self.bias)
        return F.silu(y) if activation == "swish" else y

    def add(self, x: Tensor, other: Tensor) -> Tensor:
        return self._combine(x, other, "add") if self.packed else self(x) + other

    def multiply(self, x: Tensor, other: Tensor) -> Tensor:
        return self._combine(x, other, "mul") if self.packed else self(x) * other

    def _combine(self, x: Tensor, other: Tensor, operation: str) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise.binary(
            x, other, self.weight, self.bias, operation
        )


class GatedProduct:
    """SiLU(gate(x)) * up(x) `(rows, outputs)`, with both operations fused into the products."""

    def __init__(self, gate: nn.Linear, up: nn.Linear, *, packed: bool) -> None:
        self.gate = Product(gate, packed=packed)
        self.up = Product(up, packed=packed)
        self.shape = self.gate.shape

    def __call__(self, x: Tensor) -> Tensor:
        return self.up.multiply(x, self.gate(x, "swish"))


class PackedLinear(nn.Linear):
    """A linear layer with packed weights in inference mode, for families without a decoder."""

    product: Product | None = None

    def forward(self, x: Tensor) -> Tensor:
        if not torch.is_inference_mode_enabled() or x.numel() > MAX_ROWS * x.shape[-1]:
            return super().forward(x)
        self.product = self.product or Product(self, packed=True)
        return self.product(x)

    def __getstate__(self) -> dict:
        """Return the attributes without the packed weights, which cannot be copied."""
        return {**vars(self), "product": None}


def pack(net: PreTrainedModel) -> bool:
    """Pack the linear layers of a float32 model on a CPU; return whether they were packed."""
    if net.dtype != torch.float32 or net.device.type != "cpu" or not can_pack(net):
        return False
    for layer in net.modules():
        if type(layer) is nn.Linear:
            # in place: other references to this layer, and the tie to the embedding, remain valid
            layer.__class__ = PackedLinear
    return True
