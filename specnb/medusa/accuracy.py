"""Accuracy of heads: along the target's own greedy text, in served alignment, and in the rounds of chains.

Row j of a trace is the state that a round is served which starts after j + 1 generated tokens: that of the token
before the newest one. The backbone says generated token j from it, head i token j + 1 + i, and a Hydra is shown the
true tokens j ... j + i. States are caught by another hook than a drafter's, which is held against them.

Gates, faults and tables share what is measured: a `Reference` of the target, and a `HeadsEvidence` of any heads.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import product
from typing import NamedTuple, Self

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from specnb.decode.generate import generate
from specnb.errors import NonFiniteLogits
from specnb.lm.base import LanguageModel
from specnb.machine import auto_dtype
from specnb.measure.baseline import Baseline, time_baseline
from specnb.measure.bench import FEWEST, Interval, student_t, wilson
from specnb.measure.cost import CostCurve
from specnb.measure.experiment import Progress, silent
from specnb.medusa.checkpoint import LoadReport
from specnb.medusa.drafter import HeadsDrafter, cost_of_trees
from specnb.medusa.nets import Backbone, Heads, backbone_of, draft_ids
from specnb.medusa.tree import RANKS
from specnb.prompts import Prompt
from specnb.records import Generation

MAX_NEW_TOKENS = 64
"""Longest text that heads are judged along."""
PROBE = 32
"""Rows of the states that show what heads are fed."""

NO_LABEL = -1
"""In ranks: the text ends before the token that this head would have to say."""
PIECE, ROWS = 32, 64
"""Most tokens of one forward along a text, and states that a head is asked about at once: logits stay small."""
TOPS = (1, 5)
NEAR_TIE = 1e-4
"""A first choice that leads by less than this share of its logit may differ between two float32 forwards."""
HALF_TIES = 4
"""The same in units of a 16-bit type's spacing: state and logit are each rounded once, on both sides."""


class States(NamedTuple):
    """The last rows of a text: `pre_norm` and `post_norm (rows, hidden)` of the network, `logits (rows, vocab)`."""

    pre_norm: Tensor
    post_norm: Tensor
    logits: np.ndarray

    def fed(self, contract: str) -> Tensor:
        """The states that heads of this norm contract take."""
        return self.pre_norm if contract == "pre_norm" else self.post_norm


class HiddenTrace(NamedTuple):
    """A generated text `ids (n,)` int64 and its `n` states; `best (n,)` are the backbone's own next tokens in them."""

    ids: Tensor
    pre_norm: Tensor
    post_norm: Tensor
    best: Tensor

    fed = States.fed


class Scores(NamedTuple):
    """The heads' choices along a trace, all `(n, n_heads)`.

    `rank` of the true token in the head's row, 0 the best, ties by the lower id as argmax has them; the size of the
    draft vocabulary for a token it does not hold; NO_LABEL behind the end. `best` are the heads' first choices,
    `margin` how far the second is behind, as a share of the first's logit.
    """

    rank: np.ndarray
    best: np.ndarray
    margin: np.ndarray


def states(target: LanguageModel, ids: Sequence[int], rows: int) -> States:
    """Feed `ids` to the emptied target and return the states of the last `rows` tokens. Leaves the target empty.

    They are fed as decoding feeds them: all up to the first row in one go, then no wider than the engine keeps bits
    equal, so that the states are those of decoding.
    """
    caught, parts, ids = list[tuple[Tensor, Tensor]](), [], list(ids)
    first, width = len(ids) - rows + 1, min(PIECE, target.caps.same_bits_up_to or PIECE)
    pieces = [(ids[:first], 1), *((ids[at : at + width], width) for at in range(first, len(ids), width))]
    is_torch = hasattr(target, "listen")
    hidden = target.listen(lambda *states: caught.append(states)) if is_torch else target.watch_hidden()
    target.reset()
    try:
        for piece, last in pieces:
            caught.clear()
            logits = target.forward(piece, n_logits=min(last, len(piece)))
            if not is_torch:
                post = np.stack([hidden.at(place)[1] for place in range(target.n_past - len(piece), target.n_past)])
                caught.append((torch.as_tensor(post, dtype=getattr(torch, auto_dtype())),) * 2)
            # long or recurrent ones come in several forwards
            parts.append((*(torch.cat(x)[-last:] for x in zip(*caught, strict=True)), logits))
    finally:
        if is_torch:
            hidden()
        target.reset()
    pre_norm, post_norm, all_logits = zip(*parts, strict=True)
    return States(torch.cat(pre_norm), torch.cat(post_norm), np.concatenate(all_logits))


