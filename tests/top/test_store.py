"""The store: records are loaded exactly as saved, replaced in one step, and can be queried."""

import itertools
import json
import math
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specnb import io, store
from specnb.errors import InputError
from specnb.io import digest
from specnb.records import Generation, Round, RunRecord
from tests.top.test_io import JSON

WHEN = datetime(2026, 11, 21, 12, 0, 0, 123456, tzinfo=UTC)


def round_of(index=0, draft=(5, 6), committed=(5, 9), n_accepted=1) -> Round:
    times = {"draft_s": 0.1, "verify_s": 1 / 3, "rewind_s": 0.0, "other_s": 1e-9, "forward_s": 0.3}
    accept_prob, width = (1.0, 0.1 + 0.2)[: len(draft)], len(draft) + 1
    return Round(index, len(draft), n_accepted, draft, committed, accept_prob, **times, width=width)


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
    measurements = {"c": 0.25, "curve": [[1, 0.01], [2, 0.013]], "none": None}
    return record_of(first, nothing, plain, measurements=measurements)


IDS = st.lists(st.integers(0, 2**31), max_size=4).map(tuple)
SECONDS = st.floats(0, 1e6)


ROUNDS = st.builds(
    lambda ids, committed, p, times: Round(0, len(ids), 0, ids, committed, (p,) * len(ids), *times, len(ids) + 1),
    IDS, IDS, st.floats(0, 1), st.tuples(*[SECONDS] * 5),
)  # fmt: skip
GENERATIONS = st.builds(
    lambda rounds, **fields: generation_of(*rounds, **fields), st.lists(ROUNDS, max_size=3), temperature=SECONDS,
    seed=st.integers(-(2**63), 2**63 - 1), text=st.text(), prompt_id=st.text(st.characters(codec="utf-8"), max_size=8),
)  # fmt: skip


@given(
    generations=st.lists(GENERATIONS, max_size=3),
    params=st.dictionaries(st.text(), JSON, max_size=3),
    started=st.datetimes(timezones=st.just(UTC) | st.just(timezone(timedelta(hours=-3, minutes=-30)))),
)
def test_any_record_is_loaded_exactly_as_saved(tmp_path_factory, generations, params, started):
    record = record_of(*generations, params=params, started=started)
    loaded = store.load_record(store.save(record, tmp_path_factory.getbasetemp() / "any"))
    assert loaded == record == RunRecord.model_validate_json(record.model_dump_json())
    assert all(isinstance(r, Round) for generation in loaded.generations for r in generation.rounds)


def made_older(folder, column, *fields):
    """Change the record in `folder` to an older one without this column and these fields."""
    path, document = folder / "rounds.parquet", json.loads((folder / "run.json").read_text())
    pq.write_table(pq.read_table(path).drop_columns([column]), path)
    document["rounds_parquet"]["sha256"] = digest(path)
    for generation, field in itertools.product(document["generations"], fields):
        del generation[field]
    (folder / "run.json").write_text(json.dumps(document))


def test_trees_are_loaded_and_so_are_older_records_without_trees(rich, tmp_path):
    new = record_of(generation_of(round_of(0, (5, 6, 5), (6, 5, 9), 2)._replace(parents=(-1, -1, 1))))
    folder, old = store.save(new, tmp_path / "new"), store.save(rich, tmp_path / "old")
    made_older(old, "parents", "top_k", "top_p", "max_new_tokens")
    assert store.load_record(folder) == new and store.load_record(old) == rich
    rows = store.query("SELECT parents FROM rounds", tmp_path)
    assert sorted(map(list, rows.parents)) == [[], [], [], [-1, -1, 1]]
    assert set(store.query("SELECT top_k FROM generations", tmp_path).top_k) == {0}
    made_older(folder, "width")
    with pytest.raises(InputError, match=r"run\.json"):
        store.load_record(folder)


