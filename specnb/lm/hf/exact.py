"""A token gets the same bits alone, in a block and in a tree: linear layers and attention for a CPU. And trees.

torch's float32 product takes another kernel for one row than for several, and packs the weights anew in every forward
of several rows: nine rows then cost 1.6 to 2 times what one costs. oneDNN's product on weights that it packed before
reads them once for any number of rows, and sums every row in one order. It takes a second copy of the weights. In
bfloat16 torch's products compute a row alike for any number of rows from two up.

torch's attention kernel does not, and in a type with 8 bits of precision that moves logits by tenths and flips
near-ties between plain decoding and verification. Here short blocks are cut into calls of a few query rows, each
against the keys up to its own token, padded with masked entries, which add exact zeros, to a multiple of LANES.

Of a tree's node a model is told the position, and which keys it sees; a model that takes positions from elsewhere (the
index of a key, as ALiBi does, or the length of the cache), or looks back through a window over indices, would run
without an error and be wrong. `why_no_trees` reads that off the configuration; `preflight.probe_trees` finds the rest.
"""

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from specnb.lm.preflight import free_bytes, need_bytes
from specnb.lm.tree import Tree

NAME = "specnb_rows"
LANES = 64
"""Keys are padded to a multiple of this many: more than any vector register or unrolled loop of the kernel takes."""
ALIGNED = 8
"""Query rows of a call come in eights, which make every thread's scratch a multiple of 64 bytes."""
ROWS = 16
"""Rows of a call when there are tokens to fill them: more calls of 8 cost more, as do larger ones."""
MAX_ROWS = 64
"""Longer blocks are prefill, which plain and speculative decoding do alike. So are batches, which only training has."""
USUAL_ROWS = 9
"""oneDNN packs for a number of rows; the packed weights serve any other, too."""
MASKED = ("eager", "sdpa", NAME)
"""Attention implementations of transformers that add a mask of four dimensions to the scores as it is."""


class PackedLinear(nn.Linear):
    """A linear layer `(…, inputs)` to `(…, outputs)` that multiplies by packed weights while it infers.

    Weights that were changed are packed again, but a change through `.data` is not seen: change them under
    `torch.no_grad()`. Where gradients are asked for, torch's own product serves.
    """

    _of = _packed = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not torch.is_inference_mode_enabled() or x.numel() > MAX_ROWS * x.shape[-1]:
            return super().forward(x)
        of = self.weight.data_ptr(), self.weight._version
        if of != self._of:
            self._of, self._packed = of, torch.ops.mkldnn._reorder_linear_weight(self.weight.detach(), USUAL_ROWS)
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")

    def __getstate__(self) -> dict[str, Any]:
        """What a copy of the model takes along: packed weights cannot be copied."""
        return {**vars(self), "_of": None, "_packed": None}


def pack(model: PreTrainedModel) -> bool:
    """Have the linear layers of a float32 model on a CPU use packed weights; return whether they do.

    They do not where torch was built without oneDNN, or where the free memory does not hold two more copies: one is
    made, and a draft model and the state want room besides.
    """
    if model.dtype != torch.float32 or model.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    layers = [module for module in model.modules() if type(module) is nn.Linear]
    if need_bytes(2 * sum(layer.weight.nbytes for layer in layers)) > free_bytes():
        return False
    for layer in layers:
        layer.__class__ = PackedLinear  # in place: others hold this layer, and the tie to the embedding stays
    return True


