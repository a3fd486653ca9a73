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
RUN, ROUNDS, OUTCOME = "run.json", "rounds.parquet", "outcome.json"
NEW_ROUNDS = "rounds.{:.16}.new"
"""The file with rounds of this digest until the `run.json` that names them is in place."""
SAVE_WAIT_S = 60.0

CONTEXT = {
    "prompt_id": str, "category": str, "target": str, "drafter": str, "rule": str, "temperature": float, "seed": int,
}  # fmt: skip
"""Fields that each round of a generation repeats, so that a query over rounds needs no join."""
KEY = {"experiment": str, "run_id": str, "generation": int}
SCALARS = [name for name in Generation.model_fields if name not in ("rounds", "prompt_ids", "token_ids")]


def results_dir() -> Path:
    """Return the folder of all records: `$SPECNB_RESULTS` (set for headless runs), else `results/` of the checkout.

    Without a checkout it is `results/` of the working folder.
    """
    if folder := os.environ.get("SPECNB_RESULTS"):
        return named_folder(folder)
    checkout = project_dir()
    return (checkout if (checkout / "notebooks").is_dir() else Path.cwd()) / "results"


def run_id(experiment: str, params: Mapping[str, Any]) -> str:
    """Return twelve hexadecimal digits that depend on the experiment (or notebook) name and the parameters only.

    1 and 1.0 are different values. Raises InputError for a value that JSON cannot hold.
    """
    return digest([experiment, plain(params, "params")])[:12]


def run_folder(results: Path, experiment: str, run_id: str) -> Path:
    """Return `results/<experiment>/<run_id>`; InputError unless both names are plain (no separators, no first dot)."""
    for noun, name in (("experiment", experiment), ("run_id", run_id)):
        if not NAME.fullmatch(name):
            raise InputError(f"{noun} {name!r} cannot name a folder: use up to 128 of A-Z a-z 0-9 . _ -")
    return Path(results) / experiment / run_id


def save(record: RunRecord, results: Path | None = None) -> Path:
    """Write `record` and return its folder; an older record of the same run is replaced in one step.

    A record of a failed run never replaces that of a completed one. It becomes `run.1.json` beside it (then 2, …), with
    its rounds in the file `rounds.SHA256.new`; `load_record` and `query` do not read these.

    Without `results` (or with `results_dir()`) a notebook that runs headless writes into the folder of its own run,
    `$SPECNB_RUN_FOLDER`, beside the executed notebook; a second record of another name goes into a folder below it.
    Tuples in `params`, `provenance` and `measurements` come back as lists.

    Another process that saves this run is waited for; files of saves that were killed are removed.

    Raises InputError for what JSON cannot hold (NaN, a key that is not text, an object), for a folder that cannot be
    written, and where another process saves this run for SAVE_WAIT_S; the old record then stays.

    >>> import tempfile
    >>> now = "2026-11-21T12:00:00Z"
    >>> record = RunRecord(run_id="1", experiment="mine", params={"k": 4}, provenance={}, started=now, ended=now)
    >>> with tempfile.TemporaryDirectory() as results:
    ...     load_record(save(record, Path(results))).params
    {'k': 4}
    """
    import pyarrow.parquet as pq

    folder = folder_of(record, results)
    document = without_rounds(record)
    table, buffer = _rounds_table(record), io.BytesIO()
    pq.write_table(table, buffer)
    sha256 = digest(buffer.getvalue())
    document["rounds_parquet"] = {"rows": len(table), "sha256": sha256}
    lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in document.items())
    new = folder / NEW_ROUNDS.format(sha256)
    reason = "another process saves this run there; save again"
    with locked(folder / ".save.lock", reason, wait_s=SAVE_WAIT_S), writing(folder):
        run = folder / RUN
        with suppress(InputError):  # there is none yet, or it is damaged
            if record.status != "completed" and load_record(folder).status == "completed":
                run = folder / f"run.{1 + len([*folder.glob('run.*.json')])}.json"
        write_atomic(new, buffer.getvalue())
        write_atomic(run, f"{{\n{lines}\n}}\n".encode())
        if run.name == RUN:
            new.replace(folder / ROUNDS)
        _remove_leftovers(folder)
    return folder


def _remove_leftovers(folder: Path) -> None:
    """Remove files of killed saves: temporary ones, and new rounds that no record here names."""
    records = "".join(path.read_text("latin-1") for path in folder.glob("run*.json"))
    for path in [*folder.glob(".r*.tmp"), *folder.glob(NEW_ROUNDS.format("*"))]:
        if path.stem[-16:] not in records:  # a digest of rounds, or the end of a random name
            path.unlink()


def without_rounds(record: RunRecord) -> dict[str, Any]:
    """Return the document of a record without the rounds, which are a table of their own. Raises as `save`."""
    return plain(record.model_dump(exclude={"generations": {"__all__": {"rounds"}}}), "record")


def save_beside_figures(record: RunRecord, folder: Path) -> None:
    """Write `records/RUN_ID.json` in a folder of figures: the record without its rounds. Raises as `save`."""
    document = f"{json.dumps(without_rounds(record), indent=1)}\n"
    write_atomic(f"{run_folder(folder, 'records', record.run_id)}.json", document.encode())


