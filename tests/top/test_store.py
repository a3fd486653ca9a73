"""The store: records are loaded exactly as saved, replaced in one step, and can be queried."""

import json
import math
import re
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specnb import io, store
from specnb.errors import InputError
from specnb.records import Generation, Round, RunRecord

WHEN = datetime(2026, 11, 21, 12, 0, 0, 123456, tzinfo=UTC)


def round_of(index=0, draft=(5, 6), committed=(5, 9), n_accepted=1) -> Round:
    times = {"draft_s": 0.1, "verify_s": 1 / 3, "rewind_s": 0.0, "other_s": 1e-9, "forward_s": 0.3}
    accept_prob = (1.0, 0.1 + 0.2)[: len(draft)]
    width = len(draft) + 1
    return Round(index, len(draft), n_accepted, draft, committed, accept_prob, **times, width=width)


def generation_of(*rounds: Round, **fields) -> Generation:
    tokens = tuple(token for r in rounds for token in r.committed_ids)
    names = {"prompt_id": "code-01", "category": "code", "target": "t", "drafter": "lookup"}
    named = names | {"rule": "greedy", "k": 2, "prompt_ids": (1, 2, 3), "wall_s": 1.5}
    named |= {"stop_reason": "length"} | fields
    return Generation(token_ids=tokens, rounds=rounds, **named)


def record_of(*generations: Generation, **fields) -> RunRecord:
    named = {
        "run_id": "abc123",
        "experiment": "01_k_sweep",
        "params": {"k": 2, "names": ["a", "é"]},
    }
    named |= {"provenance": {"git": None, "cores": 2}, "started": WHEN}
    named |= {"ended": WHEN + timedelta(seconds=3)} | fields
    return RunRecord(generations=generations, **named)


@pytest.fixture
def rich() -> RunRecord:
    first = generation_of(
        round_of(0), round_of(1, (7,), (7, 8), 1), seed=2**62, temperature=0.7, text='zeile\n"x" ∑'
    )
    plain = generation_of(
        round_of(0, (), (4,), 0), drafter="", k=0, fallback="no memory", lossless=False
    )
    nothing = generation_of(prompt_id="empty", stop_reason="context", wall_s=0.0)
    measurements = {"c": 0.25, "curve": [[1, 0.01], [2, 0.013]], "none": None}
    return record_of(first, nothing, plain, measurements=measurements)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
IDS = st.lists(st.integers(0, 2**31), max_size=4).map(tuple)
SECONDS = st.floats(0, 1e6)


ROUNDS = st.builds(
    lambda ids, committed, p, times: Round(
        0, len(ids), 0, ids, committed, (p,) * len(ids), *times, len(ids) + 1
    ),
    IDS,
    IDS,
    st.floats(0, 1),
    st.tuples(*[SECONDS] * 5),
)
GENERATIONS = st.builds(
    lambda rounds, **fields: generation_of(*rounds, **fields),
    st.lists(ROUNDS, max_size=3),
    temperature=SECONDS,
    seed=st.integers(-(2**63), 2**63 - 1),
    text=st.text(),
    prompt_id=st.text(st.characters(codec="utf-8"), max_size=8),
)


@given(
    generations=st.lists(GENERATIONS, max_size=3),
    params=st.dictionaries(st.text(), JSON, max_size=3),
    started=st.datetimes(
        timezones=st.just(UTC) | st.just(timezone(timedelta(hours=-3, minutes=-30)))
    ),
)
def test_any_record_is_loaded_exactly_as_saved(tmp_path_factory, generations, params, started):
    record = record_of(*generations, params=params, started=started)
    loaded = store.load_record(store.save(record, tmp_path_factory.getbasetemp() / "any"))
    assert loaded == record == RunRecord.model_validate_json(record.model_dump_json())
    assert all(isinstance(r, Round) for generation in loaded.generations for r in generation.rounds)


def older_record(record, folder) -> Path:
    """Write a record as version 0.1 did, with rounds in a separate file and without trees."""
    document = json.loads(record.model_dump_json()) | {"rounds_parquet": {"sha256": ""}}
    for generation in document["generations"]:
        del generation["rounds"], generation["top_k"]
    rounds = [
        r._asdict() | {"generation": i} for i, g in enumerate(record.generations) for r in g.rounds
    ]
    folder.mkdir()
    table = pa.Table.from_pylist(rounds).drop_columns(["parents"])
    pq.write_table(table, folder / "rounds.parquet")
    (folder / "run.json").write_text(json.dumps(document))
    return folder


def test_records_with_trees_and_older_ones_without_are_loaded(rich, tmp_path):
    tree = round_of(0, (5, 6, 5), (6, 5, 9), 2)._replace(parents=(-1, -1, 1))
    new = record_of(generation_of(tree))
    assert store.load_record(store.save(new, tmp_path / "new")) == new
    old = older_record(rich, tmp_path / "old")
    assert store.load_record(old) == rich
    rows = store.query("SELECT parents FROM rounds", tmp_path)
    assert sorted(map(list, rows.parents)) == [[], [], [], [-1, -1, 1]]
    (old / "rounds.parquet").unlink()
    with pytest.raises(InputError, match=str(old)):
        store.load_record(old)


@pytest.mark.parametrize(("owner", "step"), [(io.os, "fsync"), (Path, "replace")])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_there_is_a_complete_record_whichever_step_fails(
    rich, tmp_path, monkeypatch, owner, step, error
):
    folder = store.save(rich, tmp_path)
    (folder / "notebook.ipynb").write_text("executed")
    later = rich.model_copy(update={"generations": rich.generations[::-1]})

    def failing(*args):
        raise error

    with monkeypatch.context() as patch, pytest.raises((InputError, KeyboardInterrupt)):
        patch.setattr(owner, step, failing)
        store.save(later, tmp_path)
    assert store.load_record(folder) == rich and not list(folder.glob(".*"))
    assert (
        store.load_record(store.save(later, tmp_path)) == later
        and (folder / "notebook.ipynb").exists()
    )


