"""Accuracy of heads: along the target's own greedy text, in served alignment, and in the rounds of chains.

Row j of a trace is the state that a round is served which starts after j + 1 generated tokens: that of the token
before the newest one. The backbone says generated token j from it, head i token j + 1 + i, and a Hydra is shown the
true tokens j ... j + i. States are caught by another hook than a drafter's, which is held against them.

Gates, faults and tables share what is measured: a `Reference` of the target, and a `HeadsEvidence` of any heads.
"""

from collections.abc import Callable, Sequence
from copy import copy
from functools import cached_property, partial
from itertools import product
from math import nan
from typing import NamedTuple, Self

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor

from specnb.decode.generate import generate
from specnb.errors import NonFiniteLogits
from specnb.lm.base import LanguageModel
from specnb.measure.baseline import Baseline, time_baseline
from specnb.measure.bench import FEWEST, Interval, student_t, wilson
from specnb.measure.cost import CostCurve
from specnb.measure.experiment import Progress, silent
from specnb.medusa.checkpoint import LoadReport
from specnb.medusa.drafter import HeadsDrafter
from specnb.medusa.nets import MOST_HEADS, Heads, backbone_of, draft_ids
from specnb.medusa.tree import RANKS, tree_curve
from specnb.prompts import Prompt
from specnb.records import Generation

MAX_NEW_TOKENS = 64
"""Longest text that heads are judged along."""
PROBE = 32
"""Rows of the states that show what heads are fed."""

NO_LABEL = -1
"""In ranks: the text ends before the token that this head would have to say."""
PIECE = 32
"""Most tokens of one forward along a text: logits stay small."""
TOPS = (1, 5)
NEAR_TIE = 1e-4
"""A first choice that leads by less than this share of its logit may differ between two float32 forwards."""
HALF_TIES = 4
"""The same in units of a 16-bit type's spacing: state and logit are each rounded once, on both sides."""


class States(NamedTuple):
    """The last rows of a text: `pre_norm` and `post_norm (rows, hidden)` of the network, `logits (rows, vocab)`.

    Along a generated text `ids (rows,)` int64 are its tokens: each was chosen in the state of its row.
    """

    pre_norm: Tensor
    post_norm: Tensor
    logits: np.ndarray
    ids: Tensor | None = None


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
    caught, parts, ids = [], [], list(ids)
    first, width = len(ids) - rows + 1, min(PIECE, target.caps.same_bits_up_to or PIECE)
    pieces = [ids[:first], *(ids[at : at + width] for at in range(first, len(ids), width))]
    stop = target.listen(lambda *states: caught.append(states))
    target.reset()
    try:
        for piece in pieces:
            caught.clear()
            last = len(piece) if parts else 1
            logits = target.forward(piece, n_logits=last)
            # long or recurrent ones come in several forwards
            parts.append((*(torch.cat(x)[-last:] for x in zip(*caught, strict=True)), logits))
    finally:
        stop()
        target.reset()
    pre_norm, post_norm, all_logits = zip(*parts, strict=True)
    return States(torch.cat(pre_norm), torch.cat(post_norm), np.concatenate(all_logits))


def trace(target: LanguageModel, generation: Generation) -> States:
    """Return the states along a generation's text, which has a token at least."""
    tokens = generation.token_ids
    of_text = states(target, (*generation.prompt_ids, *tokens[:-1]), len(tokens))
    return of_text._replace(ids=torch.tensor(tokens, device=of_text.pre_norm.device))


def feed_blocks(heads: Heads, hidden: States) -> Tensor:
    """Return what the blocks of heads are fed in these states, by their norm contract, `(rows, hidden)`."""
    return heads.normed(hidden.pre_norm if heads.config.input == "pre_norm" else hidden.post_norm)


