"""The drafter `auto`: copying, what was given, and the heads that are shipped, routed by what they cost here."""

from specnb.decode.router import EPS, Arm, Router
from specnb.draft.base import Drafter
from specnb.draft.load import load_drafter
from specnb.errors import InputError
from specnb.lm.base import LanguageModel
from specnb.measure.cost import verify_costs

COPIER, SHIPPED, MOST = "suffix", ("jump", "hydra"), 16
"""The drafter that is always an arm, those of which the first that fits is one where none is named, and the most
drafts of a round."""


def auto_drafter(target: LanguageModel, *, arms: str = "", eps: float = EPS) -> Router:
    """Measure what `target` and its drafters cost (a second or two), and route between them.

    `arms` are names of further drafters or draft models, with commas between; without it what is shipped for this
    target is taken. At most the share `eps` of plain decoding's time is lost. Raises as `load_drafter` does.
    """
    drafters: list[Drafter] = []
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
    k_max = max(1, min(MOST, target.caps.max_width - 1, target.caps.n_ctx // 2 - 1))
    curve, c = verify_costs(target, drafters, k_max, quick=True)
    verify_s = [curve.seconds(n) for n in range(k_max + 2)]
    arms_here = [Arm(d, min(k_max, d.n_heads or k_max), c[d.name] * verify_s[1]) for d in drafters]
    return Router(arms_here, verify_s, eps=eps)
