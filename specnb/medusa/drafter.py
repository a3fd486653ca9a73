"""Trained heads as drafter: Medusa and Hydra read the target's own hidden state, so drafting needs no second model.

Heads are fed the hidden state of the last token that the target computed, which stands before the newest one: the
newest was chosen from that state's logits, and has not been fed yet. Head i foretells the token i + 1 places behind
the newest. (Fed the state of any other token, they draft what belongs elsewhere: acceptance falls, and nothing fails.)
In the first round the prompt is the newest that was fed, the token after it is still to be chosen, and that round's
forward is for free: nothing is drafted.
"""

from collections.abc import Sequence
from time import perf_counter
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from specnb.draft.base import Picker, Proposal
from specnb.errors import InputError, NonFiniteLogits
from specnb.lm.base import LanguageModel
from specnb.lm.tree import COMMITTED
from specnb.medusa.heads import Heads
from specnb.medusa.tree import TreePlan

INPUTS = ("pre_norm", "post_norm")
"""Norm contracts, in the order in which a target shows a hidden state: before the final norm and after it."""


class ShowsHidden(LanguageModel, Protocol):
    """A target whose hidden states can be read: those that run in torch."""

    network: Any

    def watch_hidden(self) -> Any:
        """Its `lm.hf_hidden.HiddenStates`."""
        ...


class HeadsDrafter:
    """Drafts a chain, or with a `plan` the tree of the best tokens of each head that it describes.

    A chain is greedy or sampled, as generation is, and at most as long as there are heads; a tree is deterministic,
    and where fewer nodes are asked for, the first of the plan; an empty plan drafts nothing. Raises InputError for a
    target whose hidden states cannot be read, or that has other sizes, another type or device than the heads, and for a
    plan that needs more heads or ranks than there are.
    """

    vocab = None

    def __init__(
        self,
        target: ShowsHidden,
        heads: Heads,
        plan: TreePlan | None = None,
        *,
        accuracy: np.ndarray | None = None,
        findings: Sequence[str] = (),
    ) -> None:
        _require_fit(target, heads, plan)
        self.name = heads.config.kind
        self.target, self.heads = target, heads
        self.tree_nodes = len(plan) if plan else 0
        self.accuracy = accuracy
        """Marginal accuracies `(heads, ranks)` that came with the heads, by which a tree can be chosen."""
        self.findings = tuple(findings)
        """What the reader of a result should know of these heads."""
        self._plan = plan
        self._states = target.watch_hidden()

    def start(self, tokens: Sequence[int]) -> None:
        """Nothing to keep: what heads know of the text is in the target's state."""

    def propose(self, tokens: Sequence[int], k: int, rng: Picker) -> Proposal:
        first_round = self.target.n_past >= len(tokens)  # see above
        if first_round or (self._plan is not None and not len(self._plan)):
            return Proposal(())
        with torch.inference_mode():
            hidden = self._states.at(len(tokens) - 2)[INPUTS.index(self.heads.config.input)]
            draft = _Draft(self.heads, hidden, tokens[-1])
            return draft.chain(k, rng) if self._plan is None else draft.tree(self._plan.first(k))

    def commit(self, tokens: Sequence[int]) -> None:
        """Nothing to keep in step."""

    def close(self) -> None:
        """Nothing was opened: the target is the caller's."""


