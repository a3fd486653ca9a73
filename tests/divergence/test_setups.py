"""Set-ups: each planted fault shows in those it must show in, and in no others."""

import copy
from contextlib import ExitStack, contextmanager

import pytest
import torch

from specnb.divergence.faults import FAULTS
from specnb.divergence.faults.planting import forward_replaced, replaced
from specnb.divergence.setups import FIRST, Coverage, Lab
from specnb.errors import InputError
from tests.benchmarks.divergence_score.controls import other_products

WRONG = {
    None: (),
    "positional_registry": ("S2", "S3", "S4"),  # beside itself the foreign experts are its own values
    "shared_buffer": ("S1", "S2", "S3"),  # nothing stands in the buffer until the neighbour has run
    "neighbour_read": ("S1", "S2", "S3", "S4"),
    "expert_scale_in_op": ("S0", "S0w", "S1", "S2", "S3", "S4"),
}


@pytest.mark.parametrize("fault", WRONG)
def test_a_fault_shows_in_its_set_ups(divergence_lab, fault):
    outcomes = {name: divergence_lab.run(name, FAULTS[fault] if fault else None) for name in (*FIRST, "S4")}
    assert tuple(name for name, one in outcomes.items() if not one.clean) == WRONG[fault]


def test_what_cannot_be_run_is_refused(divergence_lab):
    with pytest.raises(InputError, match="target"):
        Lab(divergence_lab.draft, script=divergence_lab.script).run("S3")
    with pytest.raises(InputError, match="float8_e5m2"):
        Lab(torch.nn.Linear(2, 2).to(torch.float8_e5m2), script=divergence_lab.script)
    small_target, largest = copy.deepcopy(divergence_lab.target), max(divergence_lab.script.text)
    small_target.resize_token_embeddings(largest)
    with pytest.raises(InputError, match=f"token {largest}, and the target knows {largest}"):
        Lab(divergence_lab.draft, small_target, script=divergence_lab.script)


def test_linear_layers_in_half_precision_are_rounding_and_a_scale_of_the_same_size_is_none(divergence_lab):
    rounded = divergence_lab.run("S0", other_products)
    assert rounded.clean and rounded.coarser == "bfloat16" and rounded.errors["error"].max() > 1e-3
    with_autocast = divergence_lab.run("S0", lambda draft, neighbour: torch.autocast("cpu", dtype=torch.bfloat16))
    assert with_autocast.trace.rows(role="out")["digest"].ne("").all()  # measured in float32 all the same

    @contextmanager
    def scaled_everywhere(draft, neighbour):
        with ExitStack() as planted:
            for layer in range(4):
                planted.enter_context(FAULTS["expert_scale_in_op"](draft, neighbour, layer=layer, eps=0.004))
            yield

    for service in (FAULTS["expert_scale_in_op"], scaled_everywhere):
        found = divergence_lab.run("S0", service)
        assert not found.clean and not found.coarser


def test_what_is_as_small_as_rounding_everywhere_and_adds_up_is_none(divergence_lab):
    """A wrong scale for every other column: no more than rounding to bfloat16 may do once."""

    @contextmanager
    def every_other(draft, neighbour):
        with ExitStack() as planted:
            for module in draft.modules():
                if isinstance(module, torch.nn.Linear):
                    signs = torch.ones(module.out_features)
                    signs[::2] = -1
                    scale = lambda original, x, by=1 + 0.011 * signs: original(x) * by  # noqa: E731
                    planted.enter_context(forward_replaced(module, scale))
            yield

    found = divergence_lab.run("S0", every_other)
    assert not found.coarser and {*found.wrong["module"].str.rpartition(".")[2]} >= {"q_proj", "o_proj", "lm_head"}


def test_experts_chosen_at_a_tie_are_rounding_and_others_are_not(divergence_lab):
    """Which of two equal experts is chosen means nothing."""
    draft = copy.deepcopy(divergence_lab.draft)
    router = draft.model.layers[0].mlp.router
    with torch.no_grad():
        router.weight[1], router.bias[1] = router.weight[0], router.bias[0]
    under = Lab(draft, script=divergence_lab.script)

    def exchanged(first, second):
        def run(original, states):
            logits, scores, chosen = original(states)
            other = torch.where(chosen == first, second, torch.where(chosen == second, first, chosen))
            return logits, scores, other

        return forward_replaced(router, run)

    assert under.run("S0", lambda draft, neighbour: exchanged(0, 1)).clean
    wrong = under.run("S0", lambda draft, neighbour: exchanged(0, 2)).wrong
    assert wrong["module"].iloc[0] == "layers.0.mlp.router"


def last_logits(draft, neighbour):
    """Logits are made of the last token alone, as engines do where a text goes on."""
    original = draft.forward
    return replaced(draft, "forward", lambda *args, **kwargs: original(*args, **kwargs, logits_to_keep=1))


@contextmanager
def last_logits_of_another_head(draft, neighbour):
    larger = draft.lm_head.register_forward_hook(lambda module, args, logits: 1.05 * logits)
    with last_logits(draft, neighbour), larger:
        yield


def test_logits_of_last_tokens_alone_are_compared(divergence_lab):
    sound, wrong = (divergence_lab.run("S0", service) for service in (last_logits, last_logits_of_another_head))
    assert sound.clean and Coverage.of(sound, divergence_lab.draft).complete
    assert {*wrong.wrong["module"]} == {"lm_head"}
