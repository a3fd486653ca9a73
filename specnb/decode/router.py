"""The drafter `auto`: in each round it drafts with the fastest of several drafters, or not at all.

A round with k draft tokens by drafter d takes C(d, k) = T(k + 1) + k draft_s seconds, and commits
the accepted tokens plus one. Prompt lookup proposes tokens in every round, and is scored once the
text is known, even if the round did not use its tokens (HedgeSpec, 2510.20064). Any other drafter
is scored only in rounds in which it drafted, and chooses its K as `CostAware` does.

The ledger bounds the time lost. A text starts with a budget of b seconds, which never exceeds B.
Each round adds the time saved and a share eps of the time of plain decoding, and subtracts the time
lost. A round commits at least one token, so it loses at most C - T(1). If that exceeds the part of
the budget that a round may risk, nothing is drafted. For any text and any drafters, it follows that
(conservative bandits, Wu et al. 1602.04282)

    seconds <= (1 + eps) plain + b + the largest excess of one round's seconds over its estimate.

From any later round on, the same holds with B instead of b. T(1) is the time of the last single
step, or verify_s T(1)/T(k + 1) of the current round if that is less; T(n)/T(1) is corrected round
by round. The first pass after the prefill is a plain step. Because caches are cold, it is slow at
any width, so T(n) is not learned from it.
"""

from collections.abc import Callable, Iterator, Sequence
from time import perf_counter
from typing import NamedTuple

import numpy as np

from specnb.decode.control import RoundOutcome, StoppingPicker, WatchingPicker
from specnb.decode.costaware import MATCH_EDGES, MATCH_PRIOR, Calibration, CostAware
from specnb.draft.base import DrafterBase, Picker, Proposal
from specnb.draft.model import n_common

EPS = 0.01
"""Share of the time of plain decoding that may be lost."""
GRACE = 2.0
"""Loss budget b at the start of a text, in plain steps."""
MOST_HELD = 8.0
"""Largest loss budget B, in plain steps."""
RISKED = 0.5
"""Share of the loss budget that one round may risk, so that one rejection does not end drafting."""
CAUTION = 1.1
"""Safety factor: a round may take this many times its estimate, and a plain step 1/CAUTION."""


class Ledger:
    """The loss budget: `held_s`, the seconds that the text may still lose, and totals of all texts.

    `plain_s` is the time that plain decoding would have taken, `spent_s` the time spent, and
    `excess_s` the largest excess of one round's time over its estimate, all in seconds.
    """

    def __init__(self, step_s: float) -> None:
        self.plain_s = 0.0
        self.spent_s = 0.0
        self.excess_s = 0.0
        self.start(step_s)

    def start(self, step_s: float) -> None:
        """Start a text with a new budget, independent of earlier texts; `step_s` is T(1)."""
        self.held_s = GRACE * step_s
        self.most_s = MOST_HELD * step_s

    def book(self, spent_s: float, plain_s: float, estimate_s: float) -> None:
        """Record a round: its seconds, those of plain decoding for its tokens, and its estimate."""
        self.plain_s += plain_s
        self.spent_s += spent_s
        self.held_s = min(self.most_s, self.held_s + (1 + EPS) * plain_s - spent_s)
        self.excess_s = max(self.excess_s, spent_s - estimate_s)


class Pending(NamedTuple):
    """Copied tokens that are not scored yet, their position `start`, and their calibration bins."""

    start: int
    ids: Sequence[int]
    bins: Sequence[int]


