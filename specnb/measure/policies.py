"""Which draft length: every policy that is replayed, and that `specnb generate --controller` takes, in one table."""

from collections.abc import Callable
from typing import NamedTuple

from specnb.decode.control import ConfidenceStop, Controller, FixedK, RollingAcceptance
from specnb.decode.costaware import CostAware
from specnb.measure.content import ContentK
from specnb.measure.cost import Cost

FIXED, AUTO = "fixed K", "auto"
"""Two names of the explorer: every round the same K; and the router, between a drafter and plain decoding."""
MOST = 16
"""The most drafts of a round of the router, and where K is chosen."""


class Policy(NamedTuple):
    """`make` a fresh controller from what rounds cost and the most drafts; `option` names it for `specnb generate`.

    `depends` says what changes its rounds, beside what is replayed: k, the most drafts, and machine, the costs.
    """

    make: Callable[[Cost, int], Controller]
    option: str = ""
    depends: tuple[str, ...] = ()
    reads_beliefs: bool = False


POLICIES = {
    FIXED: Policy(lambda _cost, k: FixedK(k), depends=("k",)),
    "rolling acceptance": Policy(lambda _cost, _k: RollingAcceptance(), "rolling"),
    "content K": Policy(lambda _cost, _k: ContentK(), "content"),
    "confidence": Policy(lambda _cost, k: ConfidenceStop(k, 0.5), "confidence", ("k",), True),
    "cost-aware": Policy(lambda cost, k: CostAware(cost.ratios(k), cost.c), "cost-aware", ("machine",)),
}
CONTROLLERS = {policy.option: policy.make for policy in POLICIES.values() if policy.option}
"""Those that choose K round by round, by option."""
