"""Heads against plain decoding in float32, token by token: chains and trees may be faster, and nothing else."""

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from specnb.decode.generate import generate
from specnb.errors import InputError
from specnb.lm.base import LanguageModel
from specnb.measure.experiment import Progress, silent
from specnb.medusa.drafter import HeadsDrafter
from specnb.medusa.heads import Heads
from specnb.medusa.tree import TreePlan
from specnb.prompts import Prompt
from specnb.records import Generation

CHAIN = "chain"


def identity(
    target: LanguageModel,
    drafting: Mapping[str, tuple[Heads, TreePlan | None]],
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: int,
    progress: Progress = silent,
) -> pd.DataFrame:
    """Decode every prompt plainly and with each of `drafting`, as a chain and, where it has a plan, as that tree.

    One row for each kind and shape: drafts a round, tokens compared and those that `differ`, prompts, tau. Raises
    InputError for no prompts, and a target whose texts rounding may change (one that is not float32).
    """
    if not prompts:
        raise InputError("there is no prompt to compare texts on: give at least one")
    if not target.caps.lossless_dtype:
        raise InputError(
            f"{target.name} computes in {target.caps.dtype}, where rounding may change a text: open it with "
            "dtype=float32"
        )
    ways = [
        (kind, heads, plan)
        for kind, (heads, tree) in drafting.items()
        for plan in (None, *([tree] if tree is not None and len(tree) else []))
    ]
    plain: list[Generation] = []
    made: list[list[Generation]] = [[] for _ in ways]
    settings = {"max_new_tokens": max_new_tokens}
    for done, prompt in enumerate(prompts):
        progress(done, len(prompts), f"{target.caps.dtype}: {prompt.id}")
        plain.append(generate(target, prompt, **settings))
        for of, (_, heads, plan) in zip(made, ways, strict=True):
            drafter = HeadsDrafter(target, heads, plan)
            of.append(generate(target, prompt, drafter=drafter, k=drafts(heads, plan), **settings))
    return pd.DataFrame([_row(way, of, plain) for way, of in zip(ways, made, strict=True)])


def drafts(heads: Heads, plan: TreePlan | None) -> int:
    """Drafted tokens a round."""
    return heads.config.n_heads if plan is None else len(plan)


def _row(way: tuple[str, Heads, TreePlan | None], made: list[Generation], plain: list[Generation]) -> dict[str, Any]:
    kind, heads, plan = way
    pairs = list(zip(made, plain, strict=True))
    return {
        "kind": kind, "shape": CHAIN if plan is None else "tree", "drafts": drafts(heads, plan), "prompts": len(plain),
        "tokens": sum(len(b.token_ids) for _, b in pairs), "differ": sum(differing(a, b) for a, b in pairs),
        "tau": sum(len(a.token_ids) for a in made) / sum(len(a.rounds) for a in made),
    }  # fmt: skip


def differing(one: Generation, other: Generation) -> int:
    """Places at which the two texts have different tokens, or only one has a token."""
    a, b = one.token_ids, other.token_ids
    return sum(x != y for x, y in zip(a, b, strict=False)) + abs(len(a) - len(b))
