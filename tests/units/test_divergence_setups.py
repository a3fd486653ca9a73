"""Set-ups: each planted fault shows in those it must show in, and in no others."""

import copy
from contextlib import ExitStack, contextmanager

import numpy as np
import pytest
import torch

from specnb.divergence import local
from specnb.divergence import pair as small
from specnb.divergence.faults import FAULTS
from specnb.divergence.grading.benign import other_products
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
    "expert_scale_in_op": ("S0", "S0w", "S1", "S2", "S3", "S4"),
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


def test_a_script_with_tokens_that_the_target_lacks_is_refused(pair):
    small_target = copy.deepcopy(pair.target)
    small_target.resize_token_embeddings(max(TEXT))
    with pytest.raises(InputError, match=f"the text has token {max(TEXT)}, and the target knows {max(TEXT)}"):
        Lab(pair.draft, small_target, script=SCRIPT)


def test_linear_layers_in_half_precision_are_rounding_and_a_scale_of_the_same_size_is_none(pair):
    under = lab(pair)
    rounded = under.run("S0", other_products)
    assert rounded.clean and rounded.coarser == "bfloat16" and rounded.errors["error"].max() > 1e-3
    with_autocast = under.run("S0", lambda draft, neighbour: torch.autocast("cpu", dtype=torch.bfloat16))
    assert with_autocast.trace.rows(role="out")["digest"].ne("").all()  # measured in float32 all the same

    @contextmanager
    def scaled_everywhere(draft, neighbour):
        with ExitStack() as planted:
            for layer in range(4):
                planted.enter_context(FAULTS["expert_scale_in_op"](draft, neighbour, layer=layer, eps=0.004))
            yield

    for service in (FAULTS["expert_scale_in_op"], scaled_everywhere):
        assert not under.run("S0", service).clean and not under.run("S0", service).coarser


def test_experts_chosen_at_a_tie_are_rounding_and_others_are_not(pair):
    """Which of two equal experts is chosen means nothing."""
    draft = copy.deepcopy(pair.draft)
    router = draft.model.layers[0].mlp.router
    with torch.no_grad():
        router.weight[1], router.bias[1] = router.weight[0], router.bias[0]
    under = Lab(draft, script=SCRIPT)

    @contextmanager
    def exchanged(first, second):
        original = router.forward

        def forward(states):
            logits, scores, chosen = original(states)
            other = torch.where(chosen == first, second, torch.where(chosen == second, first, chosen))
            return logits, scores, other

        router.forward = forward
        try:
            yield
        finally:
            del router.forward

    assert under.run("S0", lambda draft, neighbour: exchanged(0, 1)).clean
    wrong = under.run("S0", lambda draft, neighbour: exchanged(0, 2)).wrong
    assert wrong["module"].iloc[0] == "layers.0.mlp.router"


def test_masks_with_infinities_are_compared():
    inf = float("inf")
    ours = torch.tensor([[0.0, -inf], [0.0, 0.0], [1.0, float("nan")]])
    same = local._apart(ours, ours.clone(), 0)
    assert same["error"].tolist() == [0, 0, 0]
    theirs = torch.tensor([[0.0, -inf], [0.0, -inf], [1.0, 0.0]])
    assert local._apart(ours, theirs, 0)["error"].tolist() == [0, inf, inf]
