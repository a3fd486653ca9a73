"""Heads as a drafter of tiny torch models: chains, trees, sampled drafts' rows, loading, replay."""

from collections import Counter
from functools import partial
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from specnb.decode.generate import generate
from specnb.decode.sampling import Sampling
from specnb.draft.load import check_drafter, load_drafter
from specnb.errors import InputError, NonFiniteLogits
from specnb.lm import toy
from specnb.lm.hf.hidden import pre_norm_states
from specnb.lm.hf.model import HfModel
from specnb.measure.cost import Cost
from specnb.measure.replay import walk_recording
from specnb.medusa import checkpoint, drafter
from specnb.medusa.drafter import HeadsDrafter, timed_trees
from specnb.medusa.tree import SIZES, TreePlan, fastest_tree, grow, tree_curve
from tests.laws.test_controllers import CONTROLLERS
from tests.laws.test_replay import check_replay
from tests.measure.recorded import record
from tests.medusa.periodic import random_heads
from tests.tiny_models import VOCAB, torch_model

PROMPT = [1, 5, 9, 13]
BUSH = TreePlan((-1, -1, 0, 0, 1, 2), (0, 1, 0, 2, 0, 0))
ODD = torch.arange(1, 40, 2)


def row_from_scratch(target, heads, tokens, path):
    """Return the row over the vocabulary of the head after drafts `path`; `tokens[-1]`: newest."""
    with torch.inference_mode():
        with pre_norm_states(target.network) as passes:
            target.network(torch.tensor([list(tokens[:-1])]))
        hidden = passes[0][0, -1]
        if heads.config.input == "post_norm":
            hidden = target.network.model.norm(hidden)
        row = heads.draft_logits(len(path), hidden[None], torch.tensor([[tokens[-1], *path]]))[0]
    if heads.token_map is not None:
        row = torch.full((VOCAB,), -torch.inf).index_copy(0, heads.token_map, row)
    return row.numpy()


def proposals(target, drafting, **settings):
    """Return a generation, and for each round the tokens that the drafter got and its proposal."""
    rounds, propose = [], drafting.propose

    def noted(tokens, k, rng):
        rounds.append((tuple(tokens), propose(tokens, k, rng)))
        return rounds[-1][1]

    drafting.propose = noted
    text = generate(
        target, PROMPT, drafter=drafting, ignore_eog=True, max_new_tokens=24, **settings
    )
    return text, rounds


@pytest.mark.parametrize(
    ("kind", "contract", "token_map"),
    [
        ("medusa", "pre_norm", None),
        ("medusa", "post_norm", ODD),
        ("hydra", "pre_norm", ODD),
        ("hydra", "post_norm", None),
    ],
)
@pytest.mark.parametrize("plan", [None, BUSH])
def test_drafts_are_the_heads_best_tokens_for_the_last_processed_token(
    tiny, kind, contract, token_map, plan
):
    heads = random_heads(tiny, token_map, kind=kind, input=contract)
    text, rounds = proposals(tiny, HeadsDrafter(tiny, heads, plan), k=6 if plan else 3)
    assert text.drafter == kind and rounds[0][1].ids == () and len(rounds) > 4
    for tokens, proposal in rounds[1:]:
        assert proposal.q_draft is None and proposal.forward_s > 0
        assert proposal.tree == (plan and plan.first(len(proposal.ids)))
        for node, token in enumerate(proposal.ids):
            above = proposal.tree.path(node)[:-1] if proposal.tree else range(node)
            row = row_from_scratch(tiny, heads, tokens, [proposal.ids[n] for n in above])
            rank = BUSH.ranks[node] if plan else 0
            assert row[token] == pytest.approx(np.sort(row)[-1 - rank], abs=1e-3)


def test_sampled_chains_have_rows_over_the_whole_vocabulary(tiny):
    heads = random_heads(tiny, token_map=ODD)
    text, rounds = proposals(tiny, HeadsDrafter(tiny, heads), k=3, temperature=1.0)
    assert text.total_draft_tokens > 10
    for tokens, (ids, rows, *_) in (drafted for drafted in rounds if drafted[1].ids):
        assert rows.shape == (len(ids), VOCAB)
        for j, row in enumerate(rows):
            logits = row_from_scratch(tiny, heads, tokens, ids[:j])
            np.testing.assert_allclose(row, Sampling(1.0).probabilities(logits), atol=1e-4)
            assert row[ids[j]] > 0


def test_another_target_is_refused_and_broken_heads_are_named(tiny):
    with pytest.raises(InputError, match="backend=hf"):
        load_drafter("medusa", toy.cyclic(5))
    heads = random_heads(tiny)
    other = HfModel(torch_model("llama"), None, name="tiny")
    with pytest.raises(InputError, match="another opened tiny"):
        generate(other, PROMPT, drafter=HeadsDrafter(tiny, heads))
    heads.heads[1].blocks[0].linear.bias.fill_(float("nan"))
    for plan in (None, BUSH):
        with pytest.raises(
            NonFiniteLogits, match=r"while drafting.*(after 6 tokens|after 5 tokens.*head 1)"
        ):
            generate(tiny, PROMPT, drafter=HeadsDrafter(tiny, heads, plan), k=3, strict=True)


# --- loading ---

TABLE = np.array([[0.6, 0.2], [0.4, 0.2], [0.3, 0.1]])


@pytest.fixture
def saved(tiny, tmp_path):
    facts = {"accuracy": TABLE.tolist()}
    return checkpoint.save_heads(
        random_heads(tiny), tmp_path / "heads", dtype="float32", facts=facts
    )


def opened(tiny, saved, **options):
    return load_drafter("medusa", tiny, heads_checkpoint=saved, **options).drafter


