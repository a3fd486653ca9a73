"""Verdicts follow from data, and flip with them."""

import ast
import json
import re
import tomllib
from types import SimpleNamespace

import pandas as pd
import pytest

from data.claims import derive, derive_cure, derive_report
from specnb.book import adaptive, claims, compat, league, medusa, rollback, tables
from specnb.book.claims import VERDICTS, Estimate, claims_of, judge_claims, report
from specnb.book.divergence import lossless
from specnb.book.explorer import live
from specnb.book.explorer.tables import THIS_MACHINE
from specnb.book.notebook import notebooks
from specnb.book.publish import gallery
from specnb.divergence.lossless import SameInputDrafter
from specnb.draft.model import ModelDrafter
from specnb.io import project_dir, read_json
from specnb.records import RunRecord
from specnb.ssm import failures
from specnb.store import load_record
from tests.book import store
from tests.book.hygiene import UNCHECKED

FOLDER = project_dir() / "data" / "report"
CLAIMS = tomllib.loads((project_dir() / "data" / "claims.toml").read_text(encoding="utf-8"))


# --- verdicts ---------------------------------------------------------------------------------------------------------


def record_of(notebook: str, **measured) -> RunRecord:
    """The kept record of a notebook without generations, with other measurements."""
    record = store.record_of(notebook)
    return record.model_copy(update={"measurements": record.measurements | measured})


COMPUTED = [(name, claim) for name in CLAIMS for claim in claims_of(name) if not claim.judgement]


@pytest.mark.parametrize("claim", [claim for _, claim in COMPUTED], ids=[f"{n}-{c.value}" for n, c in COMPUTED])
def test_a_verdict_flips_with_its_value_and_few_prompts_give_none(claim):
    start, end = (claim.claimed,) * 2 if isinstance(claim.claimed, bool) else claim.claimed
    inside, outside = min(end, start + 1e-9), start - 1
    for value, verdict in ((inside, claim.holds), (outside, claim.fails)):
        assert claim.verdict(Estimate.exact(value, claim.needs)) == claim.verdict(float(value)) == verdict
        assert claim.verdict(Estimate.exact(value, claim.needs - 1)) == "undecided"
    assert claim.verdict(Estimate(inside, min(inside, outside), max(inside, outside), 99)) == "undecided"
    assert claim.verdict(claims.MISSING) == "undecided" and {claim.holds, claim.fails} <= {*VERDICTS}
    assert claim.verdict(None) == "not testable here"


REPLAY = pd.DataFrame(record_of("02_adaptive_k").measurements["replay"])
WAYS = pd.DataFrame(record_of("04_ssm_rollback").measurements["ways"])
FAULTS = pd.DataFrame(record_of("05_medusa").measurements["faults"])
GATES = pd.DataFrame(record_of("05_medusa").measurements["gates"])
LEAGUE = pd.DataFrame(record_of("07_drafters").measurements["replay"]["rows"])
TRIAL = pd.DataFrame(record_of("03_compatibility").measurements["trial"])
COPIED = pd.DataFrame({"acceptance_rate": 0.9, "tau": 4.5, "identical": 5, "n_prompts": 5, "speedup": 0.7}, index=[0])
SOLVED = pd.DataFrame({"max_error": [1e-8]})
COPY = "smollm2-135m:q4_0"


def talks(n: int, gain: float) -> pd.DataFrame:
    """Turns of `n` conversations: from the first to the second, about `gain` more of 100 drafts are kept."""
    rows = [(f"{talk}", turn, 30 + talk + (gain + 5 * (-1) ** talk) * turn) for talk in range(n) for turn in (0, 1)]
    frame = pd.DataFrame(rows, columns=["prompt_id", "turn", "accepted"])
    return frame.assign(drafted=100, rounds=50, n_decoded=99, prompt_tokens=9)


def timed(slower: float) -> pd.DataFrame:
    """Each policy of the report takes so many times the seconds of the best fixed K, on three texts a content."""
    factor = REPLAY["policy"].isin(["rolling acceptance", "content K"]) * (slower - 1) + 1
    return REPLAY.assign(seconds=[[x, 1.01 * x, 0.99 * x] for x in factor])


