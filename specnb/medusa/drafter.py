"""Trained heads as a drafter: they read the target's hidden state and need no second model.

The hidden state is that of the last token that the target has processed: the token before the
newest. The newest token was chosen from its logits and is processed in the next forward pass. Head
i predicts the token i + 1 positions after the newest. Nothing is drafted in the first round.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from time import perf_counter
from typing import Any

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
from specnb.medusa.checkpoint import (
    CONFIG_FILE,
    LoadReport,
    load_trained_heads,
    open_heads,
    shipped,
)
from specnb.medusa.nets import DrafterConfig, HeadsConfig, backbone_of
from specnb.medusa.tree import SIZES, TimedTree, TreePlan, fastest_tree, grow, tree_curve


class HeadsDrafter(DrafterBase):
    """Drafts a chain, or the tree of a `plan`.

    A chain has at most one token per head, and is greedy or sampled like the generation. A tree is
    deterministic; only the first K nodes of a plan are drafted. An empty plan drafts nothing. Heads
    and target must have the same dtype and device (`load_trained_heads`), and a plan at most one
    level per head.
    """

    target: Any  # a torch model

    def __init__(
        self,
        target: Any,
        heads: Any,
        plan: TreePlan | None = None,
        *,
        states: Any = None,
    ) -> None:
        """Draft for `target`. `states` replaces its `watch_hidden`."""
        self.name = heads.config.kind
        self.target, self.heads = target, heads
        self.at_once = heads.config.kind == "medusa"  # all heads are computed, for any K
        self._n_prompt = 0
        self._states = states or target.watch_hidden()
        self.take_plan(plan)

    def take_plan(self, plan: TreePlan | None) -> None:
        """Set the plan for the next rounds; None drafts a chain."""
        self.n_heads = self.heads.config.n_heads if plan is None or len(plan) else 0
        self.tree_nodes = len(plan or ())
        self._plan = plan

    def start(self, tokens: Sequence[int]) -> None:
        """Store the length of the prompt. All other state is in the target."""
        self._n_prompt = len(tokens)

    def propose(self, tokens: Sequence[int], k: int, picker: Picker) -> Proposal:
        if len(tokens) == self._n_prompt or not self.n_heads:  # the first round, or an empty plan
            return Proposal(())
        start_s = perf_counter()
        with torch.inference_mode(), self.target.own_threads():
            logits = self._logits(tokens)
            if self._plan is None:
                return self._chain(logits, k, picker, perf_counter() - start_s)
            plan = self._plan.first(k)
            return Proposal(self._nodes(logits, plan), None, perf_counter() - start_s, plan)

    def _logits(self, tokens: Sequence[int]) -> "Logits":
        heads = self.heads
        newest = tokens[-1]
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
        ids = []
        rows = []
        for head in range(min(k, self.n_heads)):
            start_s = perf_counter()
            drafted = logits(head, [ids])[0].cpu().numpy()
            forward_s += perf_counter() - start_s
            try:  # draft ids ascend with vocabulary ids, so ties go to the same token
                picked = picker.pick(drafted)
            except NonFiniteLogits as error:  # its message has a draft id
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
        """Return the tokens of a plan's nodes.

        Each level is computed as one batch. Only the best tokens are copied to the CPU.
        """
        paths: dict[int, list[int]] = {COMMITTED: []}
        for head in range(plan.depth):
            level = [node for node, depth in enumerate(plan.depths) if depth == head]
            parents = sorted({plan.parents[node] for node in level})
            rows = logits(head, [paths[parent] for parent in parents])
            best, drafts = rows.topk(1 + max(plan.ranks[node] for node in level))
            if not best.isfinite().all():
                raise NonFiniteLogits(f"head {head} has NaN or infinite logits")
            tokens = self.heads.full_ids(drafts).expand(len(parents), -1).tolist()  # per parent
            for node in level:
                parent = plan.parents[node]
                paths[node] = [*paths[parent], tokens[parents.index(parent)][plan.ranks[node]]]
        return tuple(paths[node][-1] for node in range(len(plan)))

    def _full_row(self, row: np.ndarray, elsewhere: float) -> np.ndarray:
        """Expand a row `(draft_size,)` to the full vocabulary, filled with `elsewhere`."""
        if self.heads.token_map is None:
            return row
        full = np.full(self.heads.config.vocab_size, elsewhere, dtype=row.dtype)
        full[self.heads.token_map.cpu().numpy()] = row
        return full

    def rows(self, tokens: Sequence[int], ahead: Sequence[int]) -> list[np.ndarray]:
        with torch.inference_mode():
            logits = self._logits(tokens)
            heads = range(min(len(ahead), self.n_heads))
            return [self._full_row(logits(i, [ahead[:i]])[0].cpu().numpy(), -np.inf) for i in heads]

    def step_s(self) -> float:
        """Return the median seconds per position of a full chain, or per level of the tree."""
        depth = self._plan.depth if self._plan else self.n_heads
        return drafting_s(self, self.tree_nodes or depth) / depth if depth else 0.0


Logits = Callable[[int, Sequence[Sequence[int]]], Tensor]
"""Maps a head and paths of draft tokens to its logits after each, float32 `(paths, draft_size)`.

