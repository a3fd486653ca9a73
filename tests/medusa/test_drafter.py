"""Heads as drafter, on tiny torch models: what they are fed, chains and trees of them, loading, the command line."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from specnb.decode.generate import generate
from specnb.decode.sampling import Chooser, Draws, Sampling
from specnb.draft.base import TokenView
from specnb.draft.load import load_drafter
from specnb.errors import InputError, LoadError, NonFiniteLogits
from specnb.lm import toy
from specnb.lm.hf.model import HfModel
from specnb.measure import pair
from specnb.medusa import checkpoint
from specnb.medusa import drafter as heads_load
from specnb.medusa.drafter import HeadsDrafter, best_tree, drafting_s, tree_curve, tree_size
from specnb.medusa.nets import Backbone, Heads, HeadsConfig
from specnb.medusa.tree import PUBLISHED, TreePlan, grow
from tests.tiny_models import VOCAB, WIDTH, torch_model

PROMPT = [1, 5, 9, 13]
BUSH = TreePlan((-1, -1, 0, 0, 1, 2), (0, 1, 0, 2, 0, 0))
KINDS = ("medusa", "hydra")


def opened(seed=0, **config):
    return HfModel(torch_model(seed=seed, **config), None, name="tiny")


def made_heads(target, kind="medusa", *, n_heads=3, input="pre_norm", draft_vocab=0, scale=0.5, seed=1):
    """Random heads: every one says something else, so whatever is mixed up shows."""
    backbone = Backbone.of(target.network)
    config = HeadsConfig(
        kind=kind, n_heads=n_heads, hidden_size=WIDTH, vocab_size=VOCAB, input=input, draft_vocab=draft_vocab,
        backbone=backbone.digest, backbone_name="tiny",
    )  # fmt: skip
    token_map = torch.arange(1, 2 * draft_vocab, 2) if draft_vocab else None
    heads = Heads(config, backbone, token_map)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.copy_(scale * torch.randn(parameter.shape, generator=generator))
    return heads.eval()


@pytest.fixture(scope="module")
def target():
    return opened()


def hidden_of(target, tokens):
    """The hidden state after `tokens`, before and after the final norm, by another way than the drafter's."""
    net = target.network
    seen = {}
    hook = net.model.norm.register_forward_hook(lambda _m, inputs, output: seen.update(pre=inputs[0], post=output))
    with torch.inference_mode():
        net(torch.tensor([list(tokens)]))
    hook.remove()
    return seen["pre"][0, -1], seen["post"][0, -1]


def rows_from_scratch(target, heads, tokens, paths):
    """Rows over the vocabulary of the head after each path of drafts, the last token of `tokens` being the newest."""
    hidden = dict(zip(("pre_norm", "post_norm"), hidden_of(target, tokens[:-1]), strict=True))[heads.config.input]
    with torch.inference_mode():
        rows = [heads.draft_logits(len(path), hidden[None], torch.tensor([[tokens[-1], *path]]))[0] for path in paths]
    if heads.token_map is not None:
        rows = [torch.full((VOCAB,), -torch.inf).index_copy(0, heads.token_map, row) for row in rows]
    return [row.numpy() for row in rows]


def proposals(target, drafter, **settings):
    """What `drafter` proposed in each round of a generation, with the tokens it was told."""
    found = []
    plain = drafter.propose

    def propose(tokens, k, rng):
        proposal = plain(tokens, k, rng)
        found.append((tuple(tokens), proposal))
        return proposal

    drafter.propose = propose
    made = generate(target, PROMPT, drafter=drafter, ignore_eog=True, **({"max_new_tokens": 24} | settings))
    return made, found


# --- what they are fed, and which head speaks of which place --------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "contract", "draft_vocab"),
    [("medusa", "pre_norm", 0), ("medusa", "post_norm", 20), ("hydra", "pre_norm", 20), ("hydra", "post_norm", 0)],
)
def test_a_chain_is_what_the_heads_say_of_the_last_computed_token(target, kind, contract, draft_vocab):
    heads = made_heads(target, kind, input=contract, draft_vocab=draft_vocab)
    made, found = proposals(target, HeadsDrafter(target, heads), k=3)
    assert made.drafter == kind and found[0][1].ids == () and len(found) > 4
    for tokens, proposal in found[1:]:
        assert proposal.tree is None and proposal.q_draft is None and proposal.forward_s > 0
        for j, token in enumerate(proposal.ids):
            (row,) = rows_from_scratch(target, heads, tokens, [proposal.ids[:j]])
            assert row[token] >= row.max() - 1e-3
            assert not draft_vocab or token % 2 == 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("draft_vocab", [0, 20])
