"""Linear layers that give a row the same bits alone and in a block, from weights that are packed once.

torch's float32 product on a CPU takes another kernel for one row than for several, and packs the weights anew in every
forward of several rows: nine rows then cost 1.6 to 2 times what one costs. oneDNN's product on weights that it packed
before reads them once for any number of rows, and sums every row in one order. It takes a second copy of the weights.
"""

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from specnb.lm.preflight import free_bytes, need_bytes

MOST_ROWS = 64
"""More rows than this are prefill, for which torch's own product is as good."""
USUAL_ROWS = 9
"""oneDNN packs for a number of rows; the packed weights serve any other, too."""


class PackedLinear:
    """The forward of `layer` while it infers: `(…, inputs)` to `(…, outputs)`.

    A layer whose weights were changed is packed again. Where gradients are asked for, torch's own product serves.
    """

    def __init__(self, layer: nn.Linear) -> None:
        self._layer, self._of, self._packed = layer, None, None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        weight, bias = self._layer.weight, self._layer.bias
        if not torch.is_inference_mode_enabled() or x.numel() > MOST_ROWS * x.shape[-1]:
            return nn.functional.linear(x, weight, bias)
        of = weight.data_ptr(), weight._version
        if of != self._of:
            self._of, self._packed = of, torch.ops.mkldnn._reorder_linear_weight(weight.detach(), USUAL_ROWS)
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, bias, "none", [], "")


def pack(model: PreTrainedModel) -> bool:
    """Have the linear layers of a float32 model on a CPU use packed weights; return whether they do.

    They do not where torch was built without oneDNN, or where the free memory does not hold a second copy.
    """
    if model.dtype != torch.float32 or model.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    layers: list[Any] = [module for module in model.modules() if type(module) is nn.Linear]
    if need_bytes(sum(layer.weight.nbytes for layer in layers)) > free_bytes():
        return False
    for layer in layers:
        layer.forward = PackedLinear(layer)
    return True
