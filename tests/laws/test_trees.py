"""The laws of tree verification, in addition to those of `test_greedy` and `test_distribution`.

All tests run the shipped loop on closed-form models; drafters propose trees of fixed or random
tokens.
"""

from dataclasses import replace

import numpy as np
import pytest

from specnb.decode import accept
from specnb.decode.control import RollingAcceptance
from specnb.decode.generate import generate
from specnb.decode.sampling import Chooser, Sampling
from specnb.draft.base import Proposal
from specnb.errors import InputError, NonFiniteLogits
from specnb.lm import toy
from specnb.lm.tree import COMMITTED, Tree
from tests.laws.enumerate import distribution, total_variation
from tests.laws.test_distribution import ONE, Always, off_by
from tests.laws.trees import Trees

# --- sampling, by exact enumeration ---------------------------------------------------------------


def rejected_one_by_one(logits, proposal, chooser):
    """Alternative formulation: each child is a point mass, tested against the residual of p."""
    node, path = COMMITTED, []
    while True:
        p = chooser.sampling.probabilities(logits[node + 1])
        for child in proposal.tree.children(node):
            x = proposal.ids[child]
            if chooser.draws.bernoulli(p[x]):
                node = child
                path.append(child)
                break
            p = p.copy()
            p[x] = 0.0
            p /= p.sum()
        else:
            return accept.Acceptance(tuple(path), chooser.draws.categorical(p), ())


@pytest.mark.parametrize("seed", range(8))
def test_walking_a_tree_equals_rejecting_its_children_one_by_one(seed):
    """`accept_prob[j]` also equals the enumerated probability, given the path up to position j."""
    rng = np.random.default_rng(seed)
    proposal = Trees(5, 4, seed).propose([0], 5, None)
    logits = 1.5 * rng.standard_normal((6, 4))

    def law(rule):
        return distribution(lambda draws: rule(logits, proposal, Chooser(Sampling(0.9), draws))[:2])

    assert total_variation(law(accept.walk_drafts), law(rejected_one_by_one)) < 1e-12
    made = distribution(
        lambda draws: accept.walk_drafts(logits, proposal, Chooser(Sampling(1.0), draws))
    )
    for one in made:
        for j, chance in enumerate(one.accept_prob):
            here = [o for o in made if o.path[:j] == one.path[:j]]
            gone_on = sum(made[o] for o in here if len(o.path) > j)
            assert chance == pytest.approx(gone_on / sum(made[o] for o in here), abs=1e-12)


# --- typical acceptance: lossy, as documented -----------------------------------------------------


SURE = [0.9, 0.06, 0.04, 0.0]
EVEN = [0.25] * 4
SPLIT = [0.2, 0.5, 0.3, 0.0]
FLAT = [1 / 16] * 16


@pytest.mark.parametrize(
    ("rows", "ids", "parents", "path"),
    [
        # the longest path whose nodes pass; the threshold of EVEN is min(0.09, 0.3 / 4) = 0.075,
        # of SURE min(0.09, 0.3 * exp(-0.40)) = 0.09
        ([EVEN, SURE, EVEN, SURE, EVEN, EVEN], [0, 1, 1, 2, 0], (-1, -1, 0, 1, 3), (1, 3, 4)),
        ([EVEN, SURE, SURE, EVEN], [0, 1, 1], (-1, -1, 1), (0,)),
        ([SURE, EVEN, EVEN], [1, 2], (-1, 0), ()),
        # a target of high entropy lowers the threshold: min(epsilon = 0.09, 0.3 * exp(-entropy))
        ([FLAT, FLAT], [3], (-1,), (0,)),
        ([[0.06] * 15 + [0.1], FLAT], [0], (-1,), (0,)),
        ([[0.94, 0.06], [0.94, 0.06]], [1], (-1,), ()),  # 0.3 * exp(-0.23) = 0.24: epsilon applies
        # the most probable of equally long paths: 0.2 * 0.9 against 0.5 * 0.25
        ([SPLIT, EVEN, EVEN, EVEN], [0, 1, 2], (-1, -1, -1), (1,)),
        ([SPLIT, SURE, EVEN, EVEN, EVEN], [0, 1, 0, 0], (-1, -1, 0, 1), (0, 2)),
    ],
)
def test_typical_accepts_the_longest_and_most_probable_path_that_passes(rows, ids, parents, path):
    verdict = accept.typical(np.asarray(rows), Proposal(tuple(ids), tree=Tree(parents)), Always())
    assert verdict.path == path and verdict.accept_prob == ((1.0,) * len(path) or (0.0,))
    assert verdict.next_id == np.argmax(rows[path[-1] + 1 if path else 0])


