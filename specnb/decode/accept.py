"""How many drafted tokens to keep, and which token follows: the verification rules, as pure functions.

Each takes the target's probability rows `p_target`, where row i is the target's distribution after i drafts
(len(draft_ids) + 1 rows), and says how many drafts are kept and the one extra token: a correction after a
rejection, a bonus after full acceptance. All but `typical` leave the target's distribution exactly as it is. `RULES`
has them by name, for chains and for trees (`decode.tree`).

Rows are asked for one by one and only as far as needed, so a lazy sequence saves the softmax of rows behind a
rejection.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from specnb.decode import tree
from specnb.decode.sampling import Chooser, Draws, Rows, Sampling, argmax, typical_threshold
from specnb.decode.tree import TreeAcceptance
from specnb.draft.base import Proposal
from specnb.errors import InputError


class Acceptance(NamedTuple):
    """`n_accepted` leading drafts are kept and `next_id` follows; `accept_prob` of each draft that was tested."""

    n_accepted: int
    next_id: int
    accept_prob: tuple[float, ...]

    @property
    def path(self) -> tuple[int, ...]:
        """Indices of the drafts that are kept."""
        return tuple(range(self.n_accepted))


def greedy(logits: np.ndarray, draft_ids: Sequence[int]) -> Acceptance:
    """Keep drafts while they are the target's argmax. `logits (len(draft_ids) + 1, vocab)`."""
    tested: list[float] = []
    for i, draft in enumerate(draft_ids):
        best = argmax(logits[i])
        tested.append(float(best == draft))
        if best != draft:
            return Acceptance(i, best, tuple(tested))
    return Acceptance(len(draft_ids), argmax(logits[len(draft_ids)]), tuple(tested))


def token_verification(p_target: Rows, q_draft: np.ndarray, draft_ids: Sequence[int], draws: Draws) -> Acceptance:
    """Rejection sampling token by token: keep x with min(1, p(x)/q(x)), else draw from norm(max(p - q, 0)).

    Leviathan et al. 2211.17192, algorithm 1; Chen et al. 2302.01318. `q_draft (k, vocab)` are the rows that the
    drafts were sampled from.
    """
    tested: list[float] = []
    for i, x in enumerate(draft_ids):
        p, q = p_target[i], q_draft[i]
        tested.append(min(1.0, p[x] / q[x]))
        if not draws.bernoulli(tested[-1]):
            return Acceptance(i, draws.categorical(np.maximum(p - q, 0.0)), tuple(tested))
    return Acceptance(len(draft_ids), draws.categorical(p_target[len(draft_ids)]), tuple(tested))


def point_mass(p_target: Rows, draft_ids: Sequence[int], draws: Draws) -> Acceptance:
    """Rejection sampling for a deterministic drafter, whose q is a point mass on x: keep x with p(x).

    After a rejection the correction comes from p without x. (Using the drafter's softmax as q here would bias the
    output: x was not drawn from it.)
    """
    tested: list[float] = []
    for i, x in enumerate(draft_ids):
        p = p_target[i]
        tested.append(float(p[x]))
        if not draws.bernoulli(tested[-1]):
            rest = p.copy()
            rest[x] = 0.0
            return Acceptance(i, draws.categorical(rest), tuple(tested))
    return Acceptance(len(draft_ids), draws.categorical(p_target[len(draft_ids)]), tuple(tested))


def block_verification(p_target: Rows, q_draft: np.ndarray, draft_ids: Sequence[int], draws: Draws) -> Acceptance:
    """Verify the block as a whole: never fewer expected tokens than `token_verification`, same law.

    Sun et al. 2403.10444, algorithm 2: w_i = min(1, w_{i-1} p(x_i)/q(x_i)) is the weight with which the first i
    drafts can be kept; the longest prefix whose test succeeds is kept, and the correction comes from
    norm(max(w p - q, 0)). `accept_prob[i]` is the test h_{i+1} of prefix i + 1.
    """
    k = len(draft_ids)
    weights = [1.0]
    for i, x in enumerate(draft_ids):
        weights.append(min(1.0, weights[-1] * p_target[i][x] / q_draft[i][x]))
    tests: list[float] = []
    for i in range(1, k):
        excess = float(np.maximum(weights[i] * p_target[i] - q_draft[i], 0.0).sum())
        tests.append(excess / (excess + 1.0 - weights[i]) if excess > 0.0 else 0.0)
    if k:
        tests.append(weights[k])
    kept = next((i for i in range(k, 0, -1) if draws.bernoulli(tests[i - 1])), 0)
    if kept == k:
        return Acceptance(k, draws.categorical(p_target[k]), tuple(tests))
    residual = np.maximum(weights[kept] * p_target[kept] - q_draft[kept], 0.0)
    return Acceptance(kept, draws.categorical(residual), tuple(tests))


