"""Recordings: drafters that cannot be recorded exactly are refused."""

import numpy as np
import pytest

from specnb.decode.generate import generate
from specnb.draft.lookup import LookupDrafter
from specnb.errors import InputError
from specnb.lm import toy
from specnb.measure.follow import follow, require_followed


class Planned(LookupDrafter):
    tree_nodes = 5


class Shifting(LookupDrafter):
    nested = False


class Sampler(LookupDrafter):
    def propose(self, tokens, k, picker):
        return super().propose(tokens, k, picker)._replace(ids=(picker.pick(np.zeros(4))[0],))


def test_drafters_that_cannot_be_recorded_are_refused():
    several = [LookupDrafter(), LookupDrafter()]
    for drafters, named in (([Planned()], "trees"), ([Shifting()], "nested"), (several, "2 drafters")):
        with pytest.raises(InputError, match=named):
            require_followed(drafters)
    target = toy.markov(4, order=2, seed=1)
    plain = generate(target, [0, 1, 2, 0, 1], max_new_tokens=9)
    with pytest.raises(InputError, match="picks tokens"):
        follow(target, [Sampler()], plain, max_new_tokens=9)