# --- the same checks fail on rules with a planted fault -------------------------------------------


def _best_child_untested(logits, proposal, chooser):
    """Follows the first branch, whatever the target's logits are."""
    node, path = COMMITTED, []
    while children := proposal.tree.children(node):
        node = children[0]
        path.append(node)
    return accept.Acceptance(tuple(path), chooser.pick(logits[node + 1])[0], ())


def _not_renormalised(logits, proposal, chooser):
    """Tests each child with its p instead of its share of the residual."""
    node, path = COMMITTED, []
    while True:
        p = chooser.sampling.probabilities(logits[node + 1])
        children = proposal.tree.children(node)
        kept = next((c for c in children if chooser.draws.bernoulli(p[proposal.ids[c]])), None)
        if kept is None:
            p[[proposal.ids[c] for c in children]] = 0.0
            return accept.Acceptance(
                tuple(path), chooser.draws.categorical(p if p.sum() else p + 1), ()
            )
        node = kept
        path.append(node)


def _correction_from_all_of_p(logits, proposal, chooser):
    verdict = accept.walk_drafts(logits, proposal, chooser)
    end = verdict.path[-1] if verdict.path else COMMITTED
    return verdict._replace(next_id=chooser.pick(logits[end + 1])[0])


def _row_of_the_newest(logits, proposal, chooser):
    return accept.walk_drafts(logits[np.r_[0, 0 : len(logits) - 1]], proposal, chooser)


FAULTS = [_best_child_untested, _not_renormalised, _correction_from_all_of_p, _row_of_the_newest]


@pytest.mark.parametrize("faulty", FAULTS)
def test_planted_faults_are_detected(faulty):
    def rule(logits, proposal, chooser):
        return (accept.RULES["token"] if proposal.tree is None else faulty)(
            logits, proposal, chooser
        )

    target = toy.markov(3, order=2, seed=0)
    assert off_by(target, Trees(4, 3, parents=(-1, -1, 0, 1)), ONE, n=3, k=4, rule=rule) > 0.005


# --- invalid trees --------------------------------------------------------------------------------


def proposing(proposal, nodes=0):
    drafter = Trees(nodes, 5)
    drafter.propose = lambda tokens, k, rng: proposal
    return drafter


@pytest.mark.parametrize(
    "proposal",
    [
        Proposal((1, 2, 1), tree=Tree((-1, -1, -1))),
        Proposal((1, 2), tree=Tree((-1, 0, 0))),
        Proposal((1, 2), np.ones((2, 5)), tree=Tree((-1, 0))),
        Proposal((1, 2, 3, 4, 0), tree=Tree.chain(5)),
    ],
    ids=["twins", "sizes", "rows", "more"],
)
@pytest.mark.parametrize("declared", [0, 4])
def test_invalid_trees_are_rejected(proposal, declared):
    with pytest.raises(InputError):
        generate(toy.cyclic(5), [0], drafter=proposing(proposal, declared), k=4, max_new_tokens=20)


