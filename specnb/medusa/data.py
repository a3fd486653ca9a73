"""Training text by the backbone itself: `python -m specnb.medusa.train --stage data` (self-distillation).

Heads are to foretell what the backbone says, so they learn from what it says (Cai et al. 2401.10774, section 2.3.2;
the same in EAGLE-3 and SpecForge). A row is one stream of `length` tokens: a seed, the backbone's greedy answer, and,
where the answer ends early, a request that the backbone writes itself with some chance and answers again; so every
row of a batch is busy to the end and nothing is padded. `own[i]` says that token i is the backbone's greedy choice.

Rows are written batch by batch; a run that was stopped goes on behind the last batch, and the batch of any number is
the same for every run, since its random numbers come from (seed, number).
"""

import hashlib
import io
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel

from specnb import corpus, store
from specnb.errors import InputError
from specnb.lm.base import LanguageModel
from specnb.lm.hf_cache import new_cache
from specnb.medusa.seeds import ASKED, Seed, Turns, seeds
from specnb.provenance import json_digest

FACTS_FILE = "facts.json"
SPLITS = ("train", "held_out")
ASKING_TEMPERATURE = 0.8
"""Of the requests that the backbone writes; its answers are greedy."""


@dataclass(frozen=True)
class Writing:
    """How the text is made: rows of `length` tokens in batches of `batch_size`, after seeds of at most `longest_seed`.

    An answer is at most `longest_answer` tokens, a request that the backbone writes `longest_request`.
    """

    length: int = 320
    batch_size: int = 64
    longest_seed: int = 120
    longest_answer: int = 160
    longest_request: int = 48
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.length - self.longest_seed, self.batch_size, self.longest_answer, self.longest_request) < 1:
            raise InputError(f"rows must be longer than their seeds and every length at least 1, got {self}")


@dataclass(frozen=True)
class Rows:
    """Written rows: `tokens (rows, length)` int32 and `own (rows, length)` bool."""

    tokens: np.ndarray
    own: np.ndarray

    @property
    def n_own(self) -> int:
        return int(self.own.sum())

    def digest(self) -> str:
        """sha256 over both arrays."""
        return hashlib.sha256(self.tokens.tobytes() + np.packbits(self.own).tobytes()).hexdigest()


def write(
    model: LanguageModel,
    net: PreTrainedModel,
    folder: Path,
    *,
    batches: dict[str, int],
    made: Writing = Writing(),
    backbone: str,
    shard: tuple[int, int] = (0, 1),
    on_tokens: Callable[[int], None] = lambda n: None,
) -> None:
    """Write the batches of each split (`train`, `held_out`) that are not in `folder` yet.

    `net` is the network behind `model`, and `backbone` its digest. `shard` (i, n) writes every n-th batch from the
    i-th on, so that n processes share the work. Calls `on_tokens` with the tokens of each step.
    Raises InputError when the folder holds text made otherwise.
    """
    documents = dict(zip(SPLITS, corpus.split(corpus.documents(corpus.installed())), strict=True))
    facts = {
        "writing": asdict(made),
        "backbone": backbone,
        "model": model.name,
        "corpus": {split: corpus.corpus_digest(found) for split, found in documents.items()},
    }
    require_same(folder, facts)
    turns = Turns.of(model) if model.vocab.chat_template else None
    for split, wanted in batches.items():
        for number in range(shard[0], wanted, shard[1]):
            file = folder / f"{split}-{number:05d}.npz"
            if file.is_file():
                continue
            key = [made.seed, SPLITS.index(split), number]
            chosen = _batch_of_seeds(model, documents[split], made, turns, key)
            rows = _Stream(net, model.vocab.eog, turns, made, key).run(chosen, on_tokens)
            packed = io.BytesIO()
            np.savez_compressed(packed, tokens=rows.tokens, own=rows.own)
            store.write_atomic(file, packed.getvalue())


def read(folder: Path, split: str) -> Rows:
    """All rows of a split. Raises InputError where there are none, or one of the files is damaged."""
    parts = [open_file(file) for file in files(folder, split)]
    if len({part.tokens.shape[1] for part in parts}) > 1:
        raise InputError(f"the files of {split} in {folder} have rows of several lengths: remove the folder")
    return Rows(np.concatenate([p.tokens for p in parts]), np.concatenate([p.own for p in parts]))


def files(folder: Path, split: str = "*") -> list[Path]:
    """The files of a split, or of all, in order. Raises InputError where there are none."""
    found = sorted(folder.glob(f"{split}-*.npz"))
    if not found:
        raise InputError(f"no text in {folder}: write it first (--stage data)")
    return found


def digest(folder: Path) -> str:
    """Of the settings the text in `folder` was made with. Raises InputError where there is none."""
    return json_digest(facts(folder))


