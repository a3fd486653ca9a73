"""Storage of records: a folder per run, `results/<experiment>/<run_id>/{run.json, rounds.parquet}`.

`rounds.parquet` has one row per round, with list columns; `run.json` has the rest of the record and
the digest of `rounds.parquet`. Renaming `run.json` replaces an older record in one step: until then
the new rounds are in a file of their own. All other access is by `query`.
"""

import io
import json
import os
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import UTC
from pathlib import Path
from threading import Timer
from typing import TYPE_CHECKING, Any, get_type_hints

from specnb.errors import InputError
from specnb.io import (
    digest,
    locked,
    named_folder,
    plain,
    project_dir,
    read_bytes,
    read_json,
    reading,
    validated,
    write_atomic,
    writing,
)
from specnb.records import Generation, Round, RunRecord

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
MAX_BYTES = 1 << 30
RUN = "run.json"
ROUNDS = "rounds.parquet"
OUTCOME = "outcome.json"
NEW_ROUNDS = "rounds.{:.16}.next"
"""File of the rounds with this digest until their `run.json` is written."""
FAILED = ".failed"
"""Subfolder for the record of a failed run whose folder has the record of a completed one."""
SAVE_WAIT_S = 60.0

CONTEXT = {
    "prompt_id": str,
    "category": str,
    "target": str,
    "drafter": str,
    "rule": str,
    "temperature": float,
    "seed": int,
}
"""Fields of a generation that its rounds repeat, so that queries over rounds need no join."""
KEY = {"experiment": str, "run_id": str, "generation": int}
LISTS = ("rounds", "prompt_ids", "token_ids")
SCALARS = [name for name in Generation.model_fields if name not in LISTS]


def results_dir() -> Path:
    """Return the folder of all records: `$SPECNB_RESULTS`, which headless runs set, or `results/`.

    `results/` is in the checkout, without one in the working directory.
    """
    if folder := os.environ.get("SPECNB_RESULTS"):
        return named_folder(folder)
    checkout = project_dir()
    return (checkout if (checkout / "notebooks").is_dir() else Path.cwd()) / "results"


def run_id(experiment: str, params: Mapping[str, Any]) -> str:
    """Return twelve hexadecimal digits that identify an experiment (or notebook) and parameters.

    1 and 1.0 are different values. Raises InputError for values that JSON does not support.
    """
    return digest([experiment, plain(params, "params")])[:12]


def run_folder(results: Path, experiment: str, run_id: str) -> Path:
    """Return `results/<experiment>/<run_id>`. Raises InputError for invalid folder names."""
    for noun, name in (("experiment", experiment), ("run_id", run_id)):
        if not NAME.fullmatch(name):
            expected = "up to 128 of A-Z a-z 0-9 . _ -, the first a letter or digit"
            raise InputError(f"{noun} {name!r} is not a folder name: use {expected}")
    return Path(results) / experiment / run_id


