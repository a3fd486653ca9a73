"""Is what was sampled what the rows say? The sampling audit, from logged positions of drafts, with numpy alone.

A draft x is drawn from the row q, kept with min(1, p(x)/q(x)), and where it is rejected the token is drawn from
norm(max(p - q, 0)) (Leviathan et al. 2211.17192). Then x follows q, the share of kept drafts is 1 - TV(p, q), and the
committed token y follows p, each given the prefix. The panel pools how far five sums are from what the rows promise, in
standard deviations: for a sound sampler each has mean 0 and standard deviation 1.

z_acc     kept drafts, against the sum of 1 - TV(p, q)
z_draft   -log q(x), against the entropy of q
z_surp    -log p(y), against the entropy of p
z_dir     log(p/q)(y), against its mean under p
z_order   mass of p below y in the order of ids, and half of y's own, against 1/2

None sees everything: a draw from p in place of the residual leaves z_acc and z_draft as they are, and only z_order sees
which of two equally likely tokens is taken. What needs no statistics is checked exactly beside them; at greedy
positions, where nothing varies, that is all.
"""

import math
from collections.abc import Hashable, Iterator
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np

from specnb.errors import InputError

EXIT_CODES = {"sound": 0, "wrong": 1, "inconclusive": 125}
MISREPORTED = "q misreported"
NOT_DRAWN = "draft not drawn from q"
FROM_TARGET = "resampled from p instead of the residual"
BONUS = "the token behind the last draft not drawn from p"
OTHER = "something else"

ALPHA = 1e-3
"""Chance of calling a sound sampler wrong, over all statistics together (Holm 1979)."""
EFFECT = 0.1
"""Total variation by which the law of what was drawn may differ, and which must have been seen (see `Statistic`)."""
POWER = 0.9
"""With which a fault of the size that is said to be visible is seen."""
SKEWED = 0.2
"""Sum of third absolute moments over the variance to the 3/2, up to which a sum is taken for normal. Beyond, it is
divided by the standard deviation that would have this value: one rejection of nearly certain drafts is no proof."""
BY_CHANCE = 1e-6
"""Chance below which drafts that all are the likeliest token of their row were not drawn from it."""
CLIP = 4.0
"""Largest |log(p/q)| that is summed: behind top-k q is 0 where p is not. Any function of p and q has mean 0 under p."""
SAME = 1e-9
"""Values, or p and q, that differ by no more do not vary: rounding would be all that is summed."""
ROUNDING = 1e-6
"""What rows that were computed in float32 may be off by, relative, whatever they are kept in."""
SUM_ROUNDING = 1e-3
"""By how much the sum of a row may miss 1, and cumulated weights their place: float32, summed over a vocabulary."""

CAUSE_OF_FLAW = {"accept": OTHER, "committed": OTHER, "resample": OTHER, "draft": NOT_DRAWN, "residual": FROM_TARGET,
                 "bonus": BONUS}  # fmt: skip
"""The kinds of flaws that the exact checks find."""
MEANING = {
    "z_acc": (
        "fewer drafts are kept than the rows allow: the drafts have another law than q, or good ones are rejected",
        "more drafts are kept than the rows allow: the drafts have another law than q, and the output another than p",
    ),
    "z_draft": (
        "drafts are likelier than q says: drawn after top-k, or greedily, and reported as a row before that",
        "drafts are less likely than q says: the row that is reported is sharper than what was drawn from",
    ),
    "z_surp": (
        "committed tokens are likelier than p says: the output is sharper than the target",
        "committed tokens are less likely than p says: the output is flatter than the target",
    ),
    "z_dir": (
        "committed tokens lean to where q is above p: after a rejection p is drawn from, not the residual",
        "committed tokens lean to where p is above q: more than the residual makes up for what was kept",
    ),
    "z_order": (
        "committed tokens have lower ids than p says: of tokens that are about as likely the first is taken",
        "committed tokens have higher ids than p says: of tokens that are about as likely the last is taken",
    ),
}
"""What a large |z| means: below 0, above 0."""
STATISTICS = tuple(MEANING)