def test_a_tree_holds_the_ranks_of_the_plan(target, kind, draft_vocab):
    heads = made_heads(target, kind, draft_vocab=draft_vocab)
    _, found = proposals(target, HeadsDrafter(target, heads, BUSH))
    assert found[0][1].ids == () and len(found) > 4
    for tokens, proposal in found[1:]:
        assert proposal.tree.parents == BUSH.first(len(proposal.ids)).parents and proposal.forward_s > 0
        for node, token in enumerate(proposal.ids):
            (row,) = rows_from_scratch(target, heads, tokens, [proposal.up_to(node)[:-1]])
            assert row[token] == pytest.approx(np.sort(row)[-1 - BUSH.ranks[node]], abs=1e-3)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("plan", [None, BUSH], ids=["chain", "tree"])
def test_greedy_output_is_plain_decoding(target, kind, temperature, plan):
    heads = made_heads(target, kind, scale=0.02)  # nearly the backbone's next token: some drafts are right
    settings = {"max_new_tokens": 40, "ignore_eog": True}
    made = generate(target, PROMPT, drafter=HeadsDrafter(target, heads, plan), temperature=temperature, **settings)
    assert made.lossless and len(made.token_ids) == 40 and made.k == (6 if plan else 4)
    if not temperature:
        assert made.token_ids == generate(target, PROMPT, **settings).token_ids


@pytest.mark.parametrize("plan", [None, TreePlan.chain(3), BUSH], ids=["chain", "chain tree", "tree"])
def test_heads_that_know_the_text_are_accepted_where_they_should_be(plan):
    """A backbone of period 5 and heads that say what comes i + 2 places behind: nothing is ever rejected."""
    target = periodic()
    heads = made_heads(target, scale=0.0)
    speak(heads)
    drafter = HeadsDrafter(target, heads, plan)
    made = generate(
        target, [0, 1, 2], drafter=drafter, k=3 if plan is None else None, max_new_tokens=40, ignore_eog=True
    )
    assert made.token_ids == tuple((3 + i) % 5 for i in range(40))
    inner = made.rounds[1:-1]
    assert all(r.n_accepted == 3 for r in inner) and made.rounds[0].k == 0


def periodic():
    """A network that says (t + 1) mod 5 after t: its layers add nothing, embedding t leads lm_head to t + 1."""
    net = torch_model(num_hidden_layers=1, tie_word_embeddings=False)
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            if ".layers." in name and parameter.dim() > 1:
                parameter.zero_()
        net.get_input_embeddings().weight.zero_()
        net.get_output_embeddings().weight.zero_()
        for token in range(5):
            net.get_input_embeddings().weight[token, token] = 1.0
            net.get_output_embeddings().weight[(token + 1) % 5, token] = 1.0
    return HfModel(net, None, name="periodic")


def speak(heads):
    """Head i of h = e_t turns to e_(t+1+i), with -2 e_t SiLU'd away: its argmax is t + 2 + i."""
    with torch.no_grad():
        for i, head in enumerate(heads.heads):
            head.blocks[0].linear.bias.zero_()
            weight = head.blocks[0].linear.weight
            weight.zero_()
            for token in range(5):
                weight[(token + 1 + i) % 5, token] = 3.0


def test_the_state_of_the_newest_token_would_be_the_wrong_one():
    """The planted fault: heads fed one token further on draft one place too far, and only acceptance shows it."""
    target = periodic()
    heads = made_heads(target, scale=0.0)
    speak(heads)

    class TooFar(HeadsDrafter):
        def propose(self, tokens, k, rng):
            proposal = super().propose(tokens, k, rng)
            return proposal._replace(ids=tuple((token + 1) % 5 for token in proposal.ids))

    made = generate(target, [0, 1, 2], drafter=TooFar(target, heads), k=3, max_new_tokens=20, ignore_eog=True)
    assert made.accepted_tokens == 0 and made.token_ids == tuple((3 + i) % 5 for i in range(20))


