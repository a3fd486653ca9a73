"""The verification rules by name: from a round's logits and its proposal, chain or tree, to what is kept."""

from collections.abc import Callable

import numpy as np

from specnb.decode import accept, tree
from specnb.decode.accept import Acceptance
from specnb.decode.sampling import Chooser, Sampling
from specnb.decode.tree import TreeAcceptance
from specnb.draft.base import Proposal
from specnb.errors import InputError

Rule = Callable[[np.ndarray, Proposal, Chooser], Acceptance | TreeAcceptance]
"""Target logits `(k + 1, vocab)`, after the newest token and after each draft; proposal, chooser -> what is kept."""


class _LazyRows:
    """Probability rows of the target, each computed when it is first asked for."""

    def __init__(self, logits: np.ndarray, sampling: Sampling) -> None:
        self._logits, self._sampling = logits, sampling
        self._rows: dict[int, np.ndarray] = {}

    def __getitem__(self, index: int) -> np.ndarray:
        if index not in self._rows:
            self._rows[index] = self._sampling.probabilities(self._logits[index])
        return self._rows[index]


def _verify_tokens(logits: np.ndarray, proposal: Proposal, chooser: Chooser) -> Acceptance:
    rows = _LazyRows(logits, chooser.sampling)
    if proposal.q_draft is None:
        return accept.point_mass(rows, proposal.ids, chooser.draws)
    return accept.token_verification(rows, proposal.q_draft, proposal.ids, chooser.draws)


def _verify_block(logits: np.ndarray, proposal: Proposal, chooser: Chooser) -> Acceptance:
    rows = _LazyRows(logits, chooser.sampling)
    if proposal.q_draft is None:  # for point masses the block rule is no better: it keeps each x with p(x) as well
        return accept.point_mass(rows, proposal.ids, chooser.draws)
    return accept.block_verification(rows, proposal.q_draft, proposal.ids, chooser.draws)


def _typical(logits: np.ndarray, proposal: Proposal, chooser: Chooser) -> Acceptance:
    return accept.typical(_LazyRows(logits, chooser.sampling), proposal.ids, chooser.draws)


def _typical_tree(logits: np.ndarray, proposal: Proposal, chooser: Chooser) -> TreeAcceptance:
    return tree.typical(_LazyRows(logits, chooser.sampling), proposal, chooser.draws)


def _greedy(logits: np.ndarray, proposal: Proposal, _chooser: Chooser) -> Acceptance:
    return accept.greedy(logits, proposal.ids)


def _either(on_chains: Rule, on_trees: Rule) -> Rule:
    def rule(logits: np.ndarray, proposal: Proposal, chooser: Chooser) -> Acceptance | TreeAcceptance:
        return (on_chains if proposal.tree is None else on_trees)(logits, proposal, chooser)

    return rule


RULES: dict[str, Rule] = {
    "token": _either(_verify_tokens, tree.walk),
    "block": _either(_verify_block, tree.walk),
    "typical": _either(_typical, _typical_tree),
}
"""Verification rules at temperature > 0, by name. At temperature 0 `token` and `block` are the greedy rule."""

_GREEDY = _either(_greedy, tree.walk)

LOSSY = frozenset({"typical"})


def rule_named(name: str, sampling: Sampling) -> Rule:
    """The rule that `name` means under these settings. Raises InputError for an unknown name."""
    if name not in RULES:
        raise InputError(f"unknown verification rule {name!r}; known: {', '.join(RULES)}")
    if name in LOSSY and sampling.greedy:
        raise InputError(f"the rule {name!r} needs a temperature above 0: at 0 the greedy rule is used")
    return _GREEDY if sampling.greedy else RULES[name]
