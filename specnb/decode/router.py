"""A drafter that asks others: each round the one that is expected to be fastest, or none; a ledger bounds the loss.

A round of k drafts by drafter d costs C(d, k) = T(k + 1) + k draft_s, and commits a drafts kept and one token more.
One that copies is asked in every round, and what it said is scored as the text becomes known (HedgeSpec, 2510.20064).
Any other is scored where it ran, and drafts as `CostAware` has it: as long as a draft is worth its time.

The ledger has the last word. It holds b seconds when a text begins and never more than B; each round eps of
the time that plain decoding would have taken comes in, and what was won, and what was lost goes out. A round commits
one token at least, so it loses C - T(1) at most, and where that is more than is held, none is drafted. So of each text

    seconds <= (1 + eps) plain + b + the largest excess of one round's seconds over its estimate,

for any text and any drafters (as in conservative bandits, Wu et al. 1602.04282), and from any round on with B for b.
T(1) is the last single step, or less: verify_s T(1)/T(k + 1) of the round itself, T(n)/T(1) learnt as rounds go by.
The first pass after the prefill is a plain step: it finds cold caches, whatever its width, and tells nothing of T(n).
"""

from collections.abc import Callable, Sequence
from time import perf_counter

import numpy as np

from specnb.decode.control import RoundOutcome, StoppingPicker, WatchingPicker
from specnb.decode.costaware import MATCH_EDGES, MATCH_PRIOR, Calibration, CostAware
from specnb.draft.base import DrafterBase, Proposal
from specnb.draft.model import n_common

EPS, GRACE, MOST_HELD = 0.01, 2.0, 8.0
"""Share of plain decoding's time that may be lost; and b and B, in plain steps."""
RISKED = 0.5
"""Share of the loss budget that one round may risk, so that one rejected draft does not end drafting in a text."""
CAUTION = 1.1
"""By how much a round may take longer than the last ones say, and a plain step less."""


class Ledger:
    """Seconds that may still be lost (`held_s`), those that plain decoding would have taken, and those that were."""

    def __init__(self, step_s: float) -> None:
        self.plain_s = self.spent_s = self.excess_s = 0.0
        self.start(step_s)

    def start(self, step_s: float) -> None:
        """A text begins: what earlier ones won pays for no tries here, and what they lost forbids none."""
        self.held_s, self.most_s = GRACE * step_s, MOST_HELD * step_s

    def book(self, spent_s: float, plain_s: float, estimate_s: float) -> None:
        """Note a round: its seconds, those of plain decoding for its tokens, and what it was thought to take."""
        self.plain_s, self.spent_s = self.plain_s + plain_s, self.spent_s + spent_s
        self.held_s = min(self.most_s, self.held_s + (1 + EPS) * plain_s - spent_s)
        self.excess_s = max(self.excess_s, spent_s - estimate_s)


class Arm:
    """A drafter, what a draft of its takes at the pace of `verify_s`, and what is known of its drafts."""

    control: CostAware

    def __init__(self, drafter: DrafterBase, k_max: int, draft_s: float = 0.0) -> None:
        self.drafter, self.draft_s, self.started = drafter, draft_s, False
        self.k_max = min(k_max, drafter.n_heads or k_max)
        self.copies = drafter.model is None and drafter.target is None
        self._watch, self._by_match = WatchingPicker(), Calibration(MATCH_EDGES, MATCH_PRIOR)
        self._said: list[tuple[int, Sequence[int], list[int]]] = []  # where, what, and by which bins; not yet scored

    def start(self, tokens: Sequence[int]) -> None:
        """A draft model reads nothing before it is first asked."""
        self.control.start(b"")
        self._said.clear()
        if not self.drafter.model:
            self.drafter.start(tokens)
        self.started = not self.drafter.model

    def copy(self, tokens: Sequence[int], k: int) -> tuple[tuple[int, ...], np.ndarray]:
        """Return what one that copies has after `tokens`, at most `k`, and the chance of each that it is kept."""
        ids = self.drafter.propose(tokens, k, self._watch).ids
        bins = [self._by_match.bin(self._watch.support + j) for j in range(len(ids))]
        self._said += [(len(tokens), ids, bins)] * bool(ids)
        return ids, np.cumprod([*map(self._by_match.chance, bins)])

    def steps(self, k: np.ndarray, n_tokens: int = 0, read: float = 0.0) -> np.ndarray:
        """Return the steps of `k` drafts after `n_tokens`: all heads for one; a model has `read` a token it missed."""
        model = self.drafter.model
        behind = max(0, n_tokens - 1 - (model.n_past if self.started else 0)) if model else 0
        return ((self.drafter.n_heads if self.drafter.at_once else k) + behind * read) * (k > 0)

    def learn(self, tokens: Sequence[int], n_drafted: int, n_accepted: int, step_s: float) -> None:
        """Score what was said before against the text; `n_drafted` of the round's drafts are its own."""
        if self.copies:
            self._said = [said for said in self._said if not self._scored(tokens, *said)]
            return
        self.control.update(RoundOutcome(n_drafted, n_accepted, b""))
        if n_drafted:
            self.draft_s += (step_s - self.draft_s) / 4
            self.control.draft_s = self.draft_s

    def _scored(self, tokens: Sequence[int], start: int, ids: Sequence[int], bins: Sequence[int]) -> bool:
        true = tokens[start : start + len(ids)]
        if tells := (n := n_common(ids, true)) < len(true) or len(true) == len(ids):
            self._by_match.learn(bins, n)
        return tells