def swept(speedup: float, n: int = 9) -> pd.DataFrame:
    row = {"machine": THIS_MACHINE, "drafter": COPY, "category": "all", "temperature": 0.0, "k": 4}
    numbers = {"speedup": speedup, "low": 0.98 * speedup, "high": 1.02 * speedup, "tau": 2.0, "n_prompts": n}
    return pd.DataFrame([row | numbers | {"busy": False}])


def values_of(notebook: str, measured: str = "", rows: pd.DataFrame | None = None) -> dict:
    """The values of a notebook from its kept record, with one frame in the place of another."""
    changed = {} if rows is None else {measured: json.loads(rows.to_json(orient="records"))}
    if notebook == "07_drafters" and changed:
        changed = {"replay": {"rows": changed["replay"]}}
    record, frames = record_of(notebook, **changed), {"copied": COPIED, "solved": SOLVED} | {measured: rows}
    match notebook:
        case "01_k_sweep":
            return tables.sweep_values(record)
        case "02_adaptive_k":
            return adaptive.adaptive_values(record)
        case "03_compatibility":
            return compat.compat_values(record)
        case "04_ssm_rollback":
            return rollback.rollback_values(record, frames["copied"], frames["solved"])
        case "05_medusa":
            return medusa.heads_values(record)
        case "07_drafters":
            return league.league_values(record)
        case "08_lossless":
            return lossless.lossless_values(record)
    trace = SimpleNamespace(recordings=[SimpleNamespace(target=f"smollm2-135m{measured}")], drafters=("lookup", COPY))
    return live.explorer_values(trace, swept(0.6) if rows is None else rows, {COPY: 0.5})


ELSEWHERE = REPLAY.query("machine != @adaptive.REPORT_MACHINE")
NONE_BEST = REPLAY.assign(policy=REPLAY["policy"].str.replace("= 0", "= 3"))
LARGE = WAYS.assign(kept_bytes=WAYS["kept_bytes"].where(WAYS["method"] != "replay", 1e12))
FEW_WAYS = WAYS.assign(n_prompts=4, identical=4)
FLIPS = [  # notebook, value, frame of its measurements; data that carry the claim, refute it, and do not tell
    ("01_k_sweep", "change", "turns", [talks(6, 30)], [talks(6, -9)], [talks(6, 0), talks(4, 30)]),
    ("02_adaptive_k", "rolling", "replay", [timed(1.0)], [timed(2.0)], [ELSEWHERE]),
    ("02_adaptive_k", "content_k", "replay", [timed(1.0)], [timed(2.0)], [ELSEWHERE]),
    ("02_adaptive_k", "lost", "replay", [NONE_BEST], [REPLAY], []),
    ("03_compatibility", "same_text", "trial", [TRIAL.assign(same_text=False)], [TRIAL], []),
    ("04_ssm_rollback", "exact", "ways", [WAYS.assign(identical=0)], [WAYS], [FEW_WAYS]),
    ("04_ssm_rollback", "one_exact", "ways", [WAYS.assign(identical=0)], [WAYS], [FEW_WAYS]),
    ("04_ssm_rollback", "llama_exact", "ways", [WAYS.assign(identical=0)], [WAYS], [FEW_WAYS]),
    ("04_ssm_rollback", "kept", "ways", [WAYS], [LARGE], [FEW_WAYS]),
    ("04_ssm_rollback", "copy_exact", "copied", [COPIED.assign(identical=4)], [COPIED], [COPIED.assign(n_prompts=4)]),
    ("04_ssm_rollback", "solve_error", "solved", [SOLVED + 1], [SOLVED], []),
    ("05_medusa", "unloaded", "faults", [FAULTS], [FAULTS.assign(kept=60)], [FAULTS.assign(kept=14)]),
    ("05_medusa", "zero_blocks", "gates", [GATES], [GATES.assign(passed=False)], []),
    ("05_medusa", "before_norm", "last_hidden_state", [pd.DataFrame({"largest_difference": [0.0, 1.0]})],
     [pd.DataFrame({"largest_difference": [90.0, 0.0]})], []),
    ("07_drafters", "trained", "replay", [LEAGUE.assign(seconds=0.7 * LEAGUE["seconds"])],
     [LEAGUE.assign(seconds=1.3 * LEAGUE["seconds"])], [LEAGUE]),
    ("07_drafters", "skip", "replay", [LEAGUE.assign(seconds=0.5 * LEAGUE["seconds"])], [LEAGUE], []),
    ("09_explorer", "copy_here", "", [swept(0.6)], [swept(1.4)], [swept(1.01), swept(0.6, 4)]),
]  # fmt: skip


