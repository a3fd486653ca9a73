"""Audit sampled output: do draft and committed tokens follow the logged rows? NumPy only.

A draft token x is drawn from q and accepted with probability min(1, p(x)/q(x)). After a rejection,
the token is drawn from norm(max(p - q, 0)) (Leviathan et al. 2211.17192). Given the prefix, a draft
token is then accepted with probability 1 - TV(p, q), and the committed token y follows p. Two sums
over the log test this:

z_acc    accepted draft tokens, minus 1 - TV(p, q) for each draft token
z_surp   surprise -log p(y) of the committed tokens, minus its mean under p for each token

Given the prefix, each term has mean 0 and a variance that follows from p and q. Freedman's
inequality (1975) bounds the probability that such a sum S, with variance V and terms of at most M,
is as large as observed: exp(-z^2 / 2) on each side, with z = S / sqrt(V + M |S| / 3). It needs
neither a normal approximation nor independent positions.

If the random numbers are logged, every decision is also replayed exactly (`flaws`). At greedy
positions nothing varies, and the exact checks are the whole audit.
"""

import math
from collections.abc import Hashable, Iterator
from typing import Any, NamedTuple

import numpy as np

from specnb.errors import InputError

EXIT_CODES = {"sound": 0, "wrong": 1, "inconclusive": 125}

ALPHA = 1e-3
"""Largest probability of calling a sound sampler wrong, over both sums."""
EFFECT = 0.1
"""Size of the smallest fault to detect: the share of positions whose outcome it changes."""
POWER = 1.2816
"""Normal quantile of 90 %, the probability of detecting a fault of that size."""
CLIP = 5.0
"""Largest surprise, in nats (clipped): a single very rare token proves nothing."""
LARGEST = {"z_acc": 1.0, "z_surp": CLIP}
"""Largest term of each sum: M."""
LIMIT = math.sqrt(2 * math.log(2 * len(LARGEST) / ALPHA))
"""|z| beyond which a sum is not due to chance."""
CONSTANT = 1e-9
"""Values that deviate by at most this are constant; the rest is rounding."""
ROUNDING = 1e-6
"""Relative error of rows that were computed in float32."""
SUM_ROUNDING = 1e-3
"""Relative error of cumulative sums over a vocabulary in float32."""

CAUSES = {
    "draft": "draft token not drawn from q",
    "accept": "draft token accepted or rejected against p/q",
    "committed": "committed token neither the draft token nor drawn from p",
    "residual": "token after a rejection not drawn from the residual",
    "bonus": "token after the last draft token not drawn from p",
}
"""What each kind of flaw means."""
MEANING = {
    "z_acc": (
        "fewer draft tokens accepted than p and q allow",
        "more draft tokens accepted than p and q allow",
    ),
    "z_surp": ("output sharper than the target", "output flatter than the target"),
}
"""What a large |z| means: below 0, above 0."""
STATISTICS = tuple(MEANING)


class Position(NamedTuple):
    """One position of the output, and how its token was chosen.

    `p_target` and `q_draft` `(vocab,)` are the rows after temperature, top-k and top-p, in float32
    or better; `q_draft` is None for a deterministic drafter (a point mass). `committed_id` is the
    token at this position: the draft token, or the token drawn in its place. `draft_id` is None
    where nothing was drafted: the token is drawn from p. `accept_u` in [0, 1) is the random number
    that decided by u < p(x)/q(x); `resample_u` is the one that picked the committed token from the
    cumulative weights; None if unknown. `prefix` identifies the tokens before this position: of
    several positions with the same prefix, only the first counts.
    """

    p_target: np.ndarray
    q_draft: np.ndarray | None
    draft_id: int | None
    accepted: bool
    committed_id: int
    accept_u: float | None = None
    resample_u: float | None = None
    prefix: Hashable = None


class Flaw(NamedTuple):
    """A failed exact check: how often, the first such position in the log, and a description."""

    count: int
    position: int
    says: str


