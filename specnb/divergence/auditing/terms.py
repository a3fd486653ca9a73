"""One logged position: what the sampling audit sums, and what can be checked without statistics."""

from collections.abc import Hashable, Iterator
from numbers import Real
from operator import index
from typing import NamedTuple

import numpy as np

from specnb.decode.sampling import Draws
from specnb.errors import InputError

STATISTICS = ("z_acc", "z_draft", "z_surp", "z_dir")
N_STATISTICS = len(STATISTICS)
CLIP = 4.0
"""Largest |log(p/q)| that is summed: behind top-k q is 0 where p is not. Any function of p and q has mean 0 under p."""
ROUNDING = 1e-6
"""What rows that were logged in float32 may be off by, relative; within it a decision is not judged."""
SUM_ROUNDING = 1e-3
"""By how much the sum of a logged row may miss 1: float32, summed over a vocabulary, or float16."""


SAME = 1e-9
"""Values that differ by no more do not vary: of a flat row the rounding of its mean would be all that is summed."""
NOTHING = (0.0, 0.0, 0.0, 0.0)
"""The moments of what does not vary."""


class Position(NamedTuple):
    """One drafted token and what became of it.

    `p_target (vocab,)` and `q_draft (vocab,)` are the rows after temperature, top-k and top-p: the target's, and that
    which the drafter reported, None for a deterministic drafter (a point mass). `accepted` is None behind a rejection,
    where nothing was tested. `committed_id` is the token that got this place: the draft, or what was drawn instead.
    `draft_id` None: nothing was drafted for this place, as for the token behind the last draft; it is drawn from p.
    `accept_u` from [0, 1) is the number that decided by u < p(x)/q(x), `resample_u` the one that picked the committed
    token from the cumulated residual (`decode.sampling.Draws`); None where unknown, or where it was drawn otherwise.
    `prefix` identifies the tokens before this place: of positions with the same one the first counts.
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


class Terms(NamedTuple):
    """A position's part of the sums.

    `moments (statistics, 4)`: what was seen less its mean, variance, by how much the means of the two sides of the mean
    are apart, third absolute deviation.
    `flaws` are (kind, sentence). `likeliest`: whether the draft is the likeliest token of q, and the log of the chance.
    `prefix` is the hash of the position's.
    """

    moments: np.ndarray
    flaws: tuple[tuple[str, str], ...]
    likeliest: bool
    likeliest_log_chance: float
    replayed: bool
    prefix: int | None


def terms(position: Position) -> Terms:
    """What `position` adds. Raises InputError for rows that are no distributions, or tokens outside them."""
    p, q = _rows(position)
    y = _token("committed_id", position.committed_id, len(p))
    x = None if position.draft_id is None else _token("draft_id", position.draft_id, len(p))
    if not isinstance(position.accepted, bool | np.bool_):
        raise InputError(f"accepted is {position.accepted!r:.80}: give True, False, or None where nothing was tested")
    _uniform("accept_u", position.accept_u)
    _uniform("resample_u", position.resample_u)
    try:
        prefix = None if position.prefix is None else hash(position.prefix)
    except TypeError as error:
        raise InputError(f"prefix cannot be hashed ({error}): give a tuple of tokens, or a digest") from error
    if x is None:  # nothing was drafted here: y is drawn from p, and only what is drawn can be judged
        flaws = tuple(_extra_wrongly(position, p, y))
        moments = np.array([NOTHING, NOTHING, _surprise(p / p.sum(), y), NOTHING])
        return Terms(moments, flaws, True, 0.0, position.resample_u is not None, prefix)
    flaws = tuple(_flaws(position, p, q, x, y))
    p, q = p / p.sum(), q / q.sum()
    top = float(q.max())
    by_chance = min(1.0, top * np.count_nonzero(q == top))
    moments = np.array([_kept(position, p, q), _surprise(q, x), _surprise(p, y), _direction(p, q, y)])
    return Terms(moments, flaws, bool(q[x] == top), float(np.log(by_chance)), position.accept_u is not None, prefix)


def _kept(position: Position, p: np.ndarray, q: np.ndarray) -> tuple[float, ...]:
    """Whether the draft was kept, against 1 - TV(p, q). All of a total variation may go into the share of kept ones."""
    overlap = min(1.0, float(np.minimum(p, q).sum()))
    variance = overlap * (1 - overlap)
    third = variance * (overlap**2 + (1 - overlap) ** 2)
    return bool(position.accepted) - overlap, variance, float(variance > 0), third


def _surprise(row: np.ndarray, seen: int) -> tuple[float, ...]:
    """-log of the probability of the token that was drawn, against the entropy of the row."""
    return _about(-np.log(np.where(row > 0, row, 1.0)), row, seen)


def _direction(p: np.ndarray, q: np.ndarray, seen: int) -> tuple[float, ...]:
    """log(p/q) of the token that was committed, against its mean under p."""
    with np.errstate(divide="ignore", invalid="ignore"):
        values = np.clip(np.log(p) - np.log(q), -CLIP, CLIP)
    return _about(np.where(p > 0, values, 0.0), p, seen)


def _about(values: np.ndarray, law: np.ndarray, seen: int) -> tuple[float, ...]:
    """The moments of `values` under `law`, both (vocab,), and how far the one that was seen is from its mean."""
    if law[seen] == 0:  # a flaw: of a law that cannot give this token nothing is to be learnt
        return NOTHING
    centred = values - law @ values
    size, above = np.abs(centred), float(law[centred > 0].sum())
    if size.max() <= SAME or not 0 < above < 1:
        return NOTHING
    apart = float(law @ size) / (2 * above * (1 - above))
    return float(centred[seen]), float(law @ size**2), apart, float(law @ size**3)


class _Given(Draws):
    """Draws that are decided by one given number."""

    def __init__(self, u: float) -> None:
        self._u = u

    def uniform(self) -> float:
        return self._u


def _flaws(position: Position, p: np.ndarray, q: np.ndarray, x: int, y: int) -> Iterator[tuple[str, str]]:
    """What contradicts the rule whatever the random numbers were, or for those that were logged."""
    if q[x] == 0:
        yield "draft", f"token {x} was drafted, but q has no mass there"
    else:
        yield from _accepted_wrongly(position, p[x] / q[x])
    if p[y] == 0:
        yield "committed", f"token {y} was committed, but p has no mass there"
    elif position.accepted and y != x:
        yield "committed", f"draft {x} was kept, but token {y} was committed"
    elif not position.accepted:
        yield from _resampled_wrongly(position, p, q, y)


def _extra_wrongly(position: Position, p: np.ndarray, y: int) -> Iterator[tuple[str, str]]:
    if p[y] == 0:
        yield "committed", f"token {y} was committed where nothing was drafted, but p has no mass there"
    elif position.resample_u is not None and not _draws(p, position.resample_u, y, _slack(position)):
        yield (
            "bonus",
            f"token {y} was drawn with u = {position.resample_u:.6g} behind the last draft, where p gives another",
        )


def _slack(position: Position) -> float:
    """Share of the mass by which an edge may be off: rows in float32 are cumulated in float32, over a vocabulary."""
    rows = [one for one in (position.p_target, position.q_draft) if one is not None]
    return ROUNDING if all(np.asarray(one).dtype == np.float64 for one in rows) else SUM_ROUNDING


def _draws(weights: np.ndarray, u: float, y: int, slack: float) -> bool:
    """Whether `u` picks y from the cumulated weights, up to `slack` of their sum."""
    edges = np.cumsum(weights)
    at, off = u * edges[-1], slack * edges[-1]
    return bool(edges[y] - weights[y] - off <= at <= edges[y] + off)


def _accepted_wrongly(position: Position, ratio: float) -> Iterator[tuple[str, str]]:
    """`ratio` is p(x)/q(x). Without the number that decided only what is certain can be judged."""
    u, done = position.accept_u, "kept" if position.accepted else "rejected"
    if u is None:
        wrong = ratio == 0 if position.accepted else ratio >= 1
    else:
        wrong = (u < ratio) != position.accepted and abs(u - ratio) > ROUNDING * ratio
    if wrong:
        yield "accept", f"a draft with p/q = {ratio:.6g} was {done}" + ("" if u is None else f" with u = {u:.6g}")


def _resampled_wrongly(position: Position, p: np.ndarray, q: np.ndarray, y: int) -> Iterator[tuple[str, str]]:
    residual, u = np.maximum(p - q, 0.0), position.resample_u
    if residual.sum() == 0:
        yield "accept", "a draft was rejected where p and q are the same, so that nothing is left to draw from"
    elif q[y] > p[y] * (1 + ROUNDING):
        yield "residual", f"after a rejection token {y} was drawn, where p = {p[y]:.3g} is below q = {q[y]:.3g}"
    elif u is not None and not _draws(residual, u, y, _slack(position)):
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
    if abs(total := float(row.sum()) - 1) > SUM_ROUNDING:
        raise InputError(f"{name} sums to {total + 1:.6g} instead of 1: give it after temperature, top-k and top-p")
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
