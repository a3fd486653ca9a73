"""Does a drafter keep the rules of drafting: the caller's tokens, its own drafts, an exact way back?

These catch what no comparison of models can: a drafter that appends to the caller's list ("HelloHello"), one that
drafts all K tokens from the same input, a cache that is trimmed by one too many.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from specnb.decode.sampling import Chooser, Draws, Sampling
from specnb.divergence.checks.config import Finding
from specnb.draft.base import Drafter, Proposal, model_of
from specnb.errors import RewindError
from specnb.lm.base import LanguageModel
from specnb.lm.preflight import TOLERANCE, apart

EXO = ("exo #1188", "exo #1685", "exo #2065")


def greedy() -> Chooser:
    """A picker of the likeliest token."""
    return Chooser(Sampling(0.0), Draws(np.random.default_rng(0)))


class Recorder:
    """A model that notes the tokens in its state, and of which prefixes it gave logits. Otherwise the model itself."""

    def __init__(self, model: LanguageModel) -> None:
        self._model = model
        self.ids: list[int] = []
        self.asked: list[tuple[int, ...]] = []
        """Prefixes, one for each row of logits, in order."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def forward(self, ids: Sequence[int], n_logits: int | None = None) -> np.ndarray:
        out = self._model.forward(ids, n_logits)
        self.ids.extend(int(i) for i in ids)
        self.asked += [tuple(self.ids[: len(self.ids) - len(out) + row + 1]) for row in range(len(out))]
        return out

    def rewind(self, n: int) -> None:
        self._model.rewind(n)
        del self.ids[len(self.ids) - n :]

    def reset(self) -> None:
        self._model.reset()
        self.ids.clear()


def purity(drafter: Drafter, tokens: Sequence[int], k: int) -> Finding:
    """Whether the caller's tokens are what they were: a list that could be changed, and a tuple that could not."""
    check, remedy = "purity", "copy the tokens before drafting (list(tokens)), or take a read-only view"
    given, proposed = list(tokens), []
    for held in (given, tuple(tokens)):
        try:
            drafter.start(held)
            proposal = drafter.propose(held, k, greedy())
            drafter.commit(held)
        except (AttributeError, TypeError) as error:
            if held is given:  # it is broken, whatever it is given
                raise
            # what a tuple answers to append, extend and +=
            return Finding(check, "fail", f"it cannot work on tokens that do not change: {error!s:.120}", remedy, EXO)
        if given != list(tokens):
            return Finding(check, "fail", f"the caller's {len(tokens)} tokens are {len(given)} after drafting, "
                           f"{given[:8]}… instead of {list(tokens)[:8]}…", remedy, EXO)  # fmt: skip
        proposed.append(proposal.ids)
    if proposed[0] != proposed[1]:
        return Finding(check, "fail", f"the same tokens are drafted for otherwise the second time: {proposed[0]}, then "
                       f"{proposed[1]}", "forget everything in start()", EXO)  # fmt: skip
    return Finding(check, "ok", f"{len(tokens)} tokens unchanged, list and tuple, and the same drafts twice")


def recurrence(drafter: Drafter, tokens: Sequence[int], k: int) -> Finding:
    """Whether step j of a draft sees prefix + d1 … d(j-1), at first and after rounds that kept 0, 1 and all drafts."""
    check, model = "recurrence", model_of(drafter)
    if model is None:
        return Finding(check, "skipped", "the drafter has no model of its own that could be listened to")
    if getattr(model, "vocab", None) is not drafter.vocab:
        return Finding(check, "skipped", "the drafts are made in another vocabulary than they are proposed in")
    recorder = Recorder(model)
    drafter.model = recorder
    try:
        return _recurrence(check, drafter, recorder, list(tokens), k)
    finally:
        drafter.model = model


