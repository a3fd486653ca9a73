"""The drafter `auto` opens drafters that fit, measures them, and does not change texts."""

from functools import partial
from itertools import count

import pytest

from specnb.decode.generate import generate
from specnb.decode.router import Arm, Router
from specnb.draft.load import load_drafter
from specnb.draft.model import ModelDrafter
from specnb.draft.suffix import SuffixDrafter
from specnb.errors import InputError
from specnb.lm import toy
from tests.tiny_models import hf_model


def test_the_router_uses_lookup_if_no_other_drafter_fits():
    target = toy.cyclic(5)
    drafter = load_drafter("auto", target).drafter
    drafted = generate(target, [0, 1], drafter=drafter, max_new_tokens=60)
    assert drafted.drafter == "auto(suffix(x4))" and drafted.k == drafter.chooses_k
    assert len(drafter.choices) == len(drafted.rounds) - (drafted.rounds[-1].k == 0)


def test_a_torch_target_drafts_with_its_own_blocks_and_other_targets_raise_errors():
    target = hf_model()
    plain = generate(target, [5, 6, 7], max_new_tokens=12)
    for name, options in (("exit", {"n_blocks": 1}), ("skip", {"skipped": [0]}), ("auto", {})):
        drafter = load_drafter(name, target, **options).drafter
        drafted = generate(target, [5, 6, 7], drafter=drafter, max_new_tokens=12)
        assert drafted.token_ids == plain.token_ids
    with pytest.raises(InputError, match="backend=hf"):
        load_drafter("exit", toy.cyclic(5))
    with pytest.raises(InputError, match="no-such"):
        load_drafter("auto", target, arms="no-such")


def test_an_unused_draft_model_does_not_process_the_prompt():
    draft = toy.cyclic(5)
    arms = [Arm(SuffixDrafter(), 4), Arm(ModelDrafter(draft), 4, draft_s=100.0)]
    router = Router(arms, [0.0, 1.0, 1.1, 1.2, 1.3, 1.4], clock=partial(next, count(0.0)))
    draft.forward = lambda *_, **__: pytest.fail("it was read")
    drafted = generate(toy.cyclic(5), [0, 1, 2, 3, 4] * 3, drafter=router, max_new_tokens=20)
    assert drafted.token_ids == tuple(range(5)) * 4
