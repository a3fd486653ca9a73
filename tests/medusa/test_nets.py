"""Untrained heads on tiny torch models give the backbone's logits; training leaves it unchanged."""

from copy import deepcopy

import pytest
import torch

from specnb.errors import InputError
from specnb.lm.hf.hidden import final_norm, pre_norm_states
from specnb.medusa.nets import Backbone
from tests.medusa import periodic
from tests.tiny_models import VOCAB, torch_model

FAMILIES = {
    "llama": {},
    "llama_tied": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 8},
    "gemma": {"head_dim": 8},
    "gpt_neox": {},
    "mamba": {},
}
MAP = torch.arange(0, VOCAB, 3)
IDS = torch.tensor([[5, 9, 31, 7], [8, 8, 40, 2]])


@pytest.fixture(scope="module", params=FAMILIES)
def net(request):
    """A tiny model whose final norm gives other values if it is applied twice."""
    model = torch_model(request.param.removesuffix("_tied"), **FAMILIES[request.param]).eval()
    with torch.no_grad():
        final_norm(model).weight.uniform_(0.5, 2.0, generator=torch.Generator().manual_seed(1))
    return model


@pytest.fixture(scope="module")
def llama():
    return torch_model("llama", seed=3).eval()


@torch.no_grad()
def states(net, ids) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the last states before and after the final norm, and the logits."""
    with pre_norm_states(net) as passes:
        logits = net(input_ids=ids).logits
    before = passes[0][:, -1]
    return before, final_norm(net)(before), logits[:, -1]


@torch.no_grad()
@pytest.mark.parametrize(
    ("kind", "lm_head", "token_map", "contract"),
    [
        ("medusa", {}, None, "pre_norm"),
        ("hydra", {}, MAP, "post_norm"),
        ("medusa", {"lm_head": "private"}, MAP, "pre_norm"),
        ("hydra", {}, None, "pre_norm"),
        ("hydra", {"lm_head": "private"}, MAP, "pre_norm"),
    ],
)
def test_untrained_heads_give_the_backbones_logits(net, kind, lm_head, token_map, contract):
    heads = periodic.new_heads(
        Backbone.of(net), token_map, kind=kind, input=contract, n_layers=2, **lm_head
    )
    before, after, logits = states(net, IDS)
    fed = before if contract == "pre_norm" else after
    rows = logits if token_map is None else logits[:, token_map]
    for head in range(3):
        torch.testing.assert_close(
            heads.draft_logits(head, fed, IDS), rows, rtol=1e-5, atol=1e-5 * float(rows.abs().max())
        )
    if kind == "medusa":
        torch.testing.assert_close(
            heads.all_logits(fed[0]), rows[:1].expand(3, -1), rtol=1e-5, atol=1e-4
        )


def test_training_does_not_change_the_backbone(llama):
    """The hooks of its norm are not copied, either."""
    net = deepcopy(llama)
    with final_norm(net).register_forward_hook(lambda *_: None):
        heads = periodic.new_heads(Backbone.of(net), lm_head="private")
    assert not heads.norm._forward_hooks
    optimizer = torch.optim.AdamW(heads.parameters(), lr=0.1)
    sum(heads.draft_logits(i, states(net, IDS)[0]).logsumexp(-1).sum() for i in range(3)).backward()
    optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(net.parameters(), llama.parameters(), strict=True))
    assert all(p.grad is None for p in net.parameters()) and all(
        p.grad is not None for p in heads.parameters()
    )


@torch.no_grad()
def test_hydra_heads_depend_on_exactly_the_tokens_before_their_draft(llama):
    heads = periodic.random_heads(Backbone.of(llama), kind="hydra")
    hidden = states(llama, IDS)[0][:1]
    for head in range(3):
        for place in range(4):
            changed = torch.tensor([[3, 4, 5, 6]])
            rows = heads.draft_logits(head, hidden, changed)
            changed[0, place] = 50
            assert torch.equal(heads.draft_logits(head, hidden, changed), rows) == (place > head), (
                head,
                place,
            )


@pytest.mark.parametrize(("family", "config"), [("gemma2", {"head_dim": 8}), ("phi", {})])
def test_a_backbone_whose_logits_are_more_than_lm_head_is_refused(family, config):
    with pytest.raises(InputError):
        Backbone.of(torch_model(family, **config))