def _recurrence(check: str, drafter: Drafter, recorder: Recorder, tokens: list[int], k: int) -> Finding:
    steps = rounds = 0
    for when, text, proposal in _rounds(drafter, recorder, tokens, k):
        if proposal.tree is not None:
            return Finding(check, "skipped", "the drafter proposes trees")
        for j in range(len(proposal.ids)):
            expected = (*text, *proposal.ids[:j])
            if expected not in recorder.asked:
                seen = f"{when}, draft {j + 1} was not made from prefix + {j} drafts: {_instead(recorder, expected)}"
                remedy = "append each draft to the input of the next step, and after a round rewind to the tokens kept"
                return Finding(check, "fail", seen, remedy, (*EXO, "vLLM #52688", "vLLM #14647"))
        steps, rounds = steps + len(proposal.ids), rounds + 1
    if not steps:
        return Finding(check, "skipped", f"nothing was drafted in {rounds} rounds")
    return Finding(
        check, "ok", f"{steps} drafts of {rounds} rounds, each made from the prefix and the drafts before it"
    )


def _rounds(
    drafter: Drafter, recorder: Recorder, tokens: list[int], k: int
) -> Iterator[tuple[str, tuple[int, ...], Proposal]]:
    """Rounds that keep none, one and all of their drafts: when it was, the text in front, what was proposed."""
    text = list(tokens)
    drafter.start(tuple(text))
    when = "in the first round"
    for kept in (0, 1, k, 0):
        recorder.asked.clear()
        proposal = drafter.propose(tuple(text), k, greedy())
        yield when, tuple(text), proposal
        kept = min(kept, len(proposal.ids))
        following = proposal.ids[kept] if kept < len(proposal.ids) else text[-1]
        text += [*proposal.ids[:kept], (following + 1) % recorder.vocab.size]  # what was drafted there is wrong
        drafter.commit(tuple(text))
        when = f"after a round that kept {kept}"


def _instead(recorder: Recorder, expected: tuple[int, ...]) -> str:
    asked = recorder.asked
    if not asked:
        return "the model was not asked at all"
    if len(asked) > 1 and len(set(asked)) == 1:
        return f"all {len(asked)} rows are those of the same {len(asked[0])} tokens"
    nearest = min(asked, key=lambda ids: abs(len(ids) - len(expected)))
    at = next((i for i, (a, b) in enumerate(zip(nearest, expected, strict=False)) if a != b), None)
    where = "" if at is None else f", which differ at token {at} ({nearest[at]} instead of {expected[at]})"
    return f"the nearest row is of {len(nearest)} tokens instead of {len(expected)}{where}"


def cache_after_rejection(
    model: LanguageModel, tokens: Sequence[int], k: int, check: str = "cache after rejection"
) -> Finding:
    """Whether a model that went back from wrong drafts is one that never saw them: its length, and its next logits.

    For 0 to k kept drafts, in one block, against a fresh prefill, within `lm.preflight.TOLERANCE`. Empties the state.
    """
    remedy = "trim rejected drafts, exactly as many, from every layer's state"
    issues = ("mlxcel #994", "mlx-lm #1914", "mlx-lm #1109", "llama.cpp #20075", "vLLM #9730")
    size, worst = model.vocab.size, 0.0
    prefix, drafts = list(tokens), [(5 * i + 1) % size for i in range(k)]
    for kept in range(k + 1):
        text = [*prefix, *drafts[:kept]]
        model.reset()
        fresh = model.forward([*text, text[-1]])[-1:]
        model.reset()
        model.forward(prefix)
        model.forward(drafts)
        try:
            model.rewind(k - kept)
        except RewindError as error:
            return Finding(check, "skipped", f"{model.name} refuses to go back: {error!s:.200}")
        if model.n_past != len(text):
            finding = Finding(check, "fail", f"{k - kept} of {k} drafts rejected: {model.n_past} tokens in the state "
                            f"instead of {len(text)}", remedy, issues)  # fmt: skip
            model.reset()
            return finding
        off = apart(model.forward([text[-1]]), fresh)
        model.reset()
        if not off < TOLERANCE[model.caps.lossless_dtype]:
            return Finding(check, "fail", f"{k - kept} of {k} drafts rejected: the next logits differ from those of a "
                           f"fresh prefill by {off:.2g} of their spread", remedy, issues)  # fmt: skip
        worst = max(worst, off)
    return Finding(check, "ok", f"0 to {k} of {k} drafts rejected: the next logits differ by {worst:.1g} at most")
