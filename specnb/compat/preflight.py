"""Quick checks of a drafter and of the caches: purity, recurrence, and the cache after a rejection.

A check that raises an error fails, and the others still run.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from specnb.decode.sampling import Chooser, Sampling
from specnb.draft.base import Drafter
from specnb.draft.model import ModelDrafter
from specnb.errors import RewindError
from specnb.findings import Finding
from specnb.io import read_toml
from specnb.lm.base import LanguageModel
from specnb.lm.probe import probe_ids, probe_rewind

Result = tuple[str, str] | tuple[str, str, str]
"""The outcome of a check: verdict (fail, ok or skipped), evidence, and possibly a remedy."""

PROMPT = 8
"""Length of the prompt for the drafter's checks."""

ISSUES = read_toml(Path(__file__).with_name("issues.toml"))
"""Known upstream issues of the kind that each check finds."""


def preflight(
    draft: Drafter | LanguageModel, target: LanguageModel | None = None, *, k: int = 4
) -> list[Finding]:
    """Run all checks that the arguments allow, and return the results, failures first.

    Takes seconds. The states of the models are empty afterwards.

    >>> from specnb.lm import toy
    >>> [check.verdict for check in preflight(toy.cyclic(20), toy.cyclic(20))]
    ['ok', 'ok', 'ok', 'ok']
    """
    drafter = ModelDrafter(draft) if isinstance(draft, LanguageModel) else draft
    models = {"draft": drafter.model, "target": target}
    ids = tuple(probe_ids(min(model.vocab.size for model in models.values() if model), PROMPT))
    findings = [
        _finding("purity", purity, drafter, ids, k),
        _finding("recurrence", recurrence, drafter, ids, k),
    ]
    for role, model in models.items():
        name = f"cache after rejection ({role})"
        if model is None:
            findings.append(Finding(name, "skipped", "not given: an opened model"))
        else:
            findings.append(_finding(name, cache_after_rejection, model))
            model.reset()
    return sorted(findings, key=lambda finding: finding.verdict)


def _finding(name: str, check: Callable[..., Result], *subjects: Any) -> Finding:
    """Run a check; one that raises an error fails, so that the others still run."""
    try:
        verdict, *words = check(*subjects)
    except Exception as error:  # a faulty drafter or model may raise anything
        return Finding(name, "fail", f"{type(error).__name__}: {error}", "fix this error first")
    issues = tuple(ISSUES[name.partition(" (")[0]]) if verdict == "fail" else ()
    return Finding(name, verdict, *words, issues=issues)


# --- drafting: no side effects, recurrence, exact rollback ----------------------------------------


class ListeningModel:
    """Wraps a model, and records the prefixes for which it computed logits."""

    def __init__(self, model: LanguageModel) -> None:
        self._model = model
        self._ids: list[int] = []
        self.asked: list[tuple[int, ...]] = []
        """The prefix of each row of logits, in order."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def forward(self, ids: Sequence[int], n_logits: int | None = None) -> np.ndarray:
        self._ids[self._model.n_past :] = map(int, ids)
        out = self._model.forward(ids, n_logits)
        n = len(self._ids)
        self.asked += [tuple(self._ids[: end + 1]) for end in range(n - len(out), n)]
        return out


GREEDY = Chooser(Sampling(0.0))


def purity(drafter: Drafter, tokens: Sequence[int], k: int) -> Result:
    """Check that drafting leaves the caller's tokens unchanged and is repeatable."""
    proposed = []
    for _ in range(2):
        passed = list(tokens)
        drafter.start(passed)
        proposed.append(drafter.propose(passed, k, GREEDY).ids)
        drafter.commit(passed)
        if passed != list(tokens):
            seen = (
                f"the caller's {len(tokens)} tokens are {len(passed)} after drafting, "
                f"{passed[:8]}… instead of {list(tokens)[:8]}…"
            )
            remedy = "copy the tokens before drafting (list(tokens)), or take a read-only view"
            return "fail", seen, remedy
    if proposed[0] != proposed[1]:
        seen = (
            "the second generation drafts different tokens from the same text: "
            f"{proposed[0]}, then {proposed[1]}"
        )
        return "fail", seen, "reset all state in start()"
    return "ok", f"{len(tokens)} tokens unchanged, and the same drafts twice"


def recurrence(drafter: Drafter, tokens: Sequence[int], k: int) -> Result:
    """Check that draft step j sees prefix + d1 … d(j-1), also after 0, 1 and all are accepted."""
    model = drafter.model
    if model is None:
        return "skipped", "the drafter has no model of its own"
    if model.vocab is not drafter.vocab:
        return "skipped", "the draft model's vocabulary differs from the drafter's"
    drafter.model = ListeningModel(model)
    try:
        return _check_rounds(drafter, drafter.model, [*tokens], k)
    finally:
        drafter.model = model


def _check_rounds(drafter: Drafter, recorder: ListeningModel, text: list[int], k: int) -> Result:
    steps = 0
    when = "in the first round"
    drafter.start(tuple(text))
    for n_accepted in (0, 1, k, 0):
        recorder.asked.clear()
        proposal = drafter.propose(tuple(text), k, GREEDY)
        ids = proposal.ids
        if proposal.tree is not None:
            return "skipped", "the drafter proposes trees"
        for j in range(len(ids)):
            if (*text, *ids[:j]) not in recorder.asked:
                lengths = ", ".join(str(len(prefix)) for prefix in recorder.asked) or "no"
                seen = (
                    f"{when}, draft {j + 1} was not made from prefix + {j} drafts "
                    f"({len(text) + j} tokens): the model saw texts of {lengths} tokens"
                )
                remedy = (
                    "feed each draft token to the next step, "
                    "and after a round rewind to the accepted tokens"
                )
                return "fail", seen, remedy
        steps += len(ids)
        n_accepted = min(n_accepted, len(ids))
        rejected = ids[n_accepted] if n_accepted < len(ids) else text[-1]
        text += [*ids[:n_accepted], (rejected + 1) % recorder.vocab.size]
        drafter.commit(tuple(text))
        when = f"after a round with {n_accepted} accepted drafts"
    if not steps:
        return "skipped", "nothing was drafted"
    return "ok", f"{steps} drafts in 4 rounds, each made from the prefix and the drafts before it"


def cache_after_rejection(model: LanguageModel) -> Result:
    """Check that a rollback removes rejected draft tokens from the state. Empties the state."""
    model.reset()
    try:
        exact = probe_rewind(model)
    except RewindError as error:
        return "skipped", f"{model.name} cannot roll back: {error!s:.200}"
    if exact:
        return (
            "ok",
            (
                "after a rollback of all or some draft tokens, "
                "the next logits are those of a fresh prefill"
            ),
        )
    seen = (
        "after a rollback, "
        "the next logits differ from those of the text without the rejected tokens"
    )
    return "fail", seen, "remove exactly the rejected tokens from the state of every layer"
