"""The drafter `auto`: routes between prompt lookup and other drafters by their measured costs."""

from collections.abc import Sequence

import numpy as np

from specnb.decode.costaware import break_even
from specnb.decode.router import Arm, Router
from specnb.draft.base import Drafter
from specnb.draft.load import load_drafter
from specnb.errors import InputError
from specnb.lm.base import LanguageModel
from specnb.measure.cost import Cost, verify_costs
from specnb.measure.policies import MOST

LOOKUP = "suffix"
"""The drafter that is always an arm."""
SHIPPED = ("jump", "hydra")
"""Trained drafters. If no drafter is named, the first one that fits the target is an arm."""


def auto_drafter(target: LanguageModel, *, arms: str = "") -> Router:
    """Measure the costs of `target` and its drafters (a second or two), and route between them.

    `arms` are comma-separated names of further drafters or draft models. By default, the first
    drafter of SHIPPED that fits the target is used, unless the acceptance rate on its card does not
    pay on this machine. Raises InputError for a drafter of trees, and what `load_drafter` raises.
    """
    # 1. Open the drafters.
    drafters = []
    for name in (LOOKUP, *(arms.split(",") if arms else SHIPPED)):
        try:
            drafters.append(load_drafter(name, target, strict=True).drafter)
        except InputError:
            if arms:
                raise  # otherwise, it is not shipped for this target
        if not arms and len(drafters) > 1:
            break
    if trees := [drafter.name for drafter in drafters if drafter.tree_nodes]:
        raise InputError(f"{', '.join(trees)} drafts trees, but the router takes chains")
    # 2. Measure costs; remove a shipped drafter that cannot pay.
    router = route_between(target, drafters)
    if arms or len(router.arms) == 1:
        return router
    arm = router.arms[1]
    expected = arm.drafter.expected
    if expected and not expected[0] > _needed(router, arm):
        arm.drafter.close()
        router = Router(router.arms[:1], router.verify_s)
        reason = (
            f"{arm.drafter.name} was not used: at the acceptance rate on its card, "
            f"{100 * expected[0]:.0f} %, it costs more than it saves here."
        )
        router.findings = (reason,)
    return router


def route_between(target: LanguageModel, drafters: Sequence[Drafter]) -> Router:
    """Measure the costs of up to MOST draft tokens, and return a router between `drafters`."""
    k_max = _widest(target, MOST)
    curve, c = verify_costs(target, drafters, k_max, quick=True)
    verify_s = [curve.seconds(n) for n in range(k_max + 2)]
    return Router([Arm(d, k_max, c[d.name] * verify_s[1]) for d in drafters], verify_s)


def _needed(router: Router, arm: Arm) -> float:
    """Return the acceptance rate above which an arm pays; NaN if there is none."""
    k = np.arange(1, arm.k_max + 1)
    round_s = router.verify_s[k + 1] + arm.draft_s * arm.draft_steps(k)
    return break_even(round_s / router.verify_s[1])


def measure_cost(target: LanguageModel, drafter: Drafter, most: int) -> Cost:
    """Measure the cost of rounds of up to `most` draft tokens, in a second or two."""
    k_max = _widest(target, min(most, drafter.n_heads or most))
    curve, c = verify_costs(target, [drafter], k_max, quick=True)
    return Cost(curve, c[drafter.name])


def _widest(target: LanguageModel, most: int) -> int:
    """Return the largest K, at most `most`, whose cost can be measured."""
    return max(1, min(most, target.caps.max_width - 1, target.caps.n_ctx // 2 - 1))
