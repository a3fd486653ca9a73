"""Grouped attention of one token a row: what torch's own gives, and the model as it was behind the block."""

from contextlib import nullcontext

import pytest
import torch

from specnb.lm.hf.engine import new_cache
from specnb.medusa import text
from tests.tiny_models import torch_model


@pytest.fixture(scope="module")
def net():
    return torch_model("llama", vocab_size=64, max_position_embeddings=128).eval()


@torch.inference_mode()
def logits(net, tokens, split):
    """Logits of each token behind `split`, fed one by one to every row at once."""
    cache = new_cache(net)
    rows = [net(input_ids=tokens[:, :split], past_key_values=cache).logits[:, -1]]
    for at in range(split, tokens.shape[1]):
        rows.append(net(input_ids=tokens[:, at : at + 1], past_key_values=cache).logits[:, -1])
    return torch.stack(rows, dim=1)


def test_rows_are_those_of_torchs_own_attention(net, monkeypatch):
    tokens = torch.randint(5, 64, (4, 24), generator=torch.Generator().manual_seed(1))
    wanted = logits(net, tokens, 9)
    widths = []
    real = text.grouped_attention
    monkeypatch.setattr(text, "grouped_attention", lambda *a, **kw: (widths.append(a[1].shape[2]), real(*a, **kw))[1])
    with text.grouped(net):
        found = logits(net, tokens, 9)
    assert (found - wanted).abs().max() < 1e-5 * wanted.abs().max()
    assert set(widths) == {1, 9}, "both the block and the single tokens came by"
    config = net.config.get_text_config(decoder=True)
    assert config.num_key_value_heads < config.num_attention_heads, "heads share keys here, or this shows nothing"


def test_the_model_is_as_it_was_behind_the_block(net):
    before = net.config._attn_implementation
    with pytest.raises(ZeroDivisionError), text.grouped(net):
        assert net.config._attn_implementation == text.GROUPED
        raise ZeroDivisionError
    assert net.config._attn_implementation == before


def test_masks_are_kept(net):
    tokens = torch.randint(5, 64, (2, 12), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(tokens)
    mask[0, :5] = 0
    rows = []
    for attention in (nullcontext(), text.grouped(net)):
        cache = new_cache(net)
        with torch.inference_mode(), attention:
            net(input_ids=tokens[:, :-1], attention_mask=mask[:, :-1], past_key_values=cache)
            rows.append(net(input_ids=tokens[:, -1:], attention_mask=mask, past_key_values=cache).logits)
    assert torch.allclose(*rows, atol=1e-5)


def test_sliding_windows_keep_their_own():
    net = torch_model("mistral", vocab_size=64, sliding_window=8).eval()
    before = net.config._attn_implementation
    with text.grouped(net):
        assert net.config._attn_implementation == before