# --- sampling, controllers, how many --------------------------------------------------------------------------------


def test_sampled_chains_carry_rows_over_the_whole_vocabulary(target):
    heads = made_heads(target, draft_vocab=20)
    made, found = proposals(target, HeadsDrafter(target, heads), k=3, temperature=1.0)
    assert made.total_draft_tokens > 10
    for tokens, proposal in found[1:]:
        if not proposal.ids:
            continue
        assert proposal.q_draft.shape == (len(proposal.ids), VOCAB)
        assert np.allclose(proposal.q_draft.sum(axis=1), 1) and not proposal.q_draft[:, 0::2].any()
        for j, row in enumerate(proposal.q_draft):
            (logits,) = rows_from_scratch(target, heads, tokens, [proposal.ids[:j]])
            assert np.allclose(row, Sampling(1.0).probabilities(logits), atol=1e-4) and row[proposal.ids[j]] > 0


@pytest.mark.parametrize(("plan", "most"), [(None, 3), (BUSH, 6), (TreePlan((), ()), 0)])
@pytest.mark.parametrize("k", [1, 50])
def test_no_more_is_drafted_than_asked_for_and_than_there_is(target, plan, most, k):
    made, found = proposals(target, HeadsDrafter(target, made_heads(target), plan), k=k)
    assert {len(proposal.ids) for _, proposal in found[1:-7]} == {min(k, most)} and made.k == k


class Limited:
    """A picker that ends drafting after so many picks, by refusing or by having enough."""

    def __init__(self, picks, refuses):
        self._left, self._refuses, self.enough = picks, refuses, False
        self._chooser = Chooser(Sampling(), Draws(np.random.default_rng(0)))

    def pick(self, logits):
        if self._refuses and not self._left:
            return None
        self._left -= 1
        self.enough = not self._refuses and not self._left
        return self._chooser.pick(logits)


@pytest.mark.parametrize(("kind", "refuses", "picks"), [("medusa", True, 1), ("hydra", False, 2), ("hydra", True, 2)])
def test_the_picker_ends_a_chain(target, kind, refuses, picks):
    drafter = HeadsDrafter(target, made_heads(target, kind))
    target.reset()
    target.forward(PROMPT)
    assert len(drafter.propose(TokenView([*PROMPT, 7]), 3, Limited(picks, refuses)).ids) == picks


# --- what is refused ------------------------------------------------------------------------------------------------


def test_a_target_that_shows_no_hidden_states_is_refused(target):
    with pytest.raises(InputError, match=r"toy does not show those of cyclic.*backend=hf"):
        HeadsDrafter(toy.cyclic(5), made_heads(target))
    with pytest.raises(InputError, match="backend=hf"):
        load_drafter("medusa", toy.cyclic(5))


def test_a_plan_beyond_the_heads_is_refused(target):
    with pytest.raises(InputError, match=r"4 tokens deep.* 3 heads"):
        HeadsDrafter(target, made_heads(target), TreePlan.chain(4))
    with pytest.raises(InputError, match="ranks up to 20, but there are 3 heads that choose among 20 tokens"):
        HeadsDrafter(target, made_heads(target, draft_vocab=20), TreePlan((-1,), (20,)))


def test_heads_of_another_opened_target_are_refused(target):
    with pytest.raises(InputError, match="reads hidden states of tiny as it was opened for that drafter"):
        generate(opened(), PROMPT, drafter=HeadsDrafter(target, made_heads(target)))


def test_a_target_without_trees_is_refused_before_the_first_token(target, monkeypatch):
    drafter = HeadsDrafter(target, made_heads(target), BUSH)
    monkeypatch.setattr(target, "caps", replace(target.caps, trees=False, trees_reason="sliding windows"))
    monkeypatch.setattr(target, "forward", lambda *_, **__: pytest.fail("a token was fed"))
    with pytest.raises(InputError, match=r"cannot verify trees of drafts: sliding windows"):
        generate(target, PROMPT, drafter=drafter)


