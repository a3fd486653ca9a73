"""Slots of a paged KV cache: the numbers of the case, and the rules over random layouts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specnb.divergence.report import BLOCK_SIZE, allocate, arithmetic

LARGE, SMALL = {"full": 18, "sliding": 18}, {"full": 12, "sliding": 12}
LAYERS = st.dictionaries(st.sampled_from(["full", "sliding", "local"]), st.integers(1, 40), min_size=1)


@pytest.mark.parametrize(
    ("tokens", "target", "slots"),
    [(65, LARGE, [336, 416]), (80, LARGE, [336, 416]), (81, LARGE, [400, 496]), (80, SMALL, [176, 256])],
)
def test_the_slots_of_the_case_are_what_correct_allocation_gives(tokens, target, slots):
    groups = allocate({"target": target, "draft": SMALL}, tokens)
    assert [group.first_slot for group in groups if group.model == "draft"] == slots
    assert arithmetic(groups)["sum"].iloc[-2].endswith(f"= {slots[0]}")


@given(st.lists(LAYERS, min_size=1, max_size=3), st.integers(1, 300), st.integers(1, 50))
def test_allocation_gives_every_layer_one_group_and_every_token_one_slot(kinds, tokens, group_size):
    models = {f"m{i}": layers for i, layers in enumerate(kinds)}
    groups = allocate(models, tokens, group_size=group_size)
    for model, counts in models.items():
        for kind, n in counts.items():
            assert sum(g.layers for g in groups if (g.model, g.kind) == (model, kind)) == n
    blocks = [block for g in groups for block in range(g.first_block, g.first_block + g.blocks)]
    assert len(set(blocks)) == len(blocks) and 0 not in blocks  # block 0 is nobody's
    assert all(g.blocks * BLOCK_SIZE >= tokens for g in groups)
