"""Heads over tiny torch models: untrained they say what the backbone says, and borrow without owning."""

import pytest
import torch

from specnb.errors import InputError
from specnb.medusa.nets import Backbone, Heads, HeadsConfig, final_norm, misfits
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


@pytest.fixture(scope="module", params=FAMILIES)
def net(request):
    """A tiny model whose final norm is not the identity, so that once and twice differ."""
    model = torch_model(request.param.removesuffix("_tied"), **FAMILIES[request.param]).eval()
    with torch.no_grad():
        final_norm(model).weight.uniform_(0.5, 2.0, generator=torch.Generator().manual_seed(1))
    return model


@pytest.fixture(scope="module")
def llama():
    return torch_model("llama", seed=3).eval()


def made(net, **settings) -> Heads:
    token_map = settings.pop("token_map", None)
    n_map = 0 if token_map is None else len(token_map)
    config = HeadsConfig(**({"n_heads": 3, "hidden_size": WIDTH, "vocab_size": VOCAB, "draft_vocab": n_map} | settings))
    return Heads(config, Backbone.of(net), token_map)


def states(net, ids) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states of the last position in front of and behind the final norm, and the logits."""
    seen = []
    with final_norm(net).register_forward_hook(lambda module, given, out: seen.append((given[0], out))):
        logits = net(input_ids=ids).logits
    ((before, behind),) = seen
    return before[:, -1], behind[:, -1], logits[:, -1]


def randomised(heads: Heads, seed: int = 0) -> Heads:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.normal_(0, 0.2, generator=generator)
    return heads


IDS = torch.tensor([[5, 9, 31, 7], [8, 8, 40, 2]])


@torch.no_grad()
@pytest.mark.parametrize(
    ("kind", "lm_head", "token_map", "contract"),
    [
        ("medusa", {}, None, "pre_norm"), ("hydra", {}, MAP, "post_norm"),
        ("medusa", {"lm_head": "private"}, MAP, "pre_norm"), ("hydra", {"lm_head": "private"}, None, "post_norm"),
        ("medusa", {"lm_head": "low_rank", "rank": 4}, MAP, "post_norm"),
        ("hydra", {"lm_head": "low_rank", "rank": 4}, None, "pre_norm"),
    ],
)  # fmt: skip
def test_zero_heads_say_what_the_backbone_says(net, kind, lm_head, token_map, contract):
    heads = made(net, kind=kind, token_map=token_map, input=contract, n_layers=2, **lm_head)
    before, behind, logits = states(net, IDS)
    fed = before if contract == "pre_norm" else behind
    rows = logits if token_map is None else logits[:, token_map]
    for head in range(3):
        found = heads.draft_logits(head, fed, IDS)
        torch.testing.assert_close(found, rows, rtol=1e-5, atol=1e-5 * float(rows.abs().max()))
    if kind == "medusa":
        torch.testing.assert_close(heads.all_logits(fed[0]), rows[:1].expand(3, -1), rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(heads.as_input(before), fed)


def test_training_leaves_the_backbone_as_it_was(llama):
    before = {name: p.detach().clone() for name, p in llama.named_parameters()}
    heads = made(llama, lm_head="private")
    norm = heads.as_input(torch.ones(1, WIDTH)), heads.normed(torch.ones(1, WIDTH))
    optimiser = torch.optim.AdamW(heads.parameters(), lr=0.1)
    hidden = states(llama, IDS)[0].detach()
    sum(heads.draft_logits(i, hidden).logsumexp(-1).sum() for i in range(3)).backward()
    optimiser.step()
    assert all(torch.equal(p, before[name]) for name, p in llama.named_parameters())
    assert all(p.grad is None or not p.grad.any() for p in llama.parameters())
    torch.testing.assert_close(norm[1], heads.normed(torch.ones(1, WIDTH)), rtol=0, atol=0)
    assert all(p.grad is not None for p in heads.parameters())


@torch.no_grad()
def test_hydra_sees_exactly_the_tokens_before_the_one_it_drafts(llama):
    heads = randomised(made(llama, kind="hydra"))
    hidden = states(llama, IDS)[0][:1]
    ids = torch.tensor([[3, 4, 5, 6]])
    for head in range(3):
        rows = heads.draft_logits(head, hidden, ids)
        for place in range(4):
            changed = ids.clone()
            changed[0, place] = 50
            same = torch.equal(heads.draft_logits(head, hidden, changed), rows)
            assert same == (place > head), f"head {head}, token {place}"


@torch.no_grad()
@pytest.mark.parametrize("lm_head", [{}, {"lm_head": "private"}, {"lm_head": "low_rank", "rank": 4}])
def test_all_heads_at_once_are_the_heads_one_by_one(llama, lm_head):
    heads = randomised(made(llama, token_map=MAP, **lm_head))
    hidden = states(llama, IDS)[0]
    singly = torch.cat([heads.draft_logits(i, hidden[:1]) for i in range(3)])
    torch.testing.assert_close(heads.all_logits(hidden[0]), singly, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_a_map_gives_rows_of_the_whole_vocabulary(llama):
    heads = randomised(made(llama, token_map=MAP))
    hidden = states(llama, IDS)[0]
    few = heads.draft_logits(0, hidden)
    assert few.shape == (2, len(MAP)) and torch.equal(heads.full_ids(few.argmax(-1)), MAP[few.argmax(-1)])
    every = randomised(made(llama))
    torch.testing.assert_close(every.draft_logits(0, hidden)[:, MAP], few, rtol=1e-5, atol=1e-5)


def test_cost_is_what_a_hand_counts():
    """SmolLM2-135M: hidden 576, vocabulary 49152, four heads: 1,327,104 weights and 2,304 biases."""
    hidden, vocab = 576, 49152
    weight = torch.zeros(1).expand(vocab, hidden)  # no memory: only its size is asked
    backbone = Backbone(torch.nn.RMSNorm(hidden), weight, weight, "")
    sizes = {"hidden_size": hidden, "vocab_size": vocab, "n_heads": 4}
    shared = Heads(HeadsConfig(**sizes), backbone).cost()
    assert shared == {"parameters": 1_329_408, "own_bytes": 4 * 1_329_408, "shared_bytes": 4 * vocab * hidden}
    assert Heads(HeadsConfig(**sizes, bias=False), backbone).cost()["parameters"] == 1_327_104
    hydra = Heads(HeadsConfig(**sizes, kind="hydra"), backbone).cost()
    assert hydra["parameters"] == (2 + 3 + 4 + 5) * hidden * hidden + 4 * hidden
    rank = Heads(HeadsConfig(**sizes, lm_head="low_rank", rank=8), backbone).cost()
    assert rank["parameters"] == 1_329_408 + 4 * 8 * (hidden + vocab)
    few = Heads(HeadsConfig(**sizes, draft_vocab=8192, lm_head="private"), backbone, torch.arange(8192)).cost()
    assert few["parameters"] == 1_329_408 + 4 * 8192 * hidden and few["shared_bytes"] == 0


@pytest.mark.parametrize("ids", [[3, 1], [1, 1], [1, VOCAB], [-1, 1], [1.0, 2.0], [[1, 2]], []])
def test_a_bad_map_is_refused(llama, ids):
    token_map = torch.tensor(ids) if ids else torch.tensor([], dtype=torch.int64)
    config = HeadsConfig(n_heads=1, hidden_size=WIDTH, vocab_size=VOCAB, draft_vocab=token_map.numel())
    assert misfits(config, Backbone.of(llama), token_map)


def test_every_misfit_is_told(llama):
    config = HeadsConfig(n_heads=1, hidden_size=16, vocab_size=99, draft_vocab=4)
    faults = " ".join(misfits(config, Backbone.of(llama), None))
    assert all(word in faults for word in ("hidden_size 16", "vocab_size 99", "draft_vocab is 4"))


def test_a_backbone_whose_logits_are_more_than_lm_head_is_refused():
    with pytest.raises(InputError, match="softcapping"):
        Backbone.of(torch_model("gemma2", head_dim=8))
    with pytest.raises(InputError, match="without bias"):
        Backbone.of(torch_model("phi"))


def test_the_digest_knows_the_weights_and_not_their_type(llama):
    mine = Backbone.of(llama).digest
    assert Backbone.of(torch_model("llama", seed=3).to(torch.bfloat16)).digest == mine
    assert Backbone.of(torch_model("llama", seed=4)).digest != mine
    assert Backbone.of(torch_model("llama", seed=3, vocab_size=VOCAB + 8)).digest != mine


def test_heads_do_not_copy_the_network_through_a_listener(llama):
    """Whoever watches the hidden states hangs on the norm that heads copy."""
    from copy import deepcopy

    net = deepcopy(llama)

    class Listener:
        def __init__(self):
            self.network = net

        def hear(self, *_):
            """Nothing."""

    heard = Listener()
    net.model.norm.register_forward_hook(heard.hear)
    backbone = Backbone.of(net)
    config = HeadsConfig(n_heads=2, hidden_size=backbone.hidden_size, vocab_size=backbone.vocab_size)
    copied = Heads(config, backbone)._borrowed[0]
    assert not copied._forward_hooks and len(net.model.norm._forward_hooks) == 1
