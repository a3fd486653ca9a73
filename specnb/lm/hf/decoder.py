"""The forward pass of Llama, Mistral, Qwen2 and Qwen3 on a CPU, from tokens to logits.

transformers' modules take about 10 ms of a 135M model's forward pass, and torch packs the weights
for every product. Here oneDNN packs them once, and SiLU and residuals are fused into the products.

A token's logits are bit-identical in a block of any width, because the computation of a row does
not depend on the number of rows. Products of one row round differently from products of several, so
a product has at least ROWS rows. Separate activation operators would be split between threads, and
the end of each part would round differently. Attention runs in blocks of one size, each over the
keys up to its own tokens, padded to a multiple of LANES with masked entries, which add exact zeros.
`probe.certify` checks this on the current CPU.

Symbols: n new tokens after `n_held` in the cache; L layers, D hidden size, H query heads, G
key/value heads, d head size, F inner size, V vocabulary.
"""

from collections.abc import Callable, Collection, Sequence
from copy import copy
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    LlamaForCausalLM,
    MistralForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
)

from specnb.lm.hf.int4 import BlockLinear, Int4Gate, Int4Product
from specnb.lm.hf.product import MAX_ROWS, GatedProduct, Product, can_pack
from specnb.lm.tree import Tree

FAMILIES = (LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM)
MOVING_ROTATIONS = ("dynamic", "longrope")
"""RoPE scaling types whose angles depend on the length of the text."""
ROWS = 4
"""Minimum rows of a product. Four rows take less time than one with AVX-512, 7 % more with AVX2
(SmolLM2-135M)."""
LANES = 64
"""Keys are padded to a multiple of this, larger than the kernel's vectors and unrolled loops."""
BLOCK = 16
"""Query rows per attention call: tokens times the query heads that share keys."""


def attends_to_all(config: PreTrainedConfig) -> bool:
    """Return whether all layers attend to all past tokens, without windows or chunks."""
    kinds = {
        *(getattr(config, "layer_types", None) or ()),
        *(getattr(config, "attention_layers", None) or ()),
    }
    windowed = getattr(config, "sliding_window", None) and getattr(
        config, "use_sliding_window", True
    )
    return kinds <= {"full_attention", "global"} and not windowed


def refuse(net: PreTrainedModel) -> str:
    """Return why this forward pass does not support `net`; "" if it does."""
    config = net.config
    if type(net) not in FAMILIES or config.hidden_act != "silu":
        families = ", ".join(family.__name__ for family in FAMILIES)
        return f"{type(net).__name__} is not one of {families} with SiLU"
    if net.device.type != "cpu" or net.dtype == torch.float16:
        return f"{net.dtype} on {net.device} has no packed product"
    if not attends_to_all(config):
        return "some of its layers attend to a window of the past"
    if (scaling := config.rope_parameters.get("rope_type")) in MOVING_ROTATIONS:
        return f"its rotary scaling ({scaling}) depends on the length of the text"
    if not all(type(layer) in (nn.Linear, BlockLinear) for layer in linear_layers(net)):
        return "its linear layers are quantized"
    return ""


def linear_layers(net: PreTrainedModel) -> list[nn.Module]:
    """Return the linear layers of `net`."""
    return [module for name, module in net.named_modules() if name.endswith(("_proj", "lm_head"))]


def with_layers(
    net: PreTrainedModel,
    layers: Sequence[nn.Module],
    *,
    norm: nn.Module | None = None,
    lm_head: nn.Module | None = None,
) -> PreTrainedModel:
    """Return a copy of `net` with these layers, norm and lm_head; it shares the other modules."""
    part = copy(net)
    body = copy(net.model)
    config = copy(net.config)
    body._modules = net.model._modules | {
        "layers": nn.ModuleList(layers),
        "norm": norm or net.model.norm,
    }
    part._modules = net._modules | {"model": body, "lm_head": lm_head or net.lm_head}
    config.num_hidden_layers = len(layers)
    part.config = config
    return part


