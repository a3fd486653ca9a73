"""Acceptance rules for chains and trees of draft tokens, as pure functions.

Rules for sampled chains take the target's probability rows `p_target`, where row i is the target's
distribution after i drafts (len(draft_ids) + 1 rows). They return the accepted drafts and one extra
token: a correction after a rejection, or a bonus token after full acceptance. All but `typical`
preserve the target's distribution exactly. `RULES` lists them by name. Rows are read one by one and
only as far as needed, so that a lazy sequence saves softmaxes.

A tree holds several candidates for one position. Its drafts are deterministic, so each child of a
node is a point mass. Rejection sampling would try the children one by one (SpecInfer, Miao et al.
2305.09781, section 4.3): child y is accepted with probability p(y) in total, and the correction is
distributed as p without the children. Drawing once from p, and following the child with that token
if there is one, has the same distribution with a single draw. No rule can accept more.
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
    """The accepted drafts `path`, starting after the newest token, and `next_id`, which follows them.

    `accept_prob` has an entry for each tested position: the probability that a draft is accepted there.
    """

    path: tuple[int, ...]
    next_id: int
    accept_prob: tuple[float, ...]

    @classmethod
    def leading(cls, n: int, next_id: int, accept_prob: Sequence[float] = ()) -> "Acceptance":
        """Accept the first `n` drafts of a chain."""
        return cls(tuple(range(n)), next_id, tuple(accept_prob))

    @property
    def n_accepted(self) -> int:
        return len(self.path)


# --- chains of sampled drafts ---------------------------------------------------------------------------------------


def token_verification(
    p_target: ProbRows, q_draft: np.ndarray | None, draft_ids: Sequence[int], draws: Draws
) -> Acceptance:
    """Accept token by token: x with probability min(1, p(x)/q(x)), else draw from norm(max(p - q, 0)).

    Leviathan et al. 2211.17192, algorithm 1; Chen et al. 2302.01318. `q_draft (k, vocab)` are the rows
    that the drafts were sampled from. Without rows each draft is deterministic, and its q is a point
    mass: x is accepted with p(x), and the correction is drawn from p without x. (The drafter's softmax
    is not q, because x was not drawn from it.)
    """
    tested = []
    for i, x in enumerate(draft_ids):
        p = p_target[i]
        q = np.eye(1, len(p), x % len(p))[0] if q_draft is None else q_draft[i]
        tested.append(min(1.0, float(p[x] / q[x])))
        if not draws.bernoulli(tested[-1]):
            return Acceptance.leading(i, draws.categorical(np.maximum(p - q, 0.0)), tested)
    return Acceptance.leading(len(draft_ids), draws.categorical(p_target[len(draft_ids)]), tested)


def block_verification(p_target: ProbRows, q_draft: np.ndarray, draft_ids: Sequence[int], draws: Draws) -> Acceptance:
    """Verify the block as a whole, with at least as many expected tokens as `token_verification`.

    Sun et al. 2403.10444, algorithm 2; the distribution is the same. The first i drafts are accepted
    with weight w_i = min(1, w_{i-1} p(x_i)/q(x_i)). The longest prefix whose test succeeds is accepted,
    and the correction is drawn from norm(max(w p - q, 0)). `accept_prob[i]` is the test h_{i+1} of
    prefix i + 1.
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
    return Acceptance.leading(kept, draws.categorical(p_target[k] if kept == k else residual(kept)), tests)


# --- trees, and greedy chains ---------------------------------------------------------------------------------------


def require_trees(target: LanguageModel) -> None:
    """Raise InputError, before drafting, for a target that cannot verify a tree in one forward pass."""
    if not target.caps.trees:
        why = target.caps.trees_reason or f"its engine ({target.caps.engine}) computes chains of tokens only"
        raise InputError(f"{target.name} cannot verify trees of draft tokens: {why}. Draft a chain (--tree chain)")


