"""Storage of records: one folder per run, `results/<experiment>/<run_id>/`, with `run.json`.

Older records have their rounds in a second file, `rounds.parquet`. Tables are read with `query`.
"""

import json
import os
import re
import warnings
from contextlib import suppress
from datetime import UTC
from pathlib import Path
from typing import TYPE_CHECKING, get_type_hints

from specnb.errors import InputError
from specnb.io import (
    JsonObject,
    digest,
    named_folder,
    plain,
    project_dir,
    read_json,
    reading,
    validated,
    write_json,
)
from specnb.records import Generation, Round, RunRecord

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
MAX_BYTES = 1 << 30
RUN = "run.json"
OUTCOME = "outcome.json"
OLDER_ROUNDS = "rounds.parquet"
"""File of the rounds in records of version 0.1."""
FAILED = ".failed"
"""Subfolder for the record of a failed run if the folder already has that of a completed run."""

CONTEXT = {
    "prompt_id": str,
    "category": str,
    "target": str,
    "drafter": str,
    "rule": str,
    "temperature": float,
    "seed": int,
}
"""Fields of a generation that are repeated in its rounds, so that queries need no join."""
KEY = {"experiment": str, "run_id": str, "generation": int}
SCALARS = [
    name for name in Generation.model_fields if name not in ("rounds", "prompt_ids", "token_ids")
]


def results_dir() -> Path:
    """Return the folder of all records: `$SPECNB_RESULTS`, which headless runs set, or `results/`.

    `results/` lies in the checkout or, without a checkout, in the working directory.
    """
    if folder := os.environ.get("SPECNB_RESULTS"):
        return named_folder(folder)
    checkout = project_dir()
    return (checkout if (checkout / "notebooks").is_dir() else Path.cwd()) / "results"


def run_id(experiment: str, params: JsonObject) -> str:
    """Return twelve hexadecimal digits that identify an experiment (or notebook) with parameters.

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
    """Write `record` and return its folder. Replaces an older record of the same run atomically.

    The record of a failed run never replaces that of a completed one: it is written to the
    subfolder `.failed`, which `query` ignores.

    Without `results` (or with `results_dir()`), a headless notebook writes to the folder of its
    run, `$SPECNB_RUN_FOLDER`, next to the executed notebook; records with other ids go to
    subfolders. Tuples in `params`, `provenance` and `measurements` are loaded as lists.

    Raises InputError for values that JSON does not support (NaN, keys that are not strings,
    objects), and if the folder cannot be written.

    >>> import tempfile
    >>> now = "2026-11-21T12:00:00Z"
    >>> record = RunRecord(
    ...     run_id="1", experiment="mine", params={"k": 4}, provenance={}, started=now, ended=now
    ... )
    >>> with tempfile.TemporaryDirectory() as results:
    ...     load_record(save(record, Path(results))).params
    {'k': 4}
    """
    folder = folder_of(record, results)
    document = plain(record.model_dump(exclude={"generations"}), "record")
    document |= record.model_dump(mode="json", include={"generations"})
    place = folder
    with suppress(InputError):  # no record yet, or a damaged one
        if record.status == "failed" and load_record(folder).status == "completed":
            place = folder / FAILED
    write_json(place / RUN, document, indent=None)
    (place / OLDER_ROUNDS).unlink(missing_ok=True)
    return folder


def save_beside_figures(record: RunRecord, folder: Path) -> None:
    """Write the record without its rounds to `folder/records/RUN_ID.json`. Raises as `save`."""
    fields = record.model_dump(exclude={"generations": {"__all__": {"rounds"}}})
    write_json(record_beside_figures(folder, record.run_id), plain(fields, "record"))


def record_beside_figures(folder: Path, run_id: str) -> Path:
    """Return a record's file in a figures folder. Raises InputError for an invalid `run_id`."""
    return Path(f"{run_folder(folder, 'records', run_id)}.json")


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
    """Return the folder of a record's figures; a headless run has one folder for all records."""
    run = os.environ.get("SPECNB_RUN_FOLDER")
    return (Path(run).absolute() if run else folder_of(record)) / "figures"


def load_record(folder: Path) -> RunRecord:
    """Load a record that `save` wrote to `folder`. Raises InputError that names an invalid file."""
    path = Path(folder) / RUN
    document = read_json(path, MAX_BYTES)
    if document.pop("rounds_parquet", None):
        _add_older_rounds(document, path.with_name(OLDER_ROUNDS))
    return validated(RunRecord, document, str(path))


def _add_older_rounds(document: JsonObject, path: Path) -> None:
    """Add the rounds in `path`, which may lack newer columns, to the record in `document`."""
    import pyarrow.parquet as pq

    with reading(path):
        for generation in document["generations"]:
            generation["rounds"] = []
        for row in pq.read_table(path).to_pylist():
            values = {name: row[name] for name in Round._fields if name in row}
            document["generations"][row["generation"]]["rounds"].append(values)


def query(sql: str, results: Path | None = None) -> "pd.DataFrame":
    """Run `sql` (duckdb) on all records in `results` (default `results_dir()`).

    Tables: `rounds` (one row per round, with `run_id`, `experiment`, `generation`), `generations`
    (their scalar fields), `runs` (`params`, `provenance` and `measurements` as JSON, times in UTC).
    The query has no access to files or the network. Damaged records are skipped, with one warning
    that names them. Raises InputError if there are no valid records, and if the SQL fails.
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
        for index, generation in enumerate(record.generations):
            row = {"experiment": record.experiment, "run_id": record.run_id, "generation": index}
            row |= generation.model_dump(include=set(SCALARS))
            shared = {name: row[name] for name in (*KEY, *CONTEXT)} | {"k_asked": generation.k}
            rounds += (shared | r._asdict() for r in generation.rounds)
            row["n_tokens"] = len(generation.token_ids)
            row["n_prompt_tokens"] = len(generation.prompt_ids)
            generations.append(row)
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
            connection.register("rounds", pa.Table.from_pylist(rounds, schema=_round_schema()))
            connection.execute(sql)
            return connection.df()
    except duckdb.Error as error:
        raise InputError(f"the query on {results} failed: {error}") from error


def _round_schema() -> "pa.Schema":
    """Return the columns of the table `rounds`."""
    import pyarrow as pa

    types = {str: pa.string(), int: pa.int64(), float: pa.float64()}
    types |= {tuple[kind, ...]: pa.list_(types[kind]) for kind in (int, float)}
    fields = KEY | CONTEXT | {"k_asked": int} | get_type_hints(Round)
    return pa.schema({name: types[kind] for name, kind in fields.items()})
