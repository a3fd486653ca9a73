"""One recording answers every K: rounds, acceptance and speed of speculative decoding without running it.

Let x be the tokens that the target produced. Drafting and verifying are a Markov chain along x, and its law is known
from one pass of the drafter over x, because losslessness makes x independent of the drafts:

* greedy: a draft is kept exactly when it equals x, so a round that starts at position i keeps the common prefix;
* temperature > 0: P(the draft is kept | x_i was committed) = min(1, q_draft(x_i) / p_target(x_i)), independently along
  x (P(x and kept) = min(p, q), and P(x) = p); for a deterministic drafter it is 1 where the draft is x_i, else 0.

After a rejection the correction x_i is committed, after K kept drafts the bonus token, and the next round starts
behind it. The expected number of rounds that start at each position follows by going along x once.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd

from specnb.decode.generate import PromptLike, generate
from specnb.decode.sampling import Sampling
from specnb.draft.base import Drafter, TokenView
from specnb.draft.model import ModelDrafter
from specnb.errors import InputError
from specnb.lm.base import LanguageModel
from specnb.measure.cost import CostCurve
from specnb.records import Generation

PASS_WIDTH = 64
"""Rows of logits held at once in a teacher-forced pass."""


class Recording(NamedTuple):
    """What one drafter would do along one generation.

    `keep[i]` holds, for a round that starts after i generated tokens, the probability that draft j is kept given that
    the drafts before it were and that the true token is committed; its length is the number of drafts that are on
    offer there, at most k_max and at most the tokens that are left. `offered[i]` counts drafts beyond the end of the
    generation too: they are drafted and verified all the same.
    """

    prompt_id: str
    category: str
    drafter: str
    temperature: float
    n_tokens: int
    max_new_tokens: int
    keep: tuple[tuple[float, ...], ...]
    offered: tuple[int, ...]


class Counts(NamedTuple):
    """Expected counts of one generation (whole numbers when greedy); `by_width[n]` target calls of n tokens."""

    n_tokens: int
    rounds: float
    drafted: float
    accepted: float
    by_width: dict[int, float]
    tested: tuple[float, ...]
    kept: tuple[float, ...]

    @property
    def tau(self) -> float:
        return self.n_tokens / self.rounds

    def seconds(self, curve: CostCurve, c: float = 0.0) -> float:
        """Predicted decoding time: T(width) for every round, and c T(1) for every drafted token."""
        verify = sum(calls * curve.seconds(width) for width, calls in self.by_width.items())
        return verify + self.drafted * c * curve.seconds(1)


def record(
    target: LanguageModel,
    drafters: Sequence[Drafter],
    prompts: Sequence[PromptLike],
    *,
    temperature: float = 0.0,
    k_max: int = 24,
    max_new_tokens: int = 128,
    seed: int = 0,
    ignore_eog: bool = False,
) -> Iterator[tuple[Generation, list[Recording]]]:
    """Generate each prompt once with the target alone and follow every drafter along it.

    Yields the plain generation and a Recording per drafter. Raises what `generate` raises.
    """
    if k_max < 1:
        raise InputError(f"k_max must be 1 or more, got {k_max}")
    sampling = Sampling(temperature)
    for prompt in prompts:
        made = generate(
            target, prompt, temperature=temperature, max_new_tokens=max_new_tokens, seed=seed, ignore_eog=ignore_eog
        )
        p_true = None if sampling.greedy else _true_probabilities(target, made, sampling)
        yield made, [_follow(d, made, sampling, p_true, k_max, max_new_tokens) for d in drafters]


def _follow(
    drafter: Drafter,
    made: Generation,
    sampling: Sampling,
    p_true: np.ndarray | None,
    k_max: int,
    max_new_tokens: int,
) -> Recording:
    n = len(made.token_ids)
    most = [max(0, min(k_max, max_new_tokens - i - 1)) for i in range(n)]
    if isinstance(drafter, ModelDrafter):
        at = _kept_by_model(drafter.model, made, sampling, p_true)
        keep = tuple(tuple(at[i : min(i + most[i], n)]) for i in range(n))
        offered = tuple(most)
    else:
        proposals = list(_proposals(drafter, made, most))
        true = made.token_ids
        keep = tuple(
            tuple(float(draft == x) for draft, x in zip(ids, true[i:], strict=False)) for i, ids in enumerate(proposals)
        )
        offered = tuple(len(ids) for ids in proposals)
    return Recording(
        made.prompt_id, made.category, drafter.name, sampling.temperature, n, max_new_tokens, keep, offered
    )


def _proposals(drafter: Drafter, made: Generation, most: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """What a deterministic drafter proposes at every position of the generation."""
    tokens = list(made.prompt_ids)
    view = TokenView(tokens)
    drafter.start(view)
    for limit, token in zip(most, made.token_ids, strict=True):
        yield drafter.propose(view, limit, _NoChoice()).ids if limit else ()
        tokens.append(token)
        drafter.commit(view)


class _NoChoice:
    """A deterministic drafter picks nothing; one that does would need a recording of its own kind."""

    def pick(self, logits: np.ndarray) -> tuple[int, np.ndarray | None]:
        raise InputError("this drafter chooses from logits: only draft models and deterministic drafters are replayed")


def _kept_by_model(
    model: LanguageModel, made: Generation, sampling: Sampling, p_true: np.ndarray | None
) -> list[float]:
    """For each generated token, the probability that the draft model's draft for it is kept."""
    kept = []
    for at, row in _rows_along(model, made):
        token = made.token_ids[at]
        if sampling.greedy:
            kept.append(float(int(np.argmax(row)) == token))
        else:
            kept.append(min(1.0, float(sampling.probabilities(row)[token]) / float(p_true[at])))
    return kept