class Position(NamedTuple):
    """One drafted token and what became of it.

    `p_target (vocab,)` and `q_draft (vocab,)` are the rows after temperature, top-k and top-p, of float32 or better:
    the target's, and the drafter's, None for a deterministic one (a point mass). `committed_id` is the token that got
    this place: the draft, or what was drawn instead. `draft_id` None: nothing was drafted for this place; it is drawn
    from p. `accept_u` from [0, 1) is the number that decided by u < p(x)/q(x), `resample_u` the one that picked the
    committed token from the cumulated residual; None where unknown. `prefix` identifies the tokens before this place:
    of positions with the same one the first counts.
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
    """The findings of an exact check: their count, the number of the first position in the log, and a sentence."""

    count: int
    position: int
    says: str


class Statistic(NamedTuple):
    """One of the panel. `z` and the two-sided `p_value` are None where nothing varied; `far`: beyond chance.

    `detectable` is the total variation that would have been seen with POWER: for z_acc a change of the share of kept
    drafts, for the others mass of each row moved from one side of the mean to the other. `needed` positions would show
    `effect`.
    """

    name: str
    n: int
    z: float | None
    p_value: float | None
    far: bool
    detectable: float | None
    needed: int
    meaning: str


class Audit(NamedTuple):
    """The verdict about a log. `causes` are empty unless it is wrong; `more` positions are missing for a verdict.

    Of n positions `replayed` are those whose decision was repeated with its random number, `exact` those whose
    token was checked without statistics; `repeated` prefixes are not among them.
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
        """The verdict in a sentence."""
        if self.verdict == "wrong":
            return f"wrong: {' and '.join(self.causes)}, of {self.n} positions"
        variation = f"a total variation of {self.effect:g}"
        if self.verdict == "inconclusive":
            return f"inconclusive: nothing is wrong in {self.n} positions; {variation} takes about {self.more} more"
        varied = any(statistic.z is not None for statistic in self.panel)
        return f"sound: {self.n} positions, {f'{variation} would have been seen' if varied else 'all of them exact'}"

    def document(self) -> dict[str, Any]:
        """For JSON."""
        return self._asdict() | {
            "panel": [statistic._asdict() for statistic in self.panel],
            "flaws": {kind: flaw._asdict() for kind, flaw in self.flaws.items()},
            "exit_code": self.exit_code, "line": self.line,
        }  # fmt: skip


