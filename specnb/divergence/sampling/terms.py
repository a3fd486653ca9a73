"""One logged position: what the sampling audit sums, and what can be checked without statistics."""

from collections.abc import Hashable, Iterator
from numbers import Real
from operator import index
from typing import NamedTuple

import numpy as np

from specnb.decode.sampling import Draws
from specnb.errors import InputError

STATISTICS = ("z_acc", "z_draft", "z_surp", "z_dir", "z_order")
N_STATISTICS = len(STATISTICS)
CLIP = 4.0
"""Largest |log(p/q)| that is summed: behind top-k q is 0 where p is not. Any function of p and q has mean 0 under p."""
ROUNDING = 1e-6
"""What rows that were computed in float32 may be off by, relative, whatever they are kept in."""
SUM_ROUNDING = 1e-3
"""By how much the sum of a row may miss 1: float32, summed over a vocabulary, or the roundings of float16."""
VAGUE = 0.1
"""Share of cumulated weights within which a random number may pick any token, up to which the replay is a check."""
SAME = 1e-9
"""Values, or p and q, that differ by no more do not vary: rounding would be all that is summed."""


class Position(NamedTuple):
    """One drafted token and what became of it.

    `p_target (vocab,)` and `q_draft (vocab,)` are the rows after temperature, top-k and top-p: the target's, and that
    which the drafter reported, None for a deterministic drafter (a point mass). `accepted` is None behind a rejection,
    where nothing was tested. `committed_id` is the token that got this place: the draft, or what was drawn instead.
    `draft_id` None: nothing was drafted for this place, as for the token behind the last draft; it is drawn from p.
    `accept_u` from [0, 1) is the number that decided by u < p(x)/q(x), `resample_u` the one that picked the committed
    token from the cumulated residual (`decode.sampling.Draws`); None where unknown, or where it was drawn otherwise.
    `prefix` identifies the tokens before this place: of positions with the same one the first counts.
    How far the rows are trusted follows from their type (`Rounding`): in half precision much less can be checked.
    """

    p_target: np.ndarray
    q_draft: np.ndarray | None
    draft_id: int | None
    accepted: bool | None
    committed_id: int
    accept_u: float | None = None
    resample_u: float | None = None
    prefix: Hashable = None


class Flaw(NamedTuple):
    """What an exact check found: the number of the position in the log, and a sentence."""

    position: int
    says: str


class Moments(NamedTuple):
    """What one statistic gets from a position, or from all of them together: each of these adds up.

    What was seen less its mean; its variance; by how much the means of the two sides of the mean are apart; third
    absolute moment; by how much the mean square deviation is larger above the mean than below.
    """

    deviation: float
    variance: float
    apart: float
    third: float
    leaning: float


NOTHING = Moments(0.0, 0.0, 0.0, 0.0, 0.0)
"""Of what does not vary."""


class Terms(NamedTuple):
    """A position's part of the sums.

    `moments (statistics, 5)` holds one of `Moments` a row. `flaws` are (kind, sentence). `likeliest`: whether the draft
    is the likeliest token of q, and the log of the chance. `replayed`: whether the decision was repeated with its
    random number. `exact`: whether the row, or the random numbers, leave but one token to commit, or those few next to
    it that rounding leaves (`Rounding.tells`). `prefix` is the hash of the position's.
    """

    moments: np.ndarray
    flaws: tuple[tuple[str, str], ...]
    likeliest: bool
    likeliest_log_chance: float
    replayed: bool
    exact: bool
    prefix: int | None


