"""Walk through the modules of two aligned traces in run order, and find those wrong by themselves.

A module's output is computed from its input and from everything that ran inside it. Its input is
the output of another module if their digests in the reference are equal. Otherwise the code of the
containing module computed it, from that module's input and from everything that ran inside it
before. Attention sees the past, so a position also inherits the errors of earlier positions.

A different choice of experts at a tie is legitimate, but later positions cannot be compared.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np
import pandas as pd

from specnb.divergence.errors import (
    CARRIES,
    TENSOR,
    TIMES_FLOOR,
    expand_tokens,
    gains,
    margins,
    relative_l2,
    rounding,
)
from specnb.divergence.trace import UNKNOWN_ID, Alignment, Key, find_offset, index_of

Call = tuple[str, int]
OUTSIDE: Call = ("", -1)
"""The container of a module that no captured module contains."""
Floors = Mapping[Key, float]


class Fork(NamedTuple):
    """The first and last position at which two runs were fed different tokens, and their number.

    `repeated`: from there on, the candidate was fed a single token repeatedly.
    """

    position: int
    reference: int
    candidate: int
    differing: int
    last: int
    repeated: bool


class Drift(NamedTuple):
    """A step that the candidate ran at position `counted`, and the reference at `position`."""

    step: int
    position: int
    counted: int


def compared_positions(
    reference: Alignment, candidate: Alignment
) -> tuple[np.ndarray, Fork | None]:
    """Return the positions that both traces have, up to the fork, and the fork if there is one."""
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

    A run that rolled back too much or too little continues at wrong positions, but the order of its
    tokens is right.
    """
    fed, fed_again = ([step["token_ids"] for step in run.steps] for run in (reference, candidate))
    if not all(fed) or fed != fed_again:  # a model that is fed embeddings has no ids
        return candidate, None
    firsts, counted = (
        [step["first_position"] for step in run.steps] for run in (reference, candidate)
    )
    differing = (
        Drift(step, *both)
        for step, both in enumerate(zip(firsts, counted, strict=True))
        if len({*both}) > 1
    )
    drift = next(differing, None)
    return Alignment(candidate.trace, candidate.rename, firsts) if drift else candidate, drift


# --- differences ----------------------------------------------------------------------------------


class Difference:
    """The errors of all tensors of two aligned traces.

    `errors[key]` (positions,): relative L2, or 1 if an integer differs; NaN where nothing was
    compared. `pairs[key]`: both tensors `(positions, features)`. `left_out`: without a token axis,
    or with shapes that differ between steps. `reshaped`: with other numbers of features. `n_alike`:
    the number of positions before the first at which an integer output (chosen experts) differs.
    """

    def __init__(self, reference: Alignment, candidate: Alignment) -> None:
        self.reference, self.candidate = reference, candidate
        self.positions, self.fork = compared_positions(reference, candidate)
        self.errors = {}
        self.pairs = {}
        self.discrete = set()
        self.n_alike = len(self.positions)
        self.left_out, self.reshaped = [], []
        at, in_candidate = (
            index_of(run.positions, self.positions) for run in (reference, candidate)
        )
        for key in reference.rows:
            if key not in candidate.rows:
                continue
            a = reference.whole.get(key)
            b = candidate.whole.get(key)
            if a is None or b is None:
                self.left_out.append(key)
            elif a.features.shape[1] != b.features.shape[1] or a.discrete != b.discrete:
                self.reshaped.append(key)
            else:
                x = a.features[at]
                y = b.features[in_candidate]
                error = (x != y).any(-1).astype(float) if a.discrete else relative_l2(x, y)
                error[np.isin(at, a.gaps) | np.isin(in_candidate, b.gaps)] = np.nan
                self.errors[key], self.pairs[key] = error, (x, y)
                if a.discrete:
                    self.discrete.add(key)
                    if key.role == "out" and (error > 0).any():
                        self.n_alike = min(self.n_alike, (error > 0).argmax())

    @property
    def equal(self) -> set[Key]:
        return {
            key
            for key, error in self.errors.items()
            if not (error > 0).any() and not np.isnan(error).all()
        }

    def limit(self, key: Key) -> float:
        """Return the rounding error of a tensor; float32 values may be computed from bfloat16."""
        runs = self.reference, self.candidate
        return rounding(
            name for run in runs for name in (run.whole[key].dtype, run.trace.facts["dtype"])
        )


def floors(difference: Difference, sound: Iterable[Difference]) -> Floors:
    """Return the largest error of each tensor in sound pairs, at least rounding.

    From the first position at which a sound run chose other experts, its errors are as large as
    those of a wrong run; these positions are excluded.
    """
    floor = {key: difference.limit(key) for key in difference.errors}
    for pair in sound:
        for key in floor.keys() & pair.errors.keys() - pair.discrete:
            error = np.nan_to_num(pair.errors[key][: pair.n_alike], posinf=np.inf)
            floor[key] = error.max(initial=floor[key])
    return floor


# --- the walk -------------------------------------------------------------------------------------


class Event(NamedTuple):
    """Tensors captured together: the inputs or the outputs of a call.

    `maker` is the module whose code computed them, in the call `scope`; inputs from outside are
    attributed to the module that received them. `calls`: all calls that contain the event.
    """

    maker: str
    scope: Call
    calls: list[Call]
    is_input: bool
    keys: list[Key]


