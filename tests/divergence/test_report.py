"""The report of an investigation, and reproductions that run where this package is not."""

import dataclasses
import math
import os
import subprocess
import sys

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from specnb.divergence import pair as small
from specnb.divergence import report
from specnb.divergence.causes import Cause, Sign
from specnb.divergence.faults import FAULTS
from specnb.divergence.investigate import judge
from specnb.divergence.repro import minimal, standalone
from specnb.divergence.script import Feed, Script
from specnb.divergence.setups import Lab
from specnb.errors import InputError

TEXT = np.random.default_rng(0).integers(0, 256, 14).tolist()
SCRIPT = Script.drafting(TEXT, prompt=11, k=2, vocab_size=256)


@pytest.fixture(scope="module")
def pair():
    return small.pair()


@pytest.fixture(scope="module")
def lab(pair):
    return Lab(pair.draft, pair.target, script=SCRIPT)


@pytest.fixture(scope="module")
def wrong(lab):
    return judge(lab, deploy=FAULTS["positional_registry"], setups=("S0", "S1", "S2"))


@pytest.fixture(scope="module")
def sound(lab):
    return judge(lab, setups=("S0", "S2"))


@pytest.fixture(scope="module")
def fed(lab):
    return judge(lab, deploy=FAULTS["dummy_tokens"], setups=("S0",))


# --- words and tables -----------------------------------------------------------------------------------------------


def test_every_question_has_an_answer_and_coverage_is_among_them(wrong, sound, fed):
    for found in (wrong, sound):
        answers = report.answers(found)
        assert all(question.endswith("?") and answer.endswith(".") for question, answer in answers.items())
        assert str(found.coverage) in answers["What was looked at?"] and "S6" in answers["What was not?"]
        assert report.text(found).startswith(found.line)
    assert report.answers(wrong)["Same tokens in all runs?"].startswith("Yes")
    assert report.answers(fed)["Same tokens in all runs?"].startswith("NO, the model got others in S0")
    for changed, answer in ({}, "No:"), ({"inert": False}, "YES"), ({"inert": False, "repeats": False}, "Not known"):
        found = report.answers(dataclasses.replace(sound, **changed))
        assert found["Do the hooks change anything?"].startswith(answer)


def test_the_earliest_nodes_say_what_was_read_and_that_inputs_were_right(wrong, sound, fed):
    first = report.earliest(wrong).iloc[0]
    assert first["module"] == "layers.0.mlp.experts" == wrong.first.module
    assert "neighbour:model.layers.0.mlp.experts.gate_up_proj" in first["reads"]
    assert first["in_error"] < first["floor"] < first["error"]
    tokens = report.earliest(fed).iloc[0]
    assert tokens["module"] == "" and math.isnan(tokens["in_error"])
    assert len(report.earliest(wrong, 2)) == 2 and report.earliest(sound).empty


def test_cells_are_what_the_heat_map_shows(wrong):
    heat = wrong.heat("S2")
    cells = report.cells(wrong, "S2").set_index(["module", "position"])
    with np.errstate(divide="ignore"):
        expected = np.log10(cells["error"] / cells["floor"]).clip(-1, 8)
    assert len(cells) == heat.notna().sum().sum() and np.allclose(heat.stack().loc[cells.index], expected)


@pytest.mark.parametrize(
    ("best", "second", "known"),
    [(0.1, -1.6, False), (1.3, -1.6, True), (2.0, 1.0, True), (6.0, 5.5, False), (-1.0, -1.5, False)],
)
def test_a_cause_is_named_alone_where_enough_speaks_for_it_and_less_for_the_next(wrong, best, second, known):
    signs = (Sign(2, "it is wrong alone, too"),)
    causes = (Cause("WEIGHTS", best, signs, (), ""), Cause("STATE", second, (), (), ""))
    found = dataclasses.replace(wrong, causes=causes)
    expected = "cause WEIGHTS (it is" if known else "cause not known; likeliest WEIGHTS (it is"
    assert f"; {expected} wrong alone, too); " in found.line and found.document()["cause_known"] is known