def save(record: RunRecord, results: Path | None = None) -> Path:
    """Write `record` and return its folder. Replaces an older record of the same run in one step.

    The record of a failed run never replaces that of a completed one: it is written to the
    subfolder `.failed`, which `query` ignores.

    Without `results` (or with `results_dir()`), a headless notebook writes to the folder of its run,
    `$SPECNB_RUN_FOLDER`, with the executed notebook; records with other ids go to subfolders.
    Tuples in `params`, `provenance` and `measurements` are loaded as lists.

    Waits up to SAVE_WAIT_S seconds for another process that saves this run, and removes the files
    of killed saves. Raises InputError for values that JSON does not support (NaN, keys that are not
    strings, objects), if the folder cannot be written, and if the wait is too long.

    >>> import tempfile
    >>> now = "2026-11-21T12:00:00Z"
    >>> record = RunRecord(run_id="1", experiment="mine", params={"k": 4}, provenance={}, started=now, ended=now)
    >>> with tempfile.TemporaryDirectory() as results:
    ...     load_record(save(record, Path(results))).params
    {'k': 4}
    """
    import pyarrow.parquet as pq

    # 1. Convert the record to JSON and Parquet.
    folder = folder_of(record, results)
    document = without_rounds(record)
    table = _rounds_table(record)
    buffer = io.BytesIO()
    pq.write_table(table, buffer)
    sha256 = digest(buffer.getvalue())
    document["rounds_parquet"] = {"rows": len(table), "sha256": sha256}
    lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in document.items())
    reason = "another process saves this run; save again"
    with locked(folder / ".save.lock", reason, wait_s=SAVE_WAIT_S), writing(folder):
        # 2. Choose the folder.
        place = folder
        with suppress(InputError):  # no record yet, or a damaged one
            if record.status == "failed" and load_record(folder).status == "completed":
                place = folder / FAILED
        # 3. Write the rounds, replace the record, and move the rounds to their name.
        new = place / NEW_ROUNDS.format(sha256)
        write_atomic(new, buffer.getvalue())
        write_atomic(place / RUN, f"{{\n{lines}\n}}\n".encode())
        new.replace(place / ROUNDS)
        # 4. Remove the files of killed saves.
        for leftover in [*place.glob(".r*.tmp"), *place.glob(NEW_ROUNDS.format("*"))]:
            leftover.unlink()
    return folder


def without_rounds(record: RunRecord) -> dict[str, Any]:
    """Return a record as a JSON document without its rounds. Raises as `save`."""
    return plain(record.model_dump(exclude={"generations": {"__all__": {"rounds"}}}), "record")


def save_beside_figures(record: RunRecord, folder: Path) -> None:
    """Write the record without its rounds to `folder/records/RUN_ID.json`. Raises as `save`."""
    document = f"{json.dumps(without_rounds(record), indent=1)}\n"
    write_atomic(f"{run_folder(folder, 'records', record.run_id)}.json", document.encode())


def folder_of(record: RunRecord, results: Path | None = None) -> Path:
    """Return the folder to which `save` writes a record."""
    chosen = os.environ.get("SPECNB_RUN_FOLDER")
    if not chosen or (results is not None and Path(results).absolute() != results_dir()):
        return run_folder(results or results_dir(), record.experiment, record.run_id)
    folder = Path(chosen).absolute()
    with suppress(InputError):  # no record yet, or a damaged one
        present = read_json(folder / RUN, MAX_BYTES)
        if (present.get("experiment"), present.get("run_id")) != (record.experiment, record.run_id):
            return run_folder(folder, record.experiment, record.run_id)
    return folder


def figures_dir(record: RunRecord) -> Path:
    """Return the folder of a record's figures; in a headless run, of all its records' figures."""
    run = os.environ.get("SPECNB_RUN_FOLDER")
    return (Path(run).absolute() if run else folder_of(record)) / "figures"