class Plan(NamedTuple):
    """The events of one forward pass; `same_as[key]`: the last earlier tensor with equal bits."""

    events: list[Event]
    same_as: dict[Key, Key]

    @classmethod
    def of(cls, reference: Alignment) -> "Plan":
        """Use the step with the most tensors; tensors of other steps keep their order there."""
        steps = defaultdict(dict)
        for key, rows in reference.rows.items():
            for row in rows:
                steps[row.step][key] = row
        # 1. The first row of each key, and the last earlier key with the same bits.
        first = {}
        same_as = {}
        with_bits = defaultdict(list)
        for step in sorted(steps.values(), key=len, reverse=True):
            start = min(row.order for row in step.values())
            for key, row in sorted(step.items(), key=lambda item: item[1].order):
                if key not in first:
                    first[key] = row._replace(order=row.order - start)
                    earlier = [
                        item
                        for item in with_bits[row.digest]
                        if first[item].order < first[key].order
                    ]
                    if earlier:
                        same_as[key] = max(earlier, key=lambda item: first[item].order)
                    with_bits[row.digest].append(key)
        # 2. The tensors of one event, and the calls that contain it.
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
            scope = holders[0] if is_input else call
            maker, _ = call if scope == OUTSIDE else scope
            events.append(
                Event(maker, scope, [*holders, call] if is_input else holders, is_input, keys)
            )
        return cls(events, same_as)


class Deviation(NamedTuple):
    """Errors `(positions,)`, 0 if not compared, and where they are `beyond` their floor."""

    error: np.ndarray
    beyond: np.ndarray

    def join(self, other: "Deviation") -> "Deviation":
        """Return the larger errors; those of `other` also count at later positions (attention)."""
        error = np.maximum(self.error, np.maximum.accumulate(other.error))
        return Deviation(error, self.beyond | np.logical_or.accumulate(other.beyond))


def walk_traces(plan: Plan, difference: Difference, floor: Floors) -> pd.DataFrame:
    """Return one row per tensor and token whose error is beyond its floor, as `locate` reads them.

    It is `wrong` if the tensor it was computed from is within its floor, and its error is too large
    to be growth of that tensor's. Errors propagate in these runs: by the floor alone, every module
    after the first wrong one would be blamed.
    """
    # 1. The error of each tensor, and where it is beyond its floor.
    deviations = {}
    for key, difference_error in difference.errors.items():
        error = np.nan_to_num(difference_error, posinf=np.inf)
        deviations[key] = Deviation(error, error > TIMES_FLOOR * floor[key])
    # 2. In run order: which errors do not come from what a tensor was computed from?
    nothing = Deviation(
        np.zeros(len(difference.positions)), np.zeros(len(difference.positions), bool)
    )
    inside = defaultdict(lambda: nothing)  # by call: errors inside it so far
    tensors = []
    for order, event in enumerate(plan.events):
        scope = inside[event.scope]
        compared = [key for key in event.keys if key in deviations]
        for key in compared:
            # An input is the output of another module if their digests are equal.
            source = plan.same_as.get(key) if event.is_input else None
            wrong = _wrong_by_itself(deviations[key], deviations.get(source, scope), scope)
            scores = _scores_of(key, event, difference)
            if scores is not None and wrong.any():
                rows = (
                    values[wrong]
                    for values in (difference.pairs[scores][0], *difference.pairs[key])
                )
                wrong[wrong] = margins(*rows) > TIMES_FLOOR * floor[scores]
            error, beyond = deviations[key]
            if beyond.any():
                labels = order, event.maker, *key, key in difference.discrete
                gain = gains(*(values[beyond] for values in difference.pairs[key]))
                tensors.append(
                    (*labels, difference.positions[beyond], error[beyond], gain, wrong[beyond])
                )
        for call in event.calls:
            for key in compared:
                inside[call] = inside[call].join(deviations[key])
    table = expand_tokens(tensors, wrong=bool)
    candidate = difference.candidate
    feeds = candidate.last_step[index_of(candidate.positions, table["position"].to_numpy())]
    floor_of = [floor[Key(*key)] for key in table[TENSOR].itertuples(index=False)]
    return table.assign(floor=floor_of, ratio=table["error"] / floor_of, feed=feeds)


def _wrong_by_itself(deviation: Deviation, origin: Deviation, scope: Deviation) -> np.ndarray:
    """Return where a tensor is wrong and its origin is not; `scope`: everything inside so far."""
    grown = deviation.error > TIMES_FLOOR * CARRIES * origin.error
    wrong = deviation.beyond & ~origin.beyond & grown
    # A NaN also reaches earlier tokens: attention multiplies later tokens by 0.
    if np.isinf(scope.error).any():
        wrong &= np.isfinite(deviation.error)
    return wrong


def _scores_of(key: Key, event: Event, difference: Difference) -> Key | None:
    """Return the scores by which integers were chosen: an output with more values, or None."""
    if key.role != "out" or key not in difference.discrete:
        return None
    features = {
        item: difference.pairs[item][0].shape[1] for item in event.keys if item in difference.pairs
    }
    wider = [
        item
        for item in features
        if item not in difference.discrete and features[item] > features[key]
    ]
    return max(wider, key=features.__getitem__, default=None)


def excuse_offset(difference: Difference, plan: Plan) -> bool:
    """Set errors due to a constant position offset to rounding; return whether there are any.

    Attention only sees differences of positions.
    """
    offset = find_offset(difference.pairs)
    for key, source in plan.same_as.items():
        if source in offset and key in difference.errors:
            offset.add(key)
    for key in offset:
        difference.errors[key] = np.where(
            np.isnan(difference.errors[key]), np.nan, difference.limit(key)
        )
    return bool(offset)
