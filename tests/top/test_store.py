import hashlib
import json
import math
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specnb import store
from specnb.errors import InputError
from specnb.paths import project_dir
from specnb.records import SCHEMA_VERSION, Generation, Round, RunRecord

WHEN = datetime(2026, 11, 21, 12, 0, 0, 123456, tzinfo=UTC)


def round_of(index=0, draft=(5, 6), committed=(5, 9), n_accepted=1) -> Round:
    return Round(
        index=index,
        k=len(draft),
        n_accepted=n_accepted,
        draft_ids=tuple(draft),
        committed_ids=tuple(committed),
        accept_prob=(1.0, 0.1 + 0.2)[: len(draft)],
        draft_s=0.1,
        verify_s=1 / 3,
        rewind_s=0.0,
        other_s=1e-9,
        forward_s=0.3,
        width=len(draft) + 1,
    )


def generation_of(*rounds: Round, **fields) -> Generation:
    tokens = tuple(token for r in rounds for token in r.committed_ids)
    defaults = {"prompt_id": "code-01", "category": "code", "target": "t", "drafter": "lookup", "rule": "greedy"}
    fields = defaults | {"k": 2, "prompt_ids": (1, 2, 3), "wall_s": 1.5, "stop_reason": "length"} | fields
    return Generation(token_ids=tokens, rounds=rounds, **fields)


def record_of(*generations: Generation, **fields) -> RunRecord:
    fields = {"run_id": "abc123", "experiment": "01_k_sweep", "params": {"k": 2, "names": ["a", "é"]}} | fields
    fields = {"provenance": {"git": None, "cores": 2}, "started": WHEN, "ended": WHEN + timedelta(seconds=3)} | fields
    return RunRecord(generations=generations, **fields)


@pytest.fixture
def rich() -> RunRecord:
    first = generation_of(round_of(0), round_of(1, (7,), (7, 8), 1), seed=2**62, temperature=0.7, text='zeile\n"x" ∑')
    plain = generation_of(round_of(0, (), (4,), 0), drafter="", k=0, fallback="no memory", lossless=False)
    nothing = generation_of(prompt_id="empty", stop_reason="context", wall_s=0.0)
    return record_of(first, nothing, plain, measurements={"c": 0.25, "curve": [[1, 0.01], [2, 0.013]], "none": None})


def test_a_record_comes_back_exactly(rich, tmp_path):
    folder = store.save(rich, tmp_path)
    assert folder == tmp_path / "01_k_sweep" / "abc123"
    assert sorted(path.name for path in folder.iterdir()) == ["rounds.parquet", "run.json"]
    back = store.load(folder)
    assert back == rich
    assert isinstance(back.generations[0].rounds[0], Round)


@pytest.mark.parametrize("status, error", [("completed", None), ("failed", "CapacityError: 9 > 8")])
def test_a_record_without_rounds_comes_back(tmp_path, status, error):
    record = record_of(status=status, error=error)
    assert store.load(store.save(record, tmp_path)) == record


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
IDS = st.lists(st.integers(0, 2**31), max_size=4)
SECONDS = st.floats(0, 1e6)
TEXT = st.text(st.characters(codec="utf-8"), max_size=8)


@st.composite
def generations(draw) -> Generation:
    rounds = []
    for index in range(draw(st.integers(0, 3))):
        ids = draw(IDS)
        probabilities = draw(st.lists(st.floats(0, 1), min_size=len(ids), max_size=len(ids)))
        times = [draw(SECONDS) for _ in range(5)]
        committed = tuple(draw(IDS))
        rounds.append(Round(index, len(ids), 0, tuple(ids), committed, tuple(probabilities), *times, len(ids) + 1))
    fields = {"seed": draw(st.integers(-(2**63), 2**63 - 1)), "temperature": draw(SECONDS), "wall_s": draw(SECONDS)}
    return generation_of(*rounds, prompt_id=draw(TEXT), drafter=draw(TEXT), text=draw(st.text()), **fields)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    made=st.lists(generations(), max_size=3),
    params=st.dictionaries(st.text(), JSON, max_size=3),
    started=st.datetimes(timezones=st.just(UTC) | st.just(timezone(timedelta(hours=-3, minutes=-30)))),
)
def test_any_record_comes_back_exactly(tmp_path, made, params, started):
    record = record_of(*made, params=params, started=started)
    assert store.load(store.save(record, tmp_path)) == record


