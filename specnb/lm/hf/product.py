"""Products by weights that oneDNN packed once: they are read once for any number of rows, each summed in one order.

torch's own float32 product takes another kernel for one row than for several, and packs the weights anew in every
forward of several: nine rows then cost 1.6 to 2 times what one costs. Packed weights take a second copy.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from specnb.machine import free_bytes, need_bytes

PACKED_FOR = 16
"""Rows that oneDNN packs for; the packed weights serve any number."""
MAX_ROWS = 64
"""Longer blocks are prefill, which plain and speculative decoding do alike. So are batches, which only training has."""


def can_multiply(dtype: torch.dtype) -> bool:
    """Return whether oneDNN multiplies this type here."""
    if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    return dtype != torch.float64 and torch.backends.mkldnn.is_available()


def can_pack(net: PreTrainedModel) -> bool:
    """Return whether oneDNN multiplies this type here, and the free memory holds two copies more."""
    fits = need_bytes(2 * sum(parameter.nbytes for parameter in net.parameters())) <= free_bytes()
    return can_multiply(net.dtype) and fits


class Product:
    """`x (rows, inputs) @ W.T + b`, of several linear layers at once: `(rows, outputs)`."""

    def __init__(self, *layers: nn.Linear, packed: bool) -> None:
        weight = torch.cat([layer.weight.detach() for layer in layers])
        biases = [layer.bias.detach() for layer in layers if layer.bias is not None]
        self.bias = torch.cat(biases) if biases else None
        self.packed, self.shape = packed, (*weight.shape, str(weight.dtype))
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_FOR) if packed else weight

    def __call__(self, x: Tensor, activation: str = "none") -> Tensor:
        """The product, or with activation "swish" its SiLU."""
        if self.packed:
            return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, activation, [], "")
        y = F.linear(x, self.weight, self.bias)
        return F.silu(y) if activation == "swish" else y

    def add(self, x: Tensor, other: Tensor) -> Tensor:
        return self._combine(x, other, "add") if self.packed else self(x) + other

    def multiply(self, x: Tensor, other: Tensor) -> Tensor:
        return self._combine(x, other, "mul") if self.packed else self(x) * other

    def _combine(self, x: Tensor, other: Tensor, operation: str) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise.binary(x, other, self.weight, self.bias, operation)


class GatedProduct:
    """SiLU(gate(x)) * up(x) `(rows, outputs)`, each inside its product."""

    def __init__(self, gate: nn.Linear, up: nn.Linear, *, packed: bool) -> None:
        self.gate, self.up = Product(gate, packed=packed), Product(up, packed=packed)
        self.shape = self.gate.shape

    def __call__(self, x: Tensor) -> Tensor:
        return self.up.multiply(x, self.gate(x, "swish"))


class PackedLinear(nn.Linear):
    """A linear layer of a family without a decoder. Where gradients are asked for, torch's own product serves."""

    product: Product | None = None

    def forward(self, x: Tensor) -> Tensor:
        if not torch.is_inference_mode_enabled() or x.numel() > MAX_ROWS * x.shape[-1]:
            return super().forward(x)
        if self.product is None:
            self.product = Product(self, packed=True)
        return self.product(x)

    def __getstate__(self) -> dict:
        """Return what a copy of the model takes with it: packed weights cannot be copied."""
        return {**vars(self), "product": None}


def pack(net: PreTrainedModel) -> bool:
    """Have the linear layers of a float32 model on a CPU use packed weights; return whether they do."""
    if net.dtype != torch.float32 or net.device.type != "cpu" or not can_pack(net):
        return False
    for layer in net.modules():
        if type(layer) is nn.Linear:
            layer.__class__ = PackedLinear  # in place: others hold this layer, and the tie to the embedding stays
    return True
