"""Which path of a drafted tree is kept, and which token follows it: verification of trees, as pure functions.

A tree holds several guesses for one place. Its drafts are deterministic, so each child of a node is a point mass.
Rejection sampling tries one child after the other: the first, x, is kept with p(x), the next, y, with its share
p(y) / (1 - p(x)) of what is left of p, and so on (recursive rejection sampling: SpecInfer, Miao et al. 2305.09781,
section 4.3). All in all child y is kept with p(y), and the correction is distributed as p without the children. Drawing
once from p and going to the child that holds the token drawn, if there is one, is the same law in one draw. No rule
can do better: whatever is committed first has the law p, so the walk cannot go on more often than p has mass on the
children. At temperature 0 p is a point mass on the argmax, and the walk is greedy decoding.
"""

from collections import Counter
from typing import NamedTuple

import numpy as np

from specnb.decode.sampling import Chooser, Draws, Rows, typical_threshold
from specnb.draft.base import Proposal
from specnb.errors import InputError
from specnb.lm.base import LanguageModel
from specnb.lm.tree import COMMITTED, Tree


class TreeAcceptance(NamedTuple):
    """The nodes `path`, from the newest token down, are kept, and `next_id` follows.

    `accept_prob` has an entry for each position that was tested: the probability that any of the drafts there is kept.
    """

    path: tuple[int, ...]
    next_id: int
    accept_prob: tuple[float, ...]


def require_trees(target: LanguageModel) -> None:
    """Refuse, before anything is drafted, a target that cannot verify a tree in one forward."""
    if not target.caps.trees:
        why = target.caps.trees_reason or f"its engine ({target.caps.engine}) computes chains of tokens only"
        raise InputError(
            f"{target.name} cannot verify trees of drafts: {why}. Draft a chain (--tree chain), or open a model whose "
            "layers all attend to the whole past with ?backend=hf"
        )


def checked(proposal: Proposal, depth: int) -> Proposal:
    """A tree that may be verified, without the nodes below `depth`: more tokens than that cannot be committed.

    Where no node is left there is no tree, but a round without drafts. Raises InputError for a tree that does not
    belong to its ids, rows of a draft distribution, or children of one node with the same token.
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


def walk(logits: np.ndarray, proposal: Proposal, chooser: Chooser) -> TreeAcceptance:
    """Lossless: choose from the target's row at each node as plain decoding would, and go on while that was drafted.

    `logits (len(ids) + 1, vocab)`: the row after the newest token, then the row after each node.
    """
    node, path, tested = COMMITTED, [], []
    while True:
        drafted = {proposal.ids[child]: child for child in proposal.tree.children(node)}
        token, row = chooser.pick(logits[node + 1])
        if drafted:
            chance = float(token in drafted) if row is None else min(1.0, float(row[list(drafted)].sum()))
            tested.append(chance)
        if token not in drafted:
            return TreeAcceptance(tuple(path), token, tuple(tested))
        node = drafted[token]
        path.append(node)


def typical(p_target: Rows, proposal: Proposal, draws: Draws) -> TreeAcceptance:
    """LOSSY. The longest path whose drafts all pass the test of `accept.typical`; the extra token is drawn from p.

    Medusa, Cai et al. 2401.10774, section 2.3.1. Of paths that are equally long the likeliest is kept.
    `p_target` holds the target's probability rows in the order of `walk`'s logits.
    """
    weights = {COMMITTED: (0, 0.0)}
    thresholds: dict[int, float] = {}
    for node, (parent, token) in enumerate(zip(proposal.tree.parents, proposal.ids, strict=True)):
        if parent not in weights:
            continue
        row = p_target[parent + 1]
        if parent not in thresholds:
            thresholds[parent] = typical_threshold(row)
        if row[token] > thresholds[parent]:
            length, likelihood = weights[parent]
            weights[node] = (length + 1, likelihood + float(np.log(row[token])))
    end = max(weights, key=weights.__getitem__)
    path = tuple(proposal.tree.path(end))
    rejected = (0.0,) if end in proposal.tree.parents else ()
    return TreeAcceptance(path, draws.categorical(p_target[end + 1]), (1.0,) * len(path) + rejected)
