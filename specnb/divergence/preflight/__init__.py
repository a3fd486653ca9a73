"""What takes seconds and explains most zero acceptances, before any tensor is traced.

Weights against the files they came from, configs of draft and target against each other, and whether a drafter keeps
the rules of drafting. A file that cannot be read fails its own check, and no other.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from specnb.decode.sampling import Chooser, Draws, Sampling
from specnb.divergence.preflight import files
from specnb.divergence.preflight.files import Config, Result
from specnb.draft.base import Drafter, Proposal, model_of
from specnb.draft.model import ModelDrafter
from specnb.errors import RewindError, SpecnbError
from specnb.lm.base import LanguageModel
from specnb.lm.preflight import goes_back, probe_ids

RANK = {"fail": 0, "warn": 1, "ok": 2, "skipped": 3}
"""Verdicts, worst first: `warn` is what may be meant (a longer context of the target), `fail` what cannot be."""
PROMPT = 8
"""Tokens that the drafter's checks feed."""

LOADING = ("SGLang #27829", "SGLang #27908", "speculators #1131", "TorchSpec #38")
EXO = ("exo #1188", "exo #1685", "exo #2065")
ISSUES = {
    "load report": LOADING,
    "tied head": ("vLLM #46435", "SGLang #27829"),
    "rope": ("vLLM #58080", "vLLM #57941", "SGLang #38786"),
    "quantisation": ("SGLang #39087", "SGLang #22823", "SGLang #34622", "SGLang #28196"),
    "purity": EXO,
    "recurrence": (*EXO, "vLLM #52688", "vLLM #14647"),
    "cache after rejection": ("mlxcel #994", "mlx-lm #1914", "mlx-lm #1109", "llama.cpp #20075", "vLLM #9730"),
}
"""Known cases upstream, of what each check may find."""

Check = tuple[str, str, Callable[[], Result]]
"""Its name, why it cannot be made ("" where it can), and what makes it."""


class CheckResult(NamedTuple):
    """One check and its outcome: what was seen, or why it was skipped; `issues` are known cases upstream."""

    check: str
    verdict: str
    evidence: str
    remedy: str = ""
    issues: tuple[str, ...] = ()


def table(findings: Iterable[CheckResult]) -> pd.DataFrame:
    """The findings, worst first: check, verdict, evidence, remedy, issues."""
    ranked = sorted(findings, key=lambda finding: RANK[finding.verdict])
    return pd.DataFrame(ranked, columns=list(CheckResult._fields))


def preflight(
    draft: Drafter | LanguageModel | None = None, target: LanguageModel | None = None, *,
    draft_folder: Path | None = None, target_folder: Path | None = None, k: int = 4,
) -> list[CheckResult]:  # fmt: skip
    """All checks that what is given allows, in seconds; `table` ranks them.

    Folders are those of transformers models: they are compared with the opened models, and with each other.
    The models' states are empty afterwards.
    """
    drafter = ModelDrafter(draft) if isinstance(draft, LanguageModel) else draft
    models = {"draft": model_of(drafter) if drafter else None, "target": target}
    network = getattr(models["draft"], "network", None)
    checks = [*_of_files(network, draft_folder, target_folder), *_of_drafter(drafter, models, k)]
    findings = [_finding(*check) for check in checks]
    for model in models.values():
        if model is not None:
            model.reset()
    return findings


def _finding(name: str, lack: str, check: Callable[[], Result]) -> CheckResult:
    """What cannot be read, or breaks down, is a finding of this check: the others are still made."""
    if lack:
        return CheckResult(name, "skipped", lack)
    try:
        verdict, *words = check()
    except SpecnbError as error:
        return CheckResult(name, "fail", str(error), "see the message")
    except Exception as error:  # a drafter or a model that is under suspicion may raise anything
        return CheckResult(name, "fail", f"{type(error).__name__}: {error}", "mend what raises this first")
    issues = ISSUES.get(name.partition(" (")[0], ()) if verdict in ("fail", "warn") else ()
    return CheckResult(name, verdict, *words, issues=issues)


def _of_files(draft: Any, draft_folder: Path | None, its: Path | None) -> Iterator[Check]:
    """The checks of weights and configs; `draft` is a torch module, or None."""

    @cache
    def stored() -> dict[str, files.StoredTensor]:
        return files.headers(draft_folder) if draft_folder else {}

    def both() -> list[Config | None]:
        return [files.read_config(folder) if folder else None for folder in (draft_folder, its)]

    def quantised() -> Result:
        return files.quantisation(*both(), stored(), None if draft is None else draft.config.to_dict())

    no_folder = "" if draft_folder else "no folder of the draft was given"
    no_network = "no opened torch model of it was given" if draft is None else ""
    no_two = "" if draft_folder and its else "it needs the folders of draft and target"
    yield "load report", no_folder or no_network, lambda: files.load_report(stored(), draft)
    yield "tied head", no_network, lambda: files.tied_head(draft, stored())
    yield "rope", no_two, lambda: files.rope(*both())
    yield "quantisation", no_folder, quantised


