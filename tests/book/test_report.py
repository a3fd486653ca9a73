"""The field report: a line predicts its speeds, and a small replication agrees with predictions."""

import pandas as pd
import pytest

from specnb.book.claims import report
from specnb.io import project_dir
from specnb.measure.cost import NAMED, Cost

FOLDER = project_dir() / "data" / "report"


@pytest.fixture(scope="module")
def table():
    return report.read_runs()


def test_a_line_fit_to_six_code_rows_predicts_the_held_out_prose_rows(table):
    line = report.fit_line(table)
    card = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert line == (pytest.approx(0.335, abs=5e-4), pytest.approx(0.0171, abs=5e-5))
    rows = report.compare_with_line(table, line).set_index("content")
    assert rows.loc["code", "round_ms"].round().tolist() == [415, 459, 509, 644, 687, 729]
    assert (
        rows.loc["code", "error"].abs().max() < 0.06
        and rows.loc["prose", "error"].abs().max() < 0.03
    )
    assert (
        rows.loc["prose", "best_k"].tolist() == [6, 7]
        and rows.loc["code", "best_k"].between(22, 47).all()
    )
    assert rows.loc["self", "implied_c"] == pytest.approx(0.84, abs=0.005)
    assert (
        "415, 459, 509, 644, 687 and 729" in card
        and "335 + 17.1 K" in card
        and "T(8)/T(1) = 1.16" in card
    )


def test_reported_rates_match_counts(table):
    counted = table.dropna(subset="drafted")
    assert (100 * counted["acceptance_rate"] - counted["acceptance_percent"]).abs().max() < 0.01
    assert (table["tokens_per_s"] * table["plain_s"] - table["speedup"])[
        :-1
    ].abs().max() < 0.06  # all but self


def test_the_named_machine_has_the_costs_of_the_report(table):
    at8, c = NAMED["96-core EPYC"]
    sizes = pd.read_csv(FOLDER / "models.csv").set_index("model")["size_gb"]
    assert c == pytest.approx(sizes["Qwen2.5-0.5B-Instruct"] / sizes["Qwen2.5-Coder-32B"], abs=5e-4)
    line = report.fit_line(table)
    curve = Cost.straight("EPYC", at8).curve
    for k in (4, 8, 24):
        assert table["plain_s"][0] * (curve.seconds(k + 1) + k * c) == pytest.approx(
            line.seconds(k), rel=0.03
        )


def test_the_small_experiment_is_as_fast_as_predicted():
    small = report.read_small()
    drafted = small[small["k"] > 0]
    assert (
        drafted.groupby("setting").size().tolist() == [6, 6, 6] and (small["n_prompts"] >= 5).all()
    )
    below = drafted["predicted_low"] > drafted["high"]
    above = drafted["predicted_high"] < drafted["low"]
    assert not (below | above).any() and not small["busy"].any()
    assert (small["over_fastest"] <= small["speedup"] + 1e-9).all()
