"""What a drafter would do along the tokens that the target itself produced, recorded in one pass.

Losslessness makes the generated tokens independent of the drafts, so they are generated once, plainly, and every
drafter is followed along them: a draft model in ONE teacher-forced pass, a deterministic drafter with one proposal
a position. `measure.replay` computes from it what every K and every controller would have done.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from specnb.decode.control import Belief
from specnb.decode.generate import PromptLike, generate
from specnb.decode.sampling import Sampling
from specnb.draft.base import Drafter, TokenView
from specnb.draft.model import ModelDrafter
from specnb.errors import InputError
from specnb.lm.base import LanguageModel
from specnb.records import Generation

PASS_WIDTH = 64
"""Rows of logits held at once in a teacher-forced pass."""
FORMAT = 1


class Recording(NamedTuple):
    """One drafter along one generation. Positions count generated tokens.

    `keep[i]` holds, for a round that starts after i generated tokens, the probability that draft j is kept given that
    the drafts before it were and that the true token is committed; its length is the number of drafts that are on
    offer there, at most k_max and at most the tokens that are left. `offered[i]` counts drafts beyond the end of the
    generation too: they are drafted and verified all the same.

    `beliefs[i]` is what the draft model's row for token i says about itself, along the true tokens (fewer, where its
    context ends); `astray[i]` the same of the rows that follow where the draft for token i was wrong, and `astray[n]`
    of those behind the last token (greedy only, as far as recorded). `pieces[i]` is the text of token i.
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
        found = tuple(r for r in self.recordings if all(getattr(r, name) == value for name, value in wanted.items()))
        if not found:
            raise InputError(f"the trace holds no recording with {wanted}")
        return Trace(found)

    def save(self, path: Path) -> None:
        """Write a parquet file, one row a recording."""
        rows = [r._asdict() for r in self.recordings]
        meta = {b"specnb_trace": json.dumps({"format": FORMAT}).encode()}
        table = pa.Table.from_pylist([_flat(row) for row in rows], schema=_SCHEMA).replace_schema_metadata(meta)
        pq.write_table(table, path, compression="zstd")

    @classmethod
    def load(cls, path: Path) -> "Trace":
        """Read what `save` wrote. Raises InputError for anything else."""
        try:
            table = pq.read_table(path)
            meta = json.loads((table.schema.metadata or {}).get(b"specnb_trace", b"{}"))
        except (OSError, pa.ArrowException, ValueError) as error:
            raise InputError(f"{path} is no trace: {error}; record it again") from error
        if meta.get("format") != FORMAT or table.schema.names != _SCHEMA.names:
            raise InputError(f"{path} is no trace of format {FORMAT}, but {meta or 'another table'}; record it again")
        return cls(tuple(_checked(path, _unflat(row)) for row in table.to_pylist()))


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


def _checked(path: Path, r: Recording) -> Recording:
    n = r.n_tokens
    lengths = {len(r.pieces), len(r.keep), len(r.offered)}
    fits = len(r.keep) == len(r.offered) and all(
        len(chances) == min(drafts, n - i) for i, (chances, drafts) in enumerate(zip(r.keep, r.offered, strict=True))
    )
    proper = all(0.0 <= chance <= 1.0 for chances in r.keep for chance in chances)
    if lengths - {n} or not fits or not proper or any(not 0 <= drafts <= r.k_max for drafts in r.offered):
        raise InputError(f"{path}: the recording of {r.drafter} on {r.prompt_id!r} contradicts itself; record it again")
    return r


def record(
    target: LanguageModel,
    drafters: Sequence[Drafter],
    prompts: Sequence[PromptLike],
    *,
    temperature: float = 0.0,
    k_max: int = 24,
    max_new_tokens: int = 128,
    seed: int = 0,
    ignore_eog: bool = False,
    astray: bool = False,
) -> Iterator[tuple[Generation, list[Recording]]]:
    """Generate each prompt once with the target alone and follow every drafter along it.

    Yields the plain generation and a Recording per drafter. `astray` follows wrong greedy drafts of a draft model as
    well (k_max steps each, so it takes far longer): only how much controllers that stop within a block would waste
    depends on it. Raises what `generate` raises.
    """
    if not 1 <= k_max <= 256:
        raise InputError(f"k_max must be 1 to 256, got {k_max}")
    for prompt in prompts:
        made = generate(
            target, prompt, temperature=temperature, max_new_tokens=max_new_tokens, seed=seed, ignore_eog=ignore_eog
        )
        yield made, follow(target, drafters, made, k_max=k_max, max_new_tokens=max_new_tokens, astray=astray)


def follow(
    target: LanguageModel,
    drafters: Sequence[Drafter],
    made: Generation,
    *,
    k_max: int = 24,
    max_new_tokens: int,
    astray: bool = False,
) -> list[Recording]:
    """A recording of each drafter along `made`, which `target` generated plainly with `max_new_tokens` at most."""
    if made.k:
        raise InputError(f"the generation of {made.prompt_id!r} drafted (K = {made.k}): follow a plain one")
    sampling = Sampling(made.temperature)
    p_true = None if sampling.greedy else _true_probabilities(target, made, sampling)
    return [_follow(target, d, made, sampling, p_true, k_max, max_new_tokens, astray) for d in drafters]


