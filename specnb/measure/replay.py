"""Replay: rounds, acceptance and speed of every K, computed from one recording without running it.

Let x be the tokens that the target generated. Because decoding is lossless, x does not depend on
the draft tokens. Drafting and verifying are therefore a Markov chain along x. Its transition
probabilities are known from one pass of the drafter over x (`measure.follow`):

* greedy: a draft token is accepted if and only if it equals x, so a round that starts at position i
  accepts the common prefix;
* temperature > 0: P(the draft token is accepted | x_i is committed) is
  min(1, q_draft(x_i) / p_target(x_i)), independently along x, because P(x and accepted) = min(p, q)
  and P(x) = p. For a deterministic drafter it is 1 if the draft token is x_i, else 0.

For a fixed K, one pass over x gives the exact expected number of rounds that start at each position
(`expected_counts`). For a controller, which depends on earlier rounds, `walk_recording` samples the
chain with a seed.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
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
    """Expected counts of one generation (integers if greedy).

    `steps` counts the drafter's forward passes, `by_width[n]` the target's passes over n tokens.
    """

    n_tokens: int
    rounds: float
    drafted: float
    accepted: float
    steps: float
    by_width: dict[int, float]

    def seconds(self, cost: Cost) -> float:
        """Return the predicted decoding time, without prefill."""
        verify = sum(calls * cost.curve.seconds(width) for width, calls in self.by_width.items())
        return verify + self.steps * cost.c * cost.step_s


def fixed_k(recording: Recording, k: int) -> Counts:
    """Return the exact expected counts with draft length `k`."""
    return every_k(recording, [k])[0]


def every_k(recording: Recording, ks: Sequence[int]) -> list[Counts]:
    """Return `fixed_k` for several draft lengths."""
    return [_counts(recording, row) for row in expected_counts([recording], ks)[0]]


def expected_counts(recordings: Sequence[Recording], ks: Sequence[int]) -> np.ndarray:
    """Return the exact expected counts of all recordings with every draft length.

    The shape is `(recordings, ks, 3 max(ks) + 6)`; see `split` for the last axis. All recordings
    are processed together, position by position. The number of rounds of one of them, as a loop:

    >>> def count_rounds(recording, k):
    ...     n = recording.n_tokens
    ...     starts = [1.0] + n * [0.0]  # P(a round starts after i tokens)
    ...     for i in range(n):
    ...         reached = starts[i]  # P(a round starts there, and accepts all draft tokens so far)
    ...         chances = recording.keep[i][: min(k, recording.offered[i])]
    ...         for j, chance in enumerate(chances, start=1):
    ...             starts[i + j] += reached * (1 - chance)  # rejected: the correction is committed
    ...             reached *= chance
    ...         starts[min(i + len(chances) + 1, n)] += reached  # bonus token, unless at the end
    ...     return sum(starts[:n])

    >>> from specnb.decode.generate import generate
    >>> from specnb.draft.model import ModelDrafter
    >>> from specnb.lm import toy
    >>> from specnb.measure.follow import follow
    >>> target, drafter = toy.markov(4, seed=1), ModelDrafter(toy.markov(4, seed=2))
    >>> plain = generate(target, [0], temperature=1.0, max_new_tokens=20)
    >>> (recording,) = follow(target, [drafter], plain, max_new_tokens=20)
    >>> totals = split(expected_counts([recording], [1, 3]))[1]
    >>> bool(np.allclose(totals[0, :, 0], [count_rounds(recording, k) for k in (1, 3)]))
    True
    """
    # 1. Put the recordings into arrays (recordings, positions, ks or 1, drafts).
    k_max = max(ks)
    ks = np.asarray(ks)
    for recording in recordings:
        _require_k(recording, k_max)
    n = np.array([r.n_tokens for r in recordings])
    offered, testable = np.zeros((2, len(n), n.max(), 1), int)
    chances = np.zeros((*offered.shape, k_max))
    for index, recording in enumerate(recordings):
        for i, row in enumerate(recording.keep):
            offered[index, i] = recording.offered[i]
            testable[index, i] = len(row)
            chances[index, i, 0, : len(row)] = row[:k_max]
    drafted = np.minimum(offered, ks)  # a shorter draft is a prefix of a longer one
    limit = np.minimum(testable, ks)
    round_steps = np.array([[[r.round_steps]] for r in recordings])  # 0: one step per draft token
    steps = np.where(round_steps, round_steps * (drafted > 0), drafted)
    # 2. Propagate the expected number of rounds that start after i tokens.
    shape = (len(n), len(ks))
    starts = np.zeros((*shape, n.max() + k_max + 1))
    starts[..., 0] = 1.0
    rows, columns = np.ogrid[: shape[0], : shape[1]]
    depths = np.arange(k_max)
    counts = np.zeros((*shape, 3 * k_max + 6))
    widths, totals, tested, kept = split(counts)
    for i in range(n.max()):
        begun = starts[..., i] * (i < n[:, None])
        # P(the first j draft tokens are accepted), for j = 0 to k_max
        reached = np.cumprod(np.insert(chances[:, i], 0, 1.0, axis=-1), axis=-1)
        rounds = begun[..., None] * (depths < limit[:, i, :, None])
        tests = rounds * reached[..., :-1]
        passes = rounds * reached[..., 1:]
        tested += tests
        kept += passes
        # after a rejection, the correction is committed
        starts[..., i + 1 : i + k_max + 1] += tests - passes
        # if all are accepted, the bonus token, unless the generation ends
        after = np.minimum(i + limit[:, i] + 1, n[:, None])
        all_accepted = np.take_along_axis(reached, limit[:, i, :, None], -1)[..., 0]
        starts[rows, columns, after] += begun * all_accepted
        widths[rows, columns, _width(i, drafted[:, i])] += begun
        totals += np.stack(
            [begun, begun * drafted[:, i], passes.sum(-1), begun * steps[:, i]], axis=-1
        )
    return counts


def split(counts: np.ndarray) -> list[np.ndarray]:
    """Return views of the last axis of `expected_counts`.

    They are the target's passes by width, 0 to k + 1; rounds, drafted, accepted, steps; `tested`,
    the rounds that tested draft token j; `kept`, those that accepted it. alpha_j is kept / tested.
    """
    k = counts.shape[-1] // 3 - 2
    return np.split(counts, [k + 2, k + 6, 2 * k + 6], axis=-1)


def seconds_of(counts: np.ndarray, cost: Cost) -> np.ndarray:
    """Return the predicted decoding seconds of counts `(…, 3 k + 6)`, as `Counts.seconds`."""
    widths, totals, _, _ = split(counts)
    passes = cost.ratios(widths.shape[-1] - 2)
    return (widths @ passes + totals[..., 3] * cost.c) * cost.step_s


def _counts(recording: Recording, row: np.ndarray) -> Counts:
    widths, totals, *_ = split(row)
    by_width = {n: calls for n, calls in enumerate(widths.tolist()) if calls}
    return Counts(recording.n_tokens, *totals.tolist(), by_width)


def sweep_row(recording: Recording, k: int, counts: Counts, cost: Cost) -> dict[str, Any]:
    """Return a table row for one K, with the predicted seconds of drafted and plain decoding."""
    n_decoded = max(0, recording.n_tokens - 1)
    return recording.key | {
        "k": k,
        "n_decoded": n_decoded,
        "rounds": counts.rounds,
        "tau": recording.n_tokens / counts.rounds if counts.rounds else None,
        "drafted": counts.drafted,
        "accepted": counts.accepted,
        "seconds": counts.seconds(cost),
        "plain_s": n_decoded * cost.step_s,
    }


class ReplayStep(NamedTuple):
    """A round of a walk, which starts after `at` tokens.

    It drafts `drafted` tokens in `steps` forward passes; `n_accepted` of them are accepted.
    """

    at: int
    drafted: int
    steps: int
    n_accepted: int


def walk_recording(
    recording: Recording, controller: Controller, rng: np.random.Generator | None = None
) -> list[ReplayStep]:
    """Return the rounds of a recording with `controller`; `rng` decides random acceptance.

    For greedy recordings, the rounds equal those of a live run if the controller does not read
    drafts, or for lookup. After the first wrong draft token, a controller that reads a draft
    model's confidence gets the confidence along the true tokens, so it may draft more or fewer
    tokens there than live. Raises InputError for a controller whose K exceeds the recorded one, or
    that reads data that were not recorded.
    """
    _require_k(recording, controller.k_max)
    rows = recording.beliefs or recording.head_beliefs or recording.support
    if controller.reads_drafts and any(recording.offered) and not rows:
        raise InputError(
            f"{controller.name} reads drafts, and the recording of {recording.drafter} has no rows"
        )
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
    """Return how many draft tokens are accepted with these probabilities; draw only if needed."""
    n_kept = 0
    for chance in chances:
        if chance < 1.0 and (chance <= 0.0 or rng.random() >= chance):
            break
        n_kept += 1
    return n_kept


def counts_of(recording: Recording, steps: Sequence[ReplayStep]) -> Counts:
    """Return the counts of a walk."""
    k_max = max((step.drafted for step in steps), default=0)
    return _counts(recording, tally(recording, steps, k_max))


def tally(recording: Recording, steps: Sequence[ReplayStep], k_max: int) -> np.ndarray:
    """Return the counts of a walk as a row of `expected_counts`."""
    row = np.zeros(3 * k_max + 6)
    widths, totals, tested, kept = split(row)
    for step in steps:
        widths[_width(step.at, step.drafted)] += 1
        totals += (1, step.drafted, step.n_accepted, step.steps)
        tested[: min(step.drafted, recording.n_tokens - step.at, step.n_accepted + 1)] += 1
        kept[: step.n_accepted] += 1
    return row


def oracle(recording: Recording, cost: Cost, k_max: int) -> tuple[list[int], float]:
    """Return the draft length of lowest expected cost at each position, and the expected seconds.

    Dynamic programming from the end: V(i) = min over K of cost(K) + E V(i + n_accepted + 1). The
    oracle knows which draft tokens will be accepted (greedy) or their acceptance probabilities
    (sampling). It is a bound for every controller that chooses K before a round.
    """
    _require_k(recording, k_max)
    n = recording.n_tokens
    value = np.zeros(n + 1)
    plan = [0] * n
    for i in reversed(range(n)):
        best = np.inf
        reached = 1.0  # P(all draft tokens so far are accepted)
        rejected = 0.0  # E[V after a rejection among them]
        for k in range(min(k_max, recording.offered[i]) + 1):
            if k:
                chance = recording.keep[i][k - 1] if k <= len(recording.keep[i]) else 0.0
                rejected += reached * (1 - chance) * value[min(i + k, n)]
                reached *= chance
            round_s = cost.round_s(_width(i, k), recording.steps(k))
            total = round_s + rejected + reached * value[min(i + k + 1, n)]
            if total < best - 1e-15:
                best = total
                plan[i] = k
        value[i] = best
    return plan, float(value[0])


def _drafted(recording: Recording, controller: Controller, at: int, limit: int) -> tuple[int, int]:
    """Return the draft tokens and draft steps of a round; the controller may stop drafting."""
    if not (controller.reads_drafts and limit):
        return limit, limit
    if recording.support:
        copied = (
            controller.worth_copying(recording.support[at], limit)
            if recording.support[at]
            else limit
        )
        return copied, copied
    beliefs = recording.head_beliefs[at] if recording.head_beliefs else recording.beliefs[at:]
    for j in range(limit):
        if not controller.goes_on(j, beliefs[min(j, len(beliefs) - 1)]):
            return j, j + 1
        if controller.enough(j):
            return j + 1, j + 1
    return limit, limit


def _width(at: int, drafted: int) -> int:
    """Return the width of the target's pass; in the first round, prefill has fed the last token."""
    return drafted + (at > 0)