def typical(
    p_target: Rows, draft_ids: Sequence[int], draws: Draws, *, epsilon: float = 0.09, delta: float = 0.3
) -> Acceptance:
    """LOSSY. Keep x while p(x) > min(epsilon, delta * exp(-H(p))); the extra token is drawn from p.

    Medusa, Cai et al. 2401.10774, section 2.3: plausible tokens are kept however the drafter came to them, so
    the output does not follow the target's distribution.
    """
    tested: list[float] = []
    for i, x in enumerate(draft_ids):
        p = p_target[i]
        tested.append(float(p[x] > typical_threshold(p, epsilon, delta)))
        if not tested[-1]:
            return Acceptance(i, draws.categorical(p), tuple(tested))
    return Acceptance(len(draft_ids), draws.categorical(p_target[len(draft_ids)]), tuple(tested))


Rule = Callable[[np.ndarray, Proposal, Chooser], Acceptance | TreeAcceptance]
"""Target logits `(k + 1, vocab)`, after the newest token and after each draft; proposal, chooser -> what is kept."""


def _verify_tokens(logits: np.ndarray, proposal: Proposal, chooser: Chooser) -> Acceptance:
    rows = Rows(logits, chooser.sampling)
    if proposal.q_draft is None:
        return point_mass(rows, proposal.ids, chooser.draws)
    return token_verification(rows, proposal.q_draft, proposal.ids, chooser.draws)


def _verify_block(logits: np.ndarray, proposal: Proposal, chooser: Chooser) -> Acceptance:
    rows = Rows(logits, chooser.sampling)
    if proposal.q_draft is None:  # for point masses the block rule is no better: it keeps each x with p(x) as well
        return point_mass(rows, proposal.ids, chooser.draws)
    return block_verification(rows, proposal.q_draft, proposal.ids, chooser.draws)


def _typical(logits: np.ndarray, proposal: Proposal, chooser: Chooser) -> Acceptance | TreeAcceptance:
    rows = Rows(logits, chooser.sampling)
    if proposal.tree is not None:
        return tree.typical(rows, proposal, chooser.draws)
    return typical(rows, proposal.ids, chooser.draws)


def _greedy(logits: np.ndarray, proposal: Proposal, _chooser: Chooser) -> Acceptance:
    return greedy(logits, proposal.ids)


def _either(on_chains: Rule, on_trees: Rule) -> Rule:
    def rule(logits: np.ndarray, proposal: Proposal, chooser: Chooser) -> Acceptance | TreeAcceptance:
        return (on_chains if proposal.tree is None else on_trees)(logits, proposal, chooser)

    return rule


RULES: dict[str, Rule] = {
    "token": _either(_verify_tokens, tree.walk),
    "block": _either(_verify_block, tree.walk),
    "typical": _typical,
}
"""Verification rules at temperature > 0, by name. At temperature 0 `token` and `block` are the greedy rule."""

_GREEDY = _either(_greedy, tree.walk)

LOSSY = frozenset({"typical"})


def rule_named(name: str | Rule, sampling: Sampling) -> Rule:
    """The rule that `name` means under these settings; a callable is itself. Raises InputError for an unknown name."""
    if callable(name):
        return name
    if name not in RULES:
        raise InputError(f"unknown verification rule {name!r}; known: {', '.join(RULES)}")
    if name in LOSSY and sampling.greedy:
        raise InputError(f"the rule {name!r} needs a temperature above 0: at 0 the greedy rule is used")
    return _GREEDY if sampling.greedy else RULES[name]
