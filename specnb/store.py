"""Where records lie: one folder a run, `results/<experiment>/<run_id>/{run.json, rounds.parquet}`.

`run.json` holds the record but for its rounds; `rounds.parquet` holds one row a round, lists as list columns.
`run.json` carries the digest of its `rounds.parquet`, and its rename is the one step that replaces an old record: the
new rounds lie beside the old ones until then. Everything else is a query (`query`) over these files.
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
from typing import TYPE_CHECKING, Any, get_type_hints

from specnb.errors import InputError
from specnb.io import digest, locked, plain, project_dir, read_bytes, read_json, write_atomic, writing
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
    """Return the folder of all records: `$SPECNB_RESULTS` (set for headless runs), else `results/` of the checkout."""
    folder = os.environ.get("SPECNB_RESULTS")
    return Path(folder).expanduser().absolute() if folder else project_dir() / "results"


def run_id(experiment: str, params: Mapping[str, Any]) -> str:
    """Return twelve hexadecimal digits that depend on the experiment (or notebook) name and the parameters only.

    The order of `params` does not matter; 1 and 1.0 are different values. Raises InputError for a value that JSON
    cannot hold.
    """
    return digest([experiment, plain(params, "params")])[:12]


def run_folder(results: Path, experiment: str, run_id: str) -> Path:
    """Return `results/<experiment>/<run_id>`; InputError unless both names are plain (no separators, no first dot)."""
    for noun, name in (("experiment", experiment), ("run_id", run_id)):
        if not NAME.fullmatch(name):
            raise InputError(
                f"{noun} {name!r} cannot name a folder: use up to 128 of A-Z a-z 0-9 . _ -, no . _ - first"
            )
    return Path(results) / experiment / run_id


def save(record: RunRecord, results: Path | None = None) -> Path:
    """Write `record` and return its folder; an older record of the same run is replaced in one step.

    Without `results` (or with `results_dir()`) a notebook that runs headless writes into the folder of its own run,
    `$SPECNB_RUN_FOLDER`, beside the executed notebook; a second record of another name goes into a folder below it.
    Tuples in `params`, `provenance` and `measurements` come back as lists.

    Raises InputError for what JSON or parquet cannot hold (NaN, a key that is not text, an object, a seed beyond 64
    bits), for a folder that cannot be written, and while another process saves this run; the old record then stays.

    >>> import tempfile
    >>> now = "2026-11-21T12:00:00Z"
    >>> record = RunRecord(run_id="1", experiment="mine", params={"k": 4}, provenance={}, started=now, ended=now)
    >>> with tempfile.TemporaryDirectory() as results:
    ...     load(save(record, Path(results))).params
    {'k': 4}
    """
    folder = _folder_of(record, results)
    document = plain(record.model_dump(exclude={"generations": {"__all__": {"rounds"}}}), "record")
    rounds = _to_parquet(record)
    n_rounds = sum(len(g.rounds) for g in record.generations)
    document["rounds_parquet"] = {"rows": n_rounds, "sha256": digest(rounds)}
    lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in document.items())
    new = _new_rounds(folder, document)
    with locked(folder / ".save.lock", "another process saves this run there; save again"), writing(folder):
        write_atomic(new, rounds)
        write_atomic(folder / "run.json", f"{{\n{lines}\n}}\n".encode())
        new.replace(folder / "rounds.parquet")
        killed = [*folder.glob(".run.json.*.tmp"), *folder.glob("*rounds.*.new*")]  # what killed writers left
        for leftover in killed:
            leftover.unlink()
    return folder


def load(folder: Path) -> RunRecord:
    """Return the record that `save` wrote into `folder`. InputError names the file that cannot be used."""
    import pyarrow.parquet as pq

    path = Path(folder) / "run.json"
    try:
        document, rounds = _read(path)
        del document["rounds_parquet"]
        for generation in document["generations"]:
            generation["rounds"] = []
        for row in pq.read_table(io.BytesIO(rounds)).to_pylist():
            values = {name: row[name] for name in Round._fields if name in row}  # older records lack some columns
            document["generations"][row["generation"]]["rounds"].append(Round(**values))
        return RunRecord.model_validate(document)
    except InputError:
        raise
    except (LookupError, TypeError, ValueError) as error:
        raise InputError(f"{path} is not a run record: {error}; run it again") from error


def query(sql: str, results: Path | None = None) -> "pd.DataFrame":
    """Run `sql` (duckdb) over all records below `results` (default `results_dir()`).

    Views: `rounds` (one row a round, with `run_id`, `experiment`, `generation`, `filename`), `generations` (the
    scalar fields of each), `runs` (`params`, `provenance`, `measurements` as JSON text, times in UTC). Damaged
    records are left out, with one warning that names them. Raises InputError when there are no others, and when the
    SQL fails.
    """
    import duckdb
    import pandas as pd
    import pyarrow as pa

    results = results_dir() if results is None else Path(results)
    places = sorted(path.relative_to(results).parent for path in results.rglob("run.json"))
    folders = [results / place for place in places if not any(part.startswith(".") for part in place.parts)]
    records, damaged = {}, []
    for folder in folders:
        try:
            records[folder] = load(folder)
        except InputError as error:
            damaged.append(str(error))
    if damaged:
        warnings.warn(f"{len(damaged)} of {len(folders)} records left out: {'; '.join(damaged)}", stacklevel=2)
    if not records:
        raise InputError(f"no records in {results}: make some with `specnb run`, or name another results folder")
    runs = [_run_row(record) | {"folder": str(folder)} for folder, record in records.items()]
    generations = [row for record in records.values() for row in _generation_rows(record)]
    files = {folder: {"filename": str(folder / "rounds.parquet")} for folder in records}
    rounds = [row | files[folder] for folder, record in records.items() for row in _round_rows(record)]
    names = ["experiment", "run_id", "generation", *_SCALARS, "n_tokens", "n_prompt_tokens"]
    try:
        with duckdb.connect(config={"autoinstall_known_extensions": "false"}) as connection:
            connection.register("runs", pd.DataFrame(runs))
            connection.register("generations", pd.DataFrame(generations, columns=names))
            connection.register("rounds", pa.Table.from_pylist(rounds, schema=_schema("filename")))
            rows = connection.sql(sql)
            if rows is None:
                raise InputError(f"the SQL returns no rows: {sql!r}; give one SELECT")
            return rows.df()
    except duckdb.Error as error:
        raise InputError(f"the query over {results} failed: {error}") from error


def _new_rounds(folder: Path, document: Mapping[str, Any]) -> Path:
    """Return where the rounds of `document` lie until its `run.json` is in place."""
    return folder / f"rounds.{document['rounds_parquet']['sha256'][:16]}.new"


def _read(path: Path) -> tuple[dict[str, Any], bytes]:
    """Return the content of the `run.json` at `path`, and the bytes of the rounds that it was written with."""
    for _attempt in range(3):  # a writer may be between its two steps
        document = read_json(path, MAX_BYTES)
        version = document.get("schema_version")
        if not isinstance(version, int) or version > SCHEMA_VERSION:
            raise InputError(f"{path} has schema_version {version!r}, expected {SCHEMA_VERSION}: update specnb")
        rounds = path.with_name("rounds.parquet")
        for file in (rounds, _new_rounds(path.parent, document), rounds):
            with suppress(InputError):
                if digest(data := read_bytes(file, MAX_BYTES)) == document["rounds_parquet"]["sha256"]:
                    return document, data
    raise InputError(f"{rounds} is missing or not the file that run.json was written with: run it again")


def _folder_of(record: RunRecord, results: Path | None) -> Path:
    chosen = os.environ.get("SPECNB_RUN_FOLDER")
    if not chosen or (results is not None and Path(results).absolute() != results_dir()):
        return run_folder(results or results_dir(), record.experiment, record.run_id)
    folder = Path(chosen).absolute()
    with suppress(InputError):  # there is none yet, or it is damaged
        present = read_json(folder / "run.json", MAX_BYTES)
        if (present.get("experiment"), present.get("run_id")) != (record.experiment, record.run_id):
            return run_folder(folder, record.experiment, record.run_id)
    return folder


def _schema(*texts: str) -> "pa.Schema":
    """Return the columns of rounds, and columns of text behind them."""
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
    fields |= get_type_hints(Round) | dict.fromkeys(texts, str)
    return pa.schema([(name, types[kind]) for name, kind in fields.items()])


def _to_parquet(record: RunRecord) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    buffer = io.BytesIO()
    try:
        pq.write_table(pa.Table.from_pylist(list(_round_rows(record)), schema=_schema()), buffer)
    except (pa.ArrowException, OverflowError, UnicodeEncodeError) as error:
        raise InputError(f"run {record.run_id}: a round does not fit its column: {error}") from error
    return buffer.getvalue()


def _round_rows(record: RunRecord) -> Iterator[dict[str, Any]]:
    for index, generation in enumerate(record.generations):
        shared = {"experiment": record.experiment, "run_id": record.run_id, "generation": index}
        shared |= {column: getattr(generation, name) for name, column in _CONTEXT.items()}
        yield from (shared | round_._asdict() for round_ in generation.rounds)


def _generation_rows(record: RunRecord) -> Iterator[dict[str, Any]]:
    for index, generation in enumerate(record.generations):
        key = {"experiment": record.experiment, "run_id": record.run_id, "generation": index}
        counts = {"n_tokens": len(generation.token_ids), "n_prompt_tokens": len(generation.prompt_ids)}
        yield key | generation.model_dump(include=set(_SCALARS)) | counts


def _run_row(record: RunRecord) -> dict[str, Any]:
    row = record.model_dump(exclude={"generations"}) | {"n_generations": len(record.generations)}
    row |= {name: row[name].astimezone(UTC).replace(tzinfo=None) for name in ("started", "ended")}
    return row | {name: json.dumps(row[name]) for name in ("params", "provenance", "measurements")}
