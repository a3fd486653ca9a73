"""The embedded pair of the divergence lab: what the case needs of it."""

import pytest
import torch

from specnb.divergence import pair as small

IDS = torch.randint(0, 256, (1, 24), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def pair():
    return small.pair()


@torch.no_grad()
def logits(model, ids=IDS):
    return model(ids).logits


def test_logits_depend_on_the_whole_past_and_differ_clearly(pair):
    for model in pair:
        clean, changed = logits(model), IDS.clone()
        changed[0, 3] = (IDS[0, 3] + 1) % 256
        off = (logits(model, changed) - clean).abs().mean(-1)[0]
        assert off[:3].max() < 1e-4 and off[3:].min() > 0.1
        assert clean.std() > 1 and clean.softmax(-1).amax(-1).median() < 0.95


def test_seed_and_type_say_which_bits_the_pair_has(pair):
    assert torch.equal(logits(pair.draft), logits(small.make("draft")))
    assert not torch.allclose(logits(pair.draft), logits(small.make("draft", seed=1)), atol=0.1)
    rounded = small.make("draft", dtype="bfloat16")
    assert torch.equal(rounded.lm_head.weight, pair.draft.lm_head.weight.bfloat16())
    assert torch.equal(rounded.model.rotary_emb.inv_freq, pair.draft.model.rotary_emb.inv_freq)


def test_a_copy_has_the_values_and_a_decoy_twin_the_statistics_and_nothing_else(pair):
    copy, twin = small.copy_of(pair.draft), small.decoy_twin(pair.draft)
    assert torch.equal(logits(copy), logits(pair.draft))
    for (name, mine), other in zip(pair.draft.named_parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine.flatten().sort().values, other.flatten().sort().values), name
        assert not torch.equal(mine, other), name
    assert (logits(twin) - logits(pair.draft)).norm() > logits(pair.draft).norm()
    addresses = {parameter.data_ptr() for parameter in pair.draft.parameters()}
    assert addresses.isdisjoint(parameter.data_ptr() for model in (copy, twin) for parameter in model.parameters())