def trace(target: LanguageModel, generation: Generation) -> HiddenTrace:
    """Return the states along a generation's text, which has a token at least."""
    tokens = generation.token_ids
    last = states(target, (*generation.prompt_ids, *tokens[:-1]), len(tokens))
    ids, best = (torch.as_tensor(x, device=last.pre_norm.device) for x in (tokens, last.logits.argmax(1)))
    return HiddenTrace(ids, last.pre_norm, last.post_norm, best)


@torch.inference_mode()
def score(heads: Heads, hidden: HiddenTrace, normed: Tensor | None = None, *, shift: int = 0) -> Scores:
    """Return ranks, choices and margins of every head at every row.

    `normed (n, hidden)` replaces what the blocks are fed, and with `shift` head i is held against token j + 1 + i +
    shift: both ask whether heads would be right about another input, or another token, than they are served.
    """
    fed = heads.normed(hidden.fed(heads.config.input)) if normed is None else normed
    parts = [_scored(heads, i, hidden, fed, shift) for i in range(heads.config.n_heads)]
    return Scores(*(np.stack(columns, axis=1) for columns in zip(*parts, strict=True)))


def _scored(heads: Heads, head: int, hidden: HiddenTrace, fed: Tensor, shift: int) -> tuple[np.ndarray, ...]:
    padding = hidden.ids.new_full((heads.config.n_heads + 1 + abs(shift),), NO_LABEL)
    padded = torch.cat([hidden.ids, padding])
    at = torch.arange(len(hidden.ids), device=padded.device)
    labels = padded[(at + 1 + head + shift).clamp(min=0)]
    draft = draft_ids(heads.token_map, heads.config.vocab_size)[labels.clamp(min=0).cpu()].to(labels.device)[:, None]
    since = padded[at[:, None] + torch.arange(head + 1, device=padded.device)].clamp(min=0)
    parts = []
    for rows in at.split(ROWS):
        logits = heads.logits(head, heads.features(head, fed[rows], since[rows])).float()
        top = logits.topk(2, dim=-1).values
        if not bool(top.isfinite().all()):  # NaN compares as no better than the true token's logit: as a hit
            raise NonFiniteLogits(f"head {head} has NaN or infinite logits: its weights are broken, or overflow")
        drafted = logits.gather(1, draft[rows].clamp(min=0))
        lower = torch.arange(logits.shape[1], device=logits.device) < draft[rows]
        rank = (logits > drafted).sum(1) + ((logits == drafted) & lower).sum(1)
        rank[draft[rows, 0] < 0] = logits.shape[1]
        rank[labels[rows] == NO_LABEL] = NO_LABEL
        margin = (top[:, 0] - top[:, 1]) / top[:, 0].abs().clamp(min=1)
        parts.append((rank, heads.full_ids(logits.argmax(-1)), margin))
    return tuple(torch.cat(column).cpu().numpy() for column in zip(*parts, strict=True))


# --- what is measured, once for all who judge heads ---


