"""What takes seconds and explains most zero acceptances, before any tensor is traced.

Weights against the files they came from, and whether a drafter keeps the rules of drafting. A file that cannot be read
fails its own check, and no other.
"""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from specnb.decode.sampling import Chooser, Sampling
from specnb.draft.base import Drafter
from specnb.draft.model import ModelDrafter
from specnb.errors import InputError, RewindError
from specnb.io import read_json, read_toml, reading
from specnb.lm.base import LanguageModel
from specnb.lm.probe import probe_ids, probe_rewind

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

Result = tuple[str, str] | tuple[str, str, str]
"""What a check says: its verdict (a key of RANK), what it saw, and perhaps a remedy."""

RANK = {"fail": 0, "warn": 1, "ok": 2, "skipped": 3}
"""Verdicts, worst first: `warn` is what may be meant (tensors that are not used), `fail` what cannot be."""
PROMPT = 8
"""Tokens that the drafter's checks feed."""

ISSUES = read_toml(Path(__file__).with_name("issues.toml"))
"""Known cases upstream, of what each check may find."""


class CheckResult(NamedTuple):
    """One check and its outcome: what was seen, or why it was skipped; `issues` are known cases upstream."""

    check: str
    verdict: str
    evidence: str
    remedy: str = ""
    issues: tuple[str, ...] = ()


def preflight(
    draft: Drafter | LanguageModel | None = None, target: LanguageModel | None = None, *,
    draft_folder: Path | None = None, k: int = 4,
) -> list[CheckResult]:  # fmt: skip
    """All checks that what is given allows, in seconds, the worst first.

    The folder is that of a transformers model, and is compared with the opened draft. The models' states are empty
    afterwards.
    """
    drafter = ModelDrafter(draft) if isinstance(draft, LanguageModel) else draft
    models = {"draft": drafter.model if drafter else None, "target": target}
    network = getattr(models["draft"], "network", None)
    sizes = [model.vocab.size for model in models.values() if model is not None]
    ids, opened = tuple(probe_ids(min(sizes, default=PROMPT), PROMPT)), "the draft, opened in torch"
    findings = [
        _finding("load report", f"a folder and {opened}", load_report, draft_folder, network),
        _finding("tied head", opened, tied_head, network),
        _finding("purity", "a drafter", purity, drafter, ids, k),
        _finding("recurrence", "a drafter", recurrence, drafter, ids, k),
    ]
    for role, model in models.items():
        findings.append(_finding(f"cache after rejection ({role})", "an opened model", cache_after_rejection, model))
        if model is not None:
            model.reset()
    return sorted(findings, key=lambda finding: RANK[finding.verdict])


def _finding(name: str, needed: str, check: Callable[..., Result], *subjects: Any) -> CheckResult:
    """Make a check of its subjects, which are called what is `needed` where one is None.

    What cannot be read, or breaks down, is a finding of this check: the others are still made.
    """
    if None in subjects:
        return CheckResult(name, "skipped", f"not given: {needed}")
    try:
        verdict, *words = check(*subjects)
    except Exception as error:  # a drafter or a model that is under suspicion may raise anything
        return CheckResult(name, "fail", f"{type(error).__name__}: {error}", "mend what raises this first")
    issues = tuple(ISSUES[name.partition(" (")[0]]) if verdict in ("fail", "warn") else ()
    return CheckResult(name, verdict, *words, issues=issues)


# --- weights: transformers warns of what is left over in a file, and seldom of what was never written -----------------

INDEX = "model.safetensors.index.json"
FLOATS = ("F64", "F32", "BF16", "F16")
ROUNDED = 0.01
"""Share of the largest value that a cast to a 16-bit type may move a weight by (bfloat16: 0.4 %)."""
COMPUTED = (".inv_freq", ".rotary_emb.inv_freq", ".masked_bias", ".attn.bias", "position_ids")
"""Ends of names of what old files hold, and models compute for themselves."""