def _of_drafter(drafter: Drafter | None, models: Mapping[str, LanguageModel | None], k: int) -> Iterator[Check]:
    """The checks of drafting, and of the caches of draft and target."""
    sizes = [model.vocab.size for model in models.values() if model is not None]
    ids = tuple(probe_ids(min(sizes, default=PROMPT), PROMPT))
    no_drafter = "" if drafter else "no drafter was given"
    yield "purity", no_drafter, lambda: purity(drafter, ids, k)
    yield "recurrence", no_drafter, lambda: recurrence(drafter, ids, k)
    for role, model in models.items():
        no_model = "no opened model was given" if model is None else ""
        yield f"cache after rejection ({role})", no_model, partial(cache_after_rejection, model)


# --- drafting: the caller's tokens, its own drafts, an exact way back; no comparison of models can see these ----------


class ListeningModel:
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


GREEDY = Chooser(Sampling(0.0), Draws(np.random.default_rng(0)))


def purity(drafter: Drafter, tokens: Sequence[int], k: int) -> Result:
    """Whether the caller's tokens are what they were, and the drafts of the same tokens the same twice."""
    proposed = []
    for _ in range(2):
        given = list(tokens)
        drafter.start(given)
        proposed.append(drafter.propose(given, k, GREEDY).ids)
        drafter.commit(given)
        if given != list(tokens):
            seen = f"the caller's {len(tokens)} tokens are {len(given)} after drafting"
            remedy = "copy the tokens before drafting (list(tokens)), or take a read-only view"
            return "fail", f"{seen}, {given[:8]}… instead of {list(tokens)[:8]}…", remedy
    if proposed[0] != proposed[1]:
        seen = f"the same tokens are drafted for otherwise the second time: {proposed[0]}, then {proposed[1]}"
        return "fail", seen, "forget everything in start()"
    return "ok", f"{len(tokens)} tokens unchanged, and the same drafts twice"


def recurrence(drafter: Drafter, tokens: Sequence[int], k: int) -> Result:
    """Whether step j of a draft sees prefix + d1 … d(j-1), at first and after rounds that kept 0, 1 and all drafts."""
    model = model_of(drafter)
    if model is None:
        return "skipped", "the drafter has no model of its own that could be listened to"
    if model.vocab is not drafter.vocab:
        return "skipped", "the drafts are made in another vocabulary than they are proposed in"
    recorder = ListeningModel(model)
    drafter.model = recorder
    try:
        return _recurrence(drafter, recorder, list(tokens), k)
    finally:
        drafter.model = model


def _recurrence(drafter: Drafter, recorder: ListeningModel, tokens: list[int], k: int) -> Result:
    steps = 0
    for when, text, proposal in _rounds(drafter, recorder, tokens, k):
        if proposal.tree is not None:
            return "skipped", "the drafter proposes trees"
        for j in range(len(proposal.ids)):
            if (*text, *proposal.ids[:j]) not in recorder.asked:
                lengths = ", ".join(str(len(prefix)) for prefix in recorder.asked) or "no"
                seen = f"{when}, draft {j + 1} was not made from prefix + {j} drafts ({len(text) + j} tokens)"
                remedy = "append each draft to the input of the next step, and after a round rewind to the tokens kept"
                return "fail", f"{seen}: the model saw texts of {lengths} tokens", remedy
        steps += len(proposal.ids)
    if not steps:
        return "skipped", "nothing was drafted"
    return "ok", f"{steps} drafts of 4 rounds, each made from the prefix and the drafts before it"


def _rounds(
    drafter: Drafter, recorder: ListeningModel, text: list[int], k: int
) -> Iterator[tuple[str, tuple[int, ...], Proposal]]:
    """Rounds that keep none, one and all of their drafts: when it was, the text in front, what was proposed."""
    drafter.start(tuple(text))
    when = "in the first round"
    for kept in (0, 1, k, 0):
        recorder.asked.clear()
        proposal = drafter.propose(tuple(text), k, GREEDY)
        yield when, tuple(text), proposal
        kept = min(kept, len(proposal.ids))
        following = proposal.ids[kept] if kept < len(proposal.ids) else text[-1]
        text += [*proposal.ids[:kept], (following + 1) % recorder.vocab.size]  # what was drafted there is wrong
        drafter.commit(tuple(text))
        when = f"after a round that kept {kept}"


def cache_after_rejection(model: LanguageModel) -> Result:
    """Whether a state that was trimmed by rejected drafts goes on as if they had never been fed. Empties the state."""
    model.reset()
    try:
        same = goes_back(model)
    except RewindError as error:
        return "skipped", f"{model.name} refuses to go back: {error!s:.200}"
    if same:
        return "ok", "with none or some of a block's drafts kept, the next logits are those of a fresh prefill"
    seen = "behind rejected drafts the next logits differ from those of a text in which they never were"
    return "fail", seen, "trim rejected drafts, exactly as many, from every layer's state"