@dataclass(frozen=True)
class Reference:
    """The target without drafts: its greedy `plain` texts of the prompts, and the `traces` of its states along them.

    All heads of the target are held against it. What costs time is measured once, on first use.
    """

    target: LanguageModel
    plain: tuple[Generation, ...]
    traces: tuple[HiddenTrace, ...]

    @classmethod
    @torch.inference_mode()
    def of(
        cls, target: LanguageModel, prompts: Sequence[Prompt | Sequence[int]], max_new_tokens: int,
        progress: Progress = silent,
    ) -> Self:  # fmt: skip
        """Continue each prompt by `max_new_tokens`, at most MAX_NEW_TOKENS; for intervals FEWEST prompts or more."""
        plain = []
        for done, prompt in enumerate(prompts):
            progress(done, len(prompts), f"plain text {done + 1} of {len(prompts)}")
            plain.append(generate(target, prompt, max_new_tokens=min(max_new_tokens, MAX_NEW_TOKENS)))
        return cls(target, tuple(plain), tuple(trace(target, text) for text in plain))

    def first(self, n: int) -> Self:
        """The reference of the first `n` prompts."""
        return replace(self, plain=self.plain[:n], traces=self.traces[:n])

    @cached_property
    def backbone(self) -> Backbone:
        return backbone_of(self.target)

    @cached_property
    def probe(self) -> States:
        """The last states of the longest text, whose last token may be no context."""
        ids = max(((*text.prompt_ids, *text.token_ids[:-1]) for text in self.plain), key=len)
        return states(self.target, ids, min(PROBE, len(ids)))

    @cached_property
    def baseline(self) -> Baseline:
        """The fastest plain decoding of the target's weights, in any engine."""
        return time_baseline(self.target, [text.prompt_ids for text in self.plain[:FEWEST]])

    @cached_property
    def tree_costs(self) -> CostCurve:
        return cost_of_trees(self.target)


@dataclass(frozen=True)
class HeadsEvidence:
    """Measurements of heads against a reference, with the `chains` that they draft for its prompts.

    `report` is the loader's, None where nothing was loaded; `seed` is that of weights that are shuffled to compare.
    """

    reference: Reference
    heads: Heads
    report: LoadReport | None
    chains: tuple[Generation, ...]
    seed: int = 0

    @classmethod
    def of(
        cls, reference: Reference, heads: Heads, report: LoadReport | None, seed: int, progress: Progress = silent
    ) -> Self:
        """Continue each prompt of the reference greedily with chains of all heads."""
        chains, drafter = [], HeadsDrafter(reference.target, heads)
        decode = partial(generate, reference.target, drafter=drafter, k=heads.config.n_heads)
        for done, text in enumerate(reference.plain):
            progress(done, len(reference.plain), f"gates: chains of prompt {done + 1} of {len(reference.plain)}")
            chains.append(decode(text.prompt_ids, max_new_tokens=text.max_new_tokens))
        return cls(reference, heads, report, tuple(chains), seed)

    @cached_property
    def scores(self) -> list[Scores]:
        return self.score_all()

    def score_all(
        self, heads: Heads | None = None, *, fed: Callable[[HiddenTrace], Tensor] | None = None, shift: int = 0
    ) -> list[Scores]:
        """Score along all traces: these heads or others, states that are `fed` to the blocks instead, other tokens."""
        traces = self.reference.traces
        return [score(heads or self.heads, hidden, fed and fed(hidden), shift=shift) for hidden in traces]

    def copies(self) -> np.ndarray:
        """Share of the positions at which each head says the backbone's next token, `(n_heads,)`."""
        pairs = zip(self.scores, self.reference.traces, strict=True)
        return np.concatenate([s.best == t.best.cpu().numpy()[:, None] for s, t in pairs]).mean(0)

    @cached_property
    def accuracy(self) -> pd.DataFrame:
        return accuracy_table(self.scores)

    @cached_property
    def by_head(self) -> pd.DataFrame:
        """How often each head has the true token among its best `top`, with intervals over prompts.

        Columns: head, top (1, 5), accuracy, low, high, n.
        """
        rows = []
        for head, top in product(range(self.heads.config.n_heads), TOPS):
            ranks = [of_prompt.rank[:, head][of_prompt.rank[:, head] != NO_LABEL] for of_prompt in self.scores]
            share = share_interval([((rank < top).sum(), len(rank)) for rank in ranks])
            rows.append((head, top, *share, sum(map(len, ranks))))
        return pd.DataFrame(rows, columns=["head", "top", "accuracy", "low", "high", "n"])

    @cached_property
    def served(self) -> pd.DataFrame:
        """alpha_k of the chains: position (1..), alpha, low, high (over prompts), kept, tested."""
        counts, rows = [served_counts(chain) for chain in self.chains], []
        for k in range(max(map(len, counts), default=0)):
            of_prompts = [counted[k] for counted in counts if k < len(counted)]
            rows.append((k + 1, *share_interval(of_prompts), *map(int, np.sum(of_prompts, axis=0))))
        return pd.DataFrame(rows, columns=["position", "alpha", "low", "high", "kept", "tested"])


