"""What the sums of a panel can show: how far is far, and how small a fault so many positions make visible.

A fault of size e moves the mass e of each row from one side of the mean of what is summed to the other. The sum moves
by e * apart, and its variance with it, by at most e * |leaning|: a fault that moves mass to where single positions
weigh more makes the sum unsteadier as well, and without this less would be seen than is promised.
"""

import math
from statistics import NormalDist

from specnb.divergence.auditing.terms import Moments

POWER = 0.9
"""With which a fault of the size that is said to be visible is seen."""
SKEWED = 0.2
"""Sum of third absolute moments over the variance to the 3/2, up to which a sum is taken for normal.

Beyond, it is divided by the standard deviation that would have this value: of drafts that are nearly always kept one
rejection must not weigh a hundred of the tiny standard deviations that they have. Close below it one sum may be far by
chance twice as often as its share of the level says (kept drafts: 2.3 times at most); all together keep what they say.
"""


def divisor(sums: Moments) -> float:
    """Of the sum of deviations, for z."""
    return max(math.sqrt(sums.variance), _least(sums))


def detectable(sums: Moments, level: float) -> float:
    """The total variation, at most 1, that a two-sided test at `level` sees with POWER in what was summed."""
    beyond, blur = _quantiles(level)
    threshold, bend = beyond * divisor(sums), blur**2 * abs(sums.leaning)
    # e * apart = threshold + blur * sqrt(variance + e * |leaning|), squared and solved for e
    half = threshold * sums.apart + bend / 2
    root = math.sqrt(half**2 - sums.apart**2 * (threshold**2 - blur**2 * sums.variance))
    return min(1.0, (half + root) / sums.apart**2)


def needed(sums: Moments, n: int, effect: float, level: float) -> int:
    """Of how many positions such as these n `effect` is detectable."""
    beyond, blur = _quantiles(level)
    move, width = effect * sums.apart, blur * math.sqrt(sums.variance + effect * abs(sums.leaning))
    # what they show grows with their number, standard deviations with its root, the least divisor not at all
    roots = (
        (beyond * math.sqrt(sums.variance) + width) / move,
        (width + math.sqrt(width**2 + 4 * move * beyond * _least(sums))) / (2 * move),
    )
    return math.ceil(n * max(roots) ** 2)


def needed_exact(effect: float) -> int:
    """How many positions that are checked exactly it takes until a fault at the share `effect` of them is met."""
    return math.ceil(math.log(1 - POWER) / math.log1p(-effect))


def _least(sums: Moments) -> float:
    return sums.third / sums.variance / SKEWED


def _quantiles(level: float) -> tuple[float, float]:
    """In standard deviations: the two-sided threshold, and how far above it the mean must be for POWER."""
    return -NormalDist().inv_cdf(level / 2), NormalDist().inv_cdf(POWER)
