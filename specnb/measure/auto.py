"""The drafter `auto`: prompt lookup, drafters that are asked for, and shipped heads, routed by their costs here."""

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

COPIER, SHIPPED = "suffix", ("jump", "hydra")
"""The drafter that is always an arm, and those of which the first that fits is one where none is named."""


def auto_drafter(target: LanguageModel, *, arms: str = "") -> Router:
    """Measure what `target` and its drafters cost (a second or two), and route between them.

    `arms` are names of further drafters or draft models, with commas between; without it the first of SHIPPED is taken
    that fits the target, and keeps enough by its card to pay here. Raises as `load_drafter` does.
    """
    drafters = []
    for name in (COPIER, *(arms.split(",") if arms else SHIPPED)):
        try:
            drafters.append(load_drafter(name, target, strict=True).drafter)
        except InputError:
            if arms:
                raise  # else it is not shipped for this target
        if not arms and len(drafters) > 1:
            break
    if trees := [drafter.name for drafter in drafters if drafter.tree_nodes]:
        raise InputError(f"{', '.join(trees)} drafts trees: the router takes chains")
    router = route_between(target, drafters)
    for arm in router.arms[1:] if not arms else ():
        of_card, needed = arm.drafter.expected, _needed(router, arm)
        if of_card and not of_card[0] > needed:
            arm.drafter.close()
            router = Router(router.arms[:1], router.verify_s)
            rate = f"the acceptance rate on its card, {100 * of_card[0]:.0f} %"
            router.findings = (f"{arm.drafter.name} was not used: at {rate}, it costs more than it saves here.",)
    return router


def route_between(target: LanguageModel, drafters: Sequence[Drafter]) -> Router:
    """Measure what rounds of up to MOST drafts cost, and return a router between opened `drafters`."""
    k_max = _widest(target, MOST)
    curve, c = verify_costs(target, drafters, k_max, quick=True)
    verify_s = [curve.seconds(n) for n in range(k_max + 2)]
    return Router([Arm(d, k_max, c[d.name] * verify_s[1]) for d in drafters], verify_s)


def _needed(router: Router, arm: Arm) -> float:
    """The acceptance from which on an arm pays; NaN for never."""
    k = np.arange(1, arm.k_max + 1)
    return break_even((router.verify_s[k + 1] + arm.draft_s * arm.draft_steps(k)) / router.verify_s[1])


def _say_needed(acceptance: float, busy: bool) -> str:
    if busy or acceptance == 0:  # 0: passes over more tokens took less time
        return "no break-even is given, because the machine was busy"
    if isnan(acceptance):
        return "no acceptance rate would pay here"
    return f"drafting pays from an acceptance rate of {100 * acceptance:.0f} %"


def measure_cost(target: LanguageModel, drafter: Drafter, most: int) -> Cost:
    """Measure the cost of rounds of up to `most` draft tokens, in a second or two."""
    curve, c = verify_costs(target, [drafter], _widest(target, min(most, drafter.n_heads or most)), quick=True)
    return Cost(curve, c[drafter.name])


def _widest(target: LanguageModel, most: int) -> int:
    """Return the longest draft, up to `most`, whose cost can be measured."""
    return max(1, min(most, target.caps.max_width - 1, target.caps.n_ctx // 2 - 1))


def judge_drafts(
    drafter: Drafter | None, generation: Generation, cost: Cost | None, *, busy: bool = False
) -> dict[str, Any]:
    """Return `alpha`, `break_even` and `what_paid` of a summary, for chains whose costs were measured.

    A router knows its costs, of any other drafter `cost` gives them. On a `busy` machine the text has no break-even.
    """
    if isinstance(drafter, Router):
        arms = [(arm.drafter.name, arm.draft_s / drafter.verify_s[1], _needed(drafter, arm)) for arm in drafter.arms]
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
        step = f"one draft step takes {c:.2f} plain decoding steps"
        accounts.append(f"{name}: {did}; {step}; {_say_needed(needed, busy)}.")
    judged = {"what_paid": " ".join(accounts)}
    return judged if len(arms) > 1 else judged | {"alpha": alpha, "break_even": None if isnan(needed) else needed}
