"""Find the records of runs, and list the runs in one table."""

import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pandas as pd

from specnb import store
from specnb.batch.run import place
from specnb.io import reading, write_atomic

RECORD = re.compile(
    rf"(?:{store.NAME.pattern}/)+(?:{re.escape(store.FAILED)}/)?({store.RUN}|{store.OLDER_ROUNDS})"
)
"""Keys of a record's files; no folder but that of a failed run begins with a period."""
OVERVIEW = """
    SELECT r.run_id, r.experiment, r.started, r.status, r.params,
           date_diff('second', r.started, r.ended) AS seconds,
           count(g.run_id) AS generations, sum(g.n_tokens) AS tokens
    FROM runs r LEFT JOIN generations g ON g.run_id = r.run_id AND g.experiment = r.experiment
    GROUP BY ALL ORDER BY r.started
"""


@contextmanager
def local_copy(results: str | None) -> Iterator[Path]:
    """Yield the folder of the records in `results`; for s3://…, a copy of the records only.

    None stands for `results_dir()`. Only files of records are copied, never a key that leads out of
    the folder. Raises InputError if `results` cannot be read.
    """
    if not results or "://" not in results:
        yield Path(results or store.results_dir())
        return
    from pyarrow import fs

    system, base = place(results)
    with tempfile.TemporaryDirectory(prefix="specnb-results-") as name:
        folder = Path(name)
        with reading(results):
            for info in system.get_file_info(fs.FileSelector(base, recursive=True)):
                key = info.path.removeprefix(f"{base}/")
                if RECORD.fullmatch(key):
                    with system.open_input_stream(info.path) as file:
                        write_atomic(folder / key, file.read())
        yield folder


def overview(results: Path) -> pd.DataFrame:
    """Return one row per run, oldest first."""
    return store.query(OVERVIEW, results)