def folder_of(record: RunRecord, results: Path | None = None) -> Path:
    """Return the folder of a record: where it lies below `results`, or will lie (see `save`)."""
    chosen = os.environ.get("SPECNB_RUN_FOLDER")
    if not chosen or (results is not None and Path(results).absolute() != results_dir()):
        return run_folder(results or results_dir(), record.experiment, record.run_id)
    folder = Path(chosen).absolute()
    with suppress(InputError):  # there is none yet, or it is damaged
        present = read_json(folder / RUN, MAX_BYTES)
        if (present.get("experiment"), present.get("run_id")) != (record.experiment, record.run_id):
            return run_folder(folder, record.experiment, record.run_id)
    return folder


def figures_dir(record: RunRecord) -> Path:
    """Return where a run's figures of `record` lie: in the folder of the headless run, whatever record they show."""
    own = os.environ.get("SPECNB_RUN_FOLDER")
    return (Path(own).absolute() if own else folder_of(record)) / "figures"


def load_record(folder: Path) -> RunRecord:
    """Return the record that `save` wrote into `folder`. InputError names the file that cannot be used."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    path, memory = Path(folder) / RUN, pa.BufferOutputStream()
    with reading(path):
        document, rounds = _read(path)
        memory.write(rounds)  # Arrow's own: a thread of Arrow that frees Python's at exit would abort the process
        del document["rounds_parquet"]
        for generation in document["generations"]:
            generation["rounds"] = []
        for row in pq.read_table(pa.BufferReader(memory.getvalue())).to_pylist():
            values = {name: row[name] for name in Round._fields if name in row}  # older records lack some columns
            document["generations"][row["generation"]]["rounds"].append(values)
    return validated(RunRecord, document, str(path))


def query(sql: str, results: Path | None = None, timeout_s: float | None = None) -> "pd.DataFrame":
    """Run `sql` (duckdb) over all records below `results` (default `results_dir()`). It reaches no file and no network.

    Tables: `rounds` (one row a round, with `run_id`, `experiment`, `generation`), `generations` (the
    scalar fields of each), `runs` (`params`, `provenance`, `measurements` as JSON text, times in UTC). Damaged
    records are left out, with one warning that names them. Raises InputError when there are no others, when the SQL
    fails, and when it takes more than `timeout_s`.
    """
    import duckdb
    import pandas as pd
    import pyarrow as pa

    results = results_dir() if results is None else Path(results)
    runs, generations, rounds, damaged = [], [], [], []
    for path in sorted(results.rglob(RUN)):
        if any(part.startswith(".") for part in path.relative_to(results).parts):
            continue
        try:
            record = load_record(path.parent)
        except InputError as error:
            damaged.append(str(error))
            continue
        row = record.model_dump(exclude={"generations"}) | {"folder": str(path.parent)}
        row |= {name: row[name].astimezone(UTC).replace(tzinfo=None) for name in ("started", "ended")}
        runs.append(row | {name: json.dumps(row[name]) for name in ("params", "provenance", "measurements")})
        for key, generation in _keyed(record):
            counts = {"n_tokens": len(generation.token_ids), "n_prompt_tokens": len(generation.prompt_ids)}
            generations.append(key | generation.model_dump(include=set(SCALARS)) | counts)
        rounds.append(_rounds_table(record))
    if damaged:
        n = len(damaged) + len(runs)
        warnings.warn(f"{len(damaged)} of {n} records left out: {'; '.join(damaged)}", stacklevel=2)
    if not runs:
        raise InputError(f"no records in {results}: make some with `specnb run`, or name another results folder")
    columns = [*KEY, *SCALARS, "n_tokens", "n_prompt_tokens"]
    try:
        with duckdb.connect(config={"enable_external_access": "false", "lock_configuration": "true"}) as connection:
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
        raise InputError(f"the query over {results} did not end within {limit}") from error
    except duckdb.Error as error:
        raise InputError(f"the query over {results} failed: {error}") from error


def _read(path: Path) -> tuple[dict[str, Any], bytes]:
    """Return the content of the `run.json` at `path`, and the bytes of the rounds that it was written with."""
    rounds = path.with_name(ROUNDS)
    for _attempt in range(3):  # a writer may be between its two steps
        document = read_json(path, MAX_BYTES)
        sha256 = document["rounds_parquet"]["sha256"]
        for file in (rounds, path.with_name(NEW_ROUNDS.format(sha256))):
            with suppress(InputError):
                if digest(data := read_bytes(file, MAX_BYTES)) == sha256:
                    return document, data
    raise InputError(f"{rounds} is missing or not the file that run.json was written with: run it again")


def _rounds_table(record: RunRecord) -> "pa.Table":
    """Return one row a round."""
    import pyarrow as pa

    types = {str: pa.string(), int: pa.int64(), float: pa.float64()}
    types |= {tuple[kind, ...]: pa.list_(types[kind]) for kind in (int, float)}
    fields, rows = KEY | CONTEXT | {"k_asked": int} | get_type_hints(Round), []
    for key, generation in _keyed(record):
        shared = key | {name: getattr(generation, name) for name in CONTEXT} | {"k_asked": generation.k}
        rows += (shared | round_._asdict() for round_ in generation.rounds)
    return pa.Table.from_pylist(rows, schema=pa.schema({name: types[kind] for name, kind in fields.items()}))


def _keyed(record: RunRecord) -> Iterator[tuple[dict[str, Any], Generation]]:
    for index, generation in enumerate(record.generations):
        yield {"experiment": record.experiment, "run_id": record.run_id, "generation": index}, generation