def test_a_failed_run_replaces_a_failed_one_and_never_a_completed_one(rich, tmp_path):
    failed = rich.model_copy(update={"status": "failed", "generations": rich.generations[:1]})
    folder = store.save(failed, tmp_path)
    again = failed.model_copy(update={"error": "once more"})
    assert store.load_record(store.save(again, tmp_path)) == again
    for record in (rich, failed, again):
        store.save(record, tmp_path)
    assert (
        store.load_record(folder) == rich and len(store.query("select * from runs", tmp_path)) == 1
    )
    assert store.load_record(folder / store.FAILED) == again


def test_values_that_json_does_not_support_and_invalid_folder_names_are_refused_before_writing(
    tmp_path,
):
    names = ("", "..", "a/b", ".hidden", "a" * 129, "a\n")
    wrong = [(repr(name), {field: name}) for field in ("run_id", "experiment") for name in names]
    wrong += [("measurements.c", {"measurements": {"c": value}}) for value in (math.nan, {1: 0.1})]
    for value, fields in wrong:
        with pytest.raises(InputError, match=re.escape(value)):
            store.save(record_of(**fields), tmp_path)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(InputError, match="file"):
        store.save(record_of(), tmp_path / "file")


def test_the_run_id_depends_on_name_and_values_only():
    first = store.run_id("01_k_sweep", {"k": 4, "temperature": 0.0})
    assert first == store.run_id("01_k_sweep", {"temperature": 0.0, "k": 4})
    assert first != store.run_id("01_k_sweep", {"k": "4", "temperature": 0.0})
    # it names folders, so it must not change between versions
    assert store.run_id("x", {}) == "77f689c4813e"


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[:-9],
        lambda text: text.replace('_version": 1', '_version": 99'),
        lambda text: text.replace('"generations"', '"generationr"'),
        lambda text: text.replace("[5, 9]", "[5, 8]"),
    ],
)
def test_a_damaged_record_is_refused_with_its_file_and_left_out_of_queries_with_one_warning(
    rich, tmp_path, damage
):
    store.save(record_of(generation_of(round_of()), run_id="sound"), tmp_path)
    file = store.save(rich, tmp_path) / "run.json"
    file.write_text(damage(file.read_text()))
    with pytest.raises(InputError, match=r"abc123.run\.json"):
        store.load_record(file.parent)
    with pytest.warns(UserWarning, match=r"1 of 2 .*abc123") as warned:
        assert list(store.query("select run_id from rounds", tmp_path).run_id) == ["sound"]
    assert len(warned) == 1


def test_a_query_covers_every_record(rich, tmp_path):
    results = tmp_path / "re*ults [1]"  # not a glob pattern
    elsewhere = WHEN.astimezone(timezone(timedelta(hours=2)))
    empty = record_of(run_id="empty", status="failed", started=elsewhere)
    store.save(empty, results)
    for folder in (results, tmp_path / "results 1", results / ".ipynb_checkpoints"):
        store.save(rich, folder)
    sql = "select run_id, status, cast(params->>'k' as int) as k, started from runs order by 1"
    runs = store.query(sql, results)
    when = WHEN.replace(tzinfo=None)
    assert runs.values.tolist() == [["abc123", "completed", 2, when], ["empty", "failed", 2, when]]
    generations = store.query("select n_tokens, fallback from generations", results)
    assert list(generations.n_tokens) == [4, 0, 1] and generations.fallback[2] == "no memory"
    assert store.query("select count(*) as n from rounds", results).n[0] == 3
    (row,) = store.query("select * from rounds where k = 1", results).to_dict("records")
    expected = {"generation": 0, "k_asked": 2, "seed": 2**62, "prompt_id": "code-01"}
    assert expected.items() <= row.items() and list(row["draft_ids"]) == [7]


def test_a_query_cannot_access_files_and_an_invalid_one_is_an_error(rich, tmp_path):
    store.save(rich, tmp_path / "results")
    (tmp_path / "private").write_text("text")
    reaching = (
        f"from read_text('{tmp_path}/private')",
        f"copy runs to '{tmp_path}/copy'",
        f"attach '{tmp_path}/copy'",
    )
    for sql in ("selec 1", "-- nothing", *reaching, "set enable_external_access = true"):
        with pytest.raises(InputError):
            store.query(sql, tmp_path / "results")
    assert not (tmp_path / "copy").exists()
    with pytest.raises(InputError):
        store.query("select * from runs", tmp_path / "none")


def test_a_headless_run_saves_into_its_own_folder(rich, tmp_path, monkeypatch):
    own = tmp_path / "01_k_sweep" / "f00"
    monkeypatch.setenv("SPECNB_RESULTS", str(tmp_path))
    monkeypatch.setenv("SPECNB_RUN_FOLDER", str(own))
    assert store.save(rich) == own
    second = rich.model_copy(update={"run_id": "second"})
    assert store.save(second) == own / "01_k_sweep" / "second"
    assert store.load_record(own) == rich  # the second record did not replace the first
    assert len(store.query("select * from runs")) == 2
    # also when it runs again
    assert {store.figures_dir(record) for record in (rich, second)} == {own / "figures"}
    elsewhere = tmp_path / "elsewhere"
    assert store.save(rich, elsewhere) == elsewhere / "01_k_sweep" / "abc123"