Medusa heads do not read draft tokens and return one row for all paths."""


def drafting_s(drafter: HeadsDrafter, k: int, *, repeats: int = 5) -> float:
    """Return the median seconds to draft `k` tokens (nodes, for a tree). Resets the target."""
    target = drafter.target
    greedy = Chooser(Sampling())
    target.reset()
    drafter.start([0])
    target.forward([0, 0], n_logits=1)
    samples = []
    for _ in range(2 + repeats):
        start_s = perf_counter()
        drafter.propose([0, 0, 0], k, greedy)
        samples.append(perf_counter() - start_s)
    target.reset()
    return float(np.median(samples[2:]))


CHAIN, AUTO = "chain", "auto"
KINDS = ("medusa", "hydra")
"""Kinds of heads to look for, in this order, if no checkpoint is given."""


def check_heads(
    _target: str,
    *,
    heads_checkpoint: str | None = None,
    tree: str = CHAIN,
    schema: type[DrafterConfig] = HeadsConfig,
) -> None:
    """Check the options of `heads_drafter` before a model is opened. Raises InputError."""
    tree_size(tree)
    if heads_checkpoint is not None:
        open_heads(heads_checkpoint, schema)


def heads_drafter(
    target: LanguageModel,
    *,
    heads_checkpoint: str | Path | None = None,
    tree: str | int = CHAIN,
    kinds: Sequence[str] = KINDS,
    drafter_of: Callable[..., HeadsDrafter] = HeadsDrafter,
    **loading: Any,
) -> HeadsDrafter:
    """Return a drafter of trained heads for `target`.

    `heads_checkpoint` is a path or the name of shipped heads. By default, the shipped heads trained
    on this target are used, of the first available of `kinds`. For `tree`, see `plan_drafts`.
    `drafter_of(target, net)` and `loading`, the arguments of `load_trained_heads`, are for other
    networks. Raises InputError, and what the loader raises.
    """
    checkpoint = heads_checkpoint or fitting_checkpoint(target, kinds)
    net, report = load_trained_heads(checkpoint, backbone_of(target), **loading)
    return plan_drafts(drafter_of(target, net), tree, report)


hydra_drafter = partial(heads_drafter, kinds=("hydra",))
"""Return a drafter of the shipped Hydra heads trained on the target."""


def plan_drafts(drafter: HeadsDrafter, tree: str | int, report: LoadReport) -> HeadsDrafter:
    """Set a drafter's plan, from the accuracies on held-out text in its training metadata.

    `tree` is "chain", a number of nodes, or "auto": the tree with the most expected tokens per
    second, given measured costs. The drafter's findings report the choice of "auto", or why a chain
    is drafted instead of a tree.
    """
    size = tree_size(tree)
    target = drafter.target
    accuracy = np.array(report.training.get("accuracy", ()))  # (heads, ranks), marginal
    drafter.expected = [float(ranks[0]) for ranks in accuracy]
    finding = ""
    if size == CHAIN:
        pass
    elif not len(accuracy):
        finding = "a chain is drafted: choosing a tree needs the accuracies of training.json"
    elif isinstance(size, int):
        drafter.take_plan(grow(accuracy[: drafter.n_heads], size))
    elif not target.caps.trees:
        finding = (
            f"a chain is drafted: {target.name} cannot verify trees "
            f"({target.caps.trees_reason or target.caps.engine})"
        )
    else:
        best = fastest_tree(timed_trees(drafter, accuracy, tree_curve(target)))
        drafter.take_plan(best.plan)
        finding = "nothing is drafted: plain decoding is faster than any tree, by measured costs"
        if len(best.plan):
            rates = f"{best.tokens:.2f} tokens per round and {best.tokens_per_s:.1f} per second"
            finding = f"a tree of {len(best.plan)} nodes is drafted, expected to yield {rates}"
    drafter.findings = (*report.findings, *filter(None, [finding]))
    return drafter


def timed_trees(drafter: HeadsDrafter, accuracy: np.ndarray, curve: CostCurve) -> list[TimedTree]:
    """Return the best tree of each of SIZES, with its time, for marginal `accuracy (heads, ranks)`.

    `curve` is the target's T(n) for trees; the drafting time is measured. The first tree, without
    nodes, is plain decoding. Changes the drafter's plan.
    """
    target = drafter.target
    widest = min(target.caps.max_width, target.caps.n_ctx // 2)
    trees = [TimedTree(TreePlan((), ()), 1.0, curve.seconds(1))]
    for size in SIZES:
        if size < widest:
            plan = grow(accuracy, size)
            drafter.take_plan(plan)
            seconds = curve.seconds(len(plan) + 1) + drafting_s(drafter, len(plan))
            trees.append(TimedTree(plan, plan.tokens(accuracy), seconds))
    return trees


def tree_size(tree: str | int) -> str | int:
    """Validate a value of `--tree`: a number of nodes, chain or auto. Raises InputError."""
    if tree in (CHAIN, AUTO):
        return tree
    if str(tree).isdecimal() and int(tree) > 0:
        return int(tree)
    raise InputError(
        f"got tree {str(tree)[:80]!r}, expected {CHAIN}, {AUTO}, or a number of nodes (1 or more)"
    )


def fitting_checkpoint(target: LanguageModel, kinds: Sequence[str]) -> Path:
    """Return the folder of the shipped drafter that was trained on the target's weights.

    Earlier `kinds` take precedence. Raises InputError if there is none.
    """
    folders = shipped()
    digest = backbone_of(target).digest
    for kind, folder in product(kinds, folders.values()):
        config = read_json(folder / CONFIG_FILE)
        if (config["kind"], config["backbone"]) == (kind, digest):
            return folder
    raise InputError(
        f"no shipped {' or '.join(kinds)} ({', '.join(folders) or 'none'}) was trained on "
        f"{target.name}: give --heads-checkpoint PATH to --drafter medusa or jump"
    )
