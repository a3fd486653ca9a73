"""The embedded pair of the divergence lab: what the case needs of it."""

import pytest
import torch

from specnb.divergence import pair as small

IDS = torch.randint(0, 256, (1, 24), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def pair():
    return small.pair()


@torch.no_grad()
def logits(model, ids=IDS, **options):
    return model(ids, **options).logits


def test_pair_has_the_shape_of_the_case(pair):
    draft, target = pair.draft.config, pair.target.config
    assert (draft.num_local_experts, target.num_local_experts) == (8, 16)
    assert draft.num_hidden_layers < target.num_hidden_layers
    assert draft.hidden_size == target.hidden_size and draft.intermediate_size == target.intermediate_size
    for config in (draft, target):
        assert config.num_experts_per_tok == 4
        assert set(config.layer_types) == {"sliding_attention", "full_attention"}
        assert (config._attn_implementation, config._experts_implementation) == ("eager", "eager")
    size = sum(parameter.nbytes for model in (pair.draft, pair.target) for parameter in model.parameters())
    assert size < 8 << 20


def test_logits_depend_on_the_whole_past_and_differ_clearly(pair):
    for model in (pair.draft, pair.target):
        clean, changed = logits(model), IDS.clone()
        changed[0, 3] = (IDS[0, 3] + 1) % 256
        off = (logits(model, changed) - clean).abs().mean(-1)[0]
        assert off[:3].max() < 1e-4 and off[3:].min() > 0.1
        assert clean.std() > 1
        assert clean.softmax(-1).amax(-1).median() < 0.95


def test_same_seed_gives_the_same_bits_and_another_seed_others(pair):
    again, other = small.make("draft"), small.make("draft", seed=1)
    assert torch.equal(logits(pair.draft), logits(again))
    assert not torch.allclose(logits(pair.draft), logits(other), atol=0.1)


def test_cached_steps_agree_with_one_forward(pair):
    whole = logits(pair.draft)
    with torch.no_grad():
        prompt = pair.draft(IDS[:, :20], use_cache=True)
    steps = logits(pair.draft, IDS[:, 20:], past_key_values=prompt.past_key_values)
    assert torch.allclose(steps, whole[:, 20:], atol=1e-3)


def test_bfloat16_is_the_rounded_float32_model_with_exact_positions(pair):
    rounded = small.make("draft", dtype="bfloat16")
    assert rounded.lm_head.weight.dtype is torch.bfloat16
    assert torch.equal(rounded.lm_head.weight, pair.draft.lm_head.weight.bfloat16())
    assert torch.equal(rounded.model.rotary_emb.inv_freq, pair.draft.model.rotary_emb.inv_freq)
    off = (logits(rounded) - logits(pair.draft)).norm() / logits(pair.draft).norm()
    assert 0 < off < 0.1


def test_decoy_twin_has_the_statistics_and_nothing_else(pair):
    twin = small.decoy_twin(pair.draft)
    for (name, ours), theirs in zip(pair.draft.named_parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours.flatten().sort().values, theirs.flatten().sort().values), name
        assert not torch.equal(ours, theirs), name
    assert (logits(twin) - logits(pair.draft)).norm() > logits(pair.draft).norm()
    assert torch.equal(logits(pair.draft), logits(small.make("draft")))


def test_copy_is_equal_and_shares_no_memory(pair):
    copy = small.copy_of(pair.draft)
    assert torch.equal(logits(copy), logits(pair.draft))
    ours = {parameter.data_ptr() for parameter in pair.draft.parameters()}
    assert ours.isdisjoint(parameter.data_ptr() for parameter in copy.parameters())