@pytest.mark.parametrize(
    "owner, step, number", [(io.os, "fsync", 1), (io.os, "fsync", 2), *((Path, "replace", n) for n in range(1, 4))]
)
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_there_is_a_complete_record_whichever_step_fails(rich, tmp_path, monkeypatch, owner, step, number, error):
    folder = store.save(rich, tmp_path)
    (folder / "notebook.ipynb").write_text("executed")
    later = rich.model_copy(update={"generations": rich.generations[::-1]})
    real, steps = getattr(owner, step), []

    def failing(*args):
        steps.append(args)
        if len(steps) == number:
            raise error
        return real(*args)

    with monkeypatch.context() as patch, pytest.raises((InputError, KeyboardInterrupt)):
        patch.setattr(owner, step, failing)
        store.save(later, tmp_path)
    # The last step only renames the new rounds.
    assert store.load_record(folder) == (later if number == 3 else rich)
    assert not list(folder.glob("*.tmp"))
    assert store.query("select count(*) as n from rounds", tmp_path).n[0] == 3
    assert store.load_record(store.save(rich, tmp_path)) == rich and (folder / "notebook.ipynb").exists()


def test_a_failed_run_replaces_a_failed_one_and_never_a_completed_one(rich, tmp_path):
    failed = rich.model_copy(update={"status": "failed", "generations": rich.generations[:1]})
    folder = store.save(failed, tmp_path)
    again = failed.model_copy(update={"error": "once more"})
    assert store.load_record(store.save(again, tmp_path)) == again
    for record in (rich, failed, again):
        store.save(record, tmp_path)
    assert store.load_record(folder) == rich and len(store.query("select * from runs", tmp_path)) == 1
    assert store.load_record(folder / store.FAILED) == again


def test_a_process_that_loaded_a_record_exits_with_its_own_code(tmp_path):
    """With Python memory two of three processes were aborted on an idle machine, few under load."""
    code = (
        f"from specnb import store; store.load_record({str(store.save(record_of(), tmp_path))!r}); raise SystemExit(3)"
    )
    ended = [subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60) for _ in range(4)]
    assert {process.returncode for process in ended} == {3}, ended[-1].stderr


def test_of_two_writers_one_wins_and_the_other_gets_an_error(rich, tmp_path, monkeypatch):
    later = rich.model_copy(update={"generations": rich.generations[::-1]})
    real = store.write_atomic

    def interrupted(path, data):
        if path.name == "run.json":
            with pytest.raises(InputError, match="abc123"):
                store.save(later, tmp_path)
        real(path, data)

    monkeypatch.setattr(store, "write_atomic", interrupted)
    monkeypatch.setattr(store, "SAVE_WAIT_S", 0)
    assert store.load_record(store.save(rich, tmp_path)) == rich


def test_a_second_writer_waits_and_removes_the_files_of_killed_ones(rich, tmp_path):
    folder = store.save(rich, tmp_path)
    killed = ["rounds.0123456789abcdef.next", ".run.json.0123.tmp", ".rounds.01.next.0123.tmp"]
    for name in killed:
        (folder / name).write_text("part")
    later = rich.model_copy(update={"generations": rich.generations[::-1]})
    with ThreadPoolExecutor(1) as pool:
        with io.locked(folder / ".save.lock", "the first writer"):
            second = pool.submit(store.save, later, tmp_path)
            with pytest.raises(TimeoutError):
                second.result(timeout=0.3)
        assert store.load_record(second.result(timeout=60)) == later
    assert not any((folder / name).exists() for name in killed)


def test_invalid_names_and_values_that_json_does_not_support_are_refused_before_writing(tmp_path):
    for field, name in itertools.product(("run_id", "experiment"), ("", "..", "a/b", ".hidden", "a" * 129, "a\n")):
        with pytest.raises(InputError, match=re.escape(repr(name))):
            store.save(record_of(**{field: name}), tmp_path)
    for measurements in ({"c": math.nan}, {"c": {1: 0.1}}):
        with pytest.raises(InputError, match=r"measurements\.c"):
            store.save(record_of(measurements=measurements), tmp_path)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(InputError, match="file"):
        store.save(record_of(), tmp_path / "file")


