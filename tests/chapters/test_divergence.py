"""Notebook 06's tables and figures, on the embedded pair with planted faults."""

import json
from dataclasses import replace

import pytest

from specnb.book.claims import claims_of, read_fixed
from specnb.chapters import divergence
from specnb.params import DivergenceParams

PARAMS = DivergenceParams(tokens=13, prompt_tokens=11, k=2, gallery=["kv_slot_swap", "split_k"])
HOSTILE = "layers.0.<script>alert(1)</script>&amp;"


@pytest.fixture(scope="module")
def study():
    return divergence.Study(PARAMS)


@pytest.fixture(scope="module")
def wrong(study):
    return study.investigate()


def test_claims_about_the_case_depend_on_the_results_of_the_set_ups(study, wrong):
    scaled = replace(wrong, outcomes=wrong.outcomes | {"S3": study.scale_target(5)})
    extra = {"scaled_ratio": divergence.divergence_values(scaled)["output_ratio"]}

    def judged(investigation):
        values = read_fixed() | divergence.divergence_values(investigation) | extra
        return {claim.value: claim.judge(values) for claim in claims_of("06_divergence")}

    outcomes = wrong.outcomes
    sound = replace(wrong, outcomes=outcomes | dict.fromkeys(("S2", "S3", "S4"), outcomes["S0"]))
    before = judged(wrong)
    after = judged(sound)
    for value in ("kept_less", "begins_between"):
        assert before[value]["note"] == "for the planted fault: reproduced"
        assert after[value]["note"] == "for the planted fault: corrected"
    for value in ("read_alike", "wrong_unrun", "wrong_same_shape", "foreign"):
        assert before[value]["verdict"] == after[value]["verdict"] == "undecided"
        assert before[value]["note"] == "for the planted fault: corrected"
        assert (
            after[value]["note"] == before[value]["note"].replace("corrected", "reproduced")
            or value == "foreign"
        )
    assert before["scaled_ratio"]["note"] == "for the planted fault: explained"
    assert before["at_bank_0"]["note"] == "for the planted fault: reproduced"
    assert before["banks_alone"]["verdict"] == "undecided"
    few = replace(wrong, outcomes={name: outcomes[name] for name in ("S0", "S0w", "S1", "S3")})
    assert judged(few)["wrong_unrun"]["note"] == "too few data"
    guesses = divergence.tabulate_hypotheses(few).set_index("setup")
    assert guesses.loc["S4", "planted_fault"] == "open"


def test_the_gallery_names_what_was_planted_and_is_in_the_record(study, wrong):
    table = study.gallery()
    assert table["module_right"].all() and table["cause_right"].all()
    assert table["verdict"].tolist() == ["DIVERGENT", "PRECISION_ONLY"]
    assert (
        table["named_module"].tolist()
        == table["planted_module"].tolist()
        == ["layers.0.self_attn", "-"]
    )
    record = study.record()
    assert record.model_dump_json() and record.measurements["investigation"]["line"] == wrong.line
    assert [row["fault"] for row in record.measurements["gallery"]] == PARAMS.gallery


# --- figures --------------------------------------------------------------------------------------


def test_names_are_text_and_never_markup(wrong):
    """Plotly interprets some tags even in a figure's data."""
    table = divergence.heat_of(wrong.outcome()).rename({"layers.0.mlp.experts": HOSTILE})
    figure = divergence.draw_strips(table.T.rename(str), title="", marks={})
    assert "<script" not in json.dumps(figure.to_plotly_json(), default=str)
