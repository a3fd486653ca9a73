"""The case of a note on another engine, made again on a pair, for the reader of notebook 08.

Text that says everything twice, because the drafter writes into the text that it reads; the note's cure, by which all
drafts of a round are one guess; NaN among the logits; a draft model that cannot be opened.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from specnb.decode.generate import PromptLike, generate, prompt_ids
from specnb.divergence.capture import replaced
from specnb.draft.base import Picker, Proposal
from specnb.draft.model import ModelDrafter
from specnb.errors import NonFiniteLogits
from specnb.lm.base import LanguageModel
from specnb.measure.triage import triage
from specnb.records import Generation

HELLO, N_TOKENS, N_ROUNDS = "Say hello.", 24, 3


class SameInputDrafter(ModelDrafter):
    """The note's cure: every draft of a round is made from the same input."""

    model: Any

    def propose(self, tokens: Sequence[int], k: int, picker: Picker) -> Proposal:
        ids = []
        for _ in range(k):
            self.model.reset()
            if picked := picker.pick(self.model.forward(tokens[:], n_logits=1)[0]):
                ids.append(picked[0])
        self.model.reset()
        return Proposal(tuple(ids))

    def commit(self, tokens: Sequence[int]) -> None:
        pass  # nothing is kept from round to round


def append_drafts(target: LanguageModel, drafter: ModelDrafter, prompt: PromptLike, *, k: int) -> str:
    """Return what a loop writes whose drafter appends to the text: the drafts of a round, and again what it commits."""
    tokens = [*prompt_ids(target, prompt)]
    begun = len(tokens)
    for _ in range(N_ROUNDS):
        first = generate(target, tokens, drafter=drafter, k=k, max_new_tokens=k + 1).rounds[0]
        tokens += [*first.draft_ids, *first.committed_ids]
    return target.vocab.decode(tokens[begun:])


def show_note(target: LanguageModel, drafter: Any, *, k: int) -> list[dict[str, Any]]:
    """Return a row for each case: `done`, `text`, `seen`. The models' states are empty afterwards."""
    prompt = [{"role": "user", "content": HELLO}] if target.vocab.chat_template else HELLO
    run, forward = partial(generate, target, prompt, k=k, max_new_tokens=N_TOKENS), target.forward
    sound, cured = run(drafter=drafter), run(drafter=SameInputDrafter(drafter.model))
    judged = triage([cured], vocab_size=target.vocab.size)
    appended = append_drafts(target, drafter, prompt, k=k)
    try:
        with replaced(target, "forward", lambda *ids, **options: np.nan * forward(*ids, **options)):
            refused = f"not refused: {run(drafter=drafter).text}"
    except NonFiniteLogits as error:
        refused = f"stopped: {error}"
    with TemporaryDirectory() as folder:
        damaged = Path(folder) / "draft.gguf"
        damaged.write_bytes(b"GGUF")
        alone = generate(target, prompt, drafter=str(damaged), max_new_tokens=N_TOKENS)
        fallback = str(alone.fallback).replace(f"{folder}/", "").partition("; ")[0]
    rows = [
        ("drafts are a proposal, and the text stays as it is", sound.text, _kept(sound)),
        (
            "drafts are appended to the text, and what is kept once more",
            appended,
            "cannot happen here: a drafter gets a read-only view",
        ),
        ("every draft from the same input", cured.text, f"{_kept(cured)}; {judged.line or judged.verdict}"),
        ("NaN among the logits", "", refused),
        ("the draft model's file is damaged", alone.text, fallback),
    ]
    target.reset()
    drafter.model.reset()
    return [dict(zip(("done", "text", "seen"), row, strict=True)) for row in rows]


def _kept(generation: Generation) -> str:
    return f"{generation.accepted_tokens} of {generation.total_draft_tokens} drafts kept"