def _require_k(recording: Recording, k: int) -> None:
    if not 0 <= k <= recording.k_max:
        raise InputError(
            f"the recording has drafts up to K = {recording.k_max}, got K = {k}: "
            "record again with a larger k_max"
        )


# --- a router between several drafters, along recorded texts ---

PROMPT = -2
"""Stands for each token of the prompt."""
WRONG = -1
"""Stands for a rejected draft token."""


class RoutedText(NamedTuple):
    """Rounds of a router along a text: their arms ("" for none) and seconds.

    `recording` is that of the first drafter. `prompt_s` are the seconds of each drafter's prefill,
    which are part of the round in which it first drafts.
    """

    recording: Recording
    prompt_s: dict[str, float]
    steps: list[ReplayStep]
    arms: list[str]
    round_s: list[float]


@dataclass(eq=False)
class _RecordedDrafter(DrafterBase):
    """Proposes the draft tokens of `recording`, and advances a simulated clock."""

    recording: Recording
    draft_s: float
    clock: list[float]
    rng: np.random.Generator
    expected: Sequence[float]
    n_prompt: int = 0
    n_past: int = 0
    read_cost: float = 0.0
    """Cost of processing a committed token, in draft steps; as in the router."""

    def __post_init__(self) -> None:
        recording = self.recording
        self.name = recording.drafter
        self.n_heads = recording.round_steps
        self.at_once = bool(self.n_heads)
        # The router only tests whether a drafter uses the target's hidden states or a model.
        self.target: Any = self.at_once or recording.head_beliefs or None
        self.model: Any = None if self.target or recording.support else self

    def prefill_s(self, n: int) -> float:
        """Return the seconds of processing `n` tokens."""
        return self.draft_s * self.read_cost * n if self.model else 0.0

    def start(self, tokens):
        self.n_past = len(tokens) - 1
        self.clock[0] += self.prefill_s(self.n_past)

    def propose(self, tokens, k, picker):
        recording = self.recording
        at = len(tokens) - self.n_prompt
        limit = min(k, recording.offered[at])
        n_kept = _n_kept(recording.keep[at][:limit], self.rng)
        if recording.support:
            n = picker.copies(recording.support[at], limit)
        else:
            control: Controller = picker.control  # type: ignore[attr-defined]
            n, steps = _drafted(recording, control, at, limit)
            if limit:
                unread = max(0, len(tokens) - 1 - self.n_past)
                self.clock[0] += self.draft_s * recording.steps(steps) + self.prefill_s(unread)
            self.n_past = len(tokens) - 1 + steps
        accepted = recording.token_ids[at : at + min(n_kept, n)]
        return Proposal((*accepted, *[WRONG] * (n - n_kept)))

    def commit(self, tokens):
        self.n_past = min(self.n_past, len(tokens) - 1)


