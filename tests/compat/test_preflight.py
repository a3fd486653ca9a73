"""Preflight: every planted fault fails its own check and says where; a sound pair passes all of them."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from specnb.compat import preflight as checks
from specnb.compat.preflight import preflight
from specnb.divergence.faults.planting import replaced
from specnb.draft.base import Proposal
from specnb.draft.lookup import LookupDrafter
from specnb.draft.model import ModelDrafter
from specnb.errors import InputError, RewindError
from specnb.lm.hf.model import HfModel
from specnb.lm.toy import cyclic, markov
from tests.laws.test_greedy import Appending
from tests.tiny_models import torch_folder

TOKENS = (3, 10, 17, 24)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return torch_folder(tmp_path_factory.mktemp("tiny") / "draft", tie_word_embeddings=False)


@pytest.fixture(scope="module")
def model(folder):
    opened = HfModel.open(folder)
    yield opened
    opened.close()


@pytest.fixture
def copy(folder, tmp_path):
    return shutil.copytree(folder, tmp_path / "copy")


def changed(folder, weights):
    """The folder with other weights, a function of all of them."""
    file = folder / "model.safetensors"
    save_file(weights(load_file(file)), file, metadata={"format": "pt"})
    return folder


def verdicts(findings):
    return {finding.check: finding.verdict for finding in findings}


def test_a_sound_pair_passes_all_checks_and_is_left_empty(folder, model):
    findings = preflight(model, model, draft_folder=folder)
    assert set(verdicts(findings).values()) == {"ok"}
    assert model.n_past == 0 and all(finding.evidence for finding in findings)
    assert set(verdicts(preflight()).values()) == {"skipped"} and len(findings) == len(preflight()) == 6


# weights


def rescaled(w):
    """The last row of a weight is another: the model was never given it."""
    w["model.layers.1.mlp.up_proj.weight"][-1] *= 1.1
    return w


def split(w, halves=2):
    """One matrix in two, as a checkpoint has experts that are joined on loading; of `halves` the first ones."""
    name = "model.layers.0.mlp.up_proj.weight"
    parts = w.pop(name).chunk(2)[:halves]
    return w | {f"model.layers.0.mlp.up_proj.{i}.weight": part.clone() for i, part in enumerate(parts)}


@pytest.mark.parametrize(
    ("change", "verdict", "value"),
    [
        (lambda w: {n.removeprefix("model."): t for n, t in w.items()}, "ok", ""),
        (lambda w: {n: t for n, t in w.items() if n != "lm_head.weight"}, "fail", "lm_head.weight"),
        (lambda w: w | {"mtp.fc.weight": torch.ones(4)}, "warn", "mtp.fc.weight"),
        (lambda w: w | {"lm_head.weight": w["lm_head.weight"][:60].clone()}, "fail", "lm_head"),
        (split, "warn", "1 more have other names"),
        (lambda w: split(w, 1), "fail", "up_proj"),
        (rescaled, "fail", "layers.1.mlp.up_proj"),
    ],
)
def test_files_that_hold_otherwise_what_the_model_has(copy, model, change, verdict, value):
    said = checks.load_report(changed(copy, change), model.network)
    assert said[0] == verdict and value in said[1]


def test_damaged_and_missing_files_fail_their_own_check_alone(copy, model):
    (copy / "model.safetensors").write_bytes(b"\xff" * 64)
    findings = preflight(model, draft_folder=copy)
    found = verdicts(findings)
    assert findings[0].verdict == found["load report"] == "fail" and found["purity"] == found["recurrence"] == "ok"
    (copy / checks.INDEX).write_text(json.dumps({"weight_map": {"a": "absent.safetensors"}}))
    with pytest.raises(InputError, match="absent"):
        checks.headers(copy)


def test_a_head_is_tied_where_the_config_says_so_and_the_reverse_is_seen_by_its_values(tmp_path, copy):
    tied = HfModel.open(torch_folder(tmp_path / "tied", tie_word_embeddings=True)).network
    assert checks.tied_head(tied)[0] == checks.load_report(tmp_path / "tied", tied)[0] == "ok"
    assert checks.load_report(copy, tied)[0] == "fail", "its files hold a head of its own"
    tied.lm_head.weight = torch.nn.Parameter(tied.lm_head.weight.detach().clone())
    assert checks.tied_head(tied)[0] == "fail"


# drafters


class Naive(ModelDrafter):
    """Drafts all tokens from the same input: the state is emptied before each."""

    def propose(self, tokens, k, picker):
        ids = []
        for _ in range(k):
            self.model.reset()
            ids.append(picker.pick(self.model.forward(list(tokens), n_logits=1)[0])[0])
        return Proposal(tuple(ids))


class Untrimmed(ModelDrafter):
    """Leaves one rejected draft in the state, and feeds only the newest token in the next round."""

    def commit(self, tokens):
        wrong = max(0, self.model.n_past - (len(tokens) - 1) - 1)
        self.model.rewind(min(wrong, self.model.n_past))
        self._fed = []

    def propose(self, tokens, k, picker):
        behind = (*range(self.model.n_past), *tokens[-1:]) if self.model.n_past >= len(tokens) else tokens
        return super().propose(behind, k, picker)


class Remembering(LookupDrafter):
    """Does not forget the generations before."""

    started = 0

    def start(self, tokens):
        self.started += 1

    def propose(self, tokens, k, picker):
        return Proposal((self.started,) * k)


def test_real_drafters_are_pure_and_see_their_own_drafts(model):
    for drafter in (ModelDrafter(cyclic(20)), ModelDrafter(model)):
        network = drafter.model
        assert checks.purity(drafter, TOKENS[:2], 4)[0] == "ok"
        verdict, evidence = checks.recurrence(drafter, TOKENS[:2], 4)
        assert verdict == "ok" and "of 4 rounds" in evidence and drafter.model is network
    assert checks.purity(LookupDrafter(), (1, 2, 1, 2, 1), 4)[0] == "ok"
    assert checks.recurrence(LookupDrafter(), TOKENS, 4)[0] == "skipped"


@pytest.mark.parametrize(
    ("check", "drafter", "value"),
    [
        (checks.recurrence, lambda: Naive(markov(64, order=2)), "draft 2 was not made from prefix + 1 drafts"),
        (checks.recurrence, lambda: Untrimmed(markov(64, order=2)), "after a round that kept 0, draft 1"),
        (checks.purity, Appending, "4 tokens are 5"),
        (checks.purity, Remembering, "(1, 1, 1), then (2, 2, 2)"),
    ],
)
def test_a_drafter_that_breaks_a_rule_is_seen_where_it_does(check, drafter, value):
    verdict, evidence, _ = check(drafter(), TOKENS, 3)
    assert verdict == "fail" and value in evidence


@pytest.mark.parametrize(("by", "verdict"), [(-1, "fail"), (1, "fail"), (0, "ok"), (None, "skipped")])
def test_a_cache_that_is_trimmed_wrongly_is_seen_by_its_logits(by, verdict):
    model = markov(64, order=4)
    right = model.rewind

    def rewind(n):
        if by is None:
            raise RewindError("its state cannot be cropped")
        right(n and n + by)

    with replaced(model, "rewind", rewind):
        assert checks.cache_after_rejection(model)[0] == verdict