def test_the_parquet_file_is_one_row_a_round_with_its_context(rich, tmp_path):
    table = pq.read_table(store.save(rich, tmp_path) / "rounds.parquet")
    assert table.num_rows == 3
    assert table.schema.field("draft_ids").type == pa.list_(pa.int64())
    rows = table.to_pylist()
    assert [row["generation"] for row in rows] == [0, 0, 2]
    assert (rows[0]["k_asked"], rows[0]["k"], rows[1]["k"], rows[2]["k_asked"]) == (2, 2, 1, 0)
    assert (rows[0]["seed"], rows[0]["temperature"], rows[0]["prompt_id"]) == (2**62, 0.7, "code-01")
    assert {"experiment", "run_id", "category", "target", "drafter", "rule", *Round._fields} <= set(rows[0])


def without_column(folder, name):
    """The record in `folder` as one that never had this column of its rounds."""
    path, document = folder / "rounds.parquet", json.loads((folder / "run.json").read_text())
    pq.write_table(pq.read_table(path).drop_columns([name]), path)
    document["rounds_parquet"]["sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
    (folder / "run.json").write_text(json.dumps(document))


def test_trees_come_back_and_records_of_before_there_were_trees_can_be_read(rich, tmp_path):
    new = record_of(generation_of(round_of(0, (5, 6, 5), (6, 5, 9), 2)._replace(parents=(-1, -1, 1))))
    folder, old = store.save(new, tmp_path / "new"), store.save(rich, tmp_path / "old")
    assert store.load(folder) == new and store.load(folder).generations[0].rounds[0].parents == (-1, -1, 1)
    without_column(old, "parents")
    assert store.load(old) == rich
    rows = store.query("SELECT parents FROM rounds", tmp_path)
    assert len(rows) == 4 and [list(p) for p in rows.parents.dropna()] == [[-1, -1, 1]]
    without_column(folder, "width")
    with pytest.raises(InputError, match="does not hold the rounds"):
        store.load(folder)


def test_saving_again_replaces_the_record_and_leaves_no_temporary_files(rich, tmp_path):
    store.save(rich, tmp_path)
    later = rich.model_copy(update={"generations": rich.generations[:1]})
    folder = store.save(later, tmp_path)
    assert store.load(folder) == later
    assert len(list(folder.iterdir())) == 2


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "a/b", "a\\b", ".hidden", "a" * 129, "a\n", "-x", "é", "a b"])
def test_names_cannot_leave_the_results_folder(tmp_path, name):
    for names in ((name, "ok"), ("ok", name)):
        with pytest.raises(InputError, match="cannot name a folder"):
            store.run_folder(tmp_path, *names)
    with pytest.raises(InputError):
        store.save(record_of(run_id=name), tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["a", "01_k_sweep", "A.b-c_9", "a" * 128])
def test_plain_names_are_taken(tmp_path, name):
    assert store.run_folder(tmp_path, name, name) == tmp_path / name / name


@pytest.mark.parametrize(
    "bad, place",
    [
        ({"c": math.nan}, r"measurements\.c is nan"),
        ({"curve": [1.0, {"x": math.inf}]}, r"measurements\.curve\[1\]\.x is inf"),
        ({"curve": {1: 0.1}}, r"measurements\.curve has the key 1 \(int\)"),
        ({"rows": np.zeros(2)}, r"measurements\.rows is a ndarray"),
        ({"path": Path("x")}, r"measurements\.path is a .*Path"),
    ],
)
def test_what_json_would_change_is_refused_and_nothing_is_written(tmp_path, bad, place):
    with pytest.raises(InputError, match=place):
        store.save(record_of(measurements=bad), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_tuples_and_numpy_scalars_are_stored_as_lists_and_numbers(tmp_path):
    record = record_of(measurements={"pair": (1, 2), "n": np.int64(3), "x": np.float32(0.1)})
    assert store.load(store.save(record, tmp_path)).measurements == {
        "pair": [1, 2],
        "n": 3,
        "x": float(np.float32(0.1)),
    }


def test_a_seed_beyond_64_bits_is_refused(tmp_path):
    with pytest.raises(InputError, match="does not fit its column"):
        store.save(record_of(generation_of(round_of(), seed=2**64)), tmp_path)
    assert list(tmp_path.iterdir()) == []


def _replace(path: Path, **fields) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_a_newer_schema_names_the_remedy(rich, tmp_path):
    folder = store.save(rich, tmp_path)
    _replace(folder / "run.json", schema_version=SCHEMA_VERSION + 1, something_new=1)
    for reader in (lambda: store.load(folder), lambda: store.query("select * from runs", tmp_path)):
        with pytest.raises(InputError, match=f"schema_version {SCHEMA_VERSION + 1}.*update specnb"):
            reader()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        b"[" * 100_000,
        b"{}",
        b'{"schema_version": 1}',
        b'{"schema_version": "1"}',
    ],
)
def test_a_damaged_run_json_gives_one_error_that_names_it(rich, tmp_path, content):
    folder = store.save(rich, tmp_path)
    (folder / "run.json").write_bytes(content)
    with pytest.raises(InputError, match=r"run\.json|rounds\.parquet"):
        store.load(folder)
    with pytest.raises(InputError, match=r"run\.json"):
        store.query("select * from runs", tmp_path)