class _Draft:
    """One round of drafting from one hidden state `(hidden,)` and the `newest` token."""

    def __init__(self, heads: Heads, hidden: Tensor, newest: int) -> None:
        self._heads, self._hidden, self._newest = heads, hidden, newest
        began = perf_counter()
        self._at_once = heads.all_logits(hidden) if heads.config.kind == "medusa" else None
        self._forward_s = perf_counter() - began

    def chain(self, k: int, rng: Picker) -> Proposal:
        ids: list[int] = []
        rows: list[np.ndarray] = []
        for head in range(min(k, self._heads.config.n_heads)):
            began = perf_counter()
            logits = self._logits(head, [ids])[0].cpu().numpy()
            self._forward_s += perf_counter() - began
            try:  # among the draft vocabulary: ascending, so ties go to the same token as among the whole one
                picked = rng.pick(logits)
            except NonFiniteLogits as error:  # which names a draft id
                raise _broken(head) from error
            if picked is None:
                break
            token, row = picked
            ids.append(int(self._heads.full_ids(token)))
            if row is not None:
                rows.append(self._full_row(row))
            if rng.enough:
                break
        return Proposal(tuple(ids), np.stack(rows) if rows else None, self._forward_s)

    def tree(self, plan: TreePlan) -> Proposal:
        """Level by level, the nodes of one depth in one batch; only the best tokens of each row leave the device."""
        began = perf_counter()
        paths: dict[int, list[int]] = {COMMITTED: []}
        for head, level in enumerate(plan.levels):
            parents = sorted({plan.parents[node] for node in level})
            logits = self._logits(head, [paths[parent] for parent in parents])
            best, drafts = logits.topk(1 + max(plan.ranks[node] for node in level))
            if not bool(best.isfinite().all()):
                raise _broken(head)
            tokens = self._heads.full_ids(drafts).expand(len(parents), -1).tolist()
            for node in level:
                parent = plan.parents[node]
                paths[node] = [*paths[parent], tokens[parents.index(parent)][plan.ranks[node]]]
        ids = tuple(paths[node][-1] for node in range(len(plan)))
        forward_s = self._forward_s + perf_counter() - began
        return Proposal(ids, None, forward_s, plan.tree if ids else None)

    def _full_row(self, row: np.ndarray) -> np.ndarray:
        """Probabilities over the vocabulary, of those over the draft vocabulary."""
        if self._heads.token_map is None:
            return row
        full = np.zeros(self._heads.config.vocab_size)
        full[self._heads.token_map.cpu().numpy()] = row
        return full

    def _logits(self, head: int, paths: list[list[int]]) -> Tensor:
        """Logits of one head after each of `paths`, tokens drafted so far: `(paths, draft_size)`.

        One row for all of Medusa's, which do not look at what was drafted.
        """
        if self._at_once is not None:
            return self._at_once[head : head + 1]
        since = torch.tensor([[self._newest, *path] for path in paths], device=self._hidden.device)
        return self._heads.draft_logits(head, self._hidden.expand(len(paths), -1), since)


def _broken(head: int) -> NonFiniteLogits:
    return NonFiniteLogits(f"head {head} has NaN or infinite logits")


def require_hidden(target: LanguageModel) -> None:
    """Refuse a target whose engine does not show hidden states."""
    if not hasattr(target, "watch_hidden"):
        raise InputError(
            f"heads read hidden states, and {target.caps.engine} does not show those of {target.name}: open it with "
            "?backend=hf"
        )


def _place(weight: Tensor) -> str:
    return f"{str(weight.dtype).removeprefix('torch.')} on {weight.device}"


def _require_fit(target: LanguageModel, heads: Heads, plan: TreePlan | None) -> None:
    require_hidden(target)
    config = heads.config
    lm_head = target.network.get_output_embeddings().weight
    sizes = {
        "hidden_size": (config.hidden_size, lm_head.shape[1]),
        "vocab_size": (config.vocab_size, target.vocab.size),
    }
    for name, (ours, theirs) in sizes.items():
        if ours != theirs:
            raise InputError(f"these heads have {name} {ours}, but {target.name} has {theirs}: made for another model")
    # other types would be promoted without a word, or fail in the middle of a generation
    for weight in (heads.shared_lm_head, *heads.parameters()):
        if (weight.dtype, weight.device) != (lm_head.dtype, lm_head.device):
            raise InputError(
                f"these heads are {_place(weight)}, but {target.name} is {_place(lm_head)}: load them for this "
                "target, whose network says type and device (load_trained_heads)"
            )
    if plan is None or not len(plan):
        return
    if plan.depth > config.n_heads:
        raise InputError(f"the tree is {plan.depth} tokens deep, but there are {config.n_heads} heads: one for each")
    if max(plan.ranks) >= config.draft_size:
        raise InputError(f"the tree asks for rank {max(plan.ranks)}, but heads choose among {config.draft_size} tokens")
