"""A walk through the modules in the order they ran: which tensor is off by itself, and which only hands an error on.

A module's output is made from what it was given and from all that ran inside it. What a module is given is the very
tensor that another one made, where the reference's digests say so; else the code of the module that holds it made it,
from what that was given and from all that ran in it before. Attention sees the past, so a position has its past's
errors behind it, too.

What is gone through is the `Difference` of two aligned traces.

A different choice at a tie is legitimate, but outputs after it are not comparable with the reference. A fault after it
would not be noticed, so errors after such a choice are measured by those of sound runs after theirs.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from specnb.divergence.errors import CARRIES, TIMES_FLOOR, Node, gains, margins, relative_l2, rounding
from specnb.divergence.trace import UNKNOWN_ID, Alignment, Key, find_turned, index_of

Call = tuple[str, int]
OUTSIDE: Call = ("", -1)
"""Who holds what no captured module holds."""
Floors = Mapping[Key, float]


class Fork(NamedTuple):
    """The first position at which two runs were fed other tokens, the `last`, and how many are `differing`.

    `repeated`: the candidate was fed one and the same token from there on.
    """

    position: int
    reference: int
    candidate: int
    differing: int
    last: int
    repeated: bool


class Drift(NamedTuple):
    """A step of the candidate that, by the reference's count, starts at another position than it was run with."""

    step: int
    position: int
    counted: int


def compared_positions(reference: Alignment, candidate: Alignment) -> tuple[np.ndarray, Fork | None]:
    """The positions that both traces hold, up to the first at which they were fed other tokens."""
    shared = np.intersect1d(reference.positions, candidate.positions)
    a, b = (trace.tokens[np.isin(trace.positions, shared)] for trace in (reference, candidate))
    differs = np.flatnonzero((a != b) & (a != UNKNOWN_ID) & (b != UNKNOWN_ID))
    if not len(differs):
        return shared, None
    at, last = differs[[0, -1]].tolist()
    repeated = len(b) > at + 2 and (b[at:] == b[at]).all()
    return shared[:at], Fork(shared[at], a[at], b[at], len(differs), shared[last], repeated)


def counted_alike(reference: Alignment, candidate: Alignment) -> tuple[Alignment, Drift | None]:
    """The candidate with the reference's count of positions, where both were fed the same steps; else as it is.

    A run that forgot too much or too little of its state goes on at other positions than it was meant to: these are
    what is wrong, not where its tokens belong.
    """
    both = reference.steps, candidate.steps
    fed, fed_again = ([step["token_ids"] for step in steps] for steps in both)
    if all(fed) and fed == fed_again:  # ids are not known where a model is given embeddings
        firsts, counted = ([step["first_position"] for step in steps] for steps in both)
        for step, (first, count) in enumerate(zip(firsts, counted, strict=True)):
            if first != count:
                return Alignment(candidate.trace, candidate.rename, firsts), Drift(step, first, count)
    return candidate, None


# --- how far they are apart -------------------------------------------------------------------------------------------


class Difference:
    """`errors[key]` (positions,): relative L2, or 1 where an integer differs; NaN where not compared.

    `pairs[key]` are both tensors `(positions, features)`; `equal` those of which every value is the same; of
    `left_out` either has no tokens or shapes that differ between steps, `reshaped` are other numbers of features.
    `flipped[key]` (positions,): the places at other integers of a module, such as chosen experts, or behind them.
    """

    def __init__(self, reference: Alignment, candidate: Alignment) -> None:
        self.reference, self.candidate = reference, candidate
        self.positions, self.fork = compared_positions(reference, candidate)
        self.errors, self.pairs, self.discrete, self.flipped = {}, {}, set(), {}
        self.left_out, self.reshaped = [], []
        at, in_candidate = (index_of(run.positions, self.positions) for run in (reference, candidate))
        flips = np.zeros(len(self.positions), bool)
        for key in reference.rows:
            if key not in candidate.rows:
                continue
            a, b = reference.whole.get(key), candidate.whole.get(key)
            if a is None or b is None:
                self.left_out.append(key)
            elif a.features.shape[1] != b.features.shape[1] or a.discrete != b.discrete:
                self.reshaped.append(key)
            else:
                x, y = a.features[at], b.features[in_candidate]
                error = (x != y).any(-1).astype(float) if a.discrete else relative_l2(x, y)
                error[np.isin(at, a.gaps) | np.isin(in_candidate, b.gaps)] = np.nan
                self.errors[key], self.pairs[key], self.flipped[key] = error, (x, y), flips
                if a.discrete:
                    self.discrete.add(key)
                    if key.role == "out":
                        flips = flips | np.logical_or.accumulate(error > 0)

    @property
    def equal(self) -> set[Key]:
        return {key for key, error in self.errors.items() if not (error > 0).any() and not np.isnan(error).all()}

    def limit(self, key: Key) -> float:
        """Return what rounding does to this tensor; a wide one may have been made of narrow ones."""
        runs = self.reference, self.candidate
        return rounding(name for run in runs for name in (run.whole[key].dtype, run.trace.facts["dtype"]))