@torch.inference_mode()
def score(
    heads: Heads, hidden: States, fed: Callable[[States], Tensor] | None = None, *, shift: int = 0
) -> Scores:  # fmt: skip
    """Return ranks, choices and margins of every head at every row.

    `fed` gives what the blocks are fed instead, `(n, hidden)`, and with `shift` head i is held against token
    j + 1 + i + shift: both ask whether heads would be right about another input or token than they are served.
    """
    normed = fed(hidden) if fed else feed_blocks(heads, hidden)
    drafts = draft_ids(heads).to(normed.device)
    n, columns = len(hidden.ids), []
    for head in range(heads.config.n_heads):
        first, padded = 1 + head + shift, F.pad(hidden.ids, (0, 2 + head), value=NO_LABEL)
        since, labels = padded.unfold(0, 1 + head, 1)[:n].clamp(min=0), padded[first : first + n]
        draft = drafts[labels.clamp(min=0)][:, None]
        logits = heads.logits(head, heads.features(head, normed, since)).float()
        top = logits.topk(2).values
        if not top.isfinite().all():  # NaN compares as no better than the true token's logit: as a hit
            raise NonFiniteLogits(f"head {head} has NaN or infinite logits: its weights are broken, or overflow")
        drafted = logits.gather(1, draft.clamp(min=0))
        lower = torch.arange(logits.shape[1], device=logits.device) < draft
        rank = (logits > drafted).sum(1) + ((logits == drafted) & lower).sum(1)
        rank[draft[:, 0] < 0] = logits.shape[1]
        rank[labels == NO_LABEL] = NO_LABEL
        margin = (top[:, 0] - top[:, 1]) / top[:, 0].abs().clamp(min=1)
        columns.append((rank, heads.full_ids(logits.argmax(-1)), margin))
    return Scores(*(torch.stack(of_heads, 1).cpu().numpy() for of_heads in zip(*columns, strict=True)))


# --- what is measured, once for all who judge heads ---


class Reference:
    """The target without drafts: its greedy `plain` texts of the prompts, and the `traces` of its states along them.

    All heads of the target are held against it. What costs time is measured once, on first use.
    """

    @torch.inference_mode()
    def __init__(
        self, target: LanguageModel, prompts: Sequence[Prompt | Sequence[int]], max_new_tokens: int,
        progress: Progress = silent,
    ) -> None:  # fmt: skip
        """Continue each prompt by `max_new_tokens`, at most MAX_NEW_TOKENS; for intervals FEWEST prompts or more."""
        self.target, self.backbone, self.plain = target, backbone_of(target), []
        for done, prompt in enumerate(prompts):
            progress(done, len(prompts), f"plain text {done + 1} of {len(prompts)}")
            self.plain.append(generate(target, prompt, max_new_tokens=min(max_new_tokens, MAX_NEW_TOKENS)))
        self.traces = [trace(target, text) for text in self.plain]

    def first(self, n: int) -> Self:
        """The reference of the first `n` prompts."""
        part = copy(self)
        part.plain, part.traces = self.plain[:n], self.traces[:n]
        return part

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
        return tree_curve(self.target)


