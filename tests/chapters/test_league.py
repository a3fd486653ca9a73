"""The league on toy models: all drafters on the same texts, live at their best K."""

import pytest

from specnb.book import claims
from specnb.book.explorer.widgets import Explorer
from specnb.chapters import league
from specnb.decode.router import Arm, Router
from specnb.draft.load import LoadedDrafter
from specnb.draft.lookup import LookupDrafter
from specnb.draft.model import ModelDrafter
from specnb.errors import InputError
from specnb.measure import baseline, experiment
from specnb.measure.cost import Cost, CostCurve
from specnb.params import LeagueParams
from tests.chapters.test_adaptive_k import reading

PARAMS = LeagueParams(
    drafters=["lookup", "self", "jump", "auto"],
    pack_prompts=0,
    categories=["code", "prose"],
    prompts_per_category=3,
    live_prompts=2,
    max_new_tokens=12,
    k_max=4,
)


@pytest.fixture(scope="module")
def ran():
    """A record and its recordings."""
    target = reading(name="smollm2-135m?backend=hf")

    def load_drafter(name, _target, strict):
        if name == "jump":
            raise InputError("no shipped heads")
        if name == "auto":
            return LoadedDrafter(Router([Arm(LookupDrafter(), 4)], [0.0, 1.0, 1.1, 1.2, 1.3, 1.4]))
        return LoadedDrafter(
            LookupDrafter() if name == "lookup" else ModelDrafter(reading(name="copy"))
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experiment, "load", lambda *_args, **_options: target)
        patch.setattr(experiment, "load_drafter", load_drafter)
        patch.setattr(baseline, "load", lambda _name: reading())
        recordings = []
        return league.run_league(PARAMS, recordings=recordings), recordings


@pytest.fixture(scope="module")
def record(ran):
    return ran[0]


def test_the_recordings_can_be_explored(ran):
    record, recordings = ran
    assert len(recordings) == 2 * 6 * 2  # drafters, prompts, temperatures
    assert {*Explorer.of(record, recordings).selection["n_prompts"]} == {6}


def test_each_drafter_is_recorded_for_every_text_and_runs_live_at_its_best_k(record):
    assert (
        record.measurements["left_out"].keys() == {"jump"}
        and len(record.measurements["names"]) == 3
    )
    rows = record.measurements["replay"]["rows"]
    assert len(rows) == 6 * 2 * 2 * 4 + 6 * 2 and {
        *record.measurements["draft_steps"].values()
    } == {1}
    live = [g for g in record.generations if g.drafter and not g.drafter.startswith("auto")]
    best = {(b["drafter"], b["temperature"]): b["k"] for b in record.measurements["best"]}
    assert len(live) == 4 * 2 * 2 and all(g.k == best[g.drafter, g.temperature] for g in live)


def test_the_table_ranks_drafters_and_a_perfect_copy_has_acceptance_rate_1(record):
    table = league.rank_drafters(record, 0.0)
    assert {*table.index} == {"lookup", "self", "auto"} and table["predicted"].notna().all()
    assert table["speedup"].is_monotonic_decreasing and (table["over_fastest"] > 0).all()
    assert (table["identical"] == table["prompts"]).all() and (table["prompts"] == 4).all()
    assert table.loc["self", "alpha_1"] == 1
    assert table.loc["self", "tau"] > table.loc["lookup", "tau"] >= 1
    contents = league.compare_contents(record, 0.7)
    assert contents.groupby("content").size().to_dict() == {"code": 3, "prose": 3}
    values = claims.values_of(record, {"ranks": table})
    assert values["itself"].n == 4 and values["trained"].n == 0
    assert league.draw_contents(record, contents).data and league.draw_ranks(record, table).data
    assert league.draw_region(record).data


def test_the_break_even_line_is_drawn_and_cross_engine_drafters_are_marked(record):
    cs = record.measurements["cs"]
    across = [name for name in cs if "copy" in name]
    steps = dict.fromkeys(cs, 4)
    measured = record.measurements | {"c_across_engines": across, "draft_steps": steps}
    figure = league.draw_region(record.model_copy(update={"measurements": measured}))
    line = figure.data[0]
    cost = Cost(CostCurve.model_validate(record.measurements["verify_curve"]), c=0.5)
    assert (line.x[25], line.y[25]) == pytest.approx((0.5, cost.break_even()), nan_ok=True)
    points = {note.text: (note.x, note.y) for note in figure.layout.annotations}
    assert points.keys() == {"prompt lookup", "quantized copy*"}
    assert points["quantized copy*"] == (4 * cs[across[0]], 1)


def test_looping_answers_are_counted(record):
    plain = record.generations[0]
    assert not plain.model_copy(update={"token_ids": tuple(range(40))}).loops
    assert plain.model_copy(update={"token_ids": tuple(range(10)) * 4}).loops
    assert league.count_loops(record)["answers"].sum() == 12
