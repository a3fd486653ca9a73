"""Offline accuracy and alpha of heads: against answers that are known, and against every round that is served."""

import numpy as np
import pytest
import torch

from specnb.decode.generate import generate
from specnb.errors import InputError, NonFiniteLogits
from specnb.lm import toy
from specnb.lm.hf.model import HfModel
from specnb.medusa.accuracy import NO_LABEL, Scores, accuracy_matrix, accuracy_table, score, states, trace
from specnb.medusa.drafter import HeadsDrafter
from specnb.medusa.gates import compare_rounds, near_tie, served_alpha, served_counts
from specnb.medusa.nets import Backbone, Heads, HeadsConfig
from specnb.records import Generation, Round
from tests.medusa import periodic
from tests.tiny_models import VOCAB, WIDTH, torch_model

KINDS = ("medusa", "hydra")


@pytest.fixture(scope="module")
def target():
    """A random llama: its texts are its own business, and so are its near-ties."""
    return HfModel(torch_model("llama", hidden_size=WIDTH), None, name="tiny")


def random_heads(target, *, seed=0, draft_vocab=0, **changed):
    backbone = Backbone.of(target.network)
    config = HeadsConfig(hidden_size=WIDTH, vocab_size=VOCAB, draft_vocab=draft_vocab, **({"n_heads": 3} | changed))
    token_map = torch.arange(VOCAB)[VOCAB - draft_vocab :] if draft_vocab else None
    return periodic.randomised(Heads(config, backbone, token_map), 0.2, seed)


def greedy(target, prompt, n=24, **options):
    return generate(target, prompt, max_new_tokens=n, ignore_eog=True, **options)


# --- states ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 31, 40])
def test_states_are_those_of_the_last_rows_and_give_the_logits(target, n):
    ids = [int(i) for i in np.random.default_rng(n).integers(3, VOCAB, 45)]
    seen = states(target, ids, n)
    net = target.network
    with torch.inference_mode():
        wide = net(input_ids=torch.tensor([ids]), output_hidden_states=True)
        torch.testing.assert_close(seen.post_norm, wide.hidden_states[-1][0, -n:], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(net.model.norm(seen.pre_norm), seen.post_norm, atol=1e-6, rtol=1e-6)
    np.testing.assert_allclose(seen.logits, wide.logits[0, -n:].numpy(), atol=1e-3)
    assert target.n_past == 0


def test_no_listener_is_left_behind_and_an_engine_without_a_network_is_refused(target):
    states(target, [3, 4, 5], 1)
    norm = target.network.model.norm
    before = len(norm._forward_hooks)
    with pytest.raises(InputError, match="outside the vocabulary"):
        states(target, [3, VOCAB], 1)
    assert len(norm._forward_hooks) == before and target.n_past == 0
    with pytest.raises(InputError, match="backend=hf"):
        states(toy.cyclic(5), [1, 2], 1)


# --- answers that are known -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_heads_fitted_to_circles_are_right_every_time(circles, fitted, kind):
    heads = fitted[kind]
    texts = [generate(circles, p, max_new_tokens=18) for p in periodic.prompts()]
    table = accuracy_table([score(heads, trace(circles, text)) for text in texts])
    assert (table[table["rank"] == 0]["marginal"] > 0.95).all()
    assert list(table[table["rank"] == 0]["n"]) == [len(texts) * (17 - head) for head in range(3)]
    chain = HeadsDrafter(circles, heads)
    served = served_alpha([generate(circles, p, drafter=chain, k=3, max_new_tokens=18) for p in periodic.prompts()])
    assert (served["alpha"] > 0.95).all()


def test_the_rank_of_a_token_is_its_place_in_the_row_ties_by_the_lower_id():
    from specnb.medusa.accuracy import _rank

    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0]]).expand(6, -1)
    labels = torch.tensor([1, 2, 3, 0, NO_LABEL, 2])
    draft = torch.tensor([1, 2, 3, 0, NO_LABEL, -1])
    assert _rank(logits, draft, labels).tolist() == [0, 1, 2, 3, NO_LABEL, 4]


def test_a_token_that_the_draft_vocabulary_lacks_is_a_miss(target):
    heads = random_heads(target, draft_vocab=8)
    text = trace(target, greedy(target, [3, 4, 5]))
    found = score(heads, text)
    for head in range(3):
        label = text.ids[1 + head :].numpy()
        missing = label < VOCAB - 8
        rank = found.rank[: len(label), head]
        assert missing.any() and (rank[missing] == 8).all() and (rank[~missing] < 8).all()
        assert (found.best[:, head] >= VOCAB - 8).all()


