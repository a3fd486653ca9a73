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
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

from specnb.errors import InputError
from specnb.io import digest, locked, plain, read_bytes, read_json, write_atomic, writing
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
    >>> from datetime import UTC, datetime
    >>> now = datetime.now(UTC)
    >>> record = RunRecord(run_id="1", experiment="mine", params={"k": 4}, provenance={}, started=now, ended=now)
    >>> with tempfile.TemporaryDirectory() as results:
    ...     load(save(record, Path(results))).params
    {'k': 4}
    """
    folder = _home(record, results)
    document = plain(record.model_dump(exclude={"generations": {"__all__": {"rounds"}}}), "record")
    rounds = _to_parquet(record)
    n_rounds = sum(len(g.rounds) for g in record.generations)
    document["rounds_parquet"] = {"rows": n_rounds, "sha256": digest(rounds)}
    lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in document.items())
    with locked(folder / ".save.lock", "another process saves this run there; save again"), writing(folder):
        _tidy(folder)
        write_atomic(_new_rounds(folder, document), rounds)
        write_atomic(folder / "run.json", f"{{\n{lines}\n}}\n".encode())
        _new_rounds(folder, document).replace(folder / "rounds.parquet")
    return folder


def load(folder: Path) -> RunRecord:
    """Return the record that `save` wrote into `folder`. InputError names the file that cannot be used."""
    import pyarrow.parquet as pq

    document, rounds = _read(Path(folder))
    try:
        generations = document["generations"]
        for generation in generations:
            generation["rounds"] = []
        for row in pq.read_table(io.BytesIO(rounds)).to_pylist():
            values = {name: row[name] for name in Round._fields if name in row}  # older records lack some columns
            generations[row["generation"]]["rounds"].append(Round(**values))
        return RunRecord.model_validate({key: document[key] for key in document if key != "rounds_parquet"})
    except (LookupError, TypeError, ValueError) as error:
        raise InputError(f"{Path(folder) / 'run.json'} is not a run record: {error}; run it again") from error


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
    import pyarrow.parquet as pq

    results = results_dir() if results is None else Path(results)
    places = sorted(path.relative_to(results).parent for path in results.rglob("run.json"))
    folders = [results / path for path in places if not any(part.startswith(".") for part in path.parts)]
    runs, generations, rounds, damaged = [], [], [], []
    for folder in folders:
        try:
            document, data = _read(folder)
            run, rows = _rows(document)
            table = pq.read_table(io.BytesIO(data))
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            damaged.append(str(error) if isinstance(error, InputError) else f"{folder / 'run.json'}: {error!r}")
            continue
        runs.append(run | {"folder": str(folder)})
        generations += rows
        rounds.append(table.append_column("filename", pa.array([str(folder / "rounds.parquet")] * len(table))))
    if damaged:
        warnings.warn(f"{len(damaged)} of {len(folders)} records left out: {'; '.join(damaged)}", stacklevel=2)
    if not runs:
        raise InputError(f"no records in {results}: make some with `specnb run`, or name another results folder")
    columns = ["experiment", "run_id", "generation", *_SCALARS, "n_tokens", "n_prompt_tokens"]
    try:
        with duckdb.connect(config={"autoinstall_known_extensions": "false"}) as connection:
            connection.register("runs", pd.DataFrame(runs))
            connection.register("generations", pd.DataFrame(generations, columns=columns))
            connection.register("rounds", pa.concat_tables(rounds, promote_options="default"))
            rows = connection.sql(sql)
            if rows is None:
                raise InputError(f"the SQL returns no rows: {sql!r}; give one SELECT")
            return rows.df()
    except duckdb.Error as error:
        raise InputError(f"the query over {results} failed: {error}") from error


def _tidy(folder: Path) -> None:
    """Finish what a killed writer began, and remove what it left behind."""
    with suppress(InputError, FileNotFoundError):
        _new_rounds(folder, _read_run(folder)).replace(folder / "rounds.parquet")
    for leftover in [*folder.glob(".run.json.*.tmp"), *folder.glob("*rounds.*.new*")]:
        leftover.unlink(missing_ok=True)


def _new_rounds(folder: Path, document: Mapping[str, Any]) -> Path:
    """Return where the rounds of `document` lie until its `run.json` is in place."""
    return folder / f"rounds.{document['rounds_parquet']['sha256'][:16]}.new"


def _read(folder: Path) -> tuple[dict[str, Any], bytes]:
    """Return the content of `run.json`, and the bytes of the rounds that it was written with."""
    for _attempt in range(3):  # a writer may be between its two steps
        document = _read_run(folder)
        for path in (folder / "rounds.parquet", _new_rounds(folder, document), folder / "rounds.parquet"):
            with suppress(InputError):
                if digest(data := read_bytes(path, MAX_BYTES)) == document["rounds_parquet"]["sha256"]:
                    return document, data
    raise InputError(
        f"{folder / 'rounds.parquet'} is missing or not the file that run.json was written with: run it again"
    )


def _read_run(folder: Path) -> dict[str, Any]:
    """Return the content of `run.json`, if this package knows its schema version."""
    path = folder / "run.json"
    document = read_json(path, MAX_BYTES)
    version = document.get("schema_version")
    if not isinstance(version, int) or version > SCHEMA_VERSION:
        raise InputError(f"{path} has schema_version {version!r}, this specnb reads {SCHEMA_VERSION}: update specnb")
    match document:
        case {"rounds_parquet": {"sha256": str()}}:
            return document
    raise InputError(f"{path} is not a run record: it names no rounds; run it again")


def _home(record: RunRecord, results: Path | None) -> Path:
    named = run_folder(results_dir() if results is None else results, record.experiment, record.run_id)
    chosen = os.environ.get("SPECNB_RUN_FOLDER")
    if not chosen or (results is not None and Path(results).absolute() != results_dir()):
        return named
    folder = Path(chosen).absolute()
    with suppress(InputError):  # there is none yet, or it is damaged
        there = read_json(folder / "run.json", MAX_BYTES)
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


def _rows(document: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the row of the run and the rows of its generations, for the views of `query`."""
    key = {name: document[name] for name in ("experiment", "run_id")}
    generations = []
    for index, generation in enumerate(document["generations"]):
        counts = {"n_tokens": len(generation["token_ids"]), "n_prompt_tokens": len(generation["prompt_ids"])}
        fields = {name: generation.get(name, Generation.model_fields[name].default) for name in _SCALARS}
        generations.append(key | {"generation": index} | fields | counts)  # older records lack some fields
    same = {name: document[name] for name in ("schema_version", "status", "error")}
    same |= {name: _utc(document[name]) for name in ("started", "ended")}
    texts = {name: json.dumps(document[name]) for name in ("params", "provenance", "measurements")}
    return key | same | {"n_generations": len(generations)} | texts, generations


def _utc(text: str) -> datetime:
    """Return naive UTC time; a time without zone is taken as UTC."""
    time = datetime.fromisoformat(text)
    return (time.astimezone(UTC) if time.tzinfo else time).replace(tzinfo=None)