def headers(folder: Path) -> dict[str, Any]:
    """The tensors in the safetensors files of a model folder, by name, as slices of files: no weight is read.

    Raises InputError for a folder without such files, a shard that is missing, or a file that is not sound.
    """
    from safetensors import safe_open

    files = sorted(folder.glob("*.safetensors"))
    if (shards := folder / INDEX).exists():
        files = [folder / name for name in sorted({*read_json(shards).get("weight_map", {}).values()})]
    if not files:
        raise InputError(f"{folder} has no safetensors files: give the folder of a model")
    tensors = {}
    for path in files:
        with reading(path), safe_open(path, framework="pt") as file:
            tensors |= {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (it is no mapping)
    return tensors


def load_report(folder: Path, network: "Module") -> Result:
    """Weights that no file of the folder holds, or that are not what it says.

    Tensors that transformers joins or splits while it loads (experts of a MoE) have other names in the files: where
    these have as many values under names that no weight has, that is a warning.
    """
    stored, state, pairs = headers(folder), network.state_dict(), {}
    for name in state:  # with or without the base model's prefix
        for there in (name, name.removeprefix("model."), f"model.{name}"):
            if there in stored:
                pairs.setdefault(name, there)
    have = {_place(state[name]) for name in pairs}
    missing = [name for name in state.keys() - pairs.keys() if _place(state[name]) not in have]
    unused = sorted(name for name in stored.keys() - set(pairs.values()) if not name.endswith(COMPUTED))
    n_unused = sum(math.prod(stored[name].get_shape()) for name in unused)
    remedy = "open the checkpoint with a loader that refuses missing weights, or convert it again"
    if sum(state[name].numel() for name in missing) > n_unused:
        return "fail", f"{len(missing)} weights are in no file: {', '.join(sorted(missing)[:3])}", remedy
    if wrong := [name for name, there in pairs.items() if not _written(state[name], stored[there])]:
        return "fail", f"{len(wrong)} weights are not what the file holds (the first: {wrong[0]})", remedy
    seen = f"{len(pairs)} weights are those of the files"
    if missing:
        seen += f"; {len(missing)} more have other names there, such as experts that are joined on loading"
    if unused:
        seen += f"; {len(unused)} tensors of the files have no weight of their name (the first: {unused[0]})"
        return "warn", seen, "see whether they belong to this draft"
    return "ok", seen


def _place(tensor: "Tensor") -> tuple:
    return tensor.device, tensor.data_ptr() or id(tensor), tuple(tensor.shape)


def _written(value: "Tensor", stored: Any) -> bool:
    """Check the shape, and the first and the last row of a float weight, against the file, up to rounding."""
    if [*value.shape] != stored.get_shape():
        return False
    if not (value.numel() and value.shape and value.is_floating_point()) or stored.get_dtype() not in FLOATS:
        return True
    pairs = ((value.detach()[row].float().cpu(), stored[row].float()) for row in (0, len(value) - 1))
    return all(bool((mine - its).abs().max() <= ROUNDED * its.abs().max()) for mine, its in pairs)


def tied_head(network: "Module") -> Result:
    """Check that embedding and head are one tensor where the config says so; the load report sees the reverse."""
    ends = (getattr(network, f"get_{end}_embeddings", lambda: None)() for end in ("input", "output"))
    embedding, head = (getattr(module, "weight", None) for module in ends)
    if embedding is None or head is None:
        return "skipped", "the opened model does not tell its embedding and its head"
    if network.config.tie_word_embeddings and _place(embedding) != _place(head):
        return "fail", "the config says tied, but they are two tensors", "tie them (tie_weights) after loading"
    return "ok", "embedding and head are one tensor where the config says so"


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
        self.ids += map(int, ids)
        self.asked += [tuple(self.ids[: len(self.ids) - n]) for n in reversed(range(len(out)))]
        return out

    def rewind(self, n: int) -> None:
        self._model.rewind(n)
        del self.ids[len(self.ids) - n :]

    def reset(self) -> None:
        self._model.reset()
        self.ids.clear()


GREEDY = Chooser(Sampling(0.0))


def purity(drafter: Drafter, tokens: Sequence[int], k: int) -> Result:
    """Tell whether the caller's tokens are what they were, and the drafts of the same tokens the same twice."""
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
    """Check that step j of a draft sees prefix + d1 … d(j-1), also after rounds that kept 0, 1 and all drafts."""
    model = drafter.model
    if model is None:
        return "skipped", "the drafter has no model of its own that could be listened to"
    if model.vocab is not drafter.vocab:
        return "skipped", "the drafts are made in another vocabulary than they are proposed in"
    recorder, text, steps, when = ListeningModel(model), list(tokens), 0, "in the first round"
    drafter.model = recorder
    try:
        drafter.start(tuple(text))
        for kept in (0, 1, k, 0):
            recorder.asked.clear()
            proposal = drafter.propose(tuple(text), k, GREEDY)
            if proposal.tree is not None:
                return "skipped", "the drafter proposes trees"
            for j in range(len(proposal.ids)):
                if (*text, *proposal.ids[:j]) not in recorder.asked:
                    lengths = ", ".join(str(len(prefix)) for prefix in recorder.asked) or "no"
                    seen = f"{when}, draft {j + 1} was not made from prefix + {j} drafts ({len(text) + j} tokens)"
                    remedy = "append each draft to the next step's input, and after a round rewind to the tokens kept"
                    return "fail", f"{seen}: the model saw texts of {lengths} tokens", remedy
            steps += len(proposal.ids)
            kept = min(kept, len(proposal.ids))
            following = proposal.ids[kept] if kept < len(proposal.ids) else text[-1]
            text += [*proposal.ids[:kept], (following + 1) % recorder.vocab.size]  # what was drafted there is wrong
            drafter.commit(tuple(text))
            when = f"after a round that kept {kept}"
    finally:
        drafter.model = model
    if not steps:
        return "skipped", "nothing was drafted"
    return "ok", f"{steps} drafts of 4 rounds, each made from the prefix and the drafts before it"


def cache_after_rejection(model: LanguageModel) -> Result:
    """Check that a state trimmed by rejected drafts goes on as if they had never been fed. Empties the state."""
    model.reset()
    try:
        same = probe_rewind(model)
    except RewindError as error:
        return "skipped", f"{model.name} refuses to go back: {error!s:.200}"
    if same:
        return "ok", "with none or some of a block's drafts kept, the next logits are those of a fresh prefill"
    seen = "behind rejected drafts the next logits differ from those of a text in which they never were"
    return "fail", seen, "trim rejected drafts, exactly as many, from every layer's state"