@pytest.mark.parametrize("shift", [-1, 1])
def test_a_shift_holds_heads_against_other_tokens(circles, shift):
    heads = periodic.new_heads(circles)
    periodic.fit(heads, circles, shift=shift)
    text = trace(circles, generate(circles, periodic.prompts()[0], max_new_tokens=18))
    right = {s: np.mean(score(heads, text, shift=s).rank[:10] == 0) for s in (-1, 0, 1)}
    assert right.pop(shift) > 0.9 and max(right.values()) == 0.0


def test_heads_that_give_nan_are_refused_rather_than_right(target):
    heads = random_heads(target)
    heads.heads[1].blocks[0].linear.bias[0] = float("nan")
    with pytest.raises(NonFiniteLogits, match="head 1"):
        score(heads, trace(target, greedy(target, [3, 4, 5])))


# --- tables ---------------------------------------------------------------------------------------------------------


def scores(*ranks):
    rank = np.array(ranks)
    return Scores(rank, np.zeros_like(rank), np.ones(rank.shape))


def test_tables_by_hand():
    """Four positions of two heads; the second head has no label at the last one."""
    one = scores([0, 0], [1, 0], [0, 2], [0, NO_LABEL])
    table = accuracy_table([one])
    np.testing.assert_allclose(accuracy_matrix(table)[:, :3], [[3 / 4, 1 / 4, 0], [2 / 3, 0, 1 / 3]])
    assert table[table["head"] == 1]["cumulative"].tolist()[:3] == pytest.approx([2 / 3, 2 / 3, 1])


def generation(*rounds):
    """Rounds as (drafts, accepted, committed); the tokens are counted up."""
    made, token = [], 0
    for i, (k, accepted, n) in enumerate(rounds):
        ids = tuple(range(token, token + n))
        token += n
        made.append(Round(i, k, accepted, (0,) * k, ids, (), 0, 0, 0, 0, 0, k + 1))
    return Generation(
        prompt_ids=(1,), token_ids=tuple(range(token)), rounds=tuple(made), wall_s=1.0, stop_reason="length"
    )


def test_served_counts_by_hand():
    """A plain round, all kept, one of three kept, none kept, and an end within the drafts, which rejects none."""
    counts = served_counts(generation((0, 0, 1), (3, 3, 4), (3, 1, 2), (3, 0, 1), (3, 2, 2)))
    assert counts.tolist() == [[3, 4], [2, 3], [1, 1]]


# --- served against scored ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "contract", "draft_vocab", "seed", "k"),
    [("medusa", "pre_norm", 0, 1, 3), ("medusa", "post_norm", 24, 2, 2), ("hydra", "pre_norm", 24, 3, 3),
     ("hydra", "post_norm", 0, 4, 1), ("medusa", "pre_norm", 24, 5, 1), ("hydra", "pre_norm", 0, 6, 2)],
)  # fmt: skip
def test_every_round_accepts_exactly_what_the_heads_are_offline_right_about(
    target, kind, contract, draft_vocab, seed, k
):
    heads = random_heads(target, kind=kind, input=contract, draft_vocab=draft_vocab, seed=seed)
    prompt = [3 + seed % 50, 7, 3 + seed % 7]
    plain, chain = greedy(target, prompt), greedy(target, prompt, drafter=HeadsDrafter(target, heads), k=k)
    assert plain.token_ids == chain.token_ids
    found = compare_rounds(chain, score(heads, trace(target, plain)), near_tie(target, heads))
    assert found.apart == 0 and found.rounds == sum(r.k > 0 for r in chain.rounds)


@pytest.mark.parametrize("kind", KINDS)
def test_rounds_that_were_served_another_state_are_seen(circles, fitted, kind, monkeypatch):
    heads = fitted[kind]
    hidden = circles.watch_hidden()
    prompt = periodic.prompts()[1]
    plain = generate(circles, prompt, max_new_tokens=24)
    monkeypatch.setattr(hidden, "at", lambda position, at=hidden.at: tuple(2 * part.flip(0) for part in at(position)))
    chain = generate(circles, prompt, drafter=HeadsDrafter(circles, heads), k=3, max_new_tokens=24)
    assert chain.token_ids == plain.token_ids
    found = compare_rounds(chain, score(heads, trace(circles, plain)), near_tie(circles, heads))
    assert found.apart > found.rounds / 2