class HeadsEvidence:
    """Measurements of heads against a reference, with the `chains` that they draft for its prompts, greedily.

    `report` is the loader's, None where nothing was loaded, and `log` that of the training; `seed` is that of weights
    that are shuffled to compare.
    """

    def __init__(
        self, reference: Reference, heads: Heads, report: LoadReport | None, seed: int, progress: Progress = silent
    ) -> None:
        self.reference, self.heads, self.report, self.seed = reference, heads, report, seed
        self.log = report.log if report else ()
        drafter, self.chains = HeadsDrafter(reference.target, heads), []
        decode = partial(generate, reference.target, drafter=drafter, k=heads.config.n_heads)
        for done, text in enumerate(reference.plain):
            progress(done, len(reference.plain), f"gates: chains of prompt {done + 1} of {len(reference.plain)}")
            self.chains.append(decode(text.prompt_ids, max_new_tokens=text.max_new_tokens))

    @cached_property
    def scores(self) -> list[Scores]:
        return self.score_all()

    def score_all(
        self, heads: Heads | None = None, *, fed: Callable[[States], Tensor] | None = None, shift: int = 0
    ) -> list[Scores]:
        """Score along all traces: these heads or others, states that are `fed` to the blocks instead, other tokens."""
        return [score(heads or self.heads, hidden, fed, shift=shift) for hidden in self.reference.traces]

    def copies(self) -> np.ndarray:
        """Share of the positions at which each head says the backbone's next token, `(n_heads,)`."""
        pairs = zip(self.scores, self.reference.traces, strict=True)
        return np.concatenate([s.best == t.logits.argmax(1)[:, None] for s, t in pairs]).mean(0)

    @cached_property
    def by_head(self) -> pd.DataFrame:
        """How often each head has the true token among its best `top`, with intervals over prompts.

        Columns: head, top (1, 5), accuracy, low, high, n.
        """
        rows = []
        for head, top in product(range(self.heads.config.n_heads), TOPS):
            ranks = [scores.rank[scores.rank[:, head] != NO_LABEL, head] for scores in self.scores]
            share = share_interval([((rank < top).sum(), len(rank)) for rank in ranks])
            rows.append((head, top, *share, sum(map(len, ranks))))
        return pd.DataFrame(rows, columns=["head", "top", "accuracy", "low", "high", "n"])

    @cached_property
    def served(self) -> pd.DataFrame:
        """alpha_k of the chains: position (1..), alpha, low, high (over prompts), kept, tested."""
        counts = np.stack([served_counts(chain) for chain in self.chains], axis=1)  # (positions, prompts, 2)
        tested = [of_prompts for of_prompts in counts if of_prompts[:, 1].any()]
        rows = [(k, *share_interval(rows), *rows.sum(0).astype(int)) for k, rows in enumerate(tested, 1)]
        return pd.DataFrame(rows, columns=["position", "alpha", "low", "high", "kept", "tested"])


# --- tables ---


def accuracy_table(scores: Sequence[Scores]) -> pd.DataFrame:
    """Return one row for each head and rank: head, rank (0 the best), marginal, cumulative, hits, n.

    `marginal` is the share of the `n` positions whose true token has just this rank, `cumulative` this rank or a
    better one.
    """
    ranks = np.concatenate([of.rank for of in scores])
    hits = (ranks[..., None] == np.arange(RANKS)).sum(0)  # (n_heads, RANKS)
    n = np.broadcast_to((ranks != NO_LABEL).sum(0)[:, None], hits.shape)
    shares = hits / n.clip(1)
    head, rank = np.indices(hits.shape)
    columns = {"head": head, "rank": rank, "marginal": shares, "cumulative": shares.cumsum(1), "hits": hits, "n": n}
    return pd.DataFrame({name: values.ravel() for name, values in columns.items()})


def share_interval(counts: Sequence[Sequence[float]]) -> Interval:
    """Return hits over trials with an interval over prompts, from rows (hits, trials); all NaN without a trial.

    Wilson's interval of as many independent trials as would spread like these (at most those there are), with
    Student's t. So 4 of 4 is no certainty, and drafts of one text count less than as many of many texts.
    """
    data = np.array([row for row in counts if row[1] > 0]).reshape(-1, 2)  # a prompt without a trial says nothing
    (hits, trials), n = data.sum(axis=0), len(data)
    rate = hits / trials if n else nan
    if n < FEWEST:
        return Interval(rate, nan, nan)
    without = (hits - data[:, 0]) / (trials - data[:, 1])
    variance = ((without - rate) ** 2).sum()
    independent = min(trials, rate * (1 - rate) / variance) if variance else trials
    return Interval(rate, *wilson(rate, independent, student_t(n - 1)))


def served_counts(generation: Generation) -> np.ndarray:
    """Count drafts kept and tested by position (of a tree, by depth) in a greedy generation: `(MOST_HEADS, 2)`."""
    counts = np.zeros((MOST_HEADS, 2))
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
        expected = int((rank == 0).cumprod().sum())  # behind the end of the text no rank is 0
        rounds, right = rounds + 1, right + int(rank[0] == 0)
        if expected != r.n_accepted:
            tie = scored.margin[row, min(expected, r.n_accepted)] <= ties
            near, apart = near + int(tie), apart + int(not tie)
    return Compared(rounds, near, apart, right)
