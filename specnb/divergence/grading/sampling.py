"""The sampling audit tried out: sound decoding and each planted fault of sampling, on a toy pair, a row each."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
import pandas as pd

from specnb.divergence.auditing.log import listened
from specnb.divergence.planted.sampling import misreported_q, resampled_from_target
from specnb.divergence.sampling import Audit, Tally
from specnb.draft.base import Drafter
from specnb.draft.model import ModelDrafter
from specnb.lm.base import LanguageModel
from specnb.lm.toy import ToyLM, markov
from specnb.measure.experiment import Progress, silent

TOKENS, K = 32, 4
SHARE = 0.5
"""What the draft's logits have of the target's; the rest are another model's."""


class Plant(Protocol):
    """What makes a fault for a drafter."""

    def __call__(self, drafter: Drafter) -> AbstractContextManager[object]: ...


PLANTED: Mapping[str, Plant] = MappingProxyType(
    {
        "nothing": lambda drafter: nullcontext(),
        "top-k drafts, raw row reported": partial(misreported_q, top_k=8),
        "greedy drafts, raw row reported": partial(misreported_q, greedy=True),
        "resampled from p": lambda drafter: resampled_from_target(),
    }
)
"""Faults 13 and 14 of the lab, and sampling without a fault."""


def tried(*, prompts: int = 8, max_new_tokens: int = 200, seed: int = 0, progress: Progress = silent) -> pd.DataFrame:
    """For each of PLANTED: verdict, causes, positions that were tested, and the z values of the panel.

    The toys know `TOKENS` tokens and sample at temperature 1. Raises what `generate` raises.
    """
    rows = []
    for number, (name, plant) in enumerate(PLANTED.items()):
        progress(number, len(PLANTED), name)
        found = _audited(plant, prompts, max_new_tokens, seed)
        rows.append(_row(name, found))
    return pd.DataFrame(rows)


def _audited(plant: Plant, prompts: int, max_new_tokens: int, seed: int) -> Audit:
    tally = Tally()
    for number in range(prompts):
        target, draft = related(seed + number)
        drafter = ModelDrafter(draft)
        with plant(drafter):
            listened(
                target, [number % TOKENS], drafter=drafter, hear=tally.add, temperature=1.0, k=K,
                max_new_tokens=max_new_tokens, seed=seed + number,
            )  # fmt: skip
    return tally.audit()


def related(seed: int) -> tuple[LanguageModel, LanguageModel]:
    """A target, and a draft that knows SHARE of its logits."""
    parts = markov(TOKENS, seed=seed), markov(TOKENS, seed=seed + 10_000)

    def guess(prefix: tuple[int, ...]) -> np.ndarray:
        known, other = (_next_logits(one, prefix) for one in parts)
        return SHARE * known + (1 - SHARE) * other

    return markov(TOKENS, seed=seed), ToyLM(guess, parts[0].vocab, name="draft")


def _next_logits(model: ToyLM, prefix: tuple[int, ...]) -> np.ndarray:
    model.reset()
    return model.forward(prefix)[-1]


def _row(name: str, found: Audit) -> dict[str, Any]:
    z = {one.name: one.z for one in found.panel}
    return {"planted": name, "verdict": found.verdict, "causes": ", ".join(found.causes), "n": found.n, **z}
