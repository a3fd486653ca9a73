"""The policies that choose K: those to replay, and those of `specnb generate --controller`."""

from collections.abc import Callable
from typing import NamedTuple

from specnb.decode.content import ContentK
from specnb.decode.control import ConfidenceStop, Controller, FixedK, RollingAcceptance
from specnb.decode.costaware import CostAware
from specnb.measure.cost import Cost

FIXED, AUTO = "fixed K", "auto"
"""Names of two policies: the same K in every round, and the router."""
MOST = 16
"""Largest K of routers, and of controllers if `k` is not given."""


class Policy(NamedTuple):
    """A way to choose K. `make(cost, k_max)` returns a new controller.

    `option` is the name for `--controller`; "" if there is none. `depends` names what its rounds
    depend on, other than the recording: "k" (largest K) and "machine" (costs). `reads_beliefs`
    tells whether it needs the drafter's probabilities.
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
    "cost-aware": Policy(
        lambda cost, k: CostAware(cost.ratios(k), cost.c), "cost-aware", ("machine",)
    ),
}
CONTROLLERS = {policy.option: policy.make for policy in POLICIES.values() if policy.option}
"""Functions that make a controller, by option."""
