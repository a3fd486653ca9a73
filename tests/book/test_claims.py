"""Claims: verdicts are computed from data and change with it."""

import re

import nbformat
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2 import UndefinedError

from data.claims import derive, derive_cure
from specnb.book import claims, tables
from specnb.book.claims import VERDICTS, Claim, Estimate, claims_of, judge_claims
from specnb.book.explorer import tables as explorer
from specnb.book.notebook import notebooks
from specnb.chapters import adaptive_k, league
from specnb.chapters.lossless import SameInputDrafter
from specnb.draft.model import ModelDrafter
from specnb.io import project_dir, read_json, read_toml
from specnb.records import RunRecord
from specnb.store import load_record
from tests.book import store
from tests.book.hygiene import UNCHECKED

CLAIMS = read_toml(project_dir() / "data" / "claims.toml")
EXPRESSIONS = CLAIMS.pop("values")


# --- verdicts ---

RANGES = st.tuples(st.floats(-10, 10), st.floats(-10, 10)).map(sorted)


@given(claimed=RANGES, ends=RANGES, n=st.integers(0, 9))
def test_a_verdict_depends_on_the_position_of_the_interval(claimed, ends, n):
    claim = Claim("", "", "", claimed=claimed, holds="explained")
    inside = claimed[0] <= ends[0] and ends[1] <= claimed[1]
    outside = ends[1] < claimed[0] or claimed[1] < ends[0]
    expected = "explained" if inside else "corrected" if outside else "undecided"
    assert claim.verdict(Estimate(sum(ends) / 2, *ends, n)) == (
        expected if n >= claim.needs else "undecided"
    )
    assert (
        claim.verdict(claims.MISSING) == "undecided" and claim.verdict(None) == "not testable here"
    )


# --- values ---


def record_of(notebook: str, **measured) -> RunRecord:
    """Return the stored record of a notebook without generations, with other measurements."""
    record = store.record_of(notebook)
    return record.model_copy(
        update={"measurements": record.measurements | measured, "generations": []}
    )


def tables_of(record: RunRecord) -> dict:
    """Return the tables that a notebook passes besides its record; those of 04 are in no record."""
    match record.experiment:
        case "02_adaptive_k":
            return {"worst": adaptive_k.worst(record)}
        case "07_drafters":
            return {"ranks": league.rank_drafters(record, 0.0)}
        case "09_explorer":
            _, trace, curve, c, _ = explorer.stored(explorer.SHIPPED)
            sweep = explorer.sweep_k(explorer.Tables(trace), curve, c)
            return {
                "sweep": sweep,
                "best": tables.best_k(sweep.query("temperature == temperature.min()")),
            }
    return {}


@pytest.mark.parametrize("notebook", sorted(EXPRESSIONS.keys() - {"04_ssm_rollback"}))
def test_the_stored_record_gives_the_stored_verdicts(notebook, monkeypatch, tmp_path):
    monkeypatch.setenv("SPECNB_RESULTS", str(tmp_path))
    record = record_of(notebook)
    before = record.measurements["claims"]["rows"]
    text = judge_claims(record, tables_of(record)).data
    rows = load_record(tmp_path / notebook / record.run_id).measurements["claims"]["rows"]
    verdicts = [row["verdict"] for row in rows]
    assert verdicts == [row["verdict"] for row in before] and {*verdicts} <= {*VERDICTS}
    assert text.count("\n| ") >= len(rows) == len(CLAIMS[notebook]) and "nan" not in text
    beside = tmp_path / notebook / record.run_id / "figures" / "records" / f"{record.run_id}.json"
    assert read_json(beside)["measurements"]["claims"]["rows"] == rows


def test_an_expression_with_an_unknown_name_is_an_error():
    with pytest.raises(UndefinedError):
        claims.evaluate({"y": "x.nothing + 1"}, {"x": "text"})


def test_the_derived_values_are_stored_and_the_cure_depends_on_the_drafter():
    stored = read_json(project_dir() / "data" / "claims.json")
    exact = (type(None), bool, dict)
    values = {
        name: value if isinstance(value, exact) else pytest.approx(value)
        for name, value in derive().items()
    }
    assert values == stored, "run `python -m data.claims`"
    before = derive_cure(SameInputDrafter)
    after = derive_cure(ModelDrafter)
    for claim in claims_of("08_lossless")[1:3]:
        assert [claim.verdict(values[claim.value]) for values in (before, after)] == [
            "corrected",
            "reproduced",
        ]


def test_too_little_data_or_a_planted_fault_leaves_a_claim_undecided():
    claim = Claim("a", "b", "{x.n} texts", value="x")
    few = claim.judge({"x": Estimate.exact(1, 2)})
    assert (few["verdict"], few["evidence"]) == ("undecided", "2 of 5 required samples. 2 texts")
    planted = claim._replace(planted=True)
    twin = planted.judge({"x": Estimate.exact(0, 5)})
    assert (twin["verdict"], twin["note"]) == ("undecided", "for the planted fault: corrected")
    assert planted.judge({"x": Estimate(1, 0, 2, 5)})["note"] == ""
    text = claims.tabulate_claims([few, twin])
    assert text.startswith("**Undecided for lack of data: 1 of 2 claims.")


FALSE_IS_DATA = {
    ("03_compatibility", "cell-06"),
    ("09_explorer", "explorer-15"),
}
"""Compared cells, by notebook and id, with tables in which False does not mean a failed check."""


@pytest.mark.parametrize("path", notebooks(), ids=lambda path: path.stem)
def test_no_stored_check_failed(path):
    failed = set()
    for cell in nbformat.read(path, 4).cells:
        texts = [
            output.get("text") or output.data.get("text/plain", "")
            for output in cell.get("outputs", [])
        ]
        if UNCHECKED not in cell.metadata.get("tags", ()) and re.search(
            r"\bFalse\b|✗", "\n".join(texts)
        ):
            failed.add(cell.id)
    assert failed == {name for notebook, name in FALSE_IS_DATA if notebook == path.stem}
