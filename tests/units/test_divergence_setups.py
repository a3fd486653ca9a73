"""Set-ups: each planted fault shows in those it must show in, and in no others."""

import numpy as np
import pytest
import torch

from specnb.divergence import pair as small
from specnb.divergence.faults import FAULTS
from specnb.divergence.script import Script
from specnb.divergence.setups import FIRST, NEIGHBOUR, SETUPS, Lab
from specnb.errors import InputError

TEXT = np.random.default_rng(0).integers(0, 256, 24).tolist()
SCRIPT = Script.drafting(TEXT, prompt=14, k=3, vocab_size=256)
WRONG = {
    None: (),
    "positional_registry": ("S2", "S3", "S4"),  # beside itself the foreign experts are its own values
    "shared_buffer": ("S1", "S2", "S3"),  # nothing stands in the buffer until the neighbour has run
    "neighbour_read": ("S1", "S2", "S3", "S4"),
    "expert_scale_in_op": ("S0", "S1", "S2", "S3", "S4"),
}


@pytest.fixture(scope="module")
def pair():
    return small.pair()


def lab(pair, fault=None):
    return Lab(pair.draft, pair.target, script=SCRIPT, deploy=FAULTS[fault] if fault else None)


@pytest.mark.parametrize("fault", WRONG)
def test_a_fault_shows_in_its_set_ups(pair, fault):
    under = lab(pair, fault)
    outcomes = {name: under.run(name) for name in (*FIRST, "S4")}
    assert tuple(name for name, one in outcomes.items() if not one.clean) == WRONG[fault]


def test_foreign_weights_are_seen_even_where_their_values_are_the_drafts_own(pair):
    beside_itself = lab(pair, "positional_registry").run("S1")
    assert beside_itself.clean and {*beside_itself.foreign["owner"]} == {NEIGHBOUR}
    assert {*beside_itself.foreign["module"]} == {f"layers.{i}.mlp.experts" for i in range(4)}
    assert lab(pair).run("S3").foreign.empty


def test_the_draft_is_left_as_it_was(pair):
    before = {name: value.clone() for name, value in pair.draft.state_dict().items()}
    lab(pair, "expert_scale").run("S0")
    assert all(torch.equal(value, before[name]) for name, value in pair.draft.state_dict().items())


def test_set_ups_that_cannot_be_run_are_refused(pair):
    alone = Lab(pair.draft, script=SCRIPT)
    with pytest.raises(InputError, match="target"):
        alone.run("S3")
    with pytest.raises(InputError, match=", ".join(SETUPS)):
        alone.run("S9")
    with pytest.raises(InputError, match="float8_e5m2"):
        Lab(torch.nn.Linear(2, 2).to(torch.float8_e5m2), script=SCRIPT)