class Arm:
    """A drafter of the router, the seconds of its draft step, and its acceptance rates."""

    control: CostAware

    def __init__(self, drafter: DrafterBase, k_max: int, draft_s: float = 0.0) -> None:
        self.drafter = drafter
        self.draft_s = draft_s
        self.started = False
        self.k_max = min(k_max, drafter.n_heads or k_max)
        self.copies = drafter.model is None and drafter.target is None
        self._watch = WatchingPicker()
        self._by_match = Calibration(MATCH_EDGES, MATCH_PRIOR)
        self._pending: list[Pending] = []

    def start(self, tokens: Sequence[int]) -> None:
        """Start a text. A draft model is not started until it first drafts."""
        self.control.start(b"")
        self._pending.clear()
        if not self.drafter.model:
            self.drafter.start(tokens)
        self.started = not self.drafter.model

    def copy(self, tokens: Sequence[int], k: int) -> tuple[tuple[int, ...], np.ndarray]:
        """Return up to `k` copied tokens, and P(reached and accepted) for each of them."""
        ids = self.drafter.propose(tokens, k, self._watch).ids
        bins = [self._by_match.bin(self._watch.support + j) for j in range(len(ids))]
        if ids:
            self._pending.append(Pending(len(tokens), ids, bins))
        return ids, np.cumprod([*map(self._by_match.chance, bins)])

    def draft_steps(self, k: np.ndarray, n_tokens: int = 0, read_cost: float = 0.0) -> np.ndarray:
        """Return the cost of drafting `k (n,)` tokens after `n_tokens`, in draft steps, `(n,)`.

        Heads that are computed at once propose all tokens in `n_heads` steps. Any other drafter
        takes one step per token; a draft model also takes `read_cost` per token it has not
        processed yet.
        """
        steps = self.drafter.n_heads if self.drafter.at_once else k
        model = self.drafter.model
        unread = 0
        if model:
            unread = max(0, n_tokens - 1 - (model.n_past if self.started else 0))
        return (steps + unread * read_cost) * (k > 0)

    def learn(self, tokens: Sequence[int], n_drafted: int, n_accepted: int, step_s: float) -> None:
        """Learn from a round, after which the text is `tokens`.

        `n_drafted` of its draft tokens came from this arm, at `step_s` seconds per draft step.
        """
        if self.copies:
            self._pending = [
                pending for pending in self._pending if not self._score(tokens, pending)
            ]
            return
        self.control.update(RoundOutcome(n_drafted, n_accepted, b""))
        if n_drafted:
            self.draft_s += (step_s - self.draft_s) / 4
            self.control.draft_s = self.draft_s

    def _score(self, tokens: Sequence[int], pending: Pending) -> bool:
        """Score copied tokens against the text; return False if it is too short for that."""
        true = tokens[pending.start : pending.start + len(pending.ids)]
        n = n_common(pending.ids, true)
        is_known = n < len(true) or len(true) == len(pending.ids)
        if is_known:
            self._by_match.learn(pending.bins, n)
        return is_known


class Option(NamedTuple):
    """A possible round: `k` draft tokens by `arm`, at an expected `rate` in tokens per second.

    `estimate_s` is its estimated time. `ids` are the tokens of an arm that copies; `steps[k]` is
    the cost of k draft tokens in draft steps.
    """

    arm: Arm
    k: int
    rate: float
    estimate_s: float
    steps: np.ndarray
    ids: tuple[int, ...]


