"""The raw table of a score: its columns, its file, and what is added up from it.

One row is one tool on one run, so whoever doubts a share can look up the runs behind it.
"""

import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from specnb.divergence.tracing.bounded_parquet import read_table
from specnb.errors import InputError
from specnb.lm.bounded_json import read_bytes
from specnb.measure.acceptance import Share
from specnb.store import write_atomic

LAB = "lab"
NOTHING = "-"
"""Named or expected where there is no module to name: the model itself is the empty path."""
FORMAT = 1
MAX_BYTES = 64 << 20
MAX_ROWS = 1_000_000
MAX_MEMORY = 512 << 20
"""The table in memory: some 500 bytes for each of MAX_ROWS."""
FACT_BYTES = 1 << 20
AGAIN = "run `specnb divergence score` again"
FACTS = b"specnb_score"

SCHEMA = pa.schema(
    {
        **dict.fromkeys(("kind", "name"), pa.string()), "layer": pa.int64(), "dtype": pa.string(), "seed": pa.int64(),
        "size": pa.float64(), **dict.fromkeys(("tool", "against", "verdict"), pa.string()), "structural": pa.bool_(),
        **dict.fromkeys(("module", "expected"), pa.string()), "position": pa.int64(),
        **dict.fromkeys(("token", "exact"), pa.bool_()), **dict.fromkeys(("cause", "expected_cause"), pa.string()),
        "rank": pa.int64(), "seconds": pa.float64(),
    }
)  # fmt: skip
"""`kind`: fault, control or scale. `layer` -1: none. `tool` and what it compared `against`. `structural`: it named a
module, `module`, where `expected` is right, at `position` (-1: it tells none); `token`: a position that the fault makes
wrong, `exact`: the first of them. `rank`: place of the right cause (0: not ranked). `size`: of a scale fault."""
KINDS = ("fault", "control", "scale")


def table(rows: list[dict[str, Any]]) -> pd.DataFrame:
    """Rows as a table with the columns and types of SCHEMA."""
    return pa.Table.from_pylist(rows, schema=SCHEMA).to_pandas()


def write(path: Path, rows: pd.DataFrame, facts: Mapping[str, Any]) -> Path:
    """Write rows and facts (JSON) as one parquet file. InputError for what cannot be stored."""
    try:
        whole = pa.Table.from_pandas(rows, schema=SCHEMA, preserve_index=False)
        meta = json.dumps({"format": FORMAT, "facts": dict(facts)}, allow_nan=False).encode()
    except (pa.ArrowException, KeyError, TypeError, ValueError) as error:
        raise InputError(f"this is no table of a score: {error}") from error
    if len(meta) > FACT_BYTES:
        raise InputError(f"the facts of a score take {len(meta)} bytes, and {FACT_BYTES} can be read: store fewer")
    sink = io.BytesIO()
    pq.write_table(whole.replace_schema_metadata({FACTS: meta}), sink, compression="zstd")
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        write_atomic(Path(path), sink.getvalue())
    except OSError as error:
        raise InputError(f"{path} cannot be written ({error.strerror}): give another file") from error
    return Path(path)


def read(path: Path) -> tuple[pd.DataFrame, dict[str, Any]]:
    """What `write` wrote. InputError for anything else, and for more rows than a grid has."""
    data = read_bytes(Path(path), MAX_BYTES)
    whole = read_table(data, Path(path), SCHEMA, rows=MAX_ROWS, memory=MAX_MEMORY, again=AGAIN)
    meta = _meta((whole.schema.metadata or {}).get(FACTS, b"{}"))
    if meta.get("format") != FORMAT or not isinstance(meta.get("facts"), dict):
        raise InputError(f"{path} is no score of format {FORMAT}: {AGAIN}")
    rows = whole.to_pandas()
    if strange := set(rows["kind"]) - set(KINDS):
        raise InputError(f"{path}: rows of the kind {min(strange)!r}: there are {', '.join(KINDS)}")
    return rows, meta["facts"]


def _meta(text: bytes) -> dict[str, Any]:
    """The JSON that lies beside the rows; empty where it is none that `write` made."""
    try:
        meta = json.loads(text) if len(text) <= FACT_BYTES else None
    except (ValueError, RecursionError):
        meta = None
    return meta if isinstance(meta, dict) else {}


def right(rows: pd.DataFrame) -> pd.Series:
    """Whether the module that is wrong was named, exactly."""
    return rows["structural"] & (rows["module"] == rows["expected"])


def near(rows: pd.DataFrame) -> pd.Series:
    """Whether that module, or a part that it holds directly, was named."""
    holder = rows["module"].str.replace(r"\.?[^.]*$", "", regex=True)
    return right(rows) | (rows["structural"] & (holder == rows["expected"]) & (rows["module"] != NOTHING))


def shares(rows: pd.DataFrame, by: list[str]) -> pd.DataFrame:
    """Of the faults, by some columns: how often module, token and cause were right, with Wilson intervals at 95 %.

    Columns: n, then for each of module, near, token, exact, cause: its share, and `_low` and `_high`. Tools that tell
    no tokens or causes have 0 there, for they named none.
    """
    faults = rows[rows["kind"] == "fault"]
    hits = {"module": right(faults), "near": near(faults), "token": faults["token"], "exact": faults["exact"],
            "cause": faults["structural"] & (faults["rank"] == 1)}  # fmt: skip
    found = []
    for values, part in faults.assign(**{f"hit_{name}": hit for name, hit in hits.items()}).groupby(by, sort=False):
        row = dict(zip(by, values, strict=True)) | {"n": len(part)}
        for name in hits:
            share = Share.of(int(part[f"hit_{name}"].sum()), len(part))
            row |= {name: share.rate, f"{name}_low": share.low, f"{name}_high": share.high}
        found.append(row)
    columns = [f"{name}{end}" for name in hits for end in ("", "_low", "_high")]
    return pd.DataFrame(found, columns=[*by, "n", *columns])


def alarms(rows: pd.DataFrame, by: list[str]) -> pd.DataFrame:
    """Of the controls, by some columns: how often a module was named though none is wrong.

    Columns: controls, alarms, alarm (share), alarm_low, alarm_high, and same_bits: how many more controls changed no
    bit, so that no tool could be wrong about them.
    """
    controls, run = rows[rows["kind"] == "control"], ["name", "layer", "dtype", "seed"]
    same = controls.loc[controls["verdict"] == "SOUND", run].drop_duplicates().assign(same=True)
    controls = controls.merge(same, on=run, how="left")
    found = []
    for values, part in controls.groupby(by, sort=False):
        changed = part[part["same"].isna()]
        share = Share.of(int(changed["structural"].sum()), len(changed))
        counted = {"controls": share.n, "alarms": share.hits, "alarm": share.rate, "same_bits": len(part) - share.n}
        found.append(dict(zip(by, values, strict=True)) | counted | {"alarm_low": share.low, "alarm_high": share.high})
    return pd.DataFrame(found, columns=[*by, "controls", "alarms", "alarm", "alarm_low", "alarm_high", "same_bits"])


def of_lab(rows: pd.DataFrame) -> pd.DataFrame:
    """The lab's own rows."""
    return rows[rows["tool"] == LAB]
