"""Which tree of drafts pays with these heads on this machine: what trees cost here, put to `decode.tree_choice`."""

from collections.abc import Sequence
from time import perf_counter

import numpy as np

from specnb.decode.sampling import Chooser, Draws, Sampling
from specnb.decode.tree import require_trees
from specnb.errors import InputError
from specnb.lm.base import LanguageModel, TreeModel
from specnb.lm.tree import COMMITTED, Tree
from specnb.measure.cost import CONTEXT, CostCurve, verify_curve
from specnb.medusa.drafter import HeadsDrafter
from specnb.medusa.heads import Heads
from specnb.medusa.tree import TreePlan, checked_accuracy
from specnb.medusa.tree_choice import SIZES, Choice, choose

WIDTHS = (1, 2, 3, 5, 9, 17, 33, 64)
REPEATS = 5


def tree_curve(
    target: TreeModel, *, widths: Sequence[int] = WIDTHS, context: int = CONTEXT, repeats: int = REPEATS, seed: int = 0
) -> CostCurve:
    """T(n) of forwards of whole trees: a root, the newest token, and n - 1 guesses after it; T(1) is the plain step.

    As `measure.cost.verify_curve` measures it. What a forward takes depends on the number of nodes, not on their tree.
    Raises InputError for a target without trees, and for widths that do not fit it.
    """
    require_trees(target)
    return verify_curve(_Rooted(target), widths=widths, context=context, repeats=repeats, seed=seed)


class _Rooted:
    """A target whose forwards of several tokens, all rows asked for, are forwards of trees."""

    def __init__(self, target: TreeModel) -> None:
        self._target = target
        self.name, self.vocab, self.caps = target.name, target.vocab, target.caps

    def forward(self, ids: Sequence[int], n_logits: int | None = None) -> np.ndarray:
        if n_logits is not None or len(ids) == 1:
            return self._target.forward(ids, n_logits)
        return self._target.forward_tree(ids, Tree((COMMITTED, *[0] * (len(ids) - 1))))

    def rewind(self, n: int) -> None:
        if n == 1:
            self._target.rewind(n)
        else:
            self._target.keep_path([])

    def reset(self) -> None:
        self._target.reset()


def drafting_s(target: LanguageModel, heads: Heads, depth: int, *, repeats: int = REPEATS) -> float:
    """Median seconds in which heads draft a tree of `depth`, one node a level; leaves the target empty."""
    drafter = HeadsDrafter(target, heads, TreePlan.chain(depth))
    greedy = Chooser(Sampling(), Draws(np.random.default_rng(0)))
    target.reset()
    target.forward([0, 0], n_logits=1)
    samples = []
    for _ in range(2 + repeats):
        began = perf_counter()
        drafter.propose([0, 0, 0], depth, greedy)
        samples.append(perf_counter() - began)
    target.reset()
    return float(np.median(samples[2:]))


def best_tree(
    target: LanguageModel,
    heads: Heads,
    accuracy: np.ndarray,
    *,
    curve: CostCurve | None = None,
    sizes: Sequence[int] = SIZES,
) -> Choice:
    """The tree of the most expected tokens a second for heads of marginal `accuracy (heads, ranks)`, or none at all.

    Measures the target's cost of trees (or takes `curve`) and the heads' for each depth. Raises InputError for a
    target without trees.
    """
    table = checked_accuracy(accuracy)[: heads.config.n_heads]
    room = target.caps.n_ctx // 2
    widest = min(target.caps.max_width, room)
    if widest < 2:
        raise InputError(f"{target.name} holds {target.caps.n_ctx} tokens: too few to verify drafts")
    if curve is None:
        widths = [n for n in WIDTHS if n <= widest]
        curve = tree_curve(target, widths=widths, context=min(CONTEXT, room))
    cost = {depth: drafting_s(target, heads, depth) for depth in range(1, len(table) + 1)}
    return choose(table, curve.seconds, cost.__getitem__, [n for n in sizes if n < widest])


def with_best_tree(drafter: HeadsDrafter) -> HeadsDrafter:
    """The heads of `drafter` with the tree that `best_tree` chooses by the accuracies they came with.

    A chain where there are no accuracies, or the target cannot verify trees. `findings` of the result say why.
    """
    target, plan = drafter.target, None
    if drafter.accuracy is None:
        reason = "a chain is drafted: the heads came without the accuracies that a tree is chosen by"
    elif not target.caps.trees:
        why = target.caps.trees_reason or target.caps.engine
        reason = f"a chain is drafted: {target.name} cannot verify trees ({why})"
    else:
        choice = best_tree(target, drafter.heads, drafter.accuracy)
        plan = choice.plan
        reason = f"a tree of {len(plan)} nodes is drafted: {choice.tokens:.2f} tokens a round are expected"
        if not len(plan):
            reason = "nothing is drafted: by what was measured here, plain decoding is faster than any tree"
    findings = (*drafter.findings, reason)
    return HeadsDrafter(target, drafter.heads, plan, accuracy=drafter.accuracy, findings=findings)
