"""What each part of heads is worth: the same text, steps and seed, one part changed at a time.

Quick on purpose: after some dozen steps the order of the variants shows, not what they reach in the end. What they
cost (parameters, bytes, milliseconds a draft) does not depend on the training.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any

import pandas as pd
from torch import Tensor, nn

from specnb.errors import InputError
from specnb.lm.base import LanguageModel
from specnb.measure.experiment import Progress, silent
from specnb.medusa.accuracy import network
from specnb.medusa.backbone import Backbone
from specnb.medusa.best_tree import drafting_s
from specnb.medusa.config import HeadsConfig
from specnb.medusa.heads import Heads, new_heads
from specnb.medusa.practice import practise
from specnb.medusa.recipe import Recipe

REPEATS = 15
"""Drafts behind a median."""


@dataclass(frozen=True)
class Variant:
    """One change: fields of `HeadsConfig`, all tokens instead of the draft vocabulary, or no norm at all.

    `trained` is False where heads are only costed.
    """

    name: str
    changed: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    all_tokens: bool = False
    norm: bool = True
    trained: bool = True


VARIANTS = (
    Variant("shared lm_head"),
    Variant("without the norm", norm=False),
    Variant("Hydra", MappingProxyType({"kind": "hydra"})),
    Variant("low rank", MappingProxyType({"lm_head": "low_rank", "rank": 32})),
    Variant("private lm_heads", MappingProxyType({"lm_head": "private"})),
    Variant("shared, all tokens", all_tokens=True),
    # weights, gradients and optimizer of such matrices are 1.8 GB for four heads on SmolLM2-135M
    Variant("private, all tokens", MappingProxyType({"lm_head": "private"}), all_tokens=True, trained=False),
)
"""The first is what the others differ from in one thing. Without the norm the blocks are fed the state in front of the
final norm as it is, which is what the Medusa note says it did."""


def run(
    target: LanguageModel,
    config: HeadsConfig,
    token_map: Tensor | None,
    recipe: Recipe,
    text: Path,
    *,
    variants: Sequence[Variant] = VARIANTS,
    progress: Progress = silent,
) -> pd.DataFrame:
    """Cost and train every variant of heads of `config` and `token_map` on the folder `text`; one row each.

    Columns: variant, kind, lm_head, draft_vocab, parameters, own_mb, shared_mb and read_mb (of 10^6 bytes; `read_mb`
    in one draft of all heads, in the target's type), draft_ms (median), steps, and lists by head of held-out top1 and
    top5, None for what was only costed. Variants of all tokens are left out where the first has them anyway. Raises
    InputError for no variants, and what training raises.
    """
    chosen = [v for v in variants if token_map is not None or not v.all_tokens]
    if not chosen:
        raise InputError("there is no variant to compare: give at least one that is not of all tokens only")
    backbone = Backbone.of(network(target))
    rows = []
    for done, variant in enumerate(chosen):
        progress(done, len(chosen), f"ablation: {variant.name}")
        heads = variant_heads(variant, config, token_map, backbone, recipe.seed)
        rows.append({"variant": variant.name, **_cost(target, heads), **_trained(variant, heads, recipe, text)})
    return pd.DataFrame(rows)


def variant_heads(
    variant: Variant, config: HeadsConfig, token_map: Tensor | None, backbone: Backbone, seed: int
) -> Heads:
    """Untrained heads of a variant."""
    token_map = None if variant.all_tokens else token_map
    n = 0 if token_map is None else len(token_map)
    made = HeadsConfig(**(config.model_dump() | {"draft_vocab": n} | dict(variant.changed)))
    if not variant.norm:
        # the state as it is: pre-norm heads whose norm does nothing
        backbone, made = replace(backbone, norm=nn.Identity()), made.model_copy(update={"input": "pre_norm"})
    return new_heads(made, backbone, token_map, seed)


def read_bytes(heads: Heads) -> int:
    """What drafting once with all heads reads: their own weights, and the shared lm_head once, for a Hydra once a head.

    A Medusa's features meet the shared lm_head in one product; those of a Hydra come one after the other.
    """
    cost = heads.cost()
    times = heads.config.n_heads if heads.config.kind == "hydra" else 1
    return cost["own_bytes"] + times * cost["shared_bytes"]


def _cost(target: LanguageModel, heads: Heads) -> dict[str, Any]:
    cost, config = heads.cost(), heads.config
    return {
        "kind": config.kind, "lm_head": config.lm_head, "draft_vocab": config.draft_size,
        "parameters": cost["parameters"], "own_mb": cost["own_bytes"] / 1e6, "shared_mb": cost["shared_bytes"] / 1e6,
        "read_mb": read_bytes(heads) / 1e6,
        "draft_ms": 1e3 * drafting_s(target, heads, config.n_heads, repeats=REPEATS),
    }  # fmt: skip


def _trained(variant: Variant, heads: Heads, recipe: Recipe, text: Path) -> dict[str, Any]:
    if not variant.trained:
        return {"steps": 0, "top1": None, "top5": None}
    with TemporaryDirectory(prefix="specnb-ablation-") as folder:
        last = practise(variant.name, heads, recipe, text, Path(folder)).log[-1]
    return {"steps": last["step"], "top1": last["top1"], "top5": last["top5"]}
