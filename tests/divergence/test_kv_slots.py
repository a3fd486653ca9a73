"""Slots of a paged KV cache: the numbers of the case, the rules over random layouts, and every broken rule is named."""

import doctest

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specnb.divergence.kv_slots import allocate, arithmetic
from specnb.errors import InputError

LARGE, SMALL = {"full": 18, "sliding": 18}, {"full": 12, "sliding": 12}
LAYERS = st.dictionaries(st.sampled_from(["full", "sliding", "local"]), st.integers(1, 40), min_size=1)


def test_what_the_module_shows_is_what_it_does():
    done = doctest.testmod(__import__("specnb.divergence.kv_slots", fromlist=["kv_slots"]))
    assert done.attempted == 2 and done.failed == 0


@pytest.mark.parametrize("tokens, large", [(65, [336, 416]), (80, [336, 416]), (81, [400, 496])])
def test_the_slots_of_the_case_are_what_correct_allocation_gives(tokens, large):
    first = {}
    for name, target in (("large", LARGE), ("small", SMALL)):
        groups = allocate({"target": target, "draft": SMALL}, tokens)
        assert len(groups) == {"large": 6, "small": 4}[name]
        first[name] = [group.first_slot for group in groups if group.model == "draft"]
    assert first["large"] == large and (tokens > 80 or first["small"] == [176, 256])


def test_the_table_shows_the_sum():
    table = arithmetic(allocate({"target": LARGE, "draft": SMALL}, 80))
    assert table["sum"][4] == "(1 + 4 groups x 5 blocks) x 16 = 336" and table["block_table"][4] == "21..25"


@given(st.lists(LAYERS, min_size=1, max_size=3), st.integers(1, 300), st.integers(1, 64), st.integers(1, 50))
def test_allocation_gives_every_layer_one_group_and_every_token_one_slot(kinds, tokens, block_size, group_size):
    models = {f"m{i}": one for i, one in enumerate(kinds)}
    groups = allocate(models, tokens, group_size=group_size, block_size=block_size)
    for model, counts in models.items():
        for kind, n in counts.items():
            assert sum(g.layers for g in groups if (g.model, g.kind) == (model, kind)) == n
    blocks = [block for g in groups for block in g.block_table]
    assert len(set(blocks)) == len(blocks) and 0 not in blocks  # block 0 is nobody's
    assert all(len(g.block_table) * block_size >= tokens for g in groups)


@pytest.mark.parametrize("models, tokens", [({}, 8), ({"m": {}}, 8), ({"m": {"full": 0}}, 8), ({"m": SMALL}, 0)])
def test_what_cannot_be_counted_is_refused(models, tokens):
    with pytest.raises(InputError):
        allocate(models, tokens)