def rowwise_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface: query `(1, heads, n, dim)`, key and value `(1, kv_heads, length, dim)`.

    The mask is that of `rowwise_mask`, or `(1, 1, n, length)` for the nodes of a tree, which transformers hands
    through. Returns `(1, n, heads, dim)`.
    """
    n = query.shape[2]
    if n > MAX_ROWS or len(query) > 1:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    held = key.shape[2] - n
    if attention_mask.dim() == 2:
        parts = _once(attention_mask, "parts", lambda mask: _block_parts(mask, held))
        outs = [_attend(query[:, :, part.rows], key, value, part.hidden, scaling) for part in parts]
        return outs[0] if len(outs) == 1 else torch.cat(outs, dim=1), None
    parts, order = _once(attention_mask, "parts", _tree_parts)
    nodes, outs = [x[:, :, held:].clone() for x in (key, value)], []
    # A node's ancestors do not lie side by side in the cache, and sums over keys in another order round otherwise: one
    # path after the other is put in line there; at the end the nodes lie as before.
    for part in parts:
        for x, saved in zip((key, value), nodes, strict=True):
            x[:, :, held : held + len(part.path)] = saved.index_select(2, part.path)
        outs.append(_attend(query[:, :, part.rows], key, value, part.hidden, scaling))
    for x, saved in zip((key, value), nodes, strict=True):
        x[:, :, held:] = saved
    return torch.cat(outs, dim=1).index_select(1, order), None


class Part(NamedTuple):
    """Rows of a forward that look at equally many keys: `hidden` is their mask `(rows, keys)`, 0 or -inf.

    In a tree the rows are nodes of one `path`, which is put in line for them.
    """

    rows: slice | torch.Tensor
    hidden: torch.Tensor
    path: torch.Tensor | None = None


def _once(mask: torch.Tensor, name: object, make: Callable[[torch.Tensor], Any]) -> Any:
    """What `make` makes of the mask of a forward, made by its first layer and kept on the mask for the others."""
    cached = mask.__dict__.setdefault("specnb", {})
    if name not in cached:
        cached[name] = make(mask)
    return cached[name]


def _block_parts(mask: torch.Tensor, held: int) -> list[Part]:
    """Parts of a block's mask `(n, padded)` behind `held` tokens.

    The padded length belongs to a token, not to the block: sums over 192 and 256 keys run in different orders. A block
    has at most MAX_ROWS = LANES tokens, so it crosses at most one such border.
    """
    n, padded = mask.shape
    short = max(0, padded - LANES - held)
    parts = Part(slice(0, short), mask[:short, : padded - LANES]), Part(slice(short, n), mask[short:])
    return [part for part in parts if len(part.hidden)]


def _tree_parts(mask: torch.Tensor) -> tuple[list[Part], torch.Tensor]:
    """Parts of a tree's mask `(1, 1, n, length)`, and where each node is among all their rows.

    parents -1 0 0 2     path 0 2 3 with rows 0, 2, 3; path 0 1 with row 1
    """
    n, length = mask.shape[-2:]
    held, seen = length - n, mask[0, 0, :, length - n :] == 0
    last = held + seen.sum(1) - 1  # the place of a node's own key in its path
    placed, parts = torch.zeros(n, dtype=torch.bool), []
    for leaf in range(n - 1, -1, -1):  # parents come first: a node that no path holds yet is a leaf
        if placed[leaf]:
            continue
        path, new = seen[leaf].nonzero().flatten(), seen[leaf] & ~placed
        placed |= new
        widths = (last // LANES + 1) * LANES
        for width in widths[new].unique().tolist():
            rows = (new & (widths == width)).nonzero().flatten()
            parts.append(Part(rows, _minus_infinity(torch.arange(width) > last[rows, None], mask.dtype), path))
    return parts, torch.cat([part.rows for part in parts]).argsort()


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, hidden: torch.Tensor, scaling: float | None
) -> torch.Tensor:
    """Attention of `query (1, heads, n, dim)` by its mask `hidden (n, keys)`; returns `(1, n, heads, dim)`.

    The heads that share keys and values become rows of one query, so nothing is repeated in memory; as many tokens as
    fit fill its ROWS, what is left stays zero. Rows in other numbers than whole eights would round otherwise: the
    kernel's sums depend on the alignment of its scratch buffers, which lie one behind the other, a thread each.
    """
    _, heads, n, dim = query.shape
    kv_heads, length = key.shape[1], hidden.shape[1]
    shared = heads // kv_heads
    each = min(n, max(1, ROWS // shared))  # tokens a call
    calls = -(-n // each)
    size = -(-each * shared // ALIGNED) * ALIGNED
    key, value = (_longer(x, length).expand(calls, -1, -1, -1) for x in (key, value))
    rows = torch.nn.functional.pad(query, (0, 0, 0, calls * each - n)) if calls > 1 else query
    rows = rows.reshape(kv_heads, shared, calls, each, dim).permute(2, 0, 1, 3, 4).reshape(calls, kv_heads, -1, dim)
    rows = torch.nn.functional.pad(rows, (0, 0, 0, size - each * shared))
    tokens = _token_of_row(n, calls, each, size)
    masks = _once(hidden, (each, size), lambda whole: whole.index_select(0, tokens).view(calls, 1, size, length))
    out = torch.nn.functional.scaled_dot_product_attention(rows, key, value, attn_mask=masks, scale=scaling)
    out = out[:, :, : each * shared].unflatten(2, (shared, each))  # (calls, kv_heads, shared, each, dim)
    return out.permute(0, 3, 1, 2, 4).reshape(1, calls * each, heads, -1)[:, :n]


@cache
def _token_of_row(n: int, calls: int, each: int, size: int) -> torch.Tensor:
    """Which of `n` tokens each row of the calls belongs to; rows that are left over go with some token's mask."""
    tokens = torch.arange(calls)[:, None] * each + torch.arange(size) % each
    return tokens.flatten().clamp(max=n - 1)


