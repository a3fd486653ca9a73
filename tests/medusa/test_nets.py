"""Untrained heads on tiny torch models give the backbone's logits; training leaves it unchanged."""

from copy import deepcopy

import pytest
import torch

from specnb.errors import InputError
from specnb.lm.hf.hidden import final_norm, pre_norm_states
from specnb.medusa.nets import Backbone
from tests.medusa import periodic
from tests.tiny_models import VOCAB, WIDTH, torch_model

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


@torch.no_grad()
def states(net, ids) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the last states before and after the final norm, and the logits."""
    with pre_norm_states(net) as passes:
        logits = net(input_ids=ids).logits
    before = passes[0][:, -1]
    return before, final_norm(net)(before), logits[:, -1]


@torch.no_grad()
@pytest.mark.parametrize(
    ("token_map", "options"),
    [
        (None, {}),
        (MAP, {"kind": "hydra", "input": "post_norm"}),
        (MAP, {"lm_head": "private"}),
        (None, {"kind": "hydra"}),
    ],
)
def test_untrained_heads_give_the_backbones_logits(net, token_map, options):
    heads = periodic.new_heads(Backbone.of(net), token_map, n_layers=2, **options)
    before, after, logits = states(net, IDS)
    fed = after if "input" in options else before
    rows = logits if token_map is None else logits[:, token_map]
    found = [heads.draft_logits(head, fed, IDS) for head in range(3)]
    if "kind" not in options:
        found.extend(heads.all_logits(fed[0])[:, None])
    atol = 1e-5 * float(rows.abs().max())
    for drafted in found:
        torch.testing.assert_close(drafted, rows[: len(drafted)], rtol=1e-5, atol=atol)


def test_training_does_not_change_the_backbone():
    """The hooks of its norm are not copied, either."""
    net = torch_model("llama").eval()
    before = deepcopy(net.state_dict())
    with final_norm(net).register_forward_hook(lambda *_: None):
        heads = periodic.new_heads(Backbone.of(net), lm_head="private")
    assert not heads.norm._forward_hooks
    optimizer = torch.optim.AdamW(heads.parameters(), lr=0.1)
    sum(heads.draft_logits(i, states(net, IDS)[0]).logsumexp(-1).sum() for i in range(3)).backward()
    optimizer.step()
    assert all(p.grad is not None for p in heads.parameters())
    for name, weight in net.named_parameters():
        assert weight.grad is None and torch.equal(weight, before[name])


def test_hydra_heads_depend_on_exactly_the_tokens_before_their_draft(tiny):
    """Row i of the ids differs from the last row in token i."""
    heads = periodic.random_heads(tiny, kind="hydra")
    ids = torch.full((5, 4), 3).fill_diagonal_(50)
    for head in range(3):
        rows = heads.draft_logits(head, torch.ones(5, WIDTH), ids)
        differs = (rows - rows[-1]).abs().amax(1) > 1e-4
        assert differs.tolist() == [place <= head for place in range(5)]


@pytest.mark.parametrize(("family", "config"), [("gemma2", {"head_dim": 8}), ("phi", {})])
def test_a_backbone_whose_logits_are_more_than_lm_head_is_refused(family, config):
    with pytest.raises(InputError):
        Backbone.of(torch_model(family, **config))
