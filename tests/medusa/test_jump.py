"""One block that drafts step by step: serving equals training, and greedy text is the target's."""

import numpy as np
import pytest
import torch

from specnb.decode.generate import generate
from specnb.decode.sampling import Chooser, Sampling
from specnb.lm.hf.hidden import pre_norm_states
from specnb.lm.hf.model import HfModel
from specnb.lm.tree import Tree
from specnb.medusa import recipe
from specnb.medusa.jump import JumpConfig, JumpDrafter, JumpNet
from specnb.medusa.nets import seeded
from specnb.medusa.recipe import Recipe
from specnb.medusa.rollouts import SINK, fit_maps
from specnb.medusa.train import train
from specnb.medusa.tree import TreePlan
from tests.medusa import periodic
from tests.tiny_models import VOCAB, torch_model

MAP = torch.arange(3, VOCAB, 2)
CONFIGS = {
    "jump": {"kind": "jump", "layers": (1, 2), "copied": 2},
    "eagle": {"kind": "eagle", "layers": (0, 1, 2)},
}
STEPS = 4
TREE = TreePlan((-1, 0, -1, 1, 0, 2, 4, 5), (0, 0, 1, 0, 1, 0, 0, 2))


@pytest.fixture(scope="module")
def target():
    return HfModel(torch_model("llama", num_hidden_layers=3), None, name="tiny")


def new_net(target, config, token_map=MAP):
    net = target.network
    sizes = {"hidden_size": net.config.hidden_size, "draft_vocab": len(token_map)}
    with seeded(0):
        whole = JumpConfig(n_heads=STEPS, vocab_size=VOCAB, **config, **sizes)
        return JumpNet(whole, net, token_map)


@torch.no_grad()
def states_of(target, net, tokens):
    """Return the outputs of the layers, computed by transformers: `(1, T, layers, D)`."""
    with pre_norm_states(target.network) as final:
        out = target.network.model(input_ids=tokens[None], output_hidden_states=True)
    outputs = [*out.hidden_states[1:-1], final[0]]
    return torch.stack([outputs[layer] for layer in net.config.layers], 2)


def started(target, net, tokens):
    """Return a drafter after two tokens of a prompt, and a target that has processed the rest."""
    drafter = JumpDrafter(target, net)
    target.reset()
    target.forward(tokens[:2])
    drafter.start(tokens[:2])
    target.forward(tokens[2:-1])
    return drafter


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_served_rows_equal_rolled_out_rows(target, config):
    """The rows of every step are equal live and in training, wherever a round starts."""
    net = new_net(target, config)
    tokens = torch.randint(3, VOCAB, (24,), generator=torch.Generator().manual_seed(1))
    starts = torch.arange(2, 18, 3)
    with torch.no_grad():
        rolled = [
            net.logits(g)[0]
            for g in net.roll_out(states_of(target, net, tokens), tokens[None], starts, STEPS)
        ]
    ids = tokens.tolist()
    drafter = started(target, net, ids)
    for i, start in enumerate(starts.tolist()):
        served = drafter.rows(ids[: start + 2], ids[start + 2 : start + 1 + STEPS])
        for j, row in enumerate(served):
            expected = rolled[j][i if j else start].numpy()
            np.testing.assert_allclose(row[MAP], expected, atol=2e-4, err_msg=f"{start}, step {j}")
            assert np.isinf(row[0])
    drafter.close()


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_tree_node_equals_the_draft_of_a_chain_after_its_path(target, config):
    tokens = torch.randint(3, VOCAB, (9,), generator=torch.Generator().manual_seed(2)).tolist()
    drafter = started(target, new_net(target, config), tokens)
    drafter.take_plan(TREE)
    for _ in range(2):  # nothing is left of the first tree
        nodes = drafter.propose(tokens, len(TREE), Chooser(Sampling())).ids
        for node, token in enumerate(nodes):
            path = [nodes[above] for above in TREE.path(node)]
            drafter.take_plan(None)
            row = drafter.rows(tokens, path)[-1]
            assert token == np.argsort(-row, kind="stable")[TREE.ranks[node]]
            drafter.take_plan(TREE)
    drafter.close()


def test_states_are_those_of_the_accepted_nodes_of_a_tree(target):
    ids = [5, 9, 7, 4, 8, 6]
    kept = [0, 2, 5]
    watched = target.watch_layers((0, 1))
    tree = Tree((-1, 0, 0, 1, 1, 2))
    target.reset()
    target.forward([3, 10])
    target.forward_tree(ids, tree)
    target.keep_path(kept)
    of_tree = watched[0:5].clone()
    target.reset()
    target.forward([3, 10, *(ids[node] for node in kept)])
    torch.testing.assert_close(of_tree, watched[0:5], atol=1e-4, rtol=1e-4)
    watched.close()


@pytest.mark.parametrize("plan", [None, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_greedy_text_is_that_of_plain_decoding(target, config, plan):
    drafter = JumpDrafter(target, new_net(target, config))
    drafter.take_plan(plan)
    drafted, plain = (
        generate(target, [5, 9, 7, 4], drafter=chosen, k=3, max_new_tokens=20)
        for chosen in (drafter, None)
    )
    assert drafted.token_ids == plain.token_ids and drafted.total_draft_tokens > 10
    drafter.close()


# --- training ---


def of_circles(circles, kind):
    config = {"kind": kind, "layers": (0, 1), "copied": None if kind == "eagle" else 1}
    return new_net(circles, config, torch.arange(VOCAB))


@pytest.mark.parametrize(("kind", "dtype"), [("eagle", torch.float32), ("jump", torch.bfloat16)])
def test_a_periodic_text_is_learned_and_weights_get_the_targets_dtype(
    tmp_path, monkeypatch, kind, dtype
):
    """Also with products in bfloat16."""
    monkeypatch.setattr(recipe, "auto_dtype", lambda device: "bfloat16")
    circles = periodic.backbone_model(dtype=dtype)
    periodic.write_text(circles, tmp_path / "text", length=32)
    net = of_circles(circles, kind)
    sixty = Recipe(60, batch_size=256, peak_lr=1e-2, warmup=5, roll_out=STEPS)
    log = train(net, sixty, tmp_path / "text", tmp_path / "run", save_every=60)
    assert log[-1]["top1"][0] > 0.9 and log[-1]["greedy_tau"] > 1 + 0.9 * STEPS
    assert {weight.dtype for weight in net.parameters()} == {dtype}
    drafter = JumpDrafter(circles, net.eval())
    drafted = generate(circles, periodic.prompts(1)[0], drafter=drafter, k=STEPS, max_new_tokens=20)
    assert drafted.acceptance_rate > 0.9
    drafter.close()


@torch.no_grad()
def test_the_fitted_maps_give_the_layers_input(target):
    """With fewer positions than unknowns the error is near 0, unless the damping is large."""
    net = new_net(target, CONFIGS["jump"])
    few = torch.randint(3, VOCAB, (2, 16), generator=torch.Generator().manual_seed(0))
    states = states_of(target, net, few[0])[0]
    left = []
    for damping in (1e-6, 1e3):
        fit_maps(net, few, damping=damping)
        said = net.first_input(states[SINK:-1], few[0, SINK + 1 :])
        entered = states[SINK + 1 :, 0]
        left.append((said - entered).square().sum() / entered.square().sum())
    assert left[0] < 0.01 < left[1]
