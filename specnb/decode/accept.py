"""Which drafts to keep, and which token follows: the verification rules for chains and trees, as pure functions.

Rules for sampled chains take the target's probability rows `p_target`, where row i is the target's distribution after
i drafts (len(draft_ids) + 1 rows). They return the drafts that are kept and one extra token: a correction after a
rejection, a bonus after full acceptance. All but `typical` leave the target's distribution exactly as it is. `RULES`
has them by name. Rows are asked for one by one, only as far as needed, so a lazy sequence saves softmaxes.

A tree holds several guesses for one place. Its drafts are deterministic, so each child of a node is a point mass.
Rejection sampling would try one child after the other (SpecInfer, Miao et al. 2305.09781, section 4.3): all in all
child y is kept with p(y), and the correction is distributed as p without the children. Drawing once from p and going
to the child that holds the token drawn, if there is one, is the same law in one draw, and no rule can keep more.
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
    """The drafts `path`, from the newest token on, are kept, and `next_id` follows.

    `accept_prob` has an entry for each position that was tested: the probability that a draft there is kept.
    """

    path: tuple[int, ...]
    next_id: int
    accept_prob: tuple[float, ...]

    @classmethod
    def leading(cls, n: int, next_id: int, accept_prob: Sequence[float] = ()) -> "Acceptance":
        """The first `n` drafts of a chain are kept."""
        return cls(tuple(range(n)), next_id, tuple(accept_prob))

    @property
    def n_accepted(self) -> int:
        return len(self.path)


# --- chains of sampled drafts ---------------------------------------------------------------------------------------


def token_verification(
    p_target: ProbRows, q_draft: np.ndarray | None, draft_ids: Sequence[int], draws: Draws
) -> Acceptance:
    """Rejection sampling token by token: keep x with min(1, p(x)/q(x)), else draw from norm(max(p - q, 0)).

    Leviathan et al. 2211.17192, algorithm 1; Chen et al. 2302.01318. `q_draft (k, vocab)` are the rows that the
    drafts were sampled from. Without them each draft is deterministic, its q a point mass: x is kept with p(x), and
    the correction comes from p without x. (The drafter's softmax is not q: x was not drawn from it.)
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
    """Verify the block as a whole: never fewer expected tokens than `token_verification`, same law.

    Sun et al. 2403.10444, algorithm 2. The first i drafts can be kept with the weight
    w_i = min(1, w_{i-1} p(x_i)/q(x_i)). The longest prefix whose test succeeds is kept, and the correction comes from
    norm(max(w p - q, 0)). `accept_prob[i]` is the test h_{i+1} of prefix i + 1.
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
    """Refuse, before anything is drafted, a target that cannot verify a tree in one forward."""
    if not target.caps.trees:
        why = target.caps.trees_reason or f"its engine ({target.caps.engine}) computes chains of tokens only"
        raise InputError(f"{target.name} cannot verify trees of drafts: {why}. Draft a chain (--tree chain)")


def checked(proposal: Proposal, depth: int) -> Proposal:
    """A tree that may be verified, without the nodes below `depth`: more tokens than that cannot be committed.

    Raises InputError for a tree that does not belong to its ids, for rows, and for equal children of one node.
    """
    tree, ids = proposal.tree, proposal.ids
    if len(tree) != len(ids):
        raise InputError(f"a tree of {len(tree)} nodes was proposed with {len(ids)} tokens: give one token a node")
    if proposal.q_draft is not None:
        raise InputError("a tree of drafts was proposed with rows of q_draft, but trees are verified as point masses")
    for (_, token), times in Counter(zip(tree.parents, ids, strict=True)).items():
        if times > 1:
            raise InputError(f"{times} drafts after the same token are all token {token}: only one could be kept")
    kept = [node for node in range(len(ids)) if tree.depths[node] < depth]
    if len(kept) == len(ids) > 0:
        return proposal
    place = {COMMITTED: COMMITTED} | {node: at for at, node in enumerate(kept)}
    shorter = Tree(tuple(place[tree.parents[node]] for node in kept)) if kept else None
    return proposal._replace(ids=tuple(ids[node] for node in kept), tree=shorter)


def walk_drafts(logits: np.ndarray, proposal: Proposal, chooser: Chooser) -> Acceptance:
    """Lossless: choose from the target's row at each node as plain decoding would, and go on while that was drafted.

    `logits (len(ids) + 1, vocab)`: the row after the newest token, then the row after each node.
    """
    tree = proposal.tree or Tree.chain(len(proposal.ids))
    node, path, tested = COMMITTED, [], []
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
    """LOSSY. Keep the longest path of drafts x with p(x) > min(0.09, 0.3 exp(-H(p))); the extra token is drawn from p.

    Medusa, Cai et al. 2401.10774, sections 2.3 and 2.3.1. Of paths that are equally long the likeliest is kept.
    `p_target` holds the rows after the newest token and after each draft.
    """
    parents = (proposal.tree or Tree.chain(len(proposal.ids))).parents
    paths, likelihood = {COMMITTED: ()}, {COMMITTED: 0.0}

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
"""Target logits `(k + 1, vocab)`, after the newest token and after each draft; proposal, chooser -> what is kept."""


def _token(logits: np.ndarray, proposal: Proposal, chooser: Chooser) -> Acceptance:
    if proposal.tree is not None or chooser.sampling.greedy:
        return walk_drafts(logits, proposal, chooser)
    return token_verification(ProbRows(logits, chooser.sampling), proposal.q_draft, proposal.ids, chooser.draws)


def _block(logits: np.ndarray, proposal: Proposal, chooser: Chooser) -> Acceptance:
    if proposal.q_draft is None or chooser.sampling.greedy:  # point masses are kept with p(x) by the block rule, too
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
    """The rule that `sampling.rule` means at its temperature. Raises InputError for an unknown name."""
    name = sampling.rule
    if callable(name):
        return name
    require_known("verification rule", name, RULES)
    if name in LOSSY and sampling.greedy:
        raise InputError(f"the rule {name!r} needs a temperature above 0: at 0 the greedy rule is used")
    return RULES[name]