def test_a_tree_may_be_empty():
    made = generate(
        toy.cyclic(5), [0], drafter=proposing(Proposal((), tree=Tree(())), 3), max_new_tokens=5
    )
    assert made.token_ids == (1, 2, 3, 4, 0) and {r.k for r in made.rounds} == {0}


@pytest.mark.parametrize("n", [1, 2, 3, 4, 9])
def test_nodes_too_deep_to_be_committed_are_dropped(n):
    """The remaining nodes form a consistent tree."""
    chain_and_star = Proposal((1, 2, 3, 4, 2, 3), tree=Tree((-1, 0, 1, 2, -1, 4)))
    made = generate(toy.cyclic(5), [0], drafter=proposing(chain_and_star, 6), max_new_tokens=n)
    first = made.rounds[0]
    assert (
        first.parents
        == {1: (), 2: (-1, -1), 3: (-1, 0, -1, 2), 4: (-1, 0, 1, -1, 3), 9: (-1, 0, 1, 2, -1, 4)}[n]
    )
    assert made.token_ids == tuple((i + 1) % 5 for i in range(n)) and first.n_accepted == min(
        n - 1, 4
    )


@pytest.mark.parametrize("announced", [True, False])
def test_a_target_without_tree_support_is_rejected(announced):
    """Before the first token if the drafter declares trees, else when it proposes one."""
    target = toy.cyclic(5)
    target.caps = replace(target.caps, trees=False, trees_reason="its layers have sliding windows")
    drafter = Trees(3, 5) if announced else proposing(Proposal((1, 2), tree=Tree((-1, -1))))
    if announced:
        target.forward = lambda *_, **__: pytest.fail("a token was fed")
    with pytest.raises(InputError, match="sliding windows"):
        generate(target, [0], drafter=drafter)


def test_a_controller_for_chains_rejects_trees():
    with pytest.raises(InputError, match="rolling acceptance"):
        generate(toy.cyclic(5), [0], drafter=Trees(3, 5), k=RollingAcceptance())


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_nonfinite_logits_in_a_tree_stop_the_run_with_their_position(temperature):
    """The third node, second on its path, has NaN logits: two tokens after the prompt."""
    fed = []
    rows = toy.cyclic(5)._logits_of
    target = toy.ToyLM(
        lambda prefix: rows(prefix) * (np.nan if prefix == (0, 1, 2) else 1), toy.letters(5)
    )
    target.locate_nonfinite = lambda ids: fed.append(list(ids)) or "layer 7"
    shape = Proposal((1, 4, 2), tree=Tree((-1, -1, 0)))
    with pytest.raises(NonFiniteLogits, match=r"after 3 tokens.*layer 7"):
        generate(target, [0], drafter=proposing(shape), k=3, temperature=temperature)
    assert fed == [[0, 1, 2]]
    assert generate(target, [3], max_new_tokens=1).token_ids == (4,), "the state can be used again"


class Knowing(Trees):
    """Proposes a tree with the correct continuation at nodes 1, 3 and 4, and other siblings."""

    def __init__(self, plain, vocab):
        super().__init__(6, vocab)
        self._text = [*plain.prompt_ids, *plain.token_ids, *[0] * 8]

    def propose(self, tokens, k, picker):
        a, b, c, d = self._text[len(tokens) : len(tokens) + 4]
        ids = [(a + 1) % self._vocab, a, (b + 1) % self._vocab, b, c, d]
        return Proposal(tuple(ids), tree=Tree((-1, -1, 1, 1, 3, 4))) if k >= 6 else Proposal(())


@pytest.mark.model
def test_tree_verification_on_a_real_model_equals_plain_decoding(opened):
    target = opened("smollm2-135m?backend=hf&dtype=float32")
    plain = generate(target, "def fibonacci(n):\n", max_new_tokens=32)
    made = generate(
        target, plain.prompt_ids, drafter=Knowing(plain, target.vocab.size), max_new_tokens=32
    )
    assert made.token_ids == plain.token_ids and made.tau > 3