def load_record(folder: Path) -> RunRecord:
    """Load a record that `save` wrote to `folder`. Raises InputError with the invalid file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = Path(folder) / RUN
    # Arrow's memory: an Arrow thread that frees Python's memory at exit would abort the process.
    memory = pa.BufferOutputStream()
    with reading(path):
        document, rounds = _read(path)
        memory.write(rounds)
        del document["rounds_parquet"]
        for generation in document["generations"]:
            generation["rounds"] = []
        for row in pq.read_table(pa.BufferReader(memory.getvalue())).to_pylist():
            # Older records lack some columns.
            values = {name: row[name] for name in Round._fields if name in row}
            document["generations"][row["generation"]]["rounds"].append(values)
    return validated(RunRecord, document, str(path))


def query(sql: str, results: Path | None = None, timeout_s: float | None = None) -> "pd.DataFrame":
    """Run `sql` (duckdb) on all records in `results` (default `results_dir()`).

    Tables: `rounds` (one row per round, with `run_id`, `experiment`, `generation`), `generations`
    (their scalar fields), `runs` (`params`, `provenance` and `measurements` as JSON, times in UTC).
    The query has no access to files and network. Damaged records are left out, with one warning
    that names them. Raises InputError if there are no valid records, if the SQL fails, and if it
    takes longer than `timeout_s`.
    """
    import duckdb
    import pandas as pd
    import pyarrow as pa

    results = results_dir() if results is None else Path(results)
    runs = []
    generations = []
    rounds = []
    damaged = []
    for path in sorted(results.rglob(RUN)):
        if any(part.startswith(".") for part in path.relative_to(results).parts):
            continue
        try:
            record = load_record(path.parent)
        except InputError as error:
            damaged.append(str(error))
            continue
        row = record.model_dump(exclude={"generations"}) | {"folder": str(path.parent)}
        for name in ("started", "ended"):
            row[name] = row[name].astimezone(UTC).replace(tzinfo=None)
        for name in ("params", "provenance", "measurements"):
            row[name] = json.dumps(row[name])
        runs.append(row)
        for key, generation in _keyed(record):
            row = key | generation.model_dump(include=set(SCALARS))
            row["n_tokens"] = len(generation.token_ids)
            row["n_prompt_tokens"] = len(generation.prompt_ids)
            generations.append(row)
        rounds.append(_rounds_table(record))
    if damaged:
        counts = f"{len(damaged)} of {len(damaged) + len(runs)}"
        warnings.warn(f"{counts} records left out: {'; '.join(damaged)}", stacklevel=2)
    if not runs:
        raise InputError(f"no records in {results}: use `specnb run`, or choose another folder")
    columns = [*KEY, *SCALARS, "n_tokens", "n_prompt_tokens"]
    try:
        config = {"enable_external_access": "false", "lock_configuration": "true"}
        with duckdb.connect(config=config) as connection:
            connection.register("runs", pd.DataFrame(runs))
            connection.register("generations", pd.DataFrame(generations, columns=columns))
            connection.register("rounds", pa.concat_tables(rounds))
            timer = Timer(timeout_s, connection.interrupt)
            timer.start()
            try:
                connection.execute(sql)
                return connection.df()
            finally:
                timer.cancel()
    except duckdb.InterruptException as error:
        limit = f"{timeout_s:g} s: simplify it, or raise the limit (--timeout-s)"
        raise InputError(f"the query on {results} took longer than {limit}") from error
    except duckdb.Error as error:
        raise InputError(f"the query on {results} failed: {error}") from error


def _read(path: Path) -> tuple[dict[str, Any], bytes]:
    """Return the content of the `run.json` at `path`, and the bytes of its rounds."""
    rounds = path.with_name(ROUNDS)
    for _attempt in range(3):  # another process may replace the record at the same time
        document = read_json(path, MAX_BYTES)
        sha256 = document["rounds_parquet"]["sha256"]
        for file in (rounds, path.with_name(NEW_ROUNDS.format(sha256))):
            with suppress(InputError):
                if digest(data := read_bytes(file, MAX_BYTES)) == sha256:
                    return document, data
    raise InputError(f"{rounds} is missing, or its digest differs from run.json's: repeat the run")


def _rounds_table(record: RunRecord) -> "pa.Table":
    """Return a table with one row per round."""
    import pyarrow as pa

    types = {str: pa.string(), int: pa.int64(), float: pa.float64()}
    types |= {tuple[kind, ...]: pa.list_(types[kind]) for kind in (int, float)}
    fields = KEY | CONTEXT | {"k_asked": int} | get_type_hints(Round)
    rows = []
    for key, generation in _keyed(record):
        shared = key | generation.model_dump(include=set(CONTEXT)) | {"k_asked": generation.k}
        rows += (shared | round_._asdict() for round_ in generation.rounds)
    schema = pa.schema({name: types[kind] for name, kind in fields.items()})
    return pa.Table.from_pylist(rows, schema=schema)


def _keyed(record: RunRecord) -> Iterator[tuple[dict[str, Any], Generation]]:
    for index, generation in enumerate(record.generations):
        yield {"experiment": record.experiment, "run_id": record.run_id, "generation": index}, generation
