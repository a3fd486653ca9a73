"""The report of an investigation: answers, cells of the heat map, and how its cause is named."""

import dataclasses

import numpy as np
import pytest

from specnb.divergence import pair as small
from specnb.divergence import report
from specnb.divergence.causes import Cause, Sign
from specnb.divergence.faults import FAULTS
from specnb.divergence.investigate import judge
from specnb.divergence.script import Script
from specnb.divergence.setups import Lab

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
