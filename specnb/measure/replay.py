"""One recording answers every K: rounds, acceptance and speed of speculative decoding without running it.

Let x be the tokens that the target produced. Drafting and verifying are a Markov chain along x, and its law is known
from one pass of the drafter over x (`measure.follow`), because losslessness makes x independent of the drafts:

* greedy: a draft is kept exactly when it equals x, so a round that starts at position i keeps the common prefix;
* temperature > 0: P(the draft is kept | x_i was committed) = min(1, q_draft(x_i) / p_target(x_i)), independently along
  x (P(x and kept) = min(p, q), and P(x) = p); for a deterministic drafter it is 1 where the draft is x_i, else 0.

For a fixed K the expected number of rounds that start at each position follows by going along x once
(`expected_counts`, exact); for a controller that looks back the chain is walked with seeded draws (`walk_recording`).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any, NamedTuple

import numpy as np

from specnb.decode.control import Controller, RoundOutcome
from specnb.decode.router import Arm, Router
from specnb.decode.sampling import Chooser, Sampling
from specnb.draft.base import DrafterBase, Proposal, TokenView
from specnb.draft.model import n_common
from specnb.errors import InputError
from specnb.measure.cost import Cost
from specnb.measure.recording import Recording


class Counts(NamedTuple):
    """Expected counts of one generation (whole numbers when greedy).

    `steps` are the drafter's forwards, `by_width[n]` target calls of n tokens, `tested[j]`
    rounds that reached draft j and `kept[j]` those that kept it: alpha_j = kept[j] / tested[j].
    """

    n_tokens: int
    rounds: float
    drafted: float
    accepted: float
    steps: float
    by_width: dict[int, float]
    tested: tuple[float, ...]
    kept: tuple[float, ...]

    @property
    def tau(self) -> float:
        return self.n_tokens / self.rounds

    def seconds(self, cost: Cost) -> float:
        """Predicted decoding time, prefill not counted."""
        verify = sum(calls * cost.curve.seconds(width) for width, calls in self.by_width.items())
        return verify + self.steps * cost.c * cost.step_s


def fixed_k(recording: Recording, k: int) -> Counts:
    """Exact expected counts with draft length k."""
    return every_k(recording, [k])[0]


def every_k(recording: Recording, ks: Sequence[int]) -> list[Counts]:
    """`fixed_k` for several draft lengths."""
    return [_counts(recording, row) for row in expected_counts([recording], ks)[0]]


def expected_counts(recordings: Sequence[Recording], ks: Sequence[int]) -> np.ndarray:
    """Exact expected counts of all recordings with every draft length: `(recordings, ks, 3 max(ks) + 6)`, see `split`.

    All recordings are gone along together, position by position.
    """
    most, ks = max(ks), np.asarray(ks)
    for recording in recordings:
        _require_k(recording, most)
    n, depths = np.array([r.n_tokens for r in recordings]), np.arange(most)
    offered, testable = np.zeros((2, len(n), n.max(), 1), int)
    chances = np.zeros((*offered.shape, most))
    for index, recording in enumerate(recordings):
        for i, row in enumerate(recording.keep):
            offered[index, i], testable[index, i] = recording.offered[i], len(row)
            chances[index, i, 0, : len(row)] = row[:most]
    drafted, limit = np.minimum(offered, ks), np.minimum(testable, ks)  # fewer drafts are the first of more
    once = np.array([[[r.round_steps]] for r in recordings])  # of every round that drafts; 0: each draft is a step
    steps = np.where(once, once * (drafted > 0), drafted)
    shape = len(n), len(ks)
    starts = np.zeros((*shape, n.max() + most + 1))  # expected rounds that begin after i tokens
    starts[..., 0] = 1.0
    rows, columns = np.ogrid[: shape[0], : shape[1]]
    counts = np.zeros((*shape, 3 * most + 6))
    widths, totals, tested, kept = split(counts)
    for i in range(n.max()):
        begun = starts[..., i] * (i < n[:, None])
        reached = np.cumprod(np.insert(chances[:, i], 0, 1.0, axis=-1), axis=-1)  # the first j drafts are kept
        rounds = begun[..., None] * (depths < limit[:, i, :, None])
        here, through = rounds * reached[..., :-1], rounds * reached[..., 1:]
        tested += here
        kept += through
        starts[..., i + 1 : i + most + 1] += here - through  # the correction is committed
        after = np.minimum(i + limit[:, i] + 1, n[:, None])  # all kept: the bonus token, or the end
        starts[rows, columns, after] += begun * np.take_along_axis(reached, limit[:, i, :, None], -1)[..., 0]
        widths[rows, columns, _width(i, drafted[:, i])] += begun
        totals += np.stack([begun, begun * drafted[:, i], through.sum(-1), begun * steps[:, i]], axis=-1)
    return counts


def split(counts: np.ndarray) -> list[np.ndarray]:
    """Views of the last axis: target calls by width, 0 to k + 1; rounds, drafted, accepted, steps; tested; kept."""
    k = counts.shape[-1] // 3 - 2
    return np.split(counts, [k + 2, k + 6, 2 * k + 6], axis=-1)


def _counts(recording: Recording, row: np.ndarray) -> Counts:
    widths, totals, tested, kept = (part.tolist() for part in split(row))
    by_width = {n: calls for n, calls in enumerate(widths) if calls}
    return Counts(recording.n_tokens, *totals, by_width, tuple(tested), tuple(kept))


def sweep_row(recording: Recording, k: int, counts: Counts, cost: Cost) -> dict[str, Any]:
    """A recording at one K, with the predicted seconds of decoding, plain ones beside them."""
    n_decoded = max(0, recording.n_tokens - 1)
    return recording.key | {
        "k": k,
        "n_decoded": n_decoded,
        "rounds": counts.rounds,
        "tau": counts.tau if counts.rounds else None,
        "drafted": counts.drafted,
        "accepted": counts.accepted,
        "seconds": counts.seconds(cost),
        "plain_s": n_decoded * cost.step_s,
    }


class ReplayStep(NamedTuple):
    """One round of a walk: it starts after `at` tokens, drafts `drafted` with `steps` forwards, keeps `n_accepted`."""

    at: int
    drafted: int
    steps: int
    n_accepted: int


def walk_recording(
    recording: Recording, controller: Controller, rng: np.random.Generator | None = None
) -> list[ReplayStep]:
    """Return the rounds that `controller` makes along a recording; draws from `rng` if acceptance is random.

    Greedy recordings give the live run's rounds for controllers that read no drafts, and for lookup.
    After the first wrong draft of a block, a controller that reads a draft model's confidence gets
    the confidence along the true tokens, so it may draft more or fewer tokens there than live.
    Raises InputError for a controller whose K exceeds the recorded one, or that reads what was not
    recorded.
    """
    _require_k(recording, controller.k_max)
    rows = recording.beliefs or recording.head_beliefs or recording.support
    if controller.reads_drafts and any(recording.offered) and not rows:
        raise InputError(f"{controller.name} reads drafts, and the recording of {recording.drafter} has no rows")
    controller.start(recording.prompt)
    steps = []
    at = 0
    while at < recording.n_tokens:
        limit = min(controller.draft_length(), recording.offered[at])
        n_kept = _n_kept(recording.keep[at][:limit], rng)
        drafted, n_steps = _drafted(recording, controller, at, limit)
        n_accepted = min(n_kept, drafted)
        text = b"".join(recording.pieces[at : at + n_accepted + 1])
        controller.update(RoundOutcome(drafted, n_accepted, text))
        steps.append(ReplayStep(at, drafted, recording.steps(n_steps), n_accepted))
        at += n_accepted + 1
    return steps


def _n_kept(chances: Sequence[float], rng: np.random.Generator | None) -> int:
    """How many drafts of these chances are kept; what is certain takes no draw."""
    return len([*takewhile(lambda chance: chance >= 1.0 or (chance > 0.0 and rng.random() < chance), chances)])


def counts_of(recording: Recording, steps: Sequence[ReplayStep]) -> Counts:
    """The counts of one walk."""
    return _counts(recording, tally(recording, steps, max((s.drafted for s in steps), default=0)))


def tally(recording: Recording, steps: Sequence[ReplayStep], k_max: int) -> np.ndarray:
    """The counts of one walk as a row of `expected_counts`."""
    row = np.zeros(3 * k_max + 6)
    widths, totals, tested, kept = split(row)
    for s in steps:
        widths[_width(s.at, s.drafted)] += 1
        totals += (1, s.drafted, s.n_accepted, s.steps)
        tested[: min(s.drafted, recording.n_tokens - s.at, s.n_accepted + 1)] += 1
        kept[: s.n_accepted] += 1
    return row


def oracle(recording: Recording, cost: Cost, k_max: int) -> tuple[list[int], float]:
    """The draft lengths that cost least in expectation, one for each position, and the seconds they take.

    Dynamic programming from the end: V(i) = min over K of cost(K) + E V(i + n_accepted + 1). It knows which drafts
    will be kept (greedy) or with what chance (sampling): a bound for every controller that chooses K before a round.
    """
    _require_k(recording, k_max)
    n = recording.n_tokens
    value, plan = np.zeros(n + 1), [0] * n
    for i in reversed(range(n)):
        best = np.inf
        reached, ahead = 1.0, 0.0  # P(all drafts so far are kept), E[V after a rejection among them]
        for k in range(min(k_max, recording.offered[i]) + 1):
            if k:
                chance = recording.keep[i][k - 1] if k <= len(recording.keep[i]) else 0.0
                ahead += reached * (1 - chance) * value[min(i + k, n)]
                reached *= chance
            total = cost.round_s(_width(i, k), recording.steps(k)) + ahead + reached * value[min(i + k + 1, n)]
            if total < best - 1e-15:
                best, plan[i] = total, k
        value[i] = best
    return plan, float(value[0])


def _drafted(recording: Recording, controller: Controller, at: int, limit: int) -> tuple[int, int]:
    """Return the draft tokens of a round after the controller ended drafting, and the drafter's forward passes."""
    if not (controller.reads_drafts and limit):
        return limit, limit
    if recording.support:
        copied = controller.worth_copying(recording.support[at], limit) if recording.support[at] else limit
        return copied, copied
    beliefs = recording.head_beliefs[at] if recording.head_beliefs else recording.beliefs[at:]
    for j in range(limit):
        if not controller.goes_on(j, beliefs[min(j, len(beliefs) - 1)]):
            return j, j + 1
        if controller.enough(j):
            return j + 1, j + 1
    return limit, limit