LAYER_STEP = 8
"""The int4 probe runs every LAYER_STEP-th layer: layers of equal shapes use the same kernels."""


class Block(NamedTuple):
    """The weights of a layer; `q_norm` and `k_norm (d,)` are None except in Qwen3."""

    attention_norm: Tensor  # (D,)
    qkv: Product | Int4Product  # D -> (H + 2 G) d
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: Product | Int4Product  # H d -> D
    mlp_norm: Tensor  # (D,)
    gate: GatedProduct | Int4Gate  # D -> F: SiLU(gate(h)) * up(h)
    down: Product | Int4Product  # F -> D

    @property
    def shapes(self) -> tuple:
        """The shapes of the products. Layers with equal shapes use the same kernels."""
        return self.qkv.shape, self.out.shape, self.gate.shape, self.down.shape


class Call(NamedTuple):
    """One call of attention, for rows with equal numbers of keys."""

    path: Tensor | None
    """Nodes of a tree to move to consecutive cache entries for these rows; None for a chain."""
    rows: Tensor
    """`(calls G block,)`: index of each row's query among the `(n H, d)` of the pass."""
    mask: Tensor
    """`(calls, 1, block, keys)`: 0 if the row attends to the key, else -inf."""


class Decoded(NamedTuple):
    """Logits `(keep, V)`; states `(n, D)` before and after the final norm, and by tapped layer."""

    logits: Tensor
    pre_norm: Tensor
    post_norm: Tensor
    taps: dict[int, Tensor]


