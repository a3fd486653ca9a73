"""Slots of a paged KV cache: the numbers of the case, the rules over random layouts, and every broken rule is named."""

import doctest

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specnb.divergence import kv_slots
from specnb.divergence.kv_slots import Layers, allocate, slot
from specnb.errors import InputError

LARGE = Layers("gpt-oss-120b", {"full": 18, "sliding": 18})
SMALL = Layers("gpt-oss-20b", {"full": 12, "sliding": 12})
DRAFT = Layers("draft", {"full": 12, "sliding": 12})

layers = st.dictionaries(st.sampled_from(["full", "sliding", "local"]), st.integers(1, 40), min_size=1)
models = st.lists(layers, min_size=1, max_size=3).map(lambda all_: [Layers(f"m{i}", k) for i, k in enumerate(all_)])
tables = st.lists(st.integers(1, 500), min_size=1, max_size=8, unique=True)


def first_slots(groups, model):
    return [g.first_slot for g in groups if g.model == model]


def test_what_the_module_shows_is_what_it_does():
    done = doctest.testmod(kv_slots)
    assert done.attempted == 7 and done.failed == 0


@pytest.mark.parametrize("tokens", [65, 72, 80])
def test_the_slots_of_the_case_are_what_correct_allocation_gives(tokens):
    beside_large, beside_small = (allocate([target, DRAFT], tokens) for target in (LARGE, SMALL))
    assert (len(beside_large), len(beside_small)) == (6, 4)
    assert first_slots(beside_large, "draft") == [336, 416]
    assert first_slots(beside_small, "draft") == [176, 256]


def test_one_token_more_than_five_blocks_moves_the_draft():
    assert first_slots(allocate([LARGE, DRAFT], 81), "draft") == [(1 + 4 * 6) * 16, (1 + 5 * 6) * 16]


def test_one_group_size_alone_gives_the_numbers_of_groups_in_both_logs():
    beside_large, beside_small = (set(kv_slots.group_sizes_for([one, DRAFT], n)) for one, n in ((LARGE, 6), (SMALL, 4)))
    assert beside_large == set(range(12, 18))
    assert beside_large & beside_small == {12}


def test_the_table_shows_the_sum():
    table = kv_slots.arithmetic(allocate([LARGE, DRAFT], 80))
    assert table["sum"][4] == "(1 + 4 groups x 5 blocks) x 16 = 336"
    assert table["block_table"][4] == "21..25"
    assert kv_slots.arithmetic([]).empty


@given(models, st.integers(1, 300), st.integers(1, 64), st.integers(1, 50))
def test_allocation_gives_every_layer_one_group_and_every_token_one_slot(made, tokens, block_size, group_size):
    groups = allocate(made, tokens, group_size=group_size, block_size=block_size)
    for model in made:
        for kind, n in model.kinds.items():
            assert sum(g.layers for g in groups if (g.model, g.kind) == (model.model, kind)) == n
    assert not kv_slots.overlaps({str(g.gid): g.block_table for g in groups})
    used = [slot(p, g.block_table, block_size) for g in groups for p in range(tokens)]
    assert len(set(used)) == len(used) and min(used) >= block_size
    assert all(g.layers <= group_size and g.blocks * block_size < tokens + block_size for g in groups)


@given(tables, st.integers(1, 32), st.data())
def test_right_slots_have_no_fault_and_padding_is_left_out(table, block_size, data):
    positions = data.draw(st.lists(st.integers(0, len(table) * block_size - 1), unique=True))
    slots = [slot(p, table, block_size) for p in positions]
    assert not kv_slots.slot_faults([*slots, -1], [*positions, 10**9], table, block_size=block_size)


@given(tables, st.integers(2, 32), st.data())
def test_a_slot_off_by_one_is_named_with_what_was_expected(table, block_size, data):
    position = data.draw(st.integers(0, len(table) * block_size - 1))
    right = slot(position, table, block_size)
    (fault,) = kv_slots.slot_faults([right + 1], [position], table, block_size=block_size, group="gid 4")
    assert fault == ("slot", "gid 4", position, right, right + 1)


def test_two_positions_in_one_slot_are_no_bijection():
    rules = [f.rule for f in kv_slots.slot_faults([80, 80], [0, 1], [5])]
    assert rules == ["slot", "bijection"]
    assert not kv_slots.slot_faults([80, 80], [0, 0], [5])  # the same place written twice is one place


@pytest.mark.parametrize(
    ("slots", "positions", "size", "told"),
    [([80], [0], 0, "block size is 0"), ([80.5], [0], 16, r"slot is 80\.5"), ([80], ["a"], 16, "position is 'a'")],
)
def test_slots_that_are_none_are_refused(slots, positions, size, told):
    with pytest.raises(InputError, match=told):
        kv_slots.slot_faults(slots, positions, [5], block_size=size)


def test_a_token_in_the_null_block_or_outside_the_table_is_a_fault():
    assert [f.rule for f in kv_slots.slot_faults([3], [3], [0])] == ["null block"]
    (fault,) = kv_slots.slot_faults([96], [16], [5])
    assert fault == ("slot", "", 16, None, 96)


def test_a_block_of_two_groups_is_an_overlap_and_the_null_block_is_not():
    (fault,) = kv_slots.overlaps({"target": [0, 1, 2], "draft": [0, 0, 2]})
    assert fault == ("overlap with target", "draft", 2, None, 2)
    (twice,) = kv_slots.overlaps({"target": [4, 4]})
    assert twice.rule == "overlap with target"


def test_content_is_compared_by_position_wherever_it_lies():
    rng = np.random.default_rng(0)
    cache = rng.standard_normal((40, 2, 3)).astype(np.float32)
    moved = np.full((60, 2, 3), np.nan, np.float32)
    a, b = np.arange(16, 26), np.arange(33, 43)
    moved[b] = cache[a]
    moved[b[3]], moved[b[5]] = cache[a[5]], cache[a[3]]
    assert kv_slots.same_content(a, cache, b, moved).tolist() == [i not in (3, 5) for i in range(10)]
    cache[a[0], 0, 0] = moved[b[0], 0, 0] = np.nan
    assert kv_slots.same_content(a, cache, b, moved)[0]


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: allocate([], 8), "at least one model"),
        (lambda: allocate([DRAFT], 0), "number of tokens is 0"),
        (lambda: allocate([DRAFT], 8, group_size=0), "group size is 0"),
        (lambda: Layers("m", {"full": 0}), "full layers of m is 0"),
        (lambda: Layers("m", {}), "no attention layers"),
        (lambda: Layers("m", {"full": 1.5}), "whole number"),
        (lambda: slot(80, [1, 2]), "position 80 needs block 5"),
        (lambda: slot(-1, [1, 2]), "position is -1"),
        (lambda: kv_slots.slot_faults([1], [], [1]), "1 slots for 0 positions"),
        (lambda: kv_slots.same_content([1], np.zeros((1, 2)), [0], np.zeros((1, 2))), "outside the cache"),
        (lambda: kv_slots.same_content([0], np.zeros((1, 2)), [0], np.zeros((1, 3))), "2 values in one"),
    ],
)
def test_what_cannot_be_counted_is_refused(call, said):
    with pytest.raises(InputError, match=said):
        call()
