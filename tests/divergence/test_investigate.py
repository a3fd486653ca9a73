"""Investigations (verdict, first divergence, coverage, exit code), setups, and the report."""

import copy
import json
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from transformers import MambaConfig, MambaForCausalLM, MixtralConfig, MixtralForCausalLM

from specnb.divergence.causes import Cause, Sign
from specnb.divergence.faults.planting import replace_forward, replaced
from specnb.divergence.investigate import investigate, judge_service, text
from specnb.divergence.setups import FIRST, ON_DEMAND, Coverage, Lab
from specnb.errors import InputError
from tests.benchmarks.divergence_score.faults import FAULTS
from tests.divergence.lab import TOKENS

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


def patched(path, change):
    """Return a service in which `change` modifies the output of a module's forward."""
    changed = lambda original, *args, **kwargs: change(original(*args, **kwargs))  # noqa: E731
    return lambda draft, neighbour: replace_forward(draft.get_submodule(path), changed)


def test_a_draft_that_hooks_change_or_that_is_random_is_inconclusive(lab):
    """If a service computes something else under hooks, the lab would judge the wrong run."""

    watched = patched(
        "lm_head", lambda logits: logits + (0.0 if lab.draft.lm_head._forward_hooks else 1.0)
    )
    found = judge_service(lab, deploy=watched, setups=["S0"])
    assert not found.inert and found.verdict == "INCONCLUSIVE" and "hooks" in found.reason
    noise = torch.Generator().manual_seed(0)
    shaken = patched(
        "lm_head", lambda logits: logits * (1 + 1e-7 * torch.randn(logits.shape, generator=noise))
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
    ("path", "change", "cause"),
    [("model.layers.1.mlp.router", other_order, "ROUTING"), ("", scaled, "COMPUTATION")],
    ids=[
        "the same experts with one another's weights",
        "what the outermost model does to its logits",
    ],
)
def test_a_changed_output_is_attributed_to_its_module(lab, path, change, cause):
    found = judge_service(lab, deploy=patched(path, change), setups=["S0"])
    assert found.first.module == path.removeprefix("model.") and found.causes[0].name == cause
    assert path or "first at the model itself" in found.line


def test_an_incomparable_module_is_judged_as_part_of_its_container():
    """In this mixture of experts, the activation is a module that gets one expert's tokens."""
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
    )
    draft = MixtralForCausalLM(config).eval()
    act = "layers.1.mlp.experts.act_fn"
    with torch.no_grad():
        for weight in (weight for weight in draft.parameters() if weight.ndim > 1):
            weight.normal_(0, 0.2)
    sound = investigate(draft, setups=["S0", "S0w"])
    assert sound.verdict == "SOUND" and act in sound.coverage.with_holder
    found = investigate(
        draft, deploy=patched(f"model.{act}", lambda out: out * 1.05), setups=["S0"]
    )
    assert found.first.module == "layers.1.mlp.experts"


def test_a_draft_without_a_cache_to_crop_is_refused_with_a_remedy():
    draft = MambaForCausalLM(
        MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1, state_size=4)
    ).eval()
    with pytest.raises(
        InputError, match=r"MambaForCausalLM gives no `past_key_values`.*divergence capture"
    ):
        investigate(draft)


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

    def exchanged(first, second):
        def run(original, states):
            logits, scores, chosen = original(states)
            other = torch.where(
                chosen == first, second, torch.where(chosen == second, first, chosen)
            )
            return logits, scores, other

        return replace_forward(router, run)

    assert under.run("S0", lambda draft, neighbour: exchanged(0, 1)).clean
    wrong = under.run("S0", lambda draft, neighbour: exchanged(0, 2)).wrong
    assert wrong["module"].iloc[0] == "layers.0.mlp.router"


def last_logits(draft, neighbour):
    """Compute logits only for the last token of each feed, as engines do."""
    original = draft.forward
    return replaced(
        draft, "forward", lambda *args, **kwargs: original(*args, **kwargs, logits_to_keep=1)
    )


@contextmanager
def last_logits_of_another_head(draft, neighbour):
    larger = draft.lm_head.register_forward_hook(lambda module, args, logits: 1.05 * logits)
    with last_logits(draft, neighbour), larger:
        yield


def test_logits_of_only_the_last_tokens_are_compared(lab):
    sound, wrong = (
        lab.run("S0", service) for service in (last_logits, last_logits_of_another_head)
    )
    assert sound.clean and Coverage.of(sound, lab.draft).complete
    assert {*wrong.wrong["module"]} == {"lm_head"}


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
