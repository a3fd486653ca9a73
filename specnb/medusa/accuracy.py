"""Accuracy of heads along the target's own greedy text, and their acceptance rate in chains.

Row j holds the state from which a round drafts after j + 1 generated tokens: that of the token
before the newest. From it, the backbone predicts generated token j, and head i token j + 1 + i.
Hydra heads get the true tokens j … j + i. Drafters read states through another hook, so comparing
the two tests both.

A `Reference` holds the measurements of the target, `HeadsEvidence` those of heads. Gates, planted
faults and tables share them.
"""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
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
from specnb.measure.experiment import Progress
from specnb.measure.intervals import FEWEST, Interval, student_t, wilson
from specnb.medusa.checkpoint import LoadReport
from specnb.medusa.drafter import HeadsDrafter
from specnb.medusa.nets import MOST_HEADS, Heads, backbone_of
from specnb.medusa.tree import RANKS
from specnb.prompts import Prompt
from specnb.records import Generation

MAX_NEW_TOKENS = 64
"""Maximum number of tokens of a text along which heads are judged."""
NO_LABEL = -1
"""Rank where the text ends before the token that the head predicts."""
PIECE = 32
"""Maximum tokens per forward pass along a text; keeps the logits small."""


class States(NamedTuple):
    """States and logits of the last tokens of a text.

    `pre_norm` and `post_norm` (before and after the final norm) are `(rows, hidden)`; `logits` are
    `(rows, vocab)`. Along a generated text, row j predicts its token `ids[j]`, int64.
    """

    pre_norm: Tensor
    post_norm: Tensor
    logits: np.ndarray
    ids: Tensor | None = None


class Scores(NamedTuple):
    """The heads' predictions along a text; both fields are `(n, n_heads)`.

    `rank` is that of the true token in the head's logits, from 0; ties go to the lower id. It is
    the size of the draft vocabulary for a token outside of it, and NO_LABEL beyond the end of the
    text. `best` is the head's most likely token.
    """

    rank: np.ndarray
    best: np.ndarray


def states_of(target: LanguageModel, ids: Sequence[int], rows: int) -> States:
    """Return the states of the last `rows` tokens of `ids`. Resets the target.

    As in decoding, all tokens up to the first row are processed in one forward pass. The rest
    follow in passes of at most PIECE tokens, narrow enough to be bit-identical to single steps if
    the engine has such passes.
    """
    ids = list(ids)
    first = len(ids) - rows + 1
    width = min(PIECE, target.caps.same_bits_up_to or PIECE)
    caught = []
    stop = target.listen(lambda *states: caught.append(states))
    target.reset()
    try:
        logits = [target.forward(ids[:first], n_logits=1)]
        for start in range(first, len(ids), width):
            piece = ids[start : start + width]
            logits.append(target.forward(piece, n_logits=len(piece)))
    finally:
        stop()
        target.reset()
    # Engines may split a long pass, or a pass of a recurrent model.
    pre_norm, post_norm = (torch.cat(states)[-rows:] for states in zip(*caught, strict=True))
    return States(pre_norm, post_norm, np.concatenate(logits))


def states_along(target: LanguageModel, generation: Generation) -> States:
    """Return the states along a generated text, which has at least one token."""
    tokens = generation.token_ids
    states = states_of(target, (*generation.prompt_ids, *tokens[:-1]), len(tokens))
    return states._replace(ids=torch.tensor(tokens, device=states.pre_norm.device))


def block_input(heads: Heads, states: States) -> Tensor:
    """Return the input of the heads' blocks for these states, `(rows, hidden)`."""
    return heads.normed(states.pre_norm if heads.config.input == "pre_norm" else states.post_norm)


@torch.inference_mode()
def score(heads: Heads, states: States, normed: Tensor | None = None) -> Scores:
    """Return the ranks and predictions of every head at every row.

    `normed (rows, hidden)` replaces the input of the blocks. Raises NonFiniteLogits for NaN or Inf.
    """
    if normed is None:
        normed = block_input(heads, states)
    drafts = heads.draft_ids().to(normed.device)
    n = len(states.ids)
    n_heads = heads.config.n_heads
    padded = F.pad(states.ids, (0, 1 + n_heads), value=NO_LABEL)
    ranks = []
    best = []
    for head in range(n_heads):
        labels = padded[1 + head : 1 + head + n]
        since = padded.unfold(0, 1 + head, 1)[:n].clamp(min=0)
        draft = drafts[labels.clamp(min=0)][:, None]
        logits = heads.logits(head, heads.features(head, normed, since)).float()
        if not logits.amax(1).isfinite().all():  # NaN would count as a hit
            raise NonFiniteLogits(
                f"head {head} has NaN or infinite logits: its weights are damaged or overflow"
            )
        label_logits = logits.gather(1, draft.clamp(min=0))
        lower_id = torch.arange(logits.shape[1], device=logits.device) < draft
        rank = ((logits > label_logits) | ((logits == label_logits) & lower_id)).sum(1)
        rank[draft[:, 0] < 0] = logits.shape[1]
        rank[labels == NO_LABEL] = NO_LABEL
        ranks.append(rank)
        best.append(heads.full_ids(logits.argmax(-1)))
    return Scores(torch.stack(ranks, 1).cpu().numpy(), torch.stack(best, 1).cpu().numpy())