# --- the walk ---------------------------------------------------------------------------------------------------------


class Event(NamedTuple):
    """Tensors seen at once: what a call was `given`, or gave. `holders` enclose it, the innermost first.

    `maker`: the module whose code made the tensors; what comes from outside is put down to the one that got it.
    """

    at: Call
    given: bool
    maker: str
    keys: list[Key]
    holders: list[Call]


class Plan(NamedTuple):
    """The events of one forward of the reference, and `same_as[key]`: the last earlier tensor of the same bits."""

    events: list[Event]
    same_as: dict[Key, Key]

    @classmethod
    def of(cls, reference: Alignment) -> "Plan":
        """From the step that shows most tensors; what only others show is put where those had it."""
        steps = defaultdict(dict)
        for key, rows in reference.rows.items():
            for row in rows:
                steps[row.step][key] = row
        first, same_as, with_bits = {}, {}, defaultdict(list)
        for step in sorted(steps.values(), key=len, reverse=True):
            start = min(row.order for row in step.values())
            for key, row in sorted(step.items(), key=lambda item: item[1].order):
                if key not in first:
                    first[key] = row._replace(order=row.order - start)
                    earlier = [item for item in with_bits[row.digest] if first[item].order < first[key].order]
                    if earlier:
                        same_as[key] = max(earlier, key=lambda item: first[item].order)
                    with_bits[row.digest].append(key)
        together = defaultdict(list)
        for key, row in first.items():
            together[row.order, key.role, key[:2]].append(key)
        holder_of = {key[:2]: (row.holder, row.holder_call) for key, row in first.items()}
        events = []
        for (_, role, call), keys in sorted(together.items()):
            holders = [holder_of[call]]
            while holders[-1] != OUTSIDE:
                holders.append(holder_of.get(holders[-1], OUTSIDE))
            is_input = role == "in"
            maker, _ = holders[0] if is_input and holders[0] != OUTSIDE else call
            events.append(Event(call, is_input, maker, keys, holders))
        return cls(events, same_as)


def pair_floors(sound: Sequence[Difference], least: Floors) -> tuple[Floors, Floors]:
    """The largest error of each tensor in sound pairs, and at least what `least` says: before any other choice, and
    after one.

    After a token that got other experts, as integers that were made before it tell, a sound run is as far off as a
    wrong one: what is seen there is a floor only for what is after such a token, too.
    """
    before, after = dict(least), dict(least)
    for pair in sound:
        for key in least.keys() & pair.errors.keys() - pair.discrete:
            error = np.nan_to_num(pair.errors[key], posinf=np.inf)
            after[key] = error.max(initial=after[key])
            before[key] = error[~pair.flipped[key]].max(initial=before[key])
    return before, after


class Tracked(NamedTuple):
    """One tensor after the walk, each (positions,): `wrong` by itself; `beyond` its floor. `error` is 0 where nothing
    was compared.

    `choice`: integers that were chosen by scores beside them; those that differ and are not wrong differ at a tie.
    """

    event: Event
    error: np.ndarray
    wrong: np.ndarray
    beyond: np.ndarray
    choice: bool


