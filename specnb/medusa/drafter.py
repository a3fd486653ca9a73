"""Trained heads as drafter: they read the target's own hidden state, so that drafting needs no second model.

Heads are fed the hidden state of the last token that the target computed, which stands before the newest one: the
newest was chosen from that state's logits, and has not been fed yet. Head i predicts the token i + 1 places behind
the newest. In the first round the prompt is the newest that was fed, and nothing is drafted.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import product
from math import nan
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from specnb.decode.sampling import Chooser, Sampling
from specnb.draft.base import DrafterBase, Picker, Proposal
from specnb.errors import InputError, NonFiniteLogits
from specnb.io import read_json
from specnb.lm.base import LanguageModel
from specnb.lm.tree import COMMITTED
from specnb.measure.cost import CostCurve
from specnb.medusa.checkpoint import CONFIG_FILE, load_trained_heads, open_heads, shipped
from specnb.medusa.nets import Heads, backbone_of
from specnb.medusa.tree import PUBLISHED, SIZES, TimedTree, TreePlan, candidates, fastest_tree, grow, tree_curve


class HeadsDrafter(DrafterBase):
    """Drafts a chain, or with a `plan` the tree of the best tokens of each head that it describes.

    A chain is greedy or sampled, as generation is, and at most as long as there are heads; a tree is deterministic,
    and where fewer nodes are asked for, the first of the plan; an empty plan drafts nothing. Heads and target have one
    type and device (`load_trained_heads`), and the plan needs no more heads than there are.
    """

    def __init__(
        self, target: LanguageModel, heads: Heads, plan: TreePlan | None = None, *, states: Any = None
    ) -> None:  # fmt: skip
        """`states` are those that are read of the target, where others than `watch_hidden` has."""
        self.name = heads.config.kind
        self.target, self.heads = target, heads
        self.at_once = heads.config.kind == "medusa"  # all heads are computed, however few drafts are asked for
        self._n_prompt, self._states = 0, states or target.watch_hidden()
        self.take_plan(plan)

    def take_plan(self, plan: TreePlan | None) -> None:
        """Draft by another plan from now on."""
        self.n_heads = self.heads.config.n_heads if plan is None or len(plan) else 0
        self.tree_nodes, self._plan = len(plan or ()), plan

    def start(self, tokens: Sequence[int]) -> None:
        """Note where the prompt ends; all else that heads know of the text is in the target's state."""
        self._n_prompt = len(tokens)

    def propose(self, tokens: Sequence[int], k: int, picker: Picker) -> Proposal:
        if len(tokens) == self._n_prompt or not self.n_heads:  # the first round, of which see above, or an empty plan
            return Proposal(())
        began = perf_counter()
        with torch.inference_mode(), self.target.own_threads():
            logits = self._logits(tokens)
            if self._plan is None:
                return self._chain(logits, k, picker, perf_counter() - began)
            plan = self._plan.first(k)
            return Proposal(self._nodes(logits, plan), None, perf_counter() - began, plan)

    def _logits(self, tokens: Sequence[int]) -> "Logits":
        heads, newest = self.heads, tokens[-1]
        pre_norm, post_norm = self._states.at(len(tokens) - 2)
        hidden = post_norm if heads.config.input == "post_norm" else pre_norm
        if self.at_once:
            rows = heads.all_logits(hidden)
            return lambda head, _paths: rows[head : head + 1]

        def conditioned(head: int, paths: Sequence[Sequence[int]]) -> Tensor:
            since = torch.tensor([[newest, *path] for path in paths], device=hidden.device)
            return heads.draft_logits(head, hidden.expand(len(paths), -1), since)

        return conditioned

    def _chain(self, logits: "Logits", k: int, picker: Picker, forward_s: float) -> Proposal:
        ids, rows = [], []
        for head in range(min(k, self.n_heads)):
            began = perf_counter()
            drafted = logits(head, [ids])[0].cpu().numpy()
            forward_s += perf_counter() - began
            try:  # among the draft vocabulary: ascending, so ties go to the same token as among the whole one
                picked = picker.pick(drafted)
            except NonFiniteLogits as error:  # which names a draft id
                raise NonFiniteLogits(f"head {head} has NaN or infinite logits") from error
            if picked is None:
                break
            token, row = picked
            ids.append(int(self.heads.full_ids(token)))
            if row is not None:
                rows.append(self._full_row(row, 0.0))
            if picker.enough:
                break
        return Proposal(tuple(ids), np.stack(rows) if rows else None, forward_s)

    def _nodes(self, logits: "Logits", plan: TreePlan) -> tuple[int, ...]:
        """Level by level, the nodes of one depth in one batch; only the best tokens of each row leave the device."""
        paths: dict[int, list[int]] = {COMMITTED: []}
        for head, level in enumerate(plan.levels):
            parents = sorted({plan.parents[node] for node in level})
            rows = logits(head, [paths[parent] for parent in parents])
            best, drafts = rows.topk(1 + max(plan.ranks[node] for node in level))
            if not best.isfinite().all():
                raise NonFiniteLogits(f"head {head} has NaN or infinite logits")
            tokens = self.heads.full_ids(drafts).expand(len(parents), -1).tolist()
            best_of = dict(zip(parents, tokens, strict=True))
            for node in level:
                parent = plan.parents[node]
                paths[node] = [*paths[parent], best_of[parent][plan.ranks[node]]]
        return tuple(paths[node][-1] for node in range(len(plan)))

    def _full_row(self, row: np.ndarray, elsewhere: float) -> np.ndarray:
        """A row over the vocabulary, of one over the draft vocabulary."""
        if self.heads.token_map is None:
            return row
        full = np.full(self.heads.config.vocab_size, elsewhere, dtype=row.dtype)
        full[self.heads.token_map.cpu().numpy()] = row
        return full

    def rows(self, tokens: Sequence[int], ahead: Sequence[int]) -> list[np.ndarray]:
        with torch.inference_mode():
            logits, heads = self._logits(tokens), range(min(len(ahead), self.n_heads))
            return [self._full_row(logits(i, [ahead[:i]])[0].cpu().numpy(), -np.inf) for i in heads]

    def step_s(self) -> float:
        """Median seconds of drafting one place ahead: of a chain of all heads, or of the levels of the tree."""
        depth = self._plan.depth if self._plan else self.n_heads
        return drafting_s(self, depth) / depth if depth else 0.0