class Router(DrafterBase):
    """Drafts with the arm that is expected to be fastest, if the ledger allows it.

    `verify_s[n]` is T(n), the seconds of a target forward pass over n tokens, 0 <= n <= k_max + 1.
    The router corrects its copy. The output is lossless with any arm. Which arm drafts depends on
    the text and on measured times, so a sampled text may differ between runs.
    """

    def __init__(
        self,
        arms: Sequence[Arm],
        verify_s: Sequence[float],
        *,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self.chooses_k = len(verify_s) - 2
        self.name = f"auto({', '.join(arm.drafter.name for arm in arms)})"
        self.arms = list(arms)
        self.verify_s = np.array(verify_s, float)
        self.ledger = Ledger(self.verify_s[1])
        self.choices: list[tuple[str, int, int]] = []
        """(arm or "", drafted, accepted tokens) of each round of this text that could draft."""
        self.read_cost = self.verify_s[-1] / self.verify_s[1] / (len(verify_s) - 1)
        """Cost of processing one token in a forward pass over several tokens, in single steps."""
        for arm in self.arms:
            arm.control = CostAware(
                self.verify_s[: arm.k_max + 2], arm.draft_s, expected=arm.drafter.expected
            )
            arm.control.seed_rate()
        self._clock = clock
        self._measured_s = self.verify_s.copy()
        self._pace = 1.0  # seconds of the last pass, relative to `verify_s`
        self._width = 0  # tokens of the last pass
        self._step_s = np.inf  # seconds of the last single step
        self._plain_s = self.verify_s[1]  # lowest current estimate of T(1)
        self._n_lessons = 0

    def start(self, tokens):
        self.choices = []
        self._n_prompt = len(tokens)
        self._n = 0
        self.ledger.start(self._plain_s / CAUTION)
        for arm in self.arms:
            arm.start(tokens)

    def propose(self, tokens, k, picker):
        self._began = self._clock()
        self._n = len(tokens)
        plain_s = self._pace * self.verify_s[1]
        # 1. List what each arm could draft: nothing until a plain step of this text was timed.
        # (Heads also need the hidden state of this step.)
        timed = self._n > self._n_prompt + 1 and np.isfinite(self._step_s)
        options = [*self._options(tokens, k, plain_s)] if timed else []
        # 2. Choose the fastest option, or plain decoding.
        faster = (option for option in options if option.rate > 1 / plain_s)
        self._best = max(faster, key=lambda option: option.rate, default=None)
        self._estimate_s = self._best.estimate_s if self._best else plain_s
        # 3. Draft.
        self._proposal = self._draft(self._best, tokens, picker) if self._best else Proposal(())
        self._drafted = self._clock()
        return self._proposal

    def _options(self, tokens: Sequence[int], k: int, plain_s: float) -> Iterator[Option]:
        """Yield what each arm would draft, at most `k` tokens, within the loss budget."""
        for arm in self.arms:
            n = np.arange(min(k, arm.k_max) + 1)
            ids, reached = arm.copy(tokens, len(n) - 1) if arm.copies else ((), ())
            steps = arm.draft_steps(n, len(tokens), self.read_cost)
            seconds = self._pace * (self.verify_s[n + 1] + arm.draft_s * steps)
            allowed = self._within_budget(seconds)
            if allowed < 1 or (arm.copies and not ids):
                continue
            if arm.copies:
                rates = (1 + np.cumsum(reached)) / seconds[1 : len(ids) + 1]
                wanted = int(rates.argmax()) + 1
                rate = rates.max()
            else:  # after losses, its controller decides when to draft again
                wanted = min(len(n) - 1, arm.control.draft_length())
                rate = max(arm.control.recent_rate / self._pace, 1.001 / plain_s)
            drafts = min(wanted, allowed)
            if drafts > 0:
                yield Option(arm, drafts, rate, seconds[drafts], steps, ids)

    def _within_budget(self, seconds: np.ndarray) -> int:
        """Return the largest K for which no k <= K risks too much; -1 if K = 0 already does.

        `seconds[k]` is the estimate for a round with k draft tokens. It need not increase with k,
        because T(n) need not increase with n.
        """
        risk_s = RISKED * self.ledger.held_s + self._plain_s / CAUTION
        too_long = np.flatnonzero(CAUTION * seconds > risk_s)
        return int(too_long[0]) - 1 if len(too_long) else len(seconds) - 1

    def _draft(self, option: Option, tokens: Sequence[int], picker: Picker) -> Proposal:
        arm = option.arm
        if arm.copies:
            return Proposal(option.ids[: option.k])
        if not arm.started:
            arm.drafter.start(tokens)
            arm.started = True
        return arm.drafter.propose(tokens, option.k, StoppingPicker(picker, arm.control))

    def commit(self, tokens):
        for arm in self.arms:
            if arm.started:
                arm.drafter.commit(tokens)
        if not self._n:  # no draft tokens were requested
            return
        # 1. Time the round: correct T(n), and record the loss.
        draft_s = self._drafted - self._began
        verify_s = self._clock() - self._drafted
        n_drafted = len(self._proposal.ids)
        if self._n > self._n_prompt:
            self._learn_pass(n_drafted + 1, verify_s)
            # Caches were cold in the first pass: do not compare the next pass with it.
            if self._n == self._n_prompt + 1:
                self._width = 0
            plain_s = (len(tokens) - self._n) * self._plain_s
            self.ledger.book(draft_s + verify_s, plain_s, CAUTION * self._estimate_s)
        # 2. Let each arm learn from the round.
        n_accepted = max(0, len(tokens) - self._n - 1)
        best = self._best if n_drafted else None
        self.choices.append((best.arm.drafter.name if best else "", n_drafted, n_accepted))
        for arm in self.arms:
            if best and arm is best.arm:
                arm.learn(
                    tokens, n_drafted, n_accepted, draft_s / self._pace / best.steps[n_drafted]
                )
            else:
                arm.learn(tokens, 0, n_accepted, 0.0)
        self._n = 0

    def _learn_pass(self, width: int, seconds: float) -> None:
        """Learn T(1) from a single step, and T(n)/T(1) near `width` from a wider pass after one."""
        if width == 1:
            if np.isinf(self._step_s):
                self.ledger.start(seconds / CAUTION)  # with the current T(1)
            self._step_s = seconds
        elif self._width == 1:
            off = seconds / self._step_s * self.verify_s[1] / self.verify_s[width]
            near = np.exp2(-np.abs(np.log2(np.arange(2, len(self.verify_s)) / width)))
            self._n_lessons += 1
            self.verify_s[2:] *= off ** (near / min(4, self._n_lessons))
            for arm in self.arms:
                arm.control.remeasure()
        self._pace = seconds / self.verify_s[width]
        self._width = width
        steps_s = (seconds * curve[1] / curve[width] for curve in (self._measured_s, self.verify_s))
        self._plain_s = min(self._step_s, *steps_s)

    def locate_nonfinite(self, ids):
        return self._best.arm.drafter.locate_nonfinite(ids) if self._best else ""

    def close(self):
        for arm in self.arms:
            arm.drafter.close()