def rowwise_mask(
    q_length: int, kv_length: int, dtype: torch.dtype, batch_size: int = 1, **kwargs: object
) -> torch.Tensor | None:
    """transformers' mask interface: `(n, padded)`, 0 where token i of the block may look, else -inf."""
    if q_length > MAX_ROWS or batch_size > 1:
        return sdpa_mask(q_length=q_length, kv_length=kv_length, dtype=dtype, batch_size=batch_size, **kwargs)
    padded = -(-kv_length // LANES) * LANES
    last = torch.arange(kv_length - q_length, kv_length)[:, None]
    return _minus_infinity(torch.arange(padded) > last, dtype)


def _minus_infinity(hidden: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """0 where a key is seen, -inf where it is `hidden`."""
    return torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))


def _longer(x: torch.Tensor, length: int) -> torch.Tensor:
    """`x (1, heads, n, dim)` with `length` positions: seen in the cache's buffer (hf.KeptPastLayer), else padded.

    In the buffer every head has room behind its last position, so nothing is copied. Models that put keys together
    after the cache (latent attention) bring tensors without such room.
    """
    _, heads, n, _ = x.shape
    if length <= n:
        return x[:, :, :length]
    per_head, per_row = x.stride(1), x.stride(2)
    last = x.storage_offset() + (heads - 1) * per_head + length * per_row
    if per_head >= length * per_row and last <= x.untyped_storage().nbytes() // x.element_size():
        return x.as_strided((1, heads, length, x.shape[3]), x.stride())
    return torch.nn.functional.pad(x, (0, 0, 0, length - n))


def attends_to_all(config: PreTrainedConfig) -> bool:
    """Whether every layer attends to the whole past: no sliding windows, no chunks."""
    kinds = {*(getattr(config, "layer_types", None) or ()), *(getattr(config, "attention_layers", None) or ())}
    windowed = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    return kinds <= {"full_attention", "global"} and not windowed


def use_rowwise(model: PreTrainedModel) -> bool:
    """Switch `model` to row-wise attention, on a CPU, where all layers attend to the whole past.

    Return whether it was done.
    """
    config = model.config.get_text_config(decoder=True)
    plain = attends_to_all(config) and config._attn_implementation == "sdpa"
    if model.device.type != "cpu" or not plain:
        return False
    # both registries take the same function again without harm
    AttentionInterface.register(NAME, rowwise_attention)
    AttentionMaskInterface.register(NAME, rowwise_mask)
    model.set_attn_implementation(NAME)
    return config._attn_implementation == NAME  # some families keep their own


def tree_mask(tree: Tree, held: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """What is added to the scores of `tree`'s nodes behind `held` tokens, `(1, 1, T, held + T)`: 0 or -inf."""
    # never boolean: eager attention would add False and True as 0 and 1, and say nothing
    hidden = np.pad(~tree.seen, ((0, 0), (held, 0)))  # the whole past is seen
    return _minus_infinity(torch.from_numpy(hidden), dtype)[None, None].to(device)


def why_no_trees(model: PreTrainedModel, rollback: str) -> str:
    """What in this model, or its rollback, stands against trees; "" if nothing that can be read off."""
    config = model.config.get_text_config(decoder=True)
    name, attention = type(model).__name__, config._attn_implementation
    if rollback != "crop":
        return f"nodes are dropped from a cache, and the way back of this model is {rollback}"
    if not attends_to_all(config):
        return f"{name} has layers that attend to a window of the past, which they count by index, not by depth"
    if getattr(config, "alibi", False) or "position_ids" not in inspect.signature(model.forward).parameters:
        return f"{name} takes the positions of tokens from their index in the cache, not from position_ids"
    if attention not in MASKED:
        return f"its attention ({attention}) takes no mask of a tree; {' and '.join(MASKED[:2])} do"
    return ""