class Router(DrafterBase):
    """Drafts with the arm that is expected to be fastest, as far as the ledger allows.

    `verify_s[n]` are the seconds of a target forward of n tokens, n = 0 to the most drafts + 1; its copy is corrected.
    Exact whatever arms do: which of them drafts depends on text and clock, so a sampled text may differ between runs.
    """

    def __init__(
        self, arms: Sequence[Arm], verify_s: Sequence[float], *, clock: Callable[[], float] | None = None
    ) -> None:
        self.chooses_k, self.name = len(verify_s) - 2, f"auto({', '.join(arm.drafter.name for arm in arms)})"
        self.arms, self.verify_s, self._clock = list(arms), np.array(verify_s, float), clock or perf_counter
        self.ledger = Ledger(self.verify_s[1])
        self.choices: list[tuple[str, int, int]] = []
        """The arm of each round of this text that could draft ("" for none), and drafts made and kept."""
        self.read = self.verify_s[-1] / self.verify_s[1] / (len(verify_s) - 1)  # a token of a wide forward, in steps
        for arm in self.arms:
            arm.control = CostAware(self.verify_s[: arm.k_max + 2], arm.draft_s, expected=arm.drafter.expected)
            arm.control.hope()
        self._pace, self._width, self._step_s = 1.0, 0, np.inf  # the last forward's seconds over those of `verify_s`
        self._given, self._plain_s, self._lessons = self.verify_s.copy(), self.verify_s[1], 0

    def start(self, tokens):
        self.choices, self._n_prompt, self._n = [], len(tokens), 0
        self.ledger.start(self._plain_s / CAUTION)
        for arm in self.arms:
            arm.start(tokens)

    def propose(self, tokens, k, picker):
        self._began, self._n = self._clock(), len(tokens)
        plain, risk_s = self._pace * self.verify_s[1], RISKED * self.ledger.held_s + self._plain_s / CAUTION
        self._arm, self._proposal, self._estimate, best, chosen, copied = None, Proposal(()), plain, 1 / plain, 0, ()
        # the first token is the prefill's, and a first forward of drafts alone would not hold the state that heads read
        # and the first pass is slow whatever its width, for its caches are cold
        for arm in () if self._n <= self._n_prompt + 1 or np.isinf(self._step_s) else self.arms:
            n = np.arange(min(k, arm.k_max) + 1)
            ids, reached = arm.copy(tokens, len(n) - 1) if arm.copies else ((), ())
            steps = arm.steps(n, len(tokens), self.read)
            seconds = self._pace * (self.verify_s[n + 1] + arm.draft_s * steps)
            allowed = [*(CAUTION * seconds > risk_s), True].index(True) - 1  # T(n) may fall as n grows
            if allowed < 1 or (arm.copies and not ids):
                continue
            if arm.copies:
                rates = (1 + np.cumsum(reached)) / seconds[1 : len(ids) + 1]
                drafts, rate = int(rates.argmax()) + 1, rates.max()
            else:  # where it has lost lately, it says itself when to try again
                drafts = min(len(n) - 1, arm.control.draft_length())
                rate = max(arm.control.recent_rate / self._pace, 1.001 / plain)
            if (drafts := min(drafts, allowed)) > 0 and rate > best:
                best, self._arm, self._estimate, chosen, copied = rate, arm, seconds[drafts], drafts, ids
                self._steps = steps
        if arm := self._arm:
            picker = StoppingPicker(picker, arm.control)
            if not arm.started:
                arm.drafter.start(tokens)
                arm.started = True
            self._proposal = Proposal(copied[:chosen]) if arm.copies else arm.drafter.propose(tokens, chosen, picker)
        self._drafted = self._clock()
        return self._proposal

    def commit(self, tokens):
        for arm in (arm for arm in self.arms if arm.started):
            arm.drafter.commit(tokens)
        if not self._n:  # no drafts were asked for
            return
        draft_s, verify_s, ids = self._drafted - self._began, self._clock() - self._drafted, self._proposal.ids
        if self._n > self._n_prompt:
            self._read(len(ids) + 1, verify_s)
            if self._n == self._n_prompt + 1:  # it finds cold caches: the next pass is not compared with it
                self._width = 0
            self.ledger.book(draft_s + verify_s, (len(tokens) - self._n) * self._plain_s, CAUTION * self._estimate)
        n_accepted = max(0, len(tokens) - self._n - 1)
        self.choices.append((self._arm.drafter.name if self._arm and ids else "", len(ids), n_accepted))
        for arm in self.arms:
            mine = len(ids) if arm is self._arm else 0
            arm.learn(tokens, mine, n_accepted, draft_s / self._pace / self._steps[mine] if mine else 0.0)
        self._n = 0

    def _read(self, width: int, seconds: float) -> None:
        """Learn from a forward: a single step is T(1), the one behind it tells T(n)/T(1) of its width n and near it."""
        if width == 1:
            if np.isinf(self._step_s):
                self.ledger.start(seconds / CAUTION)  # by T(1) as it is now
            self._step_s = seconds
        elif self._width == 1:
            off = seconds / self._step_s * self.verify_s[1] / self.verify_s[width]
            near, self._lessons = np.exp2(-np.abs(np.log2(np.arange(2, len(self.verify_s)) / width))), self._lessons + 1
            self.verify_s[2:] *= off ** (near / min(4, self._lessons))
            [arm.control.remeasure() for arm in self.arms]
        self._pace, self._width = seconds / self.verify_s[width], width
        self._plain_s = min(self._step_s, *(seconds * t[1] / t[width] for t in (self._given, self.verify_s)))

    def locate_nonfinite(self, ids):
        return self._arm.drafter.locate_nonfinite(ids) if self._arm else ""

    def close(self):
        [arm.drafter.close() for arm in self.arms]
