"""Recordings: settings that cannot be recorded exactly are refused with their value."""

import numpy as np
import pytest

from specnb.decode.generate import generate
from specnb.draft.lookup import LookupDrafter
from specnb.errors import InputError
from specnb.lm import toy
from specnb.measure.follow import follow


class Planned(LookupDrafter):
    tree_nodes = 5


class Shifting(LookupDrafter):
    nested = False


class Sampler(LookupDrafter):
    def propose(self, tokens, k, picker):
        return super().propose(tokens, k, picker)._replace(ids=(picker.pick(np.zeros(4))[0],))


def test_drafters_and_generations_that_cannot_be_recorded_are_refused():
    target = toy.markov(4, order=2, seed=1)
    plain = generate(target, [0, 1, 2, 0, 1], max_new_tokens=9)
    lookup = LookupDrafter()
    for drafters, changed, named in (
        ([Planned()], {}, "trees"),
        ([Shifting()], {}, "nested"),
        ([lookup, lookup], {}, "2 drafters"),
        ([Sampler()], {}, "picks tokens"),
        ([lookup], {"target": "stranger"}, "stranger"),
        ([lookup], {"max_new_tokens": 10}, "10 tokens"),
        ([lookup], {"k": 3}, "K = 3"),
    ):
        with pytest.raises(InputError, match=named):
            follow(target, drafters, plain.model_copy(update=changed), max_new_tokens=9)
    older = plain.model_copy(update={"max_new_tokens": None})
    assert follow(target, [lookup], older, max_new_tokens=9)
