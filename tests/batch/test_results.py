"""Tables over runs: each number again from the generations; Spec-Bench's own arithmetic on the exported files."""

import json
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from specnb import generate, store
from specnb.batch.logs import read_log
from specnb.batch.results import compare_runs, differing, export_spec_bench, local_copy, overview, record_of
from specnb.errors import InputError
from specnb.lm import toy
from specnb.records import Generation, RunRecord

PROMPTS = {f"p{i}": [i, i + 1] for i in range(6)}


def record(k: int, *, slower: float = 1.0, seed: int = 1) -> RunRecord:
    """Six prompts plainly and with a lookup; times are set, so that ratios are known."""
    model, generations = toy.markov(8, seed=seed), []
    for prompt_id, ids in PROMPTS.items():
        for drafted in (0, k):
            given = {"drafter": "lookup", "k": drafted} if drafted else {}
            g = generate(model, ids, max_new_tokens=24, **given)
            times = {"wall_s": slower * len(g.rounds), "prefill_s": 0.0}
            generations.append(g.model_copy(update={"prompt_id": prompt_id, "category": "toys"} | times))
    params, now = {"k": k, "seed": seed}, datetime.now(UTC)
    named = {"run_id": store.run_id("toys", params | {"slower": slower}), "experiment": "toys", "params": params}
    return RunRecord(**named, provenance={}, started=now, ended=now, generations=tuple(generations))


@pytest.fixture
def results(tmp_path) -> Path:
    for k in (2, 4):
        store.save(record(k), tmp_path)
    return tmp_path


def test_an_overview_has_a_row_a_run_and_says_in_what_runs_differ(results):
    table = overview(results)
    assert table["differs"].tolist() == ["k=2", "k=4"] and (table["generations"] == 12).all()
    assert table["tokens"].tolist() == [sum(len(g.token_ids) for g in record(k).generations) for k in (2, 4)]


def test_a_run_is_found_by_the_beginning_of_its_id(results):
    wanted = record(2)
    assert record_of(wanted.run_id[:6], results) == store.load_record(store.folder_of(wanted, results))
    for unknown in ("", "zzz"):
        with pytest.raises(InputError, match="zzz" if unknown else "2 runs|toys"):
            record_of(unknown, results)


ENDLESS = "WITH RECURSIVE t(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM t) SELECT count(*) FROM t"


def test_an_endless_query_is_one_error_after_its_time_limit(results, specnb):
    words = ["results", ENDLESS, "--results", str(results), "--timeout-s"]
    code, out, err = specnb(*words, "0.5")
    assert code == 2 and out == "" and err.count("\n") == 1 and "0.5 s" in err and "--timeout-s" in err
    code, out, _ = specnb("results", "SELECT 7 AS seven", "--results", str(results), "--json")
    assert code == 0 and json.loads(out) == [{"seven": 7}], "the default is long enough"


def test_odd_keys_of_a_bucket_are_named_and_the_others_are_copied(results, monkeypatch):
    run = next(results.rglob("run.json")).relative_to(results)
    odd = ["runs/one/../../evil/run.json", "runs/one/../two/rounds.parquet", "/etc/run.json"]
    opened = []

    class Bucket:
        """A file system that lists keys as they are, which S3 does and local folders cannot."""

        def get_file_info(self, selector):
            keys = [*odd, *(f"runs/one/{file}" for file in (run, run.with_name("rounds.parquet")))]
            return [SimpleNamespace(path=key) for key in keys]

        def open_input_stream(self, key):
            opened.append(key)
            return (results / key.removeprefix("runs/one/")).open("rb")

    monkeypatch.setattr("specnb.batch.results.place", lambda name: (Bucket(), "runs/one"))
    with pytest.warns(UserWarning) as warned, local_copy("s3://runs/one") as folder:
        files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
        assert len(overview(folder)) == 1 and not (folder.parent / "evil").exists()
    assert files == {str(run), str(run.with_name("rounds.parquet"))} and not set(opened) & set(odd)
    assert len(warned) == 1 and all(key in str(warned[0].message) for key in odd)


def test_two_runs_are_compared_on_the_prompts_and_methods_of_both():
    fast, slow = record(4), record(4, slower=2.0)
    table = compare_runs(fast, slow).set_index("k")
    assert set(table.index) == {0, 4} and (table["n_prompts"] == 6).all() and (table["identical"] == 6).all()
    assert np.allclose(table[["ratio", "low", "high"]], 0.5)
    lookups = [g for g in fast.generations if g.k]
    assert table.loc[4, "tau_a"] == pytest.approx(
        sum(len(g.token_ids) for g in lookups) / sum(len(g.rounds) for g in lookups)
    )
    assert differing(record(2), fast).to_numpy().tolist() == [["k", 2, 4]]
    with pytest.raises(InputError, match="share no"):
        compare_runs(fast.model_copy(update={"generations": ()}), slow)


def spec_bench(file: Path) -> tuple[float, float]:
    """Tokens a second and mean accepted length as Spec-Bench's evaluation/speed.py adds them up."""
    choices = [json.loads(line)["choices"][0] for line in file.read_text().splitlines()]
    speeds = [sum(choice["new_tokens"]) / sum(choice["wall_time"]) for choice in choices]
    return float(np.mean(speeds)), float(np.mean([n for choice in choices for n in choice["accept_lengths"]]))


def test_spec_bench_reads_our_numbers_from_an_export(tmp_path):
    run = record(4)
    files = {"vanilla" in path.name: path for path in export_spec_bench(run, tmp_path / "out")}
    for plain, file in files.items():
        of: list[Generation] = [g for g in run.generations if (g.k == 0) is plain]
        speed, accepted = spec_bench(file)
        assert speed == pytest.approx(np.mean([len(g.token_ids) / g.wall_s for g in of]))
        assert accepted == pytest.approx(sum(len(g.token_ids) for g in of) / sum(len(g.rounds) for g in of))
        if not plain:
            assert [r.accepted for r in read_log(file)] == [tuple(x.n_accepted for x in g.rounds) for g in of]
    with pytest.raises(InputError, match=run.run_id):
        export_spec_bench(run.model_copy(update={"generations": ()}), tmp_path)


def test_the_commands_print_the_same_numbers(results, tmp_path, specnb):
    code, out, _ = specnb("results", "--results", str(results), "--json")
    assert code == 0 and [row["differs"] for row in json.loads(out)] == ["k=2", "k=4"]
    a, b = (store.run_id("toys", {"k": k, "seed": 1, "slower": 1.0}) for k in (2, 4))
    sql = "SELECT run_id, sum(n_accepted) AS kept FROM rounds GROUP BY run_id"
    code, out, _ = specnb("results", sql, "--results", str(results), "--json")
    kept = {row["run_id"]: row["kept"] for row in json.loads(out)}
    assert kept == {run: sum(g.accepted_tokens for g in record(k).generations) for run, k in ((a, 2), (b, 4))}
    code, out, _ = specnb("compare", a[:8], b[:8], "--results", str(results), "--json")
    assert (
        json.loads(out)["differs"] == [{"name": "k", "a": 2, "b": 4}] and json.loads(out)["table"][0]["n_prompts"] == 6
    )
    out = specnb("results", 'SELECT 1 AS "\x1b[31mred[b]"', "--results", str(results))[1]
    assert r"\x1b[31mred[b]" in out and "\x1b" not in out
