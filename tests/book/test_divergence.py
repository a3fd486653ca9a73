"""Notebook 06's tables and figures, and the page of an investigation, on the embedded pair with planted faults."""

import dataclasses
import json
import re
from html.parser import HTMLParser

import numpy as np
import pandas as pd
import pytest

from specnb.book import divergence, divergence_report
from specnb.book import divergence_figures as figures
from specnb.divergence import report
from specnb.divergence.deploy import planted
from specnb.divergence.faults import FAULTS
from specnb.divergence.investigate import judge
from specnb.divergence.repro import minimal
from specnb.errors import InputError
from specnb.measure.triage import triage
from specnb.params import DivergenceParams
from specnb.records import Generation, Round
from tests.benchmarks.divergence_score import picture

PARAMS = DivergenceParams(tokens=13, prompt_tokens=11, k=2, gallery=["positional_registry", "kv_slot_swap", "split_k"])
HOSTILE = "layers.0.<script>alert(1)</script>&amp;"


@pytest.fixture(scope="module")
def study():
    return divergence.Study(PARAMS)


@pytest.fixture(scope="module")
def lab(study):
    return study.lab


@pytest.fixture(scope="module")
def pair(study):
    return study.pair


@pytest.fixture(scope="module")
def wrong(study):
    return study.investigate()


@pytest.fixture(scope="module")
def sound(lab):
    return judge(lab, setups=("S0", "S1"))


@pytest.fixture(scope="module")
def suspicious():
    rounds = tuple(Round(i, 2, 0, (5, 5), (7,), (0.0, 0.0), *[0.1] * 5, 3) for i in range(40))
    one = Generation.model_construct(
        prompt_id="p", category="code", prompt_ids=(1, 2), token_ids=(7,) * 40, rounds=rounds
    )
    return triage([one], vocab_size=256)


# --- the table of the case ------------------------------------------------------------------------------------------


def test_the_table_shows_what_the_notes_saw_and_what_they_did_not(wrong):
    table = divergence.case_table(wrong)
    alone, itself, target = (table[column] for column in table)
    assert list(table.columns) == ["S0 alone", "S1 beside itself", "S3 beside the larger target"]
    for row in ("key input mean", "key input std", "attention output std", "MoE output std"):
        assert alone[f"layer 0 {row}"] == itself[f"layer 0 {row}"]
        assert (alone[f"layer 0 {row}"] == target[f"layer 0 {row}"]) == (row != "MoE output std")
        assert alone[f"layer 1 {row}"] != target[f"layer 1 {row}"]
    assert len(set(table.loc["layer 0 MoE weights, as loaded"])) == 1
    read = table.loc["layer 0 MoE weights, as read"]
    assert read.iloc[0] == read.iloc[1] == table.loc["layer 0 MoE weights, as loaded"].iloc[0] != read.iloc[2]
    assert table.loc["layer 0 MoE weights, owner of what is read"].tolist() == ["draft", "neighbour", "neighbour"]


def test_deviations_hardly_move_where_values_are_all_wrong(wrong):
    table = divergence.misleading(wrong).set_index("module")
    bank = table.loc["layers.0.mlp.experts"]
    assert abs(bank["std_ratio"] - 1) < 0.25 and bank["relative_l2"] > 1 and abs(bank["cosine"]) < 0.5
    before = table.loc["layers.0.self_attn.o_proj"]
    assert before["relative_l2"] < 1e-6 and before["cosine"] == pytest.approx(1)
    # the next modules are wrong, and not by themselves
    key = table.loc["layers.1.self_attn.k_proj"]
    assert key["relative_l2"] > 0.1 and key["by_itself"] < 1e-5 and key["ratio"] < 3 < bank["ratio"]


# --- the gallery ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shown(study):
    told = []
    return study.gallery(lambda *said: told.append(said)), told