def _width(at: int, drafted: int) -> int:
    """Tokens in the target's forward: the first round finds the prompt's last token fed."""
    return drafted + (at > 0)


def _require_k(recording: Recording, k: int) -> None:
    if not 0 <= k <= recording.k_max:
        raise InputError(f"the recording knows drafts up to K = {recording.k_max}, but K = {k} was asked for")


# --- several drafters and a router along one text ---

PROMPT, WRONG = -2, -1
"""Stand for the prompt, and for a draft that is not kept."""


class RoutedText(NamedTuple):
    """A text along which a router drafted: the first drafter's `recording`; the rounds, the arm of each ("" for none)
    and the seconds of each, in which a draft model may read the prompt, `prompt_s` by drafter."""

    recording: Recording
    prompt_s: dict[str, float]
    steps: list[ReplayStep]
    arms: list[str]
    round_s: list[float]


class _Along(DrafterBase):
    """A drafter that says what `recording` says, on a clock that it moves."""

    recording: Recording
    read: float
    n_prompt: int

    def __init__(self, recording: Recording, draft_s: float, clock: list[float], rng: np.random.Generator) -> None:
        self.name, self.draft_s, self._clock, self._rng = recording.drafter, draft_s, clock, rng
        self.at_once, self.n_heads, self.n_past = bool(recording.round_steps), recording.round_steps, 0
        self.target: Any = self.at_once or recording.head_beliefs or None
        self.model: Any = None if self.target or recording.support else self

    def start(self, tokens):
        self.n_past = len(tokens) - 1
        self._clock[0] += self.draft_s * self.n_past * self.read if self.model else 0.0

    def propose(self, tokens, k, picker):
        at, recording = len(tokens) - self.n_prompt, self.recording
        limit = min(k, recording.offered[at])
        kept = _n_kept(recording.keep[at][:limit], self._rng)
        if recording.support:
            n = picker.copies(recording.support[at], limit)
        else:
            control: Controller = picker.control  # type: ignore[attr-defined]
            n, steps = _drafted(recording, control, at, limit)
            behind = max(0, len(tokens) - 1 - self.n_past) if self.model else 0
            self._clock[0] += self.draft_s * (recording.steps(steps) + behind * self.read) * (limit > 0)
            self.n_past = len(tokens) - 1 + steps
        return Proposal((*recording.token_ids[at : at + min(kept, n)], *[WRONG] * (n - kept)))

    def commit(self, tokens):
        self.n_past = min(self.n_past, len(tokens) - 1)


