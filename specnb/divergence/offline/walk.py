"""Walk through the modules of two aligned traces, in run order: which is wrong by itself?

A module's output is computed from its input and from everything that ran inside it. Its input is
the very tensor that another module computed, if the reference's digests say so; otherwise the
containing module's code computed it, from that module's input and from everything that ran in it
before. Attention sees the past, so a position also inherits the errors of earlier positions.

A different choice at a tie is legitimate, but outputs after it cannot be compared with the
reference. A fault after it would go unnoticed, so errors after such a choice are compared with
those of sound runs after theirs.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from specnb.divergence.errors import CARRIES, TIMES_FLOOR, Node, gains, margins, relative_l2, rounding
from specnb.divergence.trace import UNKNOWN_ID, Alignment, Key, find_turned, index_of

Call = tuple[str, int]
OUTSIDE: Call = ("", -1)
"""What contains a module that no captured module contains."""
Floors = Mapping[Key, float]


class Fork(NamedTuple):
    """The first and last position at which two runs were fed different tokens, and their number.

    `repeated`: from there on the candidate was fed the same token again and again.
    """

    position: int
    reference: int
    candidate: int
    differing: int
    last: int
    repeated: bool


class Drift(NamedTuple):
    """A step of the candidate that ran at another position (`counted`) than in the reference."""

    step: int
    position: int
    counted: int


def compared_positions(reference: Alignment, candidate: Alignment) -> tuple[np.ndarray, Fork | None]:
    """Return the positions of both traces, up to the first with different tokens."""
    shared = np.intersect1d(reference.positions, candidate.positions)
    a, b = (trace.tokens[np.isin(trace.positions, shared)] for trace in (reference, candidate))
    differs = np.flatnonzero((a != b) & (a != UNKNOWN_ID) & (b != UNKNOWN_ID))
    if not len(differs):
        return shared, None
    at, last = differs[[0, -1]].tolist()
    repeated = len(b) > at + 2 and (b[at:] == b[at]).all()
    return shared[:at], Fork(shared[at], a[at], b[at], len(differs), shared[last], repeated)


def counted_alike(reference: Alignment, candidate: Alignment) -> tuple[Alignment, Drift | None]:
    """Return the candidate with the reference's positions if both were fed the same steps.

    A run that rolled back too much or too little goes on at wrong positions: the positions are
    wrong, not the places of its tokens in the text.
    """
    both = reference.steps, candidate.steps
    fed, fed_again = ([step["token_ids"] for step in steps] for steps in both)
    if all(fed) and fed == fed_again:  # a model that is given embeddings has no ids
        firsts, counted = ([step["first_position"] for step in steps] for steps in both)
        for step, (first, count) in enumerate(zip(firsts, counted, strict=True)):
            if first != count:
                return Alignment(candidate.trace, candidate.rename, firsts), Drift(step, first, count)
    return candidate, None


# --- how far they are apart -----------------------------------------------------------------------


class Difference:
    """The errors of all tensors of two aligned traces.

    `errors[key]` (positions,): relative L2, or 1 if an integer differs; NaN where nothing was
    compared. `pairs[key]`: both tensors `(positions, features)`. `equal`: tensors whose values are
    all the same. `left_out`: no token axis, or shapes that differ between steps. `reshaped`: other
    numbers of features. `flipped[key]` (positions,): positions from the first different integer
    output on, such as chosen experts.
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
        """Return the rounding of a tensor; a wide one may come from narrow ones."""
        runs = self.reference, self.candidate
        return rounding(name for run in runs for name in (run.whole[key].dtype, run.trace.facts["dtype"]))


# --- the walk -------------------------------------------------------------------------------------


class Event(NamedTuple):
    """Tensors seen at once: the inputs or the outputs of a call.

    `holders` are the calls that contain it, the innermost first. `maker` is the module whose code
    computed the tensors; what comes from outside is attributed to the module that received it.
    """

    call: Call
    is_input: bool
    maker: str
    keys: list[Key]
    holders: list[Call]


class Plan(NamedTuple):
    """The events of one forward pass; `same_as[key]`: the last earlier tensor of equal bits."""

    events: list[Event]
    same_as: dict[Key, Key]

    @classmethod
    def of(cls, reference: Alignment) -> "Plan":
        """Plan from the step with most tensors; others keep their places in their steps."""
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
    """Return the largest error of each tensor in sound pairs: before and after a flip.

    The errors are at least `least`. After a token with other experts (an earlier integer output
    differs), a sound run is as far off as a wrong one. Its errors there are a floor only for
    positions after such a token.
    """
    before, after = dict(least), dict(least)
    for pair in sound:
        for key in least.keys() & pair.errors.keys() - pair.discrete:
            error = np.nan_to_num(pair.errors[key], posinf=np.inf)
            after[key] = error.max(initial=after[key])
            before[key] = error[~pair.flipped[key]].max(initial=before[key])
    return before, after