def test_the_gallery_names_what_was_planted_and_nothing_where_nothing_was(shown):
    found, told = shown
    table = found.table.set_index("fault")
    assert table["module_right"].all() and table["cause_right"].all()
    assert table["verdict"].tolist() == ["DIVERGENT", "DIVERGENT", "PRECISION_ONLY"]
    assert table["cause"].tolist() == ["IDENTITY", "KV_SLOT", "PRECISION_ONLY"]
    assert table.loc["kv_slot_swap", "token"] == 5 and table.loc["split_k", "module"] == "-"
    assert told == [(0, 3, "positional_registry"), (1, 3, "kv_slot_swap"), (2, 3, "split_k")]


def test_strips_hold_the_worst_token_and_frame_what_was_named(shown):
    found, _ = shown
    assert found.strips.loc["positional_registry", "layers.0.mlp.experts"] > 3
    assert found.strips.loc["split_k"].max() < np.log10(3)
    figure = divergence.gallery_figure(found)
    frames = {(round(shape.y0 + 0.42), round(shape.x0 + 0.5)) for shape in figure.layout.shapes}
    columns = list(found.strips.columns)
    assert frames == {(0, columns.index("layers.0.mlp.experts")), (1, columns.index("layers.0.self_attn"))}


@pytest.mark.parametrize(
    ("field", "value"),
    [("gallery", ["split_k", "split_k"]), ("dtype", "int8"), ("tokens", 7), ("k", 0), ("layer", -2), ("seed", -1)],
)
def test_bad_parameters_are_told_with_their_field(field, value):
    with pytest.raises(InputError, match=f"parameters of DivergenceParams: {field}"):
        DivergenceParams.checked(**{field: value})


@pytest.mark.parametrize("named", [{"fault": "none"}, {"gallery": ["kv_slot_swaps"]}])
def test_faults_that_cannot_be_planted_are_refused_before_anything_runs(named):
    with pytest.raises(InputError):
        divergence.Study(DivergenceParams.checked(**named))


def test_the_record_holds_what_was_measured_and_nothing_else(study, wrong, shown):
    record = study.record()
    assert record.experiment == "06_divergence" and record.measurements["investigation"]["line"] == wrong.line
    assert [row["fault"] for row in record.measurements["gallery"]] == PARAMS.gallery
    assert (
        divergence.Study(DivergenceParams()).faults == tuple(FAULTS)
        and not divergence.Study(PARAMS).record().measurements
    )


def test_the_published_score_has_the_lab_beside_the_tools_that_people_use():
    table = picture.score_table(report.published_score())
    lab = table[table["tool"] == "lab"].iloc[0]
    assert lab["cases"] >= 300 and float(lab["module"][:5]) >= 0.95 and lab["false alarms"].startswith("0 of ")
    assert report.published_alarms() == (0, 63)


# --- figures --------------------------------------------------------------------------------------------------------


def all_figures(wrong, suspicious):
    return {
        "heat": divergence_report.heat(wrong),
        "heats": divergence_report.heats(wrong),
        "setups": divergence.setups_figure(wrong),
        "misleading": figures.misleading(divergence.misleading(wrong)),
        "acceptance": figures.acceptance(suspicious.profile.table()),
    }


def test_every_figure_has_a_title_and_units_on_its_axes(wrong, suspicious):
    for name, figure in all_figures(wrong, suspicious).items():
        assert figure.layout.title.text, name
        assert any(axis.title.text for axis in figure.select_xaxes()), name
        assert json.loads(figure.to_json())["data"], name


def test_the_heat_map_shows_the_table_and_frames_the_first_node(wrong):
    figure = divergence_report.heat(wrong)
    table, (drawn,), (frame,) = wrong.heat(), figure.data, figure.layout.shapes
    assert np.allclose(np.array(drawn.z, float), table.to_numpy(), atol=0.006)
    row = list(table.index).index(wrong.first.module)
    assert (frame.y0, frame.y1) == (row - 0.5, row + 0.5) and (frame.x0, frame.x1) == (-0.5, 12.5)
    assert figure.layout.yaxis.tickvals[row] == drawn.y[row] == "layers.0.mlp.experts"
    told = drawn.customdata[row][0]
    assert "error" in told and "floor" in told and "gain" in told and "token 0" in told
    assert not divergence_report.heat(wrong, "S1").layout.shapes
    assert divergence_report.heat(wrong, hover=False).data[0].customdata is None


