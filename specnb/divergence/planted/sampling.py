"""Planted faults of sampling: a row that is reported but not drawn from, a residual that is forgotten.

They change no module, so that no comparison of tensors can find them; `divergence.sampling` must. Both act on our own
decoding while they are entered, and nothing that a generation returns looks odd.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import wraps
from typing import Any

import numpy as np

from specnb.decode import accept
from specnb.decode.accept import Acceptance, Rows
from specnb.decode.sampling import Chooser, Draws, argmax
from specnb.divergence.planted.fault import ALL, Fault, replaced
from specnb.divergence.sampling import FROM_TARGET, MISREPORTED, NOT_DRAWN
from specnb.draft.base import Drafter, Picker, Proposal
from specnb.errors import InputError


@contextmanager
def misreported_q(drafter: Drafter, *, top_k: int = 4, greedy: bool = False) -> Iterator[Fault]:
    """The drafter draws from its `top_k` likeliest tokens, or takes the likeliest (`greedy`), and reports the raw row.

    It has to draft by picking, as a draft model does, and without a controller that reads drafts. InputError where the
    row would be the same: greedy decoding, or a top-k of the generation that leaves no more.
    """
    if top_k < 1:
        raise InputError(f"top_k is {top_k}: at least 1 token is left to draw from")
    how = "the likeliest token is taken" if greedy else f"drafts are drawn from the {top_k} likeliest tokens"
    issues = ("transformers#47932", "transformers#32867", "vllm#40149")
    cause = NOT_DRAWN if greedy else MISREPORTED
    propose = drafter.propose

    def lying(tokens: Sequence[int], k: int, rng: Picker) -> Proposal:
        if not isinstance(rng, Chooser):
            raise InputError("a controller that reads drafts picks for the drafter: plant the fault with a fixed K")
        return propose(tokens, k, _Misreporting(rng, 1 if greedy else top_k))

    with replaced(drafter, "propose", lying):
        yield Fault(cause, None, ALL, f"{how}, the row before that is reported", issues)


@contextmanager
def resampled_from_target() -> Iterator[Fault]:
    """After a rejection the token is drawn from p instead of norm(max(p - q, 0)), by the rule "token", in this process.

    The acceptances stay what they were; the output leans to what the drafter likes.
    """
    note = "after a rejection the token is drawn from p"
    with ExitStack() as planted:
        for name, place in (("token_verification", 3), ("point_mass", 2)):
            planted.enter_context(replaced(accept, name, _from_target(getattr(accept, name), place)))
        yield Fault(FROM_TARGET, None, ALL, note)


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
