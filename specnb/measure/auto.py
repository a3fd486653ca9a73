"""The drafter `auto`: routes between prompt lookup and other drafters by their measured costs."""

from collections.abc import Sequence
from math import isnan
from typing import Any

import numpy as np

from specnb.decode.costaware import break_even
from specnb.decode.router import Arm, Router
from specnb.draft.base import Drafter
from specnb.draft.load import load_drafter
from specnb.errors import InputError
from specnb.lm.base import LanguageModel
from specnb.measure.cost import Cost, verify_costs
from specnb.measure.policies import MOST
from specnb.records import Generation

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


def _describe_break_even(acceptance: float, busy: bool) -> str:
    if busy or acceptance == 0:  # 0: passes over more tokens took less time, which is noise
        return "no break-even is given, because the machine was busy"
    if isnan(acceptance):
        return "no acceptance rate would pay here"
    return f"drafting pays from an acceptance rate of {100 * acceptance:.0f} %"


def measure_cost(target: LanguageModel, drafter: Drafter, most: int) -> Cost:
    """Measure the cost of rounds of up to `most` draft tokens, in a second or two."""
    k_max = _widest(target, min(most, drafter.n_heads or most))
    curve, c = verify_costs(target, [drafter], k_max, quick=True)
    return Cost(curve, c[drafter.name])


def _widest(target: LanguageModel, most: int) -> int:
    """Return the largest K, at most `most`, whose cost can be measured."""
    return max(1, min(most, target.caps.max_width - 1, target.caps.n_ctx // 2 - 1))


def judge_drafts(
    drafter: Drafter | None, generation: Generation, cost: Cost | None, *, busy: bool = False
) -> dict[str, Any]:
    """Return `what_paid`, and for a single drafter `alpha` and `break_even`, of a `PairSummary`.

    A router contains its costs; `cost` are those of any other drafter. The result is empty without
    costs. On a `busy` machine, `what_paid` states no break-even.
    """
    if isinstance(drafter, Router):
        step_s = drafter.verify_s[1]
        arms = [(a.drafter.name, a.draft_s / step_s, _needed(drafter, a)) for a in drafter.arms]
        rounds = drafter.choices
    elif drafter and cost:
        arms = [(drafter.name, cost.c, cost.break_even(k_max=cost.curve.widths[-1] - 1))]
        rounds = [(drafter.name, r.n_tested, r.n_accepted) for r in generation.rounds]
    else:
        return {}
    accounts = []
    for name, c, needed in arms:
        accepted = sum(n_accepted for arm, _, n_accepted in rounds if arm == name)
        tested = sum(min(n, n_accepted + 1) for arm, n, n_accepted in rounds if arm == name)
        alpha = accepted / tested if tested else None
        did = f"{accepted} of {tested} tested draft tokens were accepted" if tested else "no drafts"
        accounts.append(
            f"{name}: {did}; one draft step takes {c:.2f} plain decoding steps; "
            f"{_describe_break_even(needed, busy)}."
        )
    judged = {"what_paid": " ".join(accounts)}
    if len(arms) == 1:
        judged["alpha"] = alpha
        judged["break_even"] = None if isnan(needed) else needed
    return judged