class Statistic(NamedTuple):
    """One of the two sums.

    `z` and the two-sided `p_value` are None if nothing varied. `far`: |z| is beyond LIMIT;
    `meaning` explains it.
    """

    name: str
    z: float | None = None
    p_value: float | None = None
    far: bool = False
    meaning: str = ""


class Audit(NamedTuple):
    """The verdict on a log: sound, wrong (`causes`) or inconclusive (`more` positions are needed).

    Of n positions, `replayed` counts those whose decision was repeated with its random number, and
    `exact` those whose token was checked without statistics. `repeated` positions had the prefix of
    an earlier one and are not part of n.
    """

    verdict: str
    causes: tuple[str, ...]
    n: int
    repeated: int
    replayed: int
    exact: int
    panel: list[Statistic]
    flaws: dict[str, Flaw]
    more: int
    effect: float

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.verdict]

    @property
    def line(self) -> str:
        """The verdict in one sentence."""
        match self.verdict:
            case "wrong":
                return f"wrong: {' and '.join(self.causes)}, in {self.n} positions"
            case "inconclusive":
                return (
                    f"inconclusive: no fault in {self.n} positions; "
                    f"to detect a fault at {self.effect:.0%} of them, add about {self.more}"
                )
        return f"sound: no fault in {self.n} positions"

    def document(self) -> dict[str, Any]:
        """Return the audit as a JSON document."""
        return self._asdict() | {
            "panel": [statistic._asdict() for statistic in self.panel],
            "flaws": {kind: flaw._asdict() for kind, flaw in self.flaws.items()},
            "exit_code": self.exit_code,
            "line": self.line,
        }


class SamplingTally:
    """Accumulates positions one by one, without keeping their rows."""

    def __init__(self) -> None:
        self.n = self.repeated = self.replayed = self.exact = 0
        # Per statistic: the sum of the deviations and the sum of their variances.
        self._sums = {name: np.zeros(2) for name in STATISTICS}
        self._flaws: dict[str, Flaw] = {}
        self._visited = set()

    def add(self, position: Position) -> None:
        """Add one position, unless its prefix was added before."""
        visit = hash(position.prefix)
        if position.prefix is not None and visit in self._visited:
            self.repeated += 1
            return
        self._visited.add(visit)
        p = np.asarray(position.p_target, np.float64)
        q = _draft_row(position)
        for kind, says in flaws(position, p, q):
            flaw = self._flaws.get(kind, Flaw(0, self.n + self.repeated, says))
            self._flaws[kind] = flaw._replace(count=flaw.count + 1)
        self.n += 1
        picked = position.resample_u is not None
        replayed = picked if q is None else position.accept_u is not None
        self.replayed += replayed
        self.exact += bool(np.count_nonzero(p) == 1 or (replayed and (position.accepted or picked)))
        p = p / p.sum()
        self._sums["z_surp"] += _surprise(p, position.committed_id)
        if q is not None:
            self._sums["z_acc"] += _acceptance(p, q / q.sum(), position.accepted)

    def audit(self, *, effect: float = EFFECT) -> Audit:
        """Return the verdict.

        `effect`, between 0 and 1: a fault that changes the outcome at this share of positions must
        be detectable before the verdict is "sound". Raises InputError for another value.
        """
        if not 0 < effect < 1:
            raise InputError(f"effect must be between 0 and 1, such as {EFFECT}, got {effect}")
        panel = [_statistic(name, *sums.tolist()) for name, sums in self._sums.items()]
        if any(statistic.z is not None for statistic in panel):
            # Sample size for a share with the largest variance, 1/4 (Fleiss 1981, chapter 3).
            more = math.ceil(((LIMIT + POWER) / (2 * effect)) ** 2) - self.n
        else:
            more = 1 - self.exact
        # If an exact check failed, it explains the sums, too.
        far = [statistic.meaning for statistic in panel if statistic.far]
        causes = tuple([CAUSES[kind] for kind in self._flaws] or far)
        verdict = "wrong" if causes else "inconclusive" if more > 0 else "sound"
        counts = self.n, self.repeated, self.replayed, self.exact
        return Audit(verdict, causes, *counts, panel, self._flaws, max(0, more), effect)


