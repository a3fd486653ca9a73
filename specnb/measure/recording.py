"""Recordings of what a drafter would propose along the tokens that the target generated.

Because decoding is lossless, the generated tokens do not depend on the drafts. One recording
(`measure.follow`) therefore answers every K and every controller (`measure.replay`).
"""

import io
import json
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import BeforeValidator, TypeAdapter

from specnb.errors import InputError
from specnb.io import reading, write_atomic

FORMAT = 2

Belief = Annotated[
    float, BeforeValidator(lambda stored: stored[0] if isinstance(stored, list) else stored)
]
"""The largest probability of a drafter's row. Older files store it as [top, entropy]."""


class Recording(NamedTuple):
    """One drafter along one generation. Positions count generated tokens.

    For a round that starts after i generated tokens:

    * `keep[i][j]`: P(draft token j is accepted, given that those before it were and the true token
      is committed), for at most k_max draft tokens, and within the generation;
    * `offered[i]`: number of proposed draft tokens, including those beyond the end of the
      generation, which are verified, too;
    * `support[i]`: length in tokens of the match that lookup copies from, 0 without a match;
    * `drafts[i]`: texts of the proposed tokens, for a greedy draft model up to the first rejected
      one; empty if draft tokens are sampled, and in older files;
    * `head_beliefs[i][j]`: for trained heads, the largest probability of the row of head j, which
      depends on the start of the round.

    For token i: `pieces[i]` is its text; `beliefs[i]` is the largest probability of the draft
    model's row along the true tokens, within its context; `p_target[i]` and `q_draft[i]` are its
    probabilities under the target (if sampled) and the draft model.

    `round_steps` is the number of draft steps in every round that drafts; 0 means one step per
    draft token. `top_p` is the sampling setting; 1 (off) in older files.
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
    drafts: tuple[tuple[bytes, ...], ...] = ()
    head_beliefs: tuple[tuple[Belief, ...], ...] = ()
    p_target: tuple[float, ...] = ()
    q_draft: tuple[float, ...] = ()
    round_steps: int = 0
    top_p: float = 1.0

    @property
    def key(self) -> dict[str, Any]:
        """The columns that identify it in a table: prompt, drafter, category, temperature."""
        return {
            name: getattr(self, name)
            for name in ("prompt_id", "drafter", "category", "temperature")
        }

    @property
    def n_tokens(self) -> int:
        return len(self.token_ids)

    def steps(self, drafted: int) -> int:
        """Return the number of draft steps for a chain of `drafted` tokens."""
        return self.round_steps if drafted and self.round_steps else drafted


class Trace(NamedTuple):
    """The recordings of one experiment: every drafter along every generation."""

    recordings: tuple[Recording, ...]

    def select(self, **wanted: object) -> "Trace":
        """Return the recordings whose fields equal `wanted`, such as category="code".

        Raises InputError if there is none.
        """
        chosen = tuple(r for r in self.recordings if wanted.items() <= r._asdict().items())
        if not chosen:
            raise InputError(f"the trace contains no recording with {wanted}")
        return Trace(chosen)

    def save(self, path: Path) -> None:
        """Write a parquet file with one row per recording."""
        meta = {b"specnb_trace": json.dumps({"format": FORMAT}).encode()}
        table = pa.Table.from_pylist([r._asdict() for r in self.recordings], metadata=meta)
        sink = io.BytesIO()
        pq.write_table(table, sink, compression="zstd")
        write_atomic(path, sink.getvalue())

    @classmethod
    def load(cls, path: Path) -> "Trace":
        """Read a file of this FORMAT, which may lack newer fields. Raises InputError for others."""
        with reading(path):
            table = pq.read_table(path)
            meta = json.loads((table.schema.metadata or {})[b"specnb_trace"])
            if meta["format"] != FORMAT:
                raise InputError(
                    f"got format {meta['format']} in the trace {path}, expected {FORMAT}: "
                    "record it again"
                )
            # older files have other columns as well
            fields = [name for name in table.column_names if name in Recording._fields]
            rows = table.select(fields).to_pylist()
            return cls(TypeAdapter(tuple[Recording, ...]).validate_python(rows))