def test_a_checkpoint_drafts_chains_unless_a_tree_is_requested(tiny, saved):
    for tree, nodes in {"chain": 0, 4: 4, "4": 4}.items():
        drafting = opened(tiny, str(saved), tree=tree, strict=True)
        assert drafting.tree_nodes == nodes and drafting.findings == () and drafting.vocab is None
    assert opened(tiny, saved, tree=3)._plan == grow(TABLE, 3)
    (saved / "training.json").unlink()
    for tree in (9, "auto"):
        chain = opened(tiny, saved, tree=tree)
        assert chain.tree_nodes == 0 and chain.findings[-1].startswith("a chain is drafted")


def test_wrong_options_are_refused_before_a_model_is_opened(saved, tmp_path):
    target = "smollm2-135m?backend=hf"
    check_drafter("medusa", target, heads_checkpoint=str(saved), tree="auto")
    for tree in ("", "bush", "0", -3, 2.5, "2.5", None):
        with pytest.raises(InputError, match="number of nodes"):
            check_drafter("medusa", target, heads_checkpoint=str(saved), tree=tree)
    (saved / "config.json").write_text('{"n_heads": 0}')
    for path, problem in ((tmp_path / "absent", "absent"), (tmp_path, ""), (saved, "n_heads = 0")):
        with pytest.raises(InputError, match=problem or str(tmp_path)):
            check_drafter("medusa", target, heads_checkpoint=str(path))


def test_without_a_path_the_shipped_heads_of_this_model_are_used(
    tiny, circles, tmp_path, monkeypatch
):
    folders = {name: tmp_path / name for name in ("a-hydra", "b-medusa", "other-medusa")}
    for name, folder in folders.items():
        model = circles if "other" in name else tiny
        checkpoint.save_heads(random_heads(model, kind=name.partition("-")[2]), folder)
    for module in (drafter, checkpoint):
        monkeypatch.setattr(module, "shipped", lambda: folders)
    assert load_drafter("medusa", tiny).drafter.name == "medusa"
    assert opened(tiny, "a-hydra").name == "hydra"
    with pytest.raises(InputError, match=r"a-hydra, b-medusa, other-medusa.*tiny"):
        load_drafter("medusa", HfModel(torch_model("llama", seed=9), None, name="tiny"))
    with pytest.raises(InputError, match="other-medusa"):  # not a reason to decode plainly
        opened(tiny, "other-medusa")


def test_the_cost_of_trees_is_measured_with_trees(tiny, saved, monkeypatch):
    spy = Mock(wraps=tiny.forward_tree)
    monkeypatch.setattr(tiny, "forward_tree", spy)
    monkeypatch.setattr("specnb.medusa.tree.WIDTHS", (1, 3, 5, 1 << 20))
    monkeypatch.setattr("specnb.measure.cost.WIDTHS", (1,))
    curve = tree_curve(tiny)
    assert curve.widths == (1, 3, 5) and tiny.n_past == 0
    assert [len(samples) for samples in curve.samples_s] == [5] * 3
    fed = Counter(tree.parents for (_, tree), _ in spy.call_args_list)
    assert fed == {(-1, 0, 0): 7, (-1, 0, 0, 0, 0): 7}
    planned = opened(tiny, saved, tree="auto")
    assert "is drafted" in planned.findings[-1] and planned.tree_nodes == len(planned._plan)


@pytest.mark.parametrize(("per_node_s", "per_level_s"), [(0, 0), (0.02, 0), (1.0, 0), (0, 0.3)])
def test_the_chosen_tree_has_the_most_tokens_per_second(tiny, monkeypatch, per_node_s, per_level_s):
    monkeypatch.setattr(
        drafter, "drafting_s", lambda drafting, _n: per_level_s * drafting._plan.depth
    )
    curve = Cost.straight("m", 1 + 7 * per_node_s).curve
    best = fastest_tree(timed_trees(HeadsDrafter(tiny, random_heads(tiny)), TABLE, curve))
    plans = [grow(TABLE, n) for n in (0, *SIZES)]
    rates = [p.tokens(TABLE) / (1 + per_node_s * len(p) + per_level_s * p.depth) for p in plans]
    assert best.plan == plans[int(np.argmax(rates))]
    assert best.tokens_per_s == pytest.approx(max(rates))


def test_the_draft_step_time_is_per_position_of_a_chain_or_level_of_a_tree(tiny, monkeypatch):
    monkeypatch.setattr(drafter, "drafting_s", lambda drafting, k: 6.0 * k)
    heads = random_heads(tiny)
    plans = {None: 6.0, BUSH: 12.0, TreePlan((), ()): 0.0}  # 3 positions, 6 nodes in 3 levels
    for plan, step_s in plans.items():
        assert HeadsDrafter(tiny, heads, plan).step_s() == step_s


# --- replay ---


@pytest.mark.parametrize(("kind", "token_map"), [("medusa", ODD), ("hydra", None)])
@pytest.mark.parametrize("n", [1, 40])
def test_greedy_replay_equals_live_decoding_exactly(tiny, kind, token_map, n):
    drafting = HeadsDrafter(tiny, random_heads(tiny, token_map, kind=kind, spread=0.02))
    ((_, (recording,)),) = record(tiny, [drafting], [PROMPT], max_new_tokens=n)
    live = partial(generate, tiny, PROMPT, drafter=drafting, max_new_tokens=n)
    for k in (1, 3, 6):
        check_replay(recording, live(k=k), k)
    for control in CONTROLLERS.values():
        steps = [(step.drafted, step.n_accepted) for step in walk_recording(recording, control())]
        assert steps == [(r.k, r.n_accepted) for r in live(k=control()).rounds], control().name