class SamplingTally:
    """Positions one by one, of which only sums are kept: rows of a large vocabulary need not be held."""

    def __init__(self) -> None:
        self.n = self.repeated = self.replayed = self.exact = 0
        self._sums = np.zeros((len(STATISTICS), len(Moments._fields)))
        self._flaws: dict[str, Flaw] = {}
        self._likeliest_log_chance = 0.0
        """Log of the chance that each draft is the likeliest token of its row; infinite where one is not."""
        self._visited = set()

    def add(self, position: Position) -> None:
        """Count one more; of a prefix the first visit only."""
        visit = hash(position.prefix)
        if position.prefix is not None and visit in self._visited:
            self.repeated += 1
            return
        self._visited.add(visit)
        p, x, y = np.asarray(position.p_target, np.float64), position.draft_id, position.committed_id
        q = None
        if x is not None:  # that of a deterministic drafter is a point mass
            q = np.asarray(np.eye(1, len(p), x)[0] if position.q_draft is None else position.q_draft, np.float64)
        for kind, says in flaws(position, p, q):
            flaw = self._flaws.get(kind, Flaw(0, self.n + self.repeated, says))
            self._flaws[kind] = flaw._replace(count=flaw.count + 1)
        self.n += 1
        p = p / p.sum()
        picked = position.resample_u is not None
        replayed = picked if q is None else position.accept_u is not None
        self.replayed += replayed
        self.exact += bool(np.count_nonzero(p) == 1 or (replayed and (position.accepted or picked)))
        acceptance = draft = direction = NOTHING  # of a token that was drawn from p nothing else can be judged
        if q is not None:
            q = q / q.sum()
            top = q.max()
            likeliest = top * np.count_nonzero(q == top)
            self._likeliest_log_chance += math.log(min(1.0, likeliest)) if q[x] == top else math.inf
            acceptance, draft, direction = _kept(p, q, position.accepted), _surprise(q, x), _direction(p, q, y)
        self._sums += [acceptance, draft, _surprise(p, y), direction, _order(p, y)]

    def audit(self, *, effect: float = EFFECT) -> Audit:
        """The verdict; `effect`, a share or InputError, is the total variation that must be seen for "sound"."""
        if not 0 < effect < 1:
            raise InputError(f"effect must be between 0 and 1, such as {EFFECT}, got {effect}")
        panel = _panel(self._sums, self.n, effect)
        # where nothing varied only those positions count that are exact, until a fault at the share `effect` is met
        if any(statistic.z is not None for statistic in panel):
            more = max(0, max(statistic.needed for statistic in panel) - self.n)
        else:
            more = max(0, math.ceil(math.log(1 - POWER) / math.log1p(-effect)) - self.exact)
        causes = self._causes({statistic.name: statistic.z for statistic in panel if statistic.far})
        verdict = "wrong" if causes else "inconclusive" if more else "sound"
        return Audit(
            verdict, causes, self.n, self.repeated, self.replayed, self.exact, panel, self._flaws, more, effect
        )

    def _causes(self, far: dict[str, float]) -> tuple[str, ...]:
        """Name what the exact checks found, and the statistics that are far for another reason.

        Drafts of another law shift all that follows from them, a wrong rule all but the drafts.
        """
        causes = [CAUSE_OF_FLAW[kind] for kind in self._flaws]
        if "z_draft" in far and NOT_DRAWN not in causes:
            greedy = self._likeliest_log_chance <= math.log(BY_CHANCE)
            causes.append(NOT_DRAWN if greedy else MISREPORTED)
        elif "z_acc" in far and not {"accept", "draft"} & self._flaws.keys():
            # where each decision was replayed the rule is right, so what it was given must be wrong
            drawn = self._sums[STATISTICS.index("z_draft"), 1] > 0
            causes.append(MISREPORTED if drawn and self.replayed == self.n else OTHER)
        elif far and not causes:
            causes.append(FROM_TARGET if far.get("z_dir", 0.0) < 0 else OTHER)
        return tuple(dict.fromkeys(causes))


# --- what one position must be, and what contradicts the rule without any statistics ----------------------------------


def flaws(position: Position, p: np.ndarray, q: np.ndarray | None) -> Iterator[tuple[str, str]]:
    """Yield contradictions to the rule, for any random numbers or for those that were logged: (kind, sentence)."""
    _, _, x, accepted, y, accept_u, u, _ = position
    if q is None:
        if p[y] == 0:
            yield "committed", f"token {y} was committed where nothing was drafted, but p has no mass there"
        elif u is not None and not _picks(p, u, y):
            yield "bonus", f"token {y} was drawn with u = {u:.6g} behind the last draft, where p gives another"
        return
    if accept_u is None:  # only what is certain can be judged
        wrong, drawn = p[x] == 0 if accepted else p[x] >= q[x], ""
    else:
        off, drawn = accept_u * q[x] - p[x], f" with u = {accept_u:.6g}"
        wrong = (off < 0) != accepted and abs(off) > ROUNDING * p[x]
    if q[x] == 0:
        yield "draft", f"token {x} was drafted, but q has no mass there"
    elif wrong:
        yield "accept", f"a draft with p/q = {p[x] / q[x]:.6g} was {'kept' if accepted else 'rejected'}{drawn}"
    residual = np.maximum(p - q, 0.0)
    if accepted and y != x:
        yield "committed", f"draft {x} was kept, but token {y} was committed"
    elif p[y] == 0:
        yield "committed", f"token {y} was committed, but p has no mass there"
    elif accepted:
        return
    elif residual.sum() == 0:
        yield "accept", "a draft was rejected where p and q are the same, so that nothing is left to draw from"
    elif q[y] - p[y] > ROUNDING * p[y]:
        yield "residual", f"after a rejection token {y} was drawn, where p = {p[y]:.3g} is below q = {q[y]:.3g}"
    elif u is not None and not _picks(residual, u, y):
        from_target = _picks(p, u, y, edge=0.0)
        kind, row = ("residual", "p gives it") if from_target else ("resample", "norm(max(p - q, 0)) gives another")
        yield kind, f"token {y} was drawn with u = {u:.6g} after a rejection, where {row}"


