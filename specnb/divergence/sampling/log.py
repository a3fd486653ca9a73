"""Positions for the sampling audit, from our own decoding: the rule "token", listened to.

The rule runs as it would have run, with the same random numbers in the same order; they are noted as they are drawn.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from specnb.decode.accept import Acceptance, rule_of
from specnb.decode.generate import PromptLike, generate, prompt_ids
from specnb.decode.sampling import Chooser, Draws
from specnb.divergence.sampling.terms import Position
from specnb.draft.base import Drafter, Proposal
from specnb.errors import InputError
from specnb.lm.base import LanguageModel
from specnb.records import Generation


def listened(
    target: LanguageModel,
    prompt: PromptLike,
    *,
    drafter: Drafter | LanguageModel,
    hear: Callable[[Position], object],
    rule: str = "token",
    **options: Any,
) -> Generation:
    """`decode.generate` with these options, bit for bit; `hear` gets each position that was put to the test.

    Of a long log keep what is needed, not the rows: `sampling.Tally().add` does. Raises what `Listener` raises, and
    InputError for a rule that does not decide by position: any but "token", and at temperature 0 "block".
    """
    if rule != "token" and (rule != "block" or options.get("temperature")):
        raise InputError(f"the rule {rule!r} does not test draft by draft: only the rule 'token' is audited")
    ids = prompt_ids(target, prompt)
    return generate(target, ids, drafter=drafter, rule=Listener(ids, hear), **options)


class Listener:
    """The rule "token" (`generate(..., rule=…)`) for one generation that begins with `prompt_ids`, listened to.

    Raises InputError for drafters of trees.
    """

    __name__ = "token"

    def __init__(self, prompt_ids: Sequence[int], hear: Callable[[Position], object]) -> None:
        self._tokens = list(prompt_ids)
        self._hear = hear

    def __call__(self, logits: np.ndarray, proposal: Proposal, chooser: Chooser) -> Acceptance:
        if proposal.tree is not None:
            raise InputError("a tree of drafts is verified as one: draft a chain (tree=chain) to audit sampling")
        noted = _Noted(chooser.draws)
        rule = rule_of(replace(chooser.sampling, rule="token"))
        verdict = rule(logits, proposal, Chooser(chooser.sampling, noted))
        self._round(logits, proposal, chooser, verdict, noted.uniforms)
        return verdict

    def _round(
        self, logits: np.ndarray, proposal: Proposal, chooser: Chooser, verdict: Acceptance, uniforms: list[float]
    ) -> None:
        kept = verdict.n_accepted
        tested = proposal.ids[: kept + 1]
        # one number for each test, one for the extra token; greedy rounds draw none
        drawn: list[float | None] = uniforms if uniforms else [None] * (len(tested) + 1)
        committed = (*proposal.ids[:kept], verdict.next_id)
        for at, draft in enumerate(tested):
            self._hear(
                Position(
                    p_target=chooser.sampling.probabilities(logits[at]),
                    q_draft=None if proposal.q_draft is None else proposal.q_draft[at],
                    draft_id=draft,
                    accepted=at < kept,
                    committed_id=committed[at],
                    accept_u=drawn[at],
                    resample_u=None if at < kept else drawn[-1],
                    prefix=tuple(self._tokens),
                )
            )
            self._tokens.append(committed[at])
        if len(committed) > len(tested):  # every draft was kept, and one more token is drawn from the target's row
            self._hear(
                Position(
                    p_target=chooser.sampling.probabilities(logits[len(tested)]),
                    q_draft=None,
                    draft_id=None,
                    accepted=False,
                    committed_id=committed[-1],
                    resample_u=drawn[-1],
                    prefix=tuple(self._tokens),
                )
            )
            self._tokens.append(committed[-1])


class _Noted(Draws):
    """The draws of a generation, with a note of each random number."""

    def __init__(self, draws: Draws) -> None:
        self._draws = draws
        self.uniforms: list[float] = []

    def uniform(self) -> float:
        self.uniforms.append(self._draws.uniform())
        return self.uniforms[-1]