def test_the_run_id_depends_on_name_and_values_only():
    first = store.run_id("01_k_sweep", {"k": 4, "temperature": 0.0})
    assert first == store.run_id("01_k_sweep", {"temperature": 0.0, "k": 4})
    assert len({first, store.run_id("01_k_sweep", {"k": 4}), store.run_id("01_k_sweep", {"k": "4"})}) == 3
    assert store.run_id("x", {}) == "77f689c4813e"  # it names folders, so it must not change between versions


DAMAGES = {
    "half a file": ("run.json", lambda data: data[:-9]),
    "newer schema": ("run.json", lambda data: data.replace(b'_version": 1', b'_version": 99')),
    "flipped bit": ("rounds.parquet", lambda data: data[:300] + bytes([data[300] ^ 1]) + data[301:]),
    "rounds lost": ("rounds.parquet", None),
    "no digest": ("run.json", lambda data: data.replace(b'"rounds_parquet"', b'"rounds_parquer"')),
    "no generations": ("run.json", lambda data: data.replace(b'"generations"', b'"generationr"')),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_record_is_refused_with_its_file_and_left_out_of_queries_with_one_warning(rich, tmp_path, damage):
    store.save(record_of(generation_of(round_of()), run_id="sound"), tmp_path)
    folder = store.save(rich, tmp_path)
    name, change = DAMAGES[damage]
    (folder / name).write_bytes(change((folder / name).read_bytes())) if change else (folder / name).unlink()
    with pytest.raises(InputError, match=r"abc123.(run\.json|rounds\.parquet)"):
        store.load_record(folder)
    with pytest.warns(UserWarning, match=r"1 of 2 .*abc123") as warned:
        assert list(store.query("select run_id from rounds", tmp_path).run_id) == ["sound"]
    assert len(warned) == 1


def test_a_query_covers_every_record(rich, tmp_path):
    results = tmp_path / "re*ults [1]"  # no pattern
    elsewhere = WHEN.astimezone(timezone(timedelta(hours=2)))
    store.save(record_of(run_id="empty", experiment="other", status="failed", error="x", started=elsewhere), results)
    for folder in (results, tmp_path / "results 1", results / ".ipynb_checkpoints"):
        store.save(rich, folder)
    rounds = store.query("select run_id, k_asked, sum(n_accepted) as n from rounds group by all order by n", results)
    assert list(rounds.itertuples(index=False, name=None)) == [("abc123", 0, 0), ("abc123", 2, 2)]
    runs = store.query("select run_id, status, cast(params->>'k' as int) as k, started from runs order by 1", results)
    when = datetime(2026, 11, 21, 12, 0, 0, 123456)
    assert runs.values.tolist() == [["abc123", "completed", 2, when], ["empty", "failed", 2, when]]
    generations = store.query("select generation, n_tokens, wall_s, fallback from generations order by 1", results)
    assert list(generations.n_tokens) == [4, 0, 1] and generations.fallback[2] == "no memory"
    (row,) = store.query("select * from rounds where k = 1", results).to_dict("records")
    assert (row["generation"], row["k_asked"], row["seed"], row["temperature"]) == (0, 2, 2**62, 0.7)
    assert (row["prompt_id"], list(row["draft_ids"])) == ("code-01", [7])
    (tmp_path / "private").write_text("text")
    reaching = (f"from read_text('{tmp_path}/private')", f"copy runs to '{tmp_path}/copy'", f"attach '{tmp_path}/copy'")
    for sql in ("selec 1", "-- nothing", *reaching, "set enable_external_access = true"):
        with pytest.raises(InputError):
            store.query(sql, results)
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
    assert {store.figures_dir(record) for record in (rich, second)} == {own / "figures"}  # also when it runs again
    elsewhere = tmp_path / "elsewhere"
    assert store.save(rich, elsewhere) == elsewhere / "01_k_sweep" / "abc123"