class Decoder:
    """A forward pass with the current weights of `net`, and a KV cache for up to `n_ctx` tokens.

    `rows` is the minimum number of rows of a product: ROWS for equal bits at all widths, or 1. With
    int4 it is always 1.
    """

    def __init__(self, net: PreTrainedModel, n_ctx: int, *, rows: int) -> None:
        config = net.config
        body = net.model
        packed = can_pack(net)
        in_blocks = all(type(layer) is BlockLinear for layer in linear_layers(net))
        self.packed = packed
        self.rows = 1 if in_blocks else rows
        # oneDNN adds in the dtype of its product
        self.residual = torch.float32 if in_blocks else net.dtype
        self.H = config.num_attention_heads
        self.G = config.num_key_value_heads
        self.d = body.layers[0].self_attn.head_dim
        self.embed = body.embed_tokens
        self.dtype = net.dtype
        self.blocks = [_block(layer, packed) for layer in body.layers]
        self.norm = _wide(body.norm.weight)  # (D,)
        self.eps = torch.tensor(config.rms_norm_eps, dtype=self.norm.dtype)
        self.head = _product(net.lm_head, packed=packed)
        # (1, n_ctx, d)
        cos, sin = body.rotary_emb(torch.empty(1, dtype=self.dtype), torch.arange(n_ctx)[None])
        half = self.d // 2
        self.cos = cos[0, :, None]
        self.sin = torch.cat([-sin[0, :, None, :half], sin[0, :, None, half:]], -1)
        self.cache = torch.zeros(len(self.blocks), 2, self.G, 0, self.d, dtype=self.dtype)

    def sample(self) -> "Decoder":
        """Return a decoder of every LAYER_STEP-th layer and one of each shape, for fast probes."""
        blocks = {block.shapes: index for index, block in enumerate(self.blocks)}
        chosen = sorted({*blocks.values(), *range(0, len(self.blocks), LAYER_STEP)})
        part = copy(self)
        part.blocks = [self.blocks[index] for index in chosen]
        part.cache = self.cache[: len(chosen)]
        return part

    @property
    def shapes(self) -> list:
        """All shapes that determine the bits of a forward pass."""
        return [[block.shapes for block in self.blocks], self.head.shape, self.H, self.G, self.d]

    def decode(
        self,
        x: Tensor,
        n_held: int,
        *,
        keep: int,
        tree: Tree | None = None,
        taps: Collection[int] = (),
    ) -> Decoded:
        """Run embeddings `x (n, D)` after `n_held` tokens; return the logits of the last `keep`.

        Row i is token i of a chain, or node i of `tree`. `taps` are layers, from 0, whose outputs
        to return.
        """
        n = len(x)
        H = self.H
        G = self.G
        d = self.d
        half = d // 2
        pad = max(0, self.rows - n)
        self._reserve(n_held + n)
        depths = range(n) if tree is None else tree.depths
        positions = n_held + torch.tensor(depths)
        # (n, 1, d)
        cos = self.cos[positions]
        sin = self.sin[positions]
        attend = self._plan_attention(depths, n_held, tree, pad)
        slots = self.cache[:, :, :, n_held : n_held + n].unbind()  # of each layer (2, G, n, d)
        states = {}
        # (rows, D), padded at the start with the first token
        x = torch.cat([x[:1].expand(pad, -1), x]) if pad else x
        x = x.to(self.residual)
        for index, block in enumerate(self.blocks):
            h = self._normalize(x, block.attention_norm)  # (rows, D)
            qkv = block.qkv(h).view(-1, H + 2 * G, d)
            if pad:
                qkv = qkv[pad:]
            qk = qkv[:, : H + G]  # views: (n, H + G, d)
            q = qk[:, :H]  # (n, H, d)
            k = qk[:, H:]  # (n, G, d)
            if block.q_norm is not None:
                q.copy_(self._normalize(q, block.q_norm))
                k.copy_(self._normalize(k, block.k_norm))
            swapped = torch.cat([qk[..., half:], qk[..., :half]], -1)
            qk.mul_(cos).addcmul_(swapped, sin)  # RoPE: (a, b) -> (a cos - b sin, b cos + a sin)
            new = qkv[:, H:].view(n, 2, G, d).permute(1, 2, 0, 3)  # keys and values (2, G, n, d)
            slots[index].copy_(new)
            x = block.out.add(attend(q, index, new), x)  # (rows, H d) -> (rows, D)
            h = self._normalize(x, block.mlp_norm)
            x = block.down.add(block.gate(h), x)  # (rows, F) -> (rows, D)
            if index in taps:
                states[index] = x[pad:].to(self.dtype)
        post = self._normalize(x, self.norm)
        logits = self.head(post[-max(keep, self.rows) :])[-keep:]
        return Decoded(logits, x[pad:].to(self.dtype), post[pad:], states)

    def _normalize(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return RMSNorm of `x (…, D)`, in float32; using more operators takes 5 % longer."""
        norms = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=weight.dtype)
        scale = torch.addcmul(self.eps, norms, norms, value=1 / x.shape[-1]).rsqrt_()
        return (x * scale).mul_(weight).to(self.dtype)

    def _plan_attention(
        self, depths: Sequence[int], n_held: int, tree: Tree | None, pad: int
    ) -> Callable[[Tensor, int, Tensor], Tensor]:
        """Return the attention function of a pass.

        It maps queries `(n, H, d)`, a layer and its new cache entries to outputs `(rows, H d)`.
        """
        n = len(depths)
        shared = self.H // self.G
        if tree is None and n > MAX_ROWS:
            return partial(self._attend_long, n_held)
        if tree is None and n * shared <= BLOCK and n_held // LANES == (n_held + n - 1) // LANES:
            return self._plan_one_call(n, n_held, pad)
        calls, order = plan(depths, n_held, tree, self.H, self.G, pad, self.dtype)
        return partial(self._attend, n_held, calls, order)

    def _plan_one_call(
        self, n: int, n_held: int, pad: int
    ) -> Callable[[Tensor, int, Tensor], Tensor]:
        """Return the attention function for a few tokens in one call, faster than `plan`."""
        G = self.G
        d = self.d
        shared = self.H // G
        # In float32, the bits of a row may depend on the number of rows. In bfloat16 they do not,
        # except that CPUs with AVX2 only use another kernel for fewer than four rows.
        size = max(ROWS, n * shared) if self.rows == 1 else call_size(shared)
        tokens = (torch.arange(size) // shared).clamp(max=n - 1)
        n_keys = (n_held // LANES + 1) * LANES
        hidden = torch.arange(n_keys) > n_held + tokens[None, None, :, None]
        mask = additive_mask(hidden, self.dtype)  # (1, 1, size, n_keys)
        queries = torch.zeros(1, G, size, d, dtype=self.dtype)
        # (n, G, shared, d)
        filled = queries[0, :, : n * shared].view(G, n, shared, d).transpose(0, 1)
        keys, values = (self.cache[:, part, None, :, :n_keys].unbind() for part in (0, 1))

        def attend(q: Tensor, layer: int, _new: Tensor) -> Tensor:
            filled.copy_(q.view(n, G, shared, d))
            out = F.scaled_dot_product_attention(
                queries, keys[layer], values[layer], attn_mask=mask
            )
            out = out[0, :, : n * shared].view(G, n, shared, d).transpose(0, 1).reshape(n, -1)
            return torch.cat([out[:1].expand(pad, -1), out]) if pad else out

        return attend

    def _attend(
        self, n_held: int, calls: list[Call], order: Tensor, q: Tensor, layer: int, new: Tensor
    ) -> Tensor:
        """Return attention of `q (n, H, d)` in blocks of one size, `(rows, H d)` with padding."""
        kv = self.cache[layer]
        q = q.reshape(-1, self.d)
        outs = []
        for path, rows, mask in calls:
            # Sums over keys in another order round differently, so each node's ancestors are moved
            # to consecutive entries, one path at a time.
            if path is not None:
                kv[:, :, n_held : n_held + len(path)] = new.index_select(2, path)
            queries = q.index_select(0, rows).view(len(mask), self.G, -1, self.d)
            keys, values = kv[:, None, :, : mask.shape[-1]].expand(-1, len(mask), -1, -1, -1)
            outs.append(
                F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask).view(
                    -1, self.d
                )
            )
        if calls[0].path is not None:
            kv[:, :, n_held : n_held + new.shape[2]] = new
        out = outs[0] if len(outs) == 1 else torch.cat(outs)
        return out.index_select(0, order).view(-1, self.H * self.d)

    def _attend_long(self, n_held: int, q: Tensor, layer: int, _new: Tensor) -> Tensor:
        """Return causal attention of a long block `q (n, H, d)` over all keys, `(n, H d)`."""
        n = len(q)
        length = n_held + n
        visible = torch.ones(n, length, dtype=torch.bool).tril_(n_held)
        keys, values = self.cache[layer, :, None, :, :length]
        q = q.transpose(0, 1)[None]
        out = F.scaled_dot_product_attention(q, keys, values, attn_mask=visible, enable_gqa=True)
        return out[0].transpose(0, 1).reshape(n, -1)

    def _reserve(self, n: int) -> None:
        """Grow the cache to `n` tokens or twice its size, rounded up to a multiple of LANES."""
        room = self.cache.shape[3]
        if n > room:
            more = -(-max(2 * room, n, 4 * LANES) // LANES) * LANES - room
            self.cache = F.pad(self.cache, (0, 0, 0, more))

    def gather(self, start: int, nodes: Sequence[int]) -> None:
        """Move the entries `start + nodes` to consecutive positions from `start`, in this order."""
        rows = start + torch.tensor(nodes, dtype=int)
        self.cache[..., start : start + len(nodes), :] = self.cache[..., rows, :]


def _wide(weight: Tensor) -> Tensor:
    """Return the weights of a norm in at least float32, as norms are computed."""
    return weight.detach().to(torch.promote_types(weight.dtype, torch.float32))


def _block(layer: nn.Module, packed: bool) -> Block:
    attention = layer.self_attn
    mlp = layer.mlp
    q_norm, k_norm = (getattr(attention, name, None) for name in ("q_norm", "k_norm"))
    return Block(
        _wide(layer.input_layernorm.weight),
        _product(attention.q_proj, attention.k_proj, attention.v_proj, packed=packed),
        None if q_norm is None else _wide(q_norm.weight),
        None if k_norm is None else _wide(k_norm.weight),
        _product(attention.o_proj, packed=packed),
        _wide(layer.post_attention_layernorm.weight),
        Int4Gate(mlp.gate_proj, mlp.up_proj)
        if isinstance(mlp.gate_proj, BlockLinear)
        else GatedProduct(mlp.gate_proj, mlp.up_proj, packed=packed),
        _product(mlp.down_proj, packed=packed),
    )


def _product(*layers: nn.Linear, packed: bool) -> Product | Int4Product:
    in_blocks = all(isinstance(layer, BlockLinear) for layer in layers)
    return Int4Product(*layers) if in_blocks else Product(*layers, packed=packed)


def additive_mask(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """Return an additive attention mask: -inf where `hidden`, else 0."""
    return torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))


def call_size(shared: int) -> int:
    """Return the number of query rows per attention call if `shared` query heads share keys."""
    return -(-max(1, BLOCK // shared) * shared // BLOCK) * BLOCK


def plan(
    depths: Sequence[int],
    n_held: int,
    tree: Tree | None,
    H: int,
    G: int,
    pad: int,
    dtype: torch.dtype,
) -> tuple[list[Call], Tensor]:
    """Return the attention calls, and the index of each query `(pad + n, H)` in their outputs.

    Padding repeats the first token. The number of keys depends on the token, not on the block,
    because sums over 192 and over 256 keys have different orders. Example, a tree of four nodes:

    parents -1 0 0 2     path 0 2 3 for rows 0, 2, 3; path 0 1 for row 1
    """
    shared = H // G
    per_call = max(1, BLOCK // shared)  # tokens per call
    slot = np.arange(call_size(shared)).clip(max=per_call * shared - 1)
    heads = np.arange(G)[:, None] * shared + slot % shared  # (G, size)
    place = np.empty(len(depths) * H, dtype=np.int64)
    calls = []
    base = 0
    for path, nodes in _paths(len(depths), tree):
        last = n_held + np.array([depths[node] for node in nodes])  # each node's last visible key
        for keys in np.unique(last // LANES + 1) * LANES:
            chosen = np.flatnonzero(last // LANES + 1 == keys // LANES)
            rows = np.array(nodes)[chosen]
            visible = last[chosen]
            n_calls = -(-len(rows) // per_call)
            token = np.arange(n_calls)[:, None] * per_call + slot // shared  # (calls, size)
            token = token.clip(max=len(rows) - 1)
            queries = rows[token][:, None] * H + heads  # (calls, G, size)
            hidden = torch.from_numpy(np.arange(keys) > visible[token][:, None, :, None])
            calls.append(
                Call(path, torch.from_numpy(queries.ravel()), additive_mask(hidden, dtype))
            )
            place[queries.ravel()] = base + np.arange(queries.size)
            base += queries.size
    return calls, torch.from_numpy(np.concatenate([place[:H]] * pad + [place]))


def _paths(n: int, tree: Tree | None) -> list[tuple[Tensor | None, list[int]]]:
    """Return paths that cover all nodes, each with the nodes that no earlier path covers."""
    if tree is None:
        return [(None, list(range(n)))]
    paths = []
    placed = set()
    for leaf in range(n - 1, -1, -1):  # the last node not yet placed is a leaf
        if leaf not in placed:
            path = tree.path(leaf)
            paths.append((torch.tensor(path), [node for node in path if node not in placed]))
            placed.update(path)
    return paths
