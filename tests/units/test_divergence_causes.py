"""Causes: the class of a planted fault comes first, and what speaks for it is said."""

from dataclasses import replace

import pytest

from specnb.divergence.case import Case
from specnb.divergence.causes import CLASSES, rank
from specnb.divergence.faults import FAULTS
from specnb.divergence.local_offset import one_offset
from specnb.divergence.planted.fault import CAUSES


@pytest.fixture(scope="module")
def lab(divergence_lab):
    return divergence_lab


def investigated(lab, fault, setups=("S0", "S1", "S2")):
    deploy = FAULTS[fault] if fault else None
    return Case.of(lab, {name: lab.run(name, deploy) for name in setups})


@pytest.mark.parametrize(
    "fault, cause",
    [
        ("positional_registry", "IDENTITY"),
        ("stale_row", "STATE"),
        ("foreign_routing", "ROUTING"),
        ("expert_scale_in_op", "WEIGHTS"),
        ("kv_slot_swap", "KV_SLOT"),
        ("rope_mismatch", "POSITION"),
        ("dummy_tokens", "INPUT"),
        ("random_head", "HEAD"),
    ],
)
def test_the_class_of_a_fault_comes_first(lab, fault, cause):
    ranked = rank(investigated(lab, fault))
    assert ranked[0].name == cause and ranked[0].score > ranked[1].score + 1
    assert ranked[0].for_it and ranked[0].issues and ranked[0].next_experiment


def test_a_foreign_module_is_named(lab):
    ranked = rank(investigated(lab, "positional_registry"))
    assert any("neighbour:model.layers.0.mlp.experts" in says for says in ranked[0].for_it)
    weights = next(cause for cause in ranked if cause.name == "WEIGHTS")
    assert any("alone" in says for says in weights.against_it)


def test_an_output_that_is_small_and_unrelated_is_no_scale(lab):
    case = investigated(lab, "random_head", ("S0",))
    assert abs(case.rows["gain"].median()) < 0.1 and case.factor is None
    scaled = investigated(lab, "expert_scale_in_op", ("S0",))
    assert scaled.factor == pytest.approx(scaled.rows["gain"].median()) and scaled.factor > 1


def test_sound_models_have_no_cause(lab):
    assert rank(investigated(lab, None)) == []


def test_one_offset_of_all_positions_is_no_fault_and_one_of_some_is(lab):
    """Attention sees differences of positions only."""
    shifted = investigated(lab, "uniform_offset", ("S0", "S3"))
    assert shifted.bad is None and all(one.offset for one in shifted.outcomes.values())
    case = investigated(lab, "rope_mismatch", ("S0",))
    assert case.first["module"] == "rotary_emb" and not case.bad.offset


def test_angles_that_are_all_too_long_are_no_offset(lab):
    case = investigated(lab, "uniform_offset", ("S0",))
    along = case.outcomes["S0"].along
    longer = {
        key: value * 1.1 if key.module == "rotary_emb" and key.role == "out" else value
        for key, value in along.values.items()
    }
    assert one_offset(along, lab.sound[0], "rotary_emb")
    assert not one_offset(replace(along, values=longer), lab.sound[0], "rotary_emb")
    assert not one_offset(lab.sound[1], lab.sound[0], "rotary_emb")  # nothing is turned


def test_every_class_is_one_that_faults_are_named_from():
    assert {*CLASSES} == {*CAUSES} - {"PRECISION_ONLY"}