def route(
    recordings: Iterable[Recording], costs: Mapping[str, Cost], *, k_max: int, seed: int = 0,
    expected: Mapping[str, Sequence[float]] | None = None,
) -> Iterator[RoutedText]:  # fmt: skip
    """Let the router draft with the drafters of `costs` along the recorded texts, one after another.

    The costs are of one target on one machine. Greedy recordings give the rounds of a live router on the same clock,
    but for the number of draft tokens after a wrong one (see `walk_recording`). Of sampled ones drafts are kept by
    chance. A prompt has as many tokens as its bytes make at the text's bytes a token. What is
    learned on a text is kept for the next; `expected` is as of a drafter.
    """
    texts = {}
    for recording in recordings:
        if recording.drafter in costs:
            texts.setdefault(recording.prompt_id, {})[recording.drafter] = recording
    clock, rng = [0.0], np.random.default_rng(seed)
    verify_s = [next(iter(costs.values())).curve.seconds(n) for n in range(k_max + 2)]
    some = next(iter(texts.values()))
    drafters = [_Along(some[name], cost.c * verify_s[1], clock, rng) for name, cost in costs.items()]
    for drafter in drafters:
        drafter.expected = (expected or {}).get(drafter.name, ())
    arms = [Arm(drafter, k_max, drafter.draft_s) for drafter in drafters]
    router = Router(arms, verify_s, clock=lambda: clock[0])
    for text in texts.values():
        first = text[drafters[0].name]
        true, most = first.token_ids, first.max_new_tokens - 1
        n_prompt = max(1, round(len(first.prompt) * len(true) / max(1, sum(map(len, first.pieces)))))
        tokens = [PROMPT] * n_prompt
        for drafter in drafters:
            drafter.recording, drafter.n_prompt, drafter.read = text[drafter.name], n_prompt, router.read_cost
        prompt_s = {d.name: d.draft_s * router.read_cost * (n_prompt - 1) * bool(d.model) for d in drafters}
        routed = RoutedText(first, prompt_s, [], [], [])
        router.start(view := TokenView(tokens))
        while (at := len(tokens) - n_prompt) < len(true):
            k, began = min(k_max, most - at), clock[0]
            ids = router.propose(view, k, Chooser(Sampling())).ids if k > 0 else ()
            n_accepted = n_common(ids, true[at:])
            clock[0] += verify_s[_width(at, len(ids))]
            tokens += true[at : at + n_accepted + 1]
            router.commit(view)
            routed.steps.append(ReplayStep(at, len(ids), len(ids), n_accepted))
            routed.arms.append(router.choices[-1][0] if ids else "")
            routed.round_s.append(clock[0] - began)
        yield routed
