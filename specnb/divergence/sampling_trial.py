"""The sampling audit tried out on a toy pair: sound decoding and each planted fault of sampling, a row each.

The faults: a row that is reported but not drawn from, a residual that is forgotten. They change no module, so that no
comparison of tensors can find them; `divergence.sampling` must. Both act on our own decoding while they are entered,
and nothing that a generation returns looks odd. They yield the cause that the audit must name.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial, wraps
from types import MappingProxyType
from typing import Any

import numpy as np
import pandas as pd

from specnb.decode import accept
from specnb.decode.accept import Acceptance, Rows
from specnb.decode.sampling import Chooser, Draws, argmax
from specnb.divergence.planting import replaced
from specnb.divergence.sampling import FROM_TARGET, MISREPORTED, NOT_DRAWN, Tally
from specnb.divergence.sampling.log import listened
from specnb.draft.base import Drafter, Picker, Proposal
from specnb.draft.model import ModelDrafter
from specnb.errors import InputError
from specnb.lm.base import LanguageModel
from specnb.lm.toy import ToyLM, markov
from specnb.measure.experiment import Progress, silent

TOKENS, K = 32, 4
SHARE = 0.5
"""What the draft's logits have of the target's; the rest are another model's."""


@contextmanager
def misreported_q(drafter: Drafter, *, top_k: int = 4, greedy: bool = False) -> Iterator[str]:
    """The drafter draws from its `top_k` likeliest tokens, or takes the likeliest (`greedy`), and reports the raw row.

    It has to draft by picking, as a draft model does, with a fixed K. InputError where the row would be the same:
    greedy decoding, or a top-k of the generation that leaves no more. (transformers#47932, vllm#40149)
    """
    propose = drafter.propose

    def misreporting(tokens: Sequence[int], k: int, rng: Picker) -> Proposal:
        return propose(tokens, k, _Misreporting(rng, 1 if greedy else top_k))

    with replaced(drafter, "propose", misreporting):
        yield NOT_DRAWN if greedy else MISREPORTED


@contextmanager
def resampled_from_target() -> Iterator[str]:
    """After a rejection the token is drawn from p instead of norm(max(p - q, 0)), by the rule "token", in this process.

    The acceptances stay what they were; the output leans to what the drafter likes.
    """
    with ExitStack() as planted:
        for name, place in (("token_verification", 3), ("point_mass", 2)):
            planted.enter_context(replaced(accept, name, _from_target(getattr(accept, name), place)))
        yield FROM_TARGET


class _Misreporting(Chooser):
    """Picks from fewer tokens than the row that it hands over."""

    def __init__(self, chooser: Chooser, top_k: int) -> None:
        super().__init__(chooser.sampling, chooser.draws)
        if chooser.sampling.greedy or 0 < chooser.sampling.top_k <= top_k:
            raise InputError(f"top_k {top_k} changes nothing of {chooser.sampling}: sample from more tokens")
        self._drawn = replace(chooser.sampling, top_k=top_k)

    def pick(self, logits: np.ndarray) -> tuple[int, np.ndarray]:
        reported = self.sampling.probabilities(logits)
        if self._drawn.top_k == 1:
            return argmax(logits), reported
        return self.draws.categorical(self._drawn.probabilities(logits)), reported


class _FromTarget(Draws):
    """Draws the extra token from the target's row wherever the tests end, whatever weights it is given."""

    def __init__(self, draws: Draws, p_target: Rows) -> None:
        self._draws, self._p_target, self._kept = draws, p_target, 0

    def uniform(self) -> float:
        return self._draws.uniform()

    def bernoulli(self, probability: float) -> bool:
        kept = super().bernoulli(probability)
        self._kept += kept
        return kept

    def categorical(self, weights: np.ndarray) -> int:
        return super().categorical(self._p_target[self._kept])


def _from_target(rule: Any, draws_at: int) -> Any:
    """The rule with faulty draws; `draws_at` is their place among its arguments, of which the first is p_target."""

    @wraps(rule)
    def faulty(p_target: Rows, *args: Any) -> Acceptance:
        rest = list(args)
        rest[draws_at - 1] = _FromTarget(rest[draws_at - 1], p_target)
        return rule(p_target, *rest)

    return faulty


PLANTED: Mapping[str, Callable[[Drafter], AbstractContextManager[object]]] = MappingProxyType(
    {
        "nothing": lambda drafter: nullcontext(),
        "top-k drafts, raw row reported": partial(misreported_q, top_k=8),
        "greedy drafts, raw row reported": partial(misreported_q, greedy=True),
        "resampled from p": lambda drafter: resampled_from_target(),
    }
)


def trial(*, prompts: int = 8, max_new_tokens: int = 200, seed: int = 0, progress: Progress = silent) -> pd.DataFrame:
    """For each of PLANTED: verdict, causes, positions that were tested, and the z values of the panel.

    The toys know `TOKENS` tokens and sample at temperature 1. Raises what `generate` raises.
    """
    rows = []
    for number, (name, plant) in enumerate(PLANTED.items()):
        progress(number, len(PLANTED), name)
        tally = Tally()
        for offset in range(prompts):
            target, draft = related(seed + offset)
            drafter = ModelDrafter(draft)
            with plant(drafter):
                listened(
                    target, [offset % TOKENS], drafter=drafter, hear=tally.add, temperature=1.0, k=K,
                    max_new_tokens=max_new_tokens, seed=seed + offset,
                )  # fmt: skip
        audit = tally.audit()
        z = {one.name: one.z for one in audit.panel}
        rows.append({"planted": name, "verdict": audit.verdict, "causes": ", ".join(audit.causes), "n": audit.n, **z})
    return pd.DataFrame(rows)


def related(seed: int, share: float = SHARE) -> tuple[LanguageModel, LanguageModel]:
    """A target, and a draft that knows `share` of its logits."""
    parts = markov(TOKENS, seed=seed), markov(TOKENS, seed=seed + 10_000)

    def guess(prefix: tuple[int, ...]) -> np.ndarray:
        known, other = (_next_logits(one, prefix) for one in parts)
        return share * known + (1 - share) * other

    return markov(TOKENS, seed=seed), ToyLM(guess, parts[0].vocab, name="draft")


def _next_logits(model: ToyLM, prefix: tuple[int, ...]) -> np.ndarray:
    model.reset()
    return model.forward(prefix)[-1]
