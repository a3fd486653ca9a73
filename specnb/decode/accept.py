"""Acceptance rules for chains and trees of draft tokens, as pure functions.

Rules for sampled chains take the target's probability rows `p_target (k + 1, vocab)`, where row i
is the target's distribution after the first i draft tokens. They return the accepted draft tokens
and one more token: a correction after a rejection, or a bonus token if all were accepted. All rules
but `typical` preserve the target's distribution exactly. `RULES` maps names to rules. Rows are read
one by one, and only as far as needed, so a lazy sequence (`ProbRows`) saves softmaxes.

A tree contains several candidates for one position. Its draft tokens are deterministic, so q is a
point mass for each child of a node. Rejection sampling would try the children one by one
(SpecInfer, Miao et al. 2305.09781, section 4.3): child y is accepted with probability p(y) in
total, and the correction is distributed as p without the children. Drawing once from p, and moving
to the child with that token if there is one, gives the same distribution. No lossless rule can
accept more.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np

from specnb.decode.sampling import Chooser, Draws, ProbRows, Sampling
from specnb.draft.base import Proposal
from specnb.errors import InputError, require_known
from specnb.lm.base import LanguageModel
from specnb.lm.tree import COMMITTED, Tree


class Acceptance(NamedTuple):
    """The accepted draft tokens of a proposal, and the target's token `next_id` that follows them.

    `path` contains the indices of the accepted draft tokens in `Proposal.ids`, in order.
    `accept_prob` contains, for each tested position, the probability of an acceptance there.
    """

    path: tuple[int, ...]
    next_id: int
    accept_prob: tuple[float, ...]

    @classmethod
    def leading(cls, n: int, next_id: int, accept_prob: Sequence[float] = ()) -> "Acceptance":
        """Accept the first `n` draft tokens of a chain."""
        return cls(tuple(range(n)), next_id, tuple(accept_prob))

    @property
    def n_accepted(self) -> int:
        return len(self.path)


# --- chains of sampled draft tokens ---------------------------------------------------------------


def token_verification(
    p_target: ProbRows, q_draft: np.ndarray | None, draft_ids: Sequence[int], draws: Draws
) -> Acceptance:
    """Accept token x with probability min(1, p(x)/q(x)), else draw from norm(max(p - q, 0)).

    Leviathan et al. 2211.17192, algorithm 1; Chen et al. 2302.01318. `q_draft (k, vocab)` contains
    the rows that the draft tokens were sampled from. None means deterministic draft tokens, whose q
    is a point mass: x is accepted with probability p(x), and the correction is drawn from p without
    x. (The drafter's softmax is not q, because x was not drawn from it.)
    """
    tested = []
    for i, x in enumerate(draft_ids):
        p = p_target[i]
        q = np.eye(1, len(p), x % len(p))[0] if q_draft is None else q_draft[i]
        tested.append(min(1.0, float(p[x] / q[x])))
        if not draws.bernoulli(tested[-1]):
            return Acceptance.leading(i, draws.categorical(np.maximum(p - q, 0.0)), tested)
    return Acceptance.leading(len(draft_ids), draws.categorical(p_target[len(draft_ids)]), tested)


def block_verification(
    p_target: ProbRows, q_draft: np.ndarray, draft_ids: Sequence[int], draws: Draws
) -> Acceptance:
    """Verify the whole block; the expected length is at least that of `token_verification`.

    Sun et al. 2403.10444, algorithm 2. The output distribution is the same. The prefix of i draft
    tokens has the weight w_i = min(1, w_{i-1} p(x_i)/q(x_i)). The longest prefix whose test
    succeeds is accepted, and the correction is drawn from norm(max(w_i p - q, 0)). `accept_prob[i]`
    is the success probability h_{i+1} of the test of prefix i + 1.
    """
    k = len(draft_ids)
    weights = [1.0]
    for i, x in enumerate(draft_ids):
        weights.append(min(1.0, weights[-1] * p_target[i][x] / q_draft[i][x]))

    def residual(i: int) -> np.ndarray:
        return np.maximum(weights[i] * p_target[i] - q_draft[i], 0.0)

    tests = []
    for i in range(1, k):
        excess = float(residual(i).sum())
        tests.append(excess / (excess + 1.0 - weights[i]) if excess > 0.0 else 0.0)
    if k:
        tests.append(weights[k])
    kept = next((i for i in range(k, 0, -1) if draws.bernoulli(tests[i - 1])), 0)
    return Acceptance.leading(
        kept, draws.categorical(p_target[k] if kept == k else residual(kept)), tests
    )


# --- trees, and greedy chains ---------------------------------------------------------------------


def require_trees(target: LanguageModel) -> None:
    """Raise InputError for a target that cannot verify a tree in one forward pass."""
    if not target.caps.trees:
        why = (
            target.caps.trees_reason
            or f"its engine ({target.caps.engine}) computes only chains of tokens"
        )
        raise InputError(
            f"{target.name} cannot verify trees of draft tokens: {why}. "
            "Draft a chain (--tree chain)"
        )


def checked(proposal: Proposal, depth: int) -> Proposal:
    """Return a proposed tree without nodes of depth `depth` or more, which could not be committed.

    Raises InputError if the tree and its ids differ in size, if it has rows of `q_draft`, or if two
    children of a node are the same token.
    """
    tree = proposal.tree
    ids = proposal.ids
    if len(tree) != len(ids):
        raise InputError(
            f"got a tree of {len(tree)} nodes with {len(ids)} tokens, expected one token per node"
        )
    if proposal.q_draft is not None:
        raise InputError(
            "got a tree with rows of q_draft, expected None: trees are verified as point masses"
        )
    for (_, token), times in Counter(zip(tree.parents, ids, strict=True)).items():
        if times > 1:
            raise InputError(
                f"got {times} children of one node that are token {token}, expected distinct tokens"
            )
    kept = [node for node in range(len(ids)) if tree.depths[node] < depth]
    if len(kept) == len(ids) > 0:
        return proposal
    place = {COMMITTED: COMMITTED} | {node: at for at, node in enumerate(kept)}
    shorter = Tree(tuple(place[tree.parents[node]] for node in kept)) if kept else None
    return proposal._replace(ids=tuple(ids[node] for node in kept), tree=shorter)


def walk_drafts(logits: np.ndarray, proposal: Proposal, chooser: Chooser) -> Acceptance:
    """Pick tokens as plain decoding would, while the tree contains the picked token. Lossless.

    `logits (len(ids) + 1, vocab)`: the row after the newest token, then one after each node.
    """
    tree = proposal.tree or Tree.chain(len(proposal.ids))
    node = COMMITTED
    path = []
    tested = []
    while True:
        drafted = {proposal.ids[child]: child for child in tree.children(node)}
        token, row = chooser.pick(logits[node + 1])
        if drafted:
            tested.append(
                float(token in drafted)
                if row is None
                else min(1.0, float(row[list(drafted)].sum()))
            )
        if token not in drafted:
            return Acceptance(tuple(path), token, tuple(tested))
        node = drafted[token]
        path.append(node)


# --- chains and trees, lossy ----------------------------------------------------------------------


def typical(p_target: ProbRows, proposal: Proposal, draws: Draws) -> Acceptance:
    """Accept the longest path of draft tokens x with p(x) > min(0.09, 0.3 exp(-H(p))). LOSSY.

    Medusa, Cai et al. 2401.10774, sections 2.3 and 2.3.1; H is the entropy. Among equally long
    paths, the most likely is accepted. The token after it is drawn from p. `p_target` contains the
    row after the newest token, then one after each draft token.
    """
    parents = (proposal.tree or Tree.chain(len(proposal.ids))).parents
    paths = {COMMITTED: ()}
    likelihood = {COMMITTED: 0.0}

    @cache
    def threshold(node: int) -> float:
        row = p_target[node + 1]
        mass = row[row > 0]
        return min(0.09, 0.3 * float(np.exp(np.sum(mass * np.log(mass)))))

    for node, (parent, token) in enumerate(zip(parents, proposal.ids, strict=True)):
        if parent in paths and (chance := p_target[parent + 1][token]) > threshold(parent):
            paths[node] = (*paths[parent], node)
            likelihood[node] = likelihood[parent] + float(np.log(chance))
    end = max(paths, key=lambda node: (len(paths[node]), likelihood[node]))
    rejected = (0.0,) if end in parents else ()
    return Acceptance(
        paths[end], draws.categorical(p_target[end + 1]), (1.0,) * len(paths[end]) + rejected
    )


# --- by name --------------------------------------------------------------------------------------

Rule = Callable[[np.ndarray, Proposal, Chooser], Acceptance]
"""Maps the target's logits, a proposal and a chooser to an Acceptance.

Logits `(k + 1, vocab)`: the row after the newest token, then one after each draft token."""


def _token(logits: np.ndarray, proposal: Proposal, chooser: Chooser) -> Acceptance:
    if proposal.tree is not None or chooser.sampling.greedy:
        return walk_drafts(logits, proposal, chooser)
    return token_verification(
        ProbRows(logits, chooser.sampling), proposal.q_draft, proposal.ids, chooser.draws
    )


def _block(logits: np.ndarray, proposal: Proposal, chooser: Chooser) -> Acceptance:
    # The block rule, too, accepts a point mass at x with probability p(x).
    if proposal.q_draft is None or chooser.sampling.greedy:
        return _token(logits, proposal, chooser)
    return block_verification(
        ProbRows(logits, chooser.sampling), proposal.q_draft, proposal.ids, chooser.draws
    )


RULES: dict[str, Rule] = {
    "token": _token,
    "block": _block,
    "typical": lambda logits, proposal, chooser: typical(
        ProbRows(logits, chooser.sampling), proposal, chooser.draws
    ),
}
"""Acceptance rules by name. At temperature 0, `token` and `block` are both the greedy rule."""

LOSSY = frozenset({"typical"})


def rule_of(sampling: Sampling) -> Rule:
    """Return the acceptance rule of `sampling`.

    Raises InputError for an unknown name, and for `typical` at temperature 0.
    """
    name = sampling.rule
    if callable(name):
        return name
    require_known("verification rule", name, RULES)
    if name in LOSSY and sampling.greedy:
        raise InputError(
            f"got rule {name!r} at temperature 0, expected a temperature above 0, or rule 'token'"
        )
    return RULES[name]