@pytest.mark.parametrize("plan", [None, BUSH], ids=["chain", "tree"])
def test_broken_heads_are_named_as_such(target, plan):
    heads = made_heads(target)
    with torch.no_grad():
        heads.heads[1].blocks[0].linear.bias.fill_(float("nan"))
    with pytest.raises(NonFiniteLogits, match=r"while drafting, after 5 tokens.*head 1 has NaN"):
        generate(target, PROMPT, drafter=HeadsDrafter(target, heads, plan), k=3)


# --- loading --------------------------------------------------------------------------------------------------------


@pytest.fixture
def saved(target, tmp_path):
    return checkpoint.save(
        made_heads(target), tmp_path / "heads", dtype="float32", facts={"accuracy": [[0.5, 0.1]] * 3}
    )


def test_a_checkpoint_becomes_a_chain_unless_a_tree_is_asked_for(target, saved):
    for tree, nodes in {"chain": 0, 4: 4, "4": 4, BUSH: 6}.items():
        drafter = load_drafter("medusa", target, heads_checkpoint=saved, tree=tree, strict=True).drafter
        assert drafter.tree_nodes == nodes and drafter.findings == () and drafter.vocab is None
    drafter = load_drafter("medusa", target, heads_checkpoint=str(saved), tree=3).drafter
    assert drafter._plan == grow(np.array([[0.5, 0.1]] * 3), 3)[0]


def test_without_accuracies_a_tree_has_the_published_shape_and_says_so(target, saved):
    (saved / "training.json").unlink()
    drafter = load_drafter("medusa", target, heads_checkpoint=saved, tree=9).drafter
    assert drafter._plan == grow(PUBLISHED[:3], 9)[0] and "published" in drafter.findings[0]
    drafter = load_drafter("medusa", target, heads_checkpoint=saved, tree="auto").drafter
    assert drafter.tree_nodes == 0 and drafter.findings[-1].startswith("a chain is drafted")


@pytest.mark.parametrize(
    ("card", "message"),
    [('{"accuracy": [[0.9, 0.9]]}', "sum to 1.8"), ('{"accuracy": "good"}', "table of numbers"), ("{", "JSON")],
)
def test_accuracies_of_unknown_origin_are_checked(target, saved, card, message):
    (saved / "training.json").write_text(card)
    with pytest.raises(InputError, match=f"training.json.*{message}"):
        load_drafter("medusa", target, heads_checkpoint=saved)


@pytest.mark.parametrize("tree", ["", "bush", "0", -3, 2.5, "2.5", None])
def test_what_is_no_tree_is_refused_before_anything_is_read(target, tree):
    with pytest.raises(InputError, match="chain, auto, or a number of nodes"):
        load_drafter("medusa", target, heads_checkpoint="nowhere", tree=tree)
    assert tree_size("7") == 7


@pytest.mark.parametrize("strict", [False, True])
def test_a_wrong_checkpoint_is_a_mistake_and_no_reason_to_decode_plainly(target, saved, strict, tmp_path, monkeypatch):
    other = opened(seed=5)
    for path, model, words in [(tmp_path / "nowhere", target, "no heads at"), (saved, other, "another model")]:
        with pytest.raises(InputError, match=words):
            load_drafter("medusa", model, heads_checkpoint=path, strict=strict)

    def damaged(*_):
        raise LoadError("heads.safetensors is cut off")

    monkeypatch.setattr(heads_load, "load_trained_heads", damaged)
    with pytest.raises(InputError, match="is cut off"):
        load_drafter("medusa", target, heads_checkpoint=saved, strict=strict)


def test_without_a_path_the_shipped_heads_of_this_very_model_are_taken(target, tmp_path, monkeypatch):
    made = {"other-medusa": (opened(seed=5), "medusa"), "a-hydra": (target, "hydra"), "b-medusa": (target, "medusa")}
    for name, (model, kind) in made.items():
        checkpoint.save(made_heads(model, kind), tmp_path / name)
    for module in (heads_load, checkpoint):
        monkeypatch.setattr(module, "shipped", lambda: {name: tmp_path / name for name in made})
    assert load_drafter("medusa", target).drafter.name == "medusa"
    assert load_drafter("medusa", target, heads_checkpoint="a-hydra").drafter.name == "hydra"
    with pytest.raises(InputError, match=r"no shipped heads were trained on tiny.*a-hydra, b-medusa, other-medusa"):
        load_drafter("medusa", opened(seed=9))