def test_places_that_were_not_compared_are_empty_and_said_to_be(wrong):
    table = wrong.heat().copy()
    table.iloc[3, 2] = np.nan
    assert figures.heat(table).data[0].z[3][2] is None
    cells = report.cells(wrong, wrong.case.bad.setup.id)
    assert "not compared" in figures.heat(table, cells=cells).data[0].customdata[3][2]


def test_of_many_modules_those_around_the_wrong_ones_are_drawn():
    values = pd.DataFrame(0.0, index=[f"layers.{i}.mlp" for i in range(500)], columns=range(3))
    values.loc["layers.321.mlp", 1] = 5.0
    figure = figures.heat(values, box=figures.Box("layers.321.mlp", 1, 1))
    assert list(figure.layout.yaxis.tickvals) == ["layers.320.mlp", "layers.321.mlp", "layers.322.mlp"]
    assert "3 of 500" in figure.layout.title.text and figure.layout.shapes[0].y0 == 0.5
    assert len(figures.heat(values * 0).data[0].z) == figures.MOST_ROWS


# --- the page -------------------------------------------------------------------------------------------------------


class Page(HTMLParser):
    """Tags with what they load, and the text outside of scripts and styles."""

    def __init__(self, source):
        super().__init__()
        self.loaded, self.tags, self.text, self._skip = [], [], "", False
        self.feed(source)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.loaded += [value for name, value in attrs if name in ("src", "href")]
        self._skip = tag in ("script", "style")

    def handle_endtag(self, tag):
        self._skip = False

    def handle_data(self, data):
        self.text += "" if self._skip else data


def test_the_page_needs_nothing_but_itself_and_holds_every_part(pair, wrong, suspicious, tmp_path):
    repro = minimal(pair.draft, pair.target, outcome=wrong.case.bad, deploy=planted(PARAMS.fault), runs=2)
    path = divergence_report.write(wrong, tmp_path, repro=repro, triage=suspicious, false_alarms=(0, 40), slots=True)
    assert {one.name for one in tmp_path.iterdir()} == {"report.html", "report.json", "report.txt", "repro"}
    page = Page(path.read_text(encoding="utf-8"))
    assert page.loaded == []
    for part in (wrong.line, "0 of 40", "336", "176", "IDENTITY", "vLLM #33497", "python repro/repro.py", "S2",
                 suspicious.line[:40], "neighbour:model.layers.0.mlp.experts.down_proj"):  # fmt: skip
        assert part in page.text, part
    document = json.loads((tmp_path / "report.json").read_text())
    assert document["schema"] == 1 and document["exit_code"] == 1 and document["repro"]["kind"] == "module"
    assert document["first"]["module"] == "layers.0.mlp.experts"
    assert (tmp_path / "report.txt").read_text().startswith("DIVERGENT") and len(document["slots"]) == 10


def test_a_sound_draft_has_a_page_without_causes(sound, tmp_path):
    page = Page(divergence_report.write(sound, tmp_path).read_text(encoding="utf-8"))
    assert sound.line in page.text and "Causes" not in page.text and "Earliest" not in page.text


def test_names_are_text_and_never_markup(wrong, tmp_path):
    bad = wrong.case.bad
    outcome = dataclasses.replace(bad, errors=bad.errors.replace("layers.0.mlp.experts", HOSTILE))
    case = dataclasses.replace(wrong.case, outcomes={bad.setup.id: outcome})
    floor = wrong.floor.rename({"layers.0.mlp.experts": HOSTILE}, level="at")
    hostile = dataclasses.replace(wrong, case=case, floor=floor, facts=dict(wrong.facts) | {"draft": HOSTILE})
    source = divergence_report.write(hostile, tmp_path).read_text(encoding="utf-8")
    body = source[source.index("<body>") :]
    assert "<script>alert" not in body and "alert(1)" in body
    assert Page(source).text.count(HOSTILE) > 3
    # a figure obeys some tags even in its data
    figure = divergence_report.heat(hostile)
    assert not [name for name in (*figure.layout.yaxis.tickvals, *figure.data[0].y) if "<" in name]
    assert not re.search(r"<script", json.dumps(figure.to_plotly_json(), default=str))
