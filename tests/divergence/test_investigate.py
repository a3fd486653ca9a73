"""Investigations (verdict, first divergence, coverage, exit code), setups, and the report."""

import copy
import json
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import pytest
import torch

from specnb.divergence.causes import Cause, Sign
from specnb.divergence.faults.planting import replaced
from specnb.divergence.investigate import investigate, judge_service, text
from specnb.divergence.setups import FIRST, ON_DEMAND, Coverage, Lab
from specnb.errors import InputError
from tests.benchmarks.divergence_score.faults import FAULTS
from tests.divergence.lab import TOKENS, patched
from tests.tiny_models import torch_model

BANK = "layers.0.mlp.experts"


@pytest.fixture(scope="module")
def lab(divergence_lab):
    return divergence_lab


@pytest.fixture(scope="module")
def foreign(lab):
    """The case: the draft's experts are looked up by position, and the target's come first."""
    return judge_service(lab, deploy=FAULTS["positional_registry"])


def test_a_sound_draft_is_sound_in_every_set_up(lab):
    found = judge_service(lab)
    assert found.verdict == "SOUND" and found.exit_code == 0 and found.first is None
    assert found.repeats and found.inert and found.coverage.complete
    assert tuple(found.outcomes) == FIRST  # nothing is wrong, so no more setups run
    assert found.nodes().empty and not found.causes


def test_the_case_is_solved_in_one_call(foreign):
    assert foreign.line.startswith(
        f"DIVERGENT: first at {BANK}, {TOKENS} of {TOKENS} tokens from 0 on; cause IDENTITY"
    )
    assert list(foreign.nodes()["module"]) == [f"layers.{i}.mlp.experts" for i in range(4)]
    assert list(foreign.setups()["foreign"]) == [0, 0, 16, 16, 16, 16, 16, 16]
    read = json.loads(json.dumps(foreign.document(), allow_nan=False))
    assert (read["schema"], read["exit_code"], read["first"]["module"]) == (1, 1, BANK)
    assert [row["setup"] for row in read["setups"]] == [*FIRST, *ON_DEMAND]


def test_foreign_weights_are_reported_even_if_their_values_are_right(lab):
    found = judge_service(lab, deploy=FAULTS["positional_registry"], setups=["S0", "S1"])
    assert (
        found.verdict == "INCONCLUSIVE"
        and f"{BANK} read neighbour:" in found.reason
        and "S2" in found.reason
    )
    assert list(found.setups()["verdict"]) == ["clean", "not run", "clean"] + ["not run"] * 5


# --- drafts that are not sound --------------------------------------------------------------------


def test_a_draft_that_hooks_change_or_that_is_random_is_inconclusive(lab):
    """If a service computes something else under hooks, the lab would judge the wrong run."""

    watched = patched("lm_head", lambda out: out + (not lab.draft.lm_head._forward_hooks))
    found = judge_service(lab, deploy=watched, setups=["S0"])
    assert not found.inert and found.verdict == "INCONCLUSIVE" and "hooks" in found.reason
    noise = torch.Generator().manual_seed(0)
    shaken = patched(
        "lm_head", lambda out: out * (1 + 1e-7 * torch.randn(out.shape, generator=noise))
    )
    found = judge_service(lab, deploy=shaken, setups=["S0"])
    assert not found.repeats and found.verdict == "INCONCLUSIVE" and "run to run" in found.reason


def test_wrong_logits_are_inconclusive_even_if_no_module_is_wrong(lab):
    blind = copy.copy(lab)
    blind.floor = lab.floor * 1e9
    blind._kept = {}
    found = judge_service(blind, deploy=FAULTS["kv_slot_swap"], setups=["S0"])
    assert found.verdict == "INCONCLUSIVE" and "the logits differ" in found.reason


def test_a_draft_that_computes_nan_is_reported_with_the_place(lab):
    """NaN equals NaN from run to run, so the draft counts as repeatable."""
    draft = copy.deepcopy(lab.draft)
    with torch.no_grad():
        draft.model.layers[1].mlp.router.weight[0, 0] = float("nan")
    found = investigate(draft, script=lab.script, setups=["S0"])
    assert found.verdict == "INCONCLUSIVE" and found.repeats and found.inert
    assert "gives NaN, first in layers.1.mlp" in found.reason and "at position 0" in found.reason


def other_order(routed):
    logits, weights, chosen = routed
    return logits, weights, chosen.flip(-1)


def scaled(out):
    out.logits = out.logits * 1.3
    return out