def _picks(weights: np.ndarray, u: float, y: int, edge: float = SUM_ROUNDING) -> bool:
    """Tell whether `u` picks y from the cumulated weights, which may be off by `edge` as a share of their sum."""
    edges = np.cumsum(weights)
    at, off = u * edges[-1], edge * edges[-1]
    return edges[y] - weights[y] - off <= at <= edges[y] + off


# --- what one position adds to the sums -------------------------------------------------------------------------------


class Moments(NamedTuple):
    """The share of a position, or of all of them together, in one statistic: each of these adds up.

    `deviation` of what was seen from its mean; `apart`, between the means of the two sides of the mean; the `third`
    absolute moment; `leaning`, by how much the mean square deviation is larger above the mean than below.
    """

    deviation: float
    variance: float
    apart: float
    third: float
    leaning: float


NOTHING = Moments(0.0, 0.0, 0.0, 0.0, 0.0)
"""Of what does not vary."""


def _kept(p: np.ndarray, q: np.ndarray, accepted: bool) -> Moments:
    """Compare the kept draft with 1 - TV(p, q). All of a total variation may go into the share of kept ones."""
    overlap = np.minimum(p, q).sum()
    if overlap >= 1 - SAME:  # p and q are the same, and how their sum is rounded is no chance of a rejection
        overlap = 1.0
    if overlap in (0, 1):  # what cannot be is a flaw, and stays in the sum
        return NOTHING._replace(deviation=accepted - overlap)
    return _about(np.array([0.0, 1.0]), np.array([1 - overlap, overlap]), int(accepted))


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
    above, below = law[centred > 0].sum(), law[centred <= 0].sum()
    if size[law > 0].max() <= SAME or above == 0 or below == 0:
        return NOTHING
    # each side by itself: of a sharp row one has 1e-30, and the rounding of a difference is far more
    apart = law @ up / above + law @ down / below
    leaning = law @ up**2 / above - law @ down**2 / below
    return Moments(centred[seen], law @ size**2, apart, law @ size**3, leaning)


# --- what the sums can show: how far is far, and how small a fault so many positions make visible ---------------------
# A fault of size e moves the mass e of each row from one side of the mean to the other: the sum by e * apart, and its
# variance by at most e * |leaning|.


def _panel(sums: np.ndarray, n: int, effect: float) -> list[Statistic]:
    """From sums over n positions. What is detectable is so at the strictest level that Holm asks for."""
    panel, varied = {name: Statistic(name, n, None, None, False, None, 0, "") for name in STATISTICS}, []
    for name, row in zip(STATISTICS, sums, strict=True):
        moments = Moments(*row)
        if moments.variance > 0:
            z, visible = moments.deviation / divisor(moments), detectable(moments)
            # what positions show grows with their number, standard deviations with its root
            needed, p_value = math.ceil(n * (visible / effect) ** 2), math.erfc(abs(z) / math.sqrt(2))
            panel[name] = Statistic(name, n, z, p_value, False, min(1.0, visible), needed, "")
            varied.append((p_value, name))
    for behind, (p_value, name) in enumerate(sorted(varied)):
        if p_value > ALPHA / (len(varied) - behind):
            break
        panel[name] = panel[name]._replace(far=True, meaning=MEANING[name][int(panel[name].z > 0)])
    return [*panel.values()]


def divisor(sums: Moments) -> float:
    """Return the divisor of the sum of deviations, for z."""
    return max(math.sqrt(sums.variance), sums.third / sums.variance / SKEWED)


def detectable(sums: Moments) -> float:
    """The total variation that a two-sided test at Holm's strictest level sees with POWER in what was summed."""
    # in standard deviations: the threshold, and how far above it the mean must be
    beyond, blur = -NormalDist().inv_cdf(ALPHA / len(STATISTICS) / 2), NormalDist().inv_cdf(POWER)
    threshold, bend = beyond * divisor(sums), blur**2 * abs(sums.leaning)
    # e * apart = threshold + blur * sqrt(variance + e * |leaning|), squared and solved for e
    half = threshold * sums.apart + bend / 2
    root = math.sqrt(half**2 - sums.apart**2 * (threshold**2 - blur**2 * sums.variance))
    return (half + root) / sums.apart**2
