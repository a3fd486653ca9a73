"""Preflight: every planted fault fails its own check and says where; a sound pair passes all of them."""

import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from specnb.divergence.checks import config as preflight_config
from specnb.divergence.checks import drafter as preflight_drafter
from specnb.divergence.checks import weights as preflight_weights
from specnb.divergence.checks.config import table
from specnb.divergence.preflight import learning_rate, preflight
from specnb.draft.base import Proposal
from specnb.draft.lookup import LookupDrafter
from specnb.draft.model import ModelDrafter
from specnb.errors import InputError, RewindError
from specnb.lm.hf.model import HfModel
from specnb.lm.toy import cyclic, markov
from specnb.measure.curve import Curve
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


def changed(folder, weights=None, **config):
    """The folder with other weights (a function of all of them), other config entries, or both."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    if weights:
        file = folder / "model.safetensors"
        save_file(weights(load_file(file)), file, metadata={"format": "pt"})
    return folder


def verdicts(found):
    return {one.check: one.verdict for one in found}


def test_a_sound_pair_passes_all_checks_and_is_left_empty(folder, model):
    found = preflight(model, model, draft_folder=folder, target_folder=folder)
    assert set(verdicts(found).values()) <= {"ok", "skipped"}
    skipped = {name for name, verdict in verdicts(found).items() if verdict == "skipped"}
    assert skipped == {"d2t", "learning rate"}
    assert model.n_past == 0
    assert list(table(found).columns) == ["check", "verdict", "evidence", "remedy", "issues"]
    assert all(one.evidence for one in found)


def test_without_anything_all_checks_say_what_they_lack():
    found = preflight()
    assert set(verdicts(found).values()) == {"skipped"}
    assert len(found) == 12


# weights


def report(folder, network):
    return preflight_weights.load_report(preflight_weights.headers(folder), network)


def test_a_weight_that_no_file_holds_is_named_with_what_it_looks_like(copy, model):
    changed(copy, lambda w: {n: t for n, t in w.items() if n != "lm_head.weight"})
    found = report(copy, model.network)
    assert found.verdict == "fail" and "1 weights are in no file: lm_head.weight (std 0.29" in found.evidence
    assert "freshly" not in found.evidence
    fresh = torch.nn.Parameter(torch.randn(64, 32) * 0.02)
    old, model.network.lm_head.weight = model.network.lm_head.weight, fresh
    try:
        assert "as freshly initialised" in report(copy, model.network).evidence
    finally:
        model.network.lm_head.weight = old


@pytest.mark.parametrize("rows", [slice(0, 1), slice(-1, None)])
def test_a_weight_that_was_never_written_is_seen_by_its_values(folder, model, rows):
    weight = model.network.model.layers[1].mlp.up_proj.weight
    with torch.no_grad():
        kept = weight[rows].clone()
        weight[rows] = 1.1 * kept
        found = report(folder, model.network)
        weight[rows] = kept
    assert found.verdict == "fail" and "layers.1.mlp.up_proj" in found.evidence
    assert report(folder, model.network).verdict == "ok"


def test_shapes_leftovers_and_prefixes(copy, model):
    changed(copy, lambda w: {n.removeprefix("model."): t for n, t in w.items()})
    assert report(copy, model.network).verdict == "ok"
    changed(copy, lambda w: w | {"rotary_emb.inv_freq": torch.ones(4)})
    assert report(copy, model.network).verdict == "ok"
    changed(copy, lambda w: w | {"mtp.fc.weight": torch.ones(4)})
    found = report(copy, model.network)
    assert found.verdict == "warn" and "mtp.fc.weight" in found.evidence
    changed(copy, lambda w: w | {"lm_head.weight": w["lm_head.weight"][:60].clone()})
    assert "have another shape in the file (the first: lm_head" in report(copy, model.network).evidence


def test_experts_that_are_joined_on_loading_are_not_missing(copy, model):
    def split(w):
        name = "model.layers.0.mlp.up_proj.weight"
        halves = w.pop(name).chunk(2)
        return w | {f"model.layers.0.mlp.up_proj.{i}.weight": half.clone() for i, half in enumerate(halves)}

    found = report(changed(copy, split), model.network)
    assert found.verdict == "ok" and "1 more were joined" in found.evidence
    changed(copy, lambda w: {n: t for n, t in w.items() if "up_proj.1" not in n})
    assert report(copy, model.network).verdict == "fail"


def test_damaged_and_missing_files_fail_their_own_check_alone(copy, model):
    (copy / "model.safetensors").write_bytes(b"\xff" * 64)
    found = verdicts(preflight(model, draft_folder=copy, target_folder=copy))
    assert found["load report"] == "fail" and found["rope"] == found["recurrence"] == "ok"
    (copy / "model.safetensors").unlink()
    with pytest.raises(InputError, match="no safetensors files"):
        preflight_weights.headers(copy)
    (copy / preflight_weights.INDEX).write_text(json.dumps({"weight_map": {"a": "../../etc/passwd"}}))
    with pytest.raises(InputError, match="not in the folder"):
        preflight_weights.headers(copy)


def test_a_head_is_tied_where_the_config_says_so(tmp_path, copy, model):
    tied = HfModel.open(torch_folder(tmp_path / "tied", tie_word_embeddings=True)).network
    assert preflight_weights.tied_head(tied, {}).verdict == "ok"
    assert report(tmp_path / "tied", tied).verdict == "ok"
    tied.lm_head.weight = torch.nn.Parameter(tied.lm_head.weight.detach().clone())
    assert preflight_weights.tied_head(tied, {}).verdict == "warn"
    tied.lm_head.weight = torch.nn.Parameter(0.5 * tied.lm_head.weight.detach())
    assert preflight_weights.tied_head(tied, {}).verdict == "fail"
    tied.lm_head.weight, tied.config.tie_word_embeddings = tied.model.embed_tokens.weight, False
    found = preflight_weights.tied_head(tied, preflight_weights.headers(copy))
    assert found.verdict == "fail" and "head of its own" in found.evidence


def test_a_draft_without_a_head_has_the_targets_whose_padding_does_not_count(copy, model):
    stored = preflight_weights.headers(changed(copy, lambda w: {n: t for n, t in w.items() if "lm_head" not in n}))
    draft, target = HfModel.open(torch_folder(copy.parent / "a", tie_word_embeddings=False)).network, model.network
    rows = target.lm_head.weight.detach()
    draft.lm_head.weight = torch.nn.Parameter(torch.cat([rows, torch.zeros(8, rows.shape[1])]))
    assert preflight_weights.shared_head(draft, target, stored).verdict == "ok"
    with torch.no_grad():
        draft.lm_head.weight[5] += 1
    assert preflight_weights.shared_head(draft, target, stored).verdict == "fail"


@pytest.mark.parametrize(
    ("d2t", "verdict", "said"),
    [
        (None, "fail", "no tensor d2t"),
        (torch.zeros(16, dtype=torch.int64), "fail", "d2t is 0 everywhere"),
        (torch.arange(16), "ok", "16 draft ids"),
        (torch.arange(15), "fail", "15 entries for a draft vocabulary of 16"),
        (5 * torch.arange(16), "fail", "outside the target's 64"),
        (-torch.arange(16) + (torch.arange(16) == 3), "fail", "leads 14 draft ids"),
        (torch.ones(16), None, "must be a list of integers"),
    ],
)
def test_the_map_of_a_smaller_draft_vocabulary(copy, d2t, verdict, said):
    changed(copy, lambda w: w if d2t is None else w | {"d2t": d2t}, draft_vocab_size=16)
    stored = preflight_weights.headers(copy)
    if verdict is None:
        with pytest.raises(InputError, match=said):
            preflight_weights.token_map(copy, stored)
    else:
        found = preflight_weights.token_map(copy, stored)
        assert found.verdict == verdict and said in found.evidence


# configs


def node(folder, name="config.json"):
    return preflight_config.read_config(folder, name)


def test_rope_warns_where_the_draft_ends_and_fails_where_it_runs_on_the_targets_states(folder, copy):
    assert preflight_config.rope(node(folder), node(folder)).verdict == "ok"
    changed(copy, rope_parameters={"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0})
    assert preflight_config.rope(node(folder), node(copy)).verdict == "ok"  # trained apart, and no shorter
    changed(copy, max_position_embeddings=256)
    found = preflight_config.rope(node(folder), node(copy))
    assert found.verdict == "warn" and "64 positions, the target 256" in found.evidence and "yarn" in found.evidence
    eagle = node(changed(shutil.copytree(folder, copy.parent / "eagle"), architectures=["LlamaForCausalLMEagle3"]))
    found = preflight_config.rope(eagle, node(copy))
    assert found.verdict == "fail" and "rope_type: None against 'yarn'" in found.evidence
    assert preflight_config.rope(None, eagle).verdict == "skipped"


def test_quantisation_is_the_drafts_own(folder, copy):
    own, target = node(folder), node(changed(copy, quantization_config={"quant_method": "mxfp4"}))
    assert preflight_config.quantisation(own, own, {"w": "BF16"}, {}).verdict == "ok"
    found = preflight_config.quantisation(own, target, {"w": "BF16"}, {"quant_method": "mxfp4"})
    assert found.verdict == "fail" and "(the target's)" in found.evidence
    assert preflight_config.quantisation(own, target, {"w": "BF16"}, {}).verdict == "warn"
    dropped = preflight_config.quantisation(own, own, {"a.weight_scale": "F32"})
    assert dropped.verdict == "fail" and "a.weight_scale" in dropped.evidence
    assert preflight_config.quantisation(target, target, {"w": "BF16"}).verdict == "fail"
    assert preflight_config.quantisation(target, target, {"experts.gate_up_proj_scales": "U8"}).verdict == "ok"


def test_defaults_of_sampling_are_compared_as_they_would_be_taken(copy, folder):
    (copy / "generation_config.json").write_text(json.dumps({"temperature": 0.6, "top_k": 50, "do_sample": False}))
    found = preflight_config.sampling_defaults(node(copy, "generation_config.json"), None)
    assert found.verdict == "warn" and found.evidence == "temperature: 0.6 against 1.0"
    assert preflight_config.sampling_defaults(None, None).verdict == "skipped"


# drafters


class Naive(ModelDrafter):
    """Drafts all tokens from the same input: the state is emptied before each."""

    def propose(self, tokens, k, rng):
        ids = []
        for _ in range(k):
            self.model.reset()
            ids.append(rng.pick(self.model.forward(list(tokens), n_logits=1)[0])[0])
        return Proposal(tuple(ids))


class Appending(ModelDrafter):
    """Appends its drafts to the tokens it was given."""

    def propose(self, tokens, k, rng):
        proposal = super().propose(tokens, k, rng)
        tokens.extend(proposal.ids)
        return proposal


class Untrimmed(ModelDrafter):
    """Leaves one rejected draft in the state, and feeds only the newest token in the next round."""

    def commit(self, tokens):
        wrong = max(0, self.model.n_past - (len(tokens) - 1) - 1)
        self.model.rewind(min(wrong, self.model.n_past))
        self._fed = []

    def propose(self, tokens, k, rng):
        behind = (*range(self.model.n_past), *tokens[-1:]) if self.model.n_past >= len(tokens) else tokens
        return super().propose(behind, k, rng)


class Remembering(LookupDrafter):
    """Does not forget the generations before."""

    started = 0

    def start(self, tokens):
        self.started += 1

    def propose(self, tokens, k, rng):
        return Proposal((self.started,) * k)


def test_real_drafters_are_pure_and_see_their_own_drafts(model):
    for drafter in (ModelDrafter(cyclic(20)), ModelDrafter(markov(64, order=2)), ModelDrafter(model)):
        own = drafter.model
        assert preflight_drafter.purity(drafter, TOKENS[:2], 4).verdict == "ok"
        found = preflight_drafter.recurrence(drafter, TOKENS[:2], 4)
        assert found.verdict == "ok" and "of 4 rounds" in found.evidence
        assert drafter.model is own
    assert preflight_drafter.purity(LookupDrafter(), (1, 2, 1, 2, 1), 4).verdict == "ok"
    assert preflight_drafter.recurrence(LookupDrafter(), TOKENS, 4).verdict == "skipped"


def test_drafts_from_the_same_input_are_named():
    found = preflight_drafter.recurrence(Naive(markov(64, order=2)), TOKENS, 3)
    assert found.verdict == "fail" and "draft 2 was not made from prefix + 1 drafts" in found.evidence
    assert "all 3 rows are those of the same 4 tokens" in found.evidence


def test_a_drafter_that_changes_the_callers_tokens_is_named():
    found = preflight_drafter.purity(Appending(markov(64)), TOKENS, 3)
    assert found.verdict == "fail" and "the caller's 4 tokens are 7 after drafting" in found.evidence


def test_a_rejected_draft_that_stays_in_the_state_is_seen_in_the_next_round():
    found = preflight_drafter.recurrence(Untrimmed(markov(64, order=2)), TOKENS, 3)
    assert found.verdict == "fail" and found.evidence.startswith("after a round that kept 0, draft 1")


def test_a_drafter_that_does_not_forget_is_impure():
    assert "otherwise the second time" in preflight_drafter.purity(Remembering(), (1, 2, 1), 3).evidence


class Off:
    """A model that goes back by a wrong number of tokens, in fact or in its count."""

    def __init__(self, model, by, lies=0):
        self._model, self._by, self._lies = model, by, lies

    def __getattr__(self, name):
        return getattr(self._model, name)

    @property
    def n_past(self):
        return self._model.n_past + self._lies * bool(self._model.n_past)

    def rewind(self, n):
        if n:
            self._model.rewind(n + self._by)


@pytest.mark.parametrize("by", [-1, 1, 2])
def test_a_cache_that_is_trimmed_wrongly_is_seen_by_length_or_by_logits(model, by):
    for one in (markov(64, order=4), model):
        found = preflight_drafter.cache_after_rejection(Off(one, by), TOKENS, 4)
        assert found.verdict == "fail" and "tokens in the state instead of" in found.evidence
        one.reset()
    honest = preflight_drafter.cache_after_rejection(Off(model, by, lies=by), TOKENS, 4)
    assert honest.verdict == "fail" and "next logits differ" in honest.evidence
    model.reset()


def test_a_model_that_refuses_to_go_back_is_skipped_with_its_reason():
    class Refusing(Off):
        def rewind(self, n):
            raise RewindError("its state cannot be cropped")

    found = preflight_drafter.cache_after_rejection(Refusing(markov(64), 0), TOKENS, 2)
    assert found.verdict == "skipped" and "cannot be cropped" in found.evidence


# training


def curve(rates, losses):
    return Curve.of([{"step": i + 1, "lr": r, "loss": x} for i, (r, x) in enumerate(zip(rates, losses, strict=True))])


def test_a_rate_that_died_while_the_loss_fell_fails():
    dead = [1e-3] * 50 + [0.0] * 50
    assert learning_rate(curve(dead, np.linspace(9, 5, 100))).verdict == "fail"
    assert learning_rate(curve(dead, [3.0] * 100)).verdict == "warn"
    assert learning_rate(curve([1e-3] * 100, np.linspace(9, 5, 100))).verdict == "ok"
    assert learning_rate(None).verdict == "skipped"