class Rounding(NamedTuple):
    """Within it a decision is not judged.

    `entry`: what an entry may be off by, relative; `least`: the smallest number that is told from 0; `edge`: what
    cumulated weights may be off by, as a share of their sum. `half`: rows in float16. There a zero says nothing, for a
    large vocabulary holds some mass in entries below 3e-8, and two entries may be equal by rounding alone: checks
    without random numbers need a clear difference, and a row with one token may have had others. bfloat16 that was
    converted to float32 cannot be told from it, nor float16 that was converted, and both are too coarse: take the
    softmax of the logits in float32.
    """

    entry: float
    least: float
    edge: float
    half: bool

    def of_entry(self, value: float) -> float:
        """What an entry of about `value` may be off by."""
        return self.entry * value + self.least

    def of_edge(self, edges: np.ndarray) -> float:
        """What each of the cumulated weights `edges (vocab,)` may be off by; those of a residual miss twice a row's."""
        of_entries = 2 * (self.entry + len(edges) * self.least) if self.half else 0.0
        return self.edge * float(edges[-1]) + of_entries

    def tells(self, edges: np.ndarray) -> bool:
        """Whether a random number and the cumulated weights `edges (vocab,)` say, up to VAGUE, which token is picked.

        In half precision a residual of little mass may be all rounding: then no token would be a flaw.
        """
        return 2 * self.of_edge(edges) < VAGUE * float(edges[-1])


def rounding_of(*rows: object) -> Rounding:
    """Of a decision over rows `(vocab,)` of these types, the coarsest of which counts; None is a point mass, exact."""
    given = [np.asarray(row) for row in rows if row is not None]
    if any(row.dtype == np.float16 for row in given):
        kind = np.finfo(np.float16)
        # p and q are each off by half an eps; what was computed in half precision as well is off by more than that
        return Rounding(4 * float(kind.eps), float(kind.smallest_subnormal), SUM_ROUNDING, half=True)
    # an engine that keeps float32 also cumulates in it, over a vocabulary
    return Rounding(ROUNDING, 0.0, SUM_ROUNDING if any(map(_of_float32, given)) else ROUNDING, half=False)


def _of_float32(row: np.ndarray) -> bool:
    """Whether the values are of float32, or coarser, whatever they were logged in: a list of Python's, or float64."""
    with np.errstate(over="ignore"):
        return row.dtype != np.float64 or bool((row.astype(np.float32) == row).all())


def position_terms(position: Position) -> Terms:
    """What `position` adds. Raises InputError for rows that are no distributions, or tokens outside them."""
    p, q = _rows(position)
    y = _token("committed_id", position.committed_id, len(p))
    x = None if position.draft_id is None else _token("draft_id", position.draft_id, len(p))
    _uniform("accept_u", position.accept_u)
    _uniform("resample_u", position.resample_u)
    prefix = None if position.prefix is None else hash(position.prefix)
    rounding = rounding_of(position.p_target, position.q_draft)
    certain = not rounding.half and np.count_nonzero(p) == 1
    picked = position.resample_u is not None
    if x is None:  # nothing was drafted here: y is drawn from p, and only what is drawn can be judged
        flaws = tuple(_extra_wrongly(position, p, y, rounding))
        tells = picked and rounding.tells(np.cumsum(p))
        p = p / p.sum()
        moments = np.array([NOTHING, NOTHING, _surprise(p, y), NOTHING, _order(p, y)])
        return Terms(moments, flaws, True, 0.0, picked, certain or tells, prefix)
    flaws = tuple(_flaws(position, p, q, x, y, rounding))
    tells = bool(position.accepted) or (picked and rounding.tells(np.cumsum(np.maximum(p - q, 0.0))))
    p, q = p / p.sum(), q / q.sum()
    top = float(q.max())
    by_chance = min(1.0, top * np.count_nonzero(q == top))
    moments = np.array([_kept(position, p, q), _surprise(q, x), _surprise(p, y), _direction(p, q, y), _order(p, y)])
    replayed = position.accept_u is not None
    exact = certain or (replayed and tells)
    return Terms(moments, flaws, bool(q[x] == top), float(np.log(by_chance)), replayed, exact, prefix)