def test_the_slots_of_the_case_are_those_of_correct_allocation():
    table = report.slots()
    first = table[table["model"] == "draft 20b"].groupby("beside")["first_slot"].min()
    assert first.to_dict() == {"gpt-oss-120b": 336, "gpt-oss-20b": 176}
    assert table.groupby("beside")["gid"].count().to_dict() == {"gpt-oss-120b": 6, "gpt-oss-20b": 4}


# --- reproductions --------------------------------------------------------------------------------------------------


def made(pair, lab, fault, setup="S0", **options):
    outcome = lab.run(setup, FAULTS[fault])
    return minimal(pair.draft, pair.target, outcome=outcome, deploy=FAULTS[fault], **options)


@pytest.fixture(scope="module")
def identity(pair, lab):
    return made(pair, lab, "positional_registry", "S2")


GUARD = """
import runpy, sys
sys.modules["specnb"] = None
runpy.run_path("repro.py", run_name="__main__")
"""


def test_an_identity_fault_becomes_one_token_through_one_module(identity, tmp_path):
    """Run with this package nowhere to be found: isolated, elsewhere, and its import forbidden."""
    assert identity.kind == "module" and identity.script.feeds == (Feed(tuple(TEXT[:1])),)
    script = identity.write(tmp_path)
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "OMP_NUM_THREADS") if name in os.environ}
    command = [sys.executable, "-I", "-c", GUARD]
    done = subprocess.run(command, cwd=script.parent, env=kept, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "layers.0.mlp.experts" in done.stdout and "DIVERGENT" in done.stdout
    assert "1 of 1 tokens differ" in done.stdout and not done.stderr
    # only the bank's own weights go along
    weights = {name for name in load_file(tmp_path / "repro.safetensors") if name.startswith("weights/")}
    assert len(weights) == 4 and all("layers.0.mlp.experts" in name for name in weights)


def test_the_script_ends_with_zero_once_the_captured_tensor_is_right(identity, tmp_path, capsys):
    identity.write(tmp_path)
    right = standalone.rerun(identity.facts, identity.tensors).detach()
    save_file({"captured": right.contiguous()}, tmp_path / "fixed.safetensors")
    assert standalone.main(tmp_path, tmp_path / "fixed.safetensors") == 0 and "SOUND" in capsys.readouterr().out
    assert standalone.main(tmp_path) == 1


@pytest.mark.parametrize(
    ("fault", "kind", "tokens"), [("rope_mismatch", "module", 9), ("dummy_tokens", "model", 9)]
)  # fmt: skip
def test_text_is_as_short_as_the_fault_allows(pair, lab, fault, kind, tokens):
    found = made(pair, lab, fault, runs=2)
    assert (found.kind, len(found.script.text)) == (kind, tokens)
    assert str(tokens) in str(found) and found.runs <= 2


@pytest.mark.slow
def test_feeds_that_are_needed_are_kept_and_runs_are_bounded(pair, lab):
    script = Script.drafting(TEXT[:7], prompt=3, k=2, vocab_size=256)
    found = made(pair, Lab(pair.draft, script=script), "untrimmed", runs=8)
    assert found.kind == "model" and any(feed.forget for feed in found.script.feeds)
    assert len(found.script.feeds) <= len(script.feeds) and len(found.script.feeds[0].ids) < 3
    assert made(pair, lab, "rope_mismatch", runs=1).runs == 1


def test_what_cannot_be_reproduced_is_refused(pair, lab, monkeypatch):
    outcome = lab.run("S0", FAULTS["expert_scale"])
    with pytest.raises(InputError, match="not wrong again"):
        minimal(pair.draft, pair.target, outcome=outcome)  # without the service that made it wrong
    monkeypatch.setattr(type(pair.draft), "__module__", "mine")
    with pytest.raises(InputError, match=r"mine\.GptOssForCausalLM"):
        minimal(pair.draft, pair.target, outcome=outcome, deploy=FAULTS["expert_scale"])