Logits = Callable[[int, Sequence[Sequence[int]]], Tensor]
"""A head, and paths of tokens drafted so far -> its logits after each path, float32 `(paths, draft_size)`.

One row for all paths of Medusa's, which do not look at what was drafted."""


def drafting_s(drafter: HeadsDrafter, depth: int, *, repeats: int = 5) -> float:
    """Median seconds in which `depth` levels are drafted; leaves the target empty."""
    target, greedy = drafter.target, Chooser(Sampling())
    target.reset()
    drafter.start([0])
    target.forward([0, 0], n_logits=1)
    samples = []
    for _ in range(2 + repeats):
        began = perf_counter()
        drafter.propose([0, 0, 0], depth, greedy)
        samples.append(perf_counter() - began)
    target.reset()
    return float(np.median(samples[2:]))


# --- from what a user asks for to a drafter ---

CHAIN, AUTO = "chain", "auto"
KINDS = ("medusa", "hydra")
"""Kinds of heads that are looked for where none is named, in this order."""


def check_heads(
    _target: str, *, heads_checkpoint: str | None = None, tree: str = CHAIN, read: Callable = open_heads
) -> None:  # fmt: skip
    """Refuse what `heads_drafter` would, as far as it can be told before a model is opened. Raises InputError."""
    tree_size(tree)
    if heads_checkpoint is not None:
        read(heads_checkpoint)


def heads_drafter(
    target: LanguageModel, *, heads_checkpoint: str | Path | None = None, tree: str | int = CHAIN,
    kinds: Sequence[str] = KINDS,
) -> HeadsDrafter:  # fmt: skip
    """Trained heads that draft for `target`; `heads_checkpoint` is a path, or the name of shipped ones.

    Without it the shipped heads are taken that were trained on this target, of the first of `kinds` that there is.
    `tree` is "chain", a number of nodes, or "auto", which measures what trees cost here and takes the one that pays by
    the accuracies on held-out training text. Raises InputError, also for what the loader refuses.
    """
    heads, report = load_trained_heads(heads_checkpoint or fitting_checkpoint(target, kinds), backbone_of(target))
    drafter = HeadsDrafter(target, heads)
    drafter.findings = report.findings
    plan_drafts(drafter, tree_size(tree), report.training)
    return drafter


def plan_drafts(drafter: HeadsDrafter, asked: str | int, training: Mapping[str, Any]) -> None:
    """Have a drafter draft what is `asked`, by the accuracies on held-out text among the facts of its training."""
    accuracy = np.array(training["accuracy"]) if training.get("accuracy") else None
    drafting = choose_drafts(drafter, asked, accuracy)
    drafter.take_plan(drafting.plan)
    if asked == AUTO or (asked != CHAIN and accuracy is None):
        drafter.findings += (drafting.says,)
    drafter.expected = () if accuracy is None else accuracy[:, 0].tolist()


hydra_drafter = partial(heads_drafter, kinds=("hydra",))
"""Return the shipped Hydra heads that were trained on the target."""


