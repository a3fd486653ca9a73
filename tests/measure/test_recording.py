"""Recordings: settings that cannot be recorded exactly are refused with their value."""

import numpy as np
import pytest

from specnb.decode.generate import generate
from specnb.draft.lookup import LookupDrafter
from specnb.errors import InputError
from specnb.lm import toy
from specnb.measure.follow import follow

PROMPT = [0, 1, 2, 0, 1]


class Planned(LookupDrafter):
    tree_nodes = 5


class Shifting(LookupDrafter):
    nested = False


class Sampler(LookupDrafter):
    def propose(self, tokens, k, picker):
        return super().propose(tokens, k, picker)._replace(ids=(picker.pick(np.zeros(4))[0],))


def test_drafters_and_generations_that_cannot_be_recorded_are_refused():
    target = toy.markov(4, order=2, seed=1)
    plain = generate(target, PROMPT, max_new_tokens=9)
    several = [LookupDrafter(), LookupDrafter()]
    refused = [
        ([Planned()], "trees"),
        ([Shifting()], "nested"),
        (several, "2 drafters"),
        ([Sampler()], "picks tokens"),
    ]
    for drafters, named in refused:
        with pytest.raises(InputError, match=named):
            follow(target, drafters, plain, max_new_tokens=9)
    drafted = generate(target, PROMPT, drafter=LookupDrafter(), k=3, max_new_tokens=9)
    stranger, old = (
        plain.model_copy(update=u) for u in ({"target": "stranger"}, {"max_new_tokens": None})
    )
    for generation, n, named in [
        (stranger, 9, "stranger"),
        (plain, 10, "9 tokens"),
        (drafted, 9, "K = 3"),
    ]:
        with pytest.raises(InputError, match=named):
            follow(target, [LookupDrafter()], generation, max_new_tokens=n)
    assert follow(target, [LookupDrafter()], old, max_new_tokens=9)  # an older record
