"""Where records lie: one folder a run, `results/<experiment>/<run_id>/{run.json, rounds.parquet}`.

`run.json` holds the record but for its rounds; `rounds.parquet` holds one row a round, lists as list columns. Both
are written under temporary names and renamed, `run.json` last: a folder without it is not a record. `run.json`
carries the digest of its `rounds.parquet`, so a pair that does not belong together is noticed. Everything else is
a query (`query`) over these files.
"""

import io
import json
import os
import re
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

from pydantic import ValidationError

from specnb.errors import InputError
from specnb.io import digest, plain, read_bytes, read_json, write_atomic
from specnb.paths import project_dir
from specnb.records import SCHEMA_VERSION, Generation, Round, RunRecord

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
MAX_BYTES = 1 << 30

# Copied from the generation onto each of its rounds, so that a query over rounds needs no join.
_SAME = ("prompt_id", "category", "target", "drafter", "rule", "temperature", "seed")
_CONTEXT = {name: name for name in _SAME} | {"k": "k_asked"}
_SCALARS = [name for name in Generation.model_fields if name not in ("rounds", "prompt_ids", "token_ids")]


def results_dir() -> Path:
    """Folder of all records: `$SPECNB_RESULTS` (set for headless notebook runs), else `results/` of the checkout."""
    own = os.environ.get("SPECNB_RESULTS")
    return Path(own).expanduser().absolute() if own else project_dir() / "results"


def run_id(experiment: str, params: Mapping[str, Any]) -> str:
    """Twelve hexadecimal digits that depend on the experiment (or notebook) name and the parameters only.

    The order of `params` does not matter; 1 and 1.0 are different values. Raises InputError for a value that JSON
    cannot hold.
    """
    return digest([experiment, plain(params, "params")])[:12]


def run_folder(results: Path, experiment: str, run_id: str) -> Path:
    """`results/<experiment>/<run_id>`; InputError unless both names are plain (no separators, no leading dot)."""
    for what, name in (("experiment", experiment), ("run_id", run_id)):
        if not NAME.fullmatch(name):
            raise InputError(
                f"{what} {name!r} cannot name a folder: use up to 128 of A-Z a-z 0-9 . _ -, no . _ - first"
            )
    return Path(results) / experiment / run_id


def save(record: RunRecord, results: Path | None = None) -> Path:
    """Write `record` and return its folder; an older record of the same run is replaced.

    Without `results` (or with `results_dir()`) a notebook that runs headless writes into the folder of its own run,
    `$SPECNB_RUN_FOLDER`, beside the executed notebook; a second record of another name goes into a folder below it.
    Tuples in `params`, `provenance` and `measurements` come back as lists. Raises InputError for what JSON or
    parquet cannot hold (NaN, a key that is not text, an object, a seed beyond 64 bits), and then writes nothing.
    """
    folder = _home(record, results)
    document = plain(record.model_dump(exclude={"generations": {"__all__": {"rounds"}}}), "record")
    rounds = _to_parquet(record)
    document["rounds_parquet"] = {
        "rows": sum(len(g.rounds) for g in record.generations),
        "sha256": digest(rounds),
    }
    lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in document.items())
    write_atomic(folder / "rounds.parquet", rounds)
    write_atomic(folder / "run.json", f"{{\n{lines}\n}}\n".encode())
    return folder


def load(folder: Path) -> RunRecord:
    """The record that `save` wrote into `folder`, rounds included. InputError names the file that cannot be used."""
    document = _read_run(Path(folder))
    path = Path(folder) / "rounds.parquet"
    data = read_bytes(path, MAX_BYTES)
    expected = document.pop("rounds_parquet", None)
    if not isinstance(expected, dict) or digest(data) != expected.get("sha256"):
        raise InputError(f"{path} is not the file that run.json was written with: damaged or mixed up; run it again")
    generations = document.get("generations")
    if not isinstance(generations, list) or not all(isinstance(g, dict) for g in generations):
        raise InputError(f"{Path(folder) / 'run.json'}: `generations` is not a list of objects; run it again")
    for generation in generations:
        generation["rounds"] = []
    try:
        for index, round_ in _from_parquet(data, expected.get("rows")):
            generations[index]["rounds"].append(round_)
    except (ValueError, TypeError, LookupError, OSError) as error:
        raise InputError(f"{path} does not hold the rounds of its run: {error}; run it again") from error
    try:
        return RunRecord.model_validate(document)
    except ValidationError as error:
        raise InputError(f"{Path(folder) / 'run.json'} is not a run record: {error}; run it again") from error


def query(sql: str, results: Path | None = None) -> "pd.DataFrame":
    """Run `sql` (duckdb) over all records below `results` (default `results_dir()`).

    Views: `rounds` (one row a round, with `run_id`, `experiment`, `generation`, `filename`), `generations` (the
    scalar fields of each), `runs` (`params`, `provenance`, `measurements` as JSON text, times in UTC). Raises
    InputError when there are no records, a record is damaged, or the SQL fails.
    """
    import duckdb

    results = results_dir() if results is None else Path(results)
    found = sorted(path.relative_to(results).parent for path in results.rglob("run.json"))
    folders = [results / path for path in found if not any(part.startswith(".") for part in path.parts)]
    if not folders:
        raise InputError(f"no records in {results}: make some with `specnb run`, or name another results folder")
    runs, generations = _tables(folders)
    try:
        with duckdb.connect(config={"autoinstall_known_extensions": "false"}) as connection:
            connection.register("runs", runs)
            connection.register("generations", generations)
            files = [str(folder / "rounds.parquet") for folder in folders]
            connection.read_parquet(files, union_by_name=True, filename=True).create_view("rounds")
            rows = connection.sql(sql)
            if rows is None:
                raise InputError(f"the SQL returns no rows: {sql!r}; give one SELECT")
            return rows.df()
    except duckdb.Error as error:
        raise InputError(f"the query over {results} failed: {error}") from error