ONLY_IF_REFUTED = {
    "same_text": "With every vocabulary", "exact": "always identical", "one_exact": "One snapshot is enough",
    "llama_exact": "Whether it pays", "copy_exact": "nothing rolled back", "zero_blocks": "It fails",
    "skip": "too few draft tokens",
}  # fmt: skip
"""Of evidence, by value: words that hold only where the data refute the claim."""


@pytest.fixture(autouse=True)
def no_model(monkeypatch):
    monkeypatch.setattr(failures, "llama_refusal", lambda _: "inconsistent sequence positions")


@pytest.mark.parametrize(
    ("notebook", "value", "measured", "carry", "refute", "open_"), FLIPS, ids=lambda x: str(x)[:20]
)
def test_a_verdict_flips_with_the_data_of_its_run_and_so_does_its_evidence(
    notebook, value, measured, carry, refute, open_
):
    (claim,) = (claim for claim in claims_of(notebook) if claim.value == value)
    evidence = {}
    for frames, verdict in ((carry, claim.holds), (refute, claim.fails), (open_, "undecided")):
        for rows in frames:
            row = claim.judge(claims.fixed_values() | values_of(notebook, measured, rows))
            assert row["note"].endswith(verdict) if claim.planted else row["verdict"] == verdict
            evidence[verdict] = row["evidence"]
    assert evidence[claim.holds] != evidence[claim.fails] or claim.holds == claim.fails
    assert ONLY_IF_REFUTED.get(value, "") in evidence[claim.fails]
    assert value not in ONLY_IF_REFUTED or ONLY_IF_REFUTED[value] not in evidence[claim.holds]


@pytest.mark.parametrize("claim", [claim for _, claim in COMPUTED], ids=[f"{n}-{c.value}" for n, c in COMPUTED])
def test_the_evidence_of_a_computed_claim_shows_its_data_or_depends_on_the_verdict(claim):
    assert {*claim.conclusion} <= {claim.holds, claim.fails} - {"undecided"}
    assert "{" in claim.evidence or claim.fails in claim.conclusion or claim.holds in claim.conclusion


def test_a_copy_that_drafts_in_another_engine_is_shown_and_not_judged():
    values = values_of("09_explorer", "?backend=hf")
    assert values["copy_best"].value == pytest.approx(0.6) and values["copy_here"] is None


def test_the_reports_own_claims_flip_with_its_rows_and_the_cure_with_the_drafter():
    runs = report.read_runs()
    stored, exact = read_json(project_dir() / "data" / "claims.json"), (type(None), bool, dict)
    values = {name: value if isinstance(value, exact) else pytest.approx(value) for name, value in derive().items()}
    assert values == stored, "run `python -m data.claims`"
    for value, changed in {
        "speedup_24": {"tau": 2 * runs["tau"]}, "prose_gain": {"tau": runs["tau"] * runs["k"] / 8},
        "best_k_code": {"tau": 1.5}, "over_prose": {"tau": 9.0}, "kept_8": {"acceptance_rate": 0.968},
        "baselines": {"speedup": runs["tokens_per_s"] * runs["plain_s"]},
        "k_gain": {"tokens_per_s": 1 + 3.6 * (runs["k"] == 24)},
        "copy_by_bytes": {"tau": 9.0}, "all_kept": {"implied_c": 2.0}, "least_speedup": {"plain_s": 0.01},
    }.items():  # fmt: skip
        claim = next(claim for name in CLAIMS for claim in claims_of(name) if claim.value == value)
        before, after = (derive_report(table)[value] for table in (runs, runs.assign(**changed)))
        before, after = (claim.verdict(Estimate(*x) if isinstance(x, list) else x) for x in (before, after))
        assert before != after, value
    before, after = derive_cure(SameInputDrafter), derive_cure(ModelDrafter)
    for claim in claims_of("08_lossless")[1:3]:
        assert [claim.verdict(values[claim.value]) for values in (before, after)] == ["corrected", "reproduced"]


