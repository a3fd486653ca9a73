"""The report of an investigation, and reproductions that run where this package is not."""

import dataclasses
import math
import subprocess
import sys

import numpy as np
import pytest
from safetensors.torch import save_file

from specnb.divergence import pair as small
from specnb.divergence import report, repro
from specnb.divergence.causes import Cause, Sign
from specnb.divergence.faults import FAULTS
from specnb.divergence.investigate import judge
from specnb.divergence.script import Script
from specnb.divergence.setups import Lab
from specnb.errors import InputError

TEXT = np.random.default_rng(0).integers(0, 256, 14).tolist()
SCRIPT = Script.drafting(TEXT, prompt=11, k=2, vocab_size=256)


@pytest.fixture(scope="module")
def lab():
    return Lab(*small.pair(), script=SCRIPT)


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


GUARD = """
import runpy, sys
sys.modules["specnb"] = None
runpy.run_path("repro.py", run_name="__main__")
"""


@pytest.mark.parametrize(
    ("fault", "setup", "n_wrong"),
    [("positional_registry", "S2", 14), ("rope_mismatch", "S0", 6), ("random_head", "S0", 14)],
)
def test_the_first_module_is_reproduced_and_sound_once_mended(lab, fault, setup, n_wrong, tmp_path, capsys):
    outcome = lab.run(setup, FAULTS[fault])
    made = repro.isolated(lab.draft, outcome)
    made.write(tmp_path)
    assert repro.main(tmp_path) == 1
    assert f"{made.facts['path']}, out: {n_wrong} of 14 tokens differ" in capsys.readouterr().out
    weights = {name.removeprefix("weights/") for name in made.tensors if name.startswith("weights/")}
    assert {*lab.draft.get_submodule(made.facts["path"]).state_dict()} <= weights and len(weights) <= 4
    save_file({"captured": repro.rerun(made.facts, made.tensors).contiguous()}, tmp_path / "fixed.safetensors")
    assert repro.main(tmp_path, tmp_path / "fixed.safetensors") == 0 and "SOUND" in capsys.readouterr().out


def test_the_script_runs_where_this_package_is_not(lab, wrong, tmp_path):
    """Isolated, elsewhere, and with the import of this package forbidden."""
    repro.isolated(lab.draft, wrong.case.bad).write(tmp_path)
    done = subprocess.run([sys.executable, "-I", "-c", GUARD], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1 and "DIVERGENT" in done.stdout and not done.stderr


@pytest.mark.parametrize("fault", ["kv_slot_swap", "dummy_tokens"])
def test_what_one_module_does_not_show_is_refused(lab, fault, monkeypatch):
    with pytest.raises(InputError, match="its cache or its caller"):
        repro.isolated(lab.draft, lab.run("S0", FAULTS[fault]))
    other = small.make("draft", seed=7)  # other weights than those that were investigated
    outcome = lab.run("S0", FAULTS["expert_scale"])
    with pytest.raises(InputError, match="does not show"):
        repro.isolated(other, outcome)
    monkeypatch.setattr(type(lab.draft), "__module__", "mine")
    with pytest.raises(InputError, match=r"mine\.GptOssForCausalLM"):
        repro.isolated(lab.draft, outcome)