# --- tables ---


def accuracy_table(scores: Sequence[Scores]) -> pd.DataFrame:
    """Return one row for each head and rank: head, rank (0 the best), marginal, cumulative, hits, n.

    `marginal` is the share of the `n` positions whose true token has just this rank, `cumulative` this rank or a
    better one.
    """
    rows, ranks = [], np.concatenate([of.rank for of in scores])
    for head, rank in product(range(ranks.shape[1]), range(RANKS)):
        of_head = ranks[:, head][ranks[:, head] != NO_LABEL]
        hits, better, n = int((of_head == rank).sum()), int((of_head <= rank).sum()), len(of_head)
        shares = (hits / n, better / n) if n else (float("nan"),) * 2
        rows.append((head, rank, *shares, hits, n))
    return pd.DataFrame(rows, columns=["head", "rank", "marginal", "cumulative", "hits", "n"])


def accuracy_matrix(table: pd.DataFrame) -> np.ndarray:
    """Return the marginal accuracies `(n_heads, ranks)` that a tree is grown from."""
    return table.pivot(index="head", columns="rank", values="marginal").fillna(0.0).to_numpy()


def share_interval(counts: Sequence[Sequence[float]]) -> Interval:
    """Return hits over trials with an interval over prompts, from rows (hits, trials); all NaN without a trial.

    Wilson's interval of as many independent trials as would spread like these (at most those there are), with
    Student's t. So 4 of 4 is no certainty, and drafts of one text count less than as many of many texts.
    """
    data = np.array([row for row in counts if row[1] > 0]).reshape(-1, 2)  # a prompt without a trial says nothing
    (hits, trials), n = data.sum(axis=0), len(data)
    rate = hits / trials if n else float("nan")
    if n < FEWEST:
        return Interval(rate, float("nan"), float("nan"))
    without = (hits - data[:, 0]) / (trials - data[:, 1])
    variance = ((without - rate) ** 2).sum()
    independent = min(trials, rate * (1 - rate) / variance) if variance else trials
    return Interval(rate, *wilson(rate, independent, student_t(n - 1)))


def served_counts(generation: Generation) -> np.ndarray:
    """Count drafts kept and tested by position (of a tree, by depth) in a greedy generation: `(positions, 2)`."""
    counts = np.zeros((max((r.n_tested for r in generation.rounds), default=0), 2))
    for r in generation.rounds:
        counts[: r.n_accepted, 0] += 1
        counts[: r.n_tested, 1] += 1
    return counts


# --- what was served, against what was scored ---


class Compared(NamedTuple):
    """Rounds that drafted; those that contradict the scores, at near-ties and not; right first drafts."""

    rounds: int
    near_ties: int
    apart: int
    right: int


def near_tie(target: LanguageModel, heads: Heads) -> float:
    """Return the lead of a first choice, as a share of its logit, below which two forwards may choose differently."""
    return NEAR_TIE if target.caps.lossless_dtype else HALF_TIES * torch.finfo(heads.shared_lm_head.dtype).eps


def compare_rounds(chain: Generation, scored: Scores, ties: float) -> Compared:
    """Compare a greedy chain with scores: a round after j + 1 tokens must accept what row j is right about."""
    rounds = near = apart = right = done = 0
    for r in chain.rounds:
        row, done = done - 1, done + len(r.committed_ids)
        if not r.k:
            continue
        rank = scored.rank[row, : r.k]
        expected = int(np.logical_and.accumulate(rank == 0).sum())  # behind the end of the text no rank is 0
        rounds, right = rounds + 1, right + int(rank[0] == 0)
        if expected != r.n_accepted:
            tie = scored.margin[row, min(expected, r.n_accepted)] <= ties
            near, apart = near + int(tie), apart + int(not tie)
    return Compared(rounds, near, apart, right)