def facts(folder: Path) -> dict:
    """What the text was made with: settings, model, backbone and corpus digests. Raises InputError."""
    try:
        return json.loads((folder / FACTS_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"no {FACTS_FILE} in {folder} ({error}): write the text first (--stage data)") from error


def open_file(file: Path) -> Rows:
    """The rows of one file. Raises InputError where it is damaged."""
    try:
        with np.load(file, allow_pickle=False) as arrays:
            rows = Rows(arrays["tokens"], arrays["own"])
    except Exception as error:  # a damaged zip raises what it likes
        raise InputError(f"{file} cannot be read ({error}): remove it to have it written again") from error
    if rows.tokens.ndim != 2 or rows.tokens.dtype != np.int32 or rows.own.shape != rows.tokens.shape:
        raise InputError(f"{file} holds no rows of int32 tokens: remove it to have it written again")
    return rows


def require_same(folder: Path, made: dict) -> None:
    """Note in a new folder what its text is made with. Raises InputError where it holds text made otherwise."""
    if not (folder / FACTS_FILE).is_file():
        folder.mkdir(parents=True, exist_ok=True)
        store.write_atomic(folder / FACTS_FILE, json.dumps(made, indent=1).encode())
    elif facts(folder) != json.loads(json.dumps(made)):
        raise InputError(f"{folder} holds text that was made otherwise ({FACTS_FILE}): give another folder")


def _batch_of_seeds(
    model: LanguageModel, documents: Sequence[corpus.Document], made: Writing, turns: Turns | None, key: list[int]
) -> list[Seed]:
    """The seeds of one batch, the shortest first: the common part is read in one forward."""
    endless: Iterator[Seed] = seeds(model, documents, longest=made.longest_seed, seed=_number(key), turns=turns)
    return sorted((next(endless) for _ in range(made.batch_size)), key=lambda one: len(one.ids))


def _number(key: list[int]) -> int:
    """A seed that is as good as random and the same for the same key."""
    return int(np.random.default_rng(key).bit_generator.seed_seq.generate_state(1)[0])


class _Row:
    """Where one row stands: what it must write next, or whose turn it is and for how many tokens more."""

    def __init__(self, seed: Seed, made: Writing) -> None:
        self.forced = list(seed.ids)
        self.answering = seed.kind != ASKED
        self.left = made.longest_answer if self.answering else made.longest_request


class _Stream:
    """One batch of rows, written token by token."""

    def __init__(
        self, net: PreTrainedModel, ends: frozenset[int], turns: Turns | None, made: Writing, key: list[int]
    ) -> None:
        self._net, self._ends, self._turns, self._made = net, sorted(ends), turns, made
        self._generator = torch.Generator().manual_seed(_number([*key, 1]))

    @torch.inference_mode()
    def run(self, chosen: list[Seed], on_tokens: Callable[[int], None]) -> Rows:
        length = self._made.length
        rows = [_Row(seed, self._made) for seed in chosen]
        tokens = np.zeros((len(rows), length), dtype=np.int32)
        own = np.zeros((len(rows), length), dtype=bool)
        known = min(len(row.forced) for row in rows)
        for row, line in zip(rows, tokens, strict=True):
            line[:known] = row.forced[:known]
            row.forced = row.forced[known:]
        cache, logits = new_cache(self._net), None
        for at in range(known, length):
            fed = torch.from_numpy(tokens[:, :known] if logits is None else tokens[:, at - 1 : at]).long()
            logits = self._net(
                input_ids=fed.to(self._net.device), past_key_values=cache, use_cache=True, logits_to_keep=1
            ).logits[:, -1]
            self._write(rows, at, logits, tokens, own)
            on_tokens(len(rows))
        return Rows(tokens, own)

    def _write(self, rows: list[_Row], at: int, logits: torch.Tensor, tokens: np.ndarray, own: np.ndarray) -> None:
        """The token of every row at position `at`: forced, the best, or drawn."""
        best = logits.argmax(-1).tolist()
        asking = [i for i, row in enumerate(rows) if not row.forced and not row.answering]
        drawn = dict(zip(asking, self._draw(logits[asking]), strict=True)) if asking else {}
        for i, row in enumerate(rows):
            if row.forced:
                tokens[i, at] = row.forced.pop(0)
                continue
            own[i, at] = row.answering
            tokens[i, at] = best[i] if row.answering else drawn[i]
            self._turn(row, tokens[i, at] in self._ends)

    def _draw(self, logits: torch.Tensor) -> list[int]:
        return torch.multinomial((logits.float() / ASKING_TEMPERATURE).softmax(-1).cpu(), 1, generator=self._generator)[
            :, 0
        ].tolist()

    def _turn(self, row: _Row, ended: bool) -> None:
        """Count a token; hand over where the answer or the request has ended."""
        row.left -= 1
        if (not ended and row.left > 0) or self._turns is None:
            return
        after = self._turns.to_request if row.answering else self._turns.to_answer
        # the end token that was just written is the first of what the template puts behind a message
        row.forced = list(after[1:] if ended and after and after[0] in self._ends else after)
        row.answering = not row.answering
        row.left = self._made.longest_answer if row.answering else self._made.longest_request
