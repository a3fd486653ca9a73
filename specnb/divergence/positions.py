"""One logged position of a draft: what it must be, and what contradicts the rule without any statistics. Numpy only."""

from collections.abc import Hashable, Iterator
from typing import NamedTuple

import numpy as np

from specnb.errors import InputError

ROUNDING = 1e-6
"""What rows that were computed in float32 may be off by, relative, whatever they are kept in."""
SUM_ROUNDING = 1e-3
"""By how much the sum of a row may miss 1, and cumulated weights their place: float32, summed over a vocabulary."""


class Position(NamedTuple):
    """One drafted token and what became of it.

    `p_target (vocab,)` and `q_draft (vocab,)` are the rows after temperature, top-k and top-p, of float32 or better:
    the target's, and the drafter's, None for a deterministic one (a point mass). `accepted` is None where nothing was
    tested. `committed_id` is the token that got this place: the draft, or what was drawn instead. `draft_id` None:
    nothing was drafted for this place; it is drawn from p. `accept_u` from [0, 1) is the number that decided by
    u < p(x)/q(x), `resample_u` the one that picked the committed token from the cumulated residual; None where unknown.
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


def flaws(position: Position, p: np.ndarray, q: np.ndarray | None) -> Iterator[tuple[str, str]]:
    """What contradicts the rule whatever the random numbers were, or for those that were logged: (kind, sentence)."""
    x, y = position.draft_id, position.committed_id
    if q is None:
        u = position.resample_u
        if p[y] == 0:
            yield "committed", f"token {y} was committed where nothing was drafted, but p has no mass there"
        elif u is not None and not _picks(p, u, y):
            yield "bonus", f"token {y} was drawn with u = {u:.6g} behind the last draft, where p gives another"
        return
    if q[x] == 0:
        yield "draft", f"token {x} was drafted, but q has no mass there"
    elif _wrongly_tested(position, p[x], q[x]):
        done = "kept" if position.accepted else "rejected"
        drawn = "" if position.accept_u is None else f" with u = {position.accept_u:.6g}"
        yield "accept", f"a draft with p/q = {p[x] / q[x]:.6g} was {done}{drawn}"
    if position.accepted and y != x:
        yield "committed", f"draft {x} was kept, but token {y} was committed"
    elif p[y] == 0:
        yield "committed", f"token {y} was committed, but p has no mass there"
    elif not position.accepted:
        yield from _resample_flaws(position, p, q)


def _wrongly_tested(position: Position, p_x: float, q_x: float) -> bool:
    """Without the number that decided only what is certain can be judged."""
    u = position.accept_u
    if u is not None:
        return (u * q_x < p_x) != position.accepted and abs(u * q_x - p_x) > ROUNDING * p_x
    return p_x == 0 if position.accepted else p_x >= q_x


def _resample_flaws(position: Position, p: np.ndarray, q: np.ndarray) -> Iterator[tuple[str, str]]:
    residual, y, u = np.maximum(p - q, 0.0), position.committed_id, position.resample_u
    if residual.sum() == 0:
        yield "accept", "a draft was rejected where p and q are the same, so that nothing is left to draw from"
    elif q[y] - p[y] > ROUNDING * p[y]:
        yield "residual", f"after a rejection token {y} was drawn, where p = {p[y]:.3g} is below q = {q[y]:.3g}"
    elif u is not None and not _picks(residual, u, y):
        from_target = _picks(p, u, y, edge=0.0)
        kind, row = ("residual", "p gives it") if from_target else ("resample", "norm(max(p - q, 0)) gives another")
        yield kind, f"token {y} was drawn with u = {u:.6g} after a rejection, where {row}"


def _picks(weights: np.ndarray, u: float, y: int, edge: float = SUM_ROUNDING) -> bool:
    """Whether `u` picks y from the cumulated weights, which may be off by `edge` as a share of their sum."""
    edges = np.cumsum(weights)
    at, off = u * edges[-1], edge * edges[-1]
    return bool(edges[y] - weights[y] - off <= at <= edges[y] + off)


def checked_rows(position: Position) -> tuple[np.ndarray, np.ndarray | None]:
    """p and q in float64, the q of a deterministic drafter as a point mass; None where nothing was drafted.

    Raises InputError for rows that are no distributions over one vocabulary, or tokens that are not in it.
    """
    p = _row("p_target", position.p_target)
    x = position.draft_id
    for name, token in (("committed_id", position.committed_id), ("draft_id", x)):
        if token is not None and token not in range(len(p)):
            raise InputError(f"{name}: got {token}, expected a token below {len(p)}")
    if x is None:
        return p, None
    q = np.eye(1, len(p), x)[0] if position.q_draft is None else _row("q_draft", position.q_draft)
    if p.shape != q.shape:
        raise InputError(f"q_draft: got {q.shape}, expected a row over the target's vocabulary, {p.shape}")
    return p, q


def _row(name: str, given: np.ndarray) -> np.ndarray:
    """One row `(vocab,)` of probabilities, of float32 or better: behind temperature, top-k and top-p it sums to 1."""
    row = np.asarray(given, dtype=np.float64)
    total = float(row.sum())
    if row.ndim != 1 or not row.min(initial=0) >= 0 or abs(total - 1) > SUM_ROUNDING:
        raise InputError(f"{name}: got a sum of {total:.6g} over {row.shape}, expected one row of probabilities")
    return row