class Drafting(NamedTuple):
    """A choice of drafts, and why: the plan (None: a chain), drafts a round, and the candidates it was chosen among.

    `expected` are the tokens a round and the speed-up that it was chosen for, NaN where there were no candidates.
    """

    plan: TreePlan | None
    k: int
    says: str
    candidates: Sequence[TimedTree] = ()
    expected: tuple[float, float] = nan, nan


def choose_drafts(
    drafter: HeadsDrafter, asked: str | int, accuracy: np.ndarray | None, source: str = "that came with the weights", *,
    always: bool = False, costs: Callable[[], CostCurve] | None = None,
) -> Drafting:  # fmt: skip
    """What `asked` (of `tree_size`) comes to here for heads of marginal `accuracy (heads, ranks)`, None if unknown.

    `source` says whose accuracies they are; with `always` something is drafted even where that does not pay. `costs`
    gives the target's costs of trees, measured once for several drafters. May change the drafter's plan.
    """
    target, n_heads = drafter.target, drafter.heads.config.n_heads
    if isinstance(asked, int):
        plan = grow((PUBLISHED if accuracy is None else accuracy)[:n_heads], asked)
        by = "published for Vicuna 7B, for these heads came without any" if accuracy is None else source
        return Drafting(plan, len(plan), f"a tree of {len(plan)} nodes is drafted, as asked for, by accuracies {by}")
    why = ""
    if asked == CHAIN:
        why = "as asked for"
    elif accuracy is None:
        why = "no accuracies came with the weights that a tree is chosen by"
    elif not target.caps.trees:
        why = f"{target.name} cannot verify trees ({target.caps.trees_reason or target.caps.engine})"
    if why:
        return Drafting(None, n_heads, f"a chain is drafted: {why}")
    trees = timed_trees(drafter, accuracy, costs() if costs else tree_curve(target))
    best = fastest_tree(trees)
    says = "nothing is drafted: by what was measured here, plain decoding is faster than any tree"
    if len(best.plan):
        speed = f"{best.tokens:.2f} tokens a round, {best.tokens_per_s:.1f} a second"
        says = f"a tree of {len(best.plan)} nodes is drafted: {speed} expected by accuracies {source}"
    elif always:
        best = fastest_tree(trees[1:])
        says = f"{says}; timed all the same is one of {len(best.plan)} nodes"
    expected = best.tokens, best.tokens_per_s / trees[0].tokens_per_s
    return Drafting(best.plan, len(best.plan), says, trees, expected)


def timed_trees(drafter: HeadsDrafter, accuracy: np.ndarray, curve: CostCurve) -> list[TimedTree]:
    """Trees for heads of marginal `accuracy (heads, ranks)`, by size; the first is plain decoding.

    `curve` is the target's cost of trees; that of drafting is measured for each depth and, of the largest tree, for
    each node beside a chain. Changes the drafter's plan.
    """
    target = drafter.target
    sizes = [n for n in SIZES if n < min(target.caps.max_width, target.caps.n_ctx // 2)]

    def time_plan(plan: TreePlan) -> float:
        drafter.take_plan(plan)
        return drafting_s(drafter, len(plan))

    chain_s = [0.0, *(time_plan(TreePlan.chain(depth)) for depth in range(1, len(accuracy) + 1))]
    widest = grow(accuracy, max(sizes, default=1))
    node_s = max(0.0, time_plan(widest) - chain_s[widest.depth]) / max(1, len(widest) - widest.depth)

    def round_s(plan: TreePlan) -> float:
        return curve.seconds(len(plan) + 1) + chain_s[plan.depth] + node_s * (len(plan) - plan.depth)

    return candidates(accuracy, round_s, sizes)


def tree_size(tree: str | int) -> str | int:
    """What a user wrote as `--tree`, checked: a number of nodes, chain or auto."""
    if tree in (CHAIN, AUTO):
        return tree
    if str(tree).isdecimal() and int(tree) > 0:
        return int(tree)
    raise InputError(f"a tree is {CHAIN}, {AUTO}, or a number of nodes (1 or more), got {str(tree)[:80]!r}")


def fitting_checkpoint(target: LanguageModel, kinds: Sequence[str] = KINDS) -> Path:
    """The shipped drafter that was trained on the target's very weights, of the first of `kinds` that there is."""
    known, digest = shipped(), backbone_of(target).digest
    for kind, folder in product(kinds, known.values()):
        config = read_json(folder / CONFIG_FILE)
        if (config["kind"], config["backbone"]) == (kind, digest):
            return folder
    names = ", ".join(known) or "none"
    advice = "give --heads-checkpoint PATH to --drafter medusa or jump"
    raise InputError(f"no shipped {' or '.join(kinds)} ({names}) was trained on {target.name}: {advice}")