@pytest.mark.parametrize("notebook", [name for name in CLAIMS if name != "06_divergence"])
def test_every_value_and_placeholder_is_computed_by_the_notebooks_module(notebook, monkeypatch, tmp_path):
    monkeypatch.setenv("SPECNB_RESULTS", str(tmp_path))
    record, values = record_of(notebook), values_of(notebook)
    text = judge_claims(record, values).data
    rows = load_record(tmp_path / notebook / record.run_id).measurements["claims"]["rows"]
    assert text.count("**") >= 2 * len(rows) == 2 * len(CLAIMS[notebook]) and "nan" not in text
    for claim, row in zip(claims_of(notebook), rows, strict=True):
        assert f"**{row['verdict']}**" in text and (row["note"] == "judgement") == bool(claim.judgement)
    kept = tmp_path / notebook / record.run_id / "figures" / "records" / f"{record.run_id}.json"
    assert read_json(kept)["measurements"]["claims"]["rows"][0]["claim"] == CLAIMS[notebook][0]["claim"]


def test_too_few_data_are_said_plainly_and_a_plant_decides_nothing_about_the_case():
    row, planted = (
        {"claim": "a", "source": "b", "evidence": "{x.n} seen", "value": "x"} | more for more in ({}, {"planted": True})
    )
    few = claims.Claim(**row).judge({"x": Estimate.exact(1, 2)})
    assert (few["verdict"], few["evidence"]) == ("undecided", "2 of the 5 needed: 2 seen")
    twin = claims.Claim(**planted).judge({"x": Estimate.exact(0, 5)})
    assert (twin["verdict"], twin["note"]) == ("undecided", "in the planted twin: corrected")
    text = claims.tabulate_claims([few, twin])
    assert text.startswith("**Undecided for want of data: 1 of 2 claims.")
    assert "**undecided** (in the planted twin: corrected)" in text


def test_notebooks_end_with_one_short_call_and_hold_no_verdict():
    for path in notebooks():
        cells = [cell for cell in read_json(path, 2**25)["cells"] if cell["cell_type"] == "code"]
        for cell in cells:
            literals = {
                node.value for node in ast.walk(ast.parse("".join(cell["source"]))) if isinstance(node, ast.Constant)
            }
            assert not literals & {*VERDICTS}, path.name
        if path.stem in CLAIMS:
            assert "claims.judge_claims(" in "".join(cells[-1]["source"]) and len(cells[-1]["source"]) <= 6, path.name
            (output,) = cells[-1]["outputs"]
            assert "".join(output["data"]["text/markdown"]).count("\n| ") >= len(CLAIMS[path.stem]), path.name


FALSE_IS_DATA = {
    ("02_adaptive_k", "04066f55"), ("03_compatibility", "cell-04"), ("03_compatibility", "cell-06"),
    ("03_compatibility", "cell-15"), ("09_explorer", "explorer-15"),
}  # fmt: skip
"""Compared cells that show tables in which False is no failed check, by notebook and id."""


@pytest.mark.parametrize("path", notebooks(), ids=lambda path: path.stem)
def test_no_stored_check_of_a_notebook_holds_false(path):
    cells = [cell for cell in read_json(path, 2**25)["cells"] if cell["cell_type"] == "code"]
    compared = [cell for cell in cells if UNCHECKED not in cell["metadata"].get("tags", ())]
    failed = set()
    for cell in compared:
        texts = ["".join(output.get("text") or output["data"]["text/plain"]) for output in cell["outputs"]]
        if re.search(r"\bFalse\b|✗", "\n".join(texts)):
            failed.add(cell["id"])
    assert failed == {name for notebook, name in FALSE_IS_DATA if notebook == path.stem}


def test_the_gallery_reads_verdicts_from_records_and_says_where_there_are_none(tmp_path):
    folder = project_dir() / "figures"
    sidecar = read_json(folder / "01_turns.json")
    record = record_of("01_k_sweep", claims=None).model_dump(mode="json")
    for document, name in ((sidecar, "01_turns.json"), (record, "records/01.json")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps(document))
    row = {"claim": "10x", "source": "it", "verdict": "explained", "note": "", "evidence": "b"}
    record["measurements"]["claims"] = {"schema_version": 1, "rows": [row]}
    (tmp_path / "records/01.json").write_text(json.dumps(record))
    assert "| 10x | it | **explained** | b |" in gallery(tmp_path)