def walk_traces(plan: Plan, difference: Difference, floor: Floors) -> dict[Key, Tracked]:
    """Findings by key, in the order of the run, of all that was compared.

    `wrong` are errors above their floor where what the tensor was made from is not, and that are no growth of that. In
    runs that compute freely errors travel, so the floor alone would blame everybody behind the first one.
    """
    findings = {}
    # by call, of what was seen inside at each position or before it: the largest error, and whether one was too large
    scopes = defaultdict(lambda: np.zeros((2, len(difference.positions))))
    for event in plan.events:
        inside, inside_beyond = scopes[event.holders[0] if event.given else event.at]
        parts = {}
        for key in (key for key in event.keys if key in difference.errors):
            error = np.nan_to_num(difference.errors[key], posinf=np.inf)
            beyond = error > TIMES_FLOOR * floor[key]
            source = findings.get(plan.same_as.get(key)) if event.given else None
            given, given_beyond = (source.error, source.beyond) if source else (inside, inside_beyond > 0)
            wrong = beyond & ~given_beyond & (error > TIMES_FLOOR * CARRIES * given)
            # what is no number reaches tokens before it, too: attention gives a later one the weight 0
            if np.isinf(inside).any():
                wrong &= np.isfinite(error)
            scores = _scores_of(key, event, difference)
            if scores is not None and wrong.any():
                rows = (values[wrong] for values in (difference.pairs[scores][0], *difference.pairs[key]))
                wrong[wrong] = margins(*rows) > TIMES_FLOOR * floor[scores]
            parts[key] = Tracked(event, error, wrong, beyond, scores is not None)
        findings |= parts
        for call in (*event.holders, event.at) if event.given else event.holders:
            for part in parts.values():
                reached = np.maximum.accumulate([part.error, part.beyond], axis=1)
                scopes[call] = np.maximum(scopes[call], reached)
    return findings


def _scores_of(key: Key, event: Event, difference: Difference) -> Key | None:
    """Find what a module's integers were chosen from: its output with more values a token. None: this is no choice."""
    if key.role != "out" or key not in difference.discrete:
        return None
    features = {item: difference.pairs[item][0].shape[1] for item in event.keys if item in difference.pairs}
    wider = [item for item in features if item not in difference.discrete and features[item] > features[key]]
    return max(wider, key=features.__getitem__, default=None)


def list_wrong(difference: Difference, findings: Mapping[Key, Tracked], floor: Floors) -> dict[Key, Node]:
    """The tensors that are wrong by themselves, the first in time first."""
    nodes, run = {}, difference.candidate
    for key, part in findings.items():
        if part.wrong.any():
            tokens, errors = difference.positions[part.wrong], part.error[part.wrong]
            gain = gains(*(values[part.wrong] for values in difference.pairs[key]))[errors.argmax()]
            sizes = errors.max(), floor[key], errors.max() / floor[key], gain
            where = part.event.maker, key.role, key.name, key.module, tokens[0], tokens[-1], len(tokens)
            nodes[key] = Node(*where, *sizes)
    feeds = dict(zip(run.positions, run.last_step, strict=True))
    return dict(sorted(nodes.items(), key=lambda item: feeds[item[1].first_token]))


# --- what is off and no fault -----------------------------------------------------------------------------------------


def turned(difference: Difference, plan: Plan) -> set[Key]:
    """The tensors that differ by one offset of all positions only, and those that hand them on: attention sees the
    differences of positions."""
    given = {key for key in difference.discrete if key.role == "in" and "position" in key.name}
    modules = {key.module for key in given}
    angles = {key for module in modules for key in find_turned(module, difference.pairs)}
    if angles:
        angles |= given
        for key, source in plan.same_as.items():
            if source in angles:
                angles.add(key)
    return angles & difference.errors.keys()


class Residual(NamedTuple):
    """Errors above three floors that nothing excuses: the largest one, and the largest as a multiple of its floor,
    before any other choice; and the first position of such a `choice` if one is after it."""

    error: float = 0.0
    grown: float = 0.0
    choice: int | None = None


def find_residual(
    difference: Difference,
    findings: Mapping[Key, Tracked],
    floor: Floors,
    floor_after: Floors,
) -> Residual:
    """Sum findings up, in the order of the run. Integers count as choices only: an error of 1 is none of theirs."""
    error, grown = 0.0, 0.0
    for key, part in findings.items():
        if key not in difference.discrete:
            flips = difference.flipped[key]
            cells = part.error > TIMES_FLOOR * np.where(flips, floor_after[key], floor[key])
            if (cells & flips).any():
                return Residual(error, grown, difference.positions[flips][0])
            worst = part.error[cells].max(initial=0)
            error, grown = max(error, worst), max(grown, worst / floor[key])
    return Residual(error, grown)