def _follow(
    target: LanguageModel,
    drafter: Drafter,
    made: Generation,
    sampling: Sampling,
    p_true: np.ndarray | None,
    k_max: int,
    max_new_tokens: int,
    astray: bool,
) -> Recording:
    n, true = len(made.token_ids), made.token_ids
    most = [max(0, min(k_max, max_new_tokens - i - 1, target.caps.n_ctx - len(made.prompt_ids) - i)) for i in range(n)]
    beliefs: tuple[Belief, ...] = ()
    paths: tuple[tuple[Belief, ...], ...] = ()
    if isinstance(drafter, ModelDrafter):
        room = drafter.model.caps.n_ctx + 1 - len(made.prompt_ids)  # a draft model's smaller context ends drafting
        offered = tuple(max(0, min(limit, room - i)) for i, limit in enumerate(most))
        kept, beliefs, wrong = _along(drafter.model, made, sampling, p_true)
        keep = tuple(tuple(kept[i : i + offered[i]]) for i in range(n))
        if astray and sampling.greedy:
            ends = [*enumerate(wrong), (n - 1, true[-1])] if n else []
            paths = tuple(_astray(drafter.model, made, i, draft, k_max) for i, draft in ends)
    else:
        proposals = list(_proposals(drafter, made, most))
        keep = tuple(tuple(map(float, map(int.__eq__, ids, true[i:]))) for i, ids in enumerate(proposals))
        offered = tuple(len(ids) for ids in proposals)
    return Recording(
        made.prompt_id, made.category, made.target, drafter.name, sampling.temperature, made.seed, k_max,
        max_new_tokens, target.vocab.decode_bytes(made.prompt_ids), true, tuple(map(target.vocab.piece, true)),
        keep, offered, beliefs, paths,
    )  # fmt: skip


def _proposals(drafter: Drafter, made: Generation, most: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """What a deterministic drafter proposes at every position of the generation."""
    tokens = list(made.prompt_ids)
    view = TokenView(tokens)
    drafter.start(view)
    for limit, token in zip(most, made.token_ids, strict=True):
        yield drafter.propose(view, limit, _NoChoice()).ids if limit else ()
        tokens.append(token)
        drafter.commit(view)


class _NoChoice:
    """A deterministic drafter picks nothing; one that does would need a recording of its own kind."""

    enough = False

    def pick(self, logits: np.ndarray) -> tuple[int, np.ndarray | None] | None:
        raise InputError("this drafter chooses from logits: only draft models and deterministic drafters are replayed")


def _along(
    model: LanguageModel, made: Generation, sampling: Sampling, p_true: np.ndarray | None
) -> tuple[list[float], tuple[Belief, ...], list[int | None]]:
    """For each generated token: the chance that the draft for it is kept, the row's belief, the wrong greedy draft."""
    kept, beliefs, wrong = [], [], []
    for at, row in rows_along(model, made):
        token = made.token_ids[at]
        if sampling.greedy:
            draft = int(np.argmax(row))
            kept.append(float(draft == token))
            wrong.append(None if draft == token else draft)
        else:
            kept.append(min(1.0, float(sampling.probabilities(row)[token]) / float(p_true[at])))
        beliefs.append(Belief.of(row))
    return kept, tuple(beliefs), wrong


def _astray(model: LanguageModel, made: Generation, at: int, draft: int | None, steps: int) -> tuple[Belief, ...]:
    """Beliefs of the rows that follow `draft` in the place of token `at`."""
    if draft is None:
        return ()
    true = (*made.prompt_ids, *made.token_ids[:at])
    model.rewind(max(0, model.n_past - len(true)))
    if model.n_past < len(true):
        model.forward(true[model.n_past :], n_logits=0)
    beliefs = []
    for _ in range(min(steps, model.caps.n_ctx - len(true))):
        row = model.forward((draft,))[0]
        beliefs.append(Belief.of(row))
        draft = int(np.argmax(row))
    return tuple(beliefs)


def _true_probabilities(target: LanguageModel, made: Generation, sampling: Sampling) -> np.ndarray:
    """p_target of each generated token, `(n_tokens,)`."""
    return np.array([sampling.probabilities(row)[made.token_ids[at]] for at, row in rows_along(target, made)])


def rows_along(model: LanguageModel, made: Generation) -> Iterator[tuple[int, np.ndarray]]:
    """(position, logits row) for every generated token that fits, teacher-forced in blocks, from an empty state."""
    model.reset()
    room = model.caps.n_ctx - len(made.prompt_ids)
    if room < 0 or not made.token_ids:
        return
    yield 0, model.forward(made.prompt_ids, n_logits=1)[0]
    fed = made.token_ids[: min(room, len(made.token_ids) - 1)]
    for start in range(0, len(fed), PASS_WIDTH):
        for offset, row in enumerate(model.forward(fed[start : start + PASS_WIDTH]), 1):
            yield start + offset, row
