"""Decode a pair and record how each token was chosen, for the audit in `sampling`."""

from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any

import numpy as np

from specnb.decode import accept
from specnb.decode.accept import Acceptance
from specnb.decode.generate import PromptLike, generate, prompt_ids
from specnb.decode.sampling import Chooser
from specnb.divergence.faults.planting import replaced
from specnb.divergence.sampling import Audit, Position, SamplingTally
from specnb.draft.base import Drafter, Proposal
from specnb.errors import InputError
from specnb.lm.base import LanguageModel
from specnb.lm.tree import COMMITTED
from specnb.measure.experiment import Progress, silent
from specnb.prompts import Prompt, categories, prompts
from specnb.records import Generation


def round_robin(wanted: int | str) -> list[Prompt]:
    """Return a number of shipped prompts, or all of a file or pack; categories take turns.

    Raises InputError.
    """
    source, n = (wanted, None) if isinstance(wanted, str) else ("", wanted)
    turns = zip_longest(*(prompts(name, source=source) for name in categories(source)))
    chosen = [prompt for turn in turns for prompt in turn if prompt is not None]
    if n is not None and not 1 <= n <= len(chosen):
        raise InputError(
            f"got {n} prompts, expected 1 to {len(chosen)}: use fewer prompts and more tokens"
        )
    return chosen[:n]


def audit_pair(
    target: LanguageModel,
    drafter: Drafter,
    chosen: Sequence[Prompt],
    *,
    seed: int,
    effect: float = 0.1,
    progress: Progress = silent,
    **options: Any,
) -> Audit:
    """Decode each prompt with its own seed, and audit every draft token and output token."""
    tally = SamplingTally()
    options |= {"drafter": drafter, "on_position": tally.add, "ignore_eog": True}
    for number, prompt in enumerate(chosen):
        progress(number, len(chosen), f"sampled: {prompt.id}")
        generate_logged(target, prompt.without_template, seed=seed + number, **options)
    return tally.audit(effect=effect)


def generate_logged(
    target: LanguageModel,
    prompt: PromptLike,
    *,
    drafter: Drafter,
    on_position: Callable[[Position], object],
    **options: Any,
) -> Generation:
    """Run `decode.generate` with the rule "token", and pass each position to `on_position`.

    Tokens and random numbers are those of `generate`. `sampling.SamplingTally().add` keeps sums
    instead of rows.
    """
    text = list(prompt_ids(target, prompt))

    def token(logits: np.ndarray, proposal: Proposal, chooser: Chooser) -> Acceptance:
        uniform, uniforms = chooser.draws.uniform, []

        def note_uniform() -> float:
            uniforms.append(uniform())
            return uniforms[-1]

        with replaced(chooser.draws, "uniform", note_uniform):
            acceptance = accept.RULES["token"](logits, proposal, chooser)
        n_accepted = acceptance.n_accepted
        # In a tree, draft tokens are not tested: each token is drawn from p and may match one.
        drafts = () if proposal.tree is not None else proposal.ids[: n_accepted + 1]
        # One number per test or draw, and one for the next token; greedy rounds draw none.
        drawn = uniforms or [None] * (n_accepted + 2)
        committed_ids = [*(proposal.ids[node] for node in acceptance.path), acceptance.next_id]
        rows = [COMMITTED, *acceptance.path]
        for place, (node, committed) in enumerate(zip(rows, committed_ids, strict=True)):
            drafted = place < len(drafts)
            resampled = not drafted or place == n_accepted
            number = -1 if place == n_accepted else place
            position = Position(
                p_target=chooser.sampling.probabilities(logits[node + 1]),
                q_draft=proposal.q_draft[place]
                if drafted and proposal.q_draft is not None
                else None,
                draft_id=drafts[place] if drafted else None,
                accepted=drafted and place < n_accepted,
                committed_id=committed,
                accept_u=drawn[place] if drafted else None,
                resample_u=drawn[number] if resampled else None,
                prefix=tuple(text),
            )
            on_position(position)
            text.append(committed)
        return acceptance

    return generate(target, tuple(text), drafter=drafter, rule=token, **options)