def _home(record: RunRecord, results: Path | None) -> Path:
    named = run_folder(results_dir() if results is None else results, record.experiment, record.run_id)
    own = os.environ.get("SPECNB_RUN_FOLDER")
    if not own or (results is not None and Path(results).absolute() != results_dir()):
        return named
    folder = Path(own).absolute()
    if (folder / "run.json").exists():
        there = _read_run(folder)
        if (there.get("experiment"), there.get("run_id")) != (record.experiment, record.run_id):
            return run_folder(folder, record.experiment, record.run_id)
    return folder


def _schema() -> "pa.Schema":
    import pyarrow as pa

    types = {
        str: pa.string(),
        int: pa.int64(),
        float: pa.float64(),
        tuple[int, ...]: pa.list_(pa.int64()),
        tuple[float, ...]: pa.list_(pa.float64()),
    }
    fields = {"experiment": str, "run_id": str, "generation": int}
    fields |= {column: Generation.model_fields[name].annotation for name, column in _CONTEXT.items()}
    return pa.schema([(name, types[kind]) for name, kind in (fields | get_type_hints(Round)).items()])


def _to_parquet(record: RunRecord) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = []
    for index, generation in enumerate(record.generations):
        shared = {"experiment": record.experiment, "run_id": record.run_id, "generation": index}
        shared |= {column: getattr(generation, name) for name, column in _CONTEXT.items()}
        rows += [shared | round_._asdict() for round_ in generation.rounds]
    buffer = io.BytesIO()
    try:
        pq.write_table(pa.Table.from_pylist(rows, schema=_schema()), buffer)
    except (pa.ArrowException, OverflowError, UnicodeEncodeError) as error:
        raise InputError(f"run {record.run_id}: a round does not fit its column: {error}") from error
    return buffer.getvalue()


def _from_parquet(data: bytes, rows: int | None) -> Iterator[tuple[int, Round]]:
    """Pairs (index of the generation, round) in the order they were written."""
    import pyarrow.parquet as pq

    file = pq.ParquetFile(io.BytesIO(data))
    if file.metadata.num_rows != rows:
        raise ValueError(f"{file.metadata.num_rows} rows where run.json counts {rows}")
    if sum(file.metadata.row_group(i).total_byte_size for i in range(file.metadata.num_row_groups)) > MAX_BYTES:
        raise ValueError(f"more than {MAX_BYTES} bytes when unpacked")
    later = Round._field_defaults.keys() - set(file.schema_arrow.names)  # records of before have no such column
    columns = ["generation", *(name for name in Round._fields if name not in later)]
    for row in file.read().select(columns).to_pylist():
        index = row.pop("generation")
        if index < 0:
            raise IndexError(f"generation {index}")
        yield index, Round(**row)


def _tables(folders: list[Path]) -> "tuple[pd.DataFrame, pd.DataFrame]":
    import pandas as pd

    runs, generations = [], []
    for folder in folders:
        document = _read_run(folder)
        try:
            run, inside = _rows(document)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise InputError(
                f"{folder / 'run.json'} is not a run record ({error!r}); delete it, run it again"
            ) from error
        runs.append(run | {"folder": str(folder)})
        generations += inside
    columns = ["experiment", "run_id", "generation", *_SCALARS, "n_tokens", "n_prompt_tokens"]
    return pd.DataFrame(runs), pd.DataFrame(generations, columns=columns)


def _rows(document: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The row of the run and the rows of its generations, for the views of `query`."""
    key = {name: document[name] for name in ("experiment", "run_id")}
    generations = []
    for index, generation in enumerate(document["generations"]):
        counts = {"n_tokens": len(generation["token_ids"]), "n_prompt_tokens": len(generation["prompt_ids"])}
        generations.append(key | {"generation": index} | {name: generation[name] for name in _SCALARS} | counts)
    same = {name: document[name] for name in ("schema_version", "status", "error")}
    same |= {name: _utc(document[name]) for name in ("started", "ended")}
    texts = {name: json.dumps(document[name]) for name in ("params", "provenance", "measurements")}
    return key | same | {"n_generations": len(generations)} | texts, generations


def _utc(text: str) -> datetime:
    """Naive UTC time; a time without zone is taken as UTC."""
    time = datetime.fromisoformat(text)
    return (time.astimezone(UTC) if time.tzinfo else time).replace(tzinfo=None)


def _read_run(folder: Path) -> dict[str, Any]:
    """The content of the `run.json` in `folder`, of a schema version that this package knows."""
    document = read_json(folder / "run.json", MAX_BYTES)
    version = document.get("schema_version")
    if not isinstance(version, int) or version > SCHEMA_VERSION:
        raise InputError(
            f"{folder / 'run.json'} has schema_version {version!r}, this specnb reads {SCHEMA_VERSION}: update specnb"
        )
    return document