def _kept(position: Position, p: np.ndarray, q: np.ndarray) -> Moments:
    """Whether the draft was kept, against 1 - TV(p, q). All of a total variation may go into the share of kept ones."""
    overlap = float(np.minimum(p, q).sum())
    if overlap >= 1 - SAME:  # p and q are the same, and how their sum is rounded is no chance of a rejection
        overlap = 1.0
    variance = overlap * (1 - overlap)
    if variance == 0:
        return NOTHING._replace(deviation=bool(position.accepted) - overlap)
    third = variance * (overlap**2 + (1 - overlap) ** 2)
    return Moments(bool(position.accepted) - overlap, variance, 1.0, third, 1 - 2 * overlap)


def _surprise(row: np.ndarray, seen: int) -> Moments:
    """-log of the probability of the token that was drawn, against the entropy of the row."""
    return _about(-np.log(np.where(row > 0, row, 1.0)), row, seen)


def _direction(p: np.ndarray, q: np.ndarray, seen: int) -> Moments:
    """log(p/q) of the token that was committed, against its mean under p."""
    with np.errstate(divide="ignore", invalid="ignore"):
        values = np.clip(np.log(p) - np.log(q), -CLIP, CLIP)
    return _about(np.where(p > 0, values, 0.0), p, seen)


def _order(p: np.ndarray, seen: int) -> Moments:
    """The mass of p below the committed token, in the order of ids, and half of its own: 1/2 in the mean.

    Its variance is (1 - sum of p^3) / 12. Samplers cumulate in the order of ids, and break ties by it.
    """
    return _about(np.cumsum(p) - p / 2, p, seen)


def _about(values: np.ndarray, law: np.ndarray, seen: int) -> Moments:
    """The moments of `values` under `law`, both (vocab,), and how far the one that was seen is from its mean."""
    if law[seen] == 0:  # a flaw, or rounded to 0: of a law that cannot give this token nothing is to be learnt
        return NOTHING
    centred = values - law @ values
    size, up, down = np.abs(centred), np.maximum(centred, 0.0), np.maximum(-centred, 0.0)
    # a token without mass does not vary; one at the mean itself counts as below, where it moves the least
    above, below = float(law[centred > 0].sum()), float(law[centred <= 0].sum())
    if size[law > 0].max() <= SAME or above == 0 or below == 0:
        return NOTHING
    # each side by itself: of a sharp row one has 1e-30, and the rounding of a difference is far more
    apart = float(law @ up) / above + float(law @ down) / below
    leaning = float(law @ up**2) / above - float(law @ down**2) / below
    return Moments(float(centred[seen]), float(law @ size**2), apart, float(law @ size**3), leaning)


class _Given(Draws):
    """Draws that are decided by one given number."""

    def __init__(self, u: float) -> None:
        self._u = u

    def uniform(self) -> float:
        return self._u


def _flaws(
    position: Position, p: np.ndarray, q: np.ndarray, x: int, y: int, rounding: Rounding
) -> Iterator[tuple[str, str]]:
    """What contradicts the rule whatever the random numbers were, or for those that were logged."""
    if q[x] == 0:
        if not rounding.half:
            yield "draft", f"token {x} was drafted, but q has no mass there"
    else:
        yield from _accepted_wrongly(position, p[x], q[x], rounding)
    if position.accepted and y != x:
        yield "committed", f"draft {x} was kept, but token {y} was committed"
    elif p[y] == 0 and not rounding.half:
        yield "committed", f"token {y} was committed, but p has no mass there"
    elif not position.accepted:
        yield from _resampled_wrongly(position, p, q, y, rounding)


def _extra_wrongly(position: Position, p: np.ndarray, y: int, rounding: Rounding) -> Iterator[tuple[str, str]]:
    u = position.resample_u
    if p[y] == 0 and not rounding.half:
        yield "committed", f"token {y} was committed where nothing was drafted, but p has no mass there"
    elif u is not None and not _draws(p, u, y, rounding):
        yield "bonus", f"token {y} was drawn with u = {u:.6g} behind the last draft, where p gives another"