class Reference:
    """The target's `plain` greedy texts, and the `states` along them.

    All heads of the target are compared with it.
    """

    @torch.inference_mode()
    def __init__(
        self, target: LanguageModel, prompts: Sequence[Prompt | Sequence[int]], max_new_tokens: int
    ) -> None:
        """Generate up to `max_new_tokens`, at most MAX_NEW_TOKENS, for each prompt.

        Intervals need at least FEWEST prompts.
        """
        self.target = target
        self.backbone = backbone_of(target)
        limit = min(max_new_tokens, MAX_NEW_TOKENS)
        self.plain = [generate(target, prompt, max_new_tokens=limit) for prompt in prompts]
        self.states = [states_along(target, text) for text in self.plain]
        self._chains: dict[Heads, list[Generation]] = {}

    def chains(self, heads: Heads, progress: Progress) -> list[Generation]:
        """Return greedy generations with `heads`, one per prompt; each is generated once."""
        chains = self._chains.setdefault(heads, [])  # also of `first`
        drafter = HeadsDrafter(self.target, heads)
        k = heads.config.n_heads
        for text in self.plain[len(chains) :]:
            progress(
                len(chains), len(self.plain), f"gates: chain {len(chains) + 1} of {len(self.plain)}"
            )
            n = text.max_new_tokens
            chains.append(
                generate(self.target, text.prompt_ids, drafter=drafter, k=k, max_new_tokens=n)
            )
        return chains[: len(self.plain)]

    def first(self, n: int) -> Self:
        """Return the reference of the first `n` prompts."""
        part = copy(self)
        part.plain = self.plain[:n]
        part.states = self.states[:n]
        return part


@dataclass(eq=False)
class HeadsEvidence:
    """Measurements of heads on a reference's prompts; `chains` are greedy generations with them.

    `report` is the loader's report, or None if nothing was loaded.
    """

    reference: Reference
    heads: Heads
    report: LoadReport | None
    chains: list[Generation]

    @cached_property
    def scores(self) -> list[Scores]:
        """The heads' predictions along each plain text."""
        return [score(self.heads, states) for states in self.reference.states]

    def copies(self) -> np.ndarray:
        """Return how often each head predicts the backbone's next token, `(n_heads,)`."""
        pairs = zip(self.scores, self.reference.states, strict=True)
        return np.concatenate([s.best == t.logits.argmax(1)[:, None] for s, t in pairs]).mean(0)

    @cached_property
    def by_head(self) -> pd.DataFrame:
        """Accuracy of each head's most likely token, with intervals over prompts.

        Columns: head, accuracy, low, high, n.
        """
        # (heads, prompts, 2)
        counts = np.stack([count_ranks([of])[:, [0, -1]] for of in self.scores], axis=1)
        rows = [(head, *share_interval(of), of[:, 1].sum()) for head, of in enumerate(counts)]
        return pd.DataFrame(rows, columns=["head", "accuracy", "low", "high", "n"])

    @cached_property
    def served(self) -> pd.DataFrame:
        """alpha_k of the chains: position (from 1), alpha, low, high, accepted, tested."""
        # (positions, prompts, 2)
        counts = np.stack([served_counts(chain) for chain in self.chains], axis=1)
        tested = [of_prompts for of_prompts in counts if of_prompts[:, 1].any()]
        rows = [
            (k, *share_interval(rows), *rows.sum(0).astype(int)) for k, rows in enumerate(tested, 1)
        ]
        return pd.DataFrame(
            rows, columns=["position", "alpha", "low", "high", "accepted", "tested"]
        )


def count_ranks(scores: Sequence[Scores]) -> np.ndarray:
    """Count how often the true token has each rank: `(n_heads, RANKS + 1)`.

    The last column is the number of positions with a true token.
    """
    ranks = np.concatenate([of.rank for of in scores])
    hits = (ranks[..., None] == np.arange(RANKS)).sum(0)
    return np.column_stack([hits, (ranks != NO_LABEL).sum(0)])


def marginal(counts: np.ndarray) -> np.ndarray:
    """Return the share of positions whose true token has each rank, `(n_heads, RANKS)`."""
    return counts[:, :-1] / counts[:, -1:].clip(1)


def share_interval(counts: Sequence[Sequence[float]]) -> Interval:
    """Return hits / trials with an interval, from rows (hits, trials), one per prompt.

    Wilson's interval with Student's t. Draft tokens of one text are correlated, so the effective
    number of trials is used, from the spread over prompts, at most the actual number. The bounds
    are NaN for fewer than FEWEST prompts with trials; without a trial, so is the rate.
    """
    data = np.array([row for row in counts if row[1] > 0]).reshape(-1, 2)
    hits, trials = data.sum(axis=0)
    n = len(data)
    rate = hits / trials if n else nan
    if n < FEWEST:
        return Interval(rate, nan, nan)
    without = (hits - data[:, 0]) / (trials - data[:, 1])
    variance = ((without - rate) ** 2).sum()
    independent = min(trials, rate * (1 - rate) / variance) if variance else trials
    return Interval(rate, *wilson(rate, independent, student_t(n - 1)))


def served_counts(generation: Generation) -> np.ndarray:
    """Count accepted and tested draft tokens by position in a greedy chain: `(MOST_HEADS, 2)`."""
    counts = np.zeros((MOST_HEADS, 2))
    for r in generation.rounds:
        counts[: r.n_accepted, 0] += 1
        counts[: r.n_tested, 1] += 1
    return counts


def compare_rounds(chain: Generation, scores: Scores) -> tuple[int, int]:
    """Count the rounds of a greedy chain that draft, and those that contradict `scores`.

    A round after j + 1 tokens should accept the tokens correct in row j, up to the first wrong one.
    """
    rounds = differ = n_tokens = 0
    for r in chain.rounds:
        row = n_tokens - 1
        n_tokens += len(r.committed_ids)
        if r.k:
            rounds += 1
            expected = (scores.rank[row, : r.k] == 0).cumprod().sum()
            differ += int(expected != r.n_accepted)
    return rounds, differ
