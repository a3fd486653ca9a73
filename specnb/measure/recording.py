"""What a drafter would do along the tokens that the target itself produced: the data, and its file.

Losslessness makes the generated tokens independent of the drafts, so one recording (`measure.trace`) answers every K
and every controller (`measure.replay`).
"""

import io
import json
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from specnb.decode.control import Belief
from specnb.errors import InputError
from specnb.io import write_atomic

FORMAT = 2


class Recording(NamedTuple):
    """One drafter along one generation. Positions count generated tokens.

    `keep[i]` holds, for a round that starts after i generated tokens, the probability that draft j is kept given that
    the drafts before it were and that the true token is committed; its length is the number of drafts that are on
    offer there, at most k_max and at most the tokens that are left. `offered[i]` counts drafts beyond the end of the
    generation too: they are drafted and verified all the same.

    `support[i]` is the length of the match that a lookup at position i copies from, 0 where there is none.
    `beliefs[i]` is what the draft model's row for token i says about itself, along the true tokens (fewer, where its
    context ends); `astray[i]` the same of the rows that follow where the draft for token i was wrong, and `astray[n]`
    of those behind the last token (greedy only, as far as they were followed). `pieces[i]` is the text of token i.
    """

    prompt_id: str
    category: str
    target: str
    drafter: str
    temperature: float
    seed: int
    k_max: int
    max_new_tokens: int
    prompt: bytes
    token_ids: tuple[int, ...]
    pieces: tuple[bytes, ...]
    keep: tuple[tuple[float, ...], ...]
    offered: tuple[int, ...]
    support: tuple[int, ...] = ()
    beliefs: tuple[Belief, ...] = ()
    astray: tuple[tuple[Belief, ...], ...] = ()

    @property
    def n_tokens(self) -> int:
        return len(self.token_ids)


class Trace(NamedTuple):
    """Recordings of one experiment: every drafter along every generation."""

    recordings: tuple[Recording, ...]

    def select(self, **wanted: object) -> "Trace":
        """The recordings whose fields equal `wanted`, such as category="code". Raises InputError when none does."""
        recordings = tuple(
            r for r in self.recordings if all(getattr(r, name) == value for name, value in wanted.items())
        )
        if not recordings:
            raise InputError(f"the trace holds no recording with {wanted}")
        return Trace(recordings)

    def save(self, path: Path) -> None:
        """Write a parquet file, one row a recording."""
        rows = [r._asdict() for r in self.recordings]
        meta = {b"specnb_trace": json.dumps({"format": FORMAT}).encode()}
        table = pa.Table.from_pylist([_flat(row) for row in rows], schema=_SCHEMA).replace_schema_metadata(meta)
        sink = io.BytesIO()
        pq.write_table(table, sink, compression="zstd")
        write_atomic(Path(path), sink.getvalue())

    @classmethod
    def load(cls, path: Path) -> "Trace":
        """Read what `save` wrote. Raises InputError for another file."""
        try:
            table = pq.read_table(path)
        except (OSError, pa.ArrowException) as error:
            raise InputError(f"{path} is no trace: {error}; record it again") from error
        meta = json.loads((table.schema.metadata or {}).get(b"specnb_trace", b"{}"))
        if meta.get("format") != FORMAT:
            raise InputError(f"{path} is no trace of format {FORMAT}, but {meta or 'another table'}; record it again")
        return cls(tuple(map(_unflat, table.to_pylist())))


_BELIEFS = pa.list_(pa.list_(pa.float64(), 2))
_SCHEMA = pa.schema(
    {
        **dict.fromkeys(("prompt_id", "category", "target", "drafter"), pa.string()),
        "temperature": pa.float64(),
        **dict.fromkeys(("seed", "k_max", "max_new_tokens"), pa.int64()),
        "prompt": pa.binary(),
        "token_ids": pa.list_(pa.int64()),
        "pieces": pa.list_(pa.binary()),
        "keep": pa.list_(pa.list_(pa.float64())),
        "offered": pa.list_(pa.int64()),
        "support": pa.list_(pa.int64()),
        "beliefs": _BELIEFS,
        "astray": pa.list_(_BELIEFS),
    }
)


def _flat(row: dict) -> dict:
    beliefs = [list(b) for b in row["beliefs"]]
    return row | {"beliefs": beliefs, "astray": [[list(b) for b in path] for path in row["astray"]]}


def _unflat(row: dict) -> Recording:
    return Recording(
        **{name: tuple(value) if isinstance(value, list) else value for name, value in row.items()}
        | {
            "keep": tuple(tuple(chances) for chances in row["keep"]),
            "beliefs": tuple(Belief(*b) for b in row["beliefs"]),
            "astray": tuple(tuple(Belief(*b) for b in path) for path in row["astray"]),
        }
    )