def route(
    recordings: Iterable[Recording],
    costs: Mapping[str, Cost],
    *,
    k_max: int,
    seed: int = 0,
    expected: Mapping[str, Sequence[float]] = {},
) -> Iterator[RoutedText]:
    """Run the router with the drafters of `costs` along the recorded texts, one after another.

    The costs are those of one target on one machine. For greedy recordings, the rounds equal those
    of a live router with the same clock, except for the number of draft tokens after a wrong one
    (see `walk_recording`). For sampled ones, acceptance is random. The number of prompt tokens is
    estimated from the text's bytes per token. The router learns across texts; `expected` are the
    drafters' prior acceptance rates.
    """
    # 1. Create the router, with recorded drafters and a simulated clock.
    texts = {}
    for recording in recordings:
        if recording.drafter in costs:
            texts.setdefault(recording.prompt_id, {})[recording.drafter] = recording
    clock = [0.0]
    rng = np.random.default_rng(seed)
    verify_s = [next(iter(costs.values())).curve.seconds(n) for n in range(k_max + 2)]
    text = next(iter(texts.values()))
    drafters = [
        _RecordedDrafter(text[name], cost.c * verify_s[1], clock, rng, expected.get(name, ()))
        for name, cost in costs.items()
    ]
    arms = [Arm(drafter, k_max, drafter.draft_s) for drafter in drafters]
    router = Router(arms, verify_s, clock=lambda: clock[0])
    for text in texts.values():
        # 2. Start a text.
        first = text[drafters[0].name]
        token_ids = first.token_ids
        n_bytes = max(1, sum(map(len, first.pieces)))
        n_prompt = max(1, round(len(first.prompt) * len(token_ids) / n_bytes))
        for drafter in drafters:
            drafter.recording = text[drafter.name]
            drafter.n_prompt = n_prompt
            drafter.read_cost = router.read_cost
        prompt_s = {drafter.name: drafter.prefill_s(n_prompt - 1) for drafter in drafters}
        routed = RoutedText(first, prompt_s, [], [], [])
        tokens = [PROMPT] * n_prompt
        view = TokenView(tokens)
        router.start(view)
        while (at := len(tokens) - n_prompt) < len(token_ids):
            # 3. Propose, verify and commit, as the loop does.
            start_s = clock[0]
            k = min(k_max, first.max_new_tokens - 1 - at)
            ids = router.propose(view, k, Chooser(Sampling())).ids if k > 0 else ()
            n_accepted = n_common(ids, token_ids[at:])
            clock[0] += verify_s[_width(at, len(ids))]
            tokens += token_ids[at : at + n_accepted + 1]
            router.commit(view)
            routed.steps.append(ReplayStep(at, len(ids), len(ids), n_accepted))
            routed.arms.append(router.choices[-1][0] if ids else "")
            routed.round_s.append(clock[0] - start_s)
        yield routed