def _draws(weights: np.ndarray, u: float, y: int, rounding: Rounding) -> bool:
    """Whether `u` picks y from the cumulated weights, up to rounding."""
    edges = np.cumsum(weights)
    at, off = u * edges[-1], rounding.of_edge(edges)
    return bool(edges[y] - weights[y] - off <= at <= edges[y] + off)


def _accepted_wrongly(position: Position, p_x: float, q_x: float, rounding: Rounding) -> Iterator[tuple[str, str]]:
    """Without the number that decided only what is certain can be judged."""
    u, done = position.accept_u, "kept" if position.accepted else "rejected"
    if u is not None:
        wrong = (u * q_x < p_x) != position.accepted and abs(u * q_x - p_x) > rounding.of_entry(p_x)
    elif rounding.half:  # 0 may be the rest of a small number, and a ratio of 1 that of a smaller one
        wrong = not position.accepted and p_x - q_x > rounding.of_entry(p_x)
    else:
        wrong = p_x == 0 if position.accepted else p_x >= q_x
    if wrong:
        yield "accept", f"a draft with p/q = {p_x / q_x:.6g} was {done}" + ("" if u is None else f" with u = {u:.6g}")


def _resampled_wrongly(
    position: Position, p: np.ndarray, q: np.ndarray, y: int, rounding: Rounding
) -> Iterator[tuple[str, str]]:
    residual, u = np.maximum(p - q, 0.0), position.resample_u
    if residual.sum() == 0:
        if not rounding.half:
            yield "accept", "a draft was rejected where p and q are the same, so that nothing is left to draw from"
    elif q[y] - p[y] > rounding.of_entry(p[y]):
        yield "residual", f"after a rejection token {y} was drawn, where p = {p[y]:.3g} is below q = {q[y]:.3g}"
    elif u is not None and not _draws(residual, u, y, rounding):
        drawn, from_target = _Given(u).categorical(residual), _Given(u).categorical(p) == y
        kind, row = ("residual", "p gives it") if from_target else ("resample", f"norm(max(p - q, 0)) gives {drawn}")
        yield kind, f"token {y} was drawn with u = {u:.6g} after a rejection, where {row}"


def _rows(position: Position) -> tuple[np.ndarray, np.ndarray]:
    """p and q in float64, the q of a deterministic drafter as a point mass."""
    p = _row("p_target", position.p_target)
    if position.draft_id is None:
        return p, np.zeros(len(p))
    if position.q_draft is None:
        q = np.zeros(len(p))
        q[_token("draft_id", position.draft_id, len(p))] = 1.0
        return p, q
    q = _row("q_draft", position.q_draft)
    if len(p) != len(q):
        raise InputError(f"p_target has {len(p)} tokens, q_draft {len(q)}: give both over the target's vocabulary")
    return p, q


def _row(name: str, given: object) -> np.ndarray:
    try:
        row = np.asarray(given, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise InputError(f"{name} is no row of numbers: {error}") from error
    if row.ndim != 1 or not len(row):
        raise InputError(f"{name} has the shape {row.shape}: give one row (vocab,) a position")
    if not np.isfinite(row).all() or row.min() < 0:
        bad = int(np.argmax(~(np.isfinite(row) & (row >= 0))))
        raise InputError(f"{name} holds {row[bad]} at token {bad}: probabilities, not logits, are audited")
    total = float(row.sum())
    if abs(total - 1) > SUM_ROUNDING + len(row) * rounding_of(given).least:
        raise InputError(f"{name} sums to {total:.6g} instead of 1: give it after temperature, top-k and top-p")
    return row


def _uniform(name: str, given: object) -> None:
    if given is not None and not (isinstance(given, Real) and 0 <= given < 1):
        raise InputError(f"{name} is {given!r:.80}: uniform numbers are from 0 up to, but not, 1")


def _token(name: str, given: object, size: int) -> int:
    try:
        token = index(given)
    except TypeError as error:
        raise InputError(f"{name} is no token id (int): {given!r:.80}") from error
    if not 0 <= token < size:
        raise InputError(f"{name} is {token}, outside of rows of {size} tokens")
    return token