# --- exact checks: what contradicts the rule without any statistics -------------------------------


def flaws(position: Position, p: np.ndarray, q: np.ndarray | None) -> Iterator[tuple[str, str]]:
    """Yield (kind, sentence) for what contradicts the rule, for logged or any random numbers."""
    x, y, u = position.draft_id, position.committed_id, position.resample_u
    kind, source, weights = "bonus", "p", p
    if q is not None:
        if q[x] == 0:
            yield "draft", f"token {x} was drafted, but q has no mass there"
        elif _misjudged(position, float(p[x]), float(q[x])):
            outcome = "accepted" if position.accepted else "rejected"
            drawn = "" if position.accept_u is None else f" with u = {position.accept_u:.6g}"
            yield "accept", f"a draft token with p/q = {p[x] / q[x]:.6g} was {outcome}{drawn}"
        if position.accepted:
            if y != x:
                yield "committed", f"draft token {x} was accepted, but token {y} was committed"
            return
        kind = "residual"
        source = "norm(max(p - q, 0))"
        weights = np.maximum(p - q, 0.0)
    if p[y] == 0:
        yield "committed", f"token {y} was committed, but p has no mass there"
    elif weights.sum() == 0:
        yield "accept", "a draft token was rejected where p and q are equal"
    elif q is not None and q[y] - p[y] > ROUNDING * p[y]:
        yield kind, f"token {y} was drawn after a rejection, where p = {p[y]:.3g} < q = {q[y]:.3g}"
    elif u is not None and not _picks(weights, u, y):
        yield kind, f"token {y} was drawn with u = {u:.6g}, where {source} gives another token"


def _misjudged(position: Position, p: float, q: float) -> bool:
    """Return whether accepting or rejecting a draft token contradicts its probabilities p and q."""
    if position.accept_u is None:
        return p == 0 if position.accepted else p >= q
    margin = position.accept_u * q - p
    return (margin < 0) != position.accepted and abs(margin) > ROUNDING * p


def _picks(weights: np.ndarray, u: float, y: int) -> bool:
    """Return whether `u` picks y from the cumulative weights, up to rounding."""
    edges = np.cumsum(weights)
    place = u * edges[-1]
    off = SUM_ROUNDING * edges[-1]
    return edges[y] - weights[y] - off <= place <= edges[y] + off


def _draft_row(position: Position) -> np.ndarray | None:
    """Return q: a point mass for a deterministic drafter, None where nothing was drafted."""
    if position.draft_id is None:
        return None
    if position.q_draft is None:
        return np.eye(1, len(position.p_target), position.draft_id)[0]
    return np.asarray(position.q_draft, np.float64)


# --- the two sums ---------------------------------------------------------------------------------


def _acceptance(p: np.ndarray, q: np.ndarray, accepted: bool) -> tuple[float, float]:
    """Return deviation and variance of an acceptance, given its probability 1 - TV(p, q)."""
    overlap = np.minimum(p, q).sum()
    if overlap >= 1 - CONSTANT:
        overlap = 1.0
    return accepted - overlap, overlap * (1 - overlap)


def _surprise(p: np.ndarray, y: int) -> tuple[float, float]:
    """Return deviation and variance of -log p(y), at most CLIP, given its mean under p."""
    values = np.minimum(-np.log(np.where(p > 0, p, 1.0)), CLIP)
    centered = np.where(p > 0, values - p @ values, 0.0)
    if p[y] == 0 or np.abs(centered).max() <= CONSTANT:
        return 0.0, 0.0
    return float(centered[y]), float(p @ centered**2)


def _statistic(name: str, total: float, variance: float) -> Statistic:
    """Return z, p-value and meaning of one sum."""
    if variance == 0:
        return Statistic(name)
    z = total / math.sqrt(variance + LARGEST[name] * abs(total) / 3)
    far = abs(z) > LIMIT
    p_value = min(1.0, 2 * math.exp(-(z**2) / 2))
    return Statistic(name, z, p_value, far, MEANING[name][z > 0] if far else "")
