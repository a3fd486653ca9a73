"""Notebook 06's tables and figures, on the embedded pair with planted faults."""

import json
from dataclasses import replace

import numpy as np
import pytest

from specnb.book.claims import claims_of, read_fixed
from specnb.chapters import divergence
from specnb.params import DivergenceParams

GALLERY = ["positional_registry", "kv_slot_swap", "rope_mismatch", "split_k"]
PARAMS = DivergenceParams(tokens=13, prompt_tokens=11, k=2, gallery=GALLERY)
HOSTILE = "layers.0.<script>alert(1)</script>&amp;"


@pytest.fixture(scope="module")
def study():
    return divergence.Study(PARAMS)


@pytest.fixture(scope="module")
def wrong(study):
    return study.investigate()


def test_the_table_shows_what_the_notes_saw_and_what_they_did_not(wrong):
    table = divergence.case_table(wrong)
    alone, itself, target, off = (table[column] for column in table)
    assert int(alone["first draft token"]) == int(itself["first draft token"]) != int(target["first draft token"])
    assert list(table.columns) == ["S0 alone", "S1 beside itself", "S3 beside the larger target", "difference"]
    for row in ("key input mean", "key input std", "attention output mean", "attention output std", "MoE output std"):
        assert alone[f"layer 0 {row}"] == itself[f"layer 0 {row}"]
        same = alone[f"layer 0 {row}"] == target[f"layer 0 {row}"]
        assert same == (off[f"layer 0 {row}"] == "0.0%") == (row != "MoE output std")
    read = table.loc["layer 0 MoE weights, as read"]
    assert read.iloc[0] == read.iloc[1] == table.loc["layer 0 MoE weights, as loaded"].iloc[0] != read.iloc[2]
    assert table.loc["layer 0 MoE weights, owner of what is read"].tolist() == ["draft", "neighbour", "neighbour", "-"]


def test_all_drafts_are_kept_beside_a_copy_and_none_beside_the_larger_target(study, wrong):
    table = study.accept().set_index(["beside", "verified_by"])
    rates = table["acceptance_rate"]
    assert rates["a copy of itself", "a copy of itself"] == 1 and rates["the larger target", "a copy of itself"] < 0.1
    assert study.record().measurements["acceptance"][0]["kept"] == table["kept"].iloc[0] > 0
    guesses = divergence.tabulate_hypotheses(wrong)
    assert set(guesses["for the plant"]) == {"ruled out"} and set(guesses["for the case"]) == {"unknown"}
    few = replace(wrong, outcomes={name: outcome for name, outcome in wrong.outcomes.items() if name != "S4"})
    assert divergence.tabulate_hypotheses(few).set_index("setup").loc["S4", "for the plant"] == "open"


def test_claims_about_the_case_flip_with_what_the_set_ups_show(wrong):
    def judged(investigation):
        values = read_fixed() | divergence.divergence_values(investigation)
        return {claim.value: claim.judge(values) for claim in claims_of("06_divergence")}

    outcomes = wrong.outcomes
    sound = replace(wrong, outcomes=outcomes | dict.fromkeys(("S2", "S3", "S4"), outcomes["S0"]))
    before, after = judged(wrong), judged(sound)
    for value in ("kept_less", "begins_between"):
        assert (before[value]["verdict"], after[value]["verdict"]) == ("reproduced", "corrected")
    for value in ("read_alike", "wrong_unrun", "wrong_same_shape", "foreign"):
        assert before[value]["verdict"] == after[value]["verdict"] == "undecided"
        assert before[value]["note"] == "in the planted twin: corrected"
        assert after[value]["note"] == before[value]["note"].replace("corrected", "reproduced") or value == "foreign"
    assert before["at_bank_0"]["note"] == "in the planted twin: reproduced"
    assert before["banks_alone"]["verdict"] == "undecided"
    few = replace(wrong, outcomes={name: outcomes[name] for name in ("S0", "S0w", "S1", "S3")})
    assert judged(few)["wrong_unrun"]["note"] == "too few data"


def test_the_gallery_names_what_was_planted_and_is_in_the_record(study, wrong):
    stages = []
    gallery = study.gallery(lambda *stage: stages.append(stage))
    table, strips = gallery.table.set_index("fault"), gallery.strips
    assert table["module_right"].all() and table["cause_right"].all()
    assert table["verdict"].tolist() == ["DIVERGENT", "DIVERGENT", "DIVERGENT", "PRECISION_ONLY"]
    assert table["cause"].tolist() == ["IDENTITY", "KV_SLOT", "POSITION", "PRECISION_ONLY"]
    assert table["module"].tolist() == ["layers.0.mlp.experts", "layers.0.self_attn", "rotary_emb", "-"]
    assert table["module"].equals(table["planted_module"]) and table["cause"].equals(table["planted_cause"])
    assert table.loc["kv_slot_swap", "token"] == 5
    assert stages == [(i, 4, name) for i, name in enumerate(PARAMS.gallery)]
    shapes = divergence.gallery_figure(gallery).layout.shapes
    frames = {
        (round(shape.y0 + 0.42), strips.columns[round(shape.x0 + 0.5)]) for shape in shapes if shape.type == "rect"
    }
    assert frames == {(0, "layers.0.mlp.experts"), (1, "layers.0.self_attn"), (2, "rotary_emb")}
    record = study.record()
    assert record.model_dump_json() and record.measurements["investigation"]["line"] == wrong.line
    assert [row["fault"] for row in record.measurements["gallery"]] == PARAMS.gallery


# --- figures --------------------------------------------------------------------------------------


def test_the_heat_map_shows_the_table_and_frames_the_first_node(wrong, monkeypatch):
    whole = divergence.heat_of(wrong.outcome())
    figure = divergence.draw_heat(wrong)
    (drawn,), (frame,) = figure.data, figure.layout.shapes
    table = whole.loc[list(drawn.y)]
    rows = [[*whole.index].index(f"layers.{i}.mlp.experts") + by for i in range(4) for by in (-1, 0, 1)]
    assert [*table.index] == [*whole.index[rows]] and "12 of 50" in figure.layout.title.subtitle.text
    assert np.allclose(np.array(drawn.z, float), table.to_numpy(), atol=0.006)
    row = list(table.index).index(wrong.first.module)
    assert (frame.y0, frame.y1) == (row - 0.5, row + 0.5) and (frame.x0, frame.x1) == (-0.5, 12.5)
    assert figure.layout.yaxis.tickvals[row] == drawn.y[row] == "layers.0.mlp.experts"
    table.iloc[3, 2] = np.nan
    monkeypatch.setattr(divergence, "heat_of", lambda outcome: table)
    assert np.isnan(divergence.draw_heat(wrong).data[0].z[3][2])


def test_names_are_text_and_never_markup(wrong, monkeypatch):
    """A figure obeys some tags even in its data."""
    table = divergence.heat_of(wrong.outcome()).rename({"layers.0.mlp.experts": HOSTILE})
    monkeypatch.setattr(divergence, "heat_of", lambda outcome: table)
    sound = replace(wrong, verdict="SOUND")  # the first divergence has another name in this table
    for figure in (divergence.draw_heat(sound), divergence.draw_strips(table.T.rename(str), title="", marks={})):
        assert "<script" not in json.dumps(figure.to_plotly_json(), default=str)