@pytest.mark.parametrize("generations", [None, [1], [{}], {"a": 1}, [{"token_ids": 3, "prompt_ids": []}]])
def test_damaged_generations_give_one_error(rich, tmp_path, generations):
    folder = store.save(rich, tmp_path)
    _replace(folder / "run.json", generations=generations)
    with pytest.raises(InputError):
        store.load(folder)
    with pytest.raises(InputError, match=r"run\.json is not a run record"):
        store.query("select * from runs", tmp_path)


def test_damaged_rounds_give_one_error_that_names_the_file(rich, tmp_path):
    folder = store.save(rich, tmp_path)
    good = (folder / "rounds.parquet").read_bytes()
    table = pq.read_table(folder / "rounds.parquet")
    lost = table.slice(0, 2)
    moved = table.set_column(table.schema.get_field_index("generation"), "generation", pa.array([0, 0, 7]))
    negative = table.set_column(table.schema.get_field_index("generation"), "generation", pa.array([0, 0, -1]))
    variants = [b"", b"PAR1", good[:-20], good[:60] + b"\0" * 40 + good[100:]]
    for wrong in (lost, moved, negative, table.drop_columns(["k"])):
        sink = pa.BufferOutputStream()
        pq.write_table(wrong, sink)
        variants.append(sink.getvalue().to_pybytes())
    for data in variants:
        (folder / "rounds.parquet").write_bytes(data)
        with pytest.raises(InputError, match=r"rounds\.parquet is not the file"):
            store.load(folder)
        # a file that claims the right digest is still checked
        _replace(folder / "run.json", rounds_parquet={"rows": 3, "sha256": hashlib.sha256(data).hexdigest()})
        with pytest.raises(InputError, match=r"rounds\.parquet does not hold"):
            store.load(folder)
        _replace(folder / "run.json", rounds_parquet={"rows": 3, "sha256": hashlib.sha256(good).hexdigest()})
    (folder / "rounds.parquet").unlink()
    with pytest.raises(InputError, match=r"rounds\.parquet cannot be read"):
        store.load(folder)


@pytest.mark.parametrize("entry", [None, 3, {}, {"rows": 3}])
def test_a_record_that_does_not_name_its_rounds_is_refused(rich, tmp_path, entry):
    folder = store.save(rich, tmp_path)
    _replace(folder / "run.json", rounds_parquet=entry)
    with pytest.raises(InputError, match=r"rounds\.parquet is not the file"):
        store.load(folder)


def test_a_folder_without_a_record_is_named(tmp_path):
    with pytest.raises(InputError, match=r"run\.json cannot be read"):
        store.load(tmp_path / "missing")