def checked(proposal: Proposal, depth: int) -> Proposal:
    """Return the tree without the nodes below `depth`, which could not be committed.

    Raises InputError for a tree of another size than its ids, for rows, and for equal children of a node.
    """
    tree = proposal.tree
    ids = proposal.ids
    if len(tree) != len(ids):
        raise InputError(f"got a tree of {len(tree)} nodes with {len(ids)} tokens, expected one token per node")
    if proposal.q_draft is not None:
        raise InputError("got a tree with rows of q_draft, expected None: trees are verified as point masses")
    for (_, token), times in Counter(zip(tree.parents, ids, strict=True)).items():
        if times > 1:
            raise InputError(f"got {times} children of one node that are token {token}, expected distinct tokens")
    kept = [node for node in range(len(ids)) if tree.depths[node] < depth]
    if len(kept) == len(ids) > 0:
        return proposal
    place = {COMMITTED: COMMITTED} | {node: at for at, node in enumerate(kept)}
    shorter = Tree(tuple(place[tree.parents[node]] for node in kept)) if kept else None
    return proposal._replace(ids=tuple(ids[node] for node in kept), tree=shorter)


def walk_drafts(logits: np.ndarray, proposal: Proposal, chooser: Chooser) -> Acceptance:
    """Choose from the target's row at each node, as plain decoding would, while that token was drafted.

    Lossless. `logits (len(ids) + 1, vocab)`: the row after the newest token, then one after each node.
    """
    tree = proposal.tree or Tree.chain(len(proposal.ids))
    node = COMMITTED
    path = []
    tested = []
    while True:
        drafted = {proposal.ids[child]: child for child in tree.children(node)}
        token, row = chooser.pick(logits[node + 1])
        if drafted:
            tested.append(float(token in drafted) if row is None else min(1.0, float(row[list(drafted)].sum())))
        if token not in drafted:
            return Acceptance(tuple(path), token, tuple(tested))
        node = drafted[token]
        path.append(node)


# --- chains and trees, lossy ----------------------------------------------------------------------------------------


def typical(p_target: ProbRows, proposal: Proposal, draws: Draws) -> Acceptance:
    """Accept the longest path of drafts x with p(x) > min(0.09, 0.3 exp(-H(p))). LOSSY.

    Medusa, Cai et al. 2401.10774, sections 2.3 and 2.3.1. Of equally long paths the likeliest is
    accepted, and the extra token is drawn from p. `p_target` holds the rows after the newest token and
    after each draft.
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
    return Acceptance(paths[end], draws.categorical(p_target[end + 1]), (1.0,) * len(paths[end]) + rejected)


# --- by name --------------------------------------------------------------------------------------------------------

Rule = Callable[[np.ndarray, Proposal, Chooser], Acceptance]
"""Maps target logits `(k + 1, vocab)`, after the newest token and each draft, proposal and chooser to an Acceptance."""


def _token(logits: np.ndarray, proposal: Proposal, chooser: Chooser) -> Acceptance:
    if proposal.tree is not None or chooser.sampling.greedy:
        return walk_drafts(logits, proposal, chooser)
    return token_verification(ProbRows(logits, chooser.sampling), proposal.q_draft, proposal.ids, chooser.draws)


def _block(logits: np.ndarray, proposal: Proposal, chooser: Chooser) -> Acceptance:
    if proposal.q_draft is None or chooser.sampling.greedy:  # the block rule also accepts point masses with p(x)
        return _token(logits, proposal, chooser)
    return block_verification(ProbRows(logits, chooser.sampling), proposal.q_draft, proposal.ids, chooser.draws)


RULES: dict[str, Rule] = {
    "token": _token,
    "block": _block,
    "typical": lambda logits, proposal, chooser: typical(ProbRows(logits, chooser.sampling), proposal, chooser.draws),
}
"""Verification rules by name. At temperature 0 `token` and `block` are the greedy rule."""

LOSSY = frozenset({"typical"})


def rule_of(sampling: Sampling) -> Rule:
    """Return the rule named by `sampling.rule`. Raises InputError for an unknown name, and `typical` if greedy."""
    name = sampling.rule
    if callable(name):
        return name
    require_known("verification rule", name, RULES)
    if name in LOSSY and sampling.greedy:
        raise InputError(f"the rule {name!r} needs a temperature above 0: at 0 the greedy rule is used")
    return RULES[name]
