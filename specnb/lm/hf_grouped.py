"""Attention of one new token a row for many rows at once: batched writing of text, where it is most of the time.

torch's CPU kernel for one query a row works key by key: with 64 rows of 200 tokens it took three quarters of a step
of SmolLM2-135M. Here the query heads that share keys are the rows of one matrix product, and nothing is repeated in
memory. Rows are as they would be alone up to rounding only; exact verification has `hf_attention`.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from specnb.lm.hf_attention import attends_to_all

NAME = "specnb_grouped"


def grouped_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface: query `(rows, heads, 1, dim)`, key and value `(rows, kv_heads, length, dim)`.

    Blocks of more than one token, and masked ones, go to transformers' own. Returns `(rows, 1, heads, dim)`.
    """
    rows, heads, n, dim = query.shape
    if n > 1 or attention_mask is not None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    shared = query.view(rows, key.shape[1], -1, dim)
    # what a cache hands out is the front of a longer buffer; the product of such keys takes ten times the copy's time
    key, value = key.contiguous(), value.contiguous()
    scores = torch.matmul(shared, key.transpose(-1, -2)) * (dim**-0.5 if scaling is None else scaling)
    return torch.matmul(scores.float().softmax(-1).to(value.dtype), value).reshape(rows, 1, heads, -1), None


@contextmanager
def grouped(model: PreTrainedModel) -> Iterator[None]:
    """Grouped attention inside the block, for models on a CPU whose layers attend to the whole past with torch's own.

    Others stay as they are.
    """
    config = model.config.get_text_config(decoder=True)
    before = config._attn_implementation
    if model.device.type != "cpu" or before != "sdpa" or not attends_to_all(config):
        yield
        return
    # both registries take the same function again without harm
    AttentionInterface.register(NAME, grouped_attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    model.set_attn_implementation(NAME)
    try:
        yield
    finally:
        model.set_attn_implementation(before)