def test_query_sees_every_record(rich, tmp_path):
    store.save(rich, tmp_path)
    store.save(record_of(run_id="empty", experiment="other", status="failed", error="x"), tmp_path)
    rounds = store.query(
        "select run_id, k_asked, sum(n_accepted) as n from rounds group by all order by k_asked", tmp_path
    )
    assert rounds.to_dict("records") == [
        {"run_id": "abc123", "k_asked": 0, "n": 0},
        {"run_id": "abc123", "k_asked": 2, "n": 2},
    ]
    runs = store.query("select *, cast(params->>'k' as int) as k from runs order by run_id", tmp_path)
    assert list(runs.run_id) == ["abc123", "empty"]
    assert list(runs.status) == ["completed", "failed"]
    assert list(runs.k) == [2, 2]
    assert runs.started[0].isoformat() == "2026-11-21T12:00:00.123456"
    assert json.loads(runs.measurements[0])["c"] == 0.25
    generations = store.query("select generation, n_tokens, wall_s, fallback from generations order by 1", tmp_path)
    assert list(generations.n_tokens) == [4, 0, 1]
    assert generations.fallback[2] == "no memory"
    assert store.query("select filename from rounds limit 1", tmp_path).filename[0].endswith("rounds.parquet")


def test_query_takes_folder_names_literally(rich, tmp_path):
    results = tmp_path / "re*ults [1]"
    store.save(rich, results)
    store.save(rich, tmp_path / "results 1")
    assert len(store.query("select * from rounds", results)) == 3


def test_query_leaves_uncommitted_and_hidden_folders_out(rich, tmp_path):
    folder = store.save(rich, tmp_path)
    store.save(rich.model_copy(update={"run_id": "torn"}), tmp_path)
    (tmp_path / "01_k_sweep" / "torn" / "run.json").unlink()
    hidden = tmp_path / ".ipynb_checkpoints" / "x"
    hidden.parent.mkdir()
    folder.rename(hidden)
    with pytest.raises(InputError, match="no records"):
        store.query("select * from rounds", tmp_path)


def test_query_errors_are_input_errors(rich, tmp_path):
    with pytest.raises(InputError, match=r"no records in .*specnb run"):
        store.query("select 1", tmp_path / "nothing")
    folder = store.save(rich, tmp_path)
    for sql in ("selec 1", "select nope from rounds", "select * from nowhere"):
        with pytest.raises(InputError, match="failed"):
            store.query(sql, tmp_path)
    with pytest.raises(InputError, match="no rows"):
        store.query("-- nothing", tmp_path)
    (folder / "rounds.parquet").write_bytes(b"PAR1 not really")
    with pytest.raises(InputError, match="failed"):
        store.query("select * from rounds", tmp_path)


def test_run_id_depends_on_name_and_values_only():
    one = store.run_id("01_k_sweep", {"k": 4, "temperature": 0.0})
    assert one == store.run_id("01_k_sweep", {"temperature": 0.0, "k": 4})
    assert len(one) == 12
    assert set(one) <= set("0123456789abcdef")
    others = [
        store.run_id("01_k_swee", {"k": 4, "temperature": 0.0}),
        store.run_id("01_k_sweep", {"k": 5, "temperature": 0.0}),
        store.run_id("01_k_sweep", {"k": "4", "temperature": 0.0}),
        store.run_id("01_k_sweep", {"k": 4}),
    ]
    assert len({one, *others}) == 5
    assert store.run_id("x", {}) == "77f689c4813e"  # it names folders: it must stay the same from version to version
    with pytest.raises(InputError, match=r"params\.k is nan"):
        store.run_id("x", {"k": math.nan})


def test_results_dir_is_that_of_the_environment_or_the_checkout(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECNB_RESULTS", str(tmp_path))
    assert store.results_dir() == tmp_path
    monkeypatch.delenv("SPECNB_RESULTS")
    assert store.results_dir() == project_dir() / "results"


def test_a_headless_run_saves_into_its_own_folder(rich, tmp_path, monkeypatch):
    own = tmp_path / "01_k_sweep" / "f00"
    monkeypatch.setenv("SPECNB_RESULTS", str(tmp_path))
    monkeypatch.setenv("SPECNB_RUN_FOLDER", str(own))
    assert store.save(rich) == own
    assert store.save(rich, store.results_dir()) == own
    second = rich.model_copy(update={"run_id": "second"})
    assert store.save(second) == own / "01_k_sweep" / "second"
    assert store.load(own) == rich  # the second record did not replace the first
    assert store.load(own / "01_k_sweep" / "second") == second
    assert len(store.query("select * from runs")) == 2
    elsewhere = tmp_path / "elsewhere"
    assert store.save(rich, elsewhere) == elsewhere / "01_k_sweep" / "abc123"