# --- costs, and the tree they choose --------------------------------------------------------------------------------


def test_the_costs_of_trees_are_measured_with_trees(target, monkeypatch):
    fed = []
    plain = target.forward_tree
    monkeypatch.setattr(target, "forward_tree", lambda ids, tree: fed.append(tree.parents) or plain(ids, tree))
    curve = tree_curve(target, widths=(1, 3, 5), context=8, repeats=2)
    assert curve.widths == (1, 3, 5) and [len(s) for s in curve.samples_s] == [2, 2, 2] and target.n_past == 0
    assert sorted(fed) == sorted([(-1, 0, 0)] * 4 + [(-1, 0, 0, 0, 0)] * 4)
    assert drafting_s(target, made_heads(target), 3, repeats=2) > 0 and target.n_past == 0


def test_the_tree_is_chosen_by_costs_and_may_be_none(target, saved, monkeypatch):
    from specnb.measure.cost import CostCurve

    def best(*seconds):
        curve = CostCurve(model="m", context=0, widths=(1, 33), samples_s=tuple((s,) for s in seconds))
        with monkeypatch.context() as patch:
            patch.setattr(heads_load, "tree_curve", lambda *_args, **_options: curve)
            return best_tree(target, heads, table)

    heads, table = made_heads(target), np.array([[0.6, 0.2], [0.4, 0.2], [0.3, 0.1]])
    free = best(1e3, 1e3)
    dear = best(1e3, 1e3 * 33)
    assert len(free.best.plan) == 14 and free.best.plan.depth == 3 and len(dear.best.plan) == 0
    planned = load_drafter("medusa", target, heads_checkpoint=saved, tree="auto").drafter
    assert "is drafted" in planned.findings[-1]
    assert planned._plan is not None and planned.tree_nodes == len(planned._plan)


# --- the command line -----------------------------------------------------------------------------------------------


@pytest.fixture
def loads_tiny(monkeypatch):
    monkeypatch.setattr(pair, "load", lambda name: opened() if name == "tiny" else toy.cyclic(5))


def run_pair(*args, **settings):
    return pair.run_pair(*args, **({"max_new_tokens": 12, "ignore_eog": True, "k": None} | settings))


@pytest.mark.parametrize(("tree", "nodes"), [("chain", 4), ("5", 5)])
def test_a_pair_with_heads(loads_tiny, saved, tree, nodes):
    made = run_pair("tiny", "medusa", PROMPT, heads_checkpoint=str(saved), tree=tree, with_baseline=True)
    assert made.generation.drafter == "medusa" and made.generation.k == nodes and made.summary.identical
    assert made.generation.fallback is None and made.summary.notes == ()
    assert any(r.parents for r in made.generation.rounds) == (tree == "5")
    assert json.loads(made.model_dump_json())["summary"]["notes"] == []


@pytest.mark.parametrize("drafter", [None, "lookup"])
def test_options_of_heads_without_heads_are_a_mistake(loads_tiny, drafter):
    with pytest.raises(InputError, match=f"--heads-checkpoint and --tree.*--drafter medusa .got {drafter or 'no'}"):
        run_pair("five", drafter, [0], heads_checkpoint="x", tree="chain")


def test_the_command_prints_what_there_is_to_know_of_heads(loads_tiny, saved, monkeypatch):
    from typer.testing import CliRunner

    from specnb.cli import app

    (saved / "training.json").unlink()
    monkeypatch.setattr(HfModel, "encode", lambda self, text, **_: [1, 5, 9])
    words = ["generate", "--target", "tiny", "--prompt", "x", "--drafter", "medusa", "--heads-checkpoint", str(saved)]
    shown = CliRunner().invoke(app, [*words, "--tree", "5", "--max-new-tokens", "6"], env={"COLUMNS": "200"})
    assert shown.exit_code == 0, shown.output
    assert "published" in shown.output and "tiny, medusa" in shown.output
    document = CliRunner().invoke(app, [*words, "--max-new-tokens", "6", "--json", "--baseline"])
    summary = json.loads(document.output)["summary"]
    assert summary["identical"] is True and summary["notes"][0].startswith("a chain is drafted")