def _true_probabilities(target: LanguageModel, made: Generation, sampling: Sampling) -> np.ndarray:
    """p_target of each generated token, `(n_tokens,)`."""
    return np.array([sampling.probabilities(row)[made.token_ids[at]] for at, row in _rows_along(target, made)])


def _rows_along(model: LanguageModel, made: Generation) -> Iterator[tuple[int, np.ndarray]]:
    """(position, logits row) for every generated token, teacher-forced in blocks. Resets the model."""
    model.reset()
    yield 0, model.forward(made.prompt_ids, n_logits=1)[0]
    fed = made.token_ids[:-1]
    for start in range(0, len(fed), PASS_WIDTH):
        for offset, row in enumerate(model.forward(fed[start : start + PASS_WIDTH]), 1):
            yield start + offset, row
    model.reset()


def fixed_k(recording: Recording, k: int) -> Counts:
    """Exact expected counts with draft length k, by one walk along the positions."""
    n = recording.n_tokens
    starts = np.zeros(n + 1)  # expected rounds that begin after i tokens
    starts[0] = 1.0 if n else 0.0
    tested, kept = np.zeros(k), np.zeros(k)
    by_width: dict[int, float] = {}
    drafted = accepted = 0.0
    for i in range(n):
        if not starts[i]:
            continue
        offered = min(k, recording.offered[i])
        chances = recording.keep[i][:offered]
        reached = starts[i] * np.cumprod((1.0, *chances))  # reached[j]: the first j drafts are kept
        m = len(chances)
        tested[:m] += reached[:m]
        kept[:m] += reached[1:]
        drafted += starts[i] * offered
        accepted += reached[1:].sum()
        width = offered + (i > 0)  # the first round finds the prompt's last token fed
        by_width[width] = by_width.get(width, 0.0) + starts[i]
        starts[i + 1 : i + m + 1] += reached[:-1] - reached[1:]  # rejected at j: the correction is committed
        starts[min(i + m + 1, n)] += reached[-1]  # all kept: the bonus token, or the end
    return Counts(n, float(starts[:n].sum()), drafted, accepted, by_width, tuple(tested), tuple(kept))


def sweep(recordings: Sequence[Recording], ks: Sequence[int], curve: CostCurve, c: float = 0.0) -> pd.DataFrame:
    """Every recording at every K: one row each, with predicted decoding time and speed-up over plain decoding."""
    rows = []
    for recording in recordings:
        for k in ks:
            counts = fixed_k(recording, k)
            seconds = counts.seconds(curve, c)
            rows.append(
                {
                    "prompt_id": recording.prompt_id,
                    "category": recording.category,
                    "drafter": recording.drafter,
                    "temperature": recording.temperature,
                    "k": k,
                    "n_tokens": counts.n_tokens,
                    "rounds": counts.rounds,
                    "tau": counts.tau,
                    "drafted": counts.drafted,
                    "accepted": counts.accepted,
                    "wasted": counts.drafted - counts.accepted,
                    "predicted_s": seconds,
                    "predicted_speedup": (counts.n_tokens - 1) * curve.seconds(1) / seconds,
                }
            )
    return pd.DataFrame(rows)