class Deviation(NamedTuple):
    """Errors `(positions,)`, 0 if not compared, and where they are `beyond` their floor."""

    error: np.ndarray
    beyond: np.ndarray

    def join(self, other: "Deviation") -> "Deviation":
        """Return the larger errors of both, up to each position: attention sees the past."""
        error = np.maximum(self.error, np.maximum.accumulate(other.error))
        return Deviation(error, self.beyond | np.logical_or.accumulate(other.beyond))


class Tracked(NamedTuple):
    """One tensor after the walk, each (positions,): where it is `wrong` by itself.

    `choice`: integers chosen by scores; those that differ and are not wrong differ at a tie.
    """

    event: Event
    error: np.ndarray
    wrong: np.ndarray
    beyond: np.ndarray
    choice: bool


def walk_traces(plan: Plan, difference: Difference, floor: Floors) -> dict[Key, Tracked]:
    """Return what was compared, by key, in the order of the run.

    A tensor is `wrong` where its error is beyond its floor, the error of what it was computed from
    is not, and it is no growth of that error. In runs that compute freely errors travel: by the
    floor alone, every module after the first wrong one would be blamed.
    """
    # 1. The error of each tensor, and where it is beyond its floor.
    deviations = {}
    for key, difference_error in difference.errors.items():
        error = np.nan_to_num(difference_error, posinf=np.inf)
        deviations[key] = Deviation(error, error > TIMES_FLOOR * floor[key])
    # 2. In the order of the run: which errors do not come from what the tensor was computed from?
    nothing = Deviation(np.zeros(len(difference.positions)), np.zeros(len(difference.positions), bool))
    inside = defaultdict(lambda: nothing)  # by call: the errors of what was seen in it so far
    findings = {}
    for event in plan.events:
        scope = inside[event.holders[0] if event.is_input else event.call]
        compared = [key for key in event.keys if key in deviations]
        for key in compared:
            # An input is the very tensor that another module computed, if the digests say so.
            source = plan.same_as.get(key) if event.is_input else None
            origin = deviations.get(source, scope)
            wrong = _wrong_by_itself(deviations[key], origin, scope)
            scores = _scores_of(key, event, difference)
            if scores is not None and wrong.any():
                rows = (values[wrong] for values in (difference.pairs[scores][0], *difference.pairs[key]))
                wrong[wrong] = margins(*rows) > TIMES_FLOOR * floor[scores]
            error, beyond = deviations[key]
            findings[key] = Tracked(event, error, wrong, beyond, scores is not None)
        calls = [*event.holders, event.call] if event.is_input else event.holders
        for call in calls:
            for key in compared:
                inside[call] = inside[call].join(deviations[key])
    return findings


def _wrong_by_itself(deviation: Deviation, origin: Deviation, scope: Deviation) -> np.ndarray:
    """Tell where a tensor is wrong and its origin is not; `scope`: everything inside so far."""
    grown = deviation.error > TIMES_FLOOR * CARRIES * origin.error
    wrong = deviation.beyond & ~origin.beyond & grown
    # A NaN reaches earlier tokens, too: attention gives a later token the weight 0.
    if np.isinf(scope.error).any():
        wrong &= np.isfinite(deviation.error)
    return wrong


def _scores_of(key: Key, event: Event, difference: Difference) -> Key | None:
    """Return the output that integers were chosen by, with more values per token, or None."""
    if key.role != "out" or key not in difference.discrete:
        return None
    features = {item: difference.pairs[item][0].shape[1] for item in event.keys if item in difference.pairs}
    wider = [item for item in features if item not in difference.discrete and features[item] > features[key]]
    return max(wider, key=features.__getitem__, default=None)


def list_wrong(difference: Difference, findings: Mapping[Key, Tracked], floor: Floors) -> dict[Key, Node]:
    """Return the tensors that are wrong by themselves, earliest first."""
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


# --- differences that are no fault ----------------------------------------------------------------


def turned(difference: Difference, plan: Plan) -> set[Key]:
    """Return the tensors that differ only by one offset of all positions, and their copies.

    Attention sees only differences of positions.
    """
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
    """Errors above TIMES_FLOOR floors before any flip: the largest, and relative to its floor.

    `choice`: the first flipped position, if there is such an error after it.
    """

    error: float = 0.0
    grown: float = 0.0
    choice: int | None = None


def find_residual(
    difference: Difference,
    findings: Mapping[Key, Tracked],
    floor: Floors,
    floor_after: Floors,
) -> Residual:
    """Sum up the findings, in the order of the run. Integers count only as choices."""
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