@pytest.mark.parametrize(
    ("path", "change", "place", "cause"),
    [
        ("model.layers.1.mlp.router", other_order, "layers.1.mlp.router", "ROUTING"),
        ("", scaled, "the model itself", "COMPUTATION"),
    ],
)
def test_a_changed_output_is_attributed_to_its_module(lab, path, change, place, cause):
    found = judge_service(lab, deploy=patched(path, change), setups=["S0"])
    assert f"first at {place}, " in found.line and found.causes[0].name == cause


def test_an_incomparable_module_is_judged_as_part_of_its_container():
    """In this mixture of experts, the activation is a module that gets one expert's tokens."""
    draft = torch_model("mixtral", num_local_experts=4).eval()
    act = "layers.1.mlp.experts.act_fn"
    sound = investigate(draft, setups=["S0", "S0w"])
    assert sound.verdict == "SOUND" and act in sound.coverage.with_holder
    found = investigate(
        draft, deploy=patched(f"model.{act}", lambda out: out * 1.05), setups=["S0"]
    )
    assert found.first.module == "layers.1.mlp.experts"


def test_a_draft_without_a_cache_to_crop_is_refused_with_a_remedy():
    why = "MambaForCausalLM gives no `past_key_values`.*divergence capture"
    with pytest.raises(InputError, match=why):
        investigate(torch_model("mamba").eval())


# --- setups --------------------------------------------------------------------------------------


def test_missing_and_unsuitable_models_are_refused(lab):
    with pytest.raises(InputError, match="target"):
        Lab(lab.draft, script=lab.script).run("S3")
    with pytest.raises(InputError, match="float8_e5m2"):
        Lab(torch.nn.Linear(2, 2).to(torch.float8_e5m2), script=lab.script)
    small_target = copy.deepcopy(lab.target)
    largest = max(lab.script.text)
    small_target.resize_token_embeddings(largest)
    with pytest.raises(InputError, match=f"token {largest}, expected below {largest}"):
        Lab(lab.draft, small_target, script=lab.script)


def test_another_expert_is_rounding_at_a_tie_and_a_fault_otherwise(lab):
    """It does not matter which of two experts with equal logits is chosen."""
    draft = copy.deepcopy(lab.draft)
    router = draft.model.layers[0].mlp.router
    with torch.no_grad():
        router.weight[1], router.bias[1] = router.weight[0], router.bias[0]
    under = Lab(draft, script=lab.script)

    def exchanged(*experts):
        order = torch.arange(len(router.weight))
        order[[*experts]] = order[[*experts]].flip(0)
        return patched("model.layers.0.mlp.router", lambda out: (*out[:2], order[out[2]]))

    assert under.run("S0", exchanged(0, 1)).clean
    wrong = under.run("S0", exchanged(0, 2)).wrong
    assert wrong["module"].iloc[0] == "layers.0.mlp.router"


def last_logits(change):
    """Return a service that computes logits only for the last token of each feed, as engines do."""

    @contextmanager
    def serve(draft, neighbour):
        forward = partial(draft.forward, logits_to_keep=1)
        with patched("lm_head", change)(draft, neighbour), replaced(draft, "forward", forward):
            yield

    return serve


def test_logits_of_only_the_last_tokens_are_compared(lab):
    sound, scaled = (
        lab.run("S0", last_logits(lambda logits, by=by: by * logits)) for by in (1, 1.05)
    )
    assert sound.clean and Coverage.of(sound, lab.draft).complete
    assert {*scaled.wrong["module"]} == {"lm_head"}


# --- the report -----------------------------------------------------------------------------------


def test_the_report_has_the_verdict_and_the_set_ups_that_did_not_run(foreign):
    report = text(foreign)
    assert report.startswith(foreign.line) and str(foreign.coverage) in report
    few = replace(foreign, outcomes={name: foreign.outcomes[name] for name in ("S0", "S2")})
    assert "set-ups not run: S0w, S1, S3, S4, S5, S6" in text(few)


@pytest.mark.parametrize(
    ("best", "second", "known"),
    [(0.1, -1.6, False), (1.3, -1.6, True), (2.0, 1.0, True), (6.0, 5.5, False)],
)
def test_one_cause_is_named_if_its_score_is_high_and_clearly_ahead(foreign, best, second, known):
    signs = (Sign(2, "it is wrong alone, too"),)
    causes = (Cause("WEIGHTS", best, signs, (), ""), Cause("STATE", second, (), (), ""))
    found = replace(foreign, causes=causes)
    expected = "cause WEIGHTS (it is" if known else "cause not known; likeliest WEIGHTS (it is"
    assert (
        f"; {expected} wrong alone, too); " in found.line
        and found.document()["cause_known"] is known
    )
